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


class KVRows:
    """Which rows belong to which slots, and the commands that keep them in step. `workers` are keyed by side."""

    def __init__(self, slots: Slots, workers: dict[str, Worker], branches: int) -> None:
        self.slots, self.workers = slots, workers
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
        self._move(population, "draft", self.of("draft", source_A)[np.arange(len(slots_A)), branch_A], open_A)
        self._move(population, "target", source_A, scorable_A)

    def _move(self, population: Population, side: str, src_A: np.ndarray, stays_A: np.ndarray) -> None:
        live_S, slots_A = self.live_S(side), population.slots_A
        was_A = live_S[slots_A]
        dst_AF = self.of(side, slots_A)
        shared_A = population.per_slot([g.shared[side] for g in population.groups], np.int32)
        start_A = np.where(was_A & stays_A, shared_A, 0).astype(np.int32)
        src_AF = np.where(stays_A, src_A, RELEASE).astype(np.int32).repeat(dst_AF.shape[1]).reshape(dst_AF.shape)
        changed_AF = (was_A | stays_A)[:, None] & (src_AF != dst_AF)
        if changed_AF.any():
            start_AF = start_A.repeat(dst_AF.shape[1]).reshape(dst_AF.shape)
            self.workers[side].move(RowMoves(dst_AF[changed_AF], src_AF[changed_AF], start_AF[changed_AF]))
        live_S[slots_A] = stays_A

    def commit(self, groups: list[Group]) -> None:
        """Advance each group's committed prefix, and let all its rows share the pages of what is committed."""
        slots = self.slots
        for group in groups:
            length_N = slots.length_S[group.slots]
            width = int(length_N.min())
            if width > group.committed:
                tokens_NL = torch.from_numpy(slots.tokens_SL[group.slots, :width])
                group.committed = committed_length(tokens_NL, torch.from_numpy(length_N), group.committed)
            group.tally.lag_sum += int(length_N.max()) - group.committed
        for side in SIDES:
            parts = [part for group in groups if (part := self._newly_shared(group, side))]
            if parts:
                self.workers[side].merge(_merge(parts))

    def _newly_shared(self, group: Group, side: str) -> tuple[np.ndarray, int, int, int] | None:
        """(other rows, first row, start, end) of positions that just became common to the group's live rows."""
        live = group.slots[self.live_S(side)[group.slots]]
        if not len(live):
            return None
        start, end = group.shared[side], min(group.prompt_size + group.committed, int(self.kv_S(side)[live].min()))
        if end <= start:
            return None
        group.shared[side] = end
        rows = self.of(side, live).ravel()
        return rows[1:], int(rows[0]), start, end

    def release(self, group: Group) -> None:
        """Give back every page the group holds, in whichever phase it is."""
        for side in group.prefilled:
            rows = self.of(side, group.slots).ravel().astype(np.int32)
            self.workers[side].move(RowMoves.release(rows))
            self.live_S(side)[group.slots] = False


def _merge(parts: list[tuple[np.ndarray, int, int, int]]) -> PrefixMerge:
    sizes = [len(rows) for rows, *_ in parts]
    src, start, end = (np.repeat(np.array([p[i] for p in parts], dtype=np.int32), sizes) for i in (1, 2, 3))
    return PrefixMerge(np.concatenate([rows for rows, *_ in parts]).astype(np.int32), src, start, end)
