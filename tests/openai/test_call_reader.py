"""Calls are read from every form in which models write them, however the text comes, and nothing is dropped."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from services.openai.call_reader import ToolCallReader
from services.openai.tool_calls import CallSyntax, ToolFormat

NAMES = ("f", "get_weather", "günstig.2")
HERMES, LLAMA, MISTRAL = ToolFormat.HERMES, ToolFormat.LLAMA, ToolFormat.MISTRAL
Read = tuple[str, list[tuple[str, str]]]
SOME = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])


def syntax(form: ToolFormat, **more: bool) -> CallSyntax:
    return CallSyntax(form, frozenset(NAMES), **more)


def read(written: CallSyntax, *pieces: str) -> Read:
    """Return the content, and name and arguments of every call."""
    reader, content = ToolCallReader(written), ""
    calls: list[tuple[str, str]] = []
    for deltas in (*map(reader.push, pieces), reader.finish()):
        for delta in deltas:
            content += delta.content
            if delta.name is not None:
                calls.append((delta.name, ""))
            if delta.arguments:
                calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    assert reader.calls == len(calls)
    return content, calls


def read_in_pieces(written: CallSyntax, text: str, cuts: list[int]) -> Read:
    """Read a text whole, in the given pieces, and character by character. All must be equal."""
    whole = read(written, text)
    at = sorted(cut % (len(text) + 1) for cut in cuts)
    assert read(written, *(text[begin:end] for begin, end in zip([0, *at], [*at, len(text)]))) == whole
    assert read(written, *text) == whole
    return whole


PLAIN = {"name": "f", "arguments": {"a": 1}}
F = ("f", '{"a": 1}')
KNOWN = [
    (LLAMA, '{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [F]),
    (LLAMA, '{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}', "", [F]),
    (LLAMA, '{"type": "function", "function": "f", "parameters": {"a": 1}}', "", [F]),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}\n{"name": "g", "parameters": {}}', "", [F, ("g", "{}")]),
    (LLAMA, '<|python_tag|>{"parameters": {"a": 1}, "name": "f"}', "", [F]),
    (LLAMA, 'Let me see.\n{"name": "f", "parameters": {"a": 1}}\nDone.', "Let me see.\nDone.", [F]),
    (LLAMA, '{"name": "f", "parameters": null}', "", [("f", "{}")]),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}} lost', " lost", [F]),
    (LLAMA, '```json\n{"name": "f", "parameters": {"a": 1}}\n```', "", [F]),
    (HERMES, '<tool_call>\n{"arguments": {"a": 1}, "name": "f"}\n</tool_call>', "", [F]),
    (HERMES, '<tool_call>{"id": 7, "name": "f", "arguments": {"a": 1}}</tool_call>', "", [F]),
    (HERMES, '<tool_call>{"name": "f", "type": "x", "arguments": {"a": 1}, "id": "y"}</tool_call>', "", [F]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [F]),
    (HERMES, '<tool_call>\n```json\n{"name": "f", "arguments": {"a": 1}}\n```\n</tool_call>', "", [F]),
    (HERMES, f"Wait.<tool_call>{json.dumps(PLAIN)}\n<tool_call>{json.dumps(PLAIN)}</tool_call>", "Wait.", [F, F]),
    (HERMES, f"<tool_call>{json.dumps(PLAIN)} lost </tool_call> and found", " lost and found", [F]),
    (HERMES, f"<tool_call>[{json.dumps(PLAIN)}, {json.dumps(PLAIN)}]</tool_call>", "", [F, F]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}, "why": "x"}</tool_call>', ', "why": "x"}', [F]),
    (HERMES, json.dumps(PLAIN), "", [F]),
    (
        HERMES,
        '```json\n{\n  "name": "f",\n  "arguments": {\n    "a": 1\n  }\n}\n```',
        "",
        [("f", '{\n    "a": 1\n  }')],
    ),
    (HERMES, f"Let me see.\n\n```json\n{json.dumps(PLAIN)}\n```\nDone.", "Let me see.\nDone.", [F]),
    (HERMES, f"```json\n[{json.dumps(PLAIN)}, {json.dumps(PLAIN)}]\n```", "", [F, F]),
    (HERMES, f"<tools>\n{json.dumps(PLAIN)}\n{json.dumps(PLAIN)}\n</tools>", "", [F, F]),
    (HERMES, f"Now: <tool_call>{json.dumps(PLAIN)}</tool_call>\n{json.dumps(PLAIN)}\n</tool_call>", "Now:", [F, F]),
    (HERMES, '{{"name": "f", "arguments": {"a": 1}}}', "", [F]),
    (HERMES, '<tool_call>\n{{"name": "f", "arguments": {"a": 1}}}\n</tool_call>', "", [F]),
    (HERMES, "```json\n" + '{{"arguments": {"a": 1}, "name": "f"}}' + "\n```", "", [F]),
    (MISTRAL, '[{"arguments": {"a": 1}, "name": "f"}]', "", [F]),
    (MISTRAL, f"[TOOL_CALLS] [{json.dumps(PLAIN)}]", "", [F]),
    (MISTRAL, f"Let me see.[TOOL_CALLS][{json.dumps(PLAIN)}]", "Let me see.", [F]),
    (MISTRAL, f"Let me see. [{json.dumps(PLAIN)}] lost", "Let me see. lost", [F]),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]9[ARGS]{}', "", [F, ("g", "{}")]),
    (MISTRAL, 'Let me see.f{"a": 1}get_weather{}', "Let me see.", [F, ("get_weather", "{}")]),
]
"""Texts of calls with their content and calls."""
TEXTS = [
    (LLAMA, '{"name": "f"}'),
    (LLAMA, '{"name": "Bob", "age": 3}'),
    (LLAMA, 'He said {"name": "f", "parameters": {}}'),
    (LLAMA, 'Write\n```\n{"name": "f", "parameters": {}}\n```'),
    (LLAMA, 'So:\n{"name": "unknown", "parameters": {}}'),
    (LLAMA, '{"name": "f", "parameters": "Oslo"}'),
    (LLAMA, '{"name": "f", "parameters": [1]}'),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": 7}\n</tool_call>'),
    (HERMES, "a </tool_call> b"),
    (HERMES, '{"name": "f"}'),
    (HERMES, '{"name": "unknown", "arguments": {}}'),
    (HERMES, '```json\n{"name": "unknown", "arguments": {}}\n```'),
    (HERMES, f"He said {json.dumps(PLAIN)}"),
    (HERMES, f"```python\n{json.dumps(PLAIN)}\n```"),
    (HERMES, f"Write\n```\nx = 1\n{json.dumps(PLAIN)}\n```"),
    (HERMES, '<tools>\n{"type": "function"}\n</tools>'),
    (HERMES, '{"a": {"name": "f", "arguments": {}}}'),
    (HERMES, '{{"name": "f"}}'),
    (MISTRAL, "[TOOL_CALLS] none"),
    (MISTRAL, 'leaf{"a": 1}, f{x} and unknown{"a": 1}'),
    (MISTRAL, 'See [{"name": "unknown", "arguments": {}}].'),
]
"""Texts without calls."""


@pytest.mark.parametrize(("form", "text", "content", "calls"), KNOWN)
def test_calls_as_models_write_them(form: ToolFormat, text: str, content: str, calls: list):
    """However a text is cut into two pieces."""
    for cut in range(len(text) + 1):
        found, found_calls = read_in_pieces(syntax(form), text, [cut])
        assert (" ".join(found.split()), found_calls) == (" ".join(content.split()), calls)


@pytest.mark.parametrize(("form", "text"), TEXTS)
def test_what_is_no_call_is_text(form: ToolFormat, text: str):
    for cut in range(len(text) + 1):
        assert read_in_pieces(syntax(form), text, [cut]) == (text, [])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
ARGUMENTS = st.dictionaries(st.text(max_size=5) | st.sampled_from(["name", "}", "</tool_call>"]), JSON, max_size=3)
WORDS = ("Well", "a < b", "so {x}", "[1]", "it's", "über", '"', "`x`", "{", "]", "<tool", "[TOOL", "}", "ff{", "7;")
PROSE = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(" ".join)


@st.composite
def written_call(draw: st.DrawFn, form: ToolFormat, named: bool, further: bool) -> tuple[str, tuple[str, dict]]:
    """A call as a model may write it, with the name and arguments that must be read. `named`: in Mistral's later form;
    `further`: it may have an id and a type; otherwise, a member that no call has."""
    name, arguments = draw(st.sampled_from(NAMES)), draw(ARGUMENTS)
    ascii_only, indent = draw(st.booleans()), draw(st.sampled_from([None, 1]))
    given = json.dumps(arguments, ensure_ascii=ascii_only, indent=indent)
    if named:
        between = draw(st.sampled_from(["[ARGS]", "[CALL_ID]a1B[ARGS]"])) if further else "[ARGS]"
        return name + between + given, (name, arguments)
    members = {"name": json.dumps(name, ensure_ascii=ascii_only)}
    key = draw(st.sampled_from(["arguments", "parameters"]))
    members[key] = json.dumps(given) if draw(st.integers(0, 4)) == 0 else given
    if further:
        members |= draw(st.sampled_from([{}, {"id": '"a\\"}"'}, {"type": '"function"'}, {"id": "17", "type": "null"}]))
    else:
        members |= draw(st.sampled_from([{}, {"x": '"w7w"'}, {"w8w": "{}"}, {"arguments": '{"x": "w9w"}'}]))
    blank = draw(st.sampled_from(["", " ", "\n  "]))
    order = draw(st.permutations(list(members)))
    body = f",{blank}".join(f'"{one}":{blank}{members[one]}' for one in order)
    return f"{{{blank}{body}{blank}}}", (name, arguments)


@st.composite
def written_calls(draw: st.DrawFn, form: ToolFormat, begins: bool, further: bool) -> tuple[str, list]:
    """One or more calls together. `begins`: the answer begins with them."""
    named = form is MISTRAL and draw(st.booleans())
    made = [draw(written_call(form, named, further)) for _ in range(draw(st.integers(1, 3)))]
    texts, calls = [text for text, _ in made], [call for _, call in made]
    if named:
        return "".join(draw(st.sampled_from(["[TOOL_CALLS]", "[TOOL_CALLS] ", ""])) + text for text in texts), calls
    blank = draw(st.sampled_from(["", " ", "\n"]))
    if form is MISTRAL:
        mark = draw(st.sampled_from(["[TOOL_CALLS]", ""]))
        return f"{mark}{blank}[{f',{blank}'.join(texts)}{blank}]", calls
    if form is LLAMA:
        tag = draw(st.sampled_from(["<|python_tag|>", ""])) if begins else ""
        joined = draw(st.sampled_from([";", "; ", "\n", ", "])).join(texts)
        fence = begins and not tag and draw(st.booleans())
        return f"{tag}```json\n{joined}\n```" if fence else tag + blank + joined, calls
    fence = draw(st.sampled_from(["{}", "```json\n{}\n```", "```\n{}```"]))
    tagged = [f"<tool_call>{blank}{fence.replace('{}', text)}{blank}" for text in texts]
    last = draw(st.booleans()) or len(tagged) > 1
    return "".join(text + "</tool_call>" * (draw(st.booleans()) or not last) for text in tagged), calls


@st.composite
def answers(draw: st.DrawFn, further: bool = True) -> tuple[ToolFormat, str, list[str], list]:
    """A format, an answer of texts and calls in turn, and the words and calls in it."""
    form = draw(st.sampled_from(ToolFormat))
    whole, words, calls = "", [], []
    begins = draw(st.booleans())
    for number in range(draw(st.integers(1, 4))):
        if (number % 2 == 0) is begins:
            text, more = draw(written_calls(form, begins and number == 0, further))
            calls += more
        else:
            text = draw(PROSE)
            words += text.split()
        end = "\n" if form is LLAMA else draw(st.sampled_from([" ", "\n"]))
        whole += text + end
    return form, whole, words, calls


@SOME
@given(answers(), st.lists(st.integers(0, 10_000), max_size=8))
def test_every_call_and_every_word_is_read(answer, cuts):
    """Random texts and calls in turn, in every format and in many forms: all calls are read, all else is content, and
    pieces give what the whole gives."""
    form, text, words, calls = answer
    content, found = read_in_pieces(syntax(form), text, cuts)
    assert content.split() == words
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


def check_words(written: CallSyntax, text: str, cuts: list[int]) -> None:
    """Every word of the form w7w is in the content or in a call."""
    content, calls = read_in_pieces(written, text, cuts)
    found = re.findall(r"w\d+w", content + "".join(f"\n{name}\n{arguments}" for name, arguments in calls))
    assert Counter(found) == Counter(re.findall(r"w\d+w", text))


@settings(SOME, max_examples=300)
@given(
    answers(further=False),
    st.lists(st.integers(0, 10_000), max_size=1),
    st.none() | st.integers(0, 400),
    st.lists(st.integers(0, 10_000), max_size=5),
    st.booleans(),
)
def test_no_word_within_calls_is_dropped(answer, places, end: int | None, cuts, constrained: bool):
    """Words that a model writes into its calls, wherever, also if the answer is cut: what makes a call no call becomes
    content."""
    form, text, _, _ = answer
    for place in places:
        at = place % (len(text) + 1)
        text = text[:at] + "w1w" + text[at:]
    check_words(syntax(form, constrained=constrained), text[:end], cuts)


FRAGMENTS = (
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "```",
    *'{}[],;:"\\\n ',
    '"name": ',
    '"arguments": ',
    '"parameters": ',
    '"function": ',
    '"type": "function"',
    '"f"',
    "f",
    '{"a": 1}',
    '{"name": "f", "arguments": {',
    '{"name": "f", "parameters": ',
    '{"arguments": {}, ',
)


@settings(SOME, max_examples=300)
@given(
    st.sampled_from(ToolFormat),
    st.lists(st.sampled_from(FRAGMENTS) | st.integers(0, 99).map(lambda number: f"w{number}w"), max_size=14),
    st.lists(st.integers(0, 10_000), max_size=5),
    st.booleans(),
)
@example(HERMES, ['<tool_call>{"name": "f", "arguments": {}, "', "w1w"], [], False)
@example(LLAMA, ['{"name": "f", "parameters": {}', ', "id": "', "w1w"], [], False)
def test_no_word_is_dropped(form: ToolFormat, fragments: list[str], cuts: list[int], constrained: bool):
    """Whatever pieces of calls come in whatever order, every word is in the content or in a call, and pieces give what
    the whole gives."""
    check_words(syntax(form, constrained=constrained), "".join(fragments), cuts)
