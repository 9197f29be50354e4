"""A prompt as text, token ids or chat messages, and its encoding to token ids. Long prompts are encoded in threads, so
that other calls do not wait. Except for messages of `smc.v1`, knows nothing about the APIs that prompts come from."""

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
"""Characters that count for each chat message in addition to its content: roughly what templates put around it."""
ROLES = ("system", "user", "assistant")
LONG_TEXT = 4096
"""Prompts of at least this many characters are encoded in a thread: this takes a millisecond or two of a core, and
other callers would wait meanwhile."""
THREADS = 2
WAITING = 16 << 20
"""Maximum number of characters, over all prompts, that are being encoded in threads or wait for it; further prompts are
refused."""


@dataclass(frozen=True)
class Prompt:
    """A prompt. Exactly one of `text`, `token_ids` and `messages` is given."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    """Messages for the target's chat template, each with `role` and `content`."""
    tools: tuple[dict[str, Any], ...] = ()
    """Tools that the template may offer to the model."""
    template_settings: dict[str, Any] = field(default_factory=dict)
    """Further variables of the template, by name."""
    begins_message: bool = True
    """Whether the template begins the assistant's message."""
    continues_last: bool = False
    """Whether the answer continues the last message."""

    @property
    def size(self) -> int:
        """Approximate number of characters to encode; 0 for token ids."""
        if self.messages is not None:
            extra = sum(len(str(given)) for given in (self.tools, self.template_settings) if given)
            return extra + sum(MESSAGE_SIZE + _written(message) for message in self.messages)
        return len(self.text or "")

    def encode(self, tokenizer: Tokenizer, limit: int) -> Sequence[int]:
        """Return the token ids; given ones are returned unchecked. Raises ValueError if a text or chat has more than
        `limit` tokens, or if the template cannot render the messages."""
        if self.token_ids is not None:
            return self.token_ids
        if self.text is not None:
            return tokenizer.encode(self.text, limit=limit)
        assert self.messages is not None
        return tokenizer.chat(
            self.messages, limit, self.tools, self.template_settings, self.begins_message, self.continues_last
        )

    def written(self, tokenizer: Tokenizer) -> str:
        """Return the text of a prompt that is not a chat."""
        return tokenizer.decode(self.token_ids) if self.token_ids is not None else self.text or ""


@contextmanager
def of_negative() -> Iterator[None]:
    """Context manager that reports a ValueError as an error of the negative prompt."""
    try:
        yield
    except ValueError as error:
        kind = PromptTooLong if isinstance(error, PromptTooLong) else ValueError
        raise kind(f"negative_prompt: {error}") from error


def _written(message: dict[str, Any]) -> int:
    """Return the approximate number of characters that a template writes for the fields of a message."""
    return sum(len(value) if isinstance(value, str) else len(str(value)) for value in message.values())


class PromptEncoder:
    """Encodes prompts for one model pair, long ones in its own threads. Use it in one asyncio loop."""

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        self._tokenizer, self._context = tokenizer, context
        self._limit = context - 1
        self._threads = ThreadPoolExecutor(THREADS, "encode")
        self._waiting = 0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, message: pb.GenerateRequest | pb.NegativePrompt) -> tuple[int, ...]:
        """Return the token ids of the prompt in `message`. Raises QueueFull, and ValueError naming the field, the value
        and what is allowed."""
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
        """Return the token ids of `prompt`. Raises ValueError and QueueFull."""
        if prompt.messages is not None:
            self._check_chat(len(prompt.messages))
        if prompt.size < LONG_TEXT:
            ids = prompt.encode(self._tokenizer, self._limit)
        else:
            ids = await self._encode_long(prompt)
        check_prompt(len(ids), self._context)
        return tuple(ids)

    async def negative(self, prompt: pb.NegativePrompt | Prompt | None) -> tuple[int, ...] | None:
        """Return the token ids of a negative prompt, None if there is none. Raises ValueError and QueueFull."""
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
        if count > self._limit:  # templates write at least one token for each message
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
