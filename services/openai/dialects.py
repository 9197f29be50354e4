"""Dialects: what differs between the APIs of this port in reading bodies and in writing answers and errors. Knows
nothing about connections and decoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from services.openai.answers import AnswerWriter, ResponseHeader
from services.openai.bodies import (
    NAMES,
    BadRequest,
    Refusal,
    Strict,
    given_fields,
    named,
    refusal,
    renamed,
    validated,
)
from services.openai.parts import Reasoning
from services.openai.requests import CompletionRequest, Served, understood
from smc.api.request import Request
from smc.api.sampling_params import SETTINGS
from smc.model.tokenizer import Tokenizer

MakeWriter = Callable[[ResponseHeader, CompletionRequest, Sequence[Request], Tokenizer, Reasoning | None], AnswerWriter]
SHARED = ("model", "stream", "request_id", "cache_salt", "priority", "timeout")
"""Fields that have the same name and meaning in all of these bodies and in chats."""


@dataclass(frozen=True)
class ApiCall:
    """The request of a body, and how its answers are written."""

    completion: CompletionRequest
    make_writer: MakeWriter
    field_names: Mapping[str, str] = field(default_factory=dict)
    """This API's names for fields of a chat, where they differ."""

    def named(self, error: ValueError) -> ValueError:
        """Return the error with the field that it is about, if any, under this API's name."""
        chat = self.completion.chat
        return renamed(named(error, NAMES[chat], "messages" if chat else "prompt"), self.field_names)


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


B = TypeVar("B", bound=Strict)


@dataclass(frozen=True)
class ChatForm(Generic[B]):
    """Converts the bodies of an API with other terms for chats to chats."""

    endpoint: str
    body: type[B]
    """Fields of a body, without the settings of `smc.api.sampling_params`, which have the same names."""
    replaced: frozenset[str]
    """Settings that a body does not have under their own names: other fields replace them, or the API lacks them."""
    field_names: Mapping[str, str]
    """The API's names for fields of a chat, where they differ."""

    @property
    def names(self) -> frozenset[str]:
        """All fields that a body may have."""
        return frozenset(self.body.model_fields) | SETTINGS.keys() - self.replaced

    def read(
        self, document: Any, served: Served, chat_of: Callable[[B, dict[str, Any]], dict[str, Any]]
    ) -> tuple[B, CompletionRequest]:
        """Read a body. Returns the body, and the chat that it asks for. `chat_of`: returns the chat's fields, except
        for settings, from the body and its settings. Raises BadRequest."""
        given = given_fields(document)
        settings = {name: given.pop(name) for name in list(given) if name in SETTINGS and name not in self.replaced}
        body = validated(self.body, given, self.endpoint, self.names, served.unknown)
        shared = {name: value for name in SHARED if (value := getattr(body, name)) is not None}
        chat = shared | chat_of(body, settings)
        try:
            completion = understood(settings | chat, True, served).with_tool_format(served.tokenizer)
        except BadRequest as error:
            raise renamed(error, self.field_names) from error
        return body, completion
