"""Decoding: how running requests advance by rounds. Rounds are planned (`smc.scheduler.planner`) and launched here,
and their results are written to slots and pages. The state of the models is in smc/executor.

A round of the draft-target pair, in either form:
  1. The draft extends open particles by K tokens: the rest of the current block (lockstep), or N F rows of the next
     block (look-ahead).
  2. The target scores the block in flight. The distribution after the block gives the bonus token (lockstep), or scores
     the first tokens of the rows (look-ahead).
  3. Candidates are weighted and selected, or compared with the target's own draws. Both models follow the selection.
In plain decoding, a round is step 1 by one model, and all of its tokens are kept.

Requests are in micro-batches whose rounds alternate, so that one is drafted or scored while another is selected from.
If rounds run while the scheduler waits for a result, a micro-batch's next round is launched before the last one is
read, so that the models never wait for the scheduler. Answers do not depend on this: a request's random numbers depend
only on its own rounds."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np

from smc.algorithm.coupling import DrawObservation
from smc.api.engine_config import EngineConfig
from smc.arrays import map_tensors
from smc.executor.messages import Pending
from smc.executor.round_executor import RoundExecutor, RoundReports
from smc.memory.kv_cache import KVCacheManager
from smc.memory.pages import OutOfPages
from smc.round.plan import RoundKind
from smc.round.tensors import Lineage, ObservedDraws, RedraftReport, RoundResult
from smc.scheduler.mask_turns import MaskTurns
from smc.scheduler.methods import DecodingRules, RoundFacts, TreeFacts
from smc.scheduler.planner import DecideSize, DraftSize, RoundPlanner, SlotBatch, without_redrafting
from smc.scheduler.sequence_group import SequenceGroup
from smc.scheduler.slots import REDRAFTED, RoundPages, Slots, Stream
from smc.scheduler.speculation import Acceptance, DraftExponents
from smc.scheduler.stats import EngineStats
from smc.types import BOTH_MODELS, ModelRole, is_mask_span

WINDOW = 64
"""Number of tokens that are compared at a time, however long ago particles agreed."""
MEMORY = 0.997
"""Weight that earlier rounds keep in the engine's acceptance after each round of any request."""


class LaunchedGroup(NamedTuple):
    """A request's part in a round, as it was at the launch."""

    group: SequenceGroup
    pages: RoundPages
    generation: int
    is_resized: bool
    """The round changes the number of its particles."""
    exponent: float
    """Exponent of coupled drafting."""
    depth: int
    """Maximum number of drafted tokens of a row that are verified."""


class InFlightStep(NamedTuple):
    """A round that has been launched."""

    batch: SlotBatch
    groups: list[LaunchedGroup]
    size: DraftSize
    """How much is drafted."""
    pending: Pending[RoundReports]


AllocatePages = Callable[[list[SequenceGroup]], list[tuple[SequenceGroup, RoundPages]]]
"""Allocates pages for a round; returns the requests for which there were enough, with their pages."""


