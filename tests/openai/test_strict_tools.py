"""Optional tools with `strict`: text is unconstrained, and every call that begins is valid."""

from __future__ import annotations

import json
import random
from collections import Counter
from functools import cache

import jsonschema
import numpy as np
import pytest

from services.openai.anthropic import MESSAGES
from services.openai.bodies import CHAT, BadRequest, parse
from services.openai.parts import PartReader, message_of
from services.openai.requests import Served, understood
from services.openai.responses import RESPONSES
from services.openai.server import DIALECTS
from services.openai.tool_calls import CallSyntax, ToolFormat
from smc import demo
from smc.api.constraint import Constraint, ConstraintRefused
from smc.api.engine_config import EngineConfig
from smc.api.request import FinishReason
from smc.constraint_masks import Follower
from smc.constraints import Compiler
from smc.local_engine import ModelPair, local_engine
from smc.model.tokenizer import Tokenizer
from smc.stops import StopMachine, TokenBytes
from tests.openai.test_tool_calls import ADD, MARKS, STOP
from tests.pairwise import one_of
from tests.scheduler.harness import CASES, answers, request
from tests.scheduler.pairs import character_pair
from tests.scheduler.schemas import some_schema

STRICT = ADD | {"strict": True}
FREE = ADD | {"name": "free"}
POINT = {
    "name": "point",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/at"}},
        "required": ["at"],
        "$defs": {"at": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
    },
}
"""A tool whose schema refers to its own definitions."""


def with_template(tokenizer: Tokenizer, form: ToolFormat) -> Tokenizer:
    template = "{% if tools %}" + MARKS[form] + "{{ tools | tojson }}{% endif %}" + (tokenizer.chat_template or "")
    return Tokenizer(tokenizer._tokenizer, tokenizer.eos_ids, tokenizer._special, template)


@cache
def demo_tokenizer() -> Tokenizer:
    return ModelPair.load(demo.TARGET, demo.DRAFT).tokenizer


def constraint_of(form: ToolFormat, functions: list[dict], **more: object) -> Constraint | None:
    tokenizer = with_template(demo_tokenizer(), form)
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": function} for function in functions],
    }
    completion = understood(body | more, True, Served(("demo",), tokenizer)).with_tool_format(tokenizer)
    assert completion.syntax is not None and completion.syntax.format is form
    return completion.settings.get("constraint")


def allows(constraint: Constraint, text: str) -> bool:
    compiler = Compiler.of(TokenBytes.of(demo_tokenizer()))
    follower = Follower(StopMachine.of((), (), (), constraint), compiler)
    return follower.ends(np.array(demo_tokenizer().encode(text, add_special=False), dtype=np.int64))


def read(text: str, form: ToolFormat, names: tuple[str, ...] = ()) -> dict:
    return message_of(text, PartReader(CallSyntax(form, frozenset(names), constrained=True), None), "x")


TEXTS = (
    "",
    " \n",
    "It is 7.",
    '{"name": "add"}',
    '{"name": 3, "parameters": {"a": 1}}',
    "[1, 2]",
    "a < b <tool",
    "é\u00a0ß",
)


