"""Constraints on answers, by every field of OpenAI and vLLM that sets one, and over gRPC."""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from services.client import Client, ServiceError
from services.openai.anthropic import MESSAGES
from services.openai.bodies import CHAT, COMPLETIONS
from services.openai.responses import RESPONSES
from smc.api.request import Answer, FinishReason, Output
from tests.gateway.harness import Service, local_answer, serving
from tests.openai.asking import QUESTIONS, Said, chat, connect, is_error, post, user

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 22]}, "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
    "required": ["a", "b"],
    "additionalProperties": False,
    # Without this, the demo pair would write only whitespace.
    "x-guidance": {"whitespace_flexible": False},
}
EXACT = {"method": "exact", "particles": 2, "max_tokens": 40, "seed": 3}


def schema_format(**more: object) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, **more}}


@pytest.fixture(scope="module")
def expected(pair) -> Answer:
    return local_answer(pair, pair.tokenizer.chat(user(QUESTIONS[0])), constraint={"json_schema": SCHEMA}, **EXACT)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": schema_format(strict=True)},
        {"structured_outputs": {"json": SCHEMA, "regex": None}},
        {"guided_json": json.dumps(SCHEMA)},
        {"constraint": {"json_schema": SCHEMA}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_every_field_asks_for_the_same(service: Service, expected: Answer, fields):
    """Every field that sets a JSON schema gives the answer of the in-process engine under that schema."""
    found = post(service, chat(QUESTIONS[0], **EXACT, **fields)).json["choices"][0]
    assert found["message"]["content"] == expected.text
    assert found["finish_reason"] == "stop"
    assert json.loads(expected.text)["a"] in (1, 22)


def test_other_kinds_streams_and_several_answers(service: Service, expected: Answer):
    for fields, expression in (
        ({"structured_outputs": {"regex": "[0-9]{2}"}}, "[0-9]{2}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "a" "b"+ "c"'}, "ab+c"),
        ({"guided_regex": "x|y", "constraint_scope": "answer", "method": "smc"}, "x|y"),
    ):
        choices = post(service, chat(n=2, max_tokens=40, seed=1, **fields)).json["choices"]
        assert [bool(re.fullmatch(expression, one["message"]["content"])) for one in choices] == [True, True]
    streamed = post(service, chat(QUESTIONS[0], stream=True, **EXACT, response_format=schema_format())).data.decode()
    deltas = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    pieces = [one["choices"][0]["delta"].get("content") or "" for one in deltas]
    assert "".join(pieces) == expected.text and sum(map(bool, pieces)) > 1
    text = post(service, chat(response_format={"type": "text"}, max_tokens=3)).json["choices"][0]["message"]["content"]
    assert text


def test_over_grpc(service: Service):
    with Client(service.address) as client:
        found = client.generate("x", constraint={"choice": ["up", "down"]}, max_tokens=20, seed=1)
        assert found.text in ("up", "down")


def test_digits_that_no_float_holds(service: Service):
    """They are kept where a schema has them, and rounded where a setting has them."""
    body = chat(QUESTIONS[0], **EXACT, temperature=0.7)
    longer = body.replace(b"0.7", b"0.70000000000000001")
    assert longer != body
    texts = [post(service, one).json["choices"][0]["message"]["content"] for one in (body, longer)]
    assert texts[0] == texts[1]
    schema = chat(response_format=schema_format(schema={"const": 0.7})).replace(b"0.7", b"0.70000000000000001")
    message = "response_format: const in # has 0.70000000000000001, which cannot be kept exactly"
    is_error(post(service, schema), 400, "invalid", message, param="response_format")


NOTHING = {"$ref": "#"}
FAILED = ("UNAVAILABLE", "INTERNAL")
"""Statuses that use up the error budget of the availability objective, see deploy/prometheus/rules.yml."""


def test_what_nothing_satisfies_is_the_caller_s_error_in_every_api(service: Service):
    """It is refused with the name of the caller's field before it is queued, and uses up no error budget."""

    def counted() -> tuple[float, float]:
        bad, failed = (
            sum(service.metric("smc_requests_total", status=status, finish_reason="none") for status in statuses)
            for statuses in (("INVALID_ARGUMENT",), FAILED)
        )
        return bad, failed

    before, form = counted(), {"type": "json_schema", "name": "x", "schema": NOTHING}
    asked: list[tuple[str, dict, str]] = [
        (CHAT, {"messages": user("x"), "response_format": schema_format(schema=NOTHING)}, "response_format"),
        (COMPLETIONS, {"prompt": "x", "guided_regex": "x*[a&&b]"}, "guided_regex"),
        (CHAT, {"messages": user("x"), "structured_outputs": {"regex": "[a&&b]"}}, "structured_outputs.regex"),
        (RESPONSES, {"input": "x", "text": {"format": form}}, "text.format"),
    ]
    for path, body, field in asked:
        error = post(service, json.dumps(body).encode(), path)
        is_error(error, 400, "invalid", re.compile(f"^{field}: nothing satisfies it: "), param=field)
    config = {"format": {"type": "json_schema", "schema": NOTHING}}
    body = {"messages": user("x"), "max_tokens": 9, "model": "demo", "output_config": config}
    found = post(service, json.dumps(body).encode(), MESSAGES)
    assert found.status == 400 and found.json["error"]["type"] == "invalid_request_error"
    assert found.json["error"]["message"].startswith("output_config.format: nothing satisfies it: ")
    with Client(service.address) as client, pytest.raises(ServiceError, match=r"constraint\.regex: nothing") as caught:
        client.generate("x", constraint={"regex": "[a&&b]"})
    assert caught.value.code.name == "INVALID_ARGUMENT"
    assert counted() == (before[0] + len(asked) + 2, before[1])


SLOW = "start: e\ne: " + " | ".join(" ".join(["e"] * k) for k in range(2, 40)) + " | /[^#]/\n"
"""A grammar that can be read in so many ways that its masks soon take seconds."""


def test_a_constraint_that_becomes_slow_ends_its_call_and_no_other(service: Service):
    """Four answers at once, beside a stream: the call gets 400 with the caller's field, and the stream all its tokens.
    Its longest pause is compared with the usual one, and with that of a busy machine."""
    counted = {"status": "INTERNAL", "finish_reason": "none"}
    failed = service.metric("smc_requests_total", **counted)
    refused: list[Said] = []
    asks = threading.Thread(
        target=lambda: refused.append(post(service, chat("x", n=4, structured_outputs={"grammar": SLOW})))
    )
    connection, times = connect(service), []
    body = json.loads(chat(QUESTIONS[0], stream=True, max_tokens=150, ignore_eos=True, method="exact", seed=1))
    connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
    for line in connection.getresponse():
        if b'"content"' in line:
            times.append(time.monotonic())
            if len(times) == 5:
                asks.start()
    connection.close()
    asks.join()
    is_error(refused[0], 400, "constraint", "takes too much time", param="structured_outputs.grammar")
    assert service.metric("smc_requests_total", **counted) == failed
    pauses = np.diff(times)
    assert max(pauses) < 4 + 20 * np.median(pauses)


class Cut:
    """A backend whose answers end themselves after their first token, whatever their constraint allows."""

    def __init__(self, backend) -> None:
        self._backend = backend

    async def generate(self, request):
        async for output in self._backend.generate(request):
            if (answer := output.answer) is not None:
                cut = replace(answer, tokens=answer.tokens[:1], finish_reason=FinishReason.EOS)
                yield Output(output.request_id, cut.tokens, "", cut)


FIELDS: dict[str, tuple[str, dict, str]] = {
    "guided_regex": (CHAT, {"messages": user("x"), "guided_regex": "[0-9]{9}"}, "regex"),
    "structured_outputs.regex": (
        COMPLETIONS,
        {"prompt": "x", "structured_outputs": {"regex": "[0-9]{9}"}},
        "regex",
    ),
    "text.format": (
        RESPONSES,
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        "json_schema",
    ),
}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_ends_too_early_is_an_error_of_its_constraint(pair, stream):
    """With the caller's field, and under its own cause: a failure while decoding is no rejection."""
    with serving(pair, http_port=0, wrap=Cut) as service:
        for field, (path, body, kind) in FIELDS.items():
            said = post(service, json.dumps(body | {"stream": stream}).encode(), path)
            message = f"{field}: the answer ended where the {kind} does not allow an end"
            is_error(said, 400, "constraint", message, param=field)
        with Client(service.address) as client, pytest.raises(ServiceError, match=r"constraint\.regex: the answer end"):
            client.generate("x", constraint={"regex": "[0-9]{9}"})
        assert not service.metric("smc_requests_rejected_total", code="INVALID_ARGUMENT", cause="invalid")
        assert service.metric("smc_constraint_invalid_ends_total") == len(FIELDS) + 1


def test_what_happened_is_counted(service: Service):
    """Constraints are compiled once and then found in the cache; metrics count compilations, hits and masks."""
    hits, compiled = (
        service.metric("smc_constraint_cache_hits_total"),
        service.metric("smc_constraint_compile_seconds_count"),
    )
    masks = service.metric("smc_constraint_mask_seconds_count")
    for _ in range(2):
        post(service, chat(max_tokens=20, guided_regex="(one|two)( (one|two))*"))
    assert service.metric("smc_constraint_compile_seconds_count") == compiled + 1
    assert service.metric("smc_constraint_cache_hits_total") > hits
    assert service.metric("smc_constraint_mask_seconds_count") > masks
    assert service.metric("smc_constraint_invalid_ends_total") == 0


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "'json_schema' without json_schema"),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            "allowed: 'text', 'json_object' or 'json_schema'",
        ),
        (
            {"structured_outputs": {"structural_tag": "x"}},
            "structured_outputs",
            "has structural_tag; allowed: one of json",
        ),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex", "guided_regex and guided_choice are given"),
        ({"guided_choice": []}, "guided_choice", "a list of non-empty strings"),
        ({"guided_regex": "("}, "guided_regex", r"guided_regex: unclosed group in the regular expression \("),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "outputs.regex: unclosed group"),
        ({"constraint": {"regex": "("}}, "constraint.regex", "constraint.regex: unclosed group"),
        ({"constraint": {"regex": 5}}, "constraint.regex", "constraint.regex: 5; allowed: a string"),
        ({"response_format": schema_format(schema={"type": "no"})}, "response_format", "^response_format: Inval"),
        ({"response_format": schema_format(schema={"$ref": "#"})}, "response_format", "^response_format: nothing"),
        ({"response_format": schema_format(schema={"const": 2**53 + 1})}, "response_format", "9007199254740993, which"),
        ({"constraint": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "not available with a constraint"),
    ],
)  # fmt: skip
def test_what_is_refused(service: Service, fields, param, message):
    is_error(post(service, chat(**fields)), 400, "invalid", re.compile(message, re.DOTALL), param=param)
