"""Sends a leader's responses in the order of its commands, each when what it tells of has come from the device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from services.link.base import LeaderEnd
from services.pb import particles_pb2 as pb

CLOSE_SECONDS = 5.0


class Answers:
    """`waits`: what responses tell of may take a while; a thread waits for it, so that the next command can be carried out."""

    def __init__(self, end: LeaderEnd, *, waits: bool) -> None:
        self._end = end
        self._queue: queue.SimpleQueue[Callable[[], pb.WorkResponse] | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True) if waits else None
        if self._thread is not None:
            self._thread.start()

    def put(self, respond: Callable[[], pb.WorkResponse]) -> None:
        """Send what `respond` returns, after all that was put before it. Raises what an earlier one ended in."""
        if self._failure is not None:
            raise self._failure
        if self._thread is None:
            self._end.send(respond())
        else:
            self._queue.put(respond)

    def close(self) -> None:
        """After everything has been sent, or has taken too long."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        for respond in iter(self._queue.get, None):
            try:
                self._end.send(respond())
            except Exception as error:  # of the device or of the link: the next command meets it
                self._failure = error
                return
