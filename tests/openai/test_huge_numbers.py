"""Numbers beyond every float, in any field of a body, are refused by their field or have no effect."""

from __future__ import annotations

import json

import pytest

from services.batch.lines import parse_line
from services.openai.anthropic import MESSAGES
from services.openai.bodies import CHAT, COMPLETIONS, parse
from services.openai.responses import RESPONSES
from smc.api.constraint import InexactNumber, json_float
from tests.openai.asking import post, user

HUGE = "1e99999999999999999999"
NUMBERS = [HUGE, f"-{HUGE}", "0e99999999999999999999", "1e-99999999999999999999", "1E+99999999999999999999", "1e400"]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_beyond_floats_is_inexact(number):
    value = json_float(number)
    assert isinstance(value, InexactNumber) and value.literal == number
    assert parse(f'{{"x": {number}}}'.encode()) == {"x": float(number)}
    line = f'{{"custom_id": "a", "method": "POST", "url": "{CHAT}", "body": {{"temperature": {number}}}}}'
    assert parse_line(1, line.encode()).mistake is None
    assert "custom_id" in parse_line(1, f'{{"custom_id": {number}}}'.encode()).mistake


SCHEMA = {"type": "object", "properties": {"a": {"type": "number", "maximum": 0.5}}}
REFUSED = {
    "temperature": (CHAT, {"temperature": 0.5}, "temperature"),
    "max_tokens": (COMPLETIONS, {"max_tokens": 0.5}, "max_tokens"),
    "seed": (CHAT, {"seed": 0.5}, "seed"),
    "timeout": (CHAT, {"timeout": 0.5}, "timeout"),
    "logit_bias": (CHAT, {"logit_bias": {"5": 0.5}}, "logit_bias"),
    "prompt": (COMPLETIONS, {"prompt": [0.5]}, "prompt"),
    "messages": (CHAT, {"messages": 0.5}, "messages"),
    "unknown": (CHAT, {"unknown": 0.5}, "unknown"),
    "guided_json": (CHAT, {"guided_json": SCHEMA}, "guided_json"),
    "text of a schema": (CHAT, {"guided_json": json.dumps(SCHEMA)}, "guided_json"),
    "responses": (RESPONSES, {"temperature": 0.5}, "temperature"),
    "format": (
        RESPONSES,
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "null", "default": 0.5}}}},
        "text.format",
    ),
    "messages of Anthropic": (MESSAGES, {"temperature": 0.5, "max_tokens": 3}, None),
}
"""Path, body and wrong field. 0.5 stands for the number."""


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_its_field(service, name):
    path, body, param = REFUSED[name]
    prompt = {COMPLETIONS: {"prompt": "x"}, RESPONSES: {"input": "x"}}.get(path, {"messages": user("x")})
    said = post(service, json.dumps(prompt | body).replace("0.5", HUGE).encode(), path)
    assert said.status == 400 and said.json["error"].get("param") == param, said.data


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"a": [0.5]}},
        {"tools": [{"type": "function", "name": "f", "parameters": {"default": 0.5}}]},
    ],
    ids=["metadata", "tools"],
)
def test_a_response_repeats_it_as_null(tool_service, fields, stream):
    body = {"input": "x", "max_output_tokens": 8, "stream": stream} | fields
    said = post(tool_service, json.dumps(body).replace("0.5", HUGE).encode(), RESPONSES)
    assert said.status == 200 and b"null" in said.data and b"response.failed" not in said.data, said.data
