"""Who waits, and who runs out of time: requests in the orders that a step needs, kept up as they come and go, so that none is searched."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

from smc.scheduler.sequence_group import Group


class Queue:
    """Groups that wait, the next one first: those that have been preempted, then the others, each in order of submission."""

    def __init__(self) -> None:
        self._groups: list[Group] = []
        self.waiting = 0
        """Those whose answers have not been drawn yet."""
        self.pages = 0
        """That these were likely to need when they were submitted, in all pools together."""

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def groups(self) -> Sequence[Group]:
        """The next one first."""
        return self._groups

    @property
    def first(self) -> Group | None:
        return self._groups[0] if self._groups else None

    def push(self, group: Group) -> None:
        insort(self._groups, group, key=_turn)
        self._count(group, 1)

    def remove(self, group: Group) -> None:
        place = bisect_left(self._groups, _turn(group), key=_turn)
        assert self._groups[place] is group, "a request is not where it should wait"
        del self._groups[place]
        self._count(group, -1)

    def _count(self, group: Group, sign: int) -> None:
        if group.answer is None:
            self.waiting += sign
            self.pages += sign * sum(group.expected.values())


class Deadlines:
    """When the time of requests is up: of those that have a budget."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, Group]] = []

    def add(self, group: Group) -> None:
        if group.params.time_budget is not None:
            insort(self._ends, self._end(group))

    def remove(self, group: Group) -> None:
        if group.params.time_budget is not None:
            del self._ends[bisect_left(self._ends, self._end(group))]

    def passed(self, now: float) -> list[Group]:
        """Those whose time is up, in order of submission."""
        count = bisect_right(self._ends, now, key=lambda end: end[0])
        return [group for _, _, group in sorted(self._ends[:count], key=lambda end: end[1])]

    @staticmethod
    def _end(group: Group) -> tuple[float, int, Group]:
        assert group.params.time_budget is not None
        # No two have the same number, so groups themselves are never compared.
        return group.submitted + group.params.time_budget, group.number, group


def _turn(group: Group) -> tuple[bool, int]:
    return group.saved is None, group.number
