"""Which requests there are, and where each of them stands: it waits, or holds slots and pages, or takes part in rounds."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from operator import attrgetter

from smc.executor.plan import Program
from smc.scheduler.cohorts import Cohorts
from smc.scheduler.prefill import Starts
from smc.scheduler.queue import Deadlines, Queue
from smc.scheduler.sequence_group import Group, Phase
from smc.scheduler.slots import Slots


class Registry:
    """Requests come by `add`, and are gone by `release`."""

    def __init__(self, slots: Slots, starts: Starts, cohorts: Mapping[Program, Cohorts]) -> None:
        self.cohorts = cohorts
        """In whose rounds groups take part, by how they are decoded."""
        self.groups: dict[str, Group] = {}
        """All, by the ids of their requests."""
        self.queue = Queue()
        """Those that wait."""
        self.admitted: list[Group] = []
        """The others, which hold slots and pages, oldest first."""
        self.deadlines = Deadlines()
        self._slots, self._starts = slots, starts
        self._preemptions = 0

    @property
    def num_running(self) -> int:
        """Requests past their prefill."""
        return sum(group.phase is Phase.RUNNING for group in self.admitted)

    def complete(self, group: Group) -> bool:
        """All particles of a running group have ended, and all their tokens are weighed."""
        return bool(self._slots.ended_S[group.slots].all()) and not self._slots.unscored(group.slots).any()

    def add(self, group: Group) -> None:
        self.groups[group.id] = group
        self.deadlines.add(group)
        self.queue.push(group)

    def admit(self, group: Group) -> bool:
        """One that waits gets slots and pages; False if there are not enough."""
        if not self._starts.admit(group):
            return False
        self.queue.remove(group)
        insort(self.admitted, group, key=attrgetter("number"))
        return True

    def preempt(self, group: Group) -> None:
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

    def withdraw(self, group: Group) -> None:
        """It neither waits nor runs, and holds nothing."""
        if group.phase is Phase.RUNNING:
            self.cohorts[group.decoding.program].leave(group)
        if group.phase is Phase.QUEUED:
            self.queue.remove(group)
        else:
            self._starts.give_up(group)
            self.admitted.remove(group)

    def release(self, group: Group) -> None:
        """Nobody knows it any more."""
        self.withdraw(group)
        self.deadlines.remove(group)
        del self.groups[group.id]
