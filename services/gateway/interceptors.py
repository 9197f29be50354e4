"""Who may call: bearer tokens, checked before a method is even looked up. Knows nothing about the methods."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import grpc

from services.errors import Unauthenticated, status_of
from services.metrics.metrics import Metrics
from services.security import bearer_token, caller_with, is_known

OPEN = "/grpc.health.v1."
"""Probes of an orchestrator carry no token."""


def caller_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Who calls, by the token in a call's metadata."""
    return caller_with(_token(metadata))


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Lets calls with a known token through, and health checks; every other one is UNAUTHENTICATED, whatever it asks
    for."""

    def __init__(self, tokens: Sequence[str], metrics: Metrics) -> None:
        self._tokens, self._metrics = tokens, metrics
        # A stream to a stream fits every method: the refusal is sent without waiting for a message.
        self._refusal = grpc.stream_stream_rpc_method_handler(self._refuse)

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        if details.method.startswith(OPEN) or self._is_let_in(details):
            return await continuation(details)
        return self._refusal

    def _is_let_in(self, details: grpc.HandlerCallDetails) -> bool:
        return is_known(_token(details.invocation_metadata), self._tokens)

    async def _refuse(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        status = status_of(Unauthenticated("a valid token is needed; send the metadata `authorization: Bearer TOKEN`"))
        self._metrics.request_rejected(status.code.name, status.cause)
        await context.abort(status.code, status.message, status.trailers)


def _token(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The bearer token in a call's metadata; empty if there is none, which is nobody's token."""
    for key, value in metadata:
        if key == "authorization":
            return bearer_token(str(value))
    return ""
