"""Turns of requests whose masks may take long. A round waits for the masks of all its requests, so at most one such
request takes part in the rounds of a step: the wait does not grow with their number, and each of them may use the whole
time that a request has in a round.

Whether masks are quick is known from the rounds that needed them, for each constraint: requests with the same one share
what is known. Masks may become slow after many tokens, in all requests with one constraint at the same time, so the
number of them that take part in a round at most doubles with every quick round. Knows nothing about how masks are
computed."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple
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
"""Maximum number of constraints of which something is known: those that it was learned of last."""


class _Known(NamedTuple):
    """What is known of a constraint."""

    rounds: int = 0
    """Number of quick rounds that it still needs before its masks are quick."""
    quick: int = 0
    """Number of its requests whose masks are quick together; 0: not even one."""


UNKNOWN = _Known(rounds=1)


class MaskTurns:
    """Chooses the constrained requests that take part in rounds."""

    def __init__(self) -> None:
        self._known: OrderedDict[Constraint, _Known] = OrderedDict()
        self._last: WeakKeyDictionary[SequenceGroup, int] = WeakKeyDictionary()
        """Number of the last step that each request was allowed in."""
        self._steps = 0
        self._allowed: set[SequenceGroup] = set()

    def begin_step(self, wanting: Iterable[SequenceGroup]) -> None:
        """Choose from the constrained requests that want a round: of each constraint as many as are known to be quick
        together, and one further request. Those whose last turn is longest ago come first, and of those without a turn
        the oldest."""
        left: dict[Constraint, int] = {}
        trial: SequenceGroup | None = None
        self._steps, self._allowed = self._steps + 1, set()
        for group in sorted(wanting, key=lambda group: (self._last.get(group, 0), group.number)):
            constraint = group.params.constraint
            assert constraint is not None, "a constrained request"
            quick = self._known.get(constraint, UNKNOWN).quick
            left.setdefault(constraint, quick)
            if left[constraint]:
                left[constraint] -= 1
                self._allowed.add(group)
            elif not quick and trial is None:
                trial = group
                self._allowed.add(group)
        self._last.update(dict.fromkeys(self._allowed, self._steps))

    def allows(self, group: SequenceGroup) -> bool:
        """Whether a request may take part in a round of this step."""
        return group.params.constraint is None or group in self._allowed

    def learn(self, groups: Sequence[SequenceGroup], seconds: float) -> None:
        """Record that the masks of a round of these requests took so many seconds at both models together."""
        counts = Counter(g.params.constraint for g in groups if g.params.constraint is not None)
        known = {constraint: self._known.get(constraint, UNKNOWN) for constraint in counts}
        unknown = [constraint for constraint in counts if not known[constraint].quick]
        limit = QUICK_SECONDS + QUICK_SECONDS_EACH * len(groups)
        if seconds > limit + SLOW_SECONDS:
            # Only one request of the round is not known to be quick. If there is none, each of them may be slow.
            for constraint in unknown or counts:
                self._remember(constraint, _Known(rounds=SLOW_ROUNDS if unknown else 1))
        elif seconds <= limit:
            for constraint, count in counts.items():
                quick, rounds = known[constraint].quick, known[constraint].rounds - 1
                if rounds <= 0 and quick < 2 * count:
                    self._remember(constraint, _Known(quick=2 * count))
                elif not quick:
                    self._remember(constraint, _Known(rounds=rounds))

    def _remember(self, constraint: Constraint, known: _Known) -> None:
        self._known[constraint] = known
        self._known.move_to_end(constraint)
        if len(self._known) > MOST_KEPT:
            self._known.popitem(last=False)
