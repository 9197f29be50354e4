"""JSON schemas before they are compiled: finds references that no finite value satisfies, objects with more optional
properties than can be followed, and numbers that would become other numbers. Knows nothing about the library that
compiles them, except what it can do.

A schema that refers to itself may allow no finite value, such as {"$ref": "#"}. Values are of three classes: objects,
arrays and others. A schema allows a class if all its keywords do, which is a production of `Productions`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Set
from itertools import groupby
from typing import Any, NamedTuple
from urllib.parse import unquote

from smc.api.constraint import json_float
from smc.grammar import numbers
from smc.grammar.productions import Productions

OBJECT, ARRAY, OTHER, ANY = "object", "array", "other", "any"
CLASSES = (OBJECT, ARRAY, OTHER)
MAPS = ("properties", "patternProperties", "dependentSchemas")
DEFINITIONS = ("$defs", "definitions")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE = ("items", "additionalItems", "additionalProperties")
SEPARATORS = ("item_separator", "key_separator")
EMPTY: dict[str, Any] = {"enum": []}
"""A schema that nothing satisfies. The compiler leaves out optional properties and alternatives that have it."""


class Unsatisfiable(ValueError):
    """Nothing satisfies a schema or a grammar."""


class WideObject(NamedTuple):
    """An object with many optional properties in a row."""

    path: str
    required: tuple[bool, ...]
    """For each property, in their order, whether it is required."""
    is_open: bool
    """Whether there may be other properties."""

    @property
    def most(self) -> int:
        """Largest number of optional properties in a row."""
        return max((len(list(run)) for required, run in groupby(self.required) if not required), default=0)


class JsonSchema:
    """A schema and all subschemas that an answer can reach. Raises ValueError if the text is not JSON."""

    def __init__(self, text: str) -> None:
        try:
            self.document = json.loads(text, parse_float=json_float)
        except json.JSONDecodeError as error:
            raise ValueError(f"it is not JSON: {error}") from error
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        root_id = isinstance(self.document, dict) and "$id" in self.document
        self._has_resources = text.count('"$id"') > root_id
        """Whether references may be relative to other places than the root. They are not followed then."""
        self._paths: dict[int, str] = {}
        self._schemas: list[dict[str, Any]] = []
        self._targets: dict[int, Any] = {}
        """Schema that a reference names, by id of the schema that has the reference."""
        self._anchors = dict(_anchors(self.document)) if "$anchor" in text else {}
        self._reach()

    def _reach(self) -> None:
        waiting = [("#", self.document)]
        while waiting:
            path, schema = waiting.pop()
            if not isinstance(schema, dict) or id(schema) in self._paths:
                continue
            self._paths[id(schema)] = path
            self._schemas.append(schema)
            waiting += _children(path, schema, all=self._has_resources)
            reference = schema.get("$ref")
            if isinstance(reference, str) and (found := self.find(reference)) is not None:
                self._targets[id(schema)] = found
                waiting.append((reference, found))

    def find(self, reference: str) -> Any:
        """Return the schema that a reference names; None: it is not known, or there is none."""
        base, mark, pointer = reference.partition("#")
        if base or not mark or self._has_resources:
            return None
        if pointer and not pointer.startswith("/"):
            return self._anchors.get(pointer)
        found = self.document
        for part in unquote(pointer).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(part)] if isinstance(found, list) else found[part]
            except (KeyError, IndexError, ValueError, TypeError):
                return None
        return found if isinstance(found, (dict, bool)) else None

    def check_numbers(self) -> None:
        """Raise ValueError if a number would become another one."""
        for schema in self._schemas:
            for keyword, value in numbers.inexact(schema):
                raise ValueError(
                    f"{keyword} in {self._paths[id(schema)]} has {numbers.literal(value):.60}, which cannot be kept "
                    f"exactly; allowed: {numbers.ALLOWED}"
                )

    def patterns(self) -> Iterator[str]:
        """Yield the regular expressions of `patternProperties`."""
        for schema in self._schemas:
            if isinstance(named := schema.get("patternProperties"), dict):
                yield from named

    def pattern_counts(self) -> Iterator[tuple[str, int]]:
        """Yield the objects with `patternProperties`, each with their number. Those of `allOf` and `$ref` apply to one
        object, so they count together."""
        for schema in self._schemas:
            if "patternProperties" in schema or "allOf" in schema:
                named = (one.get("patternProperties") for one in self._together(schema))
                yield self._paths[id(schema)], sum(len(each) for each in named if isinstance(each, dict))

    def divisors(self) -> Iterator[tuple[str, int]]:
        """Yield each number that values must be a multiple of, without factors of 10, once, with its place. Several
        numbers that apply to one value are one: their least common multiple."""
        found = {1}
        for schema in self._schemas:
            if "multipleOf" in schema or "allOf" in schema:
                number = math.lcm(*(numbers.divisor(one.get("multipleOf")) for one in self._together(schema)))
                if number not in found:
                    found.add(number)
                    yield self._paths[id(schema)], number

    def _together(self, schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield a schema and those that `allOf` and `$ref` apply to the same values."""
        seen: set[int] = set()
        waiting: list[Any] = [schema]
        while waiting:
            one = waiting.pop()
            if isinstance(one, dict) and id(one) not in seen:
                seen.add(id(one))
                yield one
                waiting += [*_listed(one.get("allOf")), self._targets.get(id(one))]

    def separators(self) -> Iterator[tuple[str, str]]:
        """Yield the regular expressions of `x-guidance`, each with its name."""
        guidance = self.document.get("x-guidance") if isinstance(self.document, dict) else None
        guidance = guidance if isinstance(guidance, dict) else {}
        for name in SEPARATORS:
            if isinstance(expression := guidance.get(name), str):
                yield f"x-guidance.{name}", expression

    def wide_objects(self, least: int) -> Iterator[WideObject]:
        """Yield the objects with more than `least` optional properties in a row."""
        for schema in self._schemas:
            properties, required = schema.get("properties"), schema.get("required")
            if not isinstance(properties, dict) or len(properties) <= least:
                continue
            needed = set(required) if isinstance(required, list) and all(isinstance(r, str) for r in required) else ()
            others = schema.get("additionalProperties") is not False or bool(schema.get("patternProperties"))
            found = WideObject(self._paths[id(schema)], tuple(name in needed for name in properties), others)
            if found.most > least:
                yield found

    def without_dead_ends(self, dead: Set[int] = frozenset(), empty: Set[str] = frozenset()) -> Any:
        """Return the schema without references that no finite value satisfies; the same object if it has none. `dead`:
        ids of schemas that nothing satisfies for other reasons; `empty`: regular expressions of `patternProperties`
        that match nothing. Raises Unsatisfiable if nothing is left."""
        if not self._targets and not empty:
            return self.document
        productions = Productions()
        for schema in self._schemas:
            if id(schema) not in dead:
                for kind in CLASSES:
                    self._add(productions, schema, kind)
        productive = productions.productive()
        if isinstance(self.document, dict) and (id(self.document), ANY) not in productive:
            raise Unsatisfiable("every value that it allows contains another one, without end")
        cut = {key for key, target in self._targets.items() if (key, ANY) not in productive}
        return _rewritten(self.document, cut, empty) if cut or empty else self.document

    def _add(self, productions: Productions, schema: dict[str, Any], kind: str) -> None:
        """Add the productions of a schema for values of one class."""
        own = id(schema)
        if kind not in _classes(schema):
            return
        needed = []
        for number, alternatives in enumerate(self._conditions(schema, kind)):
            if None in alternatives:  # always satisfied
                continue
            if len(alternatives) == 1:
                needed.append(alternatives[0])
                continue
            needed.append((own, kind, number))
            for alternative in alternatives:
                productions.add((own, kind, number), [alternative])
        productions.add((own, kind), needed)
        productions.add((own, ANY), [(own, kind)])

    def _conditions(self, schema: dict[str, Any], kind: str) -> Iterator[list[Any]]:
        """Yield conditions for a value of this class: each a list of symbols of which one must produce a value. None:
        the condition holds."""
        if "$ref" in schema:
            yield [_symbol(self._targets.get(id(schema), True), kind)]
        for one in _listed(schema.get("allOf")):
            yield [_symbol(one, kind)]
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list):
                yield [_symbol(one, kind) for one in schema[keyword]]
        if kind == OBJECT:
            yield from _object_conditions(schema)
        elif kind == ARRAY:
            yield from _array_conditions(schema)


