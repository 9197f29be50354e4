"""How a request of exact decoding changes over: to the target alone, and back to rounds of the pair. When it shall is
said by others.

When the policy of trees is asked, and about what: which requests of exact decoding shall have how many rows, or be
decoded by the target alone. How a request changes over: `smc.scheduler.tree_controller`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from smc.executor.plan import Program
from smc.scheduler.acceptance import Acceptance
from smc.scheduler.latency_model import LatencyModel
from smc.scheduler.methods import TARGET_ALONE, Decoding, decoding_of
from smc.scheduler.prefill import PrefillManager
from smc.scheduler.queue import RequestRegistry
from smc.scheduler.sequence_group import Phase, SequenceGroup
from smc.scheduler.tree_policy import OtherLoad, TreePolicy, TreeRequest


class DraftFallback:
    """Of the requests that a registry knows."""

    def __init__(self, registry: RequestRegistry, starts: PrefillManager) -> None:
        self._registry, self._starts = registry, starts
        self.has_draft = True
        """There is one to come back to."""

    def go_alone(self, group: SequenceGroup) -> None:
        """From now on the target decodes it by itself, whatever phase it is in. Nothing more is asked of the draft for
        it; rounds of both models that are under way are not waited for, and count for nothing."""
        group.turn = None
        if group.alone or group.error:
            return
        if group.phase is Phase.RUNNING:
            self._change(group, TARGET_ALONE, 1)
        elif group.phase is Phase.PREFILL:
            self._starts.go_alone(group, TARGET_ALONE)
        else:
            group.decode_by(TARGET_ALONE)
            group.needs = None

    def rejoin(self, group: SequenceGroup, rows: int | None = None) -> None:
        """The opposite: as soon as no round of it is under way, the draft runs what it lacks, and the request takes
        part in rounds of the pair again, with so many rows or all it may have. Where there are not enough slots or
        pages for that, or no draft, it stays as it is."""
        if not self.has_draft or group.answer is not None or not self._fits_pair(group):
            return
        rows = rows or group.most_rows
        if group.alone and group.phase is not Phase.QUEUED:
            group.turn = rows
        elif group.alone:
            group.decode_by(decoding_of(group.params), rows)
            group.needs = None

    def take_turns(self) -> None:
        """Those that shall change, and of which no round is under way, do."""
        for group in [group for group in self._registry.admitted if group.turn is not None]:
            if group.phase is Phase.RUNNING and not group.in_flight:
                self._change(group, *group.turned)
                group.turn = None

    def _fits_pair(self, group: SequenceGroup) -> bool:
        """Another draft may have fewer pages than the one that a request was let in with."""
        config, capacity = self._starts.config, self._starts.memory.capacity
        needs = decoding_of(group.params).most_pages(
            config, group.params, group.prompt_size, negative=group.negative_size
        )
        return all(pages <= capacity[role] for role, pages in needs.items())

    def _change(self, group: SequenceGroup, decoding: Decoding, rows: int) -> None:
        rounds = self._registry.cohorts[group.decoding.program]
        if not group.error and not self._registry.complete(group) and self._starts.change(group, decoding, rows):
            rounds.leave(group)


EVERY = 8
"""Steps between two questions about the same requests."""
REST = 16
"""Steps after a change, in which it shows, as long as half of the requests are still the same."""
FADE = 0.999
"""Of what is known of acceptance, left after each step in which nothing is drafted, and so nothing learnt: a draft that
was hopeless for others is tried again after thousands of steps."""


class TreeController:
    """Asks a policy, and lets requests go alone or come back."""

    def __init__(
        self,
        policy: TreePolicy,
        acceptance: Acceptance,
        go_alone: Callable[[SequenceGroup], None],
        rejoin: Callable[[SequenceGroup, int], None],
    ) -> None:
        """`acceptance`: of all requests together."""
        self._policy, self._acceptance = policy, acceptance
        self._go_alone, self._rejoin = go_alone, rejoin
        self._asked_about: list[SequenceGroup] = []
        self._left = 0
        """Steps until the next question about these."""
        self._since = 0
        """Steps since the last one."""

    def begin(
        self, group: SequenceGroup, running: Sequence[SequenceGroup], share: int, costs: LatencyModel | None
    ) -> None:
        """For one that waits, if its rows are a matter of speed and it has not begun: what it shall start with.
        `share`: of the free slots, if all that wait get as many."""
        if not group.elastic or group.has_begun:
            return
        tree, *others = self._trees([group, *_elastic(running)])
        rows = self._policy.begin(replace(tree, most=min(tree.most, max(1, share))), others, _beside(running), costs)
        if rows == 0:
            self._go_alone(group)
        elif rows and group.alone:
            self._rejoin(group, rows)
        elif rows:
            group.decode_by(group.decoding, rows)

    def follow(
        self, running: Sequence[SequenceGroup], waiting: Sequence[SequenceGroup], costs: LatencyModel | None
    ) -> None:
        """Once a step: ask about running requests, where it is time to, and let those change that shall. `waiting`: for
        slots alone."""
        groups, self._left, self._since = _elastic(running), self._left - 1, self._since + 1
        if not groups or self._left > self._patience(groups):
            return
        self._asked_about, self._left, since, self._since = groups, EVERY, self._since, 0
        trees = self._trees(groups)
        if not any(tree.rows for tree in trees):
            self._acceptance.fade(FADE**since)
        rows = self._policy.change(trees, self._trees(_elastic(waiting)), _beside(running), costs)
        for group, tree, wanted in zip(groups, trees, rows or ()):
            if wanted != tree.rows:
                self._left = EVERY + REST
                self._change(group, wanted)

    def _patience(self, groups: Sequence[SequenceGroup]) -> float:
        """Steps that may be left when it is asked about these."""
        if groups == self._asked_about:
            return 0
        still = len(set(groups) & set(self._asked_about))
        return EVERY if 2 * still >= max(len(groups), len(self._asked_about)) else math.inf

    def _change(self, group: SequenceGroup, rows: int) -> None:
        """As soon as no round of it is under way."""
        if group.alone and rows:
            self._rejoin(group, rows)
        elif rows:
            group.turn, group.wish = None, rows
        elif group.alone:
            group.turn = None
        elif group.phase is Phase.RUNNING:
            group.turn = 0
        else:
            self._go_alone(group)

    def _trees(self, groups: Sequence[SequenceGroup]) -> list[TreeRequest]:
        prior = self._acceptance.hazard()
        return [
            TreeRequest(group.most_rows, group.acceptance.hazard(prior), group.context, rows_of(group))
            for group in groups
        ]


def rows_of(group: SequenceGroup) -> int:
    """Rows of a request of exact decoding, after changes that are under way; 0: the target decodes it alone."""
    if group.turn is not None:
        return group.turn
    return 0 if group.decoding is TARGET_ALONE else group.wish or group.wanted or group.count


def _elastic(groups: Sequence[SequenceGroup]) -> list[SequenceGroup]:
    return [group for group in groups if group.elastic]


def _beside(groups: Sequence[SequenceGroup]) -> OtherLoad:
    others = [group for group in groups if not group.elastic]
    of_pair = [group for group in others if group.decoding.program is Program.PAIR]
    of_target = [group for group in others if group.decoding is TARGET_ALONE]
    return OtherLoad(
        pair=len(of_pair),
        pair_rows=sum(group.slots_needed for group in of_pair),
        pair_context=sum(group.context for group in of_pair),
        target=sum(group.slots_needed for group in of_target),
        target_context=sum(group.slots_needed * group.context for group in of_target),
        slots=sum(group.slots_needed for group in others),
    )
