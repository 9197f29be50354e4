"""Runs an engine in a thread of its own: takes submissions and aborts from anywhere, delivers what each step brought.

Knows nothing about gRPC, Ray or asyncio.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from services.backend import RequestFailed
from services.coordinator.timeline import RoundTimes, Timeline
from smc.engine.admission import QueueFull
from smc.engine.engine import Engine
from smc.engine.request import Output, Request
from smc.engine.stats import EngineStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """What one turn of the loop brought."""

    outputs: list[Output] = field(default_factory=list)
    refusals: dict[str, Exception] = field(default_factory=dict)
    """Why a submission was not taken (ValueError, QueueFull, RequestFailed), by request id."""
    stats: EngineStats | None = None
    times: RoundTimes | None = None
    """Where the time of the turn's rounds went; None where that is not known or no model worked."""


class EngineLoop:
    """One engine, one thread. `deliver` is called in that thread after every turn that brought something."""

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[Step], None],
        *,
        timeline: Timeline | None = None,
        when_idle: Callable[[], None] | None = None,
        idle_period: float | None = None,
    ) -> None:
        """`when_idle` is called every `idle_period` seconds while there is nothing to do; what it raises ends the loop.

        Statistics are delivered then too.
        """
        self._engine, self._deliver = engine, deliver
        self._timeline, self._when_idle, self._idle_period = timeline, when_idle, idle_period
        self._inbox: queue.SimpleQueue[Request | str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.failure: Exception | None = None
        """What ended the loop, if anything but `stop` did."""
        self.ended = threading.Event()
        self._turned = time.monotonic()

    @property
    def silence(self) -> float:
        """Seconds since the engine's thread last began or ended a turn. It does so in each step, and in each idle period."""
        return time.monotonic() - self._turned

    def stack(self) -> str:
        """What the engine's thread is at."""
        frame = sys._current_frames().get(self._thread.ident)
        return "".join(traceback.format_stack(frame)) if frame is not None else "the thread has ended"

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Hand in a request; a refusal comes with the next step."""
        self._inbox.put(request)

    def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored. Its last Output says `cancelled`."""
        self._inbox.put(request_id)

    def stop(self, timeout: float = 10.0) -> None:
        """End the loop after the current step. What still runs is dropped."""
        self._inbox.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:  # whatever it is, requests must not wait for ever
            logger.exception("the engine has stopped")
            self.failure = error
        finally:
            self.ended.set()

    def _turn(self) -> bool:
        """Take what has come in, then advance the engine once. An idle engine waits for something to come. False: stop."""
        engine, refusals = self._engine, {}
        wait = engine.idle
        while wait or not self._inbox.empty():
            self._turned = time.monotonic()
            try:
                item, wait = self._inbox.get(timeout=self._idle_period), False
            except queue.Empty:
                self._when_idle()
                self._deliver(Step(stats=engine.take_stats()))
                continue
            if item is None:
                return False
            self._take(item, refusals)
        self._turned = time.monotonic()
        begin = time.monotonic_ns()
        outputs = engine.step()
        times = self._timeline.end_step(begin, time.monotonic_ns()) if self._timeline else None
        self._deliver(Step(outputs, refusals, engine.take_stats(), times))
        return True

    def _take(self, item: Request | str, refusals: dict[str, Exception]) -> None:
        if isinstance(item, str):
            self._engine.abort(item)
            return
        try:
            self._engine.submit(item)
        except (ValueError, QueueFull) as error:
            refusals[item.request_id] = error
        except Exception as error:  # of this request alone, as long as the engine can let go of it
            logger.exception("request %s could not be taken in", item.request_id)
            self._engine.abort(item.request_id)
            refusals[item.request_id] = RequestFailed(f"the request could not be taken in ({type(error).__name__}: {error})")
