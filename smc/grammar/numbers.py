"""Numbers in JSON schemas: llguidance reads them as 64-bit floats and 64-bit integers, so some would silently become
other numbers. Knows nothing about where a schema has its numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from decimal import Decimal
from typing import Any, TypeGuard

from smc.api.constraint import InexactNumber

SAFE, LEAST, MOST = 2**53, -(2**63), 2**63 - 1
"""Integers up to `SAFE` are exact as floats; `LEAST` and `MOST` limit integers with bounds. The library calls itself
without end where `LEAST` is the only integer allowed."""
MOST_MULTIPLE = 2**32 // 10
"""The library computes in 32 bits with ten times the digits of a number in `multipleOf`."""
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
ALLOWED = (
    "integers up to 2^53, and other numbers that 64 bits hold exactly, as a float and as an integer; in multipleOf "
    f"digits that make a number below {MOST_MULTIPLE}"
)


def inexact(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keyword and value of every number of one schema that llguidance would replace by another number.
    Subschemas are not read."""
    given = schema.get("type")
    types = frozenset([given] if isinstance(given, str) else given if isinstance(given, list) else ())
    for keyword in ("const", "enum"):
        if keyword in schema:
            yield from ((keyword, value) for value in _numbers(schema[keyword]) if not _is_kept(value, types))
    for keyword in BOUNDS:
        value, exclusive = schema.get(keyword), schema.get(f"exclusive{keyword.capitalize()}")
        if _is_number(value) and not _is_bound_kept(keyword, value, exclusive is True, types):
            yield keyword, value
    value = schema.get("multipleOf")
    if _is_number(value) and (not _is_written_exactly(value) or _digits(value) >= MOST_MULTIPLE):
        yield "multipleOf", value


def divisor(value: Any) -> int:
    """Return the digits of a number in `multipleOf` without factors of 10; 1 if it is no number above zero."""
    if not _is_number(value) or not math.isfinite(value) or value <= 0:
        return 1
    return without_factors(_digits(value), 10)


def _digits(value: int | float) -> int:
    """Return the digits of a finite number as an integer, without its sign and point."""
    return int("".join(map(str, Decimal(repr(value)).as_tuple().digits)))


def without_factors(number: int, *factors: int) -> int:
    """Return a positive number divided by these factors as often as it can be."""
    for factor in factors:
        while number % factor == 0:
            number //= factor
    return number


def literal(value: Any) -> str:
    """Return a number as the schema writes it."""
    return value.literal if isinstance(value, InexactNumber) else repr(value)


def _numbers(value: Any) -> Iterator[Any]:
    """Yield the numbers within a JSON value."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (dict, list)):
            waiting += value.values() if isinstance(value, dict) else value
        elif _is_number(value):
            yield value


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_kept(value: int | float, types: Set[Any]) -> bool:
    """Return whether an answer has this value exactly."""
    if isinstance(value, int) and LEAST <= value <= MOST:
        return int(float(value)) == value != LEAST
    return _is_written_exactly(value) and ("integer" not in types or LEAST < value <= MOST)


def _is_written_exactly(value: int | float) -> bool:
    """Return whether the shortest decimal number of the float next to `value` is `value` itself."""
    if isinstance(value, InexactNumber):
        return False
    if isinstance(value, float):
        return math.isfinite(value)
    return abs(value) <= SAFE or (_has_float(value) and Decimal(repr(float(value))) == value)


def _has_float(value: int) -> bool:
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _is_bound_kept(keyword: str, value: int | float, exclusive: bool, types: Set[Any]) -> bool:
    """Return whether a bound allows no other numbers than it says. One beyond 64 bits may become that of 64-bit
    integers."""
    if isinstance(value, InexactNumber) or (isinstance(value, int) and not _has_float(value)):
        return False
    if (not types or "number" in types) and not _is_written_exactly(value):
        return False
    if (types and "integer" not in types) or not math.isfinite(value):
        return True
    upper, exclusive = keyword.endswith("aximum"), exclusive or keyword.startswith("exclusive")
    whole, step = math.floor(value) if upper else math.ceil(value), -1 if upper else 1
    moves = exclusive and whole == value
    wanted = whole + step * moves
    read = min(max(int(float(whole) + step * moves), LEAST), MOST)
    if upper:
        return read > LEAST and (read == wanted or wanted > MOST)
    return read == wanted or wanted < LEAST