def _object_conditions(schema: dict[str, Any]) -> Iterator[list[Any]]:
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    patterns = schema.get("patternProperties")
    others = schema.get("additionalProperties", True)
    for name in _listed(schema.get("required")):
        if isinstance(name, str) and (name in properties or not patterns):
            yield [_symbol(properties.get(name, others), ANY)]
    least = schema.get("minProperties")
    if isinstance(least, int) and least > 0:
        matched = patterns.values() if isinstance(patterns, dict) else ()
        yield [_symbol(one, ANY) for one in (*properties.values(), *matched, others)]


def _array_conditions(schema: dict[str, Any]) -> Iterator[list[Any]]:
    items, least = schema.get("items", True), schema.get("minItems")
    first = _listed(items if isinstance(items, list) else schema.get("prefixItems"))
    rest = schema.get("additionalItems", True) if isinstance(items, list) else items
    if isinstance(least, int):
        yield from ([_symbol(one, ANY)] for one in first[: max(least, 0)])
        if least > len(first):
            yield [_symbol(rest, ANY)]


def _symbol(schema: Any, kind: str) -> Any:
    """Return the symbol of a schema's values of a class. None: it surely allows some."""
    if isinstance(schema, dict):
        return id(schema), kind
    return (False, kind) if schema is False else None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _classes(schema: dict[str, Any]) -> set[str]:
    """Return the classes of values that `type`, `const` and `enum` allow."""
    given = schema.get("type")
    kinds = [given] if isinstance(given, str) else given if isinstance(given, list) else CLASSES
    found = {kind if kind in (OBJECT, ARRAY) else OTHER for kind in kinds if isinstance(kind, str)}
    for values in (*([[schema["const"]]] if "const" in schema else ()), schema.get("enum")):
        if isinstance(values, list):
            found &= {OBJECT if isinstance(v, dict) else ARRAY if isinstance(v, list) else OTHER for v in values}
    return found


