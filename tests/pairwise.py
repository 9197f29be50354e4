"""Pairwise testing: a subset of a product of parameters in which every value meets every value of each other parameter.

Faults caused by one value or by a pair of values appear in some case of the subset. The full product would cover
triples as well, at several times the cost."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import Any

import pytest


def few(cases: Iterable[tuple[Any, ...]], together: int = 2) -> list[tuple[Any, ...]]:
    """A subset of `cases` that contains all pairs of values that occur in them (with `together` 1: all values). Greedy:
    the next case is the one with the most pairs not yet covered, the first of several."""
    held = [(case, _groups(case, together)) for case in cases]
    wanted: set[tuple] = set().union(*(groups for _, groups in held))
    found = []
    while wanted:
        case, groups = max(held, key=lambda one: len(one[1] & wanted))
        found.append(case)
        wanted -= groups
    return found


def few_of_pairs(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """`few`, with a part of it in `make test`: cases that contain every value once. The other pairs run in the whole
    run only."""
    every = list(cases)
    once = few(every, together=1)
    return [*once, *(pytest.param(*one, marks=pytest.mark.slow) for one in few(every) if one not in once)]


def one_of(chosen: Any, *others: Any) -> list[Any]:
    """Run `chosen` in `make test`. `others` test the same behaviour through the same code, and run in the whole run
    only."""
    return [
        chosen,
        *(pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.slow) for one in others),
    ]


def _groups(case: tuple[Any, ...], size: int) -> set[tuple]:
    """Values are compared by their text, as some have no hash."""
    return set(combinations([(axis, repr(value)) for axis, value in enumerate(case)], size))
