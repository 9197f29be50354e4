"""The response to one call, whole or a stream of events. Knows nothing about the forms of bodies and events."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

from aiohttp import web

from services.errors import SlowReader
from services.openai.bodies import Refusal


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
        self.response: web.StreamResponse | None = None
        """The response; None until something is sent."""

    @property
    def _begun(self) -> web.StreamResponse:
        assert self.response is not None
        return self.response

    async def send(self, data: bytes) -> None:
        """Send events, if `data` has any. Raises SlowReader, and ConnectionError if the caller is gone."""
        if not data:
            return
        async with self._in_time():
            if self.response is None:
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
            if self.response is None:
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
        return self.response or web.Response()

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        known = dict.fromkeys(self._id_headers, self.request_id)
        response = web.StreamResponse(status=status, headers={**known, **headers})
        if self._is_last():
            response.force_close()
        await response.prepare(self._request)
        self.response = response

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError as error:
            raise SlowReader(
                f"the caller did not read for {self._timeout:g} s while an answer was sent; the request was aborted"
            ) from error
