"""What a constraint is refused for besides having no text: numbers that would become others, and what cannot be
followed. Errors name the caller's field and do not quote the library's grammar."""

from __future__ import annotations

import json
import re
import threading
import time
from typing import Any

import pytest

from smc.api.constraint import MAX_BYTES, Constraint, ConstraintRefused
from smc.grammar.compiler import in_ascii
from tests.grammar.walks import allows, compiler, walk

BIG, INT64, UINT64 = 2**53 + 1, 2**63, 2**64


def refusal(given: dict[str, Any]) -> str:
    with pytest.raises(ConstraintRefused) as caught:
        compiler().check(Constraint.of(given))
    return str(caught.value)


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"const": BIG}, "const in #"),
        # The library would overflow its stack, and end the process.
        ({"const": -INT64}, "const in #"),
        ({"type": "integer", "minimum": -INT64, "maximum": -INT64}, "maximum in #"),
        ({"enum": ["a", {"x": [-BIG]}]}, "enum in #"),
        ({"type": "object", "properties": {"a/b": {"const": BIG}}}, "const in #/properties/a~1b"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"enum": [BIG]}}}, "enum in #/$defs/a"),
        ({"type": "integer", "minimum": 1234567890123456789}, "minimum in #"),
        ({"type": "integer", "maximum": 1234567890123456789}, "maximum in #"),
        ({"type": ["integer", "null"], "exclusiveMinimum": BIG - 1}, "exclusiveMinimum in #"),
        ({"type": "integer", "exclusiveMaximum": BIG}, "exclusiveMaximum in #"),
        ({"type": "integer", "minimum": BIG - 1, "exclusiveMinimum": True}, "minimum in #"),
        ({"type": "number", "maximum": BIG}, "maximum in #"),
        ({"type": "number", "maximum": 2**60}, "maximum in #"),  # it would be written 1152921504606847000
        ({"minimum": INT64 - 1}, "minimum in #"),
        ({"type": "integer", "multipleOf": BIG}, "multipleOf in #"),
        ({"type": "integer", "multipleOf": 10**9}, "multipleOf in #"),  # nothing would be allowed
        ({"enum": [UINT64]}, "enum in #"),
        ({"type": "integer", "const": 1e20}, "const in #"),
        ({"type": "integer", "const": 10**20}, "const in #"),
        ({"const": 10**400}, "const in #"),
        ({"type": "integer", "maximum": 10**400}, "maximum in #"),
        ('{"const": 0.10000000000000001}', "const in #"),
        ('{"const": 1e400}', "const in #"),
        ('{"type": "number", "maximum": 1e99999999999999999999}', "maximum in #"),
        ('{"type": "number", "minimum": 9007199254740993.0}', "minimum in #"),
    ],
)  # fmt: skip
def test_numbers_that_would_become_others_are_refused(schema: Any, where: str):
    message = refusal({"json_schema": schema})
    assert re.match(
        rf"constraint\.json_schema: {re.escape(where)} has [-+.e0-9]+, which cannot be kept exactly", message
    )
    as_part = refusal({"grammar": f"start: %json {schema if isinstance(schema, str) else json.dumps(schema)}"})
    assert where in as_part and "the JSON schema of start" in as_part


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"const": BIG - 1}, ("9007199254740992",), ("9007199254740993",)),
        ({"const": 2**60}, (str(2**60),), ("1152921504606847000",)),
        ({"const": 10**22}, (str(10**22),), ()),
        ({"const": -(2**63) + 1024}, (str(-(2**63) + 1024),), ()),
        ({"const": 0.1}, ("0.1",), ("0.10",)),
        ({"const": 123456.789012345}, ("123456.789012345",), ()),
        ({"type": "integer", "minimum": 0, "maximum": INT64 - 1}, (str(INT64 - 1),), (str(INT64),)),
        ({"type": "integer", "minimum": 0, "exclusiveMaximum": INT64}, (str(INT64 - 1),), (str(INT64),)),
        ({"type": "integer", "minimum": 0, "maximum": UINT64 - 1}, (str(INT64 - 1),), (str(UINT64),)),
        ({"type": "integer", "minimum": -BIG + 2, "maximum": BIG - 2}, (str(BIG - 2),), (str(BIG - 1),)),
        ({"type": "integer", "minimum": 2**58}, (str(2**58),), (str(2**58 - 1),)),
        ({"type": "string", "minimum": BIG}, ('"a"',), ()),
        ({"type": "null", "default": BIG, "examples": [BIG]}, ("null",), ()),
        ({"type": "null", "$defs": {"unused": {"const": BIG}}}, ("null",), ()),
    ],
)
def test_numbers_that_are_kept(schema: Any, right: tuple[str, ...], wrong: tuple[str, ...]):
    assert all(allows({"json_schema": schema}, text) for text in right)
    assert not any(allows({"json_schema": schema}, text) for text in wrong)