@pytest.mark.parametrize("form", ToolFormat)
def test_text_is_free_and_calls_are_not(form: ToolFormat):
    """The grammar of optional strict tools allows any text without calls and any valid calls, and no invalid call.
    Without `strict` and with parallel calls there is no constraint."""
    constraint = constraint_of(form, [STRICT, STOP, POINT, FREE])
    assert constraint is not None
    for text in TEXTS:
        assert allows(constraint, text), text
        assert "tool_calls" not in read(text, form)

    def written(*calls: tuple[str, str]) -> str:
        texts = [form.written(*call) for call in calls]
        if form is ToolFormat.MISTRAL:
            # If the tokenizer has the mark, it is a token without text.
            return f"[{', '.join(text.removeprefix('[TOOL_CALLS] [').removesuffix(']') for text in texts)}]"
        return ("\n" if form is ToolFormat.HERMES else "; ").join(texts)

    right = ("add", '{"a": 22, "b": true}')
    others = (("free", '{"anything": [1, {}]}'), ("stop", "{}"), ("point", '{"at": [1, 2]}'))
    for text in (written(right), written(right, *others), "\n" + written(right)):
        assert allows(constraint, text), text
        assert read(text, form)["tool_calls"]
    for wrong in (
        ("add", '{"a": 2}'),
        ("add", "{}"),
        ("sub", "{}"),
        ("stop", '{"x": 1}'),
        ("point", '{"at": [1, 2, 3]}'),
    ):
        for text in (written(wrong), written(right, wrong)):
            assert not allows(constraint, text), text
    assert not allows(constraint, written(right, ("free", "[]")))
    if form is not ToolFormat.HERMES:
        begins = '"type": "function", "id" : "a", "name"'
        assert allows(constraint, written(right).replace('"name"', begins))
        assert read(written(right).replace('"name"', begins), form)["tool_calls"]
        for more in (begins, '"id": 7, "name"', '"type": null, "name"'):
            assert not allows(constraint, written(("add", '{"a": 2}')).replace('"name"', more))
            assert not allows(constraint, written(("add", '{"a": 2}')).replace('"add",', f'"add", {more[:-8]},'))
    if form is ToolFormat.MISTRAL:
        assert allows(constraint, f"[TOOL_CALLS] {written(right)}")
        assert not allows(constraint, f"[TOOL_CALLS] {written(('add', '{}'))}")
    for text in ('{"arguments": {}, "name": "add"}', '[{"parameters": {}, "name": "add"}]', "add{}", "```\n{}\n```"):
        # Calls of other forms are text where a grammar determines what a call is.
        assert allows(constraint, text) and "tool_calls" not in read(text, form)
    if form is ToolFormat.HERMES:
        assert allows(constraint, f"So:\n{written(right)}\nDone: <b>7</b>.")
    one = constraint_of(form, [ADD], parallel_tool_calls=False)
    assert one is not None and allows(one, written(("add", '{"a": 2}'))) and allows(one, "It is 7.")
    assert not allows(one, written(right, right))
    assert constraint_of(form, [ADD]) is None
    assert constraint_of(form, [STRICT], response_format={"type": "json_object"}) == Constraint("json_object")


UNMARKED = (
    '{"name": "NAME", "arguments": ARGUMENTS}',
    '\n```json\n{\n  "name": "NAME",\n  "arguments": ARGUMENTS\n}\n```\n',
    '```\n{"type": "function", "name": "NAME", "arguments": ARGUMENTS}\n```',
    '```tool_call\n{"name":"NAME","arguments":ARGUMENTS}```',
)
"""Calls as Qwen2.5-Coder writes them, though its template asks for `<tool_call>`."""


@pytest.mark.parametrize("written", UNMARKED)
def test_unmarked_calls_with_which_an_answer_begins_are_calls(written: str):
    form, right, wrong = ToolFormat.HERMES, '{"a": 22, "b": true}', '{"a": 2}'

    def text_of(name: str, arguments: str) -> str:
        return written.replace("NAME", name).replace("ARGUMENTS", arguments)

    def calls(text: str) -> list[tuple[str, str]]:
        found = read(text, form, ("add", "grüße"))
        return [(each["function"]["name"], each["function"]["arguments"]) for each in found.get("tool_calls", ())]

    constraint = constraint_of(form, [STRICT, STRICT | {"name": "grüße"}])
    one = constraint_of(form, [STRICT, STRICT | {"name": "grüße"}], parallel_tool_calls=False)
    assert constraint is not None and one is not None
    for name in ("add", "grüße", "gr\\u00fc\\u00dfe"):
        text = text_of(name, right)
        assert allows(constraint, text) and allows(one, text)
        assert calls(text) == [("grüße" if name.startswith("gr") else name, right)]
        assert "content" not in read(text, form, ("add", "grüße")) or not read(text, form, ("add", "grüße"))["content"]
        assert not allows(constraint, text_of(name, wrong)) and not allows(one, text_of(name, wrong))
        assert not allows(constraint, text_of(name, wrong).replace("arguments", "parameters"))
    text = text_of("add", right)
    assert allows(constraint, text + text) and calls(text + text) == [("add", right)] * 2
    assert not allows(constraint, text + text_of("add", wrong)) and not allows(one, text + text)
    tagged = form.written("add", right)
    assert allows(constraint, text + tagged) and len(calls(text + tagged)) == 2
    assert allows(constraint, tagged + text) and len(calls(tagged + text)) == 1 and not allows(one, text + tagged)
    assert allows(constraint, text + "Done.") and allows(one, text + "Done.") and len(calls(text + "Done.")) == 1
    # Behind other text, and with other names, such objects are text.
    for free in (f"So:\n{text_of('add', wrong)}", text_of("sub", wrong), text_of("\\u0061dd", wrong)):
        assert allows(constraint, free) and allows(one, free) and not calls(free), free


