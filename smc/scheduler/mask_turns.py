"""Turns of requests whose masks may take long. A round waits for the masks of all its requests, so at most one such
request takes part in the rounds of a step: the wait does not grow with their number, and each of them may use the whole
time that a request has in a round. Requests whose masks are quick take part in every round.

Whether masks are quick is known from the rounds that needed them, for each constraint: requests with the same one share
what is known. Knows nothing about how masks are computed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

from smc.api.constraint import Constraint
from smc.scheduler.sequence_group import SequenceGroup

QUICK_SECONDS, QUICK_SECONDS_EACH = 0.05, 0.01
"""Maximum seconds of a round's masks at both models that count as quick: in general, and in addition for each
request."""
SLOW_SECONDS = 0.1
"""Additional seconds from which masks are slow. Times between are those of a busy machine, and show nothing."""
SLOW_ROUNDS = 8
"""Number of quick rounds after which masks that were slow are quick again."""
MOST_KEPT = 1024
"""Maximum number of constraints that are known: those whose number was set last."""


class MaskTurns:
    """Chooses the constrained requests that take part in rounds."""

    def __init__(self) -> None:
        self._rounds: OrderedDict[Constraint, int] = OrderedDict()
        """Number of quick rounds that a constraint still needs before its masks are quick."""
        self._last: WeakKeyDictionary[SequenceGroup, int] = WeakKeyDictionary()
        """Number of the last turn of each request."""
        self._turns = 0
        self._chosen: SequenceGroup | None = None

    def begin_step(self, wanting: Iterable[SequenceGroup]) -> None:
        """Choose the request whose turn it is from those that want a round: the one whose last turn is longest ago, and
        of those without a turn the oldest."""
        waiting = [group for group in wanting if not self._is_quick(group)]
        self._chosen = min(waiting, key=lambda group: (self._last.get(group, 0), group.number), default=None)
        if self._chosen is not None:
            self._turns += 1
            self._last[self._chosen] = self._turns

    def allows(self, group: SequenceGroup) -> bool:
        """Whether a request may take part in a round of this step."""
        return group is self._chosen or self._is_quick(group)

    def learn(self, groups: Sequence[SequenceGroup], seconds: float) -> None:
        """Record that the masks of a round of these requests took so many seconds at both models together."""
        constraints = {g.params.constraint for g in groups if g.params.constraint is not None}
        unknown = {constraint for constraint in constraints if self._rounds.get(constraint, 1)}
        limit = QUICK_SECONDS + QUICK_SECONDS_EACH * len(groups)
        if seconds > limit + SLOW_SECONDS:
            # Only one request of the round is not known to be quick. If there is none, each of them may be slow.
            for constraint in unknown or constraints:
                self._remember(constraint, SLOW_ROUNDS if unknown else 1)
        elif seconds <= limit:
            for constraint in unknown:
                self._remember(constraint, self._rounds.get(constraint, 1) - 1)

    def _is_quick(self, group: SequenceGroup) -> bool:
        constraint = group.params.constraint
        return constraint is None or self._rounds.get(constraint, 1) == 0

    def _remember(self, constraint: Constraint, rounds: int) -> None:
        self._rounds[constraint] = rounds
        self._rounds.move_to_end(constraint)
        if len(self._rounds) > MOST_KEPT:
            self._rounds.popitem(last=False)
