"""How prompts become token ids beside calls that must not wait for them. Knows nothing about what they are for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from services.pb import generation_pb2 as pb
from services.prompt import Prompt, of_negative
from smc.model.tokenizer import Tokenizer
from smc.scheduler.admission import QueueFull, check_prompt

ROLES = ("system", "user", "assistant")
LONG_TEXT = 4096
"""Characters from which on a text is encoded in a thread: a millisecond or two of a core, for which other callers would
wait."""
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
            raise ValueError(f"chat has {count} messages; allowed: at most {self._limit}")

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
