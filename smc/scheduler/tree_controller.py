"""When the policy of trees is asked, and about what: which requests of exact decoding shall have how many rows, or be decoded by the target
alone. How a request changes over: `smc.scheduler.changes`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from smc.executor.plan import Program
from smc.scheduler.acceptance import Acceptance
from smc.scheduler.latency_model import Costs
from smc.scheduler.methods import TARGET_ALONE
from smc.scheduler.policy import Beside, Tree, TreePolicy
from smc.scheduler.sequence_group import Group, Phase

EVERY = 8
"""Steps between two questions about the same requests."""
REST = 16
"""Steps after a change, in which it shows, as long as half of the requests are still the same."""
FADE = 0.999
"""Of what is known of acceptance, left after each step in which nothing is drafted, and so nothing learnt: a draft that was hopeless for
others is tried again after thousands of steps."""


class Turns:
    """Asks a policy, and lets requests go alone or come back."""

    def __init__(
        self,
        policy: TreePolicy,
        acceptance: Acceptance,
        go_alone: Callable[[Group], None],
        rejoin: Callable[[Group, int], None],
    ) -> None:
        """`acceptance`: of all requests together."""
        self._policy, self._acceptance = policy, acceptance
        self._go_alone, self._rejoin = go_alone, rejoin
        self._asked_about: list[Group] = []
        self._left = 0
        """Steps until the next question about these."""
        self._since = 0
        """Steps since the last one."""

    def begin(self, group: Group, running: Sequence[Group], share: int, costs: Costs | None) -> None:
        """For one that waits, if its rows are a matter of speed and it has not begun: what it shall start with. `share`: of the free slots,
        if all that wait get as many."""
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

    def follow(self, running: Sequence[Group], waiting: Sequence[Group], costs: Costs | None) -> None:
        """Once a step: ask about running requests, where it is time to, and let those change that shall. `waiting`: for slots alone."""
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

    def _patience(self, groups: Sequence[Group]) -> float:
        """Steps that may be left when it is asked about these."""
        if groups == self._asked_about:
            return 0
        still = len(set(groups) & set(self._asked_about))
        return EVERY if 2 * still >= max(len(groups), len(self._asked_about)) else math.inf

    def _change(self, group: Group, rows: int) -> None:
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

    def _trees(self, groups: Sequence[Group]) -> list[Tree]:
        prior = self._acceptance.hazard()
        return [Tree(group.most_rows, group.acceptance.hazard(prior), group.context, rows_of(group)) for group in groups]


def rows_of(group: Group) -> int:
    """Rows of a request of exact decoding, after changes that are under way; 0: the target decodes it alone."""
    if group.turn is not None:
        return group.turn
    return 0 if group.decoding is TARGET_ALONE else group.wish or group.wanted or group.count


def _elastic(groups: Sequence[Group]) -> list[Group]:
    return [group for group in groups if group.elastic]


def _beside(groups: Sequence[Group]) -> Beside:
    others = [group for group in groups if not group.elastic]
    of_pair = [group for group in others if group.decoding.program is Program.PAIR]
    of_target = [group for group in others if group.decoding is TARGET_ALONE]
    return Beside(
        pair=len(of_pair),
        pair_rows=sum(group.slots_needed for group in of_pair),
        pair_context=sum(group.context for group in of_pair),
        target=sum(group.slots_needed for group in of_target),
        target_context=sum(group.slots_needed * group.context for group in of_target),
        slots=sum(group.slots_needed for group in others),
    )
