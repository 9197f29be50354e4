"""Rounds of SMC: how running groups advance, in both forms (plain decoding: smc/engine/plain.py).

A round of SMC-SD, in either form:
  1. the draft extends open particles by K tokens: the rest of this block (lockstep), or F branches of the next (look-ahead)
  2. the target scores the block in flight, and the law after it gives the bonus token, or weighs the branches' first tokens
  3. `smc.algorithm.selection.select` weighs the candidates and chooses; slots and KV rows follow
Look-ahead sends both batches before it reads either result; lockstep waits between them. A round is a generator that stops at
each wait, so that the caller can do something else in the meantime.

Axes: A all slots of a population, X chosen slots, T tokens, B block positions, F branches, K new tokens, G groups, N particles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from smc.algorithm.selection import Selection, lockstep_candidates, lookahead_candidates, select
from smc.algorithm.weights import block_log_weight
from smc.engine.config import EngineConfig
from smc.engine.group import Group, Population
from smc.engine.kvrows import KVRows
from smc.engine.messages import ExtendBatch, ExtendResult, Pending, SampleBatch, SampleResult
from smc.engine.rows import answer_rows, fail_groups, grow, keys, spans
from smc.engine.slots import Slots
from smc.engine.stats import EngineStats
from smc.philox import Purpose, uniforms

BRANCH_POSITION = 1 << 20
"""Uniforms that pick branches are numbered from here, those that resample from 0: neither depends on how many there are."""


@dataclass(frozen=True)
class Scored:
    """The target's verdict on the blocks in flight, per slot of the population."""

    block_A: np.ndarray
    """float64 log-weight increment of the block."""
    next_AF: np.ndarray
    """float32 log p of the first token of every branch (look-ahead)."""
    bonus_A: np.ndarray
    """int32 bonus token (lockstep)."""
    bonus_logp_A: np.ndarray
    """float32 log p of the bonus token."""
    log_z_A: np.ndarray
    """float32 log normaliser of the law the bonus was drawn from."""

    @staticmethod
    def nothing(size: int, branches: int) -> Scored:
        reals = np.zeros((2, size), np.float32)
        return Scored(np.zeros(size), np.zeros((size, branches), np.float32), np.zeros(size, np.int32), *reals)


