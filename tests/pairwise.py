"""Few cases of many: of a product of parameters those in which every value meets every value of each other parameter.

What goes wrong for one value, or for two together, some case shows. A full product has three together as well, at
several times the price."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import Any

import pytest


def few(cases: Iterable[tuple[Any, ...]], together: int = 2) -> list[tuple[Any, ...]]:
    """Of these cases so few that all pairs of values that are in any (or all values, `together` 1) are in them: always
    the case that has most new ones next, of several the first."""
    held = [(case, _groups(case, together)) for case in cases]
    wanted: set[tuple] = set().union(*(groups for _, groups in held))
    found = []
    while wanted:
        case, groups = max(held, key=lambda one: len(one[1] & wanted))
        found.append(case)
        wanted -= groups
    return found


def few_of_pairs(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """`few`, of which `make test` tries those that hold every value once; the other pairs are left to the whole run."""
    every = list(cases)
    once = few(every, together=1)
    return [*once, *(pytest.param(*one, marks=pytest.mark.slow) for one in few(every) if one not in once)]


def one_of(chosen: Any, *others: Any) -> list[Any]:
    """A case for `make test`; others, which hold to the same rule by the same code, are left to the whole run."""
    return [
        chosen,
        *(pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.slow) for one in others),
    ]


def _groups(case: tuple[Any, ...], size: int) -> set[tuple]:
    """Values by name: some have no hash."""
    return set(combinations([(axis, repr(value)) for axis, value in enumerate(case)], size))
