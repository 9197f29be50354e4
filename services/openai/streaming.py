"""Sends the answer to one call, whole or as a stream of events, while it is decoded. Knows nothing about the forms of
bodies and events."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

from aiohttp import web

from services.errors import SlowReader
from services.gateway.calls import CallRecord
from services.gateway.request_handler import RequestHandler
from services.openai.bodies import Refusal
from services.openai.dialects import AnsweredCall, AnswerHeading, ApiCall
from services.openai.requests import CompletionRequest
from smc.api.limits import DEFAULT_MAX_TOKENS
from smc.api.request import Answer, Request
from smc.api.sampling_params import SamplingParams


class HttpReply:
    """The response to a caller: an answer, or a stream of events. Nothing is sent before the answer, or the first
    event, exists."""

    def __init__(
        self, request: web.Request, timeout: float, is_last: Callable[[], bool], id_headers: Sequence[str]
    ) -> None:
        """`timeout`: seconds that the caller may let a write wait. `is_last`: returns whether the connection is to end
        with this reply. `id_headers`: headers that hold the call's id."""
        self._request, self._timeout, self._is_last, self._id_headers = request, timeout, is_last, id_headers
        self.request_id = uuid.uuid4().hex
        """Id of the call; a body may bring another one."""
        self.error_event: Callable[[dict[str, Any]], bytes] | None = None
        """Returns the event of a refusal's body, for a stream."""
        self.stream: web.StreamResponse | None = None
        """The response; None until something is sent."""

    @property
    def _begun(self) -> web.StreamResponse:
        assert self.stream is not None
        return self.stream

    async def send(self, data: bytes) -> None:
        """Send events, if `data` has any. Raises SlowReader, and ConnectionError if the caller is gone."""
        if not data:
            return
        async with self._in_time():
            if self.stream is None:
                await self._begin(
                    200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
                )
            await self._begun.write(data)

    async def end(self) -> web.StreamResponse:
        """End the stream, after the last event. Raises what `send` raises."""
        async with self._in_time():
            await self._begun.write_eof()
        return self._begun

    async def whole(
        self, data: bytes, status: int = 200, headers: Mapping[str, str] = MappingProxyType({})
    ) -> web.StreamResponse:
        """Send a JSON document as the whole reply. Raises what `send` raises."""
        async with self._in_time():
            await self._begin(
                status, {"content-type": "application/json; charset=utf-8", "content-length": str(len(data)), **headers}
            )
            await self._begun.write(data)
            await self._begun.write_eof()
        return self._begun

    async def refuse(self, refusal: Refusal) -> web.StreamResponse:
        """Send a refusal instead of the answer, or of the rest of the stream, as far as the caller reads it."""
        try:
            if self.stream is None:
                return await self.whole(json.dumps(refusal.body).encode(), refusal.http_status, refusal.headers)
            assert self.error_event is not None, "nothing is sent before there is an answer"
            await self.send(self.error_event(refusal.body))
            return await self.end()
        except (SlowReader, ConnectionError):
            return self.abandon()

    def abandon(self) -> web.StreamResponse:
        """Send nothing more, and drop everything that the caller has not read."""
        if self._request.transport is not None:
            self._request.transport.abort()
        return self.stream or web.Response()

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        known = dict.fromkeys(self._id_headers, self.request_id)
        stream = web.StreamResponse(status=status, headers={**known, **headers})
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


async def requests_of(completion: CompletionRequest, request_id: str, handler: RequestHandler) -> list[Request]:
    """Return one request for each answer. Raises QueueFull, and ValueError naming the field, the value and what is
    allowed."""

    def default_length(params: SamplingParams, prompt: int, negative: int) -> int:
        if completion.chat:
            return handler.default_length(params, prompt, negative)
        return min(DEFAULT_MAX_TOKENS, handler.longest(params, prompt, negative))

    requests: list[Request] = []
    tokenizer, seeds = handler.pair.tokenizer, completion.seeds()
    negative = await handler.prompts.negative(completion.negative)
    for each in completion.prompts:
        prompt = await handler.prompts.tokens(each)
        requests += completion.requests(request_id, prompt, negative, seeds, tokenizer, default_length)
    return requests


async def reply_with_answers(
    call: ApiCall,
    requests: list[Request],
    heading: AnswerHeading,
    handler: RequestHandler,
    records: list[CallRecord],
    reply: HttpReply,
) -> web.StreamResponse:
    """Decode all requests of a call and reply. At the end, also after an error, the backend's iterators are closed,
    which aborts requests that still run."""
    tokenizer, completion = handler.pair.tokenizer, call.completion
    reasoning = completion.reasoning(tokenizer, requests[0].prompt)
    writer = call.make_writer(AnsweredCall(heading, completion, requests, tokenizer, reasoning))
    reply.error_event = writer.error
    ended: dict[int, Answer] = {}
    async with aclosing(handler.updates(requests, records)) as updates:
        async for index, output in updates:
            if completion.stream:
                await reply.send(await _written_beside_loop(partial(writer.update, index, output), [output.answer]))
            if output.answer is not None:
                ended[index] = output.answer
    answers = [ended[index] for index in range(len(requests))]
    if not completion.stream:
        return await reply.whole(await _written_beside_loop(partial(writer.whole, answers), answers))
    await reply.send(await _written_beside_loop(partial(writer.finish, answers)))
    return await reply.end()


async def _written_beside_loop(write: Callable[[], bytes], answers: Iterable[Answer | None] = ()) -> bytes:
    """Return what `write` returns. If `answers` list likeliest tokens, writing them takes long, so it runs in a thread
    and does not block the loop. Raises NotWritten."""
    is_long = any(answer is not None and (answer.top_logprobs or answer.prompt_logprobs) for answer in answers)
    try:
        return await asyncio.to_thread(write) if is_long else write()
    except Exception as error:
        raise NotWritten("an answer cannot be written") from error


class NotWritten(RuntimeError):
    """An answer cannot be written. This is an internal error, never one of the caller."""
