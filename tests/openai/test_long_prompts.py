"""Prompts that exceed the context get OpenAI's error code and the numbers of tokens given and allowed, however long
they are."""

from __future__ import annotations

import json

import pytest

from services.openai.bodies import CHAT, COMPLETIONS
from tests.gateway.harness import serving
from tests.openai.asking import chat, connect, is_error, post

CODE = "context_length_exceeded"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5] * 512, "the prompt has 512 tokens; allowed: at most 511"),
        ("x1" * 600, r"the prompt has \d+ tokens; allowed: at most 511"),
        ("x1" * 30_000, r"the prompt has 60\d+ characters, at least \d+ tokens; allowed: at most 511"),
        ("x1" * 50_000, r"the body has more than 73728 bytes, .* allowed: at most 511 tokens"),
    ],
    ids=["ids", "text", "too long to encode", "too long to read"],
)
def test_a_prompt_that_the_context_does_not_hold(service, prompt, message):
    said = post(service, json.dumps({"prompt": prompt, "max_tokens": 1}).encode(), COMPLETIONS)
    is_error(said, 400, CODE, message, param="prompt")
    if isinstance(prompt, str):
        is_error(post(service, chat(prompt)), 400, CODE, message, param="messages")


def test_negative_prompts_too(service):
    body = {"prompt": "x", "max_tokens": 1, "guidance_scale": 2.0, "negative_prompt": [5] * 600}
    said = post(service, json.dumps(body).encode(), COMPLETIONS)
    is_error(
        said, 400, CODE, "negative_prompt: the prompt has 600 tokens; allowed: at most 511", param="negative_prompt"
    )


def test_a_body_without_a_length(service):
    """A chunked body without a declared length gets the same error once it exceeds the limit."""
    connection = connect(service)
    chunks = (b"x" * 8192 for _ in range(20))
    connection.request("POST", CHAT, chunks, {"content-type": "application/json"}, encode_chunked=True)
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())["error"]["code"]) == (400, CODE)
    connection.close()


def test_a_limit_of_bytes_says_nothing_of_the_context(pair):
    """A body over a byte limit that is lower than the context needs is refused with 413, not as too long for the
    context."""
    with serving(pair, http_port=0, max_message_bytes=2000) as service:
        is_error(post(service, chat("x" * 3000)), 413, "too_large", "more than 2000 bytes")
