"""Dialects: what differs between the APIs of this port in reading bodies and in writing answers and errors. Knows
nothing about connections and decoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from services.openai.answers import AnsweredCall, AnswerWriter
from services.openai.bodies import BadRequest, CallFields, Refusal, given_fields, refusal, validated
from services.openai.requests import CompletionRequest, Served
from smc.api.sampling_params import SETTINGS

MakeWriter = Callable[[AnsweredCall], AnswerWriter]


@dataclass(frozen=True)
class ApiCall:
    """The request of a body, and how its answers are written."""

    completion: CompletionRequest
    make_writer: MakeWriter


class Dialect(ABC):
    """How one API reads bodies and writes errors."""

    prompt: str
    """The field that holds the prompt."""
    id_headers: tuple[str, ...] = ("x-request-id",)
    """Headers of a reply that hold the call's id."""

    @abstractmethod
    def read(self, document: Any, served: Served) -> ApiCall:
        """Read a body. Raises BadRequest naming the field, the value and what is allowed."""

    def refusal(self, error: Exception, request_id: str | None = None) -> Refusal:
        """Return what a caller is sent instead of an answer. `request_id`: the call's id."""
        return refusal(error)


B = TypeVar("B", bound=CallFields)


@dataclass(frozen=True)
class BodyForm(Generic[B]):
    """The bodies of an API that has a form of its own for chats."""

    endpoint: str
    body: type[B]
    """Fields of a body, without the settings of `smc.api.sampling_params`, which have the same names."""
    replaced: frozenset[str]
    """Settings that a body does not have under their own names: other fields replace them, or the API lacks them."""

    @property
    def names(self) -> frozenset[str]:
        """All fields that a body may have."""
        return frozenset(self.body.model_fields) | SETTINGS.keys() - self.replaced

    def read(
        self, document: Any, served: Served, request_of: Callable[[B, dict[str, Any]], CompletionRequest]
    ) -> tuple[B, CompletionRequest]:
        """Read a body. Returns it, and its request. `request_of`: returns the request, from the body and its settings.
        Raises BadRequest."""
        given = given_fields(document)
        settings = {name: given.pop(name) for name in list(given) if name in SETTINGS and name not in self.replaced}
        try:
            body = validated(self.body, given, self.endpoint, self.names, served.unknown)
            return body, request_of(body, settings)
        except RecursionError as error:
            raise BadRequest("the body is nested too deeply to be read") from error
