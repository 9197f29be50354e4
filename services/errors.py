"""Exceptions become gRPC status codes here and nowhere else. docs/errors.md explains the same table to users."""

from __future__ import annotations

import math
from dataclasses import dataclass

import grpc

from services.backend import RequestAborted, RequestFailed, Unavailable
from smc.engine.admission import DuplicateRequest, QueueFull

RETRY_TRAILER = "grpc-retry-pushback-ms"
"""gRPC's own trailer: clients with a retry policy wait this long."""


@dataclass(frozen=True)
class Status:
    code: grpc.StatusCode
    message: str
    retry_after: float | None = None
    """Seconds after which trying again makes sense."""

    @property
    def trailers(self) -> tuple[tuple[str, str], ...]:
        return () if self.retry_after is None else ((RETRY_TRAILER, str(math.ceil(1e3 * self.retry_after))),)


_CODES: tuple[tuple[type[Exception], grpc.StatusCode, float | None], ...] = (
    (DuplicateRequest, grpc.StatusCode.ALREADY_EXISTS, None),
    (ValueError, grpc.StatusCode.INVALID_ARGUMENT, None),
    (QueueFull, grpc.StatusCode.RESOURCE_EXHAUSTED, 1.0),
    (Unavailable, grpc.StatusCode.UNAVAILABLE, 1.0),
    (RequestAborted, grpc.StatusCode.CANCELLED, None),
    (RequestFailed, grpc.StatusCode.INTERNAL, None),
)
"""First match counts: a subclass stands before its base."""


def status_of(error: Exception) -> Status:
    """The status a caller sees. An exception that is not in the table is our fault: INTERNAL, without its details."""
    for kind, code, retry_after in _CODES:
        if isinstance(error, kind):
            return Status(code, str(error), getattr(error, "retry_after", retry_after))
    return Status(grpc.StatusCode.INTERNAL, f"internal error ({type(error).__name__}); the server's log has the details")