def unmarked(a: int) -> str:
    return f'{{"name": "add", "arguments": {{"a": {a}}}}}'


FENCED = f"```json\n{unmarked(22)}\n```"


@pytest.mark.parametrize(
    ("text", "count", "content"),
    [
        (f"{unmarked(22)}\n", 1, ""),
        (f"{unmarked(22)}\n\nDone.", 1, "\n\nDone."),
        (f"{unmarked(22)}\n`a`", 1, "\n`a`"),
        (f"{unmarked(22)}\n{unmarked(1)}\n", 2, ""),
        (f"```json\n{unmarked(22)}\n{unmarked(1)}\n```\n", 2, ""),
        (f"{unmarked(22)}\n{FENCED}", 2, ""),
        (f"{FENCED}\n\n{FENCED}\nDone.", 2, "\nDone."),
        (f"{unmarked(22)}\n<tool_call>\n{unmarked(22)}\n</tool_call>", 2, ""),
        (f"{unmarked(22)}\n</tool_call>", 1, ""),
    ],
)
def test_blanks_and_calls_may_follow_unmarked_calls(text: str, count: int, content: str):
    form = ToolFormat.HERMES
    constraint, one = constraint_of(form, [STRICT]), constraint_of(form, [STRICT], parallel_tool_calls=False)
    assert constraint is not None and allows(constraint, text)
    assert one is not None and allows(one, text) == (count == 1)
    found = read(text, form, ("add",))
    assert len(found["tool_calls"]) == count and (found["content"] or "") == content


JUMBLE = (
    *(unmarked(22), unmarked(22), unmarked(2), unmarked(2).replace("arguments", "parameters")),
    *("\n", "\n", "```", "```", "```json\n", "json", "<tool_call>", "</tool_call>", "So", ",", ";", "[", "{"),
    *('{"id": "a", ', '{"id": ½, ', '"name": "add", "id": 3, "arguments": {"a": 2}}', unmarked(2)[1:]),
)
"""Parts of answers, among them calls that are not valid: `a` is 1 or 22."""


def test_every_call_that_is_read_is_one_that_the_grammar_determines():
    """In answers of random parts, of which most are allowed. Answers without calls are allowed, unless they begin a
    tagged one, or have two fences before what may be one."""
    form, chance, count = ToolFormat.HERMES, random.Random(3), 0
    constraint, one = constraint_of(form, [STRICT]), constraint_of(form, [STRICT], parallel_tool_calls=False)
    assert constraint is not None and one is not None
    for _ in range(800):
        text = "".join(chance.choices(JUMBLE, k=chance.randint(2, 6)))
        calls = read(text, form, ("add",)).get("tool_calls", [])
        right = all(call["function"]["arguments"] == '{"a": 22}' for call in calls)
        if allows(constraint, text):
            assert right, text
            count += len(calls)
        else:
            assert not right or "<tool_call>" in text or text.startswith(2 * "```"), text
        assert not allows(one, text) or (right and len(calls) < 2), text
    assert count > 50


@pytest.mark.parametrize("form", ToolFormat)
def test_required_arguments_may_refer_to_definitions(form: ToolFormat):
    constraint = constraint_of(form, [POINT], tool_choice="required")
    assert constraint is not None
    text = form.written("point", '{"at": [1, 2]}').replace("] [", "][")
    assert allows(constraint, text) and not allows(constraint, text.replace("2", "2, 3"))


