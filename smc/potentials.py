"""Potentials: callables that weight the answers of particles, and the ones that are shipped.

The answer to a request with a potential phi follows p(x) phi(x), normalised, where p is the target's distribution of
answers. After each round of the request, the engine asks the potential about the answers of all particles, finished or
not, and multiplies the weight of each particle by phi(new) / phi(old). Only the values of finished answers define the
distribution. The values of unfinished answers cancel; they decide which particles survive, and so how many particles a
good estimate needs.

A potential takes `Prefixes` and returns log phi of each: -inf if a prefix cannot become an answer. Every call has a
thread of its own, and calls for several requests overlap."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

_LOOKS_AROUND = re.compile(r"\$|\(\?|\\[bBZz]")
"""Parts of expressions that may match in a prefix of a text without matching in the whole text."""
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Prefixes:
    """The distinct answers so far of the particles of one request."""

    prompt: str
    """The prompt as text, including what the chat template has added."""
    texts: tuple[str, ...]
    """Answers so far, without the tokens or strings that end them."""
    tokens: tuple[tuple[int, ...], ...]
    ended: tuple[bool, ...]
    """Whether each answer is complete."""


Potential = Callable[[Prefixes], Sequence[float]]
"""Returns log phi of each prefix."""


def must_match(expression: str) -> Potential:
    """Make a potential that is 1 for answers in which the regular expression is found, else 0. Raises ValueError if the
    expression is invalid."""
    pattern = _compiled(expression)

    def potential(prefixes: Prefixes) -> list[float]:
        found = zip(prefixes.texts, prefixes.ended)
        return [-math.inf if ended and not pattern.search(text) else 0.0 for text, ended in found]

    return potential


def must_not_match(expression: str) -> Potential:
    """Make a potential that is 0 for answers in which the regular expression is found, else 1. Raises ValueError if the
    expression is invalid."""
    pattern, looks_around = _compiled(expression), _LOOKS_AROUND.search(expression) is not None

    def potential(prefixes: Prefixes) -> list[float]:
        found = zip(prefixes.texts, prefixes.ended)
        return [-math.inf if (ended or not looks_around) and pattern.search(text) else 0.0 for text, ended in found]

    return potential


def must_end_with(number: float) -> Potential:
    """Make a potential that is 1 for answers whose last number is `number`, else 0."""

    def potential(prefixes: Prefixes) -> list[float]:
        last = [(_NUMBER.findall(text.replace(",", "")) or ["nan"])[-1] for text in prefixes.texts]
        return [-math.inf if ended and float(n) != number else 0.0 for n, ended in zip(last, prefixes.ended)]

    return potential


def load_potential(path: str) -> Potential:
    """Return the callable that `module:function` names. Raises ValueError if it cannot be imported or is not
    callable."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(f"potential {path!r}; allowed: module:function")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # of any type: the module is foreign code
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"potential {path!r} cannot be imported ({why}); is its directory on PYTHONPATH?") from error
    if not callable(found):
        raise ValueError(f"potential {path!r} is {found!r}; allowed: a callable")
    return found


def load_potentials(paths: Iterable[tuple[str, str]]) -> Mapping[str, Potential]:
    """Return the callables by name. Raises ValueError as `load_potential` does."""
    return {name: load_potential(path) for name, path in paths}


def log_values(name: str, found: object, count: int) -> list[float]:
    """Check what a potential has returned for `count` prefixes, and return it as floats. Raises ValueError if it is not
    log phi of each."""
    try:
        values = [float(value) for value in found]  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise ValueError(f"potential {name!r} returned {found!r:.80}; allowed: {count} numbers, log phi") from error
    if len(values) != count:
        raise ValueError(f"potential {name!r} returned {len(values)} numbers for {count} prefixes")
    if wrong := [value for value in values if math.isnan(value) or value == math.inf]:
        raise ValueError(f"potential {name!r} returned {wrong[0]}; allowed: numbers, or -inf")
    return values


def _compiled(expression: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error as error:
        raise ValueError(f"regular expression {expression!r}: {error}") from error
