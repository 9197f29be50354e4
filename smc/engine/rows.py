"""Builds the batches that workers see: which tokens of which rows, under which law, with which random numbers.

Axes: X chosen slots, T tokens (row after row), F branches, G groups, S segments (the groups that have a chosen slot).
"""

from __future__ import annotations

import numpy as np

from smc.engine.group import Population
from smc.engine.messages import Keys, Rows
from smc.engine.slots import Slots
from smc.philox import STREAMS_PER_PARTICLE, Purpose


def spans(start_X: np.ndarray, count_X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ragged ranges: (index of the row [T], start + 0..count-1 [T])."""
    row_T = np.repeat(np.arange(len(count_X)), count_X)
    offset_T = np.arange(len(row_T)) - np.repeat(np.cumsum(count_X) - count_X, count_X)
    return row_T, start_X[row_T] + offset_T


def answer_rows(
    population: Population, chosen_A: np.ndarray, slots: Slots, side: str, rows_X: np.ndarray, first_X: np.ndarray, count_X: np.ndarray
) -> Rows:
    """Rows that run answer tokens first .. first + count - 1 of the chosen slots; each group is a segment."""
    slots_X = population.slots_A[chosen_A]
    row_T, index_T = spans(first_X, count_X)
    starts_X = population.prompt_A[chosen_A] + first_X.astype(np.int32)
    members_G = np.bincount(population.group_A[chosen_A], minlength=len(population.groups))
    shared_G = np.array([g.shared[side] for g in population.groups], dtype=np.int64)
    return Rows(
        rows_R=rows_X.astype(np.int32),
        starts_R=starts_X,
        counts_R=count_X.astype(np.int32),
        tokens_T=slots.tokens_SL[slots_X[row_T], index_T].astype(np.int64),
        bounds_S=np.concatenate(([0], np.cumsum(members_G[members_G > 0]))),
        shared_S=shared_G[members_G > 0],
    )


def keys(population: Population, chosen_A: np.ndarray, branches: int, purpose: Purpose) -> Keys:
    """Random numbers that depend on the request alone: its seed, its round, the particle's number in it, the branch."""
    return Keys(
        seed_R=population.seed_G[population.group_A[chosen_A]],
        round_R=population.rounds_G()[population.group_A[chosen_A]],
        stream_RD=population.particle_A[chosen_A, None] * STREAMS_PER_PARTICLE + np.arange(branches),
        purpose=purpose,
    )


def grow(slots: Slots, population: Population, chosen_A: np.ndarray, tokens_XK: np.ndarray) -> None:
    """Append tokens to the chosen slots, up to the first that ends the answer: EOS, a stop id, a stop string, the length cap."""
    slots_X = population.slots_A[chosen_A]
    before_X = slots.length_S[slots_X].copy()
    slots.append(slots_X, tokens_XK)
    if not any(g.rules.strings for g in population.groups):
        return
    for slot, group, start in zip(slots_X.tolist(), population.group_A[chosen_A].tolist(), before_X.tolist()):
        rules = population.groups[group].rules
        match = rules.first_match(slots.tokens_SL[slot, : slots.length_S[slot]].tolist(), start) if rules.strings else None
        if match is not None:
            slots.cut(slot, match[0])


def fail_groups(population: Population, nan_A: np.ndarray, side: str) -> None:
    """Mark the groups of the given slots: their request ends with an error that names the model."""
    if not nan_A.any():
        return
    for index in np.unique(population.group_A[nan_A]):
        group = population.groups[index]
        group.error = group.error or f"the {side} model returned NaN logits: its weights or its numeric type are at fault"
