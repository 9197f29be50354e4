"""How much comes in at a time, over every port: so many calls, one large request after the other. Knows nothing of what they ask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from services.gateway.memory import Trimmer
from smc.engine.admission import QueueFull

LARGE = 64 << 10
"""Bytes from which on a request is large: to read it takes long enough for others to wait for."""
WAITING = 32 << 20
"""Bytes of large requests that wait to be read; beyond, they are refused."""

Request = TypeVar("Request")


class Places:
    """Calls that may be in flight. Use it in one asyncio loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Around a call. Raises QueueFull."""
        if self._taken >= self._limit:
            raise QueueFull(f"{self._limit} calls are in flight, as many as are allowed. Try again later")
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1


class Turns:
    """Reads requests, large ones one after the other. Use it in one asyncio loop."""

    def __init__(self) -> None:
        self._waiting = 0
        self._turn = asyncio.Lock()
        self._trimmer = Trimmer()

    def close(self) -> None:
        self._trimmer.close()

    async def read(self, data: bytes, parse: Callable[[bytes], Request]) -> Request:
        """What `parse` makes of `data`. Raises what it raises, and QueueFull."""
        if len(data) < LARGE:
            return parse(data)
        if self._waiting and self._waiting + len(data) > WAITING:
            raise QueueFull(f"requests of {self._waiting} bytes wait to be read; allowed: {WAITING}. Try again later")
        self._waiting += len(data)
        try:
            async with self._turn:
                request = parse(data)
                await asyncio.sleep(0)  # whoever else has something to do comes first
                return request
        finally:
            self._waiting -= len(data)
            self._trimmer.plan()
