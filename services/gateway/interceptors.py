"""Interceptors of the gRPC server: bearer tokens are checked before a method is looked up; requests are received within
the limits of `services.gateway.limits`; exceptions become status codes. Knows nothing about the methods.

Every method is served as one that receives and sends streams, which is the same on the wire. So messages are received
here, not by gRPC before the method's handler runs.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import ExitStack
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from services.errors import SlowSender, Status, Unauthenticated, status_of
from services.gateway.limits import CallLimit, ReceiveLimit
from services.metrics import Metrics
from services.security import TokenFile, token_of
from smc.scheduler.admission import QueueFull

logger = logging.getLogger(__name__)

Parse = Callable[[bytes], Any]
OPEN = "/grpc.health.v1."
"""Prefix of the methods that need no token: an orchestrator's probes carry none."""


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Passes calls with a known token, and health checks; every other call ends with UNAUTHENTICATED, whatever its
    method."""

    def __init__(self, token_file: TokenFile, metrics: Metrics) -> None:
        self._token_file, self._metrics = token_file, metrics
        # A stream to a stream fits every method: the refusal is sent without waiting for a message.
        self._refusal = grpc.stream_stream_rpc_method_handler(self._refuse)

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        if details.method.startswith(OPEN) or self._token_file.knows(token_of(details.invocation_metadata)):
            return await continuation(details)
        return self._refusal

    async def _refuse(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        status = status_of(Unauthenticated("a valid token is needed; send the metadata `authorization: Bearer TOKEN`"))
        self._metrics.request_rejected(status.code.name, status.cause)
        await context.abort(status.code, status.message, status.trailers)


class CallRefused(Exception):
    """A call that is refused before its method runs."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(cause)
        self.cause = cause


class ReceivingInterceptor(grpc.aio.ServerInterceptor):
    """Receives the requests of all methods within the limits, and turns exceptions into statuses. Use it in one asyncio
    loop."""

    def __init__(
        self, limited: Collection[str], call_limit: CallLimit, receive_limit: ReceiveLimit, metrics: Metrics
    ) -> None:
        """`limited`: full names of the methods whose calls count towards `call_limit`."""
        self._limited, self._metrics = limited, metrics
        self._call_limit, self._receive_limit = call_limit, receive_limit

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        is_limited = details.method in self._limited

        async def serve(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
            status = await self._ending(handler, context, is_limited)
            # Only here: gRPC keeps the exception that `abort` raises, and with it the frames of its traceback and their
            # requests.
            if status is not None:
                await context.abort(status.code, status.message, status.trailers)

        return grpc.stream_stream_rpc_method_handler(serve, None, handler.response_serializer)

    async def _ending(self, handler: Any, context: grpc.aio.ServicerContext, is_limited: bool) -> Status | None:
        """Serve the call. Returns the status that it must end with if something went wrong, otherwise None."""
        try:
            with ExitStack() as counted:
                if is_limited:
                    try:
                        counted.enter_context(self._call_limit.taken())
                    except QueueFull as error:
                        raise CallRefused(error) from error
                await self._serve(handler, context)
        except CallRefused as error:
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
        return None

    async def _serve(self, handler: Any, context: grpc.aio.ServicerContext) -> None:
        behavior = next(
            filter(None, (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream))
        )
        parse = handler.request_deserializer or bytes
        request = self._each(context, parse) if handler.request_streaming else await self._one(context, parse)
        answer = behavior(request, context)
        if hasattr(answer, "__aiter__"):
            async for response in answer:
                await context.write(response)
            return
        response = await answer
        if not handler.response_streaming:
            await context.write(response)

    async def _each(self, context: grpc.aio.ServicerContext, parse: Parse) -> AsyncIterator[Any]:
        while (request := await self._next(context, parse)) is not None:
            yield request

    async def _one(self, context: grpc.aio.ServicerContext, parse: Parse) -> Any:
        if (request := await self._next(context, parse)) is None:
            raise CallRefused(ValueError("the call came without a request; send one"))
        return request

    async def _next(self, context: grpc.aio.ServicerContext, parse: Parse) -> Any:
        """Return the next request of a call; None after the last."""
        try:
            async with self._receive_limit.let_in():
                # Not from gRPC's own iterator, which keeps the last message for as long as gRPC keeps the call.
                data = await self._receive_limit.arrived(context.read())
                return None if data is grpc.aio.EOF else await self._receive_limit.read(data, parse)
        except (QueueFull, SlowSender) as error:
            raise CallRefused(error) from error
        except DecodeError as error:
            raise CallRefused(
                ValueError(f"the request of {len(data)} bytes is not a message of this method; see its .proto file")
            ) from error