@pytest.mark.parametrize("form", ToolFormat)
def test_as_many_strict_tools_as_openai_allows_fit(form: ToolFormat):
    tools = [STRICT | {"name": f"a_function_with_the_number_{number}"} for number in range(128)]
    constraint = constraint_of(form, tools)
    assert constraint is not None and allows(constraint, form.written(tools[-1]["name"], '{"a": 22}').split("] ")[-1])


@pytest.mark.parametrize("setting", [{"logprobs": True, "top_logprobs": 2}, {"ignore_eos": True}])
def test_settings_incompatible_with_strict_tools(setting: dict):
    """Settings that are not available with constraints are refused where calls are constrained."""
    for how in ({"functions": [STRICT]}, {"functions": [ADD], "parallel_tool_calls": False}):
        with pytest.raises(BadRequest, match="is not available where calls are constrained") as caught:
            constraint_of(ToolFormat.HERMES, **how, **setting)
        assert caught.value.param == list(setting)[-1]


NOTHING = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
INEXACT = {"type": "object", "properties": {"a": {"const": 2**53 + 1}}}


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize(("schema", "why"), [(NOTHING, "nothing satisfies it: every"), (INEXACT, "const in #/pro")])
@pytest.mark.parametrize(
    ("path", "field", "tool"),
    [
        (CHAT, "tools[1].function.parameters", lambda f: {"type": "function", "function": f}),
        (RESPONSES, "tools[1].parameters", lambda f: {"type": "function"} | f),
        (MESSAGES, "tools[1].input_schema", lambda f: {"input_schema": f.pop("parameters")} | f),
    ],
)
def test_a_schema_that_is_refused_is_named_by_its_place(path, field, tool, schema, why, required):
    """Also where the answer need not call it, and where only it may be called."""
    tokenizer = with_template(demo_tokenizer(), ToolFormat.HERMES)
    functions = [STRICT, {"name": "bad", "strict": True, "parameters": schema}]
    body: dict = {"tools": [tool(dict(function)) for function in functions]}
    body |= {"input": "x"} if path == RESPONSES else {"messages": [{"role": "user", "content": "x"}]}
    if path == MESSAGES:
        body |= {"max_tokens": 9} | ({"tool_choice": {"type": "tool", "name": "bad"}} if required else {})
    elif required:
        named = {"name": "bad"} if path == RESPONSES else {"function": {"name": "bad"}}
        body["tool_choice"] = {"type": "function"} | named
    call = DIALECTS[path].read(parse(json.dumps(body).encode()), Served(("demo",), tokenizer))
    with pytest.raises(ConstraintRefused) as caught:
        Compiler.of(TokenBytes.of(demo_tokenizer())).check(call.completion.settings["constraint"])
    error = call.completion.names.named(caught.value)
    assert isinstance(error, BadRequest) and error.param == field
    assert str(error).startswith(f"{field}: {why}")


PERSON = {"type": "object", "properties": {"name": {"type": "string"}}}


@pytest.mark.parametrize(
    ("parameters", "right", "wrong"),
    [
        (PERSON, {"name": "x"}, {"name": "x", "type": "string"}),
        ({"type": "object", "properties": {}}, {}, {"name": "f"}),
        ({"type": "object"}, {"name": "f"}, None),
        (PERSON | {"additionalProperties": True}, {"name": "x", "age": 1}, {"name": 1}),
        (PERSON | {"patternProperties": {"^a": {"type": "integer"}}}, {"a": 1}, {"a": "x"}),
        ({"properties": {"p": {"type": "array", "items": PERSON}}}, {"p": [{"name": "x"}]}, {"p": [{"age": 1}]}),
        ({"properties": {"p": {"anyOf": [PERSON, {"type": "null"}]}}}, {"p": None}, {"p": {"age": 1}}),
        ({"allOf": [PERSON, {"properties": {"age": {"type": "integer"}}}]}, {"name": "x", "age": 1}, {"age": "x"}),
    ],
)
def test_arguments_have_no_other_properties_than_their_schema_names(parameters: dict, right: dict, wrong: dict | None):
    form = ToolFormat.HERMES
    constraint = constraint_of(form, [{"name": "f", "parameters": parameters}], tool_choice="required")
    assert constraint is not None and allows(constraint, form.written("f", json.dumps(right)))
    assert wrong is None or not allows(constraint, form.written("f", json.dumps(wrong)))


