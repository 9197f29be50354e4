"""What of answers can no longer change. Axes: A particles, G groups, L tokens.

Rounds: how running groups advance. Their state is beside the models (smc/executor); here they are asked for
(`smc.scheduler.round_plan`), and recorded.

A round of a pair, in either form:
  1. the draft extends open particles by K tokens: the rest of this block (lockstep), or F rows a particle of the next
  (look-ahead)
  2. the target scores the block in flight, and the law after it gives the bonus token, or weighs the rows' first tokens
  3. candidates are weighed and chosen from, or compared with what the target drew itself; both sides follow
Plain decoding is a round of the first kind by one model, whose every token is kept.

Axes: A places of a batch, G groups, Q tokens of a block, W pages of a place.

Cohorts: running requests in sets whose rounds alternate, so that one set is drafted or scored while another is chosen
from.

Where a round goes on while its result is waited for, a cohort's next round is asked for before the last is read: the
models never wait for the scheduler. Answers do not depend on any of it: a request's random numbers know its own rounds
only."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from smc.api.engine_config import EngineConfig
from smc.executor.executor import RoundExecutor, RoundOutcome
from smc.executor.messages import Lineage, Pending, RoundResult, Stream
from smc.executor.plan import Program
from smc.memory.kv_cache import KVCacheManager
from smc.scheduler.acceptance import Acceptance
from smc.scheduler.methods import Decoding
from smc.scheduler.round_plan import Population, RoundPages, RoundPlanner, remap_unconditional_rows
from smc.scheduler.sequence_group import SequenceGroup
from smc.scheduler.slots import Slots
from smc.scheduler.stats import EngineStats
from smc.types import ModelRole

WINDOW = 64
"""Tokens that are compared at a time, however long it has been since particles agreed."""


def commit_tokens(slots: Slots, population: Population) -> None:
    """Advance each group's committed prefix: the answer tokens on which all its particles agree, and which can no
    longer change, since every future particle is a copy of one of these; of exact decoding, what the target has drawn
    itself."""
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
        agree_GL = np.logical_and.reduceat(agree_AL, population.first_G, axis=0) & (
            np.arange(width) < common_G[:, None]
        )
        more_G = np.logical_and.accumulate(agree_GL, axis=1).sum(1)
        committed_G += more_G
        # Groups that agreed on the whole window may agree on what follows; others have been settled.
        common_G = np.where(more_G == width, common_G - width, 0)
        width = min(int(common_G.max()), WINDOW)
    lag_G = population.largest(slots.length_S[slot_A]) - committed_G
    for group, committed, lag in zip(groups, committed_G.tolist(), lag_G.tolist()):
        group.committed, group.lag = committed, lag
        group.tally.lag_sum += lag


MEMORY = 0.997
"""Of what the rounds of all requests have shown, by the next of any."""


@dataclass
class InFlightStep:
    """A round that has been asked for."""

    population: Population
    lives: list[int]
    """Of its groups, when it was asked for."""
    resized: list[bool]
    """Whether a group is to have another number of particles after it."""
    pages: list[RoundPages]
    """That each group was given for it."""
    branches: int
    """F."""
    pending: Pending[RoundOutcome]


class RoundScheduler:
    """Advances the groups of one kind by asking a `Pair` for rounds; one may be asked for before the last has been
    read."""

    def __init__(
        self,
        config: EngineConfig,
        slots: Slots,
        memory: KVCacheManager,
        pair: RoundExecutor,
        decoding: Decoding,
        width: int,
        branches: Callable[[int, int], int] | None = None,
    ) -> None:
        """`width`, `branches`: see `Planner`."""
        self.config, self.slots, self.memory, self.pair, self.decoding = config, slots, memory, pair, decoding
        self._planner = RoundPlanner(config, slots, decoding, width, branches)
        self.stats = EngineStats()
        self.acceptance = Acceptance(MEMORY)
        """Of exact decoding, by all requests."""
        self.pipelined = pair.pipelined
        self.last: Pending[RoundOutcome] | None = None
        """The round that was read last, for whoever times rounds."""
        self._read: list[Pending[RoundOutcome]] = []
        self.queued = 0.0
        """Seconds spent planning and queueing rounds."""
        self.waited = (0, 0)
        """When the last wait for a round began and ended, nanoseconds of the monotonic clock."""

    def wants(self, group: SequenceGroup) -> bool:
        """Whether another round can bring anything, as far as is known before the last one has been read."""
        flying = len(group.in_flight)
        if group.turn is not None or (flying and group.wanted is not None):
            # How far it is, or which of its slots will be left, is known when that round has been read.
            return False
        block = int(self.slots.block_S[group.slots].min())
        known = group.decoding.known_tokens(self.config, length=self._length(group), block=block, rounds=flying)
        return group.launched == 0 or known < group.params.max_tokens

    def ask(self, given: list[tuple[SequenceGroup, RoundPages]]) -> InFlightStep:
        """Ask for a round of groups, each with the pages it was given for it."""
        begin = time.perf_counter()
        population, pages = Population([group for group, _ in given]), [pages for _, pages in given]
        plan = self._planner.plan(population, pages)
        for group, granted in given:
            group.in_flight.append(granted)
        lives, resized = [group.lives for group, _ in given], [group.wanted is not None for group, _ in given]
        flight = InFlightStep(population, lives, resized, pages, plan.branches, self.pair.round(plan))
        self.queued += time.perf_counter() - begin
        return flight

    def read(self, flight: InFlightStep) -> None:
        """Wait for a round, and bring the slots up to what the models hold. A group that has ended meanwhile has given
        up its own."""
        begin = time.monotonic_ns()
        outcome = flight.pending.result()
        self.waited = (begin, time.monotonic_ns())
        alive = [
            g for g, (group, life) in enumerate(zip(flight.population.groups, flight.lives)) if group.lives == life
        ]
        if alive:
            self._record(flight, outcome, np.array(alive))
        self.last = flight.pending
        self._read.append(flight.pending)

    def take_read(self) -> list[Pending[RoundOutcome]]:
        """Rounds that have been read since the last call."""
        read, self._read = self._read, []
        return read

    def _length(self, group: SequenceGroup) -> int:
        """Tokens of the group's open particles."""
        return int(self.slots.length_S[group.slots].max())

    def _record(self, flight: InFlightStep, outcome: RoundOutcome, alive_G: np.ndarray) -> None:
        asked, result, slots = flight.population, outcome.result, self.slots
        population = asked
        place_A = np.arange(len(asked.slot_A))
        if len(alive_G) < len(asked.groups):
            place_A = place_A[np.isin(asked.group_A, alive_G)]
            population = asked.take(alive_G)
        slot_A, source_A = asked.slot_A[place_A], asked.slot_A[result.ancestor_A[place_A]]
        pages = [flight.pages[g] for g in alive_G]
        for group in population.groups:
            group.in_flight.popleft()
        self._count_work(population, flight.branches)
        confirmed_G = slots.block_S[population.slot_A[population.first_G]].copy()
        self._follow_pages(outcome, population, source_A, place_A, pages)
        self._write_tokens(population, result, slot_A, source_A, place_A)
        commit_tokens(slots, population)
        self._count(population, alive_G, result)
        self._count_confirmed(
            population, alive_G, result, slots.block_S[population.slot_A[population.first_G]] - confirmed_G
        )
        self._drop_slots(population, [flight.resized[g] for g in alive_G], result, place_A)

    def _follow_pages(
        self,
        outcome: RoundOutcome,
        population: Population,
        source_A: np.ndarray,
        place_A: np.ndarray,
        pages: list[RoundPages],
    ) -> None:
        """Particles, and companions, descend from their ancestors' pages; what nobody descends from is free."""
        for role, whole in outcome.lineage.items():
            ledger = self.memory.ledgers[role]
            lineage = Lineage(whole.path_AW[place_A], whole.kept_A[place_A], whole.dropped_A[place_A])
            given_T = np.concatenate([given[Stream(role)] for given in pages])
            self.slots.descend(role, ledger, population.slot_A, source_A, lineage, given_T)
            remap_unconditional_rows(role, self.slots, ledger, population, source_A, lineage, pages)

    def _write_tokens(
        self,
        population: Population,
        result: RoundResult[np.ndarray],
        slot_A: np.ndarray,
        source_A: np.ndarray,
        place_A: np.ndarray,
    ) -> None:
        slots, ahead = self.slots, self.decoding.ahead(self.config)
        moved_A = source_A != slot_A
        slots.copy(slot_A[moved_A], source_A[moved_A])
        before_A, count_A = slots.length_S[slot_A] - result.cut_A[place_A], result.count_A[place_A]
        self._write(slots.tokens_SL, slot_A, before_A, result.grown_AQ[place_A])
        wants_logp = any(p.logprobs for p in population.params)
        if wants_logp:
            self._write(slots.logp_SL, slot_A, slots.block_S[slot_A] + 1, result.logp_AQ[place_A, :-1])
        slots.length_S[slot_A] = before_A + count_A
        last_A = slots.length_S[slot_A] - 1
        if ahead:
            self._write(slots.logq_SL, slot_A, before_A, result.logq_AQ[place_A])
            slots.block_S[slot_A] = np.minimum(before_A, last_A)
        else:
            slots.block_S[slot_A] = last_A
        if wants_logp:
            known_A = ~np.isnan(result.first_logp_A[place_A])
            known = slot_A[known_A]
            slots.logp_SL[known, slots.block_S[known]] = result.first_logp_A[place_A][known_A]
        slots.ended_S[slot_A] = result.ended_A[place_A]
        slots.logw_S[slot_A] = result.logw_A[place_A]

    def _write(self, array_SL: np.ndarray, slot_A: np.ndarray, first_A: np.ndarray, values_AQ: np.ndarray) -> None:
        """Values from `first` on. What does not exist is written too, and overwritten by what does."""
        column_AQ = np.minimum(first_A[:, None] + np.arange(values_AQ.shape[1]), array_SL.shape[1] - 1)
        array_SL[slot_A[:, None], column_AQ] = values_AQ

    def _drop_slots(
        self, population: Population, resized: list[bool], result: RoundResult[np.ndarray], place_A: np.ndarray
    ) -> None:
        """Groups that now have another number of particles give up the slots without one."""
        for g, group in enumerate(population.groups):
            if not resized[g]:
                continue
            alive_N = result.alive_A[place_A[population.group_A == g]]
            if group.decoding.competes:
                # It has fewer rows than it may have, whenever there were no more.
                alive_N = alive_N | (np.cumsum(~alive_N) <= group.wanted - alive_N.sum())
            dropped = group.slots[~alive_N]
            self.slots.let_go(dropped, self.memory.ledgers)
            self.slots.give_back(dropped)
            group.slots, group.particles, group.wanted = group.slots[alive_N], group.particles[alive_N], None
            group.count = len(group.slots)

    def _count_work(self, population: Population, branches: int) -> None:
        """Tokens that the models run in this round, for the particles that were open when it began."""
        slot_A, config, program = population.slot_A, self.config, self.decoding.program
        open_A = ~self.slots.ended_S[slot_A]
        if program is Program.PAIR:
            target_A = (
                self.slots.unscored(slot_A) + open_A if config.lookahead else open_A * self.decoding.stride(config)
            )
            # Rows that are dealt out among all of a group are as many as it has places for.
            competes_G = np.array([g.decoding.competes for g in population.groups])
            any_A = np.logical_or.reduceat(open_A, population.first_G)[population.group_A]
            drafting_A = np.where(competes_G[population.group_A], any_A, open_A)
            work = {ModelRole.DRAFT: drafting_A * branches * config.block, ModelRole.TARGET: target_A}
        else:
            work = {ModelRole(program.value): open_A * config.block}
        for role, tokens_A in work.items():
            for group, tokens in zip(population.groups, population.sums(tokens_A).tolist()):
                group.tally.count_tokens(role, tokens * (1 + (role in group.params.guided_roles)))

    def _count(self, population: Population, alive_G: np.ndarray, result: RoundResult[np.ndarray]) -> None:
        for g, group in zip(alive_G.tolist(), population.groups):
            group.rounds += 1
            group.tally.rounds += 1
            group.tally.alone_rounds += group.alone
            self.stats.spec_alone_rounds += group.alone
            for role, nan_G in ((ModelRole.DRAFT, result.draft_nan_G), (ModelRole.TARGET, result.target_nan_G)):
                if nan_G[g]:
                    group.fail(role)
            if not group.decoding.records_population:
                continue
            tally, ess = group.tally, float(result.ess_G[g])
            group.log_z += float(result.log_z_G[g])
            tally.resamples += int(result.resampled_G[g])
            tally.collapses += int(result.collapsed_G[g])
            tally.ess_sum += ess
            tally.ess_min = min(tally.ess_min, ess)
            # Distinct particles are of unequal weight by construction: their effective number says little.
            share = None if group.decoding.competes else ess / len(group.slots)
            self.stats.count_round(share, group.lag, bool(result.resampled_G[g]), bool(result.collapsed_G[g]))

    def _count_confirmed(
        self, population: Population, alive_G: np.ndarray, result: RoundResult[np.ndarray], more_G: np.ndarray
    ) -> None:
        """Of exact decoding: how many tokens a round confirmed, and how many of these the draft had found."""
        ahead, block = self.decoding.ahead(self.config), self.config.block
        for g, group, more, places in zip(
            alive_G.tolist(), population.groups, more_G.tolist(), population.size_G.tolist()
        ):
            if not group.decoding.confirms or group.error:
                continue
            hit = ahead and bool(result.hit_G[g])
            group.tally.confirmed += more
            group.tally.rows_sum += places
            group.tally.hits += hit
            group.tally.misses += ahead and not hit
            if group.elastic and not self.slots.ended_S[group.slots].all():
                for acceptance in (group.acceptance, self.acceptance):
                    acceptance.count(min(more, block), not hit if ahead else more <= block, places)
            # The token that the target says after them is its own, unless rows that begin with it had been drafted
            # ahead.
            verification = group.params.verification
            assert verification is not None, "filled in where it is of effect"
            self.stats.spec[verification].count(more if hit else max(more - 1, 0), block, places, ahead, hit)


