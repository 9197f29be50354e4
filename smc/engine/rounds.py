"""Rounds: how running groups advance. Their state is beside the models (smc/resident); here they are planned, and recorded.

A round of SMC-SD, in either form:
  1. the draft extends open particles by K tokens: the rest of this block (lockstep), or F branches of the next (look-ahead)
  2. the target scores the block in flight, and the law after it gives the bonus token, or weighs the branches' first tokens
  3. `smc.algorithm.selection.select` weighs the candidates and chooses; both sides follow
Plain decoding is a round of the first kind by one model, whose every token is kept.

Axes: A slots of a population, G groups, M places of a group, Q tokens of a block, F branches.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch

from smc.algorithm.selection import committed_length
from smc.engine.config import EngineConfig
from smc.engine.group import Group, Population
from smc.engine.matcher import START
from smc.engine.messages import Pending
from smc.engine.slots import Slots
from smc.engine.stats import EngineStats
from smc.philox import Purpose, uniforms
from smc.resident.pair import Runner
from smc.resident.plan import SHORT, RoundPlan, RoundResult, Start

BRANCH_POSITION = 1 << 20
"""Uniforms that pick branches are numbered from here, those that resample from 0: neither depends on how many there are."""


class Rounds:
    """Advances groups by asking a `Runner` for rounds; a round may be asked for before what came of the last has been read."""

    def __init__(self, config: EngineConfig, slots: Slots, runner: Runner) -> None:
        self.config, self.slots, self.runner = config, slots, runner
        self.stats = EngineStats()
        self._plain = runner.alone is not None
        self._drafts_ahead = config.lookahead and not self._plain
        self._stride = config.block if config.lookahead or self._plain else config.block + 1
        self.last: Pending[RoundResult] | None = None
        """The round that was read last, for whoever times rounds."""
        self.queued = 0.0
        """Seconds spent planning and queueing rounds."""
        self.waited = (0, 0)
        """When the last wait for a round began and ended, nanoseconds of the monotonic clock."""

    def join(self, group: Group) -> None:
        """The group's particles have their first tokens."""
        slots_N, matcher = group.slots, group.rules.matcher
        first_N = self.slots.tokens_SL[slots_N, 0]
        start_N = np.full(len(slots_N), START)
        self.runner.join(
            Start(
                slots_N=slots_N,
                prompt_row=int(slots_N[0]),
                prompt_size=group.prompt_size,
                max_tokens=group.params.max_tokens,
                first_N=first_N,
                ended_N=self.slots.ended_S[slots_N],
                logw_N=self.slots.logw_S[slots_N],
                stop_ids=group.rules.stop_ids,
                matcher=matcher,
                text_N=start_N if matcher is None else matcher.after(start_N, first_N).astype(np.int64),
            )
        )

    def leave(self, group: Group) -> None:
        """The group is no longer asked for; what it holds is given back."""
        self.runner.leave(group.slots)

    def wants(self, group: Group) -> bool:
        """Whether another round can bring anything, as far as is known before the last one has been read."""
        grown = 1 + self._stride * (group.launched - (1 if self._drafts_ahead else 0))
        return group.launched == 0 or grown < group.params.max_tokens

    def run(self, groups: list[Group]) -> Iterator[None]:
        """One round; yields when it has been asked for."""
        begin = time.perf_counter()
        population = Population(groups)
        for group in groups:
            group.launched += 1
        plan = self._plan(population)
        pending = self.runner.round(plan)
        self.queued += time.perf_counter() - begin
        yield
        begin = time.monotonic_ns()
        result = pending.result()
        self.waited = (begin, time.monotonic_ns())
        self._record(population, plan, result)
        self.last = pending

    def _plan(self, population: Population) -> RoundPlan:
        groups = population.groups
        round_G = np.array([g.launched for g in groups], dtype=np.int64)
        length_G = 1 + self._stride * (round_G - 1)
        prompt_G = np.array([g.prompt_size for g in groups], dtype=np.int64)
        slots_A = population.slots_A
        # What the host knows of an earlier round stays true: all particles to come are copies of these.
        shortest_G = np.minimum.reduceat(self.slots.length_S[slots_A], population.starts_G) - 1
        begun_G = np.where(round_G == 1, 0, length_G - self.config.block) if self._drafts_ahead else length_G - 1
        shared_G = prompt_G + np.minimum.reduce(([g.committed for g in groups], shortest_G, begun_G))
        room_G = np.maximum(np.array([g.params.max_tokens for g in groups]) - length_G, 0)
        places, extra = self._room_for(population)
        count = 1 if set(population.schemes) == {"systematic"} else places * self.config.branches
        positions = np.concatenate((np.arange(count), BRANCH_POSITION + np.arange(places)))
        uniforms_GU = uniforms(population.seed_G, round_G, positions, Purpose.SELECTION)
        slots_GM = np.full((len(groups) + extra, places), self.config.max_slots, dtype=np.int64)
        slots_GM[population.group_A, population.particle_A] = slots_A
        # Padding groups repeat the first, with one particle in the dummy slot, which has ended.
        index_G = np.concatenate((np.arange(len(groups)), np.zeros(extra, dtype=np.int64)))
        spread = index_G.repeat(places)
        # Where rounds are recorded, few kinds of laws are worth more than few operations.
        laws = (population.target_law, population.draft_law)
        target_law, draft_law = (law.at_any_temperature() for law in laws) if self.runner.records else laws
        of_A = population.starts_G[spread]
        return RoundPlan(
            schemes=tuple(population.schemes[g] for g in index_G),
            matching=any(group.rules.matcher is not None for group in groups),
            short=bool((prompt_G + length_G).max() + self.config.block <= SHORT),
            target_law=target_law.take(of_A),
            draft_law=draft_law.take(of_A),
            slots_A=slots_GM.ravel(),
            particle_A=np.tile(np.arange(places), len(index_G)),
            seed_A=population.seed_G[spread],
            round_A=round_G[spread],
            position_A=(prompt_G + length_G - 1)[spread],
            room_A=room_G[spread],
            alpha_A=population.alpha_A[of_A],
            size_G=np.concatenate((population.sizes_G, np.ones(extra, dtype=np.int64))),
            shared_G=shared_G[index_G].astype(np.int32),
            threshold_G=population.threshold_G[index_G],
            uniforms_GU=uniforms_GU[index_G, :count],
            branch_uniforms_GM=uniforms_GU[index_G, count:],
        )

    def _room_for(self, population: Population) -> tuple[int, int]:
        """Places of a group, and padding groups. Where rounds are recorded, few shapes are worth more than few rows."""
        groups, places = len(population.groups), int(population.sizes_G.max())
        if not self.runner.records:
            return places, 0
        return _bucket(places), _bucket(groups) - groups

    def _record(self, asked: Population, plan: RoundPlan, result: RoundResult) -> None:
        """Bring the slots up to what the models hold. Groups that have ended meanwhile have given their slots to others."""
        index_G = np.array([i for i, g in enumerate(asked.groups) if not g.gone], dtype=np.int64)
        if not len(index_G):
            return
        population = asked if len(index_G) == len(asked.groups) else Population([asked.groups[i] for i in index_G])
        slots, slots_A = self.slots, population.slots_A
        begin_A = index_G[population.group_A] * plan.shape_GM[1]
        place_A = begin_A + population.particle_A
        chosen_A = result.ancestor_A[place_A]
        source_A = slots_A[chosen_A - begin_A + population.first_A]
        moved_A = source_A != slots_A
        self._count_work(population)
        slots.copy(slots_A[moved_A], source_A[moved_A])
        before_A, count_A = slots.length_S[slots_A].copy(), result.count_A[place_A]
        self._write(slots.tokens_SL, slots_A, before_A, result.grown_AQ[place_A])
        if population.wants_logp:
            logp_AQ = result.logp_AQ[chosen_A, :-1]
            if self._drafts_ahead:  # of what has just been drafted, the target has said nothing yet
                logp_AQ = np.where(np.arange(logp_AQ.shape[1]) < slots.unscored(slots_A)[:, None], logp_AQ, np.nan)
            self._write(slots.logp_SL, slots_A, slots.block_S[slots_A] + 1, logp_AQ)
        slots.length_S[slots_A] = before_A + count_A
        last_A = slots.length_S[slots_A] - 1
        slots.block_S[slots_A] = np.minimum(before_A, last_A) if self._drafts_ahead else last_A
        if population.wants_logp:
            known_A = ~np.isnan(result.first_logp_A[place_A])
            known = slots_A[known_A]
            slots.logp_SL[known, slots.block_S[known]] = result.first_logp_A[place_A][known_A]
        slots.ended_S[slots_A] = result.ended_A[place_A]
        slots.logw_S[slots_A] = result.logw_A[place_A]
        commit_tokens(slots, population)
        self._count(population, index_G, result)

    def _write(self, array_SL: np.ndarray, slots_A: np.ndarray, first_A: np.ndarray, values_AQ: np.ndarray) -> None:
        """Values from `first` on. What does not exist is written too, and overwritten by what does."""
        column_AQ = np.minimum(first_A[:, None] + np.arange(values_AQ.shape[1]), array_SL.shape[1] - 1)
        array_SL[slots_A[:, None], column_AQ] = values_AQ

    def _count_work(self, population: Population) -> None:
        """Tokens that the models run in this round, for the particles that were open when it began."""
        slots_A, config = population.slots_A, self.config
        open_A = ~self.slots.ended_S[slots_A]
        if self._plain:
            work = {self.runner.alone: open_A * config.block}
        else:
            target_A = self.slots.unscored(slots_A) + open_A if config.lookahead else open_A * self._stride
            work = {"draft": open_A * config.branches * config.block, "target": target_A}
        for side, tokens_A in work.items():
            for group, tokens in zip(population.groups, np.add.reduceat(tokens_A, population.starts_G).tolist()):
                group.tally.count_tokens(side, tokens)

    def _count(self, population: Population, index_G: np.ndarray, result: RoundResult) -> None:
        for g, group in zip(index_G.tolist(), population.groups):
            group.rounds += 1
            group.tally.rounds += 1
            for side, nan_G in (("draft", result.draft_nan_G), ("target", result.target_nan_G)):
                if nan_G[g]:
                    group.fail(side)
            if self._plain:
                continue
            tally, ess = group.tally, float(result.ess_G[g])
            group.log_z += float(result.log_z_G[g])
            tally.resamples += int(result.resampled_G[g])
            tally.collapses += int(result.collapsed_G[g])
            tally.ess_sum += ess
            tally.ess_min = min(tally.ess_min, ess)
            self.stats.ess_shares.append(ess / len(group.slots))
            self.stats.committed_lags.append(group.lag)
        self.stats.resamples += int(result.resampled_G[index_G].sum())
        self.stats.collapses += int(result.collapsed_G[index_G].sum())


def commit_tokens(slots: Slots, population: Population) -> None:
    """Advance each group's committed prefix: the answer tokens on which all its particles agree."""
    groups = population.groups
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


def _bucket(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()
