"""LiteLLM with `openai/` models: whole answers, streams, several answers, text completions, errors."""

from __future__ import annotations

import asyncio
import os

import litellm
import pytest

ASKED = {"model": "openai/demo", "api_base": os.environ["SMCSERVE_URL"], "api_key": "none", "max_tokens": 40}
QUESTION = [{"role": "user", "content": "Mia has 12 apples. She buys 30 more. How many now?"}]


def test_an_answer():
    answer = litellm.completion(messages=QUESTION, seed=1, temperature=0, **ASKED)
    assert "42" in answer.choices[0].message.content and answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 3


def test_our_own_fields():
    greedy = litellm.completion(messages=QUESTION, temperature=0, **ASKED).choices[0].message.content
    target = litellm.completion(messages=QUESTION, temperature=0, extra_body={"method": "target"}, **ASKED)
    assert target.choices[0].message.content == greedy
    litellm.completion(messages=QUESTION, extra_body={"method": "smc", "particles": 4}, **ASKED)


def test_several_answers():
    assert len(litellm.completion(messages=QUESTION, n=3, **ASKED).choices) == 3


def test_a_stream_with_usage():
    whole = litellm.completion(messages=QUESTION, seed=3, **ASKED)
    chunks = list(
        litellm.completion(messages=QUESTION, seed=3, stream=True, stream_options={"include_usage": True}, **ASKED)
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)][
        -1
    ].completion_tokens == whole.usage.completion_tokens


def test_asynchronously():
    async def work() -> list:
        return await asyncio.gather(*(litellm.acompletion(messages=QUESTION, seed=seed, **ASKED) for seed in range(8)))

    assert len(asyncio.run(work())) == 8


def test_a_text_completion():
    asked = {**ASKED, "model": "text-completion-openai/demo"}
    assert litellm.text_completion(prompt="12 + 30 =", seed=1, **asked).choices[0].text


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"temperature": -1}, litellm.BadRequestError),
        ({"max_tokens": 10_000}, litellm.BadRequestError),
        ({"model": "openai/other"}, litellm.NotFoundError),
    ],
)
def test_errors(fields, error):
    with pytest.raises(error):
        litellm.completion(messages=QUESTION, num_retries=0, **ASKED | fields)
