"""Encoding a prompt must not delay other callers, and prompts that cannot be encoded are refused clearly."""

from __future__ import annotations

import asyncio
import threading

import pytest

from services.pb import generation_pb2 as pb
from services.prompts import Prompt, PromptEncoder
from smc.model.presets import NoText


class Listening:
    """A tokenizer that records the thread that called it."""

    has_chat_template = True
    thread = None

    def chat(self, messages: list[dict[str, str]], *_: object) -> list[int]:
        self.thread = threading.current_thread()
        return [len(messages)]


async def encode(prompts: PromptEncoder, message: pb.GenerateRequest) -> tuple[int, ...]:
    try:
        return await prompts.encode(message)
    finally:
        prompts.close()


def test_many_messages_are_encoded_in_thread():
    """A chat of thousands of empty messages counts as long and is encoded in a thread; a short one is encoded in the
    loop."""
    for count, here in ((3, True), (5000, False)):
        tokenizer = Listening()
        message = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user")] * count))
        assert asyncio.run(encode(PromptEncoder(tokenizer, context=10_000), message)) == (count,)
        assert (tokenizer.thread is threading.current_thread()) is here


@pytest.mark.parametrize("given", [{"text": "hello"}, {"messages": ({"role": "user", "content": "hello"},)}])
def test_random_weights_have_no_text(given):
    """A text for a model with random weights is refused with ValueError, the error for a caller's mistake."""
    with pytest.raises(ValueError, match="random weights has no"):
        Prompt(**given).encode(NoText(10), limit=5)
