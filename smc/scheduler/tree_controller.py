"""Requests of exact decoding between the draft-target pair and the target alone: `DraftFallback` carries out the
switches, `TreeController` asks the tree policy how many rows each request should have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from smc.executor.plan import Program
from smc.scheduler.acceptance import Acceptance
from smc.scheduler.latency_model import LatencyModel
from smc.scheduler.methods import TARGET_ALONE, Decoding
from smc.scheduler.prefill import PrefillManager
from smc.scheduler.queue import RequestRegistry
from smc.scheduler.round_plan import DraftSize
from smc.scheduler.sequence_group import SequenceGroup
from smc.scheduler.tree_policy import OtherLoad, TreePolicy, TreeRequest


class DraftFallback:
    """Switches requests of a registry to the target alone, and back to the draft-target pair."""

    def __init__(self, registry: RequestRegistry, prefill: PrefillManager) -> None:
        self._registry, self._prefill = registry, prefill
        self.has_draft = True

    def fall_back(self, group: SequenceGroup) -> None:
        """From now on the target decodes it by itself, whatever state it is in. The draft runs nothing more for it;
        rounds of both models that are in flight are not waited for, and their results are discarded."""
        group.cancel_switch()
        if group.alone or group.error:
            return
        if group.is_running:
            self._switch(group, TARGET_ALONE, 1)
        elif group.is_queued:
            group.choose(TARGET_ALONE)
        else:
            self._prefill.fall_back(group, TARGET_ALONE)

    def reenable_draft(self, group: SequenceGroup, rows: int | None = None) -> None:
        """As soon as no round of it is in flight, the draft runs what it lacks, and the request takes part in rounds of
        the pair again, with so many rows or all it may have. Without enough slots or pages, or without a draft, it
        stays as it is."""
        if not self.has_draft or not group.alone or not self._fits_pair(group):
            return
        rows = rows or group.most_rows
        if group.is_queued:
            group.choose(group.method, rows)
        else:
            group.request_switch(rows)

    def apply_switches(self) -> None:
        """Switch the requests that are to, and of which no round is in flight."""
        for group in [group for group in self._registry.admitted if group.switches]:
            if group.is_running and not group.in_flight:
                self._switch(group, *group.after_switch)
                group.cancel_switch()

    def _fits_pair(self, group: SequenceGroup) -> bool:
        """Another draft may have fewer pages than the one that a request was admitted with."""
        config, capacity = self._prefill.config, self._prefill.memory.capacity
        needs = group.method.most_pages(config, group.params, group.prompt_size, negative=group.negative_size)
        return all(pages <= capacity[role] for role, pages in needs.items())

    def _switch(self, group: SequenceGroup, decoding: Decoding, rows: int) -> None:
        batches = self._registry.batches[group.decoding.program]
        if not group.error and not self._registry.complete(group) and self._prefill.switch(group, decoding, rows):
            batches.remove(group)


EVERY = 8
"""Steps between two questions about the same requests."""
FIRST = 3
"""Steps between the first and the second: a draft that is of no use shows it in its first rounds."""
REST = 16
"""Steps after a change, in which its effect shows, as long as half of the requests are still the same."""
FADE = 0.999
"""Share of what is known of acceptance that is left after each step in which nothing is drafted, and so nothing learnt:
a draft that was bad for other requests is tried again after thousands of steps."""


class TreeController:
    """Asks a policy, and switches requests to the target alone or back to the pair."""

    def __init__(self, policy: TreePolicy, acceptance: Acceptance, fallback: DraftFallback) -> None:
        """`acceptance`: of all requests together."""
        self._policy, self._acceptance, self._fallback = policy, acceptance, fallback
        self._known: list[SequenceGroup] = []
        """Requests of the last question."""
        self._left = 0
        """Steps until the next question about these."""
        self._since = 0
        """Steps since the last question."""

    def begin(
        self, group: SequenceGroup, running: Sequence[SequenceGroup], share: int, costs: LatencyModel | None
    ) -> None:
        """Decide what an adaptive request begins with that waits and has not begun. `share`: of the free slots, if all
        waiting requests get as many."""
        if not group.adaptive or group.has_begun:
            return
        tree, *others = self._trees([group, *_adaptive(running)])
        rows = self._policy.begin(replace(tree, most=min(tree.most, max(1, share))), others, _load(running), costs)
        if rows == 0:
            self._fallback.fall_back(group)
        elif rows and group.alone:
            self._fallback.reenable_draft(group, rows)
        elif rows:
            group.choose(group.decoding, rows)

    def follow(
        self, running: Sequence[SequenceGroup], waiting: Sequence[SequenceGroup], costs: LatencyModel | None
    ) -> None:
        """Once a step: ask about running requests, where it is time to, and change those that should change. `waiting`:
        requests that lack slots only."""
        groups, self._left, self._since = _adaptive(running), self._left - 1, self._since + 1
        if not groups or self._left > self._patience(groups):
            return
        self._left = min(FIRST, EVERY) if groups != self._known else EVERY
        self._known, since, self._since = groups, self._since, 0
        trees = list(self._trees(groups))
        if not any(tree.rows for tree in trees):
            self._acceptance.fade(FADE**since)
        rows = self._policy.change(trees, list(self._trees(_adaptive(waiting))), _load(running), costs)
        for group, tree, wanted in zip(groups, trees, rows or ()):
            if wanted != tree.rows:
                self._left = EVERY + REST
                self._change(group, wanted)

    def draft_size(
        self, groups: Sequence[SequenceGroup], batch_size: int, context: int, costs: LatencyModel | None
    ) -> DraftSize:
        """What is drafted in a round of these requests, of so many rows and tokens of context."""
        return self._policy.draft_size(self._trees(groups), batch_size, context, costs)

    def forget(self) -> None:
        """Forget what requests so far have shown of acceptance."""
        self._acceptance.fade(0.0)

    def _patience(self, groups: Sequence[SequenceGroup]) -> float:
        """Steps that may be left when the policy is asked about these."""
        if groups == self._known:
            return 0
        still = len(set(groups) & set(self._known))
        return EVERY if 2 * still >= max(len(groups), len(self._known)) else math.inf

    def _change(self, group: SequenceGroup, rows: int) -> None:
        """As soon as no round of it is in flight."""
        if group.alone and rows:
            self._fallback.reenable_draft(group, rows)
        elif rows:
            group.request_rows(rows)
        elif group.alone:
            group.cancel_switch()
        elif group.is_running:
            group.request_switch(0)
        else:
            self._fallback.fall_back(group)

    def _trees(self, groups: Sequence[SequenceGroup]) -> Iterator[TreeRequest]:
        gain, recovery = self._acceptance.gain(), self._acceptance.recovery()
        miss_rates = self._acceptance.miss_rates(gain=gain)
        for group in groups:
            yield TreeRequest(
                most=group.most_rows,
                miss_rates=group.acceptance.miss_rates(miss_rates, gain),
                context=group.context,
                rows=group.tree_rows,
                recovery=group.acceptance.recovery(recovery),
                gain=gain,
            )


def _adaptive(groups: Sequence[SequenceGroup]) -> list[SequenceGroup]:
    return [group for group in groups if group.adaptive]


def _load(groups: Sequence[SequenceGroup]) -> OtherLoad:
    """What the models run besides adaptive requests."""
    others = [group for group in groups if not group.adaptive]
    of_pair = [group for group in others if group.decoding.program is Program.PAIR]
    of_target = [group for group in others if group.decoding.program is Program.TARGET]
    return OtherLoad(
        pair=len(of_pair),
        pair_rows=sum(group.slots_needed for group in of_pair),
        pair_context=sum(group.context for group in of_pair),
        target=sum(group.slots_needed for group in of_target),
        target_context=sum(group.slots_needed * group.context for group in of_target),
        slots=sum(group.slots_needed for group in others),
    )
