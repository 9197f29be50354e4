"""Potentials for solutions of the demo's problems (`smc.demo.problems`), as examples of checkers."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from smc.potentials import Prefixes

WRONG = -6.0
"""log phi of a wrong line: hardly any answer has one, and a population of wrong ones can still be told apart."""
_LINE = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
_RESULT = re.compile(r"#### (\d+)")
_OPERATORS: dict[str, Callable[[int, int], float]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv
}  # fmt: skip


def arithmetic(prefixes: Prefixes) -> list[float]:
    """Lines such as `12 + 7 = 19` must be right, and the result that of the last of them; it knows nothing of the
    question. What is neither, or not finished, counts as wrong where it cannot be made right."""
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
