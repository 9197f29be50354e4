"""The coordinator's process: it connects to the workers, runs the engine and serves the gateway until it is told to
stop. The engine is the same as in one process, but its workers are in other processes, over two links."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from services.coordinator.messages import EngineStep
from services.coordinator.service import CoordinatorServer, EngineLoop
from services.link.base import LinkError
from services.link.connect import Rendezvous, coordinator_end, progress_reporter
from services.link.remote_worker import RemoteModel, RemotePair, RemoteWorker, WorkerFailed
from services.link.store import GroupStore
from smc.api.engine_config import EngineConfig
from smc.calibration.latency import Effort, measure_latency
from smc.calibration.warm_up import (
    UsualSampling,
    first_request,
    rare_requests,
    warm_up,
    warm_up_plans,
    warm_up_prompts,
)
from smc.executor.messages import ModelLost
from smc.model.source import ModelSource
from smc.scheduler.engine import Engine
from smc.scheduler.stats import Timeline
from smc.types import ModelRole, Numerics

REPORT_SECONDS = 1.0
"""Time to wait for a worker's failure report when a link has broken."""

logger = logging.getLogger(__name__)
WATCH_SECONDS = 0.5
"""Time between two checks of the engine's thread."""
MEET_SECONDS = 0.02
"""Time between two checks whether draft and target have a link."""
SLACK_SECONDS = 1.0
"""Time that a step may take beyond the longest wait for a worker."""


@dataclass(frozen=True)
class CoordinatorSpec:
    """The coordinator's start parameters."""

    rendezvous: Rendezvous
    ranks: Mapping[ModelRole, str]
    """Name of the ranks that hold each model."""
    target: ModelSource
    """Source of the target model; its tokenizer serves both models."""
    engine: EngineConfig
    context: int
    timeout: float
    """Longest time in seconds for any answer of a worker, and for a step of the engine."""
    heartbeat: float
    """Seconds between two heartbeats while idle. A worker ends if it receives nothing for too long."""
    warm_up: bool
    """Run all kinds of rounds before serving, so that no request waits for kernels to be compiled."""
    sampling: UsualSampling
    """That of requests which leave it out."""
    timing: Effort | None
    """How thoroughly the latency model is timed before serving; None: not at all."""
    trace: Path | None
    """File for a Chrome trace of all rounds, written when the coordinator stops."""
    outlives_draft: bool
    """If the draft is lost, the target decodes alone until another draft replaces it."""


