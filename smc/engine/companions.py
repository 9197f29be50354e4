"""Companions of guided groups on the scheduler's side: what a round is told of them, and how their pages follow it.

A particle's companion is in a slot of its own, of which only the head and what is held at the target count. In a round every page that the
particle is given at the target has one for the companion beside it, so the particle's lineage says what becomes of either.

Axes: A places of a batch, G groups, W pages of a place, T pages.
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
    """Of the guided groups of a round, padded to `places`; None: there are none. `shared`: of the groups themselves; `dummy`: the slot of
    places without a companion."""
    groups, group_A = population.groups, population.group_A
    guided_G = np.array([g.params.guided for g in groups])
    if not guided_G.any():
        return None
    shift_G = np.where(guided_G, [g.negative_size - g.prompt_size for g in groups], 0)
    slot_A = slots.companion_S[population.slot_A].astype(np.int64)
    is_guided_A = guided_G[group_A]
    theirs_AW = np.concatenate([given[COMPANION] for given in pages if COMPANION in given]).reshape(is_guided_A.sum(), -1)
    pages_AW = np.zeros((len(group_A), theirs_AW.shape[1]), dtype=np.int32)
    pages_AW[is_guided_A] = theirs_AW
    scale_G = np.array([g.params.guidance_scale for g in groups], dtype=np.float32)
    return Companions(
        slot_A=padded(np.where(slot_A < 0, dummy, slot_A), places, dummy),
        shift_A=padded(shift_G[group_A], places, 0),
        scale_A=padded(scale_G[group_A], places, 1.0),
        size_G=padded(np.where(guided_G, population.size_G, 0).astype(np.int32), places, 0),
        shared_G=padded((shared_G + shift_G).astype(np.int32), places, 0),
        pages_AW=padded(pages_AW, places, 0),
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
