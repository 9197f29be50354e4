"""The requests that `vllm bench serve` sends with its backends `openai-chat` and `openai`, many at a time, and the way
it reads the responses."""

from __future__ import annotations

import asyncio
import json
import os
import time

import aiohttp

URL = os.environ["SMCSERVE_URL"]
PROMPT = "There are 45 plums on the desk of Max. Then he loses 31 of them. How many are left?"
COMMON = {
    "model": "demo",
    "temperature": 0.0,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
}
CHAT = COMMON | {
    "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
    "max_completion_tokens": 24,
}
COMPLETION = COMMON | {"prompt": PROMPT, "repetition_penalty": 1.0, "max_tokens": 24, "logprobs": None}


async def measured(session: aiohttp.ClientSession, path: str, body: dict) -> tuple[str, int, float, list[float]]:
    """Return the text, the number of tokens, the time to the first token and the times between later ones, in
    seconds."""
    text, tokens, gaps, first = "", 0, [], None
    headers = {"Authorization": "Bearer none", "x-request-id": "bench-1"}
    began = last = time.perf_counter()
    async with session.post(URL + path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        buffer = b""
        async for data in response.content.iter_any():
            buffer += data
            while b"\n\n" in buffer:
                event, buffer = buffer.split(b"\n\n", 1)
                event = event.decode().removeprefix("data: ")
                if event == "[DONE]":
                    continue
                chunk = json.loads(event)
                if choices := chunk.get("choices"):
                    now = time.perf_counter()
                    first, last = (now - began, now) if first is None else (first, (gaps.append(now - last), now)[1])
                    text += choices[0].get("text") or choices[0].get("delta", {}).get("content") or ""
                elif usage := chunk.get("usage"):
                    tokens = usage["completion_tokens"]
    return text, tokens, first, gaps


def run(path: str, body: dict, requests: int = 32) -> None:
    async def work() -> list:
        async with aiohttp.ClientSession() as session:
            return await asyncio.gather(*(measured(session, path, body) for _ in range(requests)))

    found = asyncio.run(work())
    assert {tokens for _, tokens, _, _ in found} == {24} and len({text for text, *_ in found}) == 1
    assert all(first > 0 and gaps for _, _, first, gaps in found)


def test_chats():
    run("/chat/completions", CHAT)


def test_completions():
    run("/completions", COMPLETION)


def test_it_is_ready():
    async def work() -> int:
        async with aiohttp.ClientSession() as session, session.get(URL + "/models") as response:
            return (await response.json())["data"][0]["id"]

    assert asyncio.run(work()) == "demo"
