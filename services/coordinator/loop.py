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
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from services.backend import RequestFailed, Unavailable
from services.step import Step
from smc.api.outputs import Output
from smc.api.request import Request
from smc.executor.messages import ModelLost
from smc.scheduler.admission import NoDraft, QueueFull
from smc.scheduler.engine import Engine
from smc.scheduler.timeline import RoundTimes, Timeline

logger = logging.getLogger(__name__)


Result = TypeVar("Result")


@dataclass(frozen=True)
class _Work(Generic[Result]):
    """To be done in the engine's thread."""

    work: Callable[[], Result]
    done: Future[Result]

    def do(self) -> None:
        try:
            self.done.set_result(self.work())
        except Exception as error:  # of whoever asked
            self.done.set_exception(error)


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
        on_draft_lost: Callable[[str], list[str]] | None = None,
    ) -> None:
        """`when_idle` is called every `idle_period` seconds while there is nothing to do, `on_draft_lost` when the
        draft is lost, with the reason; it returns the ids of requests that end then. What either raises ends the loop.

        Statistics are delivered in idle periods, too.
        """
        self._engine, self._deliver = engine, deliver
        self._timeline, self._idle_period, self._on_draft_lost = timeline, idle_period, on_draft_lost
        self._when_idle = when_idle or (lambda: None)
        self._inbox: queue.SimpleQueue[Request | str | _Work | None] = queue.SimpleQueue()
        self._refusals: dict[str, Exception] = {}
        """That have not been delivered."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.failure: Exception | None = None
        """What ended the loop, if anything but `stop` did."""
        self.ended = threading.Event()
        self._turned = time.monotonic()

    @property
    def silence(self) -> float:
        """Seconds since the engine's thread last began or ended a turn. It does so in each step, and in each idle
        period."""
        return time.monotonic() - self._turned

    def stack(self) -> str:
        """What the engine's thread is at."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else "the thread has ended"

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Hand in a request; a refusal comes with the next step."""
        self._inbox.put(request)

    def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored. Its last Output says `cancelled`."""
        self._inbox.put(request_id)

    def do(self, work: Callable[[], Result]) -> Future[Result]:
        """Let the engine's thread do it, between two steps."""
        item = _Work(work, Future())
        self._inbox.put(item)
        return item.done

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
        """Take what has come in, then advance the engine once. An idle engine waits for something to come. False:
        stop."""
        engine = self._engine
        wait = engine.idle
        while wait or not self._inbox.empty():
            self._turned = time.monotonic()
            try:
                item, wait = self._inbox.get(timeout=self._idle_period), False
            except queue.Empty:
                self._outliving_draft(self._when_idle)
                self._deliver_step([], None)
                continue
            if item is None:
                return False
            self._take(item)
        self._turned = time.monotonic()
        begin = time.monotonic_ns()
        outputs = self._outliving_draft(engine.step) or []
        times = self._timeline.end_step(begin, time.monotonic_ns()) if self._timeline else None
        self._deliver_step(outputs, times)
        return True

    def _deliver_step(self, outputs: list[Output], times: RoundTimes | None) -> None:
        refusals, self._refusals = self._refusals, {}
        step = Step(outputs, refusals, self._engine.take_stats(), times)
        self._outliving_draft(lambda: self._deliver(step))

    def _outliving_draft(self, work: Callable[[], Any]) -> Any:
        """What it returns, or None if the draft was lost meanwhile: requests that need it have ended, the others go
        on."""
        try:
            return work()
        except ModelLost as lost:
            self.detach_draft(str(lost))
            return None

    def detach_draft(self, why: str) -> None:
        """In the engine's thread."""
        logger.warning("%s; the target goes on alone", why)
        self._turned = time.monotonic()
        assert self._on_draft_lost is not None, "only a draft that may be lost raises SideLost"
        error = Unavailable("the draft's workers were lost, and start again; try again later")
        self._refusals |= dict.fromkeys(self._on_draft_lost(why), error)

    def _take(self, item: Request | str | _Work) -> None:
        if isinstance(item, _Work):
            item.do()
        elif isinstance(item, str):
            self._engine.abort(item)
        else:
            self._submit(item)

    def _submit(self, item: Request) -> None:
        refusals = self._refusals
        try:
            self._engine.submit(item)
        except (ValueError, QueueFull) as error:
            refusals[item.request_id] = error
        except NoDraft as error:
            refusals[item.request_id] = Unavailable(str(error))
        except Exception as error:  # of this request alone, as long as the engine can let go of it
            logger.exception("request %s could not be taken in", item.request_id)
            self._engine.abort(item.request_id)
            refusals[item.request_id] = RequestFailed(
                f"the request could not be taken in ({type(error).__name__}: {error})"
            )
