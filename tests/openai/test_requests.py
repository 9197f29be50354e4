"""Chats as chat templates render them, and the settings that bodies give to the library, without a service."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from services.openai.bodies import BadRequest
from services.openai.requests import CompletionRequest, Served, understood
from smc.api.engine_config import EngineConfig
from smc.api.sampling_params import Method, SamplingParams
from smc.model.tokenizer import Tokenizer
from smc.scheduler.capacity import longest_answer

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }} {{ tool.function.parameters | tojson }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments.x }}){% endfor %}"
    "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}{% endfor %}{% if thinking %}<think>{% endif %}<assistant>"
)
SERVED = Served(("demo",), SimpleNamespace(size=512))
"""Reading a body needs no more of a tokenizer than its size."""
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "description": None}}


@pytest.fixture(scope="module")
def tokenizer(pair) -> Tokenizer:
    """The demo pair's tokenizer, with a template that renders everything that it is given."""
    return Tokenizer(pair.tokenizer._tokenizer, pair.tokenizer.eos_ids, {}, TEMPLATE)


def asked(messages: list, **fields) -> CompletionRequest:
    return understood({"messages": messages, **fields}, True, SERVED)


def read(tokenizer: Tokenizer, messages: list, **fields) -> str:
    (prompt,) = asked(messages, **fields).prompts
    return tokenizer.decode(prompt.encode(tokenizer, 10_000))


def test_roles_and_parts(tokenizer):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "name": "ada",
            "content": [{"type": "text", "text": "1 + 1"}, {"type": "text", "text": "= ?"}],
        },
        {
            "role": "assistant",
            "content": "2",
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "tool_calls": None,
        },
    ]
    assert read(tokenizer, messages) == "<system>Be brief.<user ada>1 + 1\n= ?<assistant>2<assistant>"


def test_tools_and_what_they_said(tokenizer):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 5}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]
    shown = "<user>x<assistant>(add 5)<tool>7#c1<assistant>"
    assert read(tokenizer, messages, tools=[TOOL]) == '[add {"type": "object"}]' + shown
    assert read(tokenizer, messages, tools=[TOOL], tool_choice="auto") == '[add {"type": "object"}]' + shown
    assert read(tokenizer, messages, tools=[TOOL], tool_choice="none") == read(tokenizer, messages) == shown


def test_settings_of_the_template(tokenizer):
    assert (
        read(tokenizer, [{"role": "user", "content": "x"}], chat_template_kwargs={"thinking": True})
        == "<user>x<think><assistant>"
    )
    for name in ("messages", "tools", "add_generation_prompt"):
        with pytest.raises(ValueError, match=f"chat_template_kwargs holds {name}"):
            read(tokenizer, [{"role": "user", "content": "x"}], chat_template_kwargs={name: 1})


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user"}, r"messages\[0\].content is missing"),
        (
            {"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
            "role 'assistant'",
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "["}}]},
            "arguments is not JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[1]"}}]},
            "arguments is not an object",
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[" * 100_000}}]},
            "arguments is not JSON",
        ),
        ({"role": "user", "content": "x", "audio": "a"}, r"messages\[0\].audio='a'; allowed: null"),
        ({"role": "user", "content": "x", "mood": "a"}, r"messages\[0\].mood is not a field"),
    ],
)
def test_a_message_that_is_wrong(message, said):
    with pytest.raises(BadRequest, match=said):
        asked([message])


def test_what_is_asked():
    """Fields of a body become settings of the library, and the `n` seeds are distinct, begin with the given one and are
    reproducible."""
    one = asked(
        [{"role": "user", "content": "x"}],
        temperature=0.5,
        stop="a",
        particles=3,
        seed=7,
        n=3,
        cache_salt="s",
        timeout=2,
    )
    params = one.params(100, next(one.seeds()))
    assert (params.temperature, params.stop, params.particles, params.seed, params.max_tokens) == (
        0.5,
        ("a",),
        3,
        7,
        100,
    )
    seeds = list(one.seeds())
    assert len(set(seeds)) == 3 and seeds[0] == 7 and seeds == list(one.seeds())
    assert list(asked([{"role": "user", "content": "x"}], n=2).seeds()) == [None, None]
    assert (one.n, one.body.cache_salt, one.body.timeout, one.body.stream) == (3, "s", 2, False)


DEFAULTS = [
    ("exact", {}, "exact"),
    ("smc", {}, "smc"),
    ("smc", {"temperature": 0}, "exact"),
    ("smc", {"alpha": 2}, "smc"),
    ("smc", {"method": "target"}, "target"),
    ("exact", {"method": "target"}, "target"),
    ("draft", {}, "draft"),
]


@pytest.mark.parametrize(("default", "fields", "method"), DEFAULTS)
def test_the_method_of_a_body_that_names_none(default, fields, method):
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    assert understood(body, True, replace(SERVED, method=default)).params(5, 1).method is Method(method)


def test_defaults_of_a_checkpoint_beside_the_default_method():
    """The temperature of `generation_config.json` counts as a request's own, and settings of SMC alone do not prevent
    the checkpoint's defaults."""

    def params(fields: dict, **defaults) -> SamplingParams:
        body = {"messages": [{"role": "user", "content": "x"}], **fields}
        return understood(body, True, replace(SERVED, method="smc", defaults=defaults)).params(5, 1)

    assert params({}, temperature=0.0).method is Method.EXACT
    assert params({"temperature": 0.7}, temperature=0.0).method is Method.SMC
    assert params({"alpha": 2}, top_k=7).top_k == 7


def test_the_longest_answer_is_the_longest_that_could_run():
    """`longest_answer` is limited by the context and by the KV pages that the request's rows would need."""
    config = EngineConfig(block=4, branches=2, max_slots=16)
    for params in (
        SamplingParams(method=Method.SMC, particles=16),
        SamplingParams(method="exact"),
        SamplingParams(method="target"),
    ):
        assert longest_answer(params, config, {}, 512, 12) == 500
        assert longest_answer(params, config, {"draft": 10**6, "target": 10**6}, 512, 12) == 500
        assert longest_answer(params, config, {"draft": 5, "target": 5}, 512, 12) == 1
        assert longest_answer(replace(params, max_tokens=400, min_tokens=300), config, {}, 512, 12) == 500
    guided, pages = SamplingParams(method="target", guidance_scale=2.0), {"draft": 1000, "target": 1000}
    assert (
        longest_answer(guided, config, pages, 5000, 12)
        == longest_answer(guided, config, pages, 5000, 12, negative=1)
        < 500
    )
    few = longest_answer(
        SamplingParams(method=Method.SMC, particles=16), config, {"draft": 3000, "target": 3000}, 512, 12
    )
    assert (
        100
        < few
        < 3000 / 16
        < longest_answer(SamplingParams(method="exact"), config, {"draft": 3000, "target": 3000}, 512, 12)
    )


def test_numbers_beyond_what_others_can_hold_are_refused_by_name():
    """Numbers that are too large for a float or an integer of the library are refused with the name of the field."""
    for name in ("temperature", "top_k", "seed", "particles", "time_budget", "n"):
        body = json.loads(json.dumps({"messages": [{"role": "user", "content": "x"}], name: 10**400}))
        with pytest.raises(BadRequest) as caught:
            understood(body, True, SERVED)
        assert caught.value.param == name
