"""Cohorts: running requests in sets whose rounds alternate, so that one set is drafted or scored while another is chosen from.

Where a round goes on while its result is waited for, a cohort's next round is asked for before the last is read: the models never
wait for the scheduler. Answers do not depend on any of it: a request's random numbers know its own rounds only.
"""

from __future__ import annotations

from collections.abc import Callable

from smc.scheduler.companions import Pages
from smc.scheduler.decode import Flight, Rounds
from smc.scheduler.sequence_group import Group

Provide = Callable[[list[Group]], list[tuple[Group, Pages]]]
"""Gives groups pages for a round; returns those for which there were enough."""


class Cohorts:
    """`count` cohorts of the groups of one program, as even as new requests can make them."""

    def __init__(self, rounds: Rounds, count: int) -> None:
        self.rounds = rounds
        self._members: list[list[Group]] = [[] for _ in range(count)]
        self._flights: list[Flight | None] = [None] * count

    def join(self, group: Group) -> None:
        """The group takes part from its cohort's next round on."""
        smallest = min(self._members, key=lambda members: sum(len(g.slots) for g in members))
        smallest.append(group)

    def leave(self, group: Group) -> None:
        """A round of the group that has been asked for goes on without anybody reading what came of it."""
        for members in self._members:
            if group in members:
                members.remove(group)

    def abandon(self) -> None:
        """Rounds that have been asked for will not come."""
        self._flights = [None] * len(self._flights)

    def advance(self, provide: Provide) -> None:
        """Ask for every cohort's next round, and read what came of its last: the one before, or where nothing goes on meanwhile, this."""
        asked = [self._ask(members, provide) for members in self._members]
        if self.rounds.pipelined:
            asked, self._flights = self._flights, asked
        for flight in filter(None, asked):
            self.rounds.read(flight)

    def _ask(self, members: list[Group], provide: Provide) -> Flight | None:
        given = provide([group for group in members if self.rounds.wants(group)])
        return self.rounds.ask(given) if given else None