def wide(optional: int, required: int = 0, **more: Any) -> dict[str, Any]:
    names = [f"p{number}" for number in range(required + optional)]
    properties = {name: {"type": "integer"} for name in names}
    return {
        "type": "object",
        "properties": properties,
        "required": names[:required],
        "additionalProperties": False,
    } | more


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        (wide(700), "# has 700"),
        (wide(500, additionalProperties=True), "# has 500"),
        (wide(2200), "# has 2200"),
        (wide(1500, 1), "# has 1500"),
        ({"type": "object", "properties": {"a": {"type": "null"}, "b": wide(600)}}, "#/properties/b has 600"),
        ({"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": wide(600)}}, "#/$defs/a has 600"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_objects_that_cannot_be_followed_are_refused(schema: dict, where: str):
    assert f"constraint.json_schema: it is too complex to be followed: {where} optional properties in a row" in refusal(
        {"json_schema": schema}
    )


@pytest.mark.parametrize("schema", [wide(500), wide(490, additionalProperties=True), wide(0, 1200), wide(600, 400)])
def test_wide_objects_that_can_be_followed(schema: dict):
    for seed in range(2):
        walk({"json_schema": json.dumps(schema)}, seed, 400)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"regex": "("}, r"constraint.regex: unclosed group in the regular expression ("),
        ({"regex": "(?=a)b"}, "constraint.regex: look-around, including look-ahead and look-behind, is not supported"),
        ({"regex": "(?:a?){500}a{500}"}, "constraint.regex: it is too complex to be followed"),
        ({"regex": "((a{1000}){1000}){1000}"}, "constraint.regex: it is too complex to be followed"),
        ({"grammar": 'start: "a" b'}, 'constraint.grammar: at 1(8): unknown name: "b"'),
        ({"grammar": 'root ::= "a" b'}, "Rule 'b' not found"),
        ({"grammar": "root ::= r0\n" + "".join(f'r{i} ::= "x"\n' for i in range(2000))}, "it has 2001 rules in GBNF"),
        ({"grammar": "nothing"}, "constraint.grammar: it is neither in Lark's syntax, with a rule start, nor in GBNF"),
        ({"json_schema": {"type": "strin"}}, "constraint.json_schema: Invalid type: strin"),
        ({"json_schema": {"oneOf": [{"type": "integer"}, {"minimum": 1}]}}, "oneOf is supported "
         "only where its alternatives exclude each other by their types or by constants of required properties; write "
         "anyOf"),
        ({"json_schema": "{"}, "constraint.json_schema: it is not JSON: "),
        ({"json_schema": {"x-guidance": {"item_separator": "[a&&b]"}, "type": "array"}},
         "constraint.json_schema: x-guidance.item_separator matches no text"),
        ({"json_schema": {"type": "string", "pattern": "("}}, "unclosed group in the regular expression ("),
        ({"json_schema": {"anyOf": [{"$ref": "#/$defs/a"}, {}], "$defs": {"a": {"type": "no"}}}}, "Invalid type: no"),
    ],
)  # fmt: skip
def test_errors_are_about_what_the_caller_wrote(given: dict, message: str):
    found = refusal(given)
    assert message in found and "start:" not in found and "verbose" not in found and "\n" not in found


def test_errors_name_the_caller_s_field():
    constraint = Constraint.of({"regex": "("}, "structured_outputs.regex")
    with pytest.raises(ConstraintRefused, match=r"^structured_outputs\.regex: unclosed group") as caught:
        compiler().check(constraint)
    assert caught.value.field == "structured_outputs.regex"
    # The refusal is cached; the field is not.
    with pytest.raises(ConstraintRefused, match=r"^constraint\.regex: unclosed group"):
        compiler().check(Constraint("regex", "("))
    grammar = 'start: "a" | call_1\ncall_1: %json {"$ref": "#"}'
    compiler().check(Constraint("grammar", grammar))
    named = Constraint("grammar", grammar + "\n", fields={"": "tools", "call_1": "tools[4].function.parameters"})
    with pytest.raises(
        ConstraintRefused, match=r"^tools\[4\]\.function\.parameters: nothing satisfies it: every value"
    ):
        compiler().check(named)


def test_digits_and_letters_of_words_are_ascii():
    assert in_ascii(r"\d[^\d]\\d\D\w[\W]\s\pN") == r"[0-9][^[0-9]]\\d[^0-9][0-9A-Za-z_][[^0-9A-Za-z_]]\s\pN"
    for expression, right, wrong in (
        (r"\d+", "12", "٣"),
        (r"[\w.]+", "a_1.", "é"),
        (r"\D\W", "é.", "12"),
        (r"[^\d]", "٣", "3"),
    ):
        assert allows({"regex": expression}, right) and not allows({"regex": expression}, wrong)
    schema = {"type": "string", "pattern": r"^\d$"}
    assert allows({"json_schema": schema}, '"3"') and not allows({"json_schema": schema}, '"٣"')


