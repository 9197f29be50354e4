"""Cohorts: running SMC requests in sets whose rounds alternate, so that one set is drafted or scored while another is chosen from.

A round stops wherever it must wait for a worker (smc/engine/rounds.py). With one cohort there is nothing else to do then, and
its round is run to the end; with several, each is taken one wait further, and rounds stay in flight between two steps.
Answers do not depend on it: a request's random numbers know its own rounds only.
"""

from __future__ import annotations

from smc.engine.group import Group
from smc.engine.resident_rounds import ResidentRounds
from smc.engine.rounds import SMCRounds


class Cohorts:
    """`count` cohorts, as even as new requests can make them."""

    def __init__(self, rounds: SMCRounds | ResidentRounds, count: int, *, ahead: bool) -> None:
        """`ahead`: a cohort's next round is asked for before what came of the last is read."""
        self.rounds, self._ahead = rounds, ahead
        self._members: list[list[Group]] = [[] for _ in range(count)]
        self._flights: list[Flight | None] = [None] * count

    def join(self, group: Group) -> None:
        """The group takes part from its cohort's next round on."""
        smallest = min(self._members, key=lambda members: sum(len(g.slots) for g in members))
        smallest.append(group)
        if self._ahead:
            self.rounds.join(group)

    def leave(self, group: Group) -> None:
        """Only between rounds. A group that is in no cohort is ignored."""
        assert not group.in_flight, "a group left its cohort in the middle of a round"
        for members in self._members:
            if group in members:
                members.remove(group)
                if self._ahead:
                    self.rounds.pair.leave(group.slots)

    def advance(self) -> None:
        """Take every cohort one wait further; one that is alone, to the end of its round."""
        if self._ahead:
            self._advance_ahead()
            return
        active = [i for i, members in enumerate(self._members) if members]
        for i in active:
            flight = self._flights[i] or Flight(self.rounds, self._members[i])
            self._flights[i] = None if flight.go_on(to_end=len(active) == 1) else flight

    def _advance_ahead(self) -> None:
        flights, self._flights = self._flights, [None] * len(self._flights)
        for i, members in enumerate(self._members):
            if wanted := [group for group in members if self.rounds.wants(group)]:
                self._flights[i] = self.rounds.run(wanted)
                next(self._flights[i])
        for flight in filter(None, flights):
            for _ in flight:
                pass


class Flight:
    """One round of some groups, under way."""

    def __init__(self, rounds: SMCRounds, groups: list[Group]) -> None:
        self.groups = list(groups)
        self._waits = rounds.run(self.groups)
        for group in self.groups:
            group.in_flight = True

    def go_on(self, to_end: bool) -> bool:
        """To the next wait, or to the end. True if the round has ended."""
        for _ in self._waits:
            if not to_end:
                return False
        for group in self.groups:
            group.in_flight = False
        return True
