"""Pages for rounds, and who gives way where there are too few: first particles that may go, then the youngest
request."""

from __future__ import annotations

from operator import attrgetter

import numpy as np

from smc.executor.messages import Stream
from smc.memory.pages import OutOfPages
from smc.scheduler.checkpoint import shrink_saved
from smc.scheduler.prefill import PrefillManager
from smc.scheduler.queue import RequestRegistry
from smc.scheduler.results import ResultReporter
from smc.scheduler.round_plan import RoundPages
from smc.scheduler.sequence_group import SequenceGroup
from smc.scheduler.tree_policy import ParticlePolicy
from smc.types import ModelRole


class Preemption:
    """`policy` decides how many particles requests of SMC are left where memory is short."""

    def __init__(
        self, registry: RequestRegistry, starts: PrefillManager, reports: ResultReporter, policy: ParticlePolicy
    ) -> None:
        self._registry, self._starts, self._reports, self._policy = registry, starts, reports, policy
        self._config, self._memory = starts.config, starts.memory
        self._shrinks = 0

    def take_shrinks(self) -> int:
        """Populations that became smaller since the last call."""
        count, self._shrinks = self._shrinks, 0
        return count

    def provide(self, wanting: list[SequenceGroup]) -> list[tuple[SequenceGroup, RoundPages]]:
        """Pages for a round of each group, oldest first. Who gets none is left out; if nobody could go on then,
        somebody gives way."""
        wanting = sorted(wanting, key=attrgetter("number"))
        given = self._give(wanting)
        while len(given) < len(wanting) and (
            self._reports.report_ended() or (not given and self._make_room(wanting[0]))
        ):
            wanting = [group for group in wanting if group in self._registry.admitted]
            left_out = [group for group in wanting if group not in [g for g, _ in given]]
            given += self._give(left_out)
        if len(given) < len(wanting):
            for group, _ in given:
                self._shrink(group)
        return given

    def _give(self, wanting: list[SequenceGroup]) -> list[tuple[SequenceGroup, RoundPages]]:
        given = [(group, self._pages_of_round(group)) for group in wanting]
        return [(group, pages) for group, pages in given if pages is not None]

    def _pages_of_round(self, group: SequenceGroup) -> RoundPages | None:
        try:
            pages = self._memory.allocate(self._round_pages(group))
        except OutOfPages:
            return None
        given = {Stream(role): pages_T for role, pages_T in pages.items()}
        for role in set(pages) & set(group.params.guided_roles):
            given[Stream(role)], given[Stream(role, unconditional=True)] = np.split(pages[role], 2)
        return given

    def _round_pages(self, group: SequenceGroup) -> dict[ModelRole, int]:
        return group.decoding.round_pages(self._config, len(group.slots), group.params.guided_roles)

    def _shrink(self, group: SequenceGroup) -> None:
        """In the round that is about to be asked for, as far as the policy wants it."""
        if group.decoding.records_population and group.wanted is None:
            wanted = self._policy.wanted(group, short=True)
            if wanted < group.count:
                self._starts.resize(group, wanted)
                self._shrinks += 1

    def _make_room(self, first: SequenceGroup) -> bool:
        """Nothing is on its way that would free pages, and not even the first group has enough: the youngest of those
        that hold pages where they are short gives up its own. False: something is, or there are older ones, which are
        not ready for a round yet."""
        admitted = self._registry.admitted
        if any(group.in_flight for group in admitted):
            return False
        short = self._memory.short(self._round_pages(first))
        *older, youngest = (group for group in admitted if set(short) & set(group.decoding.roles))
        if youngest is first and older:
            return False
        # One that was about to have more particles gives that up with its slots.
        grows = len(youngest.slots) > youngest.count
        self._registry.preempt(youngest)
        if youngest is first:
            # Nobody is left who could give way, so it may not try again.
            first.wish = None
        if youngest is first and not grows:
            wanted = max(first.params.least_rows, first.count // 2)
            assert wanted < first.count, "a request alone has too few pages"
            shrink_saved(first, wanted)
            first.most_rows = wanted
            self._shrinks += 1
        return True