Provide = Callable[[list[SequenceGroup]], list[tuple[SequenceGroup, RoundPages]]]
"""Gives groups pages for a round; returns those for which there were enough."""


class MicroBatches:
    """`count` cohorts of the groups of one program, as even as new requests can make them."""

    def __init__(self, rounds: RoundScheduler, count: int) -> None:
        self.rounds = rounds
        self._members: list[list[SequenceGroup]] = [[] for _ in range(count)]
        self._flights: list[InFlightStep | None] = [None] * count

    def join(self, group: SequenceGroup) -> None:
        """The group takes part from its cohort's next round on."""
        smallest = min(self._members, key=lambda members: sum(len(g.slots) for g in members))
        smallest.append(group)

    def leave(self, group: SequenceGroup) -> None:
        """A round of the group that has been asked for goes on without anybody reading what came of it."""
        for members in self._members:
            if group in members:
                members.remove(group)

    def abandon(self) -> None:
        """Rounds that have been asked for will not come."""
        self._flights = [None] * len(self._flights)

    def advance(self, provide: Provide) -> None:
        """Ask for every cohort's next round, and read what came of its last: the one before, or where nothing goes on
        meanwhile, this."""
        asked = [self._ask(members, provide) for members in self._members]
        if self.rounds.pipelined:
            asked, self._flights = self._flights, asked
        for flight in filter(None, asked):
            self.rounds.read(flight)

    def _ask(self, members: list[SequenceGroup], provide: Provide) -> InFlightStep | None:
        given = provide([group for group in members if self.rounds.wants(group)])
        return self.rounds.ask(given) if given else None
