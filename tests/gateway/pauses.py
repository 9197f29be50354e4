"""How long an asyncio loop stands still: what everybody who is served by it notices."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager

LIMIT = 0.5
"""Seconds: twice what anybody may keep the others waiting for, because the machine may be busy."""
TICK = 0.005


class Pauses:
    """Use it around what may stop `loop`; afterwards `longest` is the longest time in seconds for which nobody had a
    turn."""

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
    """Of a gateway's loop (tests.gateway.harness.Service)."""
    pauses = Pauses()
    watching = service.begin(pauses.watch())
    try:
        yield pauses
    finally:
        watching.cancel()
