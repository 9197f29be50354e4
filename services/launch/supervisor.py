"""Keeps a worker group alive and serves as the backend in front of it. Only this module decides what happens when a
process dies.

A lost draft costs speed: its processes are ended and start again beside the target, which meanwhile decodes alone the
requests that need no draft. Requests that need the draft end with UNAVAILABLE, both those in flight and new ones.

If any other process dies, or a draft whose link to the target cannot be made again, the worker group is lost: every
process is ended, and a new worker group starts. Until it has warmed up, new requests are refused with UNAVAILABLE.
Requests in flight end with UNAVAILABLE if they need the draft (`smc`, `draft`). The others (`exact`, `target`) wait for
the new worker group and are resumed from where their answers broke off. Their tokens are the target's own draws, so the
same seed draws the same tokens whatever else is in the batch. Every start, of a worker group or of a draft, has the
next incarnation.

A request is quarantined for a while if it was the only one when a worker group failed. A request that ran beside others
is not: resumed answers return together and would be quarantined together."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from services.backend import RequestFailed, ServingPair, StartProgress, Unavailable
from services.coordinator.client import CoordinatorClient
from services.coordinator.messages import EngineStep
from services.launch.config import WorkerGroupConfig, WorkerGroupError
from services.launch.worker_group import WorkerGroup
from smc.api.request import Answer, FinishReason, Output, Particle, Request
from smc.api.sampling_params import Method
from smc.scheduler.stats import EngineStats

REMEMBERED = 1000
"""Maximum number of quarantined requests; the oldest are forgotten first."""
FORGOTTEN = 600.0
"""Seconds after which a quarantined request is accepted again."""
RESUMED = (Method.EXACT, Method.TARGET)
MOST = 3
"""Maximum number of times that one answer is resumed: a request that is lost more often may itself make the worker
group fail."""
logger = logging.getLogger(__name__)
Generate = Callable[[Request], AsyncGenerator[Output, None]]
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


async def resuming(
    request: Request, ask: Generate, is_back: Callable[[], Awaitable[None]]
) -> AsyncGenerator[Output, None]:
    """Yield the updates of a request until its answer, across losses of the worker group. `ask` submits the request;
    `is_back` waits until `ask` works again, and raises Unavailable if it never will. Raises the errors of `ask`;
    Unavailable if the worker group is lost and the request cannot be resumed."""
    if request.params.method not in RESUMED:
        async with aclosing(ask(request)) as updates:
            async for output in updates:
                yield output
        return
    arrived = time.monotonic() - request.waited
    if request.params.seed is None:
        request = replace(request, params=replace(request.params, seed=secrets.randbits(63)))
    given = _ReplayCursor()
    for left in reversed(range(MOST + 1)):
        try:
            async with aclosing(ask(replace(request, waited=time.monotonic() - arrived))) as updates:
                given.begin()
                async for output in updates:
                    if (more := given.more(output)) is not None:
                        yield more
            return
        except Unavailable as error:
            if isinstance(error, _AnswerDiffers) or not left:
                raise
            logger.warning("request %s is submitted again: %s", request.request_id, error)
        await is_back()


class _AnswerDiffers(Unavailable):
    """The resumed answer differs from the part that was already delivered."""


class _ReplayCursor:
    """Records the delivered part of an answer. When the answer is decoded again, this part is compared and left out."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._pieces: list[str] = []
        self.begin()

    def begin(self) -> None:
        """Expect the answer once more from its beginning."""
        self._text = "".join(self._pieces)
        self._pieces = [self._text]
        self._come, self._text_come = 0, 0
        """Numbers of tokens and of characters that have arrived since `begin`."""

    def more(self, output: Output) -> Output | None:
        """Return the part of this update that has not been delivered; None if there is none. Raises _AnswerDiffers if
        the update contradicts the delivered part."""
        known = self._tokens[self._come : self._come + len(output.tokens)]
        known_text = self._text[self._text_come : self._text_come + len(output.text)]
        if list(output.tokens[: len(known)]) != known or output.text[: len(known_text)] != known_text:
            raise _AnswerDiffers(
                "the service was lost, and decoding again gave a different answer; send the request again"
            )
        self._come += len(output.tokens)
        self._text_come += len(output.text)
        tokens, text = output.tokens[len(known) :], output.text[len(known_text) :]
        logprobs = output.logprobs[len(known) :]
        self._tokens.extend(tokens)
        self._logprobs.extend(logprobs)
        self._pieces.append(text)
        if output.answer is None and not tokens and not text:
            return None
        answer = output.answer and self._whole(output.answer)
        return replace(output, tokens=tokens, text=text, answer=answer, logprobs=logprobs)

    def _whole(self, answer: Answer) -> Answer:
        """Add the delivered log-probabilities to the answer. If its time ran out before it reached the end of the
        delivered part, replace its tokens and text with the delivered ones."""
        if answer.logprobs is not None or self._logprobs:
            answer = replace(answer, logprobs=tuple(self._logprobs))
        missing = len(self._tokens) - len(answer.tokens)
        if missing <= 0:
            return answer
        reason = FinishReason.TIME_BUDGET if answer.finish_reason is FinishReason.QUEUE_TIME else answer.finish_reason
        top_logprobs = None if answer.top_logprobs is None else (*answer.top_logprobs, *[()] * missing)
        tokens, text = tuple(self._tokens), "".join(self._pieces)
        particles = None if answer.particles is None else (Particle(tokens, text, reason, 1.0),)
        return replace(
            answer,
            tokens=tokens,
            text=text,
            finish_reason=reason,
            top_logprobs=top_logprobs,
            particles=particles,
        )


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
        """`on_health` is called whenever the draft or the target comes or goes, with two flags: whether there is a
        draft, and whether there is a target. With a target, the service decodes. `on_step` is called with every engine
        step, `on_start` with the progress of the start of a worker group."""
        self._config, self.pair = config, pair
        self._on_health, self._on_step, self._on_start = on_health, on_step, on_start
        self.group: WorkerGroup | None = None
        self._client: CoordinatorClient | None = None
        self._watch: asyncio.Task | None = None
        self._quarantine = Quarantine()
        self._changed = asyncio.Event()
        """Set when a worker group serves, or when no other worker group will be started."""
        self._over = False
        """No other worker group will be started."""
        self._heard = 0.0
        """Time (`time.monotonic`) of the engine's last step."""
        self._draft_incarnation = 0
        """Incarnation of the current draft; 0 if there is none."""
        self._in_flight: list[Request] | None = None
        """Requests that were in flight when the coordinator reported the loss of the draft; None if it has reported no
        loss that is still to be handled."""
        self._draft_start: asyncio.Task | None = None
        self.incarnation = 0
        self.stats = EngineStats()
        """Statistics of the engine's last step; once the worker group is lost, those of an engine that holds
        nothing."""

    @property
    def serving(self) -> bool:
        return self._client is not None and not self._client.lost

    @property
    def has_draft(self) -> bool:
        return self.serving and self._draft_incarnation > 0

    async def start(self) -> None:
        """Start the first worker group. Raises WorkerGroupError if it does not start: the first start is not
        retried."""
        await self._start_group()
        self._watch = asyncio.create_task(self._keep_alive())

    async def wait_failed(self) -> None:
        """Wait until the service cannot come back, since too many starts in a row have failed. Then raises
        WorkerGroupError; never returns."""
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
        if self.group is not None:
            await asyncio.to_thread(self.group.stop)

    def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """See `Backend.generate`. Answers that consist of the target's own draws survive the loss of the worker
        group."""
        return resuming(request, self._ask, self._is_back)

    def _ask(self, request: Request) -> AsyncGenerator[Output, None]:
        if self._client is None:
            raise Unavailable("the service is starting; try again in a few seconds")
        self._quarantine.check(request)
        return self._client.generate(request)

    async def _is_back(self) -> None:
        """Wait until the next worker group serves. Raises Unavailable if there will be none."""
        while not self.serving:
            self._changed.clear()
            if self._over:
                raise Unavailable("the service has stopped; try again later, or elsewhere")
            await self._changed.wait()

    async def _start_group(self) -> None:
        self.incarnation += 1
        self.group = WorkerGroup(self._config, self.pair, self.incarnation)
        looking = asyncio.create_task(self._follow_start(self.group))
        try:
            await asyncio.to_thread(self.group.start)
        finally:
            looking.cancel()
        client = CoordinatorClient(self.group.address, self.group.secret, self._step, self._lost)
        try:
            await client.attached(self._config.link_timeout)
        except Unavailable as error:
            await client.close()
            raise WorkerGroupError(f"the worker group did not start: {error}") from error
        self._client, self._heard = client, time.monotonic()
        self._draft_incarnation, self._in_flight = self.incarnation, None
        self._changed.set()
        logger.info("serving: incarnation %d", self.incarnation)
        self._on_health(True, True)

    async def _follow_start(self, group: WorkerGroup) -> None:
        """Report the progress of a start, until this task is cancelled."""
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
                assert self.group is not None
                await asyncio.to_thread(self.group.check, CHECK_SECONDS)
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
                failed += self._client is None
                await self._end_group(error)
                if failed >= self._config.max_failed_starts:
                    self._end()
                    raise WorkerGroupError(
                        f"{failed} starts in a row have failed, the last one because: {error}"
                    ) from error

    async def _detach_draft(self, error: WorkerGroupError) -> None:
        """Let the target decode alone until another draft has joined. Raises WorkerGroupError if the target or the
        coordinator is lost, too."""
        group, client = self.group, self._client
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
        """Start the draft again, repeatedly if starts fail. Other failures meanwhile are handled by `_keep_alive`."""
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
                logger.info("the draft is back: incarnation %d", incarnation)
                self._on_health(True, True)
                return
        logger.error(
            "%d starts of the draft in a row have failed; the target keeps decoding alone",
            self._config.max_failed_starts,
        )

    async def _end_group(self, error: Exception) -> None:
        if not isinstance(error, WorkerGroupError):
            logger.exception("unexpected error", exc_info=error)
        logger.error("%s; the worker group of incarnation %d ends", error, self.incarnation)
        client = self._client
        if self._draft_start is not None:
            self._draft_start.cancel()
        await self._detach(f"a process of the service has ended ({error}); it is starting again")
        if client is not None and isinstance(error, WorkerGroupError) and error.fault:
            self._quarantine.group_failed(client.interrupted)
        assert self.group is not None
        await asyncio.to_thread(self.group.kill)

    def _end(self) -> None:
        self._over = True
        self._changed.set()

    async def _detach(self, why: str) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.fail(why)
            await client.close()

    def _lost(self) -> None:
        """Report the loss of the worker group. Its statistics are reset, or its last ones would stand until the next
        worker group's first step."""
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
