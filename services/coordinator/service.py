"""The coordinator's gRPC server, and the thread that runs its engine. Requests and aborts come in on one stream from
the gateway, and the result of every engine step goes out on it. Knows nothing about Ray."""

from __future__ import annotations

import logging
import math
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import grpc

from services.backend import DraftUnavailable, RequestFailed, Unavailable
from services.coordinator.messages import REQUESTS, SERVICE, STEPS, EngineStep, RefusedRequest, Submission
from services.link.streams import is_proven, stream_server
from smc.api.request import Answer, FinishReason, Output, Request, Statistics
from smc.executor.messages import ModelLost
from smc.scheduler.admission import NoDraft, QueueFull
from smc.scheduler.engine import Engine
from smc.scheduler.stats import RoundTimes, Timeline

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
MAX_BEHIND = 10_000
"""Maximum number of steps that wait for the gateway, equal to minutes. A gateway that is further behind has stopped."""
SUBMIT_SECONDS = 0.01
"""Time in which a turn of the loop submits requests, at least one. Few running requests wait for it, many only if it
lasts longer than their rounds. One takes up to a few milliseconds."""


class EngineLoop:
    """Runs one engine in one thread. `deliver` is called in that thread after every step and in every idle period."""

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[EngineStep], None],
        *,
        timeline: Timeline | None = None,
        when_idle: Callable[[], None] | None = None,
        idle_period: float | None = None,
        on_draft_lost: Callable[[str], list[str]] | None = None,
    ) -> None:
        """`when_idle` is called every `idle_period` seconds while there is nothing to do. `on_draft_lost` is called
        with the reason when the draft is lost, and returns the ids of requests that end then. An error raised by
        either ends the loop.

        Statistics are delivered in idle periods, too.
        """
        self._engine, self._deliver = engine, deliver
        self._timeline, self._idle_period, self._on_draft_lost = timeline, idle_period, on_draft_lost
        self._when_idle = when_idle or (lambda: None)
        self._inbox: queue.SimpleQueue[Request | str | Callable[[], None] | None] = queue.SimpleQueue()
        """Requests to submit, ids of requests to abort, functions to call; None ends the loop."""
        self._backlog: dict[str, tuple[Request, float]] = {}
        """Requests that have been taken from the inbox and wait to be submitted, by id; with the time since when."""
        self._unsubmitted: list[Output] = []
        """Ends, yet to be delivered, of requests that were aborted before they were submitted."""
        self._refusals: dict[str, Exception] = {}
        """Refusals that have not been delivered, by request id."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.failure: Exception | None = None
        """The error that ended the loop; None if `stop` did."""
        self.ended = threading.Event()
        self._turned = time.monotonic()

    @property
    def silence(self) -> float:
        """Seconds since the engine's thread last began or ended a turn. It does so in each step, and in each idle
        period."""
        return time.monotonic() - self._turned

    def stack(self) -> str:
        """Return the stack trace of the engine's thread."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else "the thread has ended"

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Submit a request. A refusal is delivered with the next step."""
        self._inbox.put(request)

    def abort(self, request_id: str) -> None:
        """Abort a request; unknown ids are ignored. The finish reason of its last Output is `cancelled`."""
        self._inbox.put(request_id)

    def do(self, work: Callable[[], Result]) -> Future[Result]:
        """Let the engine's thread call `work` between two steps."""
        done: Future[Result] = Future()

        def call() -> None:
            try:
                done.set_result(work())
            except Exception as error:  # raised to the caller, who awaits the result
                done.set_exception(error)

        self._inbox.put(call)
        return done

    def stop(self, timeout: float = 10.0) -> None:
        """End the loop after the current step. Requests that still run are dropped."""
        self._inbox.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:  # requests must not wait for ever, whatever the error
            logger.exception("the engine has stopped")
            self.failure = error
        finally:
            self.ended.set()

    def _turn(self) -> bool:
        """Take everything from the inbox, then advance the engine once; meanwhile submit requests for `SUBMIT_SECONDS`.
        If there is nothing to do, first wait for a request. Return False if the loop is to stop."""
        engine = self._engine
        wait = engine.idle and not self._backlog
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
            if isinstance(item, Request):
                self._backlog[item.request_id] = item, time.monotonic()
            elif isinstance(item, str):
                self._abort(item)
            else:
                item()
        self._turned = time.monotonic()
        begin = time.monotonic_ns()
        outputs = self._outliving_draft(lambda: engine.step(self._submit_some)) or []
        times = self._timeline.end_step(begin, time.monotonic_ns()) if self._timeline else None
        unsubmitted, self._unsubmitted = self._unsubmitted, []
        self._deliver_step([*outputs, *unsubmitted], times)
        return True

    def _deliver_step(self, outputs: list[Output], times: RoundTimes | None) -> None:
        refusals, self._refusals = self._refusals, {}
        refused = tuple(RefusedRequest.of(request_id, error) for request_id, error in refusals.items())
        stats = self._engine.take_stats()
        stats.queued += len(self._backlog)
        step = EngineStep(outputs, refused, stats, times)
        self._outliving_draft(lambda: self._deliver(step))

    def _outliving_draft(self, work: Callable[[], Any]) -> Any:
        """Return the result of `work`, or None if the draft was lost meanwhile. Then requests that need the draft have
        ended; the others go on."""
        try:
            return work()
        except ModelLost as lost:
            self.detach_draft(str(lost))
            return None

    def detach_draft(self, why: str) -> None:
        """Refuse the requests that end with the lost draft. Call it in the engine's thread."""
        logger.warning("%s; the target decodes alone", why)
        self._turned = time.monotonic()
        assert self._on_draft_lost is not None, "only a draft that may be lost raises ModelLost"
        error = Unavailable("the draft's workers were lost and are starting again; try again later")
        self._refusals |= dict.fromkeys(self._on_draft_lost(why), error)

    def _abort(self, request_id: str) -> None:
        if request_id not in self._backlog:
            self._engine.abort(request_id)
            return
        request, _ = self._backlog.pop(request_id)
        # Its caller has left, so that nobody reads the seed.
        seed, statistics = request.params.seed or 0, Statistics(request.params.rows)
        answer = Answer(
            request_id, (), "", FinishReason.CANCELLED, None, seed, len(request.prompt), statistics, math.nan
        )
        self._unsubmitted.append(Output(request_id, (), "", answer))

    def _submit_some(self) -> None:
        """Submit requests for a limited time: those whose time has passed, which then end, and others in the order in
        which the queue admits them, by priority, then as they came."""
        begin = time.monotonic()

        def turn(kept: tuple[Request, float]) -> tuple[bool, int]:
            (request, since), budget = kept, kept[0].params.time_budget
            return budget is None or request.waited + begin - since < budget, request.priority

        for request, since in sorted(self._backlog.values(), key=turn):
            del self._backlog[request.request_id]
            self._turned = time.monotonic()
            self._submit(replace(request, waited=request.waited + self._turned - since))
            if time.monotonic() - begin >= SUBMIT_SECONDS:
                break

    def _submit(self, item: Request) -> None:
        refusals = self._refusals
        try:
            self._engine.submit(item)
        except (ValueError, QueueFull) as error:
            refusals[item.request_id] = error
        except NoDraft as error:
            refusals[item.request_id] = DraftUnavailable(str(error))
        except Exception as error:  # only this request fails, if the engine can release it
            logger.exception("request %s could not be submitted", item.request_id)
            self._engine.drop(item.request_id)
            refusals[item.request_id] = RequestFailed(
                f"the request could not be submitted ({type(error).__name__}: {error})"
            )


