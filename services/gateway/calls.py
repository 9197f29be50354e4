"""The calls in flight, and the record of each answer: what it reports to the metrics, to its trace and to the log.

Knows nothing about the messages of an API, nor about decoding.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.backend import RequestAborted, StartProgress, Unavailable
from services.errors import Status
from services.gateway.tracing import Trace, Tracing
from services.metrics import REJECTIONS, Metrics
from smc.api.request import Answer, Request, Times
from smc.scheduler.admission import DuplicateRequest

logger = logging.getLogger("smcserve.requests")
MAX_FIELD = 64
"""Characters of a field's name in the log."""
_FIELD = re.compile(r"([a-z]+(?:_[a-z]+)+|[a-z]+(?==))")
"""Name of a field at the beginning of an error: it has an underscore, or its value follows."""
Key = tuple[str, str]
"""The caller (`services.security.caller_of`), and the id of its request."""


class Interrupted(Unavailable):
    """The service stopped before the answer was complete."""


@dataclass
class _RunningCall:
    scope: asyncio.Timeout
    """The call ends when this timeout expires."""
    aborted: bool = False


class Calls:
    """The Generate calls in flight, from their arrival on. Use it in one asyncio loop."""

    def __init__(self, metrics: Metrics, model: str, tracing: Tracing | None = None) -> None:
        """`model`: name under which the pair is served."""
        self.metrics, self._model, self._tracing = metrics, model, tracing
        self.closed: str | None = "the service is starting; try again later"
        """Why calls are refused; None: calls are accepted."""
        self.starting: StartProgress | None = None
        """Progress of the workers' start, if calls are refused because of it."""
        self._calls: dict[Key, _RunningCall] = {}
        self._tasks: set[asyncio.Task] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def arrives(
        self, path: str, headers: Iterable[tuple[str, str | bytes]], http_method: str | None = None
    ) -> CallRecord:
        """Return the record of a call that has arrived. `http_method`: given if it came over HTTP."""
        name = path if http_method is None else f"{http_method} {path}"
        trace = self._tracing.begin(name, headers) if self._tracing else None
        if trace is not None and http_method is not None:
            trace.is_http(http_method, path)
        record = CallRecord(self.metrics, trace)
        record.arrives_at(path if path.startswith("/") else f"/{path}", self._model)
        return record

    @asynccontextmanager
    async def enter(self, key: Key) -> AsyncIterator[None]:
        """Context manager for one call. On entry it raises Unavailable if calls are refused, and DuplicateRequest if
        the key is in use; later it raises Interrupted if the service stops, and RequestAborted if the call is
        aborted."""
        if self.closed is not None:
            raise Unavailable(self.closed)
        if key in self._calls:
            raise DuplicateRequest(f"request_id={key[1]!r} is already in use; it must be unique among running requests")
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        call = self._calls[key] = _RunningCall(asyncio.timeout(None))
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
        """Abort a call at whatever stage it is. Returns False if no call has this key."""
        call = self._calls.get(key)
        if call is None:
            return False
        call.aborted = True
        _end(call)
        return True

    async def ended(self, timeout: float) -> bool:
        """Wait until no call is in flight, at most `timeout` seconds. Returns False if some still are."""
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def interrupt(self) -> None:
        """End every call now: each raises Interrupted."""
        for call in self._calls.values():
            _end(call)

    async def delivered(self, timeout: float) -> None:
        """Wait until the callers that read have been sent the end of their calls, at most `timeout` seconds."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)


def _end(call: _RunningCall) -> None:
    if not call.scope.expired():
        call.scope.reschedule(asyncio.get_running_loop().time())


class CallRecord:
    """Reports one answer to the metrics, from the arrival of its call to its end, and at the end to its trace and to
    the log. The log entry is a line of JSON, without text of users unless the service logs texts."""

    def __init__(self, metrics: Metrics, trace: Trace | None = None, arrived: float | None = None) -> None:
        """`arrived`: time of arrival on the monotonic clock; None: now."""
        self._metrics, self._trace = metrics, trace
        self._arrived = time.monotonic() if arrived is None else arrived
        self._last: float | None = None
        self._tokens = 0
        self._follows_target = True
        self._fields: dict[str, str | int | float] = {} if trace is None else {"trace_id": trace.trace_id}
        self._texts: dict[str, str | list[int]] = {}
        """Further fields of the log entry, which the trace does not get."""
        self._ended = False

    def another(self) -> CallRecord:
        """Return the record of a further answer to the same call."""
        record = CallRecord(self._metrics, self._trace and self._trace.another(), self._arrived)
        record._fields = dict(self._fields)
        return record

    def arrives_at(self, path: str, model: str) -> None:
        self._fields |= {"path": path, "model": model}

    def is_of(self, request_id: str) -> None:
        self._fields["request_id"] = request_id

    def asks(self, request: Request, prompt: str | None = None) -> None:
        """Record the request of this answer. `prompt`: the prompt's text for the log; None: texts are not logged."""
        if prompt is not None:
            # The text lacks the template's special tokens.
            self._texts = {"prompt": prompt, "prompt_ids": list(request.prompt)}
        self._follows_target = request.params.follows_target
        self._fields |= {
            "method": request.params.method.value,
            "rows": request.params.rows,
            "prompt_tokens": len(request.prompt),
        }

    @property
    def seconds(self) -> float:
        """Seconds since the arrival of the call."""
        return time.monotonic() - self._arrived

    def count(self, prompt_tokens: int, new_tokens: int) -> None:
        """Record new tokens, which are sent at once."""
        now = time.monotonic()
        self._tokens += new_tokens
        if self._last is None:
            self._metrics.prompt_started(prompt_tokens, now - self._arrived)
            self._fields["first_token_seconds"] = round(now - self._arrived, 6)
        elif new_tokens:
            self._metrics.tokens_followed(new_tokens, now - self._last)
        self._last = now
        self._metrics.tokens_generated(new_tokens)

    def answered(self, answer: Answer) -> None:
        if self._texts:
            self._texts["answer"] = answer.text
        self._metrics.request_answered(answer, self.seconds, self._follows_target)
        times = {f"{part}_seconds": round(seconds, 6) for part, seconds in vars(answer.times).items()}
        self._end(
            "OK",
            answer.times,
            finish_reason=answer.finish_reason.value,
            cached_tokens=answer.cached_tokens,
            rounds=answer.statistics.rounds,
            **times,
        )

    def failed(self, status: Status, error: Exception, http_status: int | None = None) -> None:
        """Record that the answer failed with this status because of this error, unless it has ended already. A failure
        before the first token counts as a rejection, if its cause is one of `REJECTIONS`. `http_status`: sent to the
        caller, if the call came over HTTP."""
        if self._ended:
            return
        self._metrics.request_failed(status.code.name)
        field = getattr(error, "param", None) or _field_of(error)
        named = {} if field is None else {"field": field[:MAX_FIELD]}
        self._end(status.code.name, None, http_status, cause=status.cause, **named)
        if isinstance(error, Interrupted):
            self._metrics.request_cancelled("drain")
        elif status.cause in ("abort", "slow_reader"):
            self._metrics.request_cancelled(status.cause)
        elif status.cause in REJECTIONS and self._last is None:
            self._metrics.request_rejected(status.code.name, status.cause)

    def left(self, deadline: bool) -> None:
        """Record that the caller left, or that its deadline passed, unless the answer has ended already."""
        if self._ended:
            return
        code, by = ("DEADLINE_EXCEEDED", "deadline") if deadline else ("CANCELLED", "client")
        self._metrics.request_failed(code)
        self._metrics.request_cancelled(by)
        self._end(code, None, 504 if deadline else 499, cause=by)

    def _end(
        self, status: str, times: Times | None = None, http_status: int | None = 200, **more: str | int | float
    ) -> None:
        self._ended = True
        fields = self._fields | {"tokens": self._tokens, "seconds": round(self.seconds, 6)} | more
        line = fields | {"status": status} | self._texts
        logger.info("%s", json.dumps(line), extra={"fields": line})
        if self._trace is not None:
            self._trace.end(status, fields, times, http_status)


def _field_of(error: Exception) -> str | None:
    """Return the field that the message of a caller's error begins with; None if it begins otherwise."""
    found = _FIELD.match(str(error)) if isinstance(error, ValueError) else None
    return found[1] if found else None
