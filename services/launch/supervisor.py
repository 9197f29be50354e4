"""Keeps a worker group alive and is the backend in front of it: what to do when a process dies is decided here, and
only here.

A lost draft costs speed: its processes are ended, and start again beside the target, which meanwhile decodes alone what
it can. Requests that need the draft end with UNAVAILABLE, in flight and new ones.

Any other dead process means a dead worker group, and so does a dead draft whose link to the target cannot be made
again: every process is ended, and a new worker group starts. Until it has warmed up, requests are refused with
UNAVAILABLE. Those in flight end with UNAVAILABLE if they are of SMC; the others wait for it and go on. Every start, of
a worker group or of a draft, has the next incarnation."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable

from services.backend import ServingPair, StartProgress, Unavailable
from services.coordinator.client import CoordinatorClient
from services.launch.config import WorkerGroupConfig
from services.launch.errors import WorkerGroupError
from services.launch.recovery import Quarantine, resuming
from services.launch.worker_group import WorkerGroup
from services.protobuf.coordinator import EngineStep
from smc.api.outputs import Output
from smc.api.request import Request
from smc.scheduler.stats import EngineStats

logger = logging.getLogger(__name__)

CHECK_SECONDS = 0.5
"""A death is noticed at once; this is how long a wait for one lasts before it is begun again."""
SILENCE_SECONDS = 5.0
"""Beyond the link's timeout: the coordinator, which sees more, may say first what is wrong."""
LOOK_SECONDS, LOG_SECONDS = 0.5, 10.0
"""Between two looks at how far a start is, and between two lines about it."""
BACKOFF_SECONDS = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Before the next attempt to start a worker group, or a draft, by attempts that have failed in a row."""


class Supervisor:
    """A `services.backend.Backend` that outlives its worker group. Needs Ray to be connected."""

    def __init__(
        self,
        config: WorkerGroupConfig,
        pair: ServingPair,
        *,
        on_health: Callable[[bool, bool], None] = lambda draft, target: None,
        on_step: Callable[[EngineStep], None] = lambda step: None,
        on_start: Callable[[StartProgress], None] | None = None,
    ) -> None:
        """`on_health` is called with whether there is a draft and a target whenever that changes; with a target, the
        service decodes. `on_step` is called with every engine step, `on_start` with how far the start of a worker group
        is."""
        self._config, self.pair = config, pair
        self._on_health, self._on_step, self._on_start = on_health, on_step, on_start
        self._group: WorkerGroup | None = None
        self._client: CoordinatorClient | None = None
        self._watch: asyncio.Task | None = None
        self._quarantine = Quarantine()
        self._changed = asyncio.Event()
        """It has come back, or is over."""
        self._over = False
        """No other worker group will be started."""
        self._heard = 0.0
        """When the engine's last step came."""
        self._draft_incarnation = 0
        """Of the draft that is there; 0 if there is none."""
        self._in_flight: list[Request] | None = None
        """When the coordinator reported the loss of the draft."""
        self._draft_start: asyncio.Task | None = None
        self.incarnation = 0
        self.stats = EngineStats()
        """Of the engine's last step; of one that holds nothing once its worker group is lost."""

    @property
    def serving(self) -> bool:
        return self._client is not None and not self._client.lost

    @property
    def has_draft(self) -> bool:
        return self.serving and self._draft_incarnation > 0

    @property
    def num_calls(self) -> int:
        return self._client.num_calls if self._client else 0

    @property
    def group(self) -> WorkerGroup | None:
        return self._group

    async def start(self) -> None:
        """The first worker group. Raises WorkerGroupError if it does not start: the first start is not retried."""
        await self._start_group()
        self._watch = asyncio.create_task(self._keep_alive())

    async def wait_failed(self) -> None:
        """Returns never; raises WorkerGroupError when the service does not come back: too many starts in a row have
        failed."""
        assert self._watch is not None
        await asyncio.shield(self._watch)

    async def stop(self) -> None:
        """End every process. Calls still in flight end with UNAVAILABLE."""
        self._end()
        tasks = [task for task in (self._watch, self._draft_start) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._detach("the service has stopped")
        if self._group is not None:
            await asyncio.to_thread(self._group.stop)

    def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """See `Backend.generate`. Answers of the target's own draws survive the loss of the worker group."""
        return resuming(request, self._ask, self._is_back)

    def _ask(self, request: Request) -> AsyncGenerator[Output, None]:
        client = self._ready()
        self._quarantine.check(request)
        return client.generate(request)

    async def _is_back(self) -> None:
        """Until the next worker group serves. Raises Unavailable if there will be none."""
        while not self.serving:
            self._changed.clear()
            if self._over:
                raise Unavailable("the service has stopped; try again later, or elsewhere")
            await self._changed.wait()

    def _ready(self) -> CoordinatorClient:
        if self._client is None:
            raise Unavailable("the service is starting; try again in a few seconds")
        return self._client

    async def _start_group(self) -> None:
        self.incarnation += 1
        self._group = WorkerGroup(self._config, self.pair, self.incarnation)
        looking = asyncio.create_task(self._follow_start(self._group))
        try:
            await asyncio.to_thread(self._group.start)
        finally:
            looking.cancel()
        client = CoordinatorClient(self._group.address, self._group.secret, self._step, self._lost)
        try:
            await client.attached(self._config.link_timeout)
        except Unavailable as error:
            await client.close()
            raise WorkerGroupError(f"the worker group did not start: {error}") from error
        self._client, self._heard = client, time.monotonic()
        self._draft_incarnation, self._in_flight = self.incarnation, None
        self._changed.set()
        logger.info("serving: epoch %d", self.incarnation)
        self._on_health(True, True)

    async def _follow_start(self, group: WorkerGroup) -> None:
        """Say how far it is, for as long as it starts."""
        last, logged = None, 0.0
        while self._on_start is not None:
            progress = await asyncio.to_thread(group.progress)
            if progress != last:
                self._on_start(progress)
                if time.monotonic() - logged > LOG_SECONDS:
                    logger.info("starting: %s", progress)
                    logged = time.monotonic()
                last = progress
            await asyncio.sleep(LOOK_SECONDS)

    async def _keep_alive(self) -> None:
        failed = 0
        while True:
            try:
                if self._client is None:
                    await asyncio.sleep(BACKOFF_SECONDS[min(failed, len(BACKOFF_SECONDS) - 1)])
                    await self._start_group()
                    failed = 0
                lost, in_flight = not self.serving, self._in_flight
                assert self._group is not None
                await asyncio.to_thread(self._group.check, CHECK_SECONDS)
                if in_flight is not None and not lost:  # and no process has ended: one is silent, or the link broke
                    raise WorkerGroupError("the coordinator has lost the draft", draft=True)
                if lost:  # and no process has died: it was silent for too long, and its requests are gone
                    raise WorkerGroupError("the connection to the coordinator broke")
                if (silence := time.monotonic() - self._heard) > self._config.link_timeout + SILENCE_SECONDS:
                    raise WorkerGroupError(f"the coordinator has been silent for {silence:.0f} s")
            except Exception as error:  # the service must recover, whatever the error
                if isinstance(error, WorkerGroupError) and error.draft and self.serving:
                    try:
                        await self._detach_draft(error)
                        continue
                    except WorkerGroupError as more:
                        error = more
                failed += self._client is None
                await self._end_group(error)
                if failed >= self._config.max_failed_starts:
                    self._end()
                    raise WorkerGroupError(
                        f"{failed} starts in a row have failed, the last one because: {error}"
                    ) from error

    async def _detach_draft(self, error: WorkerGroupError) -> None:
        """The target decodes alone until another draft has joined. Raises WorkerGroupError if that or the coordinator
        is lost, too."""
        group, client = self._group, self._client
        assert group is not None and client is not None
        await asyncio.to_thread(group.probe)
        logger.error("%s; the target decodes alone", error)
        if error.fault:
            self._quarantine.group_failed(client.requests if self._in_flight is None else self._in_flight)
        self._draft_incarnation, self._in_flight = 0, None
        self._on_health(False, True)
        # Calls that wait for a draft that hangs continue once it is killed.
        await asyncio.to_thread(group.end_draft)
        self._draft_start = asyncio.create_task(self._restart_draft(group))

    async def _restart_draft(self, group: WorkerGroup) -> None:
        """Other failures meanwhile are handled by `_keep_alive`."""
        try:
            await asyncio.to_thread(group.detach_draft)
        except WorkerGroupError as error:
            logger.error("%s", error)
        for failed in range(self._config.max_failed_starts):
            await asyncio.sleep(BACKOFF_SECONDS[min(failed, len(BACKOFF_SECONDS) - 1)])
            self.incarnation += 1
            incarnation = self.incarnation
            try:
                await asyncio.to_thread(group.start_draft, incarnation)
            except WorkerGroupError as error:
                logger.error("%s", error)
            else:
                self._draft_incarnation = incarnation
                logger.info("the draft is back: epoch %d", incarnation)
                self._on_health(True, True)
                return
        logger.error(
            "%d starts of the draft in a row have failed; the target stays alone", self._config.max_failed_starts
        )

    async def _end_group(self, error: Exception) -> None:
        if not isinstance(error, WorkerGroupError):
            logger.exception("unexpected error", exc_info=error)
        logger.error("%s; the worker group of epoch %d ends", error, self.incarnation)
        client = self._client
        if self._draft_start is not None:
            self._draft_start.cancel()
        await self._detach(f"a process of the service has ended ({error}); it is starting again")
        if client is not None and isinstance(error, WorkerGroupError) and error.fault:
            self._quarantine.group_failed(client.interrupted)
        assert self._group is not None
        await asyncio.to_thread(self._group.kill)

    def _end(self) -> None:
        self._over = True
        self._changed.set()

    async def _detach(self, why: str) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.fail(why)
            await client.close()

    def _lost(self) -> None:
        """Nothing is held any more; its last numbers would otherwise stand until the next worker group's first step."""
        if total := self.stats.pages_total:  # else no step has come
            nothing = dict.fromkeys(total, 0)
            room = EngineStats(
                slots_free=self.pair.engine.max_slots, pages_used=nothing, pages_total=total, pages_leaked=nothing
            )
            self._step(EngineStep(stats=room))
        self._draft_incarnation, self._in_flight = 0, None
        self._on_health(False, False)

    def _step(self, step: EngineStep) -> None:
        self._heard = time.monotonic()
        if step.lost_draft and step.lost_draft == self._draft_incarnation and self._in_flight is None:
            assert self._client is not None
            self._in_flight = self._client.requests
            self._on_health(False, True)
        self.stats = step.stats
        self._on_step(step)
