"""Invalid bodies: the error, in OpenAI's shape, names the field, the given value and what is allowed. Fields with a
value that has no effect are accepted."""

from __future__ import annotations

import gc
import json
import time
from types import SimpleNamespace

import pytest

from services.openai.bodies import CHAT, COMPLETIONS, parse
from services.openai.requests import Served, understood
from tests.openai.asking import Said, chat, is_error, post, user

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "x"}}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "this is not JSON"),
        (b"{", "this is not JSON: .* at character 2"),
        (b"\xff{}", "cannot be read as JSON"),
        (b'{"a": 1, "a": 2}', "'a' is given twice"),
        (b'{"temperature": NaN}', "NaN is not a number"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "cannot be read as JSON"),
        (b"[" * 60_000, "nested too deeply"),
        (b"[]", "not a JSON object"),
    ],
)
def test_what_is_no_json(service, body, message):
    is_error(post(service, body), 400, "invalid", message)


@pytest.mark.parametrize(
    "body",
    [
        "{" + ",".join(f'"{name}": 1' for name in [*range(60_000), 5]) + "}",
        '{"messages": [' + ",".join("1" for _ in range(200_000)) + "]}",
        '{"messages": [' + ",".join("{}" for _ in range(200_000)) + "]}",
        '{"messages": [{' + ",".join(f'"{name}": 1' for name in range(60_000)) + "}]}",
        "{" + ",".join(f'"{name}": 1' for name in range(60_000)) + "}",
        '{"messages": [{"role": "user", "content": [' + ",".join("1" for _ in range(200_000)) + "]}]}",
    ],
    ids=["a field twice", "no messages", "empty messages", "fields of a message", "fields", "no parts"],
)
def test_what_is_large_and_wrong_is_refused_in_no_time(body):
    """Large invalid bodies are refused quickly, because they are parsed in the loop that serves all callers."""
    gc.freeze()  # garbage collections do not walk the objects of other tests
    try:
        begin = time.thread_time()
        with pytest.raises(ValueError):
            understood(parse(body.encode()), True, Served(("demo",), SimpleNamespace(size=512)))
        assert time.thread_time() - begin < 0.5
    finally:
        gc.unfreeze()


def nested(depth: int) -> bytes:
    return b'{"messages": [], "tools": ' + b"[" * depth + b"]" * depth + b"}"


