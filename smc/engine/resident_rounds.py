"""Rounds whose state stays beside the models (smc/resident): the host plans them, and keeps a record of what came of them.

Axes: A slots of a population, G groups, M places of a group, Q tokens of a block, F branches.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from smc.engine.config import EngineConfig
from smc.engine.group import Group, Population
from smc.engine.kvrows import KVRows
from smc.engine.messages import Pending
from smc.engine.rounds import BRANCH_POSITION
from smc.engine.slots import Slots
from smc.engine.stats import EngineStats
from smc.philox import Purpose, uniforms
from smc.resident.pair import Rounds
from smc.resident.plan import SHORT, RoundPlan, RoundResult
from smc.resident.sides import Start


class ResidentRounds:
    """Advances SMC groups, `ahead` rounds before it has read what came of the last."""

    def __init__(self, config: EngineConfig, slots: Slots, rows: KVRows, pair: Rounds) -> None:
        self.config, self.slots, self.rows, self.pair = config, slots, rows, pair
        self.stats = EngineStats()
        self._plain = pair.alone is not None
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
        slots_N = group.slots
        self.pair.join(
            Start(
                slots_N=slots_N,
                prompt_row={side: int(self.rows.of(side, slots_N[:1])[0, 0]) for side in group.prefilled},
                prompt_size=group.prompt_size,
                max_tokens=group.params.max_tokens,
                first_N=self.slots.tokens_SL[slots_N, 0],
                ended_N=self.slots.ended_S[slots_N],
                logw_N=self.slots.logw_S[slots_N],
                stop_ids=group.rules.stop_ids,
            )
        )

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
        pending = self.pair.round(plan)
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
        slots_GM = np.full((len(groups), places), self.config.max_slots, dtype=np.int64)
        slots_GM[population.group_A, population.particle_A] = slots_A
        # Padding groups repeat the first, with one particle in the dummy slot, which has ended.
        index_G = np.concatenate((np.arange(len(groups)), np.zeros(extra, dtype=np.int64)))
        spread = index_G.repeat(places)
        of_A = population.starts_G[spread]
        slots_GM = np.concatenate((slots_GM, np.full((extra, places), self.config.max_slots)))
        return RoundPlan(
            schemes=tuple(population.schemes[g] for g in index_G),
            short=bool((prompt_G + length_G).max() + self.config.block <= SHORT),
            target_law=population.target_law.take(of_A),
            draft_law=population.draft_law.take(of_A),
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
        if not self.pair.records:
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
        slots.copy(slots_A[moved_A], source_A[moved_A])
        before_A, count_A = slots.length_S[slots_A].copy(), result.count_A[place_A]
        self._write(slots.tokens_SL, slots_A, before_A, result.grown_AQ[place_A])
        if population.wants_logp:
            self._write(slots.logp_SL, slots_A, slots.block_S[slots_A] + 1, result.logp_AQ[chosen_A, :-1])
        slots.length_S[slots_A] = before_A + count_A
        last_A = slots.length_S[slots_A] - 1
        slots.block_S[slots_A] = np.minimum(before_A, last_A) if self._drafts_ahead else last_A
        if population.wants_logp:
            known_A = ~np.isnan(result.first_logp_A[place_A])
            known = slots_A[known_A]
            slots.logp_SL[known, slots.block_S[known]] = result.first_logp_A[place_A][known_A]
        slots.ended_S[slots_A] = result.ended_A[place_A]
        slots.logw_S[slots_A] = result.logw_A[place_A]
        self.rows.commit_tokens(population)
        self._count(population, index_G, result)

    def _work(self) -> dict[str, int]:
        """Tokens that each model runs for a particle in a round."""
        if self._plain:
            return {self.pair.alone: self.config.block}
        return {"draft": self.config.branches * self.config.block, "target": self._stride}

    def _write(self, array_SL: np.ndarray, slots_A: np.ndarray, first_A: np.ndarray, values_AQ: np.ndarray) -> None:
        """Values from `first` on. What does not exist is written too, and overwritten by what does."""
        column_AQ = np.minimum(first_A[:, None] + np.arange(values_AQ.shape[1]), array_SL.shape[1] - 1)
        array_SL[slots_A[:, None], column_AQ] = values_AQ

    def _count(self, population: Population, index_G: np.ndarray, result: RoundResult) -> None:
        for g, group in zip(index_G.tolist(), population.groups):
            group.rounds += 1
            group.log_z += float(result.log_z_G[g])
            tally, ess = group.tally, float(result.ess_G[g])
            tally.rounds += 1
            tally.resamples += int(result.resampled_G[g])
            tally.collapses += int(result.collapsed_G[g])
            tally.ess_sum += ess
            tally.ess_min = min(tally.ess_min, ess)
            for side, tokens in self._work().items():
                tally.count_tokens(side, len(group.slots) * tokens)
            for side, nan_G in (("draft", result.draft_nan_G), ("target", result.target_nan_G)):
                if nan_G[g]:
                    group.error = group.error or f"the {side} model returned NaN logits: its weights or its numeric type are at fault"
            self.stats.ess_shares.append(ess / len(group.slots))
            self.stats.committed_lags.append(group.lag)
        self.stats.resamples += int(result.resampled_G[index_G].sum())
        self.stats.collapses += int(result.collapsed_G[index_G].sum())


def _bucket(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()