class RoundScheduler:
    """Advances the requests with the same models by rounds, in micro-batches that are kept as even as possible by
    adding new requests to the smallest. A round may be launched before the last one has been read."""

    def __init__(
        self,
        config: EngineConfig,
        slots: Slots,
        memory: KVCacheManager,
        executor: RoundExecutor,
        rules: DecodingRules,
        width: int,
        micro_batches: int,
        turns: MaskTurns,
        decide: DecideSize | None = None,
    ) -> None:
        """`micro_batches`: their number. `turns`: shared by all rounds of an engine. `width`, `decide`: see
        `RoundPlanner`."""
        self.config, self.slots, self.memory, self.executor, self.rules = config, slots, memory, executor, rules
        self._planner, self._turns = RoundPlanner(config, slots, rules, width, decide), turns
        self._members: list[list[SequenceGroup]] = [[] for _ in range(micro_batches)]
        self._in_flight: list[InFlightStep | None] = [None] * micro_batches
        self._stats = EngineStats()
        self.acceptance = Acceptance(MEMORY)
        """Acceptance of exact decoding, averaged over all requests."""
        self.exponents = DraftExponents()
        """Exponents of coupled drafting, fitted to all requests."""
        self.pipelined = executor.pipelined
        self.last: Pending[RoundReports] | None = None
        """The round that was read last, for timing."""
        self.queued = 0.0
        """Seconds spent planning and launching rounds."""
        self.waited = (0, 0)
        """Begin and end of the last wait for a round, in nanoseconds of the monotonic clock."""

    def add(self, group: SequenceGroup) -> None:
        """Let the request take part from the next round of its micro-batch on."""
        smallest = min(self._members, key=lambda members: sum(len(g.slots) for g in members))
        smallest.append(group)

    def remove(self, group: SequenceGroup) -> None:
        """Remove a request. If a round of it is in flight, that round continues and its result is discarded."""
        for members in self._members:
            if group in members:
                members.remove(group)

    def abandon(self) -> None:
        """Forget rounds in flight whose results will not arrive."""
        self._in_flight = [None] * len(self._in_flight)

    def launch(self, allocate: AllocatePages) -> list[InFlightStep]:
        """Launch the next round of every micro-batch. Return the rounds to be read now, one of each: the previous one
        if the executor is pipelined, else the one just launched."""
        launched = [self._launch(members, allocate) for members in self._members]
        if self.pipelined:
            launched, self._in_flight = self._in_flight, launched
        return [step for step in launched if step is not None]

    def read(self, steps: Sequence[InFlightStep]) -> list[Pending[RoundReports]]:
        """Wait for rounds, and return them."""
        for step in steps:
            self._read(step)
        return [step.pending for step in steps]

    def constrained(self) -> Iterator[SequenceGroup]:
        """Yield the constrained requests that another round is useful for."""
        for members in self._members:
            wanting = [group for group in members if group.params.constraint is not None]
            yield from self._wanting_round(wanting)

    def take_stats(self) -> EngineStats:
        """Return the statistics of its rounds since the last call."""
        stats, self._stats = self._stats, EngineStats()
        return stats

    def _wanting_round(self, groups: list[SequenceGroup]) -> list[SequenceGroup]:
        """Return the requests for which another round is useful, as far as is known before the last one has been
        read."""
        if not groups:
            return []
        batch = SlotBatch(groups)
        length_G = batch.largest(self.slots.length_S[batch.slot_A]).tolist()
        block_G = batch.least(self.slots.block_S[batch.slot_A]).tolist()
        return [group for group, *progress in zip(groups, length_G, block_G) if self._wants_round(group, *progress)]

    def _wants_round(self, group: SequenceGroup, length: int, block: int) -> bool:
        """`length`: of the longest particle; `block`: least position of a block."""
        in_flight = len(group.in_flight)
        if group.params.potential is not None and (in_flight or group.awaits_potential):
            # The next round depends on the potential of the particles after this one.
            return False
        if group.switches or (in_flight and group.next_rows is not None):
            # The number of confirmed tokens, or which slots remain, is known only after that round has been read.
            return False
        known = group.rules.known_tokens(self.config, length=length, block=block, rounds=in_flight)
        return group.launched == 0 or known < group.params.max_tokens

    def _launch(self, members: list[SequenceGroup], allocate: AllocatePages) -> InFlightStep | None:
        """Launch a round of those requests of a micro-batch that get pages for it; None: there are none."""
        given = allocate(self._wanting_round([group for group in members if self._turns.allows(group)]))
        if not given:
            return None
        begin = time.perf_counter()
        batch, pages = SlotBatch([group for group, _ in given]), [pages for _, pages in given]
        for group in batch.groups:
            if group.rules.coupled and group.exponent is None:
                group.exponent = self.exponents.begin(group.params.temperature)
        size = self._with_redraft_pages(batch, pages, self._planner.size(batch))
        plan = self._planner.plan(batch, pages, size)
        groups = []
        for group, granted in given:
            is_resized, depth = group.next_rows is not None, self._depth(group, plan.kind)
            exponent = group.draft_exponent
            groups.append(LaunchedGroup(group, granted, group.generation, is_resized, exponent, depth))
            group.begin_round(granted, plan.kind.steps or self.config.block)
        step = InFlightStep(batch, groups, size, self.executor.round(plan))
        self.queued += time.perf_counter() - begin
        return step

    def _with_redraft_pages(self, batch: SlotBatch, pages: list[RoundPages], size: DraftSize) -> DraftSize:
        """Allocate pages for what the round drafts again. Only pages that no next round needs are taken: without enough
        of them, nothing is drafted again."""
        if not size.redrafted:
            return size
        draft = ModelRole.DRAFT
        each_G = [group.rules.redraft_pages(self.config, len(group.slots)) for group in batch.groups]
        try:
            given_B = self.memory.allocate({draft: sum(each_G)}, {draft: self.memory.next_round[draft]})[draft]
        except OutOfPages:
            return without_redrafting(size)
        for given, own_B in zip(pages, np.split(given_B, np.cumsum(each_G)[:-1])):
            if len(own_B):
                given[REDRAFTED] = own_B
        return size

    def _depth(self, group: SequenceGroup, kind: RoundKind) -> int:
        """Maximum number of drafted tokens of a row that a round verifies; it has not been launched yet."""
        is_first = not self.rules.ahead(self.config) or not group.launched
        return (kind.steps if is_first else group.drafted) or self.config.block

    def _read(self, step: InFlightStep) -> None:
        """Wait for a round, and update slots and pages to what the models hold. Requests that have released their slots
        since the launch are left out."""
        begin = time.monotonic_ns()
        reports = step.pending.result()
        self.waited = (begin, time.monotonic_ns())
        current = [g for g, each in enumerate(step.groups) if each.group.generation == each.generation]
        if current:
            self._record(step, reports, np.array(current))
        if any(group.params.masked for group in step.batch.groups):
            masks = [end - begin for name, (begin, end) in step.pending.spans().items() if is_mask_span(name)]
            self._stats.count_masks(masks)
            self._turns.learn(step.batch.groups, 1e-9 * sum(masks))
        self.last = step.pending

    def _record(self, step: InFlightStep, reports: RoundReports, current_G: np.ndarray) -> None:
        launched, result, drafted, slots = step.batch, reports.result, reports.draft, self.slots
        groups = [step.groups[g] for g in current_G]
        batch, index_A = launched, np.arange(len(launched.slot_A))
        if len(current_G) < len(launched.groups):
            index_A = index_A[np.isin(launched.group_A, current_G)]
            batch = launched.take(current_G)
        source_A = launched.slot_A[result.selection.particles.ancestor_A[index_A]]
        pages = [each.pages for each in groups]
        again = None if drafted is None else drafted.redrafted
        redrafted_A = self._redraft(again, launched, batch, index_A, pages)
        self._count_work(batch, step.size, redrafted_A)
        confirmed_G = slots.block_S[batch.slot_A[batch.first_G]].copy()
        restarts_G = batch.largest(slots.unscored(batch.slot_A)) == 0
        self._remap_pages(reports, batch, source_A, index_A, pages)
        self._write_tokens(batch, result, source_A, index_A)
        commit_tokens(slots, batch)
        more_G = slots.block_S[batch.slot_A[batch.first_G]] - confirmed_G
        failures = step.pending.failures()
        for each, launched_g in zip(groups, current_G.tolist()):
            if launched_g in failures:
                each.group.fail_constraint(failures[launched_g])
        again_G = redrafted_A[batch.first_G]
        depths = [step.size.redrafted + 1 if again else each.depth for each, again in zip(groups, again_G.tolist())]
        self._count(batch, depths, step.size.branches, result, current_G, more_G, restarts_G, again_G)
        if drafted is not None:
            observed = map_tensors(lambda values_A: values_A[index_A], drafted.observed)
            self._observe_draws(batch, observed, [each.exponent for each in groups])
        self._drop_slots(batch, [each.is_resized for each in groups], result, index_A)

    def _redraft(
        self,
        report: RedraftReport[np.ndarray] | None,
        launched: SlotBatch,
        batch: SlotBatch,
        index_A: np.ndarray,
        pages: list[RoundPages],
    ) -> np.ndarray:
        """Record what was drafted again before the round: rows that continue a group's only particle, whose block was
        its last token. Returns which particles have such a row [A]."""
        slots, slot_A, redrafted_A = self.slots, batch.slot_A, np.zeros(len(batch.slot_A), dtype=bool)
        if report is None:
            return redrafted_A
        given_B = np.concatenate([given.get(REDRAFTED, np.zeros(0, np.int32)) for given in pages])
        redrafted_A = report.count_A[index_A] > 0
        if not redrafted_A.any():
            self.memory.allocators[ModelRole.DRAFT].free(given_B)
            return redrafted_A
        source_A = np.where(redrafted_A, launched.slot_A[report.root_A[index_A]], slot_A)
        kept_A = np.where(redrafted_A, report.lineage.kept_A[index_A], 0)
        path_AB, none_A = report.lineage.path_AB[index_A], np.zeros_like(kept_A)
        own = {ModelRole.DRAFT: (path_AB, kept_A, given_B), ModelRole.TARGET: (path_AB[:, :0], none_A, given_B[:0])}
        for role, (own_AB, count_A, own_B) in own.items():
            lineage = Lineage(own_AB, count_A, none_A)
            slots.descend(role, self.memory.allocators[role], slot_A, source_A, lineage, own_B)
        moved_A = source_A != slot_A
        slots.copy(slot_A[moved_A], source_A[moved_A])
        at, index = slot_A[redrafted_A], index_A[redrafted_A]
        before = slots.length_S[at] - 1
        self._write(slots.tokens_SL, at, before, report.tokens_AK[index])
        slots.length_S[at] = before + report.count_A[index]
        slots.logw_S[at] = report.share_A[index]
        slots.ended_S[at] = report.ended_A[index] | (report.share_A[index] == -np.inf)
        return redrafted_A

    def _remap_pages(
        self,
        reports: RoundReports,
        batch: SlotBatch,
        source_A: np.ndarray,
        index_A: np.ndarray,
        pages: list[RoundPages],
    ) -> None:
        """Let particles and unconditional rows continue their ancestors' pages; free pages without descendants."""
        for role, report in reports.by_model.items():
            lineage = Lineage(*(values_A[index_A] for values_A in report.lineage))
            given_B = np.concatenate([given[Stream(role)] for given in pages])
            self.slots.descend(role, self.memory.allocators[role], batch.slot_A, source_A, lineage, given_B)
            self._remap_unconditional_rows(role, batch, source_A, lineage, pages)

    def _remap_unconditional_rows(
        self,
        role: ModelRole,
        batch: SlotBatch,
        source_A: np.ndarray,
        lineage: Lineage[np.ndarray],
        pages: list[RoundPages],
    ) -> None:
        """At one model, let unconditional rows of a batch's particles continue those of the particles in slots
        `source_A`: by the pages that were allocated beside those of the particles' own `lineage`."""
        stream = Stream(role, unconditional=True)
        is_guided_A = np.array([stream in given for given in pages])[batch.group_A]
        if not is_guided_A.any():
            return
        guided = [given for given in pages if stream in given]
        own_B, theirs_B = (np.concatenate([given[name] for given in guided]) for name in (Stream(role), stream))
        path_AB, kept_A, dropped_A = (values_A[is_guided_A] for values_A in lineage)
        order_B = np.argsort(own_B)
        # Entries of the path that are not kept may be any page.
        at_AB = np.searchsorted(own_B, path_AB, sorter=order_B).clip(max=len(own_B) - 1)
        to_A, of_A = (self.slots.unconditional_S[slot_A[is_guided_A]] for slot_A in (batch.slot_A, source_A))
        own = Lineage(theirs_B[order_B[at_AB]], kept_A, dropped_A)
        self.slots.descend(role, self.memory.allocators[role], to_A, of_A, own, theirs_B)

    def _write_tokens(
        self, batch: SlotBatch, result: RoundResult[np.ndarray], source_A: np.ndarray, index_A: np.ndarray
    ) -> None:
        """Let particles continue the tokens of their ancestors, which are in slots `source_A`, by those of the
        round."""
        slots, slot_A, ahead = self.slots, batch.slot_A, self.rules.ahead(self.config)
        moved_A = source_A != slot_A
        slots.copy(slot_A[moved_A], source_A[moved_A])
        before_A, count_A = slots.length_S[slot_A] - result.selection.cut_A[index_A], result.selection.count_A[index_A]
        self._write(slots.tokens_SL, slot_A, before_A, result.grown_AQ[index_A])
        wants_logp = any(p.keeps_logprobs for p in batch.params)
        if wants_logp:
            self._write(slots.logp_SL, slot_A, slots.block_S[slot_A] + 1, result.logp_AQ[index_A, :-1])
            self._write(slots.raw_logp_SL, slot_A, slots.block_S[slot_A] + 1, result.raw_logp_AQ[index_A])
        slots.length_S[slot_A] = before_A + count_A
        slots.weighed_S[slot_A] = np.minimum(slots.weighed_S[slot_A], before_A)
        last_A = slots.length_S[slot_A] - 1
        if ahead:
            self._write(slots.logq_SL, slot_A, before_A, result.logq_AQ[index_A])
            slots.block_S[slot_A] = np.minimum(before_A, last_A)
        else:
            slots.block_S[slot_A] = last_A
        if wants_logp:
            known_A = ~np.isnan(result.first_logp_A[index_A])
            known = slot_A[known_A]
            slots.logp_SL[known, slots.block_S[known]] = result.first_logp_A[index_A][known_A]
        slots.ended_S[slot_A] = result.selection.ended_A[index_A]
        slots.logw_S[slot_A] = result.selection.particles.logw_A[index_A]

    def _write(self, array_SL: np.ndarray, slot_A: np.ndarray, first_A: np.ndarray, values_AQ: np.ndarray) -> None:
        """Write values from column `first_A` of each slot on. Columns past the valid values are written, too; valid
        values overwrite them later."""
        column_AQ = np.minimum(first_A[:, None] + np.arange(values_AQ.shape[1]), array_SL.shape[1] - 1)
        array_SL[slot_A[:, None], column_AQ] = values_AQ

    def _observe_draws(self, batch: SlotBatch, observed: ObservedDraws[np.ndarray], exponents: list[float]) -> None:
        """Learn from the target's draws: fit the exponents of coupled drafting, and count how the draft ranks the
        draws. All rows of a request have seen the same draw."""
        seen = np.flatnonzero(np.isfinite(observed).any(0))
        drawn = dict(zip(batch.group_A[seen].tolist(), zip(*(values_A[seen].tolist() for values_A in observed))))
        for g, (score, information, rank) in drawn.items():
            group = batch.groups[g]
            if group.exponent is not None:
                draw = DrawObservation(score, information, exponents[g])
                self.exponents.observe(group.params.temperature, group.exponent, draw)
            if math.isfinite(rank) and group.adaptive:
                self.acceptance.count_rank(rank)

    def _drop_slots(
        self, batch: SlotBatch, resized: list[bool], result: RoundResult[np.ndarray], index_A: np.ndarray
    ) -> None:
        """Release the slots that hold no particle after a round that changed the number of a request's particles."""
        for g, group in enumerate(batch.groups):
            if not resized[g]:
                continue
            assert group.next_rows is not None, "the round changes the number of its particles"
            alive_N = result.selection.particles.alive_A[index_A[batch.group_A == g]]
            dropped = group.end_resize(group.rules.kept_rows(alive_N, group.next_rows))
            self.slots.release_pages(dropped, self.memory.allocators)
            self.slots.release(dropped)

    def _count_work(self, batch: SlotBatch, size: DraftSize, redrafted_A: np.ndarray) -> None:
        """Count the tokens that the models run in this round, for the particles that were open when it began.
        `redrafted`: those that continue what was drafted again at first."""
        slot_A, config, roles = batch.slot_A, self.config, self.rules.roles
        open_A, steps = ~self.slots.ended_S[slot_A], size.steps or config.block
        if roles == BOTH_MODELS:
            target_A = self.slots.unscored(slot_A) + open_A if config.lookahead else open_A * (steps + 1)
            any_A = np.logical_or.reduceat(open_A, batch.first_G)[batch.group_A]
            drafting_A = np.zeros(len(slot_A), dtype=bool)
            for rules, at in batch.by_rules():
                drafting_A[at] = rules.drafting(open_A[at], any_A[at])
            drafted_A = drafting_A * size.branches * steps + redrafted_A * size.redrafted
            work = {ModelRole.DRAFT: drafted_A, ModelRole.TARGET: target_A}
        else:
            work = {roles[0]: open_A * config.block}
        for role, tokens_A in work.items():
            for group, tokens in zip(batch.groups, batch.sums(tokens_A).tolist()):
                group.counters.count_tokens(role, tokens * (1 + (role in group.params.guided_roles)))

    def _count(
        self,
        batch: SlotBatch,
        depths: list[int],
        branches: int,
        result: RoundResult[np.ndarray],
        current_G: np.ndarray,
        confirmed_G: np.ndarray,
        restarts_G: np.ndarray,
        again_G: np.ndarray,
    ) -> None:
        """Fail requests for which a model returned NaN, and count what the round did to each request. `depths`: of the
        blocks that were verified; `confirmed`, `restarts`, `again`: see `TreeFacts`."""
        for role, nan_G in ((ModelRole.DRAFT, result.draft_nan_G), (ModelRole.TARGET, result.target_nan_G)):
            for g in np.flatnonzero(nan_G[current_G]):
                batch.groups[g].fail(role)
        ahead = self.rules.ahead(self.config)
        open_G = np.logical_or.reduceat(~self.slots.ended_S[batch.slot_A], batch.first_G)
        hit_G = result.hit_G[current_G].astype(bool) & ahead
        # Converting whole arrays is cheaper than converting each element.
        of_trees = (each.tolist() for each in (confirmed_G, batch.size_G, hit_G, restarts_G, again_G))
        trees = map(TreeFacts, *of_trees, depths, repeat(branches), repeat(ahead))
        of_groups = map_tensors(lambda values_G: values_G[current_G].tolist(), result.statistics)
        facts = map(
            RoundFacts,
            of_groups.ess_G,
            of_groups.log_z_G,
            map(bool, of_groups.resampled_G),
            map(bool, of_groups.collapsed_G),
            open_G.tolist(),
            trees,
        )
        counted = Counter[TreeFacts]()
        for group, of_group in zip(batch.groups, facts, strict=True):
            group.end_round()
            self._stats.exact_alone_rounds += group.alone
            group.rules.count_round(group, of_group, self._stats, counted)
        for tree, times in counted.items():
            tree.add_to(self.acceptance, times)


