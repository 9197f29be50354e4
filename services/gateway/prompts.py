"""The three forms of a prompt, and how each becomes token ids. Knows nothing about what they are for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from services.pb import generation_pb2 as pb
from smc.models.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant")
LONG_TEXT = 4096
"""Characters from which on a text is encoded in a thread: a millisecond or two of a core, for which other callers would wait."""
MESSAGE_SIZE = 16
"""Characters that a message of a chat costs besides its content: roughly what templates put around it."""


async def prompt_ids(message: pb.GenerateRequest, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids of the prompt in `message`. Raises ValueError naming the field, the value and what is allowed."""
    form = message.WhichOneof("prompt")
    if form is None:
        raise ValueError("prompt is missing; allowed: one of text, token_ids, chat")
    if form == "token_ids":
        return tuple(message.token_ids.ids)
    if form == "text":
        return await _encode(tokenizer.encode, message.text, len(message.text))
    messages = _chat(message.chat, tokenizer)
    return await _encode(tokenizer.chat, messages, sum(MESSAGE_SIZE + len(m["content"]) for m in messages))


def _chat(chat: pb.Chat, tokenizer: Tokenizer) -> list[dict[str, str]]:
    if not tokenizer.has_chat_template:
        raise ValueError("chat is given, but the target model has no chat template; allowed: text, token_ids")
    if not chat.messages:
        raise ValueError("chat.messages is empty; allowed: at least one message")
    for index, message in enumerate(chat.messages):
        if message.role not in ROLES:
            raise ValueError(f"chat.messages[{index}].role={message.role!r}; allowed: {', '.join(ROLES)}")
    return [{"role": message.role, "content": message.content} for message in chat.messages]


async def _encode(encode: Callable[[Any], list[int]], text: Any, size: int) -> tuple[int, ...]:
    return tuple(await asyncio.to_thread(encode, text) if size >= LONG_TEXT else encode(text))
