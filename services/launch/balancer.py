"""The service's backend: sends each request to one of the worker groups, and resumes answers whose worker group was
lost.

With several worker groups, a request goes to the one that holds most of its prompt in its prefix cache, else to the one
with the least load (`ranked`). The limits of the queue hold over all of them: each has its share of the queue, and a
request that finds one share full goes to the next worker group. If a worker group is lost, `exact` and `target`
requests in flight go on at another one at once, or at the first one that comes back; the others end with UNAVAILABLE.
Requests of other worker groups are not affected."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from services.backend import START_STEPS, DraftUnavailable, ServingPair, StartProgress, Unavailable
from services.coordinator.messages import EngineStep
from services.launch.config import WorkerGroupConfig, WorkerGroupError
from services.launch.prefix_index import MAX_TOKENS, PrefixIndex, index_keys
from services.launch.resume import resuming
from services.launch.supervisor import Quarantine, Supervisor
from smc.api.request import Output, Request
from smc.api.sampling_params import Method
from smc.memory.prefix_keys import BLOCK
from smc.scheduler.admission import QueueFull
from smc.types import ModelRole

PREFIX_SHARE, PREFIX_TOKENS = 0.5, 64
"""Least share of a prompt, and least number of its tokens, that a worker group must hold to be preferred to one with
less load."""
IMBALANCE = 0.125
"""Share of its slots by which the load of a worker group that holds a prompt may exceed the least load."""
NEEDS_DRAFT = (Method.SMC, Method.DRAFT)
"""Methods that a worker group without a draft refuses."""


@dataclass(frozen=True)
class Candidate:
    """A worker group that may get a request."""

    has_draft: bool
    load: int
    """Slots that its requests in flight need at least."""
    last_sent: int
    """Number of the last request that it was sent, in order of all requests; 0: none."""
    held: int
    """Tokens of the prompt that its prefix cache holds."""


def ranked(candidates: Mapping[int, Candidate], request: Request, max_slots: int) -> list[int]:
    """Return the numbers of the worker groups, best first for this request. `max_slots`: slots of each worker group."""
    method, slots = request.params.method, _slots(request)
    most_held = max(one.held for one in candidates.values())
    enough = most_held >= max(PREFIX_TOKENS, PREFIX_SHARE * min(len(request.prompt), MAX_TOKENS))
    least_load = min(one.load for one in candidates.values())

    def cost(number: int) -> tuple[bool, bool, bool, bool, int, int]:
        one = candidates[number]
        holds_most = enough and one.held == most_held
        return (
            method in NEEDS_DRAFT and not one.has_draft,
            one.load + slots > max_slots,
            method is Method.EXACT and not one.has_draft,
            not (holds_most and one.load <= least_load + IMBALANCE * max_slots),
            one.load,
            one.last_sent,
        )

    return sorted(candidates, key=cost)


class Balancer:
    """A `services.backend.Backend` over worker groups that may be lost and come back. Needs Ray to be connected. Use it
    in one asyncio loop."""

    def __init__(
        self,
        config: WorkerGroupConfig,
        pair: ServingPair,
        count: int = 1,
        *,
        on_health: Callable[[int, bool, bool], None] = lambda number, draft, target: None,
        on_step: Callable[[int, EngineStep], None] = lambda number, step: None,
        on_start: Callable[[StartProgress], None] | None = None,
    ) -> None:
        """`count`: number of worker groups. `on_health` and `on_step` are those of `Supervisor`, called with the number
        of the worker group first. `on_start` is called with the progress of a start, while no worker group serves."""
        self._on_health, self._on_start = on_health, on_start
        self._max_starts = config.max_failed_starts
        self._changed = asyncio.Event()
        """Set when a worker group serves, or when no worker group will be started any more."""
        self._some_started = asyncio.Event()
        """Set when the first start of a worker group has succeeded."""
        self._over = False
        """No worker group will be started any more."""
        self._progress: dict[int, StartProgress] = {}
        self._loads = [0] * count
        """Slots that the requests in flight at each worker group need at least."""
        self._numbers = itertools.count(1)
        self.last_sent = [0] * count
        """Number of the last request that each worker group was sent, in order of all requests."""
        self._indexes = [PrefixIndex() for _ in range(count)]
        self._max_slots, self._has_cache = pair.engine.max_slots, pair.engine.prefix_cache and count > 1
        self._quarantine = Quarantine()
        if count > 1:  # ranks may be on any host, and every round needs the coordinator
            config = replace(config, near_target=True)
        self.groups = [
            Supervisor(
                config,
                _with_share(pair, number, count),
                self._quarantine,
                name=f"worker group {number}" if count > 1 else "",
                on_health=partial(self._health, number),
                on_step=partial(on_step, number),
                on_start=partial(self._starting, number) if on_start is not None else None,
                may_give_up=self._give_up,
            )
            for number in range(count)
        ]

    @property
    def serving(self) -> bool:
        """Whether any worker group serves."""
        return any(group.serving for group in self.groups)

    async def start(self) -> None:
        """Start all worker groups; return when the first start of each has ended. The first one that has warmed up
        serves requests at once. A worker group whose first start failed is started again, like one that is lost later.
        Raises WorkerGroupError if no first start succeeds."""
        starts = [asyncio.create_task(self._start(group)) for group in self.groups]
        try:
            await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()

    async def wait_failed(self) -> None:
        """Wait until the service cannot come back, since too many starts of every worker group have failed in a row.
        Then raises WorkerGroupError; never returns."""
        await asyncio.gather(*(group.wait_failed() for group in self.groups))

    async def stop(self) -> None:
        """End every process. Calls still in flight end with UNAVAILABLE."""
        self._end()
        await asyncio.gather(*(group.stop() for group in self.groups))

    def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """See `Backend.generate`. Answers that consist of the target's own draws survive the loss of their worker
        group."""
        return resuming(request, self._ask, self._is_back)

    async def _ask(self, request: Request) -> AsyncGenerator[Output, None]:
        """Yield the updates of a request from the best worker group whose queue is not full and that has the draft, if
        the request needs it."""
        keys = index_keys(request.prompt, request.cache_salt) if self._has_cache else []
        full: QueueFull | None = None
        no_draft: DraftUnavailable | None = None
        for number in self._ranked(request, keys):
            try:
                client = self.groups[number].client
                self._quarantine.check(request)
                with self._sending(number, request, keys):
                    async with aclosing(client.generate(request)) as updates:
                        async for output in updates:
                            self._remember(number, request, output)
                            yield output
                return
            except QueueFull as error:
                full = error
            except DraftUnavailable as error:
                no_draft = error
        if full is None:
            assert no_draft is not None
            raise no_draft
        if len(self.groups) == 1:
            raise full
        serve = f"{sum(group.serving for group in self.groups)} of {len(self.groups)}"
        raise QueueFull(f"the queues of all worker groups that serve ({serve}) are full, of one of them: {full}")

    def _ranked(self, request: Request, keys: Sequence[bytes]) -> list[int]:
        serving = [number for number, group in enumerate(self.groups) if group.serving]
        if len(serving) < 2:
            return serving or [0]  # which says why it does not serve
        candidates = {
            number: Candidate(
                self.groups[number].has_draft,
                self._loads[number],
                self.last_sent[number],
                self._indexes[number].leading(keys) * BLOCK,
            )
            for number in serving
        }
        return ranked(candidates, request, self._max_slots)

    @contextmanager
    def _sending(self, number: int, request: Request, keys: Sequence[bytes]) -> Iterator[None]:
        """Count a request as load of a worker group, and its prompt as held there unless the worker group refuses
        it."""
        slots, new = _slots(request), self._indexes[number].missing(keys)
        self._loads[number] += slots
        self.last_sent[number] = next(self._numbers)
        self._hold(number, keys)
        try:
            yield
        except (QueueFull, DraftUnavailable):
            self._indexes[number].remove(new)
            raise
        finally:
            self._loads[number] -= slots

    def _remember(self, number: int, request: Request, output: Output) -> None:
        """Count an answer as held: the next prompt of a chat begins with the last one and its answer."""
        if self._has_cache and output.answer is not None:
            self._hold(number, index_keys((*request.prompt, *output.answer.tokens), request.cache_salt))

    def _hold(self, number: int, keys: Sequence[bytes]) -> None:
        self._indexes[number].add(keys, self.groups[number].stats.pages_total.get(ModelRole.TARGET, 0))

    async def _is_back(self) -> None:
        """Wait until a worker group serves. Raises Unavailable if none will."""
        for group in self.groups:
            await group.settled()
        while not self.serving:
            self._changed.clear()
            if self._over:
                raise Unavailable("the service has stopped; try again later, or elsewhere")
            await self._changed.wait()

    async def _start(self, group: Supervisor) -> None:
        try:
            await group.start()
        except Exception as error:  # of whatever kind, it is one worker group's
            if not self._some_started.is_set() and all(one.failed_starts for one in self.groups):
                if isinstance(error, WorkerGroupError) and group.name:
                    raise WorkerGroupError(f"{group.name}: {error}") from error
                raise
            await group.end_failed_start(error)
            await self._some_started.wait()
            group.start_again()
        else:
            self._some_started.set()

    def _health(self, number: int, draft: bool, target: bool) -> None:
        if target:
            self._changed.set()
        else:
            self._indexes[number].clear()
        self._progress.pop(number, None)
        self._on_health(number, draft, target)

    def _starting(self, number: int, progress: StartProgress | None) -> None:
        """Report the progress of the worker group that will serve first. None: a start has failed."""
        if progress is None:
            self._progress.pop(number, None)
        else:
            self._progress[number] = progress
        if self._on_start is not None and self._progress and not self.serving:
            self._on_start(max(self._progress.values(), key=_advance))

    def _give_up(self) -> bool:
        """Return whether every worker group has failed to start too often; then the service cannot come back."""
        if any(group.failed_starts < self._max_starts for group in self.groups):
            return False
        self._end()
        return True

    def _end(self) -> None:
        self._over = True
        self._changed.set()


def _with_share(pair: ServingPair, number: int, count: int) -> ServingPair:
    """Return the pair as one of `count` worker groups serves it: with its share of the queue."""

    def share(total: int | None) -> int | None:
        return None if total is None else max(1, total // count + (number < total % count))

    requests, pages = pair.engine.max_queue, pair.engine.max_queue_pages
    return replace(pair, engine=replace(pair.engine, max_queue=share(requests), max_queue_pages=share(pages)))


def _slots(request: Request) -> int:
    """Slots that a request needs at least: exact decoding drafts fewer rows where there are many requests."""
    return request.params.least_rows * request.params.slots_per_row


def _advance(progress: StartProgress) -> tuple[int, int, int]:
    return START_STEPS.index(progress.step), min(progress.percent.values(), default=0), progress.warmed or 0
