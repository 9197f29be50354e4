"""Which entry of the workers' stop tables a request's stop machine has: requests that end alike share one."""

from __future__ import annotations

from smc.stops import StopMachine


class StopEntries:
    """Entries 1..count. One that nobody uses keeps its machine until another needs the place."""

    def __init__(self, count: int) -> None:
        self._machines: dict[int, StopMachine] = {}
        self._users = dict.fromkeys(range(1, count + 1), 0)

    def claim(self, machine: StopMachine) -> tuple[int, bool] | None:
        """(entry, whether the machine has yet to be put there), or None while all are taken by others."""
        entry = next((e for e, there in self._machines.items() if there == machine), None)
        is_new = entry is None
        if entry is None:
            entry = next((e for e, users in self._users.items() if not users), None)
            if entry is None:
                return None
            self._machines[entry] = machine
        self._users[entry] += 1
        return entry, is_new

    def give_back(self, entry: int) -> None:
        self._users[entry] -= 1
        assert self._users[entry] >= 0, "a stop machine was given back twice"

    @property
    def used(self) -> int:
        return sum(self._users.values())
