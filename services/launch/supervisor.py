"""Keeps one worker group alive. Only this module decides what happens when a process dies; it knows nothing about other
worker groups.

A lost draft costs speed: its processes are ended and start again beside the target, which meanwhile decodes alone the
requests that need no draft. Requests that need the draft end with UNAVAILABLE, both those in flight and new ones.

If any other process dies, or a draft whose link to the target cannot be made again, the worker group is lost: every
process is ended, and a new worker group starts. Requests in flight end with UNAVAILABLE, and so do new ones until it
has warmed up; `services.launch.balancer` resumes those that can be resumed. Every start, of a worker group or of a
draft, has the next incarnation.

A request is quarantined for a while if it was the only one when a worker group failed. A request that ran beside others
is not: resumed answers return together and would be quarantined together."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from services.backend import RequestFailed, ServingPair, StartProgress, Unavailable
from services.coordinator.client import CoordinatorClient
from services.coordinator.messages import EngineStep
from services.launch.config import WorkerGroupConfig, WorkerGroupError
from services.launch.worker_group import WorkerGroup
from smc.api.request import Request
from smc.scheduler.stats import EngineStats

REMEMBERED = 1000
"""Maximum number of quarantined requests; the oldest are forgotten first."""
FORGOTTEN = 600.0
"""Seconds after which a quarantined request is accepted again."""
logger = logging.getLogger(__name__)
CHECK_SECONDS = 0.5
"""Length of one wait for the end of a process, before the next wait begins. An end is noticed at once."""
SILENCE_SECONDS = 5.0
"""Time beyond the link's timeout after which a silent coordinator counts as lost. The coordinator sees more, so it may
report the cause first."""
LOOK_SECONDS, LOG_SECONDS = 0.5, 10.0
"""Time between two looks at the progress of a start, and least time between two log lines about it."""
BACKOFF_SECONDS = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Delay before the next attempt to start a worker group or a draft, by the number of attempts that have failed in a
row."""


MAX_THREADS = 8
"""Threads of one supervisor: more than calls that can wait at a time, or ending a worker group might wait for the start
that it is to end."""
T = TypeVar("T")


class Quarantine:
    """Remembers the requests that ran alone when a worker group failed, and refuses them for a while. A request is
    identified by its contents, without its id and its seed."""

    def __init__(self) -> None:
        self._failed: OrderedDict[bytes, float] = OrderedDict()

    def group_failed(self, requests: Sequence[Request]) -> None:
        """Record that a worker group has failed with these requests in flight."""
        if len(requests) != 1:
            return
        key = _key(requests[0])
        self._failed.pop(key, None)
        self._failed[key] = time.monotonic()
        if len(self._failed) > REMEMBERED:
            self._failed.popitem(last=False)

    def check(self, request: Request) -> None:
        """Raise RequestFailed if the request is quarantined."""
        failed = self._failed.get(_key(request)) if self._failed else None
        if failed is not None and time.monotonic() - failed < FORGOTTEN:
            raise RequestFailed(
                "the service failed a short while ago while it decoded only this request, and refuses it for now; "
                "report it"
            )


def _key(request: Request) -> bytes:
    """Hash the contents of a request. The seed is left out, since a request without one gets a new seed each time it is
    submitted."""
    params = replace(request.params, seed=None)
    return hashlib.blake2b(repr((request.prompt, request.negative_prompt, params)).encode(), digest_size=16).digest()