def commit_tokens(slots: Slots, batch: SlotBatch) -> None:
    """Advance each request's committed prefix: the answer tokens on which all its particles agree and which its
    decoding cannot take back. They are final, because every later particle is a copy of one of these."""
    groups, slot_A = batch.groups, batch.slot_A
    length_A = slots.length_S[slot_A]
    for rules, at in batch.by_rules():
        length_A[at] = rules.settled(length_A[at], slots.block_S[slot_A[at]])
    committed_G = np.array([g.committed for g in groups])
    common_G = batch.least(length_A) - committed_G
    width = min(int(common_G.max()), WINDOW)
    while width > 0:
        # Where a window extends past the end of a row, it is also past the common tokens of the request.
        index_AL = np.minimum(committed_G[batch.group_A, None] + np.arange(width), slots.tokens_SL.shape[1] - 1)
        tokens_AL = slots.tokens_SL[slot_A[:, None], index_AL]
        agree_AL = tokens_AL == tokens_AL[batch.first_G[batch.group_A]]
        agree_GL = np.logical_and.reduceat(agree_AL, batch.first_G, axis=0) & (np.arange(width) < common_G[:, None])
        more_G = np.logical_and.accumulate(agree_GL, axis=1).sum(1)
        committed_G += more_G
        # Requests that agree on the whole window may agree on the following tokens; the others are done.
        common_G = np.where(more_G == width, common_G - width, 0)
        width = min(int(common_G.max()), WINDOW)
    lag_G = batch.largest(slots.length_S[slot_A]) - committed_G
    for group, committed, lag in zip(groups, committed_G.tolist(), lag_G.tolist()):
        group.committed, group.lag = committed, lag
        group.counters.lag_sum += lag
