"""One call for answers over HTTP: from what is asked to the last byte. Knows nothing about routes, tokens or how a body is read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from aiohttp import web

from services.backend import Backend, ServingPair
from services.errors import SlowReader
from services.gateway.calls import Tally
from services.gateway.prompts import Prompts
from services.gateway.status import ServiceStatus
from services.openai.answers import DONE, Chunks, Heading, choice, error_event, response
from services.openai.errors import Refusal
from services.openai.requests import DEFAULT_MAX_TOKENS, Asked
from smc.engine.admission import longest_answer
from smc.engine.request import Answer, Output, Request

Take = Callable[[int, Output], Awaitable[None]]


@dataclass(frozen=True)
class Decoding:
    """Who decodes, for which pair, and how things stand there."""

    pair: ServingPair
    backend: Backend
    prompts: Prompts
    status: Callable[[], ServiceStatus]

    def longest(self, asked: Asked, prompt: int) -> int:
        """Tokens of an answer for which nothing else is said: a chat may go on for as long as there is room."""
        pair = self.pair
        most = longest_answer(asked.params(1, None), pair.engine, self.status().pages, pair.context, prompt)
        return most if asked.chat else min(DEFAULT_MAX_TOKENS, most)


class Reply:
    """What goes back to a caller: an answer, or events as they come. Nothing is sent before the first of them is known."""

    def __init__(self, request: web.Request, timeout: float) -> None:
        """`timeout`: seconds that the caller may let a write wait."""
        self._request, self._timeout = request, timeout
        self.headers: dict[str, str] = {}
        self.stream: web.StreamResponse | None = None
        """Once something has been sent."""

    async def send(self, data: bytes) -> None:
        """Raises SlowReader; ConnectionError if the caller is gone."""
        try:
            async with asyncio.timeout(self._timeout):
                if self.stream is None:
                    headers = self.headers | {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
                    self.stream = web.StreamResponse(headers=headers)
                    await self.stream.prepare(self._request)
                await self.stream.write(data)
        except TimeoutError as error:
            raise SlowReader(
                f"the caller did not read for {self._timeout:g} s while an answer was sent; the request was aborted"
            ) from error

    async def end(self) -> web.StreamResponse:
        await self.stream.write_eof()
        return self.stream

    async def refuse(self, refusal: Refusal) -> web.StreamResponse:
        """In place of an answer, or of what would have followed."""
        if self.stream is None:
            return web.json_response(refusal.body, status=refusal.http_status, headers=self.headers | refusal.headers)
        await self.send(error_event(refusal.body))
        return await self.end()


async def requests_of(asked: Asked, request_id: str, decoding: Decoding) -> list[Request]:
    """One for each answer. Raises ValueError naming the field, the value and what is allowed, and QueueFull."""
    requests, seeds = [], asked.seeds()
    for prompt in asked.prompts:
        tokens = await decoding.prompts.tokens(prompt)
        longest = decoding.longest(asked, len(tokens))
        for _ in range(asked.n):
            params = asked.params(longest, next(seeds))
            requests.append(Request(request_id, tokens, params, asked.cache_salt))
    return requests


async def answered(
    asked: Asked, requests: list[Request], heading: Heading, decoding: Decoding, tallies: list[Tally], reply: Reply
) -> web.StreamResponse:
    """Decode all of them and reply. However this ends, the backend's iterators are closed, which aborts what still runs."""
    tokenizer = decoding.pair.tokenizer
    echoes = [prompt.written(tokenizer) if asked.echo else "" for prompt in asked.prompts for _ in range(asked.n)]
    if not asked.stream:
        answers = await _all(requests, decoding.backend, tallies, _nothing)
        each = enumerate(zip(answers, requests, echoes))
        choices = [choice(index, answer, request.params, asked.chat, tokenizer, echo) for index, (answer, request, echo) in each]
        return web.json_response(response(heading, choices, answers, len(asked.prompts)), headers=reply.headers)
    chunks = Chunks(heading, asked, tokenizer)
    begun = [False] * len(requests)

    async def send(index: int, output: Output) -> None:
        data = b"" if begun[index] else chunks.begin(index, echoes[index])
        begun[index] = True
        if output.text:
            data += chunks.text(index, output.text)
        if output.answer is not None:
            data += chunks.end(index, output.answer, requests[index].params)
        if data:
            await reply.send(data)

    answers = await _all(requests, decoding.backend, tallies, send)
    if asked.include_usage:
        await reply.send(chunks.usage(answers, len(asked.prompts)))
    await reply.send(DONE)
    return await reply.end()


async def _nothing(index: int, output: Output) -> None:
    """All of it comes with the answer."""


async def _all(requests: list[Request], backend: Backend, tallies: list[Tally], take: Take) -> list[Answer]:
    """Raises what the first of them that fails raises; the others are aborted."""
    if len(requests) == 1:
        return [await _one(0, requests[0], backend, tallies[0], take)]
    try:
        async with asyncio.TaskGroup() as group:
            each = enumerate(zip(requests, tallies, strict=True))
            tasks = [group.create_task(_one(index, request, backend, tally, take)) for index, (request, tally) in each]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _one(index: int, request: Request, backend: Backend, tally: Tally, take: Take) -> Answer:
    tally.asks(request)
    async with aclosing(backend.generate(replace(request, waited=tally.seconds))) as news:
        async for output in news:
            tally.count(len(request.prompt), len(output.tokens))
            await take(index, output)
            if output.answer is not None:
                tally.answered(output.answer)
                return output.answer
    raise AssertionError("the news of a request ended without an answer")
