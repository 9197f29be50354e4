"""Cohorts: running requests in sets whose rounds alternate, so that one set is drafted or scored while another is chosen from.

Where a round goes on while its result is waited for, a cohort's next round is asked for before the last is read: the models never
wait for the scheduler. Answers do not depend on any of it: a request's random numbers know its own rounds only.
"""

from __future__ import annotations

from collections.abc import Iterator

from smc.engine.group import Group
from smc.engine.rounds import Rounds


class Cohorts:
    """`count` cohorts, as even as new requests can make them."""

    def __init__(self, rounds: Rounds, count: int) -> None:
        self.rounds = rounds
        self._members: list[list[Group]] = [[] for _ in range(count)]
        self._flights: list[Iterator[None] | None] = [None] * count

    def join(self, group: Group) -> None:
        """The group takes part from its cohort's next round on."""
        smallest = min(self._members, key=lambda members: sum(len(g.slots) for g in members))
        smallest.append(group)
        self.rounds.join(group)

    def leave(self, group: Group) -> None:
        """A round of the group that has been asked for goes on without anybody reading what came of it."""
        next(members for members in self._members if group in members).remove(group)
        self.rounds.leave(group)

    def advance(self) -> None:
        """Ask for every cohort's next round, and read what came of its last: the one before, or where nothing goes on meanwhile, this."""
        asked = [self._ask(members) for members in self._members]
        if self.rounds.runner.waits:
            asked, self._flights = self._flights, asked
        for flight in filter(None, asked):
            for _ in flight:
                pass

    def _ask(self, members: list[Group]) -> Iterator[None] | None:
        wanted = [group for group in members if self.rounds.wants(group)]
        if not wanted:
            return None
        flight = self.rounds.run(wanted)
        next(flight)
        return flight
