"""Handles a request of any API from its arrival to its last message: admission, decoding, metrics, trace and log. Also
defines the interface between the gateway and its front ends, which use nothing else of the gateway.

Knows nothing about the messages of an API.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from services.backend import Backend, RequestAborted, ServingPair, StartProgress, Unavailable
from services.errors import SlowReader, Status, status_of
from services.gateway.config import GatewayConfig
from services.gateway.limits import CallLimit, ReceiveLimit
from services.gateway.tracing import Trace, Tracing
from services.metrics import REJECTIONS, Metrics
from services.prompts import PromptEncoder
from services.security import TokenFile, caller_of
from smc.api.constraint import Constraint, ConstraintFailed
from smc.api.request import Answer, Output, Request, Times
from smc.api.sampling_params import SamplingParams
from smc.scheduler.admission import DuplicateRequest, check_waiting
from smc.scheduler.stats import EngineStats
from smc.types import ModelRole, Numerics

if TYPE_CHECKING:
    from smc.constraints import Compiler

logger = logging.getLogger("smcserve.requests")
MAX_ID_SIZE = 256
MAX_FIELD = 64
"""Characters of a field's name in the log."""
_FIELD = re.compile(r"([a-z]+(?:_[a-z]+)+|[a-z]+(?==))")
"""Name of a field at the beginning of an error: it has an underscore, or its value follows."""
DEADLINE_SLACK = 0.05
"""Seconds. A caller that cancels with at most this much time left cancels because of its deadline: its cancellation can
arrive a moment before the deadline passes here."""


@dataclass(frozen=True)
class WorkerGroupStatus:
    """State of one worker group, from its supervisor."""

    incarnation: int
    """Grows by one with every start of all its processes, or of its draft alone."""
    stats: EngineStats = field(default_factory=EngineStats)
    has_target: bool = True
    """Whether it decodes."""
    has_draft: bool = True

    def document(self) -> dict[str, Any]:
        """Return the state as JSON for users."""
        running, waiting = self.stats.running, self.stats.queued
        return {"serving": self.has_target, "has_draft": self.has_draft, "running": running, "waiting": waiting}

    @property
    def tokens(self) -> tuple[int, int]:
        """Positions that requests hold in the fuller of the two KV pools, and positions of that pool: 0 before the
        first step. Positions in the prefix cache do not count, because they can be released."""
        used, cached, total = self.stats.pages_used, self.stats.pages_cached, self.stats.pages_total
        held = {role: max(0, used[role] - cached.get(role, 0)) for role in total}
        fullest = max(held, key=lambda role: held[role] / total[role], default=ModelRole.TARGET)
        return held.get(fullest, 0), total.get(fullest, 0)


@dataclass(frozen=True)
class ServiceStatus:
    """State of all worker groups, in order."""

    groups: tuple[WorkerGroupStatus, ...]

    @property
    def incarnation(self) -> int:
        """Grows by one with every start of a worker group, or of a draft alone."""
        return sum(group.incarnation for group in self.groups)

    @property
    def running(self) -> int:
        """Requests that hold slots."""
        return sum(group.stats.running for group in self.groups)

    @property
    def queued(self) -> int:
        return sum(group.stats.queued for group in self.groups)

    @property
    def tokens(self) -> tuple[int, int]:
        """See `WorkerGroupStatus.tokens`. Those of worker groups that do not serve do not count."""
        tokens = [group.tokens for group in self.groups if group.has_target]
        return sum(held for held, _ in tokens), sum(room for _, room in tokens)

    @property
    def num_serving(self) -> int:
        """Number of worker groups that decode."""
        return sum(group.has_target for group in self.groups)

    @property
    def pages(self) -> dict[ModelRole, int]:
        """KV pages that a request can have, of each model: those of the smallest pool. Empty until a worker group has
        reported them."""
        totals = [group.stats.pages_total for group in self.groups if group.stats.pages_total]
        return {role: min(total[role] for total in totals) for role in totals[0]} if totals else {}

    @property
    def numerics(self) -> Numerics | None:
        """What the bits of results depend on: invariant if every model of every worker group runs so. None until a
        worker group has reported it."""
        found = [one for group in self.groups for one in group.stats.numerics.values()]
        if not found:
            return None
        return Numerics.INVARIANT if set(found) == {Numerics.INVARIANT} else Numerics.FASTEST


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


