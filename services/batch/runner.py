"""Lines in, records out, in the same order, with many requests in flight. Knows nothing about files or processes.

Memory is bounded: reading stops while too many lines wait, whether for a decoder or for an earlier line's answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from services.backend import ServingPair
from services.batch.decoder import ServiceLost
from services.batch.lines import Line
from services.batch.requests import Requests
from services.batch.results import answered, refused
from smc.api.outputs import Answer
from smc.api.request import Request

WINDOW = 1024
"""Lines read and not yet written. One slow line lets so many later ones finish before the rest has to wait for it."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limit:
    """How much may be in flight."""

    requests: int | None = None
    rows: int | None = None
    """Slots, one or two a particle; of one kind or the other."""

    def cost(self, request: Request) -> int:
        return 1 if self.rows is None else min(request.params.rows * request.params.slots_per_row, self.rows)

    @property
    def room(self) -> int:
        room = self.requests if self.rows is None else self.rows
        assert room is not None
        return room


class Runner:
    """One run over some lines. Use it in one asyncio loop."""

    def __init__(
        self,
        pair: ServingPair,
        requests: Requests,
        decode: Callable[[Request], Awaitable[Answer]],
        write: Callable[[dict[str, Any]], None],
        fingerprint: str,
        limit: Limit,
    ) -> None:
        """`write` takes a record for every line, in order, each as soon as it and all before it are known."""
        self._pair, self._requests, self._fingerprint = pair, requests, fingerprint
        self._decode, self._write, self._limit = decode, write, limit
        self._free = limit.room
        self._freed = asyncio.Event()

    async def run(self, lines: Iterable[Line]) -> None:
        """Raises what `write` or the service as a whole raises; what is wrong with one line is a record of its own."""
        window: asyncio.Queue[asyncio.Task | dict | None] = asyncio.Queue(WINDOW)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write_all(window))
                for line in lines:
                    await window.put(await self._begin(line, tasks))
                await window.put(None)
        except ExceptionGroup as group:  # every one of them says the same: the service is lost, or the disk is full
            raise group.exceptions[0] from None

    async def _begin(self, line: Line, tasks: asyncio.TaskGroup) -> asyncio.Task | dict[str, Any]:
        """Its record, or the task that will know it."""
        try:
            request = self._requests.build(line)
        except Exception as error:
            return _failed(line, error)
        cost = self._limit.cost(request)
        while self._free < cost:
            self._freed.clear()
            await self._freed.wait()
        self._free -= cost
        return tasks.create_task(self._answer(line, request, cost))

    async def _answer(self, line: Line, request: Request, cost: int) -> dict[str, Any]:
        try:
            answer = await self._decode(request)
            return answered(line, request, answer, self._pair, self._fingerprint, int(time.time()))
        except ServiceLost:
            raise
        except Exception as error:
            return _failed(line, error)
        finally:
            self._free += cost
            self._freed.set()

    async def _write_all(self, window: asyncio.Queue) -> None:
        while (item := await window.get()) is not None:
            self._write(item if isinstance(item, dict) else await item)


def _failed(line: Line, error: Exception) -> dict[str, Any]:
    record = refused(line, error)
    if record["error"]["code"] == "internal":
        logger.error("line %d: unexpected error", line.number, exc_info=error)
    return record
