"""Tools: required calls are written and valid, and calls are read from the text however it is split into pieces."""

from __future__ import annotations

import json
import re

import jsonschema
import numpy as np
import openai
import pytest

from services.openai.bodies import BadRequest
from services.openai.parts import PartReader, message_of
from services.openai.requests import Served, understood
from services.openai.tool_calls import MOST_CALLS, CallSyntax, ToolFormat
from smc import demo
from smc.constraint_masks import Follower
from smc.constraints import Compiler
from smc.local_engine import ModelPair
from smc.model.tokenizer import Tokenizer
from smc.stops import StopMachine, TokenBytes
from tests.gateway.harness import serving

ADD = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"enum": [1, 22]}, "b": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
STOP = {"name": "stop"}
TOOLS = [{"type": "function", "function": function} for function in (ADD, STOP)]
MARKS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama": 'ipython "parameters"'}
TEXTS = {
    "hermes": 'Let me see. \n<tool_call>\n{"name": "add", "arguments": {"a": "}\\"{", "b": [1, {}]}}\n</tool_call>\n'
    '<tool_call>{"name":"stop","arguments":{}}</tool_call>',
    "llama": '{"name": "add", "parameters": {"a": "}\\"{", "b": [1, {}]}}; {"name": "stop", "parameters": {}}',
    "mistral": ' [{"name": "add", "arguments": {"a": "}\\"{", "b": [1, {}]}}, {"name": "stop", "arguments": {}}]',
}
PLAIN = ["no <tool and a < b", "x <tool_call>\nnonsense", '{"value": 3}', "[1, 2]", '{"name', "", " \n", "so:\n\nit is"]


def read(text: str, form: ToolFormat, **more: bool) -> dict:
    return message_of(text, PartReader(CallSyntax(form, **more), None), "x")


@pytest.mark.parametrize("form", ToolFormat)
def test_calls_become_a_message(form: ToolFormat):
    found = read(TEXTS[form], form)["tool_calls"]
    assert [one["function"]["name"] for one in found] == ["add", "stop"]
    assert json.loads(found[0]["function"]["arguments"]) == {"a": '}"{', "b": [1, {}]}
    assert len({one["id"] for one in found}) == 2
    for text in PLAIN:
        assert read(text, form) == {"role": "assistant", "content": text}


@pytest.mark.parametrize("name", ['"f\ng"', '"\\x"', '"\\u12"', '"\\ud800"', '"a\\uDC00\\ud800"', '"\t"', '"\\U00e9"'])
@pytest.mark.parametrize("form", ToolFormat)
def test_a_call_whose_name_is_no_text_is_text(form: ToolFormat, name: str):
    """A call whose name is no valid JSON string is returned as text."""
    text = form.written("f", '{"a": 1}').removeprefix("[TOOL_CALLS]").replace('"f"', name)
    assert read(text, form) == {"role": "assistant", "content": text}
    for known in ('"é\\n\\"\\/"', '"\\ud83d\\ude00"', '"\\u00e9"'):
        (call,) = read(text.replace(name, known), form)["tool_calls"]
        assert call["function"] == {"name": json.loads(known), "arguments": '{"a": 1}'}


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return ModelPair.load(demo.TARGET, demo.DRAFT)


def with_template(tokenizer: Tokenizer, form: str) -> Tokenizer:
    """The demo pair's tokenizer with a chat template that begins with the tools, if there are any."""
    template = "{% if tools %}" + MARKS[form] + "{{ tools | tojson }}{% endif %}" + (tokenizer.chat_template or "")
    return Tokenizer(tokenizer._tokenizer, tokenizer.eos_ids, tokenizer._special, template)


def body(**more: object) -> dict:
    return {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **more}


def asked(tokenizer: Tokenizer, **more: object):
    return understood(body(**more), True, Served(("demo",), tokenizer)).with_tool_format(tokenizer)


@pytest.mark.parametrize("form", ToolFormat)
def test_grammars_of_required_calls(pair, form: ToolFormat):
    """Grammars of required calls allow the texts that models of that format write, and neither other functions nor
    plain text."""
    tokenizer = with_template(pair.tokenizer, form)
    texts = {
        name: text.replace('"}\\"{", "b": [1, {}]', "1").replace("Let me see. \n", "").strip()
        for name, text in TEXTS.items()
    }
    text = {"hermes": texts["hermes"].replace("<tool_call>{", "<tool_call>\n{").replace("}</tool", "}\n</tool"),
            "llama": texts["llama"].replace("; ", ";"), "mistral": "[TOOL_CALLS]" + texts["mistral"]}[form]  # fmt: skip
    first = re.split(r"\n<tool_call>|;|, \{", text)[0] + ("]" if form is ToolFormat.MISTRAL else "")
    named = {"type": "function", "function": {"name": "add"}}

    def allows(text: str, **how: object) -> bool:
        constraint = asked(tokenizer, **how).settings["constraint"]
        compiler = Compiler.of(TokenBytes.of(tokenizer))
        follower = Follower(StopMachine.of((), (), (), constraint), compiler)
        return follower.ends(np.array(tokenizer.encode(text, add_special=False)))

    several = {"tool_choice": "required", "parallel_tool_calls": True}
    assert allows(text, **several) and allows(first, **several) and allows(first, tool_choice="required")
    assert not allows(text, tool_choice="required") and not allows(text, tool_choice=named, parallel_tool_calls=True)
    assert not allows(text, tool_choice="required", parallel_tool_calls=False)
    call, between = {"hermes": (first, "\n"), "llama": (first, ";"), "mistral": (first[13:-1], ", ")}[form]
    for count in (MOST_CALLS, MOST_CALLS + 1):
        many = between.join([call] * count)
        assert allows(f"[TOOL_CALLS] [{many}]" if form is ToolFormat.MISTRAL else many, **several) == (
            count == MOST_CALLS
        )
    assert allows(first, tool_choice=named) and not allows(text, tool_choice=named)
    assert not allows("hello", tool_choice="required")
    assert not allows(first.replace("add", "sub"), tool_choice="required")


