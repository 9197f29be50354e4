"""Who waits, and who runs out of time: requests in the orders that a step needs, kept up as they come and go, so that
none is searched.

Which requests there are, and where each of them stands: it waits, or holds slots and pages, or takes part in rounds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from operator import attrgetter

from smc.executor.plan import Program
from smc.scheduler.decode import MicroBatches
from smc.scheduler.prefill import PrefillManager
from smc.scheduler.sequence_group import Phase, SequenceGroup
from smc.scheduler.slots import Slots


class RequestQueue:
    """Groups that wait, the next one first: those that have been preempted, then the others, each in order of
    submission."""

    def __init__(self) -> None:
        self._groups: list[SequenceGroup] = []
        self.waiting = 0
        """Those whose answers have not been drawn yet."""
        self.pages = 0
        """That these were likely to need when they were submitted, in all pools together."""

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def groups(self) -> Sequence[SequenceGroup]:
        """The next one first."""
        return self._groups

    @property
    def first(self) -> SequenceGroup | None:
        return self._groups[0] if self._groups else None

    def push(self, group: SequenceGroup) -> None:
        insort(self._groups, group, key=_turn)
        self._count(group, 1)

    def remove(self, group: SequenceGroup) -> None:
        place = bisect_left(self._groups, _turn(group), key=_turn)
        assert self._groups[place] is group, "a request is not where it should wait"
        del self._groups[place]
        self._count(group, -1)

    def _count(self, group: SequenceGroup, sign: int) -> None:
        if group.answer is None:
            self.waiting += sign
            self.pages += sign * sum(group.expected.values())


class Deadlines:
    """When the time of requests is up: of those that have a budget."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, SequenceGroup]] = []

    def add(self, group: SequenceGroup) -> None:
        if group.params.time_budget is not None:
            insort(self._ends, self._end(group))

    def remove(self, group: SequenceGroup) -> None:
        if group.params.time_budget is not None:
            del self._ends[bisect_left(self._ends, self._end(group))]

    def passed(self, now: float) -> list[SequenceGroup]:
        """Those whose time is up, in order of submission."""
        count = bisect_right(self._ends, now, key=lambda end: end[0])
        return [group for _, _, group in sorted(self._ends[:count], key=lambda end: end[1])]

    @staticmethod
    def _end(group: SequenceGroup) -> tuple[float, int, SequenceGroup]:
        assert group.params.time_budget is not None
        # No two have the same number, so groups themselves are never compared.
        return group.submitted + group.params.time_budget, group.number, group


def _turn(group: SequenceGroup) -> tuple[bool, int]:
    return group.saved is None, group.number


class RequestRegistry:
    """Requests come by `add`, and are gone by `release`."""

    def __init__(self, slots: Slots, starts: PrefillManager, cohorts: Mapping[Program, MicroBatches]) -> None:
        self.cohorts = cohorts
        """In whose rounds groups take part, by how they are decoded."""
        self.groups: dict[str, SequenceGroup] = {}
        """All, by the ids of their requests."""
        self.queue = RequestQueue()
        """Those that wait."""
        self.admitted: list[SequenceGroup] = []
        """The others, which hold slots and pages, oldest first."""
        self.deadlines = Deadlines()
        self._slots, self._starts = slots, starts
        self._preemptions = 0

    @property
    def num_running(self) -> int:
        """Requests past their prefill."""
        return sum(group.phase is Phase.RUNNING for group in self.admitted)

    def complete(self, group: SequenceGroup) -> bool:
        """All particles of a running group have ended, and all their tokens are weighed."""
        return bool(self._slots.ended_S[group.slots].all()) and not self._slots.unscored(group.slots).any()

    def add(self, group: SequenceGroup) -> None:
        self.groups[group.id] = group
        self.deadlines.add(group)
        self.queue.push(group)

    def admit(self, group: SequenceGroup) -> bool:
        """One that waits gets slots and pages; False if there are not enough."""
        if not self._starts.admit(group):
            return False
        self.queue.remove(group)
        insort(self.admitted, group, key=attrgetter("number"))
        return True

    def preempt(self, group: SequenceGroup) -> None:
        """It gives up its slots and pages, and waits to be taken up again."""
        if group.phase is Phase.RUNNING:
            self.cohorts[group.decoding.program].leave(group)
            self._starts.preempt(group)
        else:
            self._starts.give_up(group)
            group.phase = Phase.QUEUED
        self.admitted.remove(group)
        self.queue.push(group)
        group.tally.preemptions += 1
        self._preemptions += 1

    def take_preemptions(self) -> int:
        """Since the last call."""
        count, self._preemptions = self._preemptions, 0
        return count

    def withdraw(self, group: SequenceGroup) -> None:
        """It neither waits nor runs, and holds nothing."""
        if group.phase is Phase.RUNNING:
            self.cohorts[group.decoding.program].leave(group)
        if group.phase is Phase.QUEUED:
            self.queue.remove(group)
        else:
            self._starts.give_up(group)
            self.admitted.remove(group)

    def release(self, group: SequenceGroup) -> None:
        """Nobody knows it any more."""
        self.withdraw(group)
        self.deadlines.remove(group)
        del self.groups[group.id]
