"""Calls in flight: who is let in, ending them all, and what each one counts. Knows nothing about gRPC or decoding."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from services.backend import RequestAborted, Unavailable
from services.errors import Status
from services.gateway.tracing import Trace, Tracing
from services.metrics.metrics import Metrics
from services.metrics.requests import REJECTIONS
from smc.api.outputs import Answer, Times
from smc.api.request import Request
from smc.scheduler.admission import DuplicateRequest

logger = logging.getLogger("smcserve.requests")

Key = tuple[str, str]
"""Who calls (`services.gateway.interceptors.caller_of`), and the id that the caller gave."""


class Interrupted(Unavailable):
    """The service stopped before the answer was complete."""


@dataclass
class _Call:
    scope: asyncio.Timeout
    """Its end ends the call."""
    aborted: bool = False


class Calls:
    """The Generate calls in flight, from their arrival on. Use it in one asyncio loop."""

    def __init__(self, metrics: Metrics, tracing: Tracing | None = None) -> None:
        self._metrics, self._tracing = metrics, tracing
        self.closed: str | None = "the service is starting; try again later"
        """Why nobody is let in; None: everybody is."""
        self._calls: dict[Key, _Call] = {}
        self._tasks: set[asyncio.Task] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def arrives(self, name: str, headers: Iterable[tuple[str, str | bytes]]) -> Tally:
        """A call of this name has arrived."""
        return Tally(self._metrics, self._tracing.begin(name, headers) if self._tracing else None)

    @asynccontextmanager
    async def enter(self, key: Key) -> AsyncIterator[None]:
        """Around one call. Raises Unavailable if nobody is let in, DuplicateRequest for a key in use; Interrupted when
        the call has to end, RequestAborted when it is aborted."""
        if self.closed is not None:
            raise Unavailable(self.closed)
        if key in self._calls:
            raise DuplicateRequest(f"request_id={key[1]!r} is already in use; it must be unique among running requests")
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        call = self._calls[key] = _Call(asyncio.timeout(None))
        self._idle.clear()
        try:
            async with call.scope:
                yield
        except TimeoutError as error:
            if not call.scope.expired():
                raise
            if call.aborted:
                raise RequestAborted("the request was aborted") from error
            raise Interrupted("the service stopped before the answer was complete; try again later") from error
        finally:
            del self._calls[key]
            if not self._calls:
                self._idle.set()

    def abort(self, key: Key) -> bool:
        """End a call, whatever it is at. False if there is none of that key."""
        call = self._calls.get(key)
        if call is None:
            return False
        call.aborted = True
        _end(call)
        return True

    async def ended(self, timeout: float) -> bool:
        """Wait until nothing is being decoded. False if it took too long."""
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def interrupt(self) -> None:
        """End every call now; each raises Interrupted where it stands."""
        for call in self._calls.values():
            _end(call)

    async def delivered(self, timeout: float) -> None:
        """Wait until callers have been sent how their calls ended, as far as they read it."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)


def _end(call: _Call) -> None:
    if not call.scope.expired():
        call.scope.reschedule(asyncio.get_running_loop().time())


class Tally:
    """What one answer tells the metrics, from its call's arrival to its end, and then its trace and the log: a line of
    JSON, with nobody's text."""

    def __init__(self, metrics: Metrics, trace: Trace | None = None, arrived: float | None = None) -> None:
        """`arrived`: of the monotonic clock; None: now."""
        self._metrics, self._trace = metrics, trace
        self._arrived = time.monotonic() if arrived is None else arrived
        self._last: float | None = None
        self._tokens = 0
        self._said: dict[str, str | int | float] = {} if trace is None else {"trace_id": trace.trace_id}
        self._ended = False

    def another(self) -> Tally:
        """Of one more answer to the same call."""
        tally = Tally(self._metrics, self._trace and self._trace.another(), self._arrived)
        tally._said = dict(self._said)
        return tally

    def is_of(self, request_id: str) -> None:
        self._said["request_id"] = request_id

    def asks(self, request: Request) -> None:
        """Its settings and its prompt have been taken in."""
        self._said |= {
            "method": request.params.method.value,
            "rows": request.params.rows,
            "prompt_tokens": len(request.prompt),
        }

    @property
    def seconds(self) -> float:
        """Since its arrival."""
        return time.monotonic() - self._arrived

    def count(self, prompt_tokens: int, new_tokens: int) -> None:
        """Tokens have come, to be sent at once."""
        now = time.monotonic()
        self._tokens += new_tokens
        if self._last is None:
            self._metrics.prompt_started(prompt_tokens, now - self._arrived)
            self._said["first_token_seconds"] = round(now - self._arrived, 6)
        elif new_tokens:
            self._metrics.tokens_followed(new_tokens, now - self._last)
        self._last = now
        self._metrics.tokens_generated(new_tokens)

    def answered(self, answer: Answer) -> None:
        ran, finish_reason = answer.statistics, answer.finish_reason.value
        self._metrics.request_answered(answer, self.seconds)
        times = {f"{part}_seconds": round(seconds, 6) for part, seconds in vars(answer.times).items()}
        said: dict[str, Any] = {
            "finish_reason": finish_reason,
            "cached_tokens": answer.cached_tokens,
            "rounds": ran.rounds,
        }
        self._end("OK", answer.times, **said, **times)

    def failed(self, status: Status, error: Exception) -> None:
        """It ended with this status, because of this error, if it had not ended. Without a single token it was a
        rejection, if it can be one."""
        if self._ended:
            return
        self._metrics.request_failed(status.code.name)
        self._end(status.code.name, cause=status.cause)
        if isinstance(error, Interrupted):
            self._metrics.request_cancelled("drain")
        elif status.cause in ("abort", "slow_reader"):
            self._metrics.request_cancelled(status.cause)
        elif status.cause in REJECTIONS and self._last is None:
            self._metrics.request_rejected(status.code.name, status.cause)

    def left(self, deadline: bool) -> None:
        """The caller is gone, or its deadline has passed; if it had not ended."""
        if self._ended:
            return
        code, by = ("DEADLINE_EXCEEDED", "deadline") if deadline else ("CANCELLED", "client")
        self._metrics.request_failed(code)
        self._metrics.request_cancelled(by)
        self._end(code, cause=by)

    def _end(self, status: str, times: Times | None = None, **more: str | int | float) -> None:
        self._ended = True
        said = self._said | {"tokens": self._tokens, "seconds": round(self.seconds, 6)} | more
        logger.info("%s", json.dumps(said | {"status": status}))
        if self._trace is not None:
            self._trace.end(status, said, times)
