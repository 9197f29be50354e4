"""Measures how long an asyncio loop is blocked, which delays every call that it serves."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager

LIMIT = 0.5
"""Limit in seconds. It is twice the longest permitted delay, because the machine may be busy."""
TICK = 0.005


class Pauses:
    """Measures the pauses of the loop that runs `watch`. `longest` is the longest time in seconds for which the loop
    ran no task."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def watch(self) -> None:
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(TICK)
            now = loop.time()
            self.longest = max(self.longest, now - last - TICK)
            last = now


@contextmanager
def pauses_of(service):
    """Measure the pauses of a gateway's loop. `service`: a `tests.gateway.harness.Service`."""
    pauses = Pauses()
    watching = service.begin(pauses.watch())
    try:
        yield pauses
    finally:
        watching.cancel()