@pytest.mark.parametrize("given", [{}, {"parameters": None}, {"parameters": {}}])
@pytest.mark.parametrize(
    "how", [{"tool_choice": "required"}, {"parallel_tool_calls": False}, {"strict": True}], ids=str
)
def test_a_function_without_parameters_has_no_arguments(pair, given: dict, how: dict):
    tokenizer = with_template(pair.tokenizer, "hermes")
    function = {"name": "stop"} | given | ({"strict": True} if "strict" in how else {})
    how = {name: value for name, value in how.items() if name != "strict"}
    constraint = asked(tokenizer, tools=[{"type": "function", "function": function}], **how).settings["constraint"]
    follower = Follower(StopMachine.of((), (), (), constraint), Compiler.of(TokenBytes.of(tokenizer)))
    for arguments, is_allowed in (("{}", True), ("{ }", False), ('{"x": 1}', False)):
        text = ToolFormat.HERMES.written("stop", arguments)
        assert follower.ends(np.array(tokenizer.encode(text, add_special=False))) == is_allowed


@pytest.mark.parametrize("form", ToolFormat)
def test_a_required_call_cut_in_its_head_leaves_no_marks(form: ToolFormat):
    """Wherever an answer of required calls ends, its content is empty, and the calls that began are there."""
    text = form.written("add", '{"a": 1}')
    if form is ToolFormat.MISTRAL:
        text = text[:-1] + ', {"name": "stop", "arguments": {}}]'
    else:
        text += ("\n" if form is ToolFormat.HERMES else ";") + form.written("stop", "{}")
    for size in range(len(text) + 1):
        reader = PartReader(CallSyntax(form, constrained=True, required=True), None)
        message = message_of(text[:size], reader, "x")
        assert not message["content"], (text[:size], message)
        names = [call["function"]["name"] for call in message.get("tool_calls", ())]
        assert names == ["add", "stop"][: len(names)]
        is_cut = any(not json_of(call["function"]["arguments"]) for call in message.get("tool_calls", ()))
        assert reader.is_cut == is_cut and reader.has_calls == (bool(names) and not is_cut)
    assert names == ["add", "stop"]


def json_of(text: str) -> bool:
    """Whether a text is JSON."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_stops_do_not_apply_to_required_calls(pair):
    tokenizer = with_template(pair.tokenizer, "hermes")
    stops = {"stop": ["\n", ","], "stop_token_ids": [5]}
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        params = asked(tokenizer, tool_choice=choice, **stops).params(9, 1)
        assert not params.stop and not params.stop_token_ids
    params = asked(tokenizer, **stops).params(9, 1)
    assert list(params.stop) == stops["stop"] and list(params.stop_token_ids) == [5]


def test_what_is_refused(pair):
    tokenizer = with_template(pair.tokenizer, "hermes")
    plain = Tokenizer(
        tokenizer._tokenizer, (), tokenizer._special, "{{ tools }}" + (pair.tokenizer.chat_template or "")
    )
    for one, given, param in (
        (pair.tokenizer, {}, "tools"),
        (plain, {"tool_choice": "required"}, "tool_choice"),
        (tokenizer, {"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        (tokenizer, {"tool_choice": "required", "tools": []}, "tool_choice"),
        (tokenizer, {"tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    ):
        with pytest.raises(BadRequest) as caught:
            asked(one, **given)
        assert caught.value.param == param, caught.value
    assert asked(plain).syntax is None and asked(tokenizer, tool_choice="none").tools is None


def test_calls_over_http_whole_and_streamed(pair):
    """Calls by openai-python, whole and streamed. The arguments of all deltas together are JSON that matches the
    schema."""
    changed = ModelPair(pair.target, pair.draft, with_template(pair.tokenizer, "hermes"), pair.max_context)
    settings = {
        "model": "demo",
        "messages": [{"role": "user", "content": "x"}],
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "max_tokens": 200,
        "seed": 4,
        "logprobs": True,
        "extra_body": {"method": "target"},
    }
    with (
        serving(changed, http_port=0, served_model_names=("demo",)) as service,
        openai.OpenAI(base_url=service.url, api_key="none", max_retries=0) as client,
    ):
        (choice,) = client.chat.completions.create(**settings).choices
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        jsonschema.validate(json.loads(call.function.arguments), ADD["parameters"])
        name, arguments, reasons, scored = "", "", [], []
        for chunk in client.chat.completions.create(**settings, stream=True):
            for delta in chunk.choices[0].delta.tool_calls or ():
                name += delta.function.name or ""
                arguments += delta.function.arguments or ""
            reasons.append(chunk.choices[0].finish_reason)
            scored.append(
                [token.token for token in chunk.choices[0].logprobs.content] if chunk.choices[0].logprobs else []
            )
        assert (name, arguments) == (call.function.name, call.function.arguments) and reasons[-1] == "tool_calls"
        assert [token for piece in scored for token in piece] == [one.token for one in choice.logprobs.content]
        assert sum(map(bool, scored)) > 4, "they come with their tokens, of calls, too"
        auto = client.chat.completions.create(**settings | {"tool_choice": "auto", "max_tokens": 5}).choices[0]
        assert auto.message.tool_calls is None and auto.message.content
