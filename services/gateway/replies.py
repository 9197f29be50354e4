"""One call for answers over HTTP: from what is asked to the last byte. Knows nothing about routes, tokens or how a body
is read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

from aiohttp import web

from services.errors import SlowReader
from services.gateway.answering import Answering
from services.gateway.calls import Tally
from services.openai.answers import DONE, Chunks, Heading, choice, error_event, response, written
from services.openai.errors import BadRequest, Refusal
from services.openai.requests import LONGEST, Asked
from smc.api.limits import DEFAULT_MAX_TOKENS
from smc.api.outputs import Answer, Output
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams

MOST_ECHOED = 1 << 20
"""Characters."""


class Reply:
    """What goes back to a caller: an answer, or events as they come. Nothing is sent before the first of them is
    known."""

    def __init__(self, request: web.Request, timeout: float, is_last: Callable[[], bool]) -> None:
        """`timeout`: seconds that the caller may let a write wait. `is_last`: its connection is to end with this
        reply."""
        self._request, self._timeout, self._is_last = request, timeout, is_last
        self.headers: dict[str, str] = {}
        self.stream: web.StreamResponse | None = None
        """Once something has been sent."""

    @property
    def _begun(self) -> web.StreamResponse:
        assert self.stream is not None
        return self.stream

    async def send(self, data: bytes) -> None:
        """Events, if there are any. Raises SlowReader; ConnectionError if the caller is gone."""
        if not data:
            return
        async with self._in_time():
            if self.stream is None:
                await self._begin(
                    200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
                )
            await self._begun.write(data)

    async def end(self) -> web.StreamResponse:
        """After the last event. Raises what `send` raises."""
        async with self._in_time():
            await self._begun.write_eof()
        return self._begun

    async def whole(
        self, document: Any, status: int = 200, headers: Mapping[str, str] = MappingProxyType({})
    ) -> web.StreamResponse:
        """JSON, and nothing after it. Raises what `send` raises."""
        return await self.send_whole(json.dumps(document).encode(), status, headers)

    async def send_whole(
        self, data: bytes, status: int = 200, headers: Mapping[str, str] = MappingProxyType({})
    ) -> web.StreamResponse:
        """The same of a document that has been written."""
        async with self._in_time():
            await self._begin(
                status, {"content-type": "application/json; charset=utf-8", "content-length": str(len(data)), **headers}
            )
            await self._begun.write(data)
            await self._begun.write_eof()
        return self._begun

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


async def requests_of(asked: Asked, request_id: str, answering: Answering) -> list[Request]:
    """One for each answer. Raises ValueError naming the field, the value and what is allowed, and QueueFull."""
    requests, seeds = [], asked.seeds()
    negative = await answering.prompts.negative(asked.negative)
    for prompt in asked.prompts:
        tokens = await answering.prompts.tokens(prompt)
        # A chat may go on for as long as there is room.
        most = answering.longest(asked.params(LONGEST, None), len(tokens), len(negative or ()))
        longest = most if asked.chat else min(DEFAULT_MAX_TOKENS, most)
        for _ in range(asked.n):
            params = asked.params(longest, next(seeds))
            requests.append(Request(request_id, tokens, params, asked.cache_salt, negative_prompt=negative))
    return requests


async def answered(
    asked: Asked, requests: list[Request], heading: Heading, answering: Answering, tallies: list[Tally], reply: Reply
) -> web.StreamResponse:
    """Decode all of them and reply. However this ends, the backend's iterators are closed, which aborts what still
    runs."""
    tokenizer = answering.pair.tokenizer
    echoes = [text for prompt in asked.prompts for text in [prompt.written(tokenizer) if asked.echo else ""] * asked.n]
    if (size := sum(map(len, echoes))) > MOST_ECHOED:
        raise BadRequest(
            f"echo=true asks for {size} characters of prompts; allowed: at most {MOST_ECHOED} in all answers", "echo"
        )
    chunks = Chunks(heading, asked, tokenizer) if asked.stream else None
    begun: set[int] = set()
    ended: dict[int, Answer] = {}
    async with aclosing(answering.news(requests, tallies)) as news:
        async for index, output in news:
            if chunks is not None:
                said = partial(
                    _events, chunks, index, output, requests[index].params, None if index in begun else echoes[index]
                )
                await reply.send(await _beside(said, [output.answer]))
                begun.add(index)
            if output.answer is not None:
                ended[index] = output.answer
    answers = [ended[index] for index in range(len(requests))]
    if chunks is None:
        each = list(enumerate(zip(answers, requests, echoes)))

        def write() -> bytes:
            choices = [
                choice(index, answer, request.params, asked.chat, tokenizer, echo)
                for index, (answer, request, echo) in each
            ]
            return written(response(heading, choices, answers, len(asked.prompts))).encode()

        return await reply.send_whole(await _beside(write, answers))
    if asked.include_usage:
        await reply.send(chunks.usage(answers, len(asked.prompts)))
    await reply.send(DONE)
    return await reply.end()


async def _beside(write: Callable[[], bytes], answers: Iterable[Answer | None]) -> bytes:
    """What is written of these. With the likeliest tokens it is a lot: not while others wait for this loop."""
    is_long = any(answer is not None and answer.top_logprobs for answer in answers)
    return await asyncio.to_thread(write) if is_long else write()


def _events(chunks: Chunks, index: int, output: Output, params: SamplingParams, echo: str | None) -> bytes:
    """News of one answer; `echo`: what stands before it, if these are its first."""
    data = b"" if echo is None else chunks.begin(index, echo)
    if output.text:
        data += chunks.text(index, output.text)
    if output.answer is not None:
        data += chunks.end(index, output.answer, params)
    return data
