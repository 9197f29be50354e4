"""Padded numbers of rows that rounds can have, and the subset that the warm-up runs."""

from __future__ import annotations

from functools import cache

from smc.calibration.warm_up import crowded
from smc.scheduler.planner import bucket

SLOTS = [12, 16, 28, 32, 44, 64, 128]


@cache
def warm_up_sizes(slots: int) -> set[int]:
    """Return the batch sizes of the warm-up: every size without unconditional rows, and the largest with them."""
    return {bucket(places) for places in range(1, slots + 1)} | {max(possible(slots))}


@cache
def possible(slots: int) -> set[int]:
    """Return the batch sizes of rounds with unconditional rows, each of which takes a slot as well."""
    return {crowded(guided, others) for guided in range(1, slots // 2 + 1) for others in range(slots - 2 * guided + 1)}
