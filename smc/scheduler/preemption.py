"""Allocation of pages for rounds. If there are too few, populations are halved, or the youngest request is
preempted."""

from __future__ import annotations

from collections import defaultdict
from operator import attrgetter

import numpy as np

from smc.memory.pages import OutOfPages
from smc.scheduler.prefill import PrefillManager
from smc.scheduler.queue import RequestRegistry
from smc.scheduler.results import ResultReporter
from smc.scheduler.sequence_group import SequenceGroup
from smc.scheduler.slots import RoundPages, Stream
from smc.types import ModelRole


class Preemption:
    """Allocates pages for rounds and preempts requests."""

    def __init__(self, registry: RequestRegistry, prefill: PrefillManager, reports: ResultReporter) -> None:
        self._registry, self._prefill, self._reports = registry, prefill, reports
        self._config, self._memory = prefill.config, prefill.memory
        self._shrinks = 0

    def take_shrinks(self) -> int:
        """Return the number of populations that became smaller since the last call."""
        count, self._shrinks = self._shrinks, 0
        return count

    def allocate(self, wanting: list[SequenceGroup]) -> list[tuple[SequenceGroup, RoundPages]]:
        """Allocate pages for a round of each request, oldest first. Requests for which there are too few pages are left
        out; if no request could run then, the youngest is preempted."""
        wanting = sorted(wanting, key=attrgetter("number"))
        given = self._give(wanting)
        while len(given) < len(wanting) and (
            self._reports.report_ended() or (not given and self._make_room(wanting[0]))
        ):
            wanting = [group for group in wanting if group in self._registry.admitted]
            served = {group.id for group, _ in given}
            given += self._give([group for group in wanting if group.id not in served])
        if len(given) < len(wanting):
            for group, _ in given:
                self._shrink(group)
        return given

    def _give(self, wanting: list[SequenceGroup]) -> list[tuple[SequenceGroup, RoundPages]]:
        """Allocate pages for as many rounds as possible, oldest request first."""
        each = [group.round_pages(self._config) for group in wanting]
        together: defaultdict[ModelRole, int] = defaultdict(int)
        for pages in each:
            for role, count in pages.items():
                together[role] += count
        try:
            # One allocation for all takes less time. Nothing is evicted from the cache if it would not suffice.
            of_all = self._memory.allocate(together, dict.fromkeys(together, 0))
        except OutOfPages:
            given = [(group, self._pages_of_round(group, pages)) for group, pages in zip(wanting, each)]
            return [(group, pages) for group, pages in given if pages is not None]
        parted = []
        for group, pages in zip(wanting, each):
            own = {}
            for role, count in pages.items():
                end = together[role]
                together[role] = end - count
                own[role] = of_all[role][end - count : end]
            parted.append((group, _by_stream(group, own)))
        return parted

    def _pages_of_round(self, group: SequenceGroup, pages: dict[ModelRole, int]) -> RoundPages | None:
        try:
            return _by_stream(group, self._memory.allocate(pages))
        except OutOfPages:
            return None

    def _shrink(self, group: SequenceGroup) -> None:
        """Halve the particles in the round that is about to be launched, as far as the request allows."""
        rows = _half(group)
        if group.rules.resizable and group.next_rows is None and rows < group.count:
            self._prefill.resize(group, rows)
            self._shrinks += 1

    def _make_room(self, first: SequenceGroup) -> bool:
        """Preempt the youngest request that holds pages in a pool that is short. Called if not even `first`, the oldest
        request that wants a round, got pages. Preempt nobody if there are enough pages by now. Return False if pages
        may become free without it: something is in flight, an answer is rescored, or older requests are not ready for a
        round yet."""
        admitted = self._registry.admitted
        if self._prefill.num_rescoring or any(group.in_flight for group in admitted):
            return False
        short = self._memory.short(first.round_pages(self._config))
        if not short:
            return True
        *older, youngest = (group for group in admitted if set(short) & set(group.rules.roles))
        if youngest is first and older:
            return False
        # A request that was about to get more particles loses the slots for them.
        grows = len(youngest.slots) > youngest.count
        self._registry.preempt(youngest)
        if youngest is first:
            # No other request is left to preempt, so this one may not try to grow again.
            first.cancel_change()
        if youngest is first and not grows:
            rows = _half(first)
            assert rows < first.count, "a request alone has too few pages"
            first.shrink_checkpoint(rows)
            self._shrinks += 1
        return True


def _by_stream(group: SequenceGroup, pages: dict[ModelRole, np.ndarray]) -> RoundPages:
    """Return pages of one round by stream; those of a guided model are halved."""
    given = {Stream(role): pages_B for role, pages_B in pages.items()}
    for role in set(pages).intersection(group.params.guided_roles):
        given[Stream(role)], given[Stream(role, unconditional=True)] = np.split(pages[role], 2)
    return given


def _half(group: SequenceGroup) -> int:
    """Half of a request's rows, or the minimum that it allows."""
    return max(group.params.least_rows, group.count // 2)
