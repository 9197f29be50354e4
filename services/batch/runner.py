"""Answers lines with records in the same order. Many requests are in flight, on a service that may be lost and come
back; `Replica` is the worker groups that do so. Knows nothing about files. Imports neither Ray nor torch.

Memory is bounded: reading pauses while too many lines wait, be it for free slots or for the answer of an earlier
line."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from services.backend import Backend, ServingPair, Unavailable
from services.batch.lines import Kept, Line, RequestReader, answered, refused
from services.launch.config import WorkerGroupConfig
from smc.api.request import Answer, Request

ATTEMPTS = 3
"""Maximum number of times that a request is sent, if the service is lost while it decodes the request."""

logger = logging.getLogger(__name__)
WINDOW = 1024
"""Maximum number of lines for each worker group that are read and not yet written: this many later lines can finish
before further lines have to wait for a slow one."""


class ServiceLost(RuntimeError):
    """The service is gone and does not come back."""


class ServiceState:
    """Records whether the service is ready, and waits until it is."""

    def __init__(self, patience: float) -> None:
        """`patience`: seconds to wait for a lost service to come back."""
        self._patience = patience
        self._now = asyncio.Event()

    def set_health(self, ready: bool) -> None:
        """Set whether a worker group has both models: lines wait for both, since each may need the draft."""
        if ready:
            self._now.set()
        else:
            self._now.clear()

    async def wait(self) -> None:
        """Wait until the service is ready. Raises ServiceLost if that takes too long."""
        try:
            async with asyncio.timeout(self._patience):
                while not self._now.is_set():  # it may be lost again before this task's turn comes
                    await self._now.wait()
        except TimeoutError as error:
            raise ServiceLost(f"the service did not come back within {self._patience:g} s") from error


class RetryingDecoder:
    """Sends a request again if the service is lost while it decodes. No part of the answer is written by then."""

    def __init__(self, backend: Backend, serving: ServiceState) -> None:
        self._backend, self._serving = backend, serving
        self._last_attempts = asyncio.Lock()

    async def decode(self, request: Request) -> Answer:
        """Return the answer of a request. Raises ValueError, RequestFailed, ServiceLost, and Unavailable after the last
        attempt."""
        for attempt in range(1, ATTEMPTS):
            try:
                return await self._once(request)
            except Unavailable as error:
                logger.warning("line %s, attempt %d of %d: %s", request.request_id, attempt, ATTEMPTS, error)
        # One at a time: if one of the requests makes the service fail, the others must not fail with it.
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


@dataclass(frozen=True)
class Limit:
    """Maximum number of requests in flight, or of the slots that they take."""

    room: int
    in_slots: bool = False
    """Whether slots are counted: one for each row of a request, or two if it is guided."""

    def cost(self, requests: Sequence[Request]) -> int:
        """Return the share of the limit that the requests of a line take, at most all of it: a line that needs more
        runs alone."""
        each = (one.params.rows * one.params.slots_per_row if self.in_slots else 1 for one in requests)
        return min(sum(each), self.room)


class BatchRunner:
    """Answers lines within one limit, which concurrent calls of `run` share. Use it in one asyncio loop."""

    def __init__(
        self,
        pair: ServingPair,
        requests: RequestReader,
        decode: Callable[[Request], Coroutine[Any, Any, Answer]],
        fingerprint: str,
        limit: Limit,
        window: int = WINDOW,
    ) -> None:
        """`window`: maximum number of lines that are read and not yet written."""
        self._pair, self._requests, self._fingerprint = pair, requests, fingerprint
        self._decode, self._limit, self._window = decode, limit, window
        self._free = limit.room
        self._freed = asyncio.Condition()

    async def run(self, lines: Iterable[Line | Kept], write: Callable[[dict[str, Any], bool], None]) -> None:
        """Answer `lines`. `write` is called for every line, in order, as soon as its record and all earlier ones are
        known, with the record and whether it is new. An error of one line becomes its record. Raises the errors of
        `write`, and ServiceLost."""
        window: asyncio.Queue[asyncio.Task | dict | Kept | None] = asyncio.Queue(self._window)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_write_all(window, write))
                for line in lines:
                    await window.put(line if isinstance(line, Kept) else await self._begin(line, tasks))
                await window.put(None)
        except ExceptionGroup as group:  # all have the same cause: the service is lost, or the disk is full
            raise group.exceptions[0] from None

    async def _begin(self, line: Line, tasks: asyncio.TaskGroup) -> asyncio.Task | dict[str, Any]:
        """Return the record of a line that is not a request, otherwise a task that answers the line."""
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
            if any(request.params.constraint for request in requests):
                answers = await asyncio.to_thread(self._check_ends, requests, answers)
            return answered(line, requests, answers, self._pair, self._fingerprint, int(time.time()))
        except ServiceLost:
            raise
        except Exception as error:
            return _failed(line, error)
        finally:
            self._free += cost
            async with self._freed:
                self._freed.notify_all()

    def _check_ends(self, requests: Sequence[Request], answers: list[Answer]) -> list[Answer]:
        """Raise ConstraintFailed if an answer ended where its constraint does not allow an end. Return the answers,
        with particles that end wrongly marked."""
        from smc.constraint_masks import check_answer  # imports torch
        from smc.constraints import Compiler
        from smc.stops import TokenBytes

        compiler, checked = Compiler.of(TokenBytes.of(self._pair.tokenizer)), []
        for request, answer in zip(requests, answers):
            if (constraint := request.params.constraint) is not None:
                answer = check_answer(compiler, constraint, answer)
            checked.append(answer)
        return checked

    async def _answers(self, requests: Sequence[Request]) -> list[Answer]:
        """Return all answers. On the first error the other requests are cancelled, and the error is raised."""
        try:
            async with asyncio.TaskGroup() as tasks:
                each = [tasks.create_task(self._decode(request)) for request in requests]
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return [task.result() for task in each]


@dataclass(frozen=True)
class ReplicaSpec:
    """Settings of every `Replica` of a run. Picklable."""

    group: WorkerGroupConfig
    seed: int
    """See `BatchConfig.seed`."""
    concurrency: int | None
    """See `BatchConfig.concurrency`."""

    def limit(self, groups: int) -> Limit:
        """Return the limit of `groups` worker groups together."""
        if self.concurrency is not None:
            return Limit(groups * self.concurrency)
        # Twice as many as can run, so that slots that a round frees are filled at once.
        return Limit(groups * 2 * self.group.engine.max_slots, in_slots=True)


class Replica:
    """Worker groups that answer lines. Needs Ray to be connected. Use it in one asyncio loop."""

    def __init__(self, spec: ReplicaSpec, pair: ServingPair, groups: int = 1) -> None:
        """`groups`: number of worker groups."""
        from services.launch.balancer import Balancer  # imports torch

        ready = [(False, False)] * groups
        serving = ServiceState(spec.group.start_timeout)

        def set_health(number: int, draft: bool, target: bool) -> None:
            ready[number] = (draft, target)
            serving.set_health(any(all(one) for one in ready))

        self._balancer = Balancer(spec.group, pair, groups, on_health=set_health)
        decode = RetryingDecoder(self._balancer, serving).decode
        requests = RequestReader(pair, spec.seed)
        self._runner = BatchRunner(pair, requests, decode, pair.fingerprint(), spec.limit(groups), groups * WINDOW)

    async def start(self) -> None:
        """Start the worker groups, see `Balancer.start`. Raises WorkerGroupError if none starts."""
        await self._balancer.start()

    async def answer(self, lines: Iterable[Line | Kept], write: Callable[[dict[str, Any], bool], None]) -> None:
        """See `BatchRunner.run`. Several calls may run at a time."""
        await self._runner.run(lines, write)

    async def stop(self) -> None:
        """End every process."""
        await self._balancer.stop()


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
