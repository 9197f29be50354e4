"""What tells the APIs of this port apart: how a body is read, how answers are written, and how errors are. Knows nothing
about connections and decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.openai.reasoning import Reasoning
from services.openai.requests import (
    CHAT,
    COMPLETIONS,
    CompletionRequest,
    Refusal,
    UnknownFields,
    refusal,
    renamed,
    understood,
)
from services.openai.responses import AnswerWriter, CompletionWriter, ResponseHeader
from smc.api.request import Request
from smc.model.tokenizer import Tokenizer

MakeWriter = Callable[[ResponseHeader, CompletionRequest, Sequence[Request], Tokenizer, Reasoning | None], AnswerWriter]


@dataclass(frozen=True)
class Served:
    """What a body is read for."""

    models: tuple[str, ...]
    """Names of the model."""
    tokenizer: Tokenizer
    method: str | None = None
    """Of a body that names none."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Other settings of a body that leaves them out."""
    unknown: UnknownFields | None = None
    """Ignores unknown fields; None: they are refused."""

    def understood(self, document: Any, chat: bool) -> CompletionRequest:
        """A body of chats or completions. Raises BadRequest."""
        size = self.tokenizer.size
        completion = understood(document, chat, self.models, size, self.method, self.defaults, self.unknown)
        return completion.with_tool_format(self.tokenizer)


@dataclass(frozen=True)
class ApiCall:
    """A body, understood, and how its answers are written."""

    completion: CompletionRequest
    make_writer: MakeWriter = CompletionWriter
    field_names: Mapping[str, str] = field(default_factory=dict)
    """Fields of a chat that this API calls otherwise."""

    def named(self, error: ValueError) -> ValueError:
        """With the field that it is about, if it is about one."""
        return renamed(self.completion.named(error), self.field_names)


class Dialect(Protocol):
    @property
    def prompt(self) -> str:
        """The field that holds the prompt."""

    def read(self, document: Any, served: Served) -> ApiCall:
        """Raises BadRequest naming the field, the value and what is allowed."""

    def refusal(self, error: Exception) -> Refusal:
        """What a caller is sent instead of an answer."""


@dataclass(frozen=True)
class CompletionDialect:
    """Of chats and completions."""

    chat: bool

    @property
    def prompt(self) -> str:
        return "messages" if self.chat else "prompt"

    def read(self, document: Any, served: Served) -> ApiCall:
        return ApiCall(served.understood(document, self.chat))

    def refusal(self, error: Exception) -> Refusal:
        return refusal(error)


COMPLETION_DIALECTS: dict[str, Dialect] = {CHAT: CompletionDialect(True), COMPLETIONS: CompletionDialect(False)}
