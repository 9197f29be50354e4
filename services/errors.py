"""Maps exceptions to gRPC status codes; no other module does. docs/errors.md explains the same table to users."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import grpc

from services.backend import RequestAborted, RequestFailed, Unavailable, Unimplemented
from services.protobuf import RETRY_TRAILER
from smc.api.constraint import ConstraintFailed
from smc.scheduler.admission import DuplicateRequest, QueueFull

MAX_WORD = 256
"""Maximum characters without a space in a message: more are a name or a value that the caller sent."""
MAX_MESSAGE = 2000
"""Maximum size of a message in bytes. It travels in HTTP/2 trailers, where each byte may take three; by default peers
accept 8 KiB of trailers."""
MAX_READ = 64 << 10
"""Maximum characters of a message that are searched for long words."""
# A word is tried at its beginning only: at each of its characters it would take time with the square of its length.
_LONG_WORD = re.compile(rf"(?<!\S)(\S{{{MAX_WORD // 2}}})\S{{{MAX_WORD // 2},}}(\S)")


class Unauthenticated(RuntimeError):
    """The caller has not sent a valid token."""


class HostNotAllowed(RuntimeError):
    """The caller uses a host name that is not one of the service."""


class SlowReader(RuntimeError):
    """The caller does not read its response."""


class SlowSender(RuntimeError):
    """The caller does not send its request."""


class TooLarge(RuntimeError):
    """The request has more bytes than are allowed."""


class DeadlineExceeded(RuntimeError):
    """The caller's own deadline has passed."""


@dataclass(frozen=True)
class Status:
    code: grpc.StatusCode
    message: str
    cause: str
    """The error's name in metrics. It is finer than `code`: several causes share one code."""
    retry_after: float | None = None
    """Seconds after which a retry makes sense; None: a retry is not suggested."""

    @property
    def trailers(self) -> tuple[tuple[str, str], ...]:
        return () if self.retry_after is None else ((RETRY_TRAILER, str(math.ceil(1e3 * self.retry_after))),)


_TABLE: tuple[tuple[type[Exception], grpc.StatusCode, str, float | None], ...] = (
    (DuplicateRequest, grpc.StatusCode.ALREADY_EXISTS, "duplicate", None),
    (ConstraintFailed, grpc.StatusCode.INVALID_ARGUMENT, "constraint", None),
    (ValueError, grpc.StatusCode.INVALID_ARGUMENT, "invalid", None),
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED, "unauthenticated", None),
    (HostNotAllowed, grpc.StatusCode.PERMISSION_DENIED, "host", None),
    (QueueFull, grpc.StatusCode.RESOURCE_EXHAUSTED, "queue_full", 1.0),
    (TooLarge, grpc.StatusCode.RESOURCE_EXHAUSTED, "too_large", None),
    (SlowReader, grpc.StatusCode.RESOURCE_EXHAUSTED, "slow_reader", None),
    (SlowSender, grpc.StatusCode.RESOURCE_EXHAUSTED, "slow_sender", None),
    (Unavailable, grpc.StatusCode.UNAVAILABLE, "unavailable", 1.0),
    (Unimplemented, grpc.StatusCode.UNIMPLEMENTED, "unimplemented", None),
    (RequestAborted, grpc.StatusCode.CANCELLED, "abort", None),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED, "deadline", None),
    (RequestFailed, grpc.StatusCode.INTERNAL, "failed", None),
)
"""The first match counts, so a subclass stands before its base class."""


def status_of(error: Exception) -> Status:
    """Return the status that a caller sees. An exception that is not in the table is a bug: INTERNAL, without its
    details."""
    for kind, code, cause, retry_after in _TABLE:
        if isinstance(error, kind):
            return Status(code, shortened(str(error)), cause, getattr(error, "retry_after", retry_after))
    message = f"internal error ({type(error).__name__}); the server's log has the details"
    return Status(grpc.StatusCode.INTERNAL, message, "internal")


def shortened(message: str) -> str:
    """Return `message` with long names and values cut off. If it is still too long for a status, cut out its middle,
    which holds a value that the caller sent."""
    if len(message) > MAX_READ:
        # What is left is cut below: it holds a long word, or is too long for a status.
        message = message[: MAX_READ // 2] + message[-MAX_READ // 2 :]
    message = _LONG_WORD.sub(lambda word: f"{word[1]}..{word[2] if word[2] in ',;:' else ''}", message)
    data = message.encode(errors="backslashreplace")
    if len(data) <= MAX_MESSAGE:
        return data.decode()
    half = MAX_MESSAGE // 2 - 10
    begin, end = (part.decode(errors="ignore") for part in (data[:half], data[-half:]))
    return f"{begin} [..] {end}"
