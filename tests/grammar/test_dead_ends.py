"""What nothing satisfies is refused when it is compiled; what has other texts allows exactly these, and no beginning
that cannot be completed."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from smc.api.constraint import Constraint, ConstraintRefused
from smc.grammar.lark import LarkGrammar
from tests.grammar.walks import allows, compiler, walk

ITSELF = {"$ref": "#/$defs/a"}
DEAD = {"$defs": {"a": ITSELF}}
NULL = {"type": "null"}
CLOSED = {"type": "object", "additionalProperties": False}
LONGER = {"required": ["p"], "properties": {"p": {"$ref": "#"}}}
IMPOSSIBLE = {"type": "integer", "minimum": 5, "maximum": 3}
CIRCLES = "every value that it allows contains another one, without end"
UNSATISFIABLE: list[tuple[str, Any, str]] = [
    ("json_schema", {"$ref": "#"}, CIRCLES),
    ("json_schema", ITSELF | {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": ITSELF}}, CIRCLES),
    ("json_schema", ITSELF | {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}, ITSELF]}, "b": ITSELF}}, CIRCLES),
    ("json_schema", CLOSED | {"properties": {"p": ITSELF}, "required": ["p"]} | DEAD, CIRCLES),
    ("json_schema", CLOSED | {"properties": {"p": {"$ref": "#"}}, "required": ["p"]}, CIRCLES),
    ("json_schema", CLOSED | {"properties": {"p": ITSELF}, "minProperties": 1} | DEAD, CIRCLES),
    ("json_schema", {"type": "object", "required": ["p"], "additionalProperties": {"$ref": "#"}}, CIRCLES),
    ("json_schema", {"type": "array", "items": {"$ref": "#"}, "minItems": 1}, CIRCLES),
    ("json_schema", {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, CIRCLES),
    ("json_schema", {"type": "array", "prefixItems": [NULL], "items": {"$ref": "#"}, "minItems": 2}, CIRCLES),
    ("json_schema", {"anyOf": [ITSELF, {"allOf": [NULL, ITSELF]}]} | DEAD, CIRCLES),
    ("json_schema", {"$ref": "#x", "$defs": {"a": {"$anchor": "x", "$ref": "#x"}}}, CIRCLES),
    ("json_schema", {"$ref": "#/$defs/a~1%25", "$defs": {"a/%": {"$ref": "#/$defs/a~1%25"}}}, CIRCLES),
    # Refused for objects alone, but every value is an object.
    ("json_schema", {"type": "object", "allOf": [ITSELF], "$defs": {"a": LONGER}}, CIRCLES),
    ("json_schema", {"type": "string", "pattern": "x*[a&&b]"}, "Regex is empty"),
    ("json_schema", {"type": "integer", "minimum": 5, "maximum": 3}, r"minimum \(5\) is greater than maximum \(3\)"),
    ("json_schema", {"enum": []}, "empty"),
    ("json_schema", CLOSED | {"patternProperties": {"x*[a&&b]": {}}, "required": ["p"]}, "required property 'p'"),
    ("regex", "[a&&b]", "no text"),
    ("regex", "x*[a&&b]", "no text"),
    ("regex", r"[^\s\S]", "no text"),
    ("regex", r"\P{Any}", "no text"),
    ("regex", r"xyz[a-c--[a-z]]", "no text"),
    ("grammar", 'start: start "a"', "every text contains another one, without end"),
    ("grammar", 'start: "x" y\ny: y "a"', "every text contains another one, without end"),
    ("grammar", 'start: y+\ny: (z | "a" y){2} | y\nz: "q" y', "every text contains another one, without end"),
    ("grammar", "start: A\nA: /a/ & /b/", "A matches no text"),
    ("grammar", 'start: "x" B\nB: A "c"\nA: /x*[a&&b]/', "A matches no text"),
    ("grammar", 'start: "x" /x*[a&&b]/', r"/x\*\[a&&b\]/ matches no text"),
    ("grammar", "start: A\nA: /[a-z]*/ & ~/[a-z]*/", "A matches no text"),
    ("grammar", 'root ::= root "a"', "every text contains another one, without end"),
    ("grammar", 'root ::= "x" y\ny ::= y "a" | y\n', "every text contains another one, without end"),
    ("grammar", 'start: "a" %json {"$ref": "#"}', f"the JSON schema of start: {CIRCLES}"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "message"), UNSATISFIABLE)
def test_what_nothing_satisfies_is_refused(kind: str, text: Any, message: str):
    with pytest.raises(ConstraintRefused, match=rf"^constraint\.{kind}: nothing satisfies it: .*{message}"):
        compiler().check(Constraint.of({kind: text}))


SATISFIABLE: list[tuple[str, Any, tuple[str, ...], tuple[str, ...]]] = [
    ("json_schema", CLOSED | {"properties": {"p": ITSELF}} | DEAD, ("{}",), ('{"p":null}',)),
    ("json_schema", {"anyOf": [ITSELF, NULL]} | DEAD, ("null",), ("1",)),
    ("json_schema", {"oneOf": [ITSELF, NULL]} | DEAD, ("null",), ("1",)),
    ("json_schema", {"type": "array", "items": {"$ref": "#"}}, ("[]", "[[],[[]]]"), ("[1]",)),
    ("json_schema", {"type": "array", "items": ITSELF} | DEAD, ("[]",), ("[[]]",)),
    ("json_schema", {"type": "array", "prefixItems": [NULL, ITSELF]} | DEAD, ("[]", "[null]"), ("[null,1]",)),
    ("json_schema", LONGER, ("1", '{"p":1}', '{"p":{"p":[]}}'), ("{}", '{"p":{}}')),
    ("json_schema", CLOSED | {"properties": {"n": {"anyOf": [{"$ref": "#"}, NULL]}}, "required": ["n"]},
     ('{"n":{"n":null}}',), ("{}",)),
    # A definition that no value satisfies is one of several alternatives.
    ("json_schema", {"anyOf": [ITSELF, NULL], "$defs": {"a": IMPOSSIBLE}}, ("null",), ("4",)),
    ("json_schema", {"anyOf": [{"$ref": "#/$defs/b"}, NULL], "$defs": {"a": {"enum": []}, "b": {"type": "array",
     "items": ITSELF, "minItems": 1}}}, ("null",), ("[]",)),
    ("json_schema", CLOSED | {"patternProperties": {"x*[a&&b]": NULL, "^c$": NULL}}, ("{}", '{"c":null}'),
     ('{"x":null}',)),
    ("json_schema", ITSELF | {"description": "x", "$defs": {"a": NULL}}, ("null",), ("1",)),
    ("grammar", 'start: "x" | y\ny: y "a"', ("x",), ("xa", "a")),
    ("grammar", 'start: y | z // one\n\n | "x" -> x # two\ny: y\nz: z', ("x",), ("",)),
    ("grammar", 'start: "x" dead? "y" (dead | "u") [dead] dead{0,2} dead* dead~0..2\ndead: "z" dead', ("xyu",),
     ("xy", "xzyu")),
    ("grammar", 'start: "a" | "b" %json {"$ref": "#"}', ("a",), ("b", "bnull")),
    ("grammar", f"start: %json {json.dumps({'anyOf': [ITSELF, NULL]} | DEAD)}", ("null",), ("1",)),
    ("grammar", 'start: "a" | "b" A | "c" /[a&&b]/\nA: /a/ & /b/', ("a",), ("b", "c")),
    ("grammar", 'root ::= "x" y\ny ::= y "a" | "b" | n*\nn ::= "c" n\n', ("x", "xb", "xbaa"), ("xc",)),
    ("choice", ["a", "ab", "é\n\""], ("a", "ab", "é\n\""), ("", "b", "abc")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "right", "wrong"), SATISFIABLE)
def test_dead_ends_are_taken_out(kind: str, text: Any, right: tuple[str, ...], wrong: tuple[str, ...]):
    assert all(allows({kind: text}, one) for one in right)
    assert not any(allows({kind: text}, one) for one in wrong)
    for seed in range(20):
        walk({kind: text}, seed)


def test_many_choices_are_one_terminal():
    choices = [f"v{number}" for number in range(5000)]
    assert allows({"choice": choices}, "v4999") and not allows({"choice": choices}, "v5000")


NAMES = ("start", "a", "b", "c", "d")


def grammar_of(dice: random.Random) -> tuple[str, dict[str, list[list[list[str]]]]]:
    """A grammar by chance: its text, and for each rule the alternatives, of which each needs some rules."""
    lines, needs = [], {}
    for name in NAMES:
        alternatives = []
        for _ in range(dice.randint(1, 2)):
            atoms, needed = [], []
            for _ in range(dice.randint(1, 3)):
                other = dice.choice(NAMES)
                form = dice.randrange(8)
                atoms.append((other, other, f'"{other[0]}"', f'"{name[0]}"', f"{other}?", f"[{other}]",
                              f'({other} | "x" {name})', f"({other} {name})*")[form])  # fmt: skip
                needed += [[[other]], [[other]], [], [], [], [], [[other], [name]], []][form : form + 1]
            alternatives.append((" ".join(atoms) or '""', [options for options in needed if options]))
        lines.append(f"{name}: " + dice.choice((" | ", "\n  | ")).join(text for text, _ in alternatives))
        needs[name] = [each for _, each in alternatives]
    return "\n".join(lines), needs


def productive(needs: dict) -> set[str]:
    found: set[str] = set()
    while True:
        new = {
            name
            for name, alternatives in needs.items()
            if any(
                all(any(set(o) <= found for o in options) for options in alternative) for alternative in alternatives
            )
        }
        if new == found:
            return found
        found = new


def test_random_grammars_have_no_dead_ends():
    """A grammar is refused if and only if its start produces nothing, found by another algorithm. From every beginning
    that its masks allow, some token is allowed."""
    refused = 0
    for seed in range(300):
        text, needs = grammar_of(random.Random(seed))
        LarkGrammar(text)
        if "start" in productive(needs):
            for walks in range(3):
                walk({"grammar": text}, walks, 12)
        else:
            refused += 1
            with pytest.raises(ConstraintRefused, match="every text contains another one"):
                compiler().check(Constraint.of({"grammar": text}))
    assert 20 < refused < 280


def schema_of(dice: random.Random, depth: int = 2) -> dict:
    kind = dice.randrange(7 if depth else 3)
    if kind < 2:
        return {"$ref": f"#/$defs/{dice.choice('abc')}"}
    if kind == 2:
        return {"type": "null"}
    if kind == 3:
        names = dice.sample("xyz", dice.randint(1, 2))
        properties = {name: schema_of(dice, depth - 1) for name in names}
        return CLOSED | {"properties": properties, "required": [name for name in names if dice.random() < 0.7]}
    if kind == 4:
        return {"type": "array", "items": schema_of(dice, depth - 1), "minItems": dice.randint(0, 1)}
    if kind == 5:
        first = [schema_of(dice, depth - 1) for _ in range(2)]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": dice.randint(0, 2)}
    return {"anyOf": [schema_of(dice, depth - 1) for _ in range(2)]}


def smallest(schema: dict, definitions: dict, depth: int) -> bool:
    """Return whether a schema has a value that is nested in at most `depth` levels of schemas."""

    def has(one: dict) -> bool:
        return depth > 0 and smallest(one, definitions, depth - 1)

    if "$ref" in schema:
        return has(definitions[schema["$ref"][-1]])
    if "anyOf" in schema:
        return any(map(has, schema["anyOf"]))
    if "properties" in schema:
        return all(has(schema["properties"][name]) for name in schema["required"])
    needed = schema.get("prefixItems", [schema.get("items")])[: schema.get("minItems", 0)]
    return all(map(has, needed))


def test_random_schemas_have_no_dead_ends():
    """A schema is refused if and only if it has no finite value, found by trying all up to a depth."""
    refused = 0
    for seed in range(300):
        dice = random.Random(seed)
        definitions = {name: schema_of(dice) for name in "abc"}
        schema = schema_of(dice) | {"$defs": definitions, "x-guidance": {"whitespace_flexible": False}}
        if smallest(schema, definitions, 16):
            for walks in range(3):
                walk({"json_schema": json.dumps(schema)}, walks, 24)
        else:
            refused += 1
            with pytest.raises(ConstraintRefused, match="nothing satisfies it"):
                compiler().check(Constraint.of({"json_schema": schema}))
    assert 30 < refused < 240