class RemoteEngine:
    """The engine with its links to the leaders of both models, or to the one leader of ranks that hold both. Once it
    exists, both models have run a round."""

    def __init__(self, spec: CoordinatorSpec) -> None:
        """Returns when every rank has run a round, on GPUs rounds of every kind. Raises LinkError, ValueError, or the
        error that a worker reports."""
        self._spec = spec
        self.timeline = Timeline(trace=spec.trace is not None)
        self._store = spec.rendezvous.store()
        self._rendezvous = dict.fromkeys(ModelRole, spec.rendezvous)
        leaders = {
            name: self._worker(name, spec.rendezvous, self._store, self.timeline)
            for name in dict.fromkeys(spec.ranks.values())
        }
        self.workers = {role: leaders[spec.ranks[role]] for role in ModelRole}
        """The worker that holds each model."""
        self._models = {role: RemoteModel(worker, role, self.numerics(role)) for role, worker in self.workers.items()}
        pages = {role: self.pages(role) for role in ModelRole}
        self.lost_draft = 0
        """Incarnation of the draft that was lost last; 0: none has been lost."""
        self.engine = Engine(
            spec.engine,
            self._models,
            spec.target.tokenizer(),
            executor=RemotePair(self.workers),
            pages=pages,
            context=spec.context,
        )
        try:
            self._warm_up()
        except (LinkError, ModelLost) as error:
            raise self.cause(error) from error

    def stop(self) -> None:
        """Tell the workers to end."""
        for worker in self.leaders:
            worker.stop()

    @property
    def leaders(self) -> list[RemoteWorker]:
        """All workers; one that holds both models once."""
        return list(dict.fromkeys(self.workers.values()))

    @property
    def present(self) -> list[RemoteWorker]:
        """Workers that are not known to be lost."""
        return [worker for worker in self.leaders if not worker.lost]

    def detach_draft(self, why: str) -> list[str]:
        """Make the engine go on without the draft, which is lost. Return the ids of requests that end with it.

        Call it in the engine's thread, as all methods except `connect_draft`, `pages` and `numerics`."""
        draft = self.workers[ModelRole.DRAFT]
        draft.set_lost(why)
        if self.lost_draft == draft.incarnation:
            return []
        self.lost_draft = draft.incarnation
        return self.engine.detach_draft()

    def connect_draft(self, incarnation: int) -> RemoteWorker:
        """Connect to another draft, of this incarnation, which has loaded its weights. It waits, so do not call it in
        the engine's thread. Raises RuntimeError if the draft does not connect."""
        connected = self.workers[ModelRole.DRAFT].incarnation
        if self.lost_draft != connected:
            raise RuntimeError(f"the draft of incarnation {connected} is connected; only a lost draft can be replaced")
        self.workers[ModelRole.DRAFT].close()
        rendezvous = self._rendezvous[ModelRole.DRAFT] = replace(
            self._spec.rendezvous, incarnation=incarnation, start_timeout=self._spec.timeout
        )
        return self._worker(ModelRole.DRAFT, rendezvous, rendezvous.store(), Timeline())

    def target_meets(self, draft: RemoteWorker) -> bool:
        """Return whether the target has a link to the new draft. The first call makes the target open the link. Raises
        LinkError if it cannot be opened in time."""
        return self.workers[ModelRole.TARGET].reconnect(draft.incarnation, self._spec.timeout)

    def pages(self, role: ModelRole) -> int:
        """Return the number of KV pages of the worker that was connected last. Do not call it in the engine's
        thread."""
        return int(self._store.get(self._rendezvous[role].name(f"{self._spec.ranks[role]}/pages")))

    def numerics(self, role: ModelRole) -> Numerics:
        """As `pages`: return what the bits of the model's results depend on."""
        return Numerics(self._store.get(self._rendezvous[role].name(f"{role}/numerics")).decode())

    def attach_draft(self, draft: RemoteWorker, pages: int, numerics: Numerics) -> None:
        """Replace the lost draft with a new one that has a link to the target (`target_meets`)."""
        draft.timeline = self.timeline
        self.workers[ModelRole.DRAFT] = draft
        self._models[ModelRole.DRAFT] = RemoteModel(draft, ModelRole.DRAFT, numerics)
        self.engine.attach_draft(pages)

    def _worker(self, name: str, rendezvous: Rendezvous, store: GroupStore, timeline: Timeline) -> RemoteWorker:
        """Connect to the leader of the ranks `name` of an incarnation."""
        end = coordinator_end(rendezvous, store, name)
        may_be_lost = name == ModelRole.DRAFT and self._spec.outlives_draft
        return RemoteWorker(
            name, end, rendezvous.incarnation, rendezvous.start_timeout, timeline, may_be_lost=may_be_lost
        )

    def cause(self, error: Exception) -> Exception:
        """Return the error that made the engine stop. A worker that fails also breaks the other worker's link, so the
        first error may only be a consequence. Then wait up to `REPORT_SECONDS` for a worker's failure report."""
        if isinstance(error, ModelLost) and isinstance(error.__cause__, Exception):
            error = error.__cause__
        if not isinstance(error, LinkError) or error.began_here:
            return error
        deadline = time.monotonic() + REPORT_SECONDS
        try:
            while time.monotonic() < deadline:
                # A draft that is already known to be lost is not the cause.
                for role in (
                    ModelRole if self.lost_draft < self.workers[ModelRole.DRAFT].incarnation else (ModelRole.TARGET,)
                ):
                    name = self._spec.ranks[role]
                    if what := self._rendezvous[role].failure_report(self._store, name):
                        return WorkerFailed(name, what)
                time.sleep(REPORT_SECONDS / 10)
        except RuntimeError:
            logger.warning("the store in which workers report why they end cannot be reached")
        return error

    def _warm_up(self) -> None:
        """Run a round of both models on every rank, then rounds of every kind; compare clocks, and time the latency
        model."""
        spec = self._spec
        for output in self.engine.run([first_request(spec.engine, spec.context, self.engine.tokenizer.size)]):
            if output.answer and output.answer.error:
                raise LinkError(f"the warm-up round failed: {output.answer.error}")
        if spec.warm_up:
            self._run_dummy_rounds()
        self.engine.check_books()
        self.engine.forget()
        for worker in self.leaders:
            worker.set_clock()
        if spec.timing:
            self._time_models(spec.timing)
        for worker in self.leaders:
            worker.timeout = self._spec.timeout
        self.timeline.forget()

    def _run_dummy_rounds(self) -> None:
        begin = time.monotonic()
        config, context = self._spec.engine, self._spec.context
        plans = warm_up_plans(config, context, usual=self._spec.sampling)
        report = progress_reporter(self._store, self._spec.rendezvous.warmed)
        warm_up(self.engine, plans, rare_requests(config, context, self.engine.tokenizer.size), report)
        # Last, because what was recorded first is released first.
        warm_up_prompts(self.engine)
        logger.info(
            "ran prompts, %d dummy rounds, and requests of rarer kinds, in %.1f s", len(plans), time.monotonic() - begin
        )

    def _time_models(self, effort: Effort) -> None:
        begin = time.monotonic()
        self.engine.latency = latency = measure_latency(self.engine, effort)
        logger.info(
            "timed the models in %.1f s: %s", time.monotonic() - begin, latency or "none, contexts are too short"
        )


