"""The three forms of a prompt, and how each becomes token ids. Knows nothing about what they are for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from services.pb import generation_pb2 as pb
from smc.engine.admission import QueueFull, check_prompt
from smc.models.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant")
LONG_TEXT = 4096
"""Characters from which on a text is encoded in a thread: a millisecond or two of a core, for which other callers would wait."""
MESSAGE_SIZE = 16
"""Characters that a message of a chat costs besides its content: roughly what templates put around it."""
THREADS = 2
WAITING = 16 << 20
"""Characters of all texts together that are being encoded or wait for it; beyond, prompts are refused."""


class Prompts:
    """Encodes prompts for one model pair; long ones in threads of their own. Use it in one asyncio loop."""

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        self._tokenizer, self._context = tokenizer, context
        self._limit = context - 1
        self._threads = ThreadPoolExecutor(THREADS, "encode")
        self._waiting = 0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, message: pb.GenerateRequest) -> tuple[int, ...]:
        """Token ids of the prompt in `message`. Raises ValueError naming the field, the value and what is allowed, and QueueFull."""
        form = message.WhichOneof("prompt")
        if form is None:
            raise ValueError("prompt is missing; allowed: one of text, token_ids, chat")
        if form == "token_ids":
            return self.of_ids(message.token_ids.ids)
        if form == "text":
            return await self.of_text(message.text)
        messages = self._chat(message.chat)
        size = sum(MESSAGE_SIZE + len(m["content"]) for m in messages)
        return self.of_ids(await self._encode(size, lambda: self._tokenizer.chat(messages, limit=self._limit)))

    def of_ids(self, ids: Sequence[int]) -> tuple[int, ...]:
        """A prompt that is token ids already. Raises ValueError for as many as leave no room for an answer."""
        check_prompt(len(ids), self._context)
        return tuple(ids)

    async def of_text(self, text: str) -> tuple[int, ...]:
        """Encoded as it is, without a chat template. Raises what `encode` raises."""
        return self.of_ids(await self._encode(len(text), lambda: self._tokenizer.encode(text, limit=self._limit)))

    def _chat(self, chat: pb.Chat) -> list[dict[str, str]]:
        if not self._tokenizer.has_chat_template:
            raise ValueError("chat is given, but the target model has no chat template; allowed: text, token_ids")
        if not chat.messages:
            raise ValueError("chat.messages is empty; allowed: at least one message")
        if len(chat.messages) > self._limit:  # templates put a token at least around each
            raise ValueError(f"chat has {len(chat.messages)} messages; allowed: at most {self._limit}")
        for index, message in enumerate(chat.messages):
            if message.role not in ROLES:
                raise ValueError(f"chat.messages[{index}].role={message.role!r}; allowed: {', '.join(ROLES)}")
        return [{"role": message.role, "content": message.content} for message in chat.messages]

    async def _encode(self, size: int, encode: Callable[[], Sequence[int]]) -> Sequence[int]:
        if size < LONG_TEXT:
            return encode()
        if self._waiting and self._waiting + size > WAITING:
            raise QueueFull(f"prompts of {self._waiting} characters wait to be encoded; allowed: {WAITING}. Try again later")
        self._waiting += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, encode)
        finally:
            self._waiting -= size
