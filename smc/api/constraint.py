"""Constraints: sets of allowed answer texts. Knows nothing about tokens, nor how an answer is kept within them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 64 << 10
"""Maximum bytes of a constraint's text; compiling it takes at most a quarter of a second."""
KINDS = ("json_schema", "json_object", "regex", "grammar", "choice")
SCOPES = ("token", "answer")
ALLOWED = f"an object with one of {', '.join(KINDS)}"


@dataclass(frozen=True)
class Constraint:
    """A constraint as a request gives it. Raises ValueError naming what was given and what is allowed."""

    kind: str
    """`json_schema`, `json_object`, `regex`, `grammar` (Lark, or GBNF) or `choice`."""
    text: str = ""
    """The schema as JSON, the regular expression, the grammar, or a JSON list of strings. Empty for `json_object`."""
    after: int | None = None
    """Token of the answer after which the constraint applies: the end of a reasoning text. None: from the beginning."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"constraint of kind {self.kind!r}; allowed: {', '.join(KINDS)}")
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError as error:  # a lone surrogate
            raise ValueError("constraint has no UTF-8 form; allowed: valid Unicode") from error
        if size > MAX_BYTES:
            raise ValueError(f"constraint: the {self.kind} has {size} bytes; allowed: at most {MAX_BYTES}")
        if (self.kind == "json_object") == bool(self.text):
            allowed = "nothing, as a json_object is any" if self.kind == "json_object" else f"a {self.kind}"
            raise ValueError(f"constraint: the {self.kind} is {self.text[:40]!r}; allowed: {allowed}")
        if self.kind == "choice":
            object.__setattr__(self, "text", json.dumps(self.choices, ensure_ascii=False))

    @property
    def choices(self) -> list[str]:
        """The strings of a constraint of kind `choice`. Raises ValueError if the text is not a list of them."""
        try:
            found = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"constraint: the {self.kind} is not JSON: {error}") from error
        if not isinstance(found, list) or not found or not all(isinstance(text, str) and text for text in found):
            raise ValueError(f"constraint: choice={self.text[:40]!r}; allowed: a list of non-empty strings")
        return found

    @staticmethod
    def of(value: Any) -> Constraint:
        """Build a constraint from an object with one kind, such as {"regex": "[0-9]+"}. A schema and choices may be
        JSON values instead of text. Raises ValueError."""
        if not isinstance(value, Mapping):
            raise ValueError(f"constraint={value!r:.80}; allowed: {ALLOWED}")
        given = {name: text for name, text in value.items() if text is not None}
        after = given.pop("after", None)
        if len(given) != 1 or next(iter(given)) not in KINDS:
            raise ValueError(f"constraint has {', '.join(map(repr, given)) or 'nothing'}; allowed: {ALLOWED}")
        if after is not None and (not isinstance(after, int) or isinstance(after, bool) or after < 0):
            raise ValueError(f"constraint: after={after!r}; allowed: a token id >= 0")
        ((kind, text),) = given.items()
        if kind == "json_object":
            if text is not True and text != "":
                raise ValueError(f"constraint: json_object={text!r:.80}; allowed: true")
            text = ""
        elif kind in ("json_schema", "choice") and not isinstance(text, str):
            text = json.dumps(text, ensure_ascii=False)
        if not isinstance(text, str):
            raise ValueError(f"constraint: {kind}={text!r:.80}; allowed: a string")
        return Constraint(kind, text, after)


def check_constraint(name: str, value: Any) -> Constraint:
    """Check and convert the value of the setting `constraint`."""
    return value if isinstance(value, Constraint) else Constraint.of(value)
