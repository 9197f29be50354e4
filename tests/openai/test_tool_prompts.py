"""Chats with tools: their text is rendered once, beside the event loop, and errors name the same fields as without
tools."""

from __future__ import annotations

import json
import threading

import pytest

from services.openai.anthropic import COUNT_TOKENS, MESSAGES
from services.openai.bodies import CHAT, BadRequest
from services.openai.requests import Served, understood
from services.openai.responses import RESPONSES
from services.prompts import LONG_TEXT
from smc.local_engine import ModelPair
from smc.model.tokenizer import Tokenizer
from tests.gateway.harness import serving
from tests.openai.asking import is_error, post, user

FUNCTION = {"name": "add", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
TEXT = "apples and pears " * 3000
BODIES = {
    CHAT: {"messages": user(TEXT), "tools": TOOLS},
    RESPONSES: {"input": TEXT, "tools": [{"type": "function", **FUNCTION}]},
    MESSAGES: {"messages": user(TEXT), "max_tokens": 1, "tools": [{"name": "add", "input_schema": {}}]},
    COUNT_TOKENS: {"messages": user(TEXT), "tools": [{"name": "add", "input_schema": {}}]},
}
"""Calls with a long text and tools, by path."""


@pytest.mark.parametrize("path", BODIES)
def test_a_long_chat_is_rendered_once_and_beside_the_loop(tool_service, monkeypatch, path):
    rendered, encoded = [], []
    render, encode = Tokenizer._rendered, Tokenizer.encode

    def noted_render(*args):
        text = render(*args)
        rendered.append((threading.current_thread(), len(text)))
        return text

    def noted_encode(self, text, *args, **options):
        encoded.append((threading.current_thread(), len(text)))
        return encode(self, text, *args, **options)

    monkeypatch.setattr(Tokenizer, "_rendered", noted_render)
    monkeypatch.setattr(Tokenizer, "encode", noted_encode)
    said = post(tool_service, json.dumps(BODIES[path]).encode(), path)
    assert said.status == 400 and "characters, at least" in said.json["error"]["message"], said.data
    for work in (rendered, encoded):
        assert [thread is tool_service._thread for thread, size in work if size > LONG_TEXT] == [False]


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"messages": [{"role": "assistant", "content": "x"}] * 2},
            "messages",
            "template cannot render these messages",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "chat_template_kwargs holds messages"),
    ],
    ids=["messages", "settings"],
)
def test_errors_name_the_same_fields(strict_service, tools, fields, param, message):
    body = {"messages": user("x"), "max_tokens": 1, "tools": tools} | fields
    is_error(post(strict_service, json.dumps(body).encode()), 400, "invalid", message, param=param)


@pytest.fixture(scope="module")
def strict_service(pair):
    """A service whose chat template reads tools and refuses messages that do not begin with the user's."""
    check = "{% if messages[0].role != 'user' %}{{ raise_exception('the user is first') }}{% endif %}"
    with serving(with_template(pair, check + "{{ tools }}" + pair.tokenizer.chat_template), http_port=0) as service:
        yield service


def test_a_model_without_a_chat_template(pair):
    with serving(with_template(pair, None), http_port=0) as service:
        for tools in (None, TOOLS):
            body = {"messages": user("x"), "tools": tools}
            is_error(post(service, json.dumps(body).encode()), 400, "invalid", "no chat template", param="messages")


def with_template(pair: ModelPair, template: str | None) -> ModelPair:
    known = pair.tokenizer
    tokenizer = Tokenizer(known._tokenizer, known.eos_ids, known._special, template)
    return ModelPair(pair.target, pair.draft, tokenizer, pair.max_context)


@pytest.mark.parametrize(
    ("template", "settings", "has_system", "reads"),
    [
        ("{{ messages[0].content }}", {}, False, False),
        ("{% if tools %}{{ tools[0].function.name }}{% endif %}", {}, False, True),
        ("{% if tools and shown %}{{ tools }}{% endif %}", {}, False, False),
        ("{% if tools and shown %}{{ tools }}{% endif %}", {"shown": True}, False, True),
        ("{% if messages[0].role == 'system' %}{{ tools }}{% endif %}", {}, False, False),
        ("{% if messages[0].role == 'system' %}{{ tools }}{% endif %}", {}, True, True),
        ("{{ raise_exception('x') }}", {}, False, True),
    ],
)
def test_what_a_template_reads(pair, template, settings, has_system, reads):
    assert with_template(pair, template).tokenizer.reads_tools(has_system, settings) == reads


def test_too_many_tools_are_refused_before_their_grammar_is_written(tool_service):
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(20_000)]
    served = Served(("demo",), tool_service.pair.tokenizer)
    completion = understood({"messages": user("x"), "tools": tools, "tool_choice": "required"}, True, served)
    with pytest.raises(BadRequest, match=r"20000 functions have .* allowed: at most 65536") as caught:
        completion.with_tool_format(served.tokenizer)
    assert caught.value.param == "tools"