WRONG = [
    (chat(temperature=-1), "temperature", "temperature=-1; allowed"),
    (chat(temperature=10**400), "temperature", "temperature=1000.*; allowed"),
    (chat(temperature="hot"), "temperature", "temperature='hot'"),
    (b'{"messages": [{"role": "user", "content": "x"}], "top_p": 1e999}', "top_p", "top_p=inf; allowed"),
    (chat(max_tokens=10**400), "max_tokens", "max_tokens=1000"),
    (chat(max_tokens=0), "max_tokens", "max_tokens=0; allowed: >= 1"),
    (chat(max_tokens=512), "max_tokens", "exceeds the context of 512"),
    (chat(max_tokens=5, max_completion_tokens=5), "max_tokens", "both given"),
    (chat(n=0), "n", "n=0; allowed"),
    (chat(n=10**400), "n", "n=1000"),
    (chat(n=129), "n", "at most 128 answers"),
    (chat(n="2"), "n", "n='2'; allowed: an integer"),
    (chat(stream=1), "stream", "stream=1; allowed: true, false"),
    (chat(stream_options={"include_usage": True}), "stream_options", "no effect without stream"),
    (chat(stop=[5]), "stop", "stop contains 5"),
    (chat(stop=["a" * 1001]), "stop", "1001 bytes"),
    (chat(seed=1.5), "seed", "seed=1.5"),
    (chat(method="beam"), "method", "method='beam'; allowed: smc, exact, target, draft"),
    (chat(method="smc", temperature=0), "temperature", "for greedy decoding, method='exact'"),
    (chat(method="target", particles=4), "particles", "no effect with method='target'"),
    (chat(particles=65), "particles", "allowed: 1..64"),
    (chat(frequency_penalty=2.5), "frequency_penalty", "allowed: -2..2"),
    (chat(logit_bias={"512": 1}), "logit_bias", "logit_bias contains token 512; allowed: 0..511"),
    (chat(logit_bias={"5": 101}), "logit_bias", "logit_bias contains 101 for token 5; allowed: -100 to 100"),
    (chat(logit_bias={"five": 1}), "logit_bias", "logit_bias contains token 'five'; allowed: token ids"),
    (chat(logit_bias=[5]), "logit_bias", "logit_bias contains None for token 5"),
    (chat(min_tokens=3, max_tokens=2), "min_tokens", "min_tokens=3; allowed: 0..2, the max_tokens"),
    (chat(min_tokens=10**400), "min_tokens", "min_tokens=1000"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs", r"top_logprobs=21; allowed: 0\.\.20"),
    (chat(logprobs=True, top_logprobs="2"), "top_logprobs", r"top_logprobs='2'; allowed: an integer, 0\.\.20"),
    (chat(top_logprobs=2), "top_logprobs", "top_logprobs=2 has no effect without logprobs"),
    (chat(logprobs=2), "logprobs", "logprobs=2; allowed: true, false$"),
    (chat(prompt_logprobs=-1), "prompt_logprobs", r"prompt_logprobs=-1; allowed: 0\.\.20"),
    (chat(prompt_logprobs=0, method="draft"), "prompt_logprobs", "no effect with method='draft'"),
    (chat(prompt_logprobs=0, stream=True), "prompt_logprobs", "prompt_logprobs=0; allowed: without stream"),
    (chat(timeout=0), "timeout", "timeout=0"),
    (chat(request_id="x" * 257), "request_id", "at most 256"),
    (chat(request_id="a\r\nset-cookie: b"), "request_id", "should match pattern"),
    (chat(cache_salt="x" * 257), "cache_salt", "at most 256"),
    (chat(user=5), "user", "user=5; allowed: a string"),
    (
        chat(temprature=1),
        "temprature",
        "temprature is not a field of /v1/chat/completions here; allowed: .*temperature",
    ),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages", "half of a surrogate"),
    (b'{"messages": [{"role": "user", "content": "x"}], "stop": "\\udfff"}', "stop", "half of a surrogate"),
    (b"{}", "messages", "messages is missing"),
    (json.dumps({"messages": []}).encode(), "messages", r"messages=\[\]; allowed: at least 1 item$"),
    (json.dumps({"messages": [{"role": "robot", "content": "x"}]}).encode(), "messages[0].role", "role='robot'"),
    (
        json.dumps({"messages": [{"role": "user", "content": 5}]}).encode(),
        "messages[0].content",
        "a string, or a list of parts",
    ),
    (
        json.dumps({"messages": [{"role": "system", "content": "Be brief."}]}).encode(),
        "messages",
        "the chat template cannot render",
    ),
    (chat("apples and pears " * 400), "messages", "tokens; allowed: at most 511"),
    (
        json.dumps(
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
        ).encode(),
        "messages[0].content[0].type",
        "allowed: 'text'",
    ),
    (nested(199), "messages", "at least 1"),
    (nested(200), None, "nested too deeply to be read; allowed: at most 200 levels"),
    (nested(900), None, "nested too deeply"),
    (
        chat(
            tools=[{"type": "function", "function": {"name": "f", "parameters": {"a": [[[]]]}}}], tool_choice="required"
        ),
        "tools",
        "tools is given, but the model's chat template ignores it",
    ),
    (chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs", "holds messages"),
]


@pytest.mark.parametrize(
    ("body", "param", "message"), WRONG, ids=[f"{index} {param}" for index, (_, param, _) in enumerate(WRONG)]
)
def test_a_field_that_is_wrong(service, body, param, message):
    code = "context_length_exceeded" if "at most 511" in message else "invalid"
    is_error(post(service, body), 400, code, message, param=param)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user"}, r"^negative_prompt\[1\]\.content is missing; allowed"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, r"^negative_prompt\[1\]\.tool_calls; allowed"),
        (
            {"role": "assistant", "tool_calls": [CALL]},
            r"^negative_prompt\[1\]\.tool_calls\[0\]\.function\.arguments is not JSON",
        ),
        ({"role": 1, "content": "x"}, r"^negative_prompt\[1\] is not a valid message, because of its 'role'"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_errors_of_negative_messages_name_their_place(service, path, message, says):
    body = {"prompt": "x"} if path == COMPLETIONS else {"messages": user("x")}
    body |= {"guidance_scale": 2.0, "negative_prompt": [{"role": "user", "content": "x"}, message]}
    said = post(service, json.dumps(body).encode(), path)
    is_error(said, 400, "invalid", says, param="negative_prompt")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ({"a": 1}, "prompt is neither text nor token ids"),
        ([1, "a"], "prompt is neither text nor token ids"),
        ([[1], "a", [True]], "prompt is neither text nor token ids"),
        ([512], "prompt contains token id 512; allowed: 0..511"),
        ([10**400], "prompt contains token id 1000"),
        ([5] * 600, "has 600 tokens; allowed: at most 511"),
        (["a"] * 129, "at most 128 answers"),
    ],
)
def test_a_prompt_that_is_wrong(service, prompt, message):
    said = post(service, json.dumps({"prompt": prompt}).encode(), COMPLETIONS)
    code = "context_length_exceeded" if "600 tokens" in message else "invalid"
    is_error(said, 400, code, message, param="n" if "answers" in message else "prompt")


def test_no_op_values_are_accepted(service):
    """Fields that the service does not support are accepted with a value that has no effect."""
    fields = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "min_tokens": 0,
        "user": "me",
        "store": False,
        "response_format": {"type": "text"},
        "service_tier": "auto",
        "metadata": {"a": "b"},
        "tool_choice": "none",
        "tools": [],
        "parallel_tool_calls": True,
        "best_of": 1,
        "top_k": -1,
        "stop": None,
        "seed": None,
        "top_logprobs": 0,
        "n": 1,
    }
    assert post(service, chat(**fields, max_tokens=2, method="draft")).status == 200


def test_prompts_are_not_repeated_without_end(service, monkeypatch):
    """With `echo`, the characters of all repeated prompts together are limited to `MOST_ECHOED`."""

    def said(n: int) -> Said:
        return post(
            service,
            json.dumps({"prompt": "x " * 10, "echo": True, "n": n, "max_tokens": 1, "method": "target"}).encode(),
            COMPLETIONS,
        )

    monkeypatch.setattr("services.openai.completions.MOST_ECHOED", 40)
    assert said(2).status == 200
    is_error(said(3), 400, "invalid", "echo=true asks for 60 characters of prompts; allowed: at most 40", param="echo")
