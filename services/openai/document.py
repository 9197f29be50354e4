"""JSON as people send it: read strictly, so that what a body says is never a guess."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def parse(data: bytes) -> Any:
    """Raises ValueError: no JSON, a field given twice, a number that JSON does not know, or deeper than can be read."""
    try:
        return json.loads(data, object_pairs_hook=_once, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"this is not JSON: {error.msg} at character {error.pos + 1}") from error
    except RecursionError as error:
        raise ValueError("this is nested too deeply to be read") from error
    except ValueError as error:  # not UTF-8, a number of thousands of digits, or what is refused below
        raise ValueError(f"this cannot be read as JSON: {error}") from error


def kind_of(value: Any) -> str:
    """What JSON calls it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    kinds: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}
    return kinds.get(type(value), "a number")


def is_text(value: Any) -> bool:
    """Whether every string in `value` has a UTF-8 form: JSON can write half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"{name!r} is given twice")
            seen.add(name)
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
