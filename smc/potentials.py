"""Potentials: callables that weigh what particles have written, and those that ship.

A request with a potential phi is answered from p(x) phi(x), normalised, where p is the target's distribution of answers.
After each round of the request, the engine asks the potential about the answers of all particles, finished or not, and
multiplies the weight of each particle by phi(new) / phi(old). Only the values of finished answers define the
distribution. The values of unfinished answers cancel: they decide which particles survive, and so how many particles a
good estimate needs.

A potential takes `Prefixes` and returns log phi of each: -inf for what cannot become an answer. Every call has a thread
of its own, and calls of several requests overlap."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Prefixes:
    """What the particles of one request hold, each text once."""

    prompt: str
    """As text, with what the chat template has added."""
    texts: tuple[str, ...]
    """Answers so far, without what ends them."""
    tokens: tuple[tuple[int, ...], ...]
    ended: tuple[bool, ...]
    """The answer is whole."""


Potential = Callable[[Prefixes], Sequence[float]]
"""log phi of each prefix."""


def must_match(expression: str) -> Potential:
    """phi is 1 of answers in which the regular expression is found, else 0. Raises ValueError for one that is none."""
    pattern = _compiled(expression)

    def potential(prefixes: Prefixes) -> list[float]:
        found = zip(prefixes.texts, prefixes.ended)
        return [-math.inf if ended and not pattern.search(text) else 0.0 for text, ended in found]

    return potential


_LOOKS_AROUND = re.compile(r"\$|\(\?|\\[bBZz]")
"""Of expressions that may be found in a prefix of a text in which they are not found."""


def must_not_match(expression: str) -> Potential:
    """phi is 0 of answers in which the regular expression is found, else 1. Raises ValueError for one that is none."""
    pattern, looks_around = _compiled(expression), _LOOKS_AROUND.search(expression) is not None

    def potential(prefixes: Prefixes) -> list[float]:
        found = zip(prefixes.texts, prefixes.ended)
        return [-math.inf if (ended or not looks_around) and pattern.search(text) else 0.0 for text, ended in found]

    return potential


_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def must_end_with(number: float) -> Potential:
    """phi is 1 of answers whose last number is this, else 0."""

    def potential(prefixes: Prefixes) -> list[float]:
        last = [(_NUMBER.findall(text.replace(",", "")) or ["nan"])[-1] for text in prefixes.texts]
        return [-math.inf if ended and float(n) != number else 0.0 for n, ended in zip(last, prefixes.ended)]

    return potential


def load_potential(path: str) -> Potential:
    """The callable that `module:function` names. Raises ValueError."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(f"potential {path!r}; allowed: module:function")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the module raises
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"potential {path!r} cannot be imported ({why}); is its directory on PYTHONPATH?") from error
    if not callable(found):
        raise ValueError(f"potential {path!r} is {found!r}; allowed: a callable")
    return found


def load_potentials(paths: Iterable[tuple[str, str]]) -> Mapping[str, Potential]:
    """By name. Raises ValueError."""
    return {name: load_potential(path) for name, path in paths}


def log_values(name: str, found: object, count: int) -> list[float]:
    """log phi of so many prefixes, as a potential has returned them. Raises ValueError for anything else."""
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
