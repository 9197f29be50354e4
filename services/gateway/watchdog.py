"""Sees when an asyncio loop stands still: says what holds it, and for how long it did. Knows nothing about what the
loop is for."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable

BEAT_SECONDS = 0.1
PAUSE_SECONDS = 0.25
"""From which on a pause counts: whoever is served notices it."""
LOG_SECONDS = 1.0
"""From which on the log says what the loop is at."""

logger = logging.getLogger(__name__)


class Watchdog:
    """Made in the loop that it watches, by a thread beside it."""

    def __init__(self, on_pause: Callable[[float], None]) -> None:
        """`on_pause` is told of each pause, in seconds, when it is over."""
        self._loop, self._on_pause = asyncio.get_running_loop(), on_pause
        self._thread_id = threading.get_ident()
        self._last = time.monotonic()
        self._ended = threading.Event()
        self._next = self._loop.call_soon(self._beat)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._next.cancel()
        self._ended.set()

    def _beat(self) -> None:
        now = time.monotonic()
        if (pause := now - self._last - BEAT_SECONDS) > PAUSE_SECONDS:
            self._on_pause(pause)
        self._last = now
        self._next = self._loop.call_later(BEAT_SECONDS, self._beat)

    def _watch(self) -> None:
        said = 0.0
        while not self._ended.wait(BEAT_SECONDS):
            last = self._last
            if time.monotonic() - last > LOG_SECONDS and last != said:
                said = last
                stack = "".join(traceback.format_stack(sys._current_frames().get(self._thread_id)))
                logger.warning("the loop has answered nobody for more than %g s; it is at:\n%s", LOG_SECONDS, stack)
