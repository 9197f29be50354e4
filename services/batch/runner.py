"""Lines in, output records out in the same order, with many requests in flight on a service that may be lost and come
back. Knows nothing about files or processes.

Memory is bounded: reading pauses while too many lines wait, for a decoder or for an earlier line's answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from services.backend import Backend, ServingPair, Unavailable
from services.batch.lines import Kept, Line, RequestReader, answered, refused
from smc.api.request import Answer, Request

ATTEMPTS = 3
"""How often a request is sent to a service that is lost while it decodes it."""

logger = logging.getLogger(__name__)


class ServiceLost(RuntimeError):
    """The service is gone and does not come back."""


class ServiceState:
    """Whether the service is ready, with a wait until it is."""

    def __init__(self, patience: float) -> None:
        """`patience`: seconds to wait for a lost service to come back."""
        self._patience = patience
        self._now = asyncio.Event()

    def set_health(self, draft: bool, target: bool) -> None:
        """The `on_health` callback of a `Supervisor`. Lines wait for both models, since each may need the draft."""
        if draft and target:
            self._now.set()
        else:
            self._now.clear()

    async def wait(self) -> None:
        """Raises ServiceLost."""
        try:
            async with asyncio.timeout(self._patience):
                while not self._now.is_set():  # it may be lost again before this task's turn comes
                    await self._now.wait()
        except TimeoutError as error:
            raise ServiceLost(f"the service did not come back within {self._patience:g} s") from error


class RetryingDecoder:
    """Sends a request again when the service is lost over it: nothing of its answer has been given out by then."""

    def __init__(self, backend: Backend, serving: ServiceState) -> None:
        self._backend, self._serving = backend, serving
        self._last_attempts = asyncio.Lock()

    async def decode(self, request: Request) -> Answer:
        """Raises ValueError, RequestFailed, Unavailable after the last attempt, ServiceLost."""
        for attempt in range(1, ATTEMPTS):
            try:
                return await self._once(request)
            except Unavailable as error:
                logger.warning("line %s, attempt %d of %d: %s", request.request_id, attempt, ATTEMPTS, error)
        # One at a time: if one of those in flight is what the service dies of, the others must not fail with it.
        async with self._last_attempts:
            try:
                return await self._once(request)
            except Unavailable as error:
                raise Unavailable(
                    f"the service was lost {ATTEMPTS} times while it decoded this line; at last: {error}"
                ) from error

    async def _once(self, request: Request) -> Answer:
        await self._serving.wait()
        async with aclosing(self._backend.generate(request)) as outputs:
            async for output in outputs:
                if output.answer is not None:
                    return output.answer
        raise AssertionError("the updates of a request ended without an answer")


WINDOW = 1024
"""Lines read and not yet written. One slow line lets so many later ones finish before the rest has to wait for it."""


@dataclass(frozen=True)
class Limit:
    """How much may be in flight."""

    requests: int | None = None
    rows: int | None = None
    """Slots, one or two a particle; of one kind or the other."""

    def cost(self, requests: Sequence[Request]) -> int:
        """Of the answers of a line. A line that exceeds all of it runs alone."""
        each = (1 if self.rows is None else one.params.rows * one.params.slots_per_row for one in requests)
        return min(sum(each), self.room)

    @property
    def room(self) -> int:
        room = self.requests if self.rows is None else self.rows
        assert room is not None
        return room


class BatchRunner:
    """Answers lines within one limit, also those of several calls of `run` at a time. Use it in one asyncio loop."""

    def __init__(
        self,
        pair: ServingPair,
        requests: RequestReader,
        decode: Callable[[Request], Awaitable[Answer]],
        fingerprint: str,
        limit: Limit,
    ) -> None:
        self._pair, self._requests, self._fingerprint = pair, requests, fingerprint
        self._decode, self._limit = decode, limit
        self._free = limit.room
        self._freed = asyncio.Condition()

    async def run(self, lines: Iterable[Line | Kept], write: Callable[[dict[str, Any], bool], None]) -> None:
        """`write` takes a record for every line, in order, each as soon as it and all before it are known, and whether
        it is new. Raises what `write` or the service as a whole raises; what is wrong with one line is a record of its
        own."""
        window: asyncio.Queue[asyncio.Task | dict | Kept | None] = asyncio.Queue(WINDOW)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_write_all(window, write))
                for line in lines:
                    await window.put(line if isinstance(line, Kept) else await self._begin(line, tasks))
                await window.put(None)
        except ExceptionGroup as group:  # all have the same cause: the service is lost, or the disk is full
            raise group.exceptions[0] from None

    async def _begin(self, line: Line, tasks: asyncio.TaskGroup) -> asyncio.Task | dict[str, Any]:
        """Its record, or the task that will know it."""
        try:
            requests = self._requests.build(line)
        except Exception as error:
            return _failed(line, error)
        cost = self._limit.cost(requests)
        async with self._freed:
            await self._freed.wait_for(lambda: self._free >= cost)
            self._free -= cost
        return tasks.create_task(self._answer(line, requests, cost))

    async def _answer(self, line: Line, requests: Sequence[Request], cost: int) -> dict[str, Any]:
        try:
            answers = await self._answers(requests)
            return answered(line, requests, answers, self._pair, self._fingerprint, int(time.time()))
        except ServiceLost:
            raise
        except Exception as error:
            return _failed(line, error)
        finally:
            self._free += cost
            async with self._freed:
                self._freed.notify_all()

    async def _answers(self, requests: Sequence[Request]) -> list[Answer]:
        """All of them, or the first error; the others are then cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                each = [tasks.create_task(self._decoded(request)) for request in requests]
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return [task.result() for task in each]

    async def _decoded(self, request: Request) -> Answer:
        return await self._decode(request)


async def _write_all(window: asyncio.Queue, write: Callable[[dict[str, Any], bool], None]) -> None:
    while (item := await window.get()) is not None:
        if isinstance(item, Kept):
            write(item.record, False)
        else:
            write(item if isinstance(item, dict) else await item, True)


def _failed(line: Line, error: Exception) -> dict[str, Any]:
    record = refused(line, error)
    if record["error"]["code"] == "internal":
        logger.error("%s: unexpected error", line.name, exc_info=error)
    return record