Parser = Callable[[str], Awaitable[Sequence[Request]]]
"""Returns the requests of a call, one for each answer, given the call's id. Raises ValueError naming the field, the
value and what is allowed."""
Serializer = Callable[[Request, int, Output], Iterable[Any]]
"""Returns the messages to the caller for an update of one of its requests, given the request, its index and the
update."""


class HttpServer(Protocol):
    """A server of a front end that has a port of its own."""

    async def start(self) -> int:
        """Listen. Returns the bound port. Raises OSError if it is not free."""
        ...

    async def close(self) -> None:
        """Accept no more connections; open ones continue."""
        ...

    async def stop(self) -> None:
        """End every connection."""
        ...


class ApiServer(Protocol):
    """The gateway, as a front end sees it."""

    handler: RequestHandler
    metrics: Metrics
    token_file: TokenFile | None
    call_limit: CallLimit
    receive_limit: ReceiveLimit

    def add_grpc_service(self, name: str, register: Callable[[grpc.aio.Server], None]) -> None:
        """Serve a gRPC service. `name`: its full name, which health and reflection report; `register`: adds it to a
        server. Calls of its method Generate count towards the limit of calls."""
        ...

    def add_http_server(self, server: HttpServer) -> None: ...


FrontEnd = Callable[[ApiServer], None]
"""Adds an API to the gateway: the function `add_to` of the API's module."""


