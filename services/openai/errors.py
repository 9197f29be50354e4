"""Errors as OpenAI's clients know them: HTTP status, body, whether to try again. docs/errors.md explains the same table
to users."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from services.errors import status_of
from smc.scheduler.admission import DuplicateRequest

HTTP = {
    "invalid": (400, "invalid_request_error"),
    "unauthenticated": (401, "authentication_error"),
    "slow_sender": (408, "invalid_request_error"),
    "duplicate": (409, "conflict_error"),
    "too_large": (413, "invalid_request_error"),
    "queue_full": (429, "rate_limit_error"),
    "abort": (499, "aborted_error"),
    "failed": (500, "server_error"),
    "internal": (500, "server_error"),
    "unavailable": (503, "server_error"),
    "deadline": (504, "timeout_error"),
}
"""Status and type, by `services.errors.Status.cause`. Whoever does not read its answer is not answered."""
_FIRST_WORD = re.compile(r"[a-z_]+")
_OF_PROMPTS = re.compile("the prompt|chat|cannot encode|the chat template")


class BadRequest(ValueError):
    """Something is wrong with the request itself."""

    def __init__(self, message: str, param: str | None = None, http_status: int = 400, code: str | None = None) -> None:
        """`param`: the field; `code`: OpenAI's word for what is wrong, where it has one."""
        super().__init__(message)
        self.param, self.http_status, self.code = param, http_status, code


@dataclass(frozen=True)
class Refusal:
    """What a caller is sent instead of an answer."""

    http_status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


def refusal(error: Exception) -> Refusal:
    status = status_of(error)
    http_status, kind = HTTP[status.cause]
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    body = {"error": {"message": status.message, "type": kind, "param": param, "code": code or status.cause}}
    # OpenAI's clients try again after most errors, unless they are told; with a hint it makes sense, without one it
    # does not.
    headers = {"x-should-retry": str(status.retry_after is not None).lower()}
    if status.retry_after is not None:
        headers["retry-after"] = str(math.ceil(status.retry_after))
    return Refusal(getattr(error, "http_status", http_status), body, headers)


def named(error: ValueError, names: frozenset[str], prompt: str) -> ValueError:
    """`error` with the field that its message begins with, if it is one of `names`; `prompt`: the field that holds the
    prompt."""
    if isinstance(error, (BadRequest, DuplicateRequest)):
        return error
    message = str(error)
    first = _FIRST_WORD.match(message)
    return BadRequest(
        message, first[0] if first and first[0] in names else prompt if _OF_PROMPTS.match(message) else None
    )