class SMCRounds:
    """Advances SMC groups. Particles are in `slots`, KV is with the workers; only views of recent sets of groups are kept."""

    def __init__(self, config: EngineConfig, slots: Slots, rows: KVRows) -> None:
        self.config, self.slots, self.rows = config, slots, rows
        self.branches = config.branches
        self.stats = EngineStats()
        self._recent: list[Population] = []

    def run(self, groups: list[Group]) -> Iterator[None]:
        """One round; yields before each wait. At its end a group whose particles have all ended and been scored can be finalised."""
        population = self._population(groups)
        for group in groups:
            group.rounds += 1
        open_A = self._open(population)
        pending = self._draft(population, open_A)
        if self.config.lookahead:
            scoring = self._score(population, open_A, pending)
            yield
            drafted = pending.result() if pending else None
        else:
            yield
            drafted = pending.result()
            self._finish_blocks(population, open_A, drafted)
            open_A = self._open(population)
            scoring = self._score(population, open_A, None)
            yield
        scored = self._read(population, open_A, scoring.result())
        selection = self._select(population, open_A, scored, drafted)
        self._apply(population, open_A, selection, scored, drafted)
        self.rows.commit(population)
        self._count(population, selection)

    def _population(self, groups: list[Group]) -> Population:
        population = next((p for p in self._recent if p.groups == groups), None)
        if population is None:
            population = Population(groups)
            self._recent = [population, *self._recent[: self.config.cohorts - 1]]
        return population

    def _open(self, population: Population) -> np.ndarray:
        """Slots whose particle goes on, [A]."""
        return ~self.slots.ended_S[population.slots_A]

    def _draft(self, population: Population, open_A: np.ndarray) -> Pending[SampleResult] | None:
        """K tokens and F branches for every open slot, from the tokens that the draft has not run yet."""
        slots_X = population.slots_A[open_A]
        if not len(slots_X):
            return None
        first_X = self.slots.draft_kv_S[slots_X] - population.prompt_A[open_A]
        count_X = self.slots.length_S[slots_X] - first_X
        branch_rows_XF = self.rows.of("draft", slots_X)
        batch = SampleBatch(
            input=answer_rows(population, open_A, self.slots, "draft", branch_rows_XF[:, 0], first_X, count_X),
            branch_rows_RF=branch_rows_XF,
            steps=self.config.block,
            law=population.draft_law.take(open_A),
            mixture=self.config.defensive_share,
            keys=keys(population, open_A, self.branches, Purpose.PROPOSAL),
            publish=self.config.lookahead,
        )
        self.slots.draft_kv_S[slots_X] += count_X + self.config.block - 1
        population.count_tokens("draft", open_A, np.full(len(slots_X), self.branches * self.config.block))
        return self.rows.workers["draft"].sample(batch)

    def _finish_blocks(self, population: Population, open_A: np.ndarray, drafted: SampleResult) -> None:
        """Lockstep: the drafted tokens complete the blocks in flight, whose seeds are already there."""
        self.slots.logq_SB[population.slots_A[open_A], 1:] = drafted.logq_RFK[:, 0]
        grow(self.slots, population, open_A, drafted.tokens_RFK[:, 0])
        self._check_blocks(population)

    def _check_blocks(self, population: Population) -> None:
        """NaN among the proposal's log-probabilities of tokens that exist; what follows an answer's end may be anything."""
        slots_A = population.slots_A
        exists_AB = np.arange(self.slots.logq_SB.shape[1]) <= self.slots.unscored(slots_A)[:, None]
        fail_groups(population, (np.isnan(self.slots.logq_SB[slots_A]) & exists_AB).any(1), "draft")

    def _score(self, population: Population, open_A: np.ndarray, ahead: Pending[SampleResult] | None) -> Pending[ExtendResult]:
        """Run the blocks in flight through the target. The last token of an ended particle is scored, never run."""
        need_A = self._needs_scoring(population, open_A)
        slots_X, open_X = population.slots_A[need_A], open_A[need_A]
        first_X = self.slots.block_S[slots_X]
        unscored_X = self.slots.unscored(slots_X)
        count_X = unscored_X + open_X
        row_T, index_T = spans(first_X, count_X)
        labelled_T = index_T < (first_X + unscored_X)[row_T]
        labels_T = np.where(labelled_T, self.slots.tokens_SL[slots_X[row_T], np.where(labelled_T, index_T + 1, 0)], -1)
        batch = ExtendBatch(
            input=answer_rows(population, need_A, self.slots, "target", slots_X, first_X, count_X),
            labels_T=labels_T.astype(np.int64),
            draws=None if self.config.lookahead else keys(population, need_A, 1, Purpose.TARGET),
            next_of=ahead,
            next_index_R=np.where(open_X, np.cumsum(open_X) - 1, -1) if ahead else None,
            law=population.target_law.take(need_A),
        )
        self.slots.target_kv_S[slots_X] += count_X
        population.count_tokens("target", need_A, count_X)
        return self.rows.workers["target"].extend(batch)

    def _needs_scoring(self, population: Population, open_A: np.ndarray) -> np.ndarray:
        return open_A | (self.slots.unscored(population.slots_A) > 0)

    def _read(self, population: Population, open_A: np.ndarray, result: ExtendResult) -> Scored:
        """Bring the target's flat answer back to slots."""
        need_A = self._needs_scoring(population, open_A)
        slots_X, open_X = population.slots_A[need_A], open_A[need_A]
        unscored_X = self.slots.unscored(slots_X)
        row_T, offset_T = spans(np.zeros_like(unscored_X), unscored_X + open_X)
        logp_XB = np.zeros((len(slots_X), self.slots.logq_SB.shape[1]), dtype=np.float32)
        logp_XB[row_T, offset_T] = result.logp_T
        block_X = block_log_weight(
            torch.from_numpy(logp_XB[:, :-1]),
            torch.from_numpy(self.slots.logq_SB[slots_X, 1:]),
            torch.from_numpy(unscored_X),
            torch.from_numpy(population.alpha_A[need_A]),
        ).numpy()
        if population.wants_logp:
            index_T = (self.slots.block_S[slots_X] + 1)[row_T] + offset_T
            self.slots.logp_SL[slots_X[row_T], index_T] = result.logp_T
        scored = Scored.nothing(len(population.slots_A), self.branches)
        scored.block_A[need_A] = block_X
        nan_X = np.isnan(logp_XB).any(1)
        if result.next_logp_RF is not None:
            scored.next_AF[need_A] = result.next_logp_RF
            nan_X |= np.isnan(result.next_logp_RF).any(1)
        if result.drawn_RD is not None:
            scored.bonus_A[need_A] = result.drawn_RD[:, 0]
            scored.bonus_logp_A[need_A] = result.drawn_logp_RD[:, 0]
            scored.log_z_A[need_A] = np.where(open_X, result.log_z_R, 0.0)
            nan_X |= np.isnan(result.log_z_R)
        fail_groups(population, _spread(nan_X, need_A), "target")
        return scored

    def _select(self, population: Population, open_A: np.ndarray, scored: Scored, drafted: SampleResult | None) -> Selection:
        logw_GN = population.grid(self.slots.logw_S[population.slots_A], -np.inf)
        block_GN = population.grid(scored.block_A, 0.0)
        if self.config.lookahead:
            next_AF = np.zeros((len(open_A), self.branches))
            if drafted is not None:
                next_AF[open_A] = population.alpha_A[open_A, None] * scored.next_AF[open_A] - drafted.logq_RFK[:, :, 0]
                fail_groups(population, _spread(np.isnan(drafted.logq_RFK[:, :, 0]).any(1), open_A), "draft")
            candidates = lookahead_candidates(*_tensors(logw_GN, block_GN, population.grid(next_AF, 0.0), population.grid(open_A, False)))
        else:
            candidates = lockstep_candidates(*_tensors(logw_GN, block_GN, population.grid(scored.log_z_A, 0.0)))
        # A group with NaN logits is about to end with an error; until then it must not disturb the arithmetic.
        candidates = candidates.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        schemes = population.schemes
        n, m = candidates.shape[1], candidates.shape[1] * candidates.shape[2]
        resample = np.arange(1 if set(schemes) == {"systematic"} else m)
        uniforms_GU = uniforms(
            population.seed_G, population.rounds_G(), np.concatenate((resample, BRANCH_POSITION + np.arange(n))), Purpose.SELECTION
        )
        return select(
            candidates, *_tensors(population.sizes_G, population.threshold_G), schemes, *_tensors(uniforms_GU[:, :-n], uniforms_GU[:, -n:])
        )

    def _apply(
        self, population: Population, open_A: np.ndarray, selection: Selection, scored: Scored, drafted: SampleResult | None
    ) -> None:
        """Slots take over their ancestors, new tokens are appended, KV rows follow."""
        slots, slots_A = self.slots, population.slots_A
        ancestor_A = population.flat(selection.ancestor_GN.numpy()) + population.first_A
        branch_A = population.flat(selection.branch_GN.numpy())
        slots.logw_S[slots_A] = population.flat(selection.logw_GN.numpy())
        slots.block_S[slots_A] = slots.length_S[slots_A] - 1
        source_A = slots_A[ancestor_A]
        moved_A = source_A != slots_A
        slots.copy(slots_A[moved_A], source_A[moved_A])
        grows_A = open_A[ancestor_A]
        if grows_A.any():
            growing = slots_A[grows_A]
            slots.block_S[growing] = slots.length_S[growing]
            if population.wants_logp:
                first_logp_A = scored.next_AF[ancestor_A, branch_A] if self.config.lookahead else scored.bonus_logp_A[ancestor_A]
                slots.logp_SL[growing, slots.length_S[growing]] = first_logp_A[grows_A]
            if self.config.lookahead:
                row_X = (np.cumsum(open_A) - 1)[ancestor_A[grows_A]]
                slots.logq_SB[growing, : self.config.block] = drafted.logq_RFK[row_X, branch_A[grows_A]]
                grow(slots, population, grows_A, drafted.tokens_RFK[row_X, branch_A[grows_A]])
                self._check_blocks(population)
            else:
                grow(slots, population, grows_A, scored.bonus_A[ancestor_A[grows_A], None])
        self.rows.reroot(population, source_A, branch_A)

    def _count(self, population: Population, selection: Selection) -> None:
        ess_G, log_z_G = selection.ess_G.tolist(), selection.log_z_G.tolist()
        resampled_G, collapsed_G = selection.resampled_G.tolist(), selection.collapsed_G.tolist()
        for g, group in enumerate(population.groups):
            group.log_z += log_z_G[g]
            tally = group.tally
            tally.rounds += 1
            tally.resamples += resampled_G[g]
            tally.collapses += collapsed_G[g]
            tally.ess_sum += ess_G[g]
            tally.ess_min = min(tally.ess_min, ess_G[g])
            self.stats.ess_shares.append(ess_G[g] / len(group.slots))
            self.stats.committed_lags.append(group.lag)
        self.stats.resamples += sum(resampled_G)
        self.stats.collapses += sum(collapsed_G)


def _spread(values_X: np.ndarray, chosen_A: np.ndarray) -> np.ndarray:
    """[X] back to [A]: False where a slot was not chosen."""
    values_A = np.zeros(len(chosen_A), dtype=bool)
    values_A[chosen_A] = values_X
    return values_A


def _tensors(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]
