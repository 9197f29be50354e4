"""Random JSON schemas of common kinds: nested objects with required and optional properties, enums, arrays with bounds,
references, alternatives, patterns, numbers with ranges. All texts that they allow are short."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

PATTERNS = ("^[a-c]{2,4}$", "^(on|off)$", "^[0-9]{1,3}-[x-z]$", "^a?b+c?$", "^v[0-9]\\.[0-9]$")
NAMES = ("a", "id", "name", "x1", "tags", "on", "b-c")
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
"""No optional white space: random models would write blanks wherever the schema allows them."""


def some_schema(dice: random.Random, depth: int = 3) -> Schema:
    """A schema of a whole answer: usually an object, sometimes an array."""
    definitions = {name: _value(dice, 1, ()) for name in ("one", "two")[: dice.randint(0, 2)]}
    make = _object if dice.random() < 0.85 else _array
    schema = make(dice, depth, tuple(definitions))
    return schema | ({"$defs": definitions} if definitions else {}) | COMPACT


def _value(dice: random.Random, depth: int, definitions: tuple[str, ...]) -> Schema:
    kinds = [_text, _integer, _number, _choice, _flag]
    if depth > 0:
        kinds += [_object, _array, _alternatives]
    if definitions:
        kinds += [_reference]
    return dice.choice(kinds)(dice, depth, definitions)


def _object(dice: random.Random, depth: int, definitions: tuple[str, ...]) -> Schema:
    names = dice.sample(NAMES, dice.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _value(dice, depth - 1, definitions) for name in names},
        "required": [name for name in names if dice.random() < 0.6],
        "additionalProperties": False,
    }


def _array(dice: random.Random, depth: int, definitions: tuple[str, ...]) -> Schema:
    least = dice.randint(0, 2)
    if dice.random() < 0.2:
        items = [_value(dice, 0, ()) for _ in range(2)]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}
    return {
        "type": "array",
        "items": _value(dice, depth - 1, definitions),
        "minItems": least,
        "maxItems": least + dice.randint(0, 2),
    }


def _alternatives(dice: random.Random, depth: int, definitions: tuple[str, ...]) -> Schema:
    return {"anyOf": [_value(dice, depth - 1, definitions) for _ in range(dice.randint(2, 3))]}


def _reference(dice: random.Random, depth: int, definitions: tuple[str, ...]) -> Schema:
    return {"$ref": f"#/$defs/{dice.choice(definitions)}"}


def _text(dice: random.Random, depth: int, definitions: tuple[str, ...]) -> Schema:
    if dice.random() < 0.5:
        return {"type": "string", "pattern": dice.choice(PATTERNS)}
    least = dice.randint(0, 2)
    return {"type": "string", "minLength": least, "maxLength": least + dice.randint(0, 4)}


def _integer(dice: random.Random, depth: int, definitions: tuple[str, ...]) -> Schema:
    low = dice.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + dice.randint(0, 300)}


def _number(dice: random.Random, depth: int, definitions: tuple[str, ...]) -> Schema:
    # An enum of few numbers: a random model would write digits without end.
    return {"type": "number", "enum": [round(dice.uniform(-9, 9), dice.randint(0, 3)) for _ in range(3)]}


def _choice(dice: random.Random, depth: int, definitions: tuple[str, ...]) -> Schema:
    values: list[Any] = ["red", "green", 7, None, True, 'a"b', [1], {"k": 0}, "\\"]
    if dice.random() < 0.3:
        return {"const": dice.choice(values)}
    return {"enum": dice.sample(values, dice.randint(1, 4))}


def _flag(dice: random.Random, depth: int, definitions: tuple[str, ...]) -> Schema:
    return {"type": dice.choice(["boolean", "null"])}