class EngineStuck(RuntimeError):
    """A step of the engine does not end."""


class Coordinator:
    """Runs the engine's thread and serves the gateway. Rounds do not involve Ray."""

    def __init__(self, spec: CoordinatorSpec, host: str) -> None:
        """Returns when the engine has warmed up. Raises LinkError, ValueError, or the error that a worker reports."""
        torch.set_num_threads(1)
        self._spec = spec
        self._remote = RemoteEngine(spec)
        self._ping_workers()
        self._remote.timeline.forget()
        self._loop = EngineLoop(
            self._remote.engine,
            self._deliver,
            timeline=self._remote.timeline,
            when_idle=self._ping_workers,
            idle_period=spec.heartbeat,
            on_draft_lost=self._remote.detach_draft,
        )
        self._server = CoordinatorServer(host, spec.rendezvous.secret, self._loop)
        self._loop.start()
        self.address = self._server.address

    def wait(self) -> None:
        """Wait until the engine has stopped. Raises the error that stopped it, if it was not `stop`; EngineStuck if one
        step takes too long."""
        limit = self._spec.timeout + self._spec.heartbeat + SLACK_SECONDS
        while not self._loop.ended.wait(WATCH_SECONDS):
            if self._loop.silence > limit:
                logger.error("the engine has been at one step for more than %g s:\n%s", limit, self._loop.stack())
                raise EngineStuck(f"the engine has been at one step for more than {limit:g} s")
        self._server.close()
        if self._loop.failure is not None:
            raise self._remote.cause(self._loop.failure)

    def stop(self) -> None:
        """End the loop and tell the workers to end. Requests that still run are dropped."""
        self._loop.stop()
        self._remote.stop()
        if self._spec.trace is not None:
            self._remote.timeline.write(self._spec.trace)

    def detach_draft(self) -> None:
        """Make the engine go on without the draft, whose processes have been stopped. Returns once no command to the
        draft is in flight."""
        self._loop.do(lambda: self._loop.detach_draft("its processes have ended")).result(2 * self._spec.timeout)

    def attach_draft(self, incarnation: int) -> None:
        """Connect to the draft of this incarnation; return when it takes part in rounds. Raises RuntimeError if it does
        not connect."""
        remote, timeout = self._remote, self._spec.timeout
        draft = remote.connect_draft(incarnation)

        def have_met() -> bool:
            return self._loop.do(lambda: remote.target_meets(draft)).result(2 * timeout)

        try:
            deadline = time.monotonic() + timeout
            # Waits for the draft happen here, not in the engine's thread, so that the target goes on decoding.
            met = have_met()
            draft.set_clock()
            while not met:
                if time.monotonic() > deadline:
                    raise LinkError(f"draft and target were not connected within {timeout:g} s")
                time.sleep(MEET_SECONDS)
                met = have_met()
            pages, numerics = remote.pages(ModelRole.DRAFT), remote.numerics(ModelRole.DRAFT)
            self._loop.do(lambda: remote.attach_draft(draft, pages, numerics)).result(2 * timeout)
        except Exception:
            draft.close()
            raise

    def _deliver(self, step: EngineStep) -> None:
        self._server.deliver(replace(step, lost_draft=self._remote.lost_draft))
        for side, leaked in step.stats.pages_leaked.items():
            if leaked:
                logger.error(
                    "%d references to KV pages of the %s model are held although no request runs", leaked, side
                )
        for worker in self._remote.present:  # a worker needs heartbeats even while only the other one is busy
            worker.keep_alive(self._spec.heartbeat)
        self._remote.timeline.forget()  # waits between two steps belong to no round

    def _ping_workers(self) -> None:
        """Ping the workers while nothing runs, to notice if one is lost."""
        for worker in self._remote.present:
            worker.ping()
