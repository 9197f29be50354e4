"""Handles a request of any API from its admission to its last output: decoding, and the records of its answers. gRPC
calls enter by `serve`, HTTP calls by `updates`. Also defines the interface between the gateway and its front ends,
which use nothing else of the gateway but `services.gateway.calls`.

Knows nothing about the messages of an API.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import grpc

from services.backend import Backend, ServingPair
from services.errors import SlowReader, status_of
from services.gateway.calls import CallRecord, Calls
from services.gateway.config import GatewayConfig
from services.gateway.limits import CallLimit, ReceiveLimit
from services.gateway.status import ServiceStatus
from services.metrics import Metrics
from services.prompts import PromptEncoder
from services.security import TokenFile, caller_of
from smc.api.constraint import Constraint, ConstraintFailed
from smc.api.request import Answer, Output, Request, check_scored
from smc.api.sampling_params import SamplingParams
from smc.scheduler.admission import check_waiting

if TYPE_CHECKING:
    from smc.constraints import Compiler

logger = logging.getLogger("smcserve.requests")
MAX_ID_SIZE = 256
LONG_REPORT = 1000
"""Number of tokens in reports from which these are converted in a thread: it takes some twenty milliseconds of a
core, and other callers would wait meanwhile."""
DEADLINE_SLACK = 0.05
"""Seconds. A caller that cancels with at most this much time left cancels because of its deadline: its cancellation can
arrive a moment before the deadline passes here."""


T = TypeVar("T")
Parser = Callable[[str], Awaitable[Sequence[Request]]]
"""Returns the requests of a call, one for each answer, given the call's id. Raises ValueError naming the field, the
value and what is allowed."""
Serializer = Callable[[Request, int, Output], Sequence[Any]]
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
                check_scored(requests)
                records += [records[0].another() for _ in requests[1:]]
                has_begun = False
                async with aclosing(self.updates(requests, records)) as updates:
                    async for index, output in updates:
                        convert = partial(serialize, requests[index], index, output)
                        for message in await converted(convert, output.reported):
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


async def converted(convert: Callable[[], T], tokens: int) -> T:
    """Return what `convert` makes of answers. `tokens`: how many their reports list at most; if they are many, it runs
    in a thread and does not block the loop."""
    return await asyncio.to_thread(convert) if tokens > LONG_REPORT else convert()


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
