"""A prompt as text, token ids or chat messages, and its encoding to token ids. Long prompts are encoded in threads, so
that other calls do not wait. Knows nothing about the APIs that prompts come from."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from services.pb import generation_pb2 as pb
from smc.api.limits import PromptTooLong
from smc.model.tokenizer import Tokenizer
from smc.scheduler.admission import QueueFull, check_prompt

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
    begins_message: bool = True
    """The template begins the assistant's message."""
    continues_last: bool = False
    """The answer continues the last message."""

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
        return tokenizer.chat(
            self.messages, limit, self.tools, self.template_settings, self.begins_message, self.continues_last
        )

    def written(self, tokenizer: Tokenizer) -> str:
        """The text of a prompt that is no chat."""
        return tokenizer.decode(self.token_ids) if self.token_ids is not None else self.text or ""


@contextmanager
def of_negative() -> Iterator[None]:
    """Errors raised inside are reported as errors of the negative prompt."""
    try:
        yield
    except ValueError as error:
        kind = PromptTooLong if isinstance(error, PromptTooLong) else ValueError
        raise kind(f"negative_prompt: {error}") from error


def _written(message: dict[str, Any]) -> int:
    """Characters of a message that a template may write, about."""
    return sum(len(value) if isinstance(value, str) else len(str(value)) for value in message.values())


ROLES = ("system", "user", "assistant")
LONG_TEXT = 4096
"""Characters from which on a text is encoded in a thread: a millisecond or two of a core, for which other callers would
wait."""
THREADS = 2
WAITING = 16 << 20
"""Characters of all texts together that are being encoded or wait for it; beyond, prompts are refused."""


class PromptEncoder:
    """Encodes prompts for one model pair; long ones in threads of their own. Use it in one asyncio loop."""

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        self._tokenizer, self._context = tokenizer, context
        self._limit = context - 1
        self._threads = ThreadPoolExecutor(THREADS, "encode")
        self._waiting = 0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, message: pb.GenerateRequest | pb.NegativePrompt) -> tuple[int, ...]:
        """Token ids of the prompt in `message`. Raises ValueError naming the field, the value and what is allowed, and
        QueueFull."""
        form = message.WhichOneof("prompt")
        if form is None:
            raise ValueError("prompt is missing; allowed: one of text, token_ids, chat")
        if form == "token_ids":
            check_prompt(len(message.token_ids.ids), self._context)
            return await self.tokens(Prompt(token_ids=tuple(message.token_ids.ids)))
        if form == "text":
            return await self.tokens(Prompt(text=message.text))
        return await self.tokens(Prompt(messages=self._chat(message.chat)))

    async def tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of `prompt`. Raises ValueError and QueueFull."""
        if prompt.messages is not None:
            self._check_chat(len(prompt.messages))
        if prompt.size < LONG_TEXT:
            ids = prompt.encode(self._tokenizer, self._limit)
        else:
            ids = await self._encode_long(prompt)
        check_prompt(len(ids), self._context)
        return tuple(ids)

    async def negative(self, prompt: pb.NegativePrompt | Prompt | None) -> tuple[int, ...] | None:
        """Token ids of a negative prompt, if there is one. Raises ValueError and QueueFull."""
        if prompt is None:
            return None
        with of_negative():
            return await (self.tokens(prompt) if isinstance(prompt, Prompt) else self.encode(prompt))

    def _chat(self, chat: pb.Chat) -> tuple[dict[str, str], ...]:
        self._check_chat(len(chat.messages))
        for index, message in enumerate(chat.messages):
            if message.role not in ROLES:
                raise ValueError(f"chat.messages[{index}].role={message.role!r}; allowed: {', '.join(ROLES)}")
        return tuple({"role": message.role, "content": message.content} for message in chat.messages)

    def _check_chat(self, count: int) -> None:
        if not self._tokenizer.has_chat_template:
            raise ValueError("chat is given, but the target model has no chat template; allowed: a text, or token ids")
        if not count:
            raise ValueError("chat.messages is empty; allowed: at least one message")
        if count > self._limit:  # templates put a token at least around each
            raise PromptTooLong(
                f"chat has {count} messages, a token each at least; allowed: at most {self._limit} tokens"
            )

    async def _encode_long(self, prompt: Prompt) -> Sequence[int]:
        size = prompt.size
        if self._waiting and self._waiting + size > WAITING:
            raise QueueFull(
                f"prompts of {self._waiting} characters wait to be encoded; allowed: {WAITING}. Try again later"
            )
        self._waiting += size
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, prompt.encode, self._tokenizer, self._limit
            )
        finally:
            self._waiting -= size