def _children(path: str, schema: dict[str, Any], all: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the subschemas with their paths. `all`: definitions, too."""
    for keyword in (*MAPS, *(DEFINITIONS if all else ())):
        if isinstance(named := schema.get(keyword), dict):
            for name, child in named.items():
                yield f"{path}/{keyword}/{name.replace('~', '~0').replace('/', '~1')}", child
    for keyword in LISTS:
        yield from ((f"{path}/{keyword}/{at}", child) for at, child in enumerate(_listed(schema.get(keyword))))
    for keyword in SINGLE:
        child = schema.get(keyword)
        if isinstance(child, list):
            yield from ((f"{path}/{keyword}/{at}", one) for at, one in enumerate(child))
        elif child is not None:
            yield f"{path}/{keyword}", child


def _anchors(document: Any) -> Iterator[tuple[str, Any]]:
    waiting = [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if isinstance(name := value.get("$anchor"), str):
                yield name, value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _rewritten(value: Any, cut: Set[int], empty: Set[str]) -> Any:
    """Return a copy in which the schemas `cut` allow nothing, and without the patterns `empty`."""
    if isinstance(value, list):
        return [_rewritten(one, cut, empty) for one in value]
    if not isinstance(value, dict):
        return value
    copy = {name: _rewritten(one, cut, empty) for name, one in value.items()}
    if empty and isinstance(named := copy.get("patternProperties"), dict):
        copy["patternProperties"] = {name: one for name, one in named.items() if name not in empty}
    if id(value) in cut:
        del copy["$ref"]
        copy |= EMPTY
    return copy
