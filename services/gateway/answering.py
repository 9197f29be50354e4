"""What all APIs have in common around an answer: who is let in, what is counted, and news for callers that may leave at
any time.

Knows nothing about their messages.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc

from services.backend import Backend, ServingPair
from services.errors import SlowReader, status_of
from services.gateway.calls import Calls, Tally
from services.gateway.config import GatewayConfig
from services.gateway.interceptors import caller_of
from services.gateway.prompts import Prompts
from services.gateway.status import ServiceStatus
from smc.api.outputs import Output
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.scheduler.admission import check_waiting

MAX_ID_SIZE = 256
DEADLINE_SLACK = 0.05
"""A caller cancels at its own deadline, which can reach us a moment before ours."""

Ask = Callable[[str], Awaitable[Sequence[Request]]]
"""The requests of a call, given its id: as many as it wants answers. Raises ValueError naming the field, the value and
what is allowed."""
Say = Callable[[Request, int, Output], Iterable[Any]]
"""Messages to the caller for news of one of its requests, given its index."""


class Answering:
    """One asyncio loop, as many calls as come. What goes wrong is raised; `services.gateway.intake.Intake` tells the
    caller."""

    def __init__(
        self,
        pair: ServingPair,
        backend: Backend,
        calls: Calls,
        status: Callable[[], ServiceStatus],
        config: GatewayConfig,
    ) -> None:
        self.pair, self.calls, self.status, self.config = pair, calls, status, config
        self._backend = backend
        self.prompts = Prompts(pair.tokenizer, pair.context)

    def close(self) -> None:
        self.prompts.close()

    async def serve(self, method: str, request_id: str, context: grpc.aio.ServicerContext, ask: Ask, say: Say) -> None:
        """One call, from its arrival to its last message. `method`: what traces call it. An empty `request_id`: it is
        given one."""
        tallies = [self.calls.arrives(method, context.invocation_metadata())]
        try:
            if len(request_id) > MAX_ID_SIZE:
                raise ValueError(f"request_id has {len(request_id)} characters; allowed: at most {MAX_ID_SIZE}")
            request_id = request_id or uuid.uuid4().hex
            tallies[0].is_of(request_id)
            async with self.calls.enter((caller_of(context.invocation_metadata()), request_id)):
                check_waiting(self.pair.engine, self.status().queued)
                requests = await ask(request_id)
                tallies += [tallies[0].another() for _ in requests[1:]]
                async with aclosing(self.news(requests, tallies)) as news:
                    async for index, output in news:
                        for message in say(requests[index], index, output):
                            await self.write(context, message)
        except asyncio.CancelledError:
            _each_left(tallies, context)
            raise
        except Exception as error:
            if context.done():  # the caller left, and the write that was under way says so in its own words
                _each_left(tallies, context)
                return
            for tally in tallies:
                tally.failed(status_of(error), error)
            raise

    async def write(self, context: grpc.aio.ServicerContext, message: Any) -> None:
        """Waits while the caller does not read: HTTP/2 lets us send no more than it has room for."""
        timeout = self.config.write_timeout
        try:
            async with asyncio.timeout(timeout):
                await context.write(message)
        except TimeoutError as error:
            raise SlowReader(
                f"the caller did not read for {timeout:g} s while an answer was sent; the request was aborted"
            ) from error

    def longest(self, params: SamplingParams, prompt: int, negative: int = 0) -> int:
        """Most tokens that such a request could be answered with here, after a prompt of so many, and a negative
        one."""
        from smc.scheduler.capacity import longest_answer  # imports torch

        return longest_answer(params, self.pair.engine, self.status().pages, self.pair.context, prompt, negative)

    async def news(
        self, requests: Sequence[Request], tallies: Sequence[Tally]
    ) -> AsyncGenerator[tuple[int, Output], None]:
        """Of all requests of a call until their last answers, each with its request's index; an answer counts once it
        has been taken. However this ends, the backend's iterators are closed, which aborts what still runs."""
        for tally, request in zip(tallies, requests):
            tally.asks(request)
        waited = tallies[0].seconds
        sources = [self._backend.generate(replace(request, waited=waited)) for request in requests]
        async with aclosing(merged(sources)) as news:
            async for index, output in news:
                tallies[index].count(len(requests[index].prompt), len(output.tokens))
                yield index, output
                if output.answer is not None:
                    tallies[index].answered(output.answer)


async def merged(sources: Sequence[AsyncGenerator[Output, None]]) -> AsyncGenerator[tuple[int, Output], None]:
    """News of several requests as they come, each with its request's index. However this ends, all are closed."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as news:
            async for output in news:
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


def _each_left(tallies: Iterable[Tally], context: grpc.aio.ServicerContext) -> None:
    left = context.time_remaining()
    for tally in tallies:
        tally.left(deadline=left is not None and left <= DEADLINE_SLACK)
