"""Makes both workers' KV rows follow the slots: fan-out, re-rooting after a selection, sharing what is committed, release.

A slot has one row at the target and F rows at the draft, one for each branch; between rounds the F rows are equal.
Axes: A slots of a population, F rows of a slot, N particles of a group, L answer positions.
"""

from __future__ import annotations

import numpy as np
import torch

from smc.algorithm.selection import committed_length
from smc.engine.group import Group, Population
from smc.engine.messages import Worker
from smc.engine.slots import Slots
from smc.kv.tables import RELEASE, PrefixMerge, RowMoves

SIDES = ("draft", "target")
NOWHERE = 2**31 - 1
"""Past every position."""


class KVRows:
    """Which rows belong to which slots, and the commands that keep them in step. `workers` are keyed by side."""

    def __init__(self, slots: Slots, workers: dict[str, Worker], block: int, branches: int) -> None:
        self.slots, self.workers, self.block = slots, workers, block
        self._per_slot = {"draft": branches, "target": 1}

    def of(self, side: str, slots_A: np.ndarray) -> np.ndarray:
        """Rows [A, F] of the slots."""
        per_slot = self._per_slot[side]
        return slots_A[:, None] * per_slot + np.arange(per_slot, dtype=np.int32)

    def kv_S(self, side: str) -> np.ndarray:
        """Positions held per slot, prompt included."""
        return self.slots.draft_kv_S if side == "draft" else self.slots.target_kv_S

    def live_S(self, side: str) -> np.ndarray:
        """Which slots hold pages."""
        return self.slots.draft_live_S if side == "draft" else self.slots.target_live_S

    def fan_out(self, group: Group, side: str) -> None:
        """Every open particle's rows take over the prompt, which was run in the first row of the group's first slot."""
        slots_N = group.slots
        opens_N = ~self.slots.ended_S[slots_N]
        dst_NF = self.of(side, slots_N) if group.is_smc else self.of(side, slots_N)[:, :1]
        src_N = np.where(opens_N, dst_NF[0, 0], RELEASE).astype(np.int32)
        if not opens_N[0] or dst_NF.size > 1:
            self.workers[side].move(RowMoves(dst_NF.ravel(), src_N.repeat(dst_NF.shape[1]), np.zeros(dst_NF.size, dtype=np.int32)))
        self.live_S(side)[slots_N] = opens_N
        self.kv_S(side)[slots_N] = group.prompt_size
        group.shared[side] = group.prompt_size

    def reroot(self, population: Population, source_A: np.ndarray, branch_A: np.ndarray) -> None:
        """Point every slot's rows at its ancestor's; what can no longer be extended or scored gives its pages back."""
        slots_A = population.slots_A
        open_A = ~self.slots.ended_S[slots_A]
        scorable_A = open_A | (self.slots.unscored(slots_A) > 0)
        # The branches of one particle differ only in the block they have just drafted, whose last token is not run yet.
        own_A = np.where(source_A == slots_A, self.slots.draft_kv_S[slots_A] - (self.block - 1), 0)
        self._move(population, "draft", self.of("draft", source_A)[np.arange(len(slots_A)), branch_A], open_A, own_A)
        self._move(population, "target", source_A, scorable_A, 0)

    def _move(self, population: Population, side: str, src_A: np.ndarray, stays_A: np.ndarray, equal_A: np.ndarray | int) -> None:
        """`equal_A`: leading positions in which source and destination are known to be the same, besides the group's."""
        live_S, slots_A = self.live_S(side), population.slots_A
        was_A = live_S[slots_A]
        dst_AF = self.of(side, slots_A)
        shared_A = population.per_slot([g.shared[side] for g in population.groups], np.int32)
        start_A = np.where(was_A & stays_A, np.maximum(shared_A, equal_A), 0).astype(np.int32)
        src_AF = np.where(stays_A, src_A, RELEASE).astype(np.int32).repeat(dst_AF.shape[1]).reshape(dst_AF.shape)
        changed_AF = (was_A | stays_A)[:, None] & (src_AF != dst_AF)
        if changed_AF.any():
            start_AF = start_A.repeat(dst_AF.shape[1]).reshape(dst_AF.shape)
            self.workers[side].move(RowMoves(dst_AF[changed_AF], src_AF[changed_AF], start_AF[changed_AF]))
        live_S[slots_A] = stays_A

    def commit(self, population: Population) -> None:
        """Advance each group's committed prefix, and let all its rows share the pages of what is committed."""
        self.commit_tokens(population)
        for side in SIDES:
            self._share(population, side)

    def commit_tokens(self, population: Population) -> None:
        """Advance each group's committed prefix."""
        slots, groups = self.slots, population.groups
        length_A = slots.length_S[population.slots_A]
        committed_G = np.array([g.committed for g in groups])
        common_G = np.minimum.reduceat(length_A, population.starts_G) - committed_G
        if (width := int(common_G.max())) > 0:
            # Where a window reaches past the end of a row, it is also past what its group has in common.
            index_AL = np.minimum(committed_G[population.group_A, None] + np.arange(width), slots.tokens_SL.shape[1] - 1)
            tokens_AL = slots.tokens_SL[population.slots_A[:, None], index_AL]
            windows = (population.grid(tokens_AL, 0), common_G, population.sizes_G)
            committed_G += committed_length(*map(torch.from_numpy, windows)).numpy()
        longest_G = np.maximum.reduceat(length_A, population.starts_G)
        for group, committed, lag in zip(groups, committed_G.tolist(), (longest_G - committed_G).tolist()):
            group.committed, group.lag = committed, lag
            group.tally.lag_sum += lag

    def _share(self, population: Population, side: str) -> None:
        """Point each group's live rows at the pages of the first of them, as far as the group has committed."""
        slots_A = population.slots_A
        live_A = self.live_S(side)[slots_A]
        held_A = np.where(live_A, self.kv_S(side)[slots_A], NOWHERE)
        committed_G = np.array([g.prompt_size + g.committed for g in population.groups])
        shared_G = np.array([g.shared.get(side, NOWHERE) for g in population.groups])
        end_G = np.minimum(np.minimum.reduceat(held_A, population.starts_G), committed_G)
        chosen_A = live_A & (end_G > shared_G)[population.group_A]
        if not chosen_A.any():
            return
        index_X = np.flatnonzero(chosen_A)
        group_X = population.group_A[index_X]
        first_X = np.concatenate(([True], group_X[1:] != group_X[:-1]))
        for group in group_X[first_X].tolist():
            population.groups[group].shared[side] = int(end_G[group])
        dst_XF = self.of(side, slots_A[index_X])
        src_X = dst_XF[first_X, 0][np.cumsum(first_X) - 1]
        src_XF, start_XF, end_XF = (np.repeat(v[:, None], dst_XF.shape[1], 1) for v in (src_X, shared_G[group_X], end_G[group_X]))
        others_XF = dst_XF != src_XF
        self.workers[side].merge(PrefixMerge(dst_XF[others_XF], *(v[others_XF].astype(np.int32) for v in (src_XF, start_XF, end_XF))))

    def release(self, group: Group) -> None:
        """Give back every page the group holds, in whichever phase it is."""
        for side in group.prefilled:
            rows = self.of(side, group.slots).ravel().astype(np.int32)
            self.workers[side].move(RowMoves.release(rows))
            self.live_S(side)[group.slots] = False