class RequestHandler:
    """Handles the requests of all APIs. Use it in one asyncio loop. Methods raise exceptions;
    `services.gateway.interceptors.ReceivingInterceptor` turns them into statuses."""

    def __init__(
        self,
        pair: ServingPair,
        backend: Backend,
        calls: Calls,
        status: Callable[[], ServiceStatus],
        config: GatewayConfig,
    ) -> None:
        self.pair, self.calls, self.status, self.config = pair, calls, status, config
        self._backend, self._metrics = backend, calls.metrics
        self.prompts = PromptEncoder(pair.tokenizer, pair.context)
        self._compiling = ThreadPoolExecutor(1, "compile")
        self._checking = ThreadPoolExecutor(1, "check")

    def close(self) -> None:
        self.prompts.close()
        for executor in (self._compiling, self._checking):
            executor.shutdown(wait=False, cancel_futures=True)

    async def serve(
        self, method: str, request_id: str, context: grpc.aio.ServicerContext, parse: Parser, serialize: Serializer
    ) -> None:
        """Serve one gRPC call from its arrival to its last message. `method`: its name in traces. `request_id`: if
        empty, the call is given a random id."""
        records = [self.calls.arrives(method, context.invocation_metadata())]
        try:
            if len(request_id) > MAX_ID_SIZE:
                raise ValueError(f"request_id has {len(request_id)} characters; allowed: at most {MAX_ID_SIZE}")
            request_id = request_id or uuid.uuid4().hex
            records[0].is_of(request_id)
            async with self.calls.enter((caller_of(context.invocation_metadata()), request_id)):
                check_waiting(self.pair.engine, self.status().queued)
                requests = await parse(request_id)
                records += [records[0].another() for _ in requests[1:]]
                has_begun = False
                async with aclosing(self.updates(requests, records)) as updates:
                    async for index, output in updates:
                        for message in serialize(requests[index], index, output):
                            if not has_begun:
                                await self.begin(context)
                                has_begun = True
                            await self.write(context, message)
        except asyncio.CancelledError:
            _each_left(records, context)
            raise
        except Exception as error:
            if context.done():  # the caller left, and the write in progress raised an error of its own
                _each_left(records, context)
                return
            for record in records:
                record.failed(status_of(error), error)
            raise

    async def begin(self, context: grpc.aio.ServicerContext) -> None:
        """Send the headers before the first message. Otherwise gRPC sends them with that message; if the call ends
        meanwhile, gRPC refuses to send its status, which would include the headers again, and the caller waits for
        ever."""
        sending = asyncio.ensure_future(context.send_initial_metadata(()))
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            await asyncio.wait({sending})
            raise

    async def write(self, context: grpc.aio.ServicerContext, message: Any) -> None:
        """Send a message. This waits while the caller does not read, because HTTP/2 limits the bytes that it has not
        read. Raises SlowReader after `write_timeout` seconds."""
        timeout = self.config.write_timeout
        try:
            async with asyncio.timeout(timeout):
                await context.write(message)
        except TimeoutError as error:
            raise SlowReader(
                f"the caller did not read for {timeout:g} s while an answer was sent; the request was aborted"
            ) from error

    def longest(self, params: SamplingParams, prompt: int, negative: int = 0) -> int:
        """Return the length in tokens of the longest answer that a request with these settings can get. `prompt` and
        `negative`: numbers of tokens of the prompt and of the negative prompt."""
        from smc.scheduler.capacity import longest_answer  # imports torch

        return longest_answer(params, self.pair.engine, self.status().pages, self.pair.context, prompt, negative)

    def default_length(self, params: SamplingParams, prompt: int, negative: int = 0) -> int:
        """Return `max_tokens` of an answer without a limit of its own: `GatewayConfig.default_max_tokens`, or
        `min_tokens` if that is more, as far as `longest` allows."""
        return min(max(self.config.default_max_tokens, params.min_tokens), self.longest(params, prompt, negative))

    async def _check_constraints(self, requests: Sequence[Request]) -> None:
        """Compile constraints in a thread, so that other calls do not wait. Raises ValueError, before anything is
        queued."""
        constraints = dict.fromkeys(r.params.constraint for r in requests if r.params.constraint is not None)
        if constraints:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._compiling, self._compile, list(constraints))

    async def _check_end(self, request: Request, answer: Answer) -> Answer:
        """Raise ConstraintFailed, and count it, if an answer ended by itself although its constraint does not allow
        it. Return the answer, with particles that end wrongly marked."""
        constraint = request.params.constraint
        if constraint is None:
            return answer
        from smc.constraint_masks import check_answer  # imports torch

        check = asyncio.get_running_loop().run_in_executor
        try:
            return await check(self._checking, check_answer, self._compiler(), constraint, answer)
        except ConstraintFailed:
            logger.error(
                "the answer of request %s ended where its constraint does not allow an end", request.request_id
            )
            self._metrics.constraint_broken()
            raise

    def _compiler(self) -> Compiler:
        from smc.constraints import Compiler  # imports torch
        from smc.stops import TokenBytes

        return Compiler.of(TokenBytes.of(self.pair.tokenizer))

    def _compile(self, constraints: list[Constraint]) -> None:
        compiler = self._compiler()
        for constraint in constraints:
            try:
                compiler.check(constraint)
            finally:
                self._metrics.constraint_compiled(*compiler.take_counts())

    async def updates(
        self, requests: Sequence[Request], records: Sequence[CallRecord]
    ) -> AsyncGenerator[tuple[int, Output], None]:
        """Yield the updates of all requests of a call until their answers, each with the index of its request. At the
        end, also after an error, the backend's iterators are closed, which aborts requests that still run."""
        for record, request in zip(records, requests):
            prompt = None
            if self.config.log_texts:
                prompt = await asyncio.to_thread(self.pair.tokenizer.decode, request.prompt)
            record.asks(request, prompt)
        await self._check_constraints(requests)
        waited = records[0].seconds
        sources = [self._backend.generate(replace(request, waited=waited)) for request in requests]
        async with aclosing(merged(sources)) as updates:
            async for index, output in updates:
                if output.answer is not None:
                    output = replace(output, answer=await self._check_end(requests[index], output.answer))
                records[index].count(len(requests[index].prompt), len(output.tokens))
                yield index, output
                if output.answer is not None:
                    records[index].answered(output.answer)


async def merged(sources: Sequence[AsyncGenerator[Output, None]]) -> AsyncGenerator[tuple[int, Output], None]:
    """Yield the updates of several requests as they come, each with the index of its request. At the end, also after an
    error, all sources are closed."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as updates:
            async for output in updates:
                yield 0, output
        return
    waiting: dict[asyncio.Task[Output | None], int] = {
        asyncio.ensure_future(anext(source, None)): index for index, source in enumerate(sources)
    }
    try:
        while waiting:
            come, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(come, key=waiting.__getitem__):
                latest = task.result()
                index = waiting.pop(task)
                if latest is not None:
                    yield index, latest
                    waiting[asyncio.ensure_future(anext(sources[index], None))] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for source in sources:
            await source.aclose()


def _each_left(records: Iterable[CallRecord], context: grpc.aio.ServicerContext) -> None:
    left = context.time_remaining()
    for record in records:
        record.left(deadline=left is not None and left <= DEADLINE_SLACK)