class _NamingLogger(logging.LoggerAdapter):
    """Begins every message with the name of a worker group."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"{self.extra['name']}: {msg}" if self.extra and self.extra["name"] else msg, kwargs


class Supervisor:
    """Starts a worker group, and starts it again whenever it is lost. Needs Ray to be connected."""

    def __init__(
        self,
        config: WorkerGroupConfig,
        pair: ServingPair,
        quarantine: Quarantine | None = None,
        *,
        name: str = "",
        on_health: Callable[[bool, bool], None] = lambda draft, target: None,
        on_step: Callable[[EngineStep], None] = lambda step: None,
        on_start: Callable[[StartProgress | None], None] | None = None,
        may_give_up: Callable[[], bool] = lambda: True,
    ) -> None:
        """`quarantine`: shared by all worker groups of a service. `name`: of the worker group, for the log and the
        names of its processes; empty if there is only one. `on_health` is called whenever the draft or the target comes
        or goes, with two flags: whether there is a draft, and whether there is a target. With a target, the worker
        group decodes. `on_step` is called with every engine step, `on_start` with the progress of a start, and with
        None when one has failed. `may_give_up`: asked after `max_failed_starts` failed starts in a row, and after each
        further one."""
        self._config, self.pair, self.name = config, pair, name
        self._on_health, self._on_step, self._on_start = on_health, on_step, on_start
        self._may_give_up = may_give_up
        self._log = _NamingLogger(logger, {"name": name})
        self.group: WorkerGroup | None = None
        self._threads = ThreadPoolExecutor(MAX_THREADS, "supervisor")
        """Starts take minutes and checks never end, so they take no threads of the loop."""
        self._client: CoordinatorClient | None = None
        self._watch: asyncio.Task | None = None
        self._quarantine = quarantine or Quarantine()
        self._heard = 0.0
        """Time (`time.monotonic`) of the engine's last step."""
        self._draft_incarnation = 0
        """Incarnation of the current draft; 0 if there is none."""
        self._in_flight: list[Request] | None = None
        """Requests that were in flight when the loss of the draft became known; None if no loss is still to be
        handled."""
        self._draft_start: asyncio.Task | None = None
        self._settled = asyncio.Event()
        """Not set between the loss of the worker group and the decision whether a request is to blame."""
        self._settled.set()
        self.draft_degree = 0
        """Number of ranks among which the draft is divided, at the last start; 0 before the first one."""
        self.failed_starts = 0
        """Starts of the worker group in a row that have failed."""
        self.incarnation = 0
        self.stats = EngineStats()
        """Statistics of the engine's last step; once the worker group is lost, those of an engine that holds
        nothing."""

    @property
    def serving(self) -> bool:
        return self._client is not None and not self._client.lost

    @property
    def has_draft(self) -> bool:
        return self.serving and self._draft_incarnation > 0 and self._in_flight is None

    async def start(self) -> None:
        """Start the first worker group. Raises WorkerGroupError if it does not start. Then it may be tried again:
        `end_failed_start`, `start_again`."""
        try:
            await self._start_group()
        except Exception:
            self.failed_starts = 1
            raise
        self.start_again()

    async def end_failed_start(self, error: Exception) -> None:
        """Log why `start` failed, and end what it has left."""
        await self._end_group(error)

    def start_again(self) -> None:
        """Keep a worker group alive from now on. Unless one serves, start one after the delay that follows a failed
        start."""
        self._watch = asyncio.create_task(self._keep_alive())

    async def wait_failed(self) -> None:
        """Wait until the worker group is given up, since too many starts in a row have failed. Then raises
        WorkerGroupError; never returns."""
        assert self._watch is not None
        await asyncio.shield(self._watch)

    async def stop(self) -> None:
        """End every process. Calls still in flight end with UNAVAILABLE."""
        tasks = [task for task in (self._watch, self._draft_start) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._detach("the service has stopped")
        if self.group is not None:
            await asyncio.to_thread(self.group.stop)
        self._threads.shutdown(wait=False)

    @property
    def client(self) -> CoordinatorClient:
        """Decodes requests while the worker group runs: those in flight end with Unavailable if it is lost. Raises
        Unavailable while it does not run."""
        if self._client is None:
            raise Unavailable("the service is starting; try again in a few seconds")
        return self._client

    async def settled(self) -> None:
        """If the worker group was just lost, wait until its requests in flight have been quarantined or acquitted. A
        request that may be decoded again elsewhere waits for that, or it could end one worker group after another."""
        await self._settled.wait()

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    async def _start_group(self) -> None:
        self.incarnation += 1
        self.group = WorkerGroup(self._config, self.pair, self.incarnation, self.name)
        looking = asyncio.create_task(self._follow_start(self.group))
        try:
            await self._in_thread(self.group.start)
            client = await self._attach(self.group)
        except Exception:
            if self._on_start is not None:
                self._on_start(None)
            raise
        finally:
            looking.cancel()
        self._client, self._heard, self.draft_degree = client, time.monotonic(), self.group.draft_degree
        self._draft_incarnation, self._in_flight = self.incarnation, None
        self._log.info("serving: incarnation %d", self.incarnation)
        self._on_health(True, True)

    async def _attach(self, group: WorkerGroup) -> CoordinatorClient:
        """Return a client of the coordinator of a worker group that has started."""
        client = CoordinatorClient(group.address, group.secret, self._step, self._lost)
        try:
            await client.attached(self._config.link_timeout)
        except Unavailable as error:
            await client.close()
            raise WorkerGroupError(f"the worker group did not start: {error}") from error
        return client

    async def _follow_start(self, group: WorkerGroup) -> None:
        """Report the progress of a start, until this task is cancelled."""
        last, logged = None, 0.0
        while self._on_start is not None:
            progress = await self._in_thread(group.progress)
            if progress != last:
                self._on_start(progress)
                if time.monotonic() - logged > LOG_SECONDS:
                    self._log.info("starting: %s", progress)
                    logged = time.monotonic()
                last = progress
            await asyncio.sleep(LOOK_SECONDS)

    async def _keep_alive(self) -> None:
        while True:
            try:
                if self._client is None:
                    await asyncio.sleep(BACKOFF_SECONDS[min(self.failed_starts, len(BACKOFF_SECONDS) - 1)])
                    await self._start_group()
                    self.failed_starts = 0
                lost, in_flight = not self.serving, self._in_flight
                assert self.group is not None
                await self._in_thread(self.group.check, CHECK_SECONDS)
                # No process has ended, so in the first case a process is silent or the link broke; in the second the
                # coordinator was silent for too long, and its requests are gone.
                if in_flight is not None and not lost:
                    raise WorkerGroupError("the coordinator has lost the draft", draft=True)
                if lost:
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
                self.failed_starts += self._client is None
                await self._end_group(error)
                if self.failed_starts >= self._config.max_failed_starts and self._may_give_up():
                    raise WorkerGroupError(
                        f"{self.failed_starts} starts in a row have failed, the last one because: {error}"
                    ) from error

    async def _detach_draft(self, error: WorkerGroupError) -> None:
        """Let the target decode alone until another draft has joined. Raises WorkerGroupError if the target or the
        coordinator is lost, too."""
        self._draft_lost()
        group, in_flight = self.group, self._in_flight
        assert group is not None and in_flight is not None
        await self._in_thread(group.probe)
        self._log.error("%s; the target decodes alone", error)
        if error.fault:
            self._quarantine.group_failed(in_flight)
        self._draft_incarnation, self._in_flight = 0, None
        # Calls that wait for a draft that hangs continue once it is killed.
        await self._in_thread(group.end_draft)
        self._draft_start = asyncio.create_task(self._restart_draft(group))

    async def _restart_draft(self, group: WorkerGroup) -> None:
        """Start the draft again, repeatedly if starts fail. Other failures meanwhile are handled by `_keep_alive`."""
        try:
            await self._in_thread(group.detach_draft)
        except WorkerGroupError as error:
            self._log.error("%s", error)
        for failed in range(self._config.max_failed_starts):
            await asyncio.sleep(BACKOFF_SECONDS[min(failed, len(BACKOFF_SECONDS) - 1)])
            self.incarnation += 1
            incarnation = self.incarnation
            try:
                await self._in_thread(group.start_draft, incarnation)
            except WorkerGroupError as error:
                self._log.error("%s", error)
            else:
                self._draft_incarnation = incarnation
                self._log.info("the draft is back: incarnation %d", incarnation)
                self._on_health(True, True)
                return
        self._log.error(
            "%d starts of the draft in a row have failed; the target keeps decoding alone",
            self._config.max_failed_starts,
        )

    async def _end_group(self, error: Exception) -> None:
        if not isinstance(error, WorkerGroupError):
            self._log.exception("unexpected error", exc_info=error)
        self._log.error("%s; the worker group of incarnation %d ends", error, self.incarnation)
        client = self._client
        if self._draft_start is not None:
            self._draft_start.cancel()
        # Before calls end: those that are resumed elsewhere ask the quarantine again.
        if client is not None and isinstance(error, WorkerGroupError) and error.fault:
            self._quarantine.group_failed(client.interrupted if client.lost else client.requests)
        await self._detach(f"a process of the service has ended ({error}); it is starting again")
        assert self.group is not None
        await self._in_thread(self.group.kill)

    async def _detach(self, why: str) -> None:
        client, self._client = self._client, None
        self._settled.set()
        if client is not None:
            client.fail(why)
            await client.close()

    def _lost(self) -> None:
        """Report the loss of the worker group. Its statistics are reset, or its last ones would stand until the next
        worker group's first step."""
        if total := self.stats.pages_total:  # else no step has come
            nothing, numerics = dict.fromkeys(total, 0), self.stats.numerics
            stats = EngineStats(pages_used=nothing, pages_total=total, numerics=numerics, pages_leaked=nothing)
            self._step(EngineStep(stats=stats))
        if self._client is not None:
            self._settled.clear()
        self._draft_incarnation, self._in_flight = 0, None
        self._on_health(False, False)

    def _draft_lost(self) -> None:
        """Report the loss of the draft, unless it is known."""
        if self._in_flight is None:
            assert self._client is not None
            self._in_flight = self._client.requests
            self._on_health(False, True)

    def _step(self, step: EngineStep) -> None:
        self._heard = time.monotonic()
        if step.lost_draft and step.lost_draft == self._draft_incarnation:
            self._draft_lost()
        self.stats = step.stats
        self._on_step(step)
