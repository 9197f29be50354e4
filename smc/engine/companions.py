"""Companions of guided groups on the scheduler's side: what a round is told of them, and how their pages follow it.

A particle's companion is in a slot of its own, of which only the head and what is held at the target count. In a round every page that the
particle is given at the target has one for the companion beside it, so the particle's lineage says what becomes of either.

Axes: A places of a batch, G groups, H guided ones, U companions of a batch, W pages of a place, T pages.
"""

from __future__ import annotations

import numpy as np

from smc.engine.group import Population
from smc.engine.slots import Slots
from smc.kv.pages import PageLedger
from smc.runtime.messages import COMPANION
from smc.runtime.plan import Companions

Pages = dict[str, np.ndarray]
"""Of a round, by lane: a side, or of a guided request its companion."""


def companions_of(
    population: Population, pages: list[Pages], places: int, shared_G: np.ndarray, slots: Slots, dummy: int
) -> Companions[np.ndarray] | None:
    """Of the guided groups of a round of so many places; None: there are none. `shared`: of the groups themselves; `dummy`: the slot of
    padding."""
    groups, group_A = population.groups, population.group_A
    guided_G = np.array([g.params.guided for g in groups])
    if not guided_G.any():
        return None
    is_guided_A, shift_G = guided_G[group_A], np.array([g.negative_size - g.prompt_size for g in groups])
    place_U, size_H = np.flatnonzero(is_guided_A), population.size_G[guided_G]
    count, scale_G = len(place_U), np.array([g.params.guidance_scale for g in groups], dtype=np.float32)
    # Few sizes: a round pays for at most twice what is guided, and never for more than all of it.
    most = min(1 << (count - 1).bit_length(), places)
    return Companions(
        scale_A=padded(scale_G[group_A], places, 1.0),
        of_A=padded(np.where(is_guided_A, np.cumsum(is_guided_A) - 1, 0), places, 0),
        place_U=padded(place_U, most, 0),
        slot_U=padded(slots.companion_S[population.slot_A[place_U]].astype(np.int64), most, dummy),
        shift_U=padded(shift_G[group_A[place_U]], most, 0),
        group_U=padded(np.repeat(np.arange(len(size_H)), size_H), most, most - 1),
        first_U=padded((np.cumsum(size_H) - size_H).astype(np.int32), most, 0),
        size_U=padded(size_H.astype(np.int32), most, 0),
        shared_U=padded((shared_G + shift_G)[guided_G].astype(np.int32), most, 0),
        pages_UW=padded(np.concatenate([given[COMPANION] for given in pages if COMPANION in given]).reshape(count, -1), most, 0),
    )


def follow_companions(
    slots: Slots, ledger: PageLedger, slot_A: np.ndarray, source_A: np.ndarray, path_AW: np.ndarray, pages: list[Pages]
) -> None:
    """Companions of the particles in `slot` descend from those in `source`, by the pages beside the `path` [A, W] that these have been
    continued by; 0 is none. `ledger`: the target's."""
    head_S, held_S = slots.head_S["target"], slots.held_S["target"]
    is_guided_A = slots.companion_S[slot_A] >= 0
    to_A, of_A = (slots.companion_S[values_A[is_guided_A]] for values_A in (slot_A, source_A))
    guided = [given for given in pages if COMPANION in given]
    own_T, theirs_T = (np.concatenate([given[lane] for given in guided]) for lane in ("target", COMPANION))
    order_T, path_AW = np.argsort(own_T), path_AW[is_guided_A]
    at_AW = np.searchsorted(own_T, path_AW, sorter=order_T).clip(max=len(own_T) - 1)
    path_AW = np.where(path_AW > 0, theirs_T[order_T[at_AW]], 0)
    kept_A = (path_AW > 0).sum(1)
    before_A, after_A = head_S[to_A], ledger.grow(head_S[of_A], path_AW, kept_A)
    ledger.hold(after_A)
    ledger.release(before_A)
    ledger.settle(theirs_T, path_AW)
    held_S[to_A], head_S[to_A] = held_S[of_A] + kept_A, after_A


def padded(values_A: np.ndarray, places: int, fill: float) -> np.ndarray:
    """`places` rows, `fill` in those past the values'."""
    if len(values_A) == places:
        return values_A
    padded = np.full((places, *values_A.shape[1:]), fill, dtype=values_A.dtype)
    padded[: len(values_A)] = values_A
    return padded
