"""What of answers can no longer change. Axes: A particles, G groups, L tokens."""

from __future__ import annotations

import numpy as np

from smc.scheduler.population import Population
from smc.scheduler.slots import Slots

WINDOW = 64
"""Tokens that are compared at a time, however long it has been since particles agreed."""


def commit_tokens(slots: Slots, population: Population) -> None:
    """Advance each group's committed prefix: the answer tokens on which all its particles agree, and which can no longer change, since
    every future particle is a copy of one of these; of exact decoding, what the target has drawn itself."""
    groups, slot_A = population.groups, population.slot_A
    confirms_G = np.array([g.decoding.confirms for g in groups])
    length_A = np.where(confirms_G[population.group_A], slots.block_S[slot_A] + 1, slots.length_S[slot_A])
    committed_G = np.array([g.committed for g in groups])
    common_G = population.least(length_A) - committed_G
    width = min(int(common_G.max()), WINDOW)
    while width > 0:
        # Where a window reaches past the end of a row, it is also past what its group has in common.
        index_AL = np.minimum(committed_G[population.group_A, None] + np.arange(width), slots.tokens_SL.shape[1] - 1)
        tokens_AL = slots.tokens_SL[slot_A[:, None], index_AL]
        agree_AL = tokens_AL == tokens_AL[population.first_G[population.group_A]]
        agree_GL = np.logical_and.reduceat(agree_AL, population.first_G, axis=0) & (np.arange(width) < common_G[:, None])
        more_G = np.logical_and.accumulate(agree_GL, axis=1).sum(1)
        committed_G += more_G
        # Groups that agreed on the whole window may agree on what follows; others have been settled.
        common_G = np.where(more_G == width, common_G - width, 0)
        width = min(int(common_G.max()), WINDOW)
    lag_G = population.largest(slots.length_S[slot_A]) - committed_G
    for group, committed, lag in zip(groups, committed_G.tolist(), lag_G.tolist()):
        group.committed, group.lag = committed, lag
        group.tally.lag_sum += lag