PIECES = (
    '{"',
    '":',
    '","',
    '"},',
    "]}",
    '":[',
    "true",
    "alse",
    "null",
    "12",
    '"a"',
    "reen",
    "[1,",
    ': "',
    "}\n",
    '"}}',
    "}}",
)
BEGINNINGS = {
    "hermes": {"<tool_call>": 10.0, '\n{"name": "f", "arguments": ': 4.0, "</tool_call>": 4.0, "ool_call>\n": 4.0},
    "llama": {'{"name": "f", "parameters": {': 11.0, '; {"name": "f", "parameters": {': 8.0, '{"name': 4.0},
    "mistral": {'[{"name": "f", "arguments": {': 11.0, ', {"name": "f", "arguments": {': 8.0, "}]": 6.0},
}
"""Parts of calls that are single tokens, each with the logit bias that makes it likelier."""
END = 7.0
LENGTH = 60
METHODS = {
    "target": {"method": "target"},
    "exact": {"method": "exact", "particles": 4},
    "smc": {"method": "smc", "particles": 2},
    "answer": {"method": "smc", "particles": 2, "population": "independent", "constraint_scope": "answer"},
}


@cache
def pair(form: str) -> ModelPair:
    """Random models over single characters and some longer texts, among them those that begin calls, and an end
    token."""
    texts = [text.replace(" ", "Ġ").replace("\n", "Ċ") for text in (*PIECES, *BEGINNINGS[form], "\n")]
    return character_pair(texts, LENGTH + 8)


def check(form: ToolFormat, config: EngineConfig, numbers: range) -> Counter:
    """Decode constrained answers for random schemas with every method. Counts, by method, the answers that ended, those
    without calls, and the calls, all of which must be valid. An answer that was cut at its length may have an
    incomplete last call."""
    models, requests, schemas = pair(form), [], {}
    for number in numbers:
        schema = schemas[number] = some_schema(random.Random(number)) | {"type": "object"}
        tools, parallel = [{"name": "f", "parameters": schema}], number % 4 > 0
        grammar = form.grammar(tools, models.tokenizer, parallel=parallel, required=False)
        at = models.tokenizer.size - 2 - len(BEGINNINGS[form])
        biases = {at + i: bias for i, bias in enumerate(BEGINNINGS[form].values())} | {models.tokenizer.size - 1: END}
        for name, how in METHODS.items():
            if name == ("answer", "smc")[number % 2]:
                continue
            requests.append(
                request((1, 2), f"{name} {number}", seed=number, max_tokens=LENGTH, logit_bias=biases,
                        constraint={"grammar": grammar}, **how)
            )  # fmt: skip
    found, counts = answers(local_engine(models, config), requests), Counter()
    for request_id, answer in found.items():
        name, number = request_id.split()
        ended = answer.finish_reason is FinishReason.EOS
        assert ended or answer.finish_reason is FinishReason.LENGTH
        calls = read(answer.text, form, ("f",)).get("tool_calls", [])
        assert len(calls) < 2 or int(number) % 4
        for call in calls if ended else calls[:-1]:
            jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[int(number)])
            counts[name, "calls"] += 1
        counts[name, "ended"] += ended
        counts[name, "text"] += ended and not calls
        if name == "exact":
            assert answer.tokens == found[f"target {number}"].tokens
    return counts


@pytest.mark.parametrize("form", one_of(*ToolFormat))
def test_calls_of_random_models_are_valid(form: ToolFormat):
    """In look-ahead; the slow test below is in lockstep."""
    counts = check(form, CASES[1], range(4))
    assert counts["exact", "calls"] > 2 and counts["exact", "ended"], counts
    assert counts["smc", "calls"] + counts["answer", "calls"] > 2, counts


MORE = 6
"""Number of schemas of the slow test. In one run of 96 schemas for each format, in lockstep and in look-ahead, all
1,100 calls were valid."""


@pytest.mark.slow
@pytest.mark.parametrize("form", ToolFormat)
def test_calls_of_more_schemas_are_valid(form: ToolFormat):
    counts = check(form, CASES[0], range(4, 4 + MORE))
    assert counts["exact", "calls"] > MORE / 2, counts
