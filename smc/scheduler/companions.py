"""Companions of guided groups on the scheduler's side: what a round is told of them, and how their pages follow it.

A particle's companion is in a slot of its own, of which only heads and what is held count, at the sides that are guided. In a round every
page that the particle is given there has one for the companion beside it, so the particle's lineage says what becomes of either.

Axes: A places of a batch, G groups, H guided ones, U companions of a batch, W pages of a place, T pages.
"""

from __future__ import annotations

import numpy as np

from smc.executor.messages import COMPANIONS
from smc.executor.outcome import Lineage
from smc.executor.plan import Companions
from smc.memory.pages import PageLedger
from smc.scheduler.population import Population
from smc.scheduler.slots import Slots

Pages = dict[str, np.ndarray]
"""Of a round, by lane: a side, or of a guided request its companion there."""


def room(count: int, places: int) -> int:
    """For so many companions in a round of so many places. Few sizes: a round pays for at most twice what is guided, and never for more
    than all of it."""
    return min(1 << (count - 1).bit_length(), places)


def companions_of(
    side: str, population: Population, pages: list[Pages], places: int, shared_G: np.ndarray, slots: Slots, dummy: int
) -> Companions[np.ndarray] | None:
    """Of the groups of a round of so many places that are guided at a side; None: there are none. `shared`: of the groups themselves;
    `dummy`: the slot of padding."""
    groups, group_A, lane = population.groups, population.group_A, COMPANIONS[side]
    guided_G = np.array([lane in given for given in pages])
    if not guided_G.any():
        return None
    is_guided_A, shift_G = guided_G[group_A], np.array([g.negative_size - g.prompt_size for g in groups])
    place_U, size_H = np.flatnonzero(is_guided_A), population.size_G[guided_G]
    count, scale_G = len(place_U), np.where(guided_G, [g.params.guidance_scale for g in groups], 1.0).astype(np.float32)
    most = room(count, places)
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
        pages_UW=padded(np.concatenate([given[lane] for given in pages if lane in given]).reshape(count, -1), most, 0),
    )


def follow_companions(
    side: str,
    slots: Slots,
    ledger: PageLedger,
    population: Population,
    source_A: np.ndarray,
    lineage: Lineage[np.ndarray],
    pages: list[Pages],
) -> None:
    """At a side, of whose pool the ledger is, companions of a population's particles descend from those of the particles in slots `source`,
    by the pages beside those of the particles' own `lineage`."""
    lane = COMPANIONS[side]
    is_guided_A = np.array([lane in given for given in pages])[population.group_A]
    if not is_guided_A.any():
        return
    guided = [given for given in pages if lane in given]
    own_T, theirs_T = (np.concatenate([given[name] for given in guided]) for name in (side, lane))
    path_AW, kept_A, dropped_A = (values_A[is_guided_A] for values_A in (lineage.path_AW, lineage.kept_A, lineage.dropped_A))
    order_T = np.argsort(own_T)
    # What is not kept may be any page.
    at_AW = np.searchsorted(own_T, path_AW, sorter=order_T).clip(max=len(own_T) - 1)
    to_A, of_A = (slots.companion_S[slot_A[is_guided_A]] for slot_A in (population.slot_A, source_A))
    slots.descend(side, ledger, to_A, of_A, Lineage(theirs_T[order_T[at_AW]], kept_A, dropped_A), theirs_T)


def padded(values_A: np.ndarray, places: int, fill: float) -> np.ndarray:
    """`places` rows, `fill` in those past the values'."""
    if len(values_A) == places:
        return values_A
    padded = np.full((places, *values_A.shape[1:]), fill, dtype=values_A.dtype)
    padded[: len(values_A)] = values_A
    return padded
