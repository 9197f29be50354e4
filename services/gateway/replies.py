"""One call for answers over HTTP: from what is asked to the last byte. Knows nothing about routes, tokens or how a body is read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from aiohttp import web

from services.backend import Backend, ServingPair
from services.errors import SlowReader
from services.gateway.calls import Tally
from services.gateway.prompts import Prompts
from services.gateway.status import ServiceStatus
from services.openai.answers import DONE, Chunks, Heading, choice, error_event, response
from services.openai.errors import BadRequest, Refusal
from services.openai.requests import DEFAULT_MAX_TOKENS, Asked
from smc.engine.admission import longest_answer
from smc.engine.request import Answer, Output, Request

MOST_ECHOED = 1 << 20
"""Characters."""

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

    def __init__(self, request: web.Request, timeout: float, is_last: Callable[[], bool]) -> None:
        """`timeout`: seconds that the caller may let a write wait. `is_last`: its connection is to end with this reply."""
        self._request, self._timeout, self._is_last = request, timeout, is_last
        self.headers: dict[str, str] = {}
        self.stream: web.StreamResponse | None = None
        """Once something has been sent."""

    async def send(self, data: bytes) -> None:
        """Events. Raises SlowReader; ConnectionError if the caller is gone."""
        async with self._in_time():
            if self.stream is None:
                await self._begin(200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})
            await self.stream.write(data)

    async def end(self) -> web.StreamResponse:
        """After the last event. Raises what `send` raises."""
        async with self._in_time():
            await self.stream.write_eof()
        return self.stream

    async def whole(self, document: Any, status: int = 200, headers: Mapping[str, str] = MappingProxyType({})) -> web.StreamResponse:
        """JSON, and nothing after it. Raises what `send` raises."""
        data = await asyncio.to_thread(_json, document) if isinstance(document, dict) and "choices" in document else _json(document)
        async with self._in_time():
            await self._begin(status, {"content-type": "application/json; charset=utf-8", "content-length": str(len(data)), **headers})
            await self.stream.write(data)
            await self.stream.write_eof()
        return self.stream

    async def refuse(self, refusal: Refusal) -> web.StreamResponse:
        """In place of an answer, or of what would have followed; as far as the caller reads it."""
        try:
            if self.stream is None:
                return await self.whole(refusal.body, refusal.http_status, refusal.headers)
            await self.send(error_event(refusal.body))
            return await self.end()
        except (SlowReader, ConnectionError):
            return self.abandon()

    def abandon(self) -> web.StreamResponse:
        """Nothing more is sent, and what has not been read is forgotten."""
        if self._request.transport is not None:
            self._request.transport.abort()
        return self.stream or web.Response()

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        stream = web.StreamResponse(status=status, headers={**self.headers, **headers})
        if self._is_last():
            stream.force_close()
        await stream.prepare(self._request)
        self.stream = stream

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError as error:
            raise SlowReader(
                f"the caller did not read for {self._timeout:g} s while an answer was sent; the request was aborted"
            ) from error


def _json(document: Any) -> bytes:
    return json.dumps(document).encode()


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
    echoes = [text for prompt in asked.prompts for text in [prompt.written(tokenizer) if asked.echo else ""] * asked.n]
    if (size := sum(map(len, echoes))) > MOST_ECHOED:
        raise BadRequest(f"echo=true asks for {size} characters of prompts; allowed: at most {MOST_ECHOED} in all answers", "echo")
    if not asked.stream:
        answers = await _all(requests, decoding.backend, tallies, _nothing)
        each = enumerate(zip(answers, requests, echoes))
        choices = [choice(index, answer, request.params, asked.chat, tokenizer, echo) for index, (answer, request, echo) in each]
        return await reply.whole(response(heading, choices, answers, len(asked.prompts)))
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
