"""Constraints: sets of allowed answer texts. Knows nothing about tokens, nor how an answer is kept within them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

MAX_BYTES = 64 << 10
"""Maximum bytes of a constraint's text."""
KINDS = ("json_schema", "json_object", "regex", "grammar", "choice")
SCOPES = ("token", "answer")
FIELD = "constraint"
"""Name of the setting."""
ALLOWED = f"an object with one of {', '.join(KINDS)}"
_MARK = re.compile('"\ud800([0-9]+)"')
"""A string that stands for a number. No valid Unicode text has its first character."""


class ConstraintRefused(ValueError):
    """A constraint is not valid, or nothing satisfies it."""

    def __init__(self, why: str, field: str = FIELD) -> None:
        """`why`: what was given and what is allowed; `field`: the caller's field."""
        super().__init__(f"{field}: {why}")
        self.why, self.field = why, field

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.why, self.field)


class InexactNumber(float):
    """A number of a JSON text that no 64-bit float holds exactly."""

    literal: str
    """The number as it is written."""


def json_float(literal: str) -> float:
    """Return a number of a JSON text that is not written as an integer."""
    value = float(literal)
    if len(literal) <= 15 and "e" not in literal.lower():  # as many digits are always exact
        return value
    try:
        is_exact = Decimal(literal) == Decimal(repr(value))
    except InvalidOperation:  # its exponent has too many digits
        is_exact = False
    if is_exact:
        return value
    inexact = InexactNumber(value)
    inexact.literal = literal
    return inexact


@dataclass(frozen=True)
class Constraint:
    """A constraint as a request gives it. Raises ConstraintRefused naming what was given and what is allowed."""

    kind: str
    """`json_schema`, `json_object`, `regex`, `grammar` (Lark, or GBNF) or `choice`."""
    text: str = ""
    """The schema as JSON, the regular expression, the grammar, or a JSON list of strings. Empty for `json_object`."""
    after: int | None = None
    """Token of the answer after which the constraint applies: the end of a reasoning text. None: from the beginning."""
    fields: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """The caller's fields, for errors: that of a JSON schema within a grammar, by the rule that has the schema, and
    under "" that of everything else."""

    def refused(self, why: str, rule: str = "") -> ConstraintRefused:
        """Return the error that says why this constraint is refused. `rule`: the rule whose JSON schema is meant."""
        if rule in self.fields:
            return ConstraintRefused(why, self.fields[rule])
        why = f"the JSON schema of {rule}: {why}" if rule else why
        return ConstraintRefused(why, self.fields.get("", f"{FIELD}.{self.kind}"))

    def failed(self, why: str) -> ConstraintFailed:
        """Return the error of an answer that could not be kept within this constraint; it names the caller's field.
        `why`: what the engine says, which names `constraint`."""
        field = self.fields.get("", FIELD)
        return ConstraintFailed(f"{field}:{why.removeprefix(f'{FIELD}:')}", field)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConstraintRefused(f"its kind is {self.kind!r}; allowed: {', '.join(KINDS)}")
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError as error:  # a lone surrogate
            raise self.refused("it has no UTF-8 form; allowed: valid Unicode") from error
        if size > MAX_BYTES:
            raise self.refused(f"it has {size} bytes; allowed: at most {MAX_BYTES}")
        if (self.kind == "json_object") == bool(self.text):
            allowed = "nothing, as a json_object is any" if self.kind == "json_object" else f"a {self.kind}"
            raise self.refused(f"{self.text[:40]!r}; allowed: {allowed}")
        if self.kind == "choice":
            object.__setattr__(self, "text", json.dumps(self.choices, ensure_ascii=False))

    @property
    def choices(self) -> list[str]:
        """The strings of a constraint of kind `choice`. Raises ConstraintRefused if the text is not a list of them."""
        try:
            found = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise self.refused(f"this is not JSON: {error}") from error
        if not isinstance(found, list) or not found or not all(isinstance(text, str) and text for text in found):
            raise self.refused(f"{self.text[:40]!r}; allowed: a list of non-empty strings")
        return found

    @staticmethod
    def of(value: Any, field: str | None = None) -> Constraint:
        """Build a constraint from an object with one kind, such as {"regex": "[0-9]+"}. A schema and choices may be
        JSON values instead of text. `field`: the caller's field, if it is not `constraint`. Raises
        ConstraintRefused."""
        named = field or FIELD
        if not isinstance(value, Mapping):
            raise ConstraintRefused(f"{value!r:.80}; allowed: {ALLOWED}", named)
        given = {name: text for name, text in value.items() if text is not None}
        after = given.pop("after", None)
        if len(given) != 1 or next(iter(given)) not in KINDS:
            raise ConstraintRefused(f"it has {', '.join(map(repr, given)) or 'nothing'}; allowed: {ALLOWED}", named)
        if after is not None and (not isinstance(after, int) or isinstance(after, bool) or after < 0):
            raise ConstraintRefused(f"after={after!r}; allowed: a token id >= 0", named)
        ((kind, text),) = given.items()
        named = field or f"{FIELD}.{kind}"
        if kind == "json_object":
            if text is not True and text != "":
                raise ConstraintRefused(f"{text!r:.80}; allowed: true", named)
            text = ""
        elif kind == "json_schema" and not isinstance(text, str):
            text = schema_text(text)
        elif kind == "choice" and not isinstance(text, str):
            text = json.dumps(text, ensure_ascii=False)
        if not isinstance(text, str):
            raise ConstraintRefused(f"{text!r:.80}; allowed: a string", named)
        return Constraint(kind, text, after, {"": named})


def schema_text(schema: Any) -> str:
    """Return a JSON schema as text. An `InexactNumber` is written with all its digits."""
    literals: list[str] = []
    text = json.dumps(_marked(schema, literals), ensure_ascii=False)
    return _MARK.sub(lambda found: literals[int(found[1])], text) if literals else text


def _marked(value: Any, literals: list[str]) -> Any:
    """Return a JSON value with marks in place of the numbers that no float holds exactly, and append these."""
    if isinstance(value, InexactNumber):
        literals.append(value.literal)
        return f"\ud800{len(literals) - 1}"
    if isinstance(value, Mapping):
        return {name: _marked(one, literals) for name, one in value.items()}
    return [_marked(one, literals) for one in value] if isinstance(value, (list, tuple)) else value


def check_constraint(name: str, value: Any) -> Constraint:
    """Check and convert the value of the setting `constraint`."""
    return value if isinstance(value, Constraint) else Constraint.of(value)


class ConstraintFailed(ValueError):
    """An answer could not be kept within its constraint: the request is at fault, not the engine."""

    def __init__(self, message: str, param: str = FIELD) -> None:
        """`param`: the caller's field."""
        super().__init__(message)
        self.param = param
