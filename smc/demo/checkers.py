"""Potentials for solutions of the demo's problems (`smc.demo.problems`), as examples of checkers."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from smc.potentials import Prefixes

WRONG = -6.0
"""log phi of a wrong line: so low that hardly any answer has one, but finite, so that populations in which all answers
are wrong can still be compared."""
_LINE = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
_RESULT = re.compile(r"#### (\d+)")
_OPERATORS: dict[str, Callable[[int, int], float]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv
}  # fmt: skip


def arithmetic(prefixes: Prefixes) -> list[float]:
    """Return log phi of each prefix: `WRONG` for each wrong line. A line such as `12 + 7 = 19` must be correct, and the
    line with the result must repeat the value of the last such line; all other lines are wrong. The last line counts
    once the answer has ended. Knows nothing about the question."""
    return [WRONG * _wrong_lines(text, ended) for text, ended in zip(prefixes.texts, prefixes.ended)]


def _wrong_lines(text: str, ended: bool) -> int:
    *lines, last = text.split("\n")
    value, wrong = None, 0
    for line in [*lines, last] if ended else lines:
        if found := _LINE.fullmatch(line):
            left, sign, right, written = found.groups()
            value = int(written)
            zero = sign == "/" and not int(right)
            wrong += zero or _OPERATORS[sign](int(left), int(right)) != value
        else:
            found = _RESULT.fullmatch(line)
            wrong += found is None or int(found[1]) != value
    return wrong
