"""The registry of unfinished requests, by where they stand: in the queue, holding slots and pages, or in rounds.
Requests are kept in the orders that a step needs, so that no step searches for one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from operator import attrgetter

from smc.api.request import Answer
from smc.scheduler.decode import RoundScheduler
from smc.scheduler.prefill import PrefillManager
from smc.scheduler.sequence_group import RequestState, SequenceGroup
from smc.scheduler.slots import Slots
from smc.types import ModelRole


class RequestQueue:
    """Requests that wait to be admitted, the next one first: requests that resume from a checkpoint, then the others by
    priority, each in order of submission. Beside them are those that cannot be admitted yet."""

    def __init__(self) -> None:
        self._groups: list[SequenceGroup] = []
        self._held: list[SequenceGroup] = []
        self.pages = 0
        """Pages that the queued requests were likely to need when they were submitted, in all pools together."""

    def __len__(self) -> int:
        return len(self._groups) + len(self._held)

    @property
    def groups(self) -> Sequence[SequenceGroup]:
        """The requests that may be admitted, the next one first."""
        return self._groups

    @property
    def held(self) -> Sequence[SequenceGroup]:
        """The requests that cannot be admitted yet."""
        return self._held

    @property
    def first(self) -> SequenceGroup | None:
        return self._groups[0] if self._groups else None

    def push(self, group: SequenceGroup) -> None:
        insort(self._groups, group, key=_order)
        self.pages += sum(group.expected.values())

    def hold(self, group: SequenceGroup) -> None:
        """Queue a request that cannot be admitted until `release`."""
        self._held.append(group)
        self.pages += sum(group.expected.values())

    def hold_back(self, group: SequenceGroup) -> None:
        """Take a queued request out of its turn until `release`."""
        self._groups.remove(group)
        self._held.append(group)

    def release(self, group: SequenceGroup) -> None:
        """Let a held request be admitted in its turn."""
        self._held.remove(group)
        insort(self._groups, group, key=_order)

    def remove(self, group: SequenceGroup) -> None:
        if group in self._held:
            self.release(group)
        at = bisect_left(self._groups, _order(group), key=_order)
        assert self._groups[at] is group, "a request is not where it should wait"
        del self._groups[at]
        self.pages -= sum(group.expected.values())


class Deadlines:
    """Requests with a time budget, in the order in which their budgets end."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, SequenceGroup]] = []

    def add(self, group: SequenceGroup) -> None:
        if group.params.time_budget is not None:
            insort(self._ends, self._end(group))

    def remove(self, group: SequenceGroup) -> None:
        if group.params.time_budget is not None:
            del self._ends[bisect_left(self._ends, self._end(group))]

    def passed(self, now: float) -> list[SequenceGroup]:
        """Return the requests whose time budget is used up, in order of submission."""
        count = bisect_right(self._ends, now, key=lambda end: end[0])
        return [group for _, _, group in sorted(self._ends[:count], key=lambda end: end[1])]

    @staticmethod
    def _end(group: SequenceGroup) -> tuple[float, int, SequenceGroup]:
        assert group.params.time_budget is not None
        # No two requests have the same number, so groups themselves are never compared.
        return group.submitted + group.params.time_budget, group.number, group


def _order(group: SequenceGroup) -> tuple[bool, int, int]:
    is_new = group.checkpoint is None
    return is_new, group.request.priority if is_new else 0, group.number


class RequestRegistry:
    """All requests that are not finished."""

    def __init__(
        self, slots: Slots, prefill: PrefillManager, rounds: Mapping[tuple[ModelRole, ...], RoundScheduler]
    ) -> None:
        self.rounds = rounds
        """Rounds of running requests, by the models that take part."""
        self.groups: dict[str, SequenceGroup] = {}
        """All requests, by their ids."""
        self.queue = RequestQueue()
        self.admitted: list[SequenceGroup] = []
        """Requests that hold slots and pages, oldest first."""
        self.deadlines = Deadlines()
        self._slots, self._prefill = slots, prefill
        self._preemptions = 0

    @property
    def num_running(self) -> int:
        """Number of requests past their prefill."""
        return sum(group.is_running for group in self.admitted)

    def complete(self, group: SequenceGroup) -> bool:
        """Whether the request runs, all its particles have ended, and all their tokens are scored."""
        if not group.is_running or not self._slots.ended_S[group.slots[0]] or group.awaits_potential:
            return False
        return bool(self._slots.ended_S[group.slots].all()) and not self._slots.unscored(group.slots).any()

    def add(self, group: SequenceGroup, *, held: bool = False) -> None:
        """Queue a request; `held`: it cannot be admitted yet."""
        self.groups[group.id] = group
        self.deadlines.add(group)
        (self.queue.hold if held else self.queue.push)(group)

    def admit(self, group: SequenceGroup, now: float) -> bool:
        """Give a queued request slots and pages. Return False if there are not enough."""
        if not self._prefill.admit(group, now):
            return False
        self.queue.remove(group)
        insort(self.admitted, group, key=attrgetter("number"))
        return True

    def run(self, group: SequenceGroup) -> None:
        """Let a request take part in rounds, unless it has ended already."""
        if not group.error and not self.complete(group):
            self.rounds[group.rules.roles].add(group)

    def preempt(self, group: SequenceGroup) -> None:
        """Release a request's slots and pages, and queue it to be admitted again. A running request keeps a checkpoint
        of its particles."""
        checkpoint = group.save(self._slots) if group.is_running else None
        self._withdraw(group)
        group.preempt(checkpoint)
        self.queue.push(group)
        self._preemptions += 1

    def redraw(self, group: SequenceGroup) -> None:
        """Release a request's slots and pages, and queue it to continue from before its last round."""
        self._withdraw(group)
        group.redraw()
        self.queue.push(group)

    def take_preemptions(self) -> int:
        """Return the number of preemptions since the last call."""
        count, self._preemptions = self._preemptions, 0
        return count

    def rescore(self, group: SequenceGroup, answer: Answer) -> None:
        """Withdraw a request whose answer is drawn, and run the answer or the prompt through the target once more."""
        self._withdraw(group)
        group.rescore()
        self._prefill.rescore(group, answer)

    def release(self, group: SequenceGroup) -> None:
        """End a request and release everything that it holds."""
        self._withdraw(group)
        group.finish()
        self.deadlines.remove(group)
        del self.groups[group.id]

    def _withdraw(self, group: SequenceGroup) -> None:
        """Remove a request from the queue, or from the admitted requests: it then holds no slots and pages."""
        if group.is_running:
            self.rounds[group.rules.roles].remove(group)
        if group.is_queued:
            self.queue.remove(group)
            return
        self._prefill.release(group)
        if group.state is not RequestState.RESCORING:
            self.admitted.remove(group)
