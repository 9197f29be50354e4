"""A prompt in one of its three forms, and how it becomes token ids. Knows nothing about messages, bodies or who
asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from smc.model.tokenizer import Tokenizer

MESSAGE_SIZE = 16
"""Characters that a message of a chat costs besides its content: roughly what templates put around it."""


@dataclass(frozen=True)
class Prompt:
    """Exactly one of the first three."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    """For the target's chat template, each with `role` and `content`."""
    tools: tuple[dict[str, Any], ...] = ()
    """That the template may offer to the model."""
    template_settings: dict[str, Any] = field(default_factory=dict)
    """What else the template is given, by name."""

    @property
    def size(self) -> int:
        """Characters that are to be encoded, about."""
        if self.messages is not None:
            extra = sum(len(str(given)) for given in (self.tools, self.template_settings) if given)
            return extra + sum(MESSAGE_SIZE + _written(message) for message in self.messages)
        return len(self.text or "")

    def encode(self, tokenizer: Tokenizer, limit: int) -> Sequence[int]:
        """Raises ValueError if there are more than `limit` tokens, or the template cannot render the messages."""
        if self.token_ids is not None:
            return self.token_ids
        if self.text is not None:
            return tokenizer.encode(self.text, limit=limit)
        assert self.messages is not None
        return tokenizer.chat(self.messages, limit=limit, tools=self.tools, settings=self.template_settings)

    def written(self, tokenizer: Tokenizer) -> str:
        """The text of a prompt that is no chat."""
        return tokenizer.decode(self.token_ids) if self.token_ids is not None else self.text or ""


@contextmanager
def of_negative() -> Iterator[None]:
    """What is wrong with a negative prompt is said of that."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"negative_prompt: {error}") from error


def _written(message: dict[str, Any]) -> int:
    """Characters of a message that a template may write, about."""
    return sum(len(value) if isinstance(value, str) else len(str(value)) for value in message.values())