@pytest.mark.parametrize("body", ['{} "x"', '("z" | {})+', "(((({}))))", '"a" | {} | "b" {}', "((({} & {})))"])
def test_rules_nested_so_deeply_that_the_library_would_end_the_process(body: str):
    for count, is_refused in ((150, False), (2000, True)):
        name = "R" if "&" in body else "r"
        rules = [f"{name}{i}:" + body.replace("{}", f"{name}{i + 1}") for i in range(count)]
        grammar = {"grammar": "\n".join((*rules, f'{name}{count}:"y"', f"start:{name}0"))}
        if is_refused:
            assert f"too complex to be followed: {name}" in refusal(grammar)
        else:
            compiler().check(Constraint.of(grammar))


def test_large_constraints_are_checked_in_time():
    """The analysis takes time linear in the size, also for chains of references and rules in the worst order."""
    count = 1400
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)} | {f"d{count}": {"type": "null"}}
    rules = "\n".join(f'r{i}: r{i + 1} "{"x" * 20}" | r{i}' for i in range(900)) + '\nr900: "y"\nstart: r0'
    for kind, text in (("json_schema", json.dumps({"$ref": "#/$defs/d0", "$defs": chain})), ("grammar", rules)):
        assert MAX_BYTES / 3 < len(text) <= MAX_BYTES
        begin = time.process_time()
        compiler().check(Constraint(kind, text))
        assert time.process_time() - begin < 1.5, kind


DEFINED = [{"$ref": f"#/$defs/p{number}"} for number in range(400)]
NOTHING = {f"p{number}": {"type": "integer", "minimum": 2, "maximum": 1} for number in range(400)}
PATTERNS: dict[str, Any] = {f"^[^a]{number}$": {} for number in range(400)}
WITHIN: list[dict[str, Any]] = [{"multipleOf": 1009}, {"$ref": "#/$defs/a"}, {"allOf": [{"multipleOf": 1019}]}]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"json_schema": {"anyOf": [*DEFINED, {"type": "null"}], "$defs": NOTHING}}, "more than 2 s"),
        (
            {"grammar": "\n".join(f"A{n}: /a/ & /b{n}/" for n in range(900)) + '\nstart: "x"\n'},
            "more than 2 s",
        ),
        ({"json_schema": {"type": "object", "patternProperties": PATTERNS}}, "# has 400 patternProperties"),
        (
            {"json_schema": {"allOf": [{"patternProperties": dict([one])} for one in PATTERNS.items()]}},
            "# has 400 patternProperties",
        ),
        ({"json_schema": {"type": "integer", "multipleOf": 1234567}}, "multipleOf in # has too many remainders"),
        ({"json_schema": {"type": "number", "multipleOf": 4194304}}, "multipleOf in # has too many remainders"),
        (
            {"json_schema": {"allOf": WITHIN, "type": "integer", "$defs": {"a": {"multipleOf": 1013}}}},
            "multipleOf in # has too many remainders",
        ),
        (
            {"json_schema": {"items": {"anyOf": [{"multipleOf": 9001 + 10 * n} for n in range(40)]}}},
            "has too many remainders",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_library_would_work_on_for_minutes_is_refused_soon(given: dict, why: str):
    begin = time.process_time()
    assert why in refusal(given)
    assert time.process_time() - begin < 8


@pytest.mark.parametrize("number", [0.01, 0.25, 1, 7, 12.5, 60, 86400, 9973, 3600000, 2**16, 429 * 10**6])
def test_numbers_of_which_values_are_multiples(number: float):
    schema = {"type": "number", "multipleOf": number}
    assert allows({"json_schema": schema}, f"{number:.12g}")
    assert number < 0.1 or not allows({"json_schema": schema}, f"{number - 0.125:.12g}")


def test_schemas_nested_too_deeply_are_refused():
    """Taking out a part that nothing satisfies needs a deeper stack than reading the schema."""
    dead = '{"$ref": "#/$defs/a"}'
    text = f'{{"anyOf": [{dead}, ' * 450 + "true" + "]}" * 449 + f'], "$defs": {{"a": {dead}}}}}'
    assert "constraint.json_schema: it is nested too deeply" in refusal({"json_schema": text})


def test_nobody_waits_for_the_constraint_of_another():
    """One that is compiled already, as at the end of an answer, does not wait while another is compiled."""
    known = Constraint.of({"regex": "known"})
    compiler().check(known)
    slow = {"grammar": "\n".join(f"A{n}: /a/ & /c{n}/" for n in range(900)) + '\nstart: "x"\n'}
    compiling = threading.Thread(target=refusal, args=(slow,))
    compiling.start()
    time.sleep(0.2)
    longest = 0.0
    while compiling.is_alive():
        begin = time.perf_counter()
        compiler().check(known)
        longest = max(longest, time.perf_counter() - begin)
        time.sleep(0.01)
    assert 0 < longest < 0.8, longest
