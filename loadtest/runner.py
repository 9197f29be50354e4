"""The open loop: every request is sent at its time, whatever has become of the others. Knows nothing about what is
measured on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass

from loadtest.endpoint import Connections
from loadtest.record import Planned, Record


@dataclass(frozen=True)
class Outcome:
    records: list[Record]
    """In the order of their ends."""
    seconds: float
    """From the start to the end of the last request."""
    cpu_seconds: float
    """Of this process: a generator that needs a core is part of what it measures."""


@dataclass
class State:
    """Of a run that is under way."""

    sent: int = 0
    in_flight: int = 0
    answered: int = 0
    refused: int = 0
    """And failed."""
    cancelled: int = 0


class Runner:
    """One run. `state` says how far it is."""

    def __init__(self, connections: Connections, deadline: float) -> None:
        self._connections, self._deadline = connections, deadline
        self._begin = 0.0
        self.state = State()

    def clock(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begin

    def start(self) -> None:
        """Begin to count the seconds."""
        self._begin = time.monotonic()

    async def run(self, plan: Iterable[Planned]) -> Outcome:
        """Send the plan and wait for the last end. Needs to be started."""
        records: list[Record] = []
        cpu = time.process_time()
        async with asyncio.TaskGroup() as group:
            for planned in plan:
                # Also when it is late: others must get to read what has come.
                await asyncio.sleep(max(0.0, planned.at - self.clock()))
                group.create_task(self._ask(planned, records))
        return Outcome(records, self.clock(), time.process_time() - cpu)

    async def _ask(self, planned: Planned, records: list[Record]) -> None:
        state = self.state
        state.sent += 1
        state.in_flight += 1
        record = await self._connections.ask(planned, self._deadline, self.clock)
        state.in_flight -= 1
        state.answered += record.answered
        state.cancelled += record.cancelled
        state.refused += record.failed
        records.append(record)