class CoordinatorServer:
    """Passes submissions to the engine's loop, and the engine's steps to the gateway."""

    def __init__(self, host: str, secret: str, loop: EngineLoop) -> None:
        """Serve at any free port of `host`."""
        self._secret, self._loop = secret, loop
        self._outbox: queue.SimpleQueue[EngineStep | None] | None = None
        self._turn = threading.Lock()
        self._server, self.address = stream_server(host, 4, SERVICE, {"Attach": self.Attach})
        self._server.start()

    def deliver(self, step: EngineStep) -> None:
        """Queue the step for the gateway, or drop it if no gateway is attached. Called in the engine's thread."""
        if (outbox := self._outbox) is None:
            return
        outbox.put(step)
        if outbox.qsize() > MAX_BEHIND:
            logger.error("the gateway is %d steps behind; its stream is closed", MAX_BEHIND)
            self._outbox = None
            outbox.put(None)

    def Attach(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        if not is_proven(context.invocation_metadata(), self._secret, self.address):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "this coordinator belongs to another worker group")
        if not self._turn.acquire(blocking=False):
            context.abort(grpc.StatusCode.ALREADY_EXISTS, "a gateway is attached already")
        outbox = self._outbox = queue.SimpleQueue()
        context.send_initial_metadata(())  # from now on updates reach the gateway
        submissions = _Submissions()
        threading.Thread(target=self._take_all, args=(messages, outbox, submissions), daemon=True).start()
        try:
            for step in iter(outbox.get, None):
                submissions.end(step)
                yield STEPS.encode(step.to_send())
        finally:
            self._outbox = None
            self._turn.release()

    def close(self) -> None:
        if (outbox := self._outbox) is not None:
            outbox.put(None)
        self._server.stop(grace=0.5)

    def _take_all(self, messages: Iterator[bytes], outbox: queue.SimpleQueue, submissions: _Submissions) -> None:
        """Pass on all submissions and aborts of the gateway. When its stream ends, abort its remaining requests."""
        try:
            for command in map(REQUESTS.decode, messages):
                if isinstance(command, Submission):
                    submissions.add(command.request.request_id)
                    self._loop.submit(command.request)
                else:
                    self._loop.abort(command.request_id)
        except Exception as error:  # gRPC raises a bare Exception if the other side is gone
            logger.debug("the gateway is gone: %s", error)
        for request_id in submissions.take():
            self._loop.abort(request_id)
        outbox.put(None)


class _Submissions:
    """Requests that have not ended yet. One thread adds requests, another removes those that have ended."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._guard = threading.Lock()

    def add(self, request_id: str) -> None:
        with self._guard:
            self._ids.add(request_id)

    def end(self, step: EngineStep) -> None:
        with self._guard:
            ended = (output.request_id for output in step.outputs if output.answer is not None)
            self._ids.difference_update(ended, (refusal.request_id for refusal in step.refusals))

    def take(self) -> set[str]:
        """Return all ids, and forget them."""
        with self._guard:
            ids, self._ids = self._ids, set()
        return ids
