"""Limits what all ports together receive at a time: calls in flight and bytes in transit. Large requests are parsed one
after another. Knows nothing about the contents of requests.

After large requests, memory that the C library keeps is returned to the operating system."""

from __future__ import annotations

import asyncio
import ctypes
import ctypes.util
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import islice
from typing import TypeVar

from services.errors import SlowSender
from smc.scheduler.admission import QueueFull

TRIM_SECONDS = 1.0
"""Time between a large request and the return of freed memory."""
LARGE = 64 << 10
"""A request of at least this many bytes is large: parsing it delays others noticeably. A sender can send this much of a
request before it is admitted (HTTP/2's window)."""
ARRIVING = 32 << 20
"""Maximum size in bytes of all requests together that have been admitted but not parsed yet."""
PATIENCE = 0.5
"""Seconds within which an admitted request must arrive while others wait to be admitted."""


class Trimmer:
    """Returns freed memory to the operating system `TRIM_SECONDS` after `plan` is called; further calls until then have
    no effect. Use it in one asyncio loop."""

    def __init__(self) -> None:
        self._trim = _malloc_trim()
        self._planned: asyncio.TimerHandle | None = None

    def plan(self) -> None:
        if self._planned is None and self._trim is not None:
            self._planned = asyncio.get_running_loop().call_later(TRIM_SECONDS, self._begin)

    def close(self) -> None:
        if self._planned is not None:
            self._planned.cancel()

    def _begin(self) -> None:
        self._planned = None
        assert self._trim is not None
        asyncio.get_running_loop().run_in_executor(None, self._trim, 0)


def _malloc_trim() -> Callable[[int], int] | None:
    """Return `malloc_trim` of glibc; None for other C libraries, which do not need it."""
    return getattr(ctypes.CDLL(ctypes.util.find_library("c")), "malloc_trim", None)


Data = TypeVar("Data")
Request = TypeVar("Request")


class CallLimit:
    """Limits the number of calls in flight. Use it in one asyncio loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Context manager for a call. Raises QueueFull if too many calls are in flight."""
        if self._taken >= self._limit:
            raise QueueFull(f"{self._limit} calls are in flight, which is the maximum. Try again later")
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1


class ReceiveLimit:
    """Admits requests and parses them, large ones one after another. Use it in one asyncio loop.

    The number of admitted requests is such that all fit into `ARRIVING` bytes even if each has the maximum size, so
    memory does not depend on how many are sent. The latest is admitted first, so that many callers who send nothing
    delay others, health checks included, by at most `PATIENCE`."""

    def __init__(self, size: int, timeout: float) -> None:
        """`size`: bytes of the largest request; `timeout`: seconds within which a request must be admitted, and after
        that arrive."""
        self._room = max(1, ARRIVING // size)
        self._timeout = timeout
        self._inside = 0
        self._outside: list[asyncio.Future[None]] = []
        self._arriving: dict[asyncio.Timeout, float] = {}
        """Requests that are arriving, oldest first: the time at which each must have arrived if others wait."""
        self._turn = asyncio.Lock()
        self._trimmer = Trimmer()

    def close(self) -> None:
        self._trimmer.close()

    @asynccontextmanager
    async def let_in(self) -> AsyncIterator[None]:
        """Context manager for receiving and parsing one request. It waits for admission; after the timeout it raises
        QueueFull."""
        await self._enter()
        try:
            yield
        finally:
            self._leave()

    async def arrived(self, arrival: Awaitable[Data]) -> Data:
        """Return the data once it has arrived. Raises SlowSender if that takes too long."""
        clock = asyncio.get_running_loop().time
        begin = clock()
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                self._arriving[limit] = begin + PATIENCE
                self._hurry()
                return await arrival
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise SlowSender(f"the request did not arrive within {clock() - begin:.2g} s") from error
        finally:
            del self._arriving[limit]

    async def read(self, data: bytes, parse: Callable[[bytes], Request]) -> Request:
        """Return `parse(data)`. Large data waits until other large data has been parsed. Raises what `parse` raises."""
        if len(data) < LARGE:
            return parse(data)
        async with self._turn:
            try:
                request = parse(data)
                await asyncio.sleep(0)  # let other tasks run first
                return request
            finally:
                self._trimmer.plan()

    async def _enter(self) -> None:
        if self._inside < self._room:
            self._inside += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._outside.append(turn)
        self._hurry()
        try:
            async with asyncio.timeout(self._timeout):
                await turn
        except BaseException as error:
            if turn in self._outside:
                self._outside.remove(turn)
            elif not turn.cancelled():  # it was this caller's turn, which passes to the next
                self._leave()
            if isinstance(error, TimeoutError):
                raise QueueFull(
                    f"{self._room} requests are being received, which is the maximum. Try again later"
                ) from error
            raise

    def _leave(self) -> None:
        while self._outside:
            turn = self._outside.pop()
            if not turn.done():
                turn.set_result(None)
                return
        self._inside -= 1

    def _hurry(self) -> None:
        """Reduce the time of arriving requests to `PATIENCE`, the oldest first: for each request that waits for
        admission, one arriving request."""
        for limit, latest in islice(self._arriving.items(), len(self._outside)):
            when = limit.when()
            if not limit.expired() and when is not None and when > latest:
                limit.reschedule(latest)
