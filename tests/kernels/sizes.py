"""Rows that rounds have, padded, and which of these a service has before it serves."""

from __future__ import annotations

from functools import cache

from smc.calibration.warm_up import crowded
from smc.scheduler.round_plan import bucket

SLOTS = [12, 16, 28, 32, 44, 64, 128]


@cache
def rehearsed(slots: int) -> set[int]:
    """Rounds of places alone are rehearsed in all their sizes, and the largest with companions."""
    return {bucket(places) for places in range(1, slots + 1)} | {max(possible(slots))}


@cache
def possible(slots: int) -> set[int]:
    """With companions, each of which takes a slot, too."""
    return {crowded(guided, others) for guided in range(1, slots // 2 + 1) for others in range(slots - 2 * guided + 1)}
