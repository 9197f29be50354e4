"""How requests come in: so many calls at a time, one large message after the other, and none that cannot be read; and how calls end of
which a method says that something was wrong. Knows nothing of what they ask for.

Every method is served as one of streams, which is the same on the wire: then messages are received here, and not before the call is known.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from services.errors import SlowSender, Status, status_of
from services.gateway.memory import Trimmer
from services.metrics import Metrics
from smc.engine.admission import QueueFull

LARGE = 64 << 10
"""Bytes from which on a message is large: to read it takes long enough for others to wait for."""
WAITING = 32 << 20
"""Bytes of large messages that wait to be read; beyond, they are refused."""

logger = logging.getLogger(__name__)

Parse = Callable[[bytes], Any]


class Refused(Exception):
    """A call that is not let in."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(cause)
        self.cause = cause


class Intake(grpc.aio.ServerInterceptor):
    """Stands before all methods. Use it in one asyncio loop."""

    def __init__(self, limited: Collection[str], limit: int, timeout: float, metrics: Metrics) -> None:
        """At most `limit` calls of the methods `limited` together at a time; a request must arrive within `timeout` seconds."""
        self._limited, self._limit, self._timeout, self._metrics = limited, limit, timeout, metrics
        self._open = 0
        self._waiting = 0
        self._turn = asyncio.Lock()
        self._trimmer = Trimmer()

    def close(self) -> None:
        self._trimmer.close()

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        is_limited = details.method in self._limited

        async def serve(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
            self._open += is_limited
            try:
                status = await self._ending(handler, messages, context, is_limited)
            finally:
                self._open -= is_limited
            # Only now: gRPC keeps what `abort` raises, and with it every frame that it was raised in, with its requests.
            if status is not None:
                await context.abort(status.code, status.message, status.trailers)

        return grpc.stream_stream_rpc_method_handler(serve, None, handler.response_serializer)

    async def _ending(
        self, handler: Any, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext, is_limited: bool
    ) -> Status | None:
        """Serve the call. The status that it ends with, if something went wrong."""
        try:
            if is_limited and self._open > self._limit:
                raise Refused(QueueFull(f"{self._limit} calls are in flight, as many as are allowed. Try again later"))
            await self._serve(handler, messages, context)
        except Refused as error:
            status = status_of(error.cause)
            self._metrics.request_rejected(status.code.name, status.cause)
            if is_limited:
                self._metrics.request_failed(status.code.name)
            return status
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            status = status_of(error)
            if status.cause == "internal":
                logger.error("unexpected error", exc_info=error)
            return status

    async def _serve(self, handler: Any, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        behavior = next(filter(None, (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)))
        parse = handler.request_deserializer or bytes
        request = self._each(messages, parse) if handler.request_streaming else await self._one(messages, parse)
        answer = behavior(request, context)
        if hasattr(answer, "__aiter__"):
            async for response in answer:
                await context.write(response)
            return
        response = await answer
        if not handler.response_streaming:
            await context.write(response)

    async def _each(self, messages: AsyncIterator[bytes], parse: Parse) -> AsyncIterator[Any]:
        async for data in messages:
            yield await self._read(data, parse)

    async def _one(self, messages: AsyncIterator[bytes], parse: Parse) -> Any:
        try:
            async with asyncio.timeout(self._timeout):
                data = await anext(aiter(messages), None)
        except TimeoutError as error:
            raise Refused(SlowSender(f"the request did not arrive within {self._timeout:g} s")) from error
        if data is None:
            raise Refused(ValueError("the call came without a request; send one"))
        return await self._read(data, parse)

    async def _read(self, data: bytes, parse: Parse) -> Any:
        try:
            return parse(data) if len(data) < LARGE else await self._read_large(data, parse)
        except DecodeError as error:
            raise Refused(ValueError(f"the request of {len(data)} bytes is no message of this method; see its .proto file")) from error

    async def _read_large(self, data: bytes, parse: Parse) -> Any:
        if self._waiting and self._waiting + len(data) > WAITING:
            raise Refused(QueueFull(f"requests of {self._waiting} bytes wait to be read; allowed: {WAITING}. Try again later"))
        self._waiting += len(data)
        try:
            async with self._turn:
                request = parse(data)
                await asyncio.sleep(0)  # whoever else has something to do comes first
                return request
        finally:
            self._waiting -= len(data)
            self._trimmer.plan()
