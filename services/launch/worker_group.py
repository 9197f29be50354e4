"""One incarnation of the worker group: every rank of both models and the coordinator, started together and stopped
together."""

from __future__ import annotations

import contextlib
import logging
import pickle
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import timedelta

import ray
import torch.distributed as dist
from ray.util.placement_group import PlacementGroup

from services.backend import ServingPair, StartProgress
from services.coordinator.process import CoordinatorSpec, EngineStuck
from services.launch import cluster
from services.launch.cluster import WorkerGroupError
from services.launch.config import WorkerGroupConfig, warn_of_few_gpus
from services.link.base import LinkError
from services.link.connect import Rendezvous
from services.workers.process import RankSpec
from smc.calibration.latency import BRIEF, THOROUGH
from smc.model.parallel import Shard
from smc.types import ModelRole


def rank_spec(
    config: WorkerGroupConfig,
    pair: ServingPair,
    rendezvous: Rendezvous,
    role: ModelRole,
    shard: Shard,
    *,
    shares_gpu: bool = False,
) -> RankSpec:
    """`shares_gpu`: ranks of both sides are on one; NCCL takes no two of those."""
    engine, context = pair.engine, pair.context
    return RankSpec(
        rendezvous=rendezvous,
        role=role,
        shard=shard,
        source=config.sources.of_role(role),
        vocabulary=config.sources.target,
        draft_vocab=config.sources.draft_vocab if role == ModelRole.DRAFT else None,
        dtype=config.dtypes[role],
        device=config.device,
        between="cpu" if shares_gpu else config.device,
        width=engine.width(context),
        context=context,
        shares_gpu=shares_gpu,
        vocab_size=pair.tokenizer.size,
        # A worker must outlast a coordinator that waits for the other worker.
        timeout=2 * max(config.link_timeout, config.start_timeout),
        threads=config.threads,
        engine=engine,
        outlives_peer=role == ModelRole.TARGET and config.outlives_draft,
    )


def coordinator_spec(
    config: WorkerGroupConfig, pair: ServingPair, rendezvous: Rendezvous, *, warm_up: bool = True
) -> CoordinatorSpec:
    """`warm_up`: do what a service does before it accepts requests; dummy rounds run only where kernels are
    compiled."""
    compiles, times = config.device == "cuda", warm_up and pair.engine.drafting == "costs"
    return CoordinatorSpec(
        rendezvous=rendezvous,
        target=config.sources.target,
        engine=pair.engine,
        context=pair.context,
        timeout=config.link_timeout,
        heartbeat=config.heartbeat,
        warm_up=warm_up and compiles,
        timing=(THOROUGH if compiles else BRIEF) if times else None,
        trace=config.trace.absolute() if config.trace else None,
        outlives_draft=config.outlives_draft,
    )


LOOK_SECONDS = 0.1
"""Between two looks at whether a draft has loaded its weights."""
ASK_SECONDS = 1.0
"""Between two questions to a process, at least."""
PROBE_SECONDS = 5.0
"""Seconds in which a live process answers a probe, whatever else it does."""

logger = logging.getLogger(__name__)


class WorkerGroup:
    """Not restarted: after a failure a new one is made, with the next incarnation. Only the draft's ranks may be,
    beside the others."""

    def __init__(self, config: WorkerGroupConfig, pair: ServingPair, incarnation: int) -> None:
        self._config, self._pair, self.incarnation = config, pair, incarnation
        self.secret = secrets.token_hex(16)
        self.actors: dict[str, ray.actor.ActorHandle] = {}
        """`coordinator`, `draft0`, `draft1`, .., `target0`, .."""
        self._groups: dict[str, PlacementGroup] = {}
        """By side."""
        self._guard = threading.Lock()
        self._processes: dict[str, ray.ObjectRef] = {}
        """What ranks say of their processes."""
        self._draft_starts = False
        """The caller checks whether it becomes ready or dies."""
        self._ended = False
        """`kill` has been called, maybe in the middle of the start."""
        self._runs: dict[ray.ObjectRef, str] = {}
        self._probes: dict[str, ray.ObjectRef] = {}
        """Liveness probes in flight."""
        self._waited: dict[str, float] = {}
        """Seconds that `check` has waited since then."""
        self._store: dist.TCPStore | None = None
        self._rendezvous: Rendezvous | None = None
        self.address = ""

    def start(self) -> None:
        """Returns when the coordinator serves. Raises WorkerGroupError; then nothing is left of it."""
        try:
            self._start()
        except WorkerGroupError:
            self.kill()
            raise
        except Exception as error:
            self.kill()
            raise WorkerGroupError(f"the worker group did not start: {_first_line(_cause(error))}") from error

    def progress(self) -> StartProgress:
        """How far the start is."""
        with self._guard:
            store, rendezvous, begun = self._store, self._rendezvous, set(self.actors)
        degrees = {role: self._config.degree(role) for role in ModelRole}
        if store is None or rendezvous is None or len(begun - {"coordinator"}) < sum(degrees.values()):
            return StartProgress("reserve")
        percent = {
            role.value: min(_percent(store, rendezvous.loaded(role, rank)) for rank in range(degree))
            for role, degree in degrees.items()
        }
        return StartProgress("load" if min(percent.values()) < 100 else "prepare", percent)

    def check(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for a process to end. Raises WorkerGroupError, naming it, if one has, or if one
        has been silent for `PROBE_SECONDS` of such waits: counted only while this process itself was scheduled."""
        with self._guard:
            runs = {run: name for run, name in self._runs.items() if not (self._draft_starts and _is_draft(name))}
        self._wait_for(list(runs), runs, timeout)
        with self._guard:
            self._look_for_silence({name for name in runs.values() if name in self.actors}, timeout)

    def _look_for_silence(self, names: set[str], waited: float) -> None:
        """Probe whether these processes are alive, periodically."""
        probes = list(self._probes.values())
        answered = set(ray.wait(probes, num_returns=len(probes), timeout=0)[0]) if probes else set()
        for name in names:
            self._waited[name] = self._waited.get(name, 0.0) + waited
            is_silent = name in self._probes and self._probes[name] not in answered
            if is_silent and self._waited[name] > PROBE_SECONDS:
                raise WorkerGroupError(f"{name} does not answer", draft=_is_draft(name) and self._config.outlives_draft)
            if not is_silent and self._waited[name] >= ASK_SECONDS:
                self._probes[name], self._waited[name] = self.actors[name].pid.remote(), 0.0

    def probe(self) -> None:
        """Raises WorkerGroupError if a process other than the draft's has ended, or does not say within `PROBE_SECONDS`
        that it is alive."""
        with self._guard:
            probes: dict[ray.ObjectRef, str] = {
                actor.pid.remote(): name for name, actor in self.actors.items() if not _is_draft(name)
            }
            runs = {run: name for run, name in self._runs.items() if not _is_draft(name)}
        _, silent = ray.wait(list(probes), num_returns=len(probes), timeout=PROBE_SECONDS)
        self._wait_for(list(runs), runs, 0)
        if silent:
            raise WorkerGroupError(f"{probes[silent[0]]} does not answer")

    def end_draft(self) -> None:
        """End its processes now, and give back their place."""
        with self._guard:
            ended = self._take(filter(_is_draft, list(self.actors)), [ModelRole.DRAFT])
        _end(*ended)

    def detach_draft(self) -> None:
        """After `end_draft`: the others go on without it. Raises WorkerGroupError if the coordinator does not say
        so."""
        with self._adding():
            told: ray.ObjectRef = self.actors["coordinator"].detach_draft.remote()
        try:
            ray.get(told, timeout=3 * self._config.link_timeout)
        except ray.exceptions.RayError as error:
            raise WorkerGroupError(
                f"the coordinator does not go on without the draft: {_first_line(_cause(error))}"
            ) from error

    def start_draft(self, incarnation: int) -> None:
        """Another draft, in place of the one that has ended. Returns when requests can use it. Raises
        WorkerGroupError."""
        self._draft_starts = True
        try:
            assert self._rendezvous is not None
            self._start_draft(replace(self._rendezvous, incarnation=incarnation))
        except Exception as error:
            self.end_draft()
            if isinstance(error, WorkerGroupError):
                raise
            raise WorkerGroupError(f"the draft did not start: {_first_line(_cause(error))}") from error
        finally:
            self._draft_starts = False

    def _start_draft(self, rendezvous: Rendezvous) -> None:
        deadline = time.monotonic() + rendezvous.start_timeout
        self._start_side(ModelRole.DRAFT, rendezvous)
        runs = {run: name for run, name in self._runs.items() if _is_draft(name)}
        while (store := self._store) is not None and not store.check([rendezvous.name("draft/pages")]):
            self._wait_for(list(runs), runs, LOOK_SECONDS)
            if time.monotonic() > deadline:
                raise WorkerGroupError(f"the draft was not ready after {rendezvous.start_timeout:g} s")
        with self._adding():
            taken: ray.ObjectRef = self.actors["coordinator"].attach_draft.remote(rendezvous.incarnation)
        self._wait_for([taken, *runs], runs, None)
        ray.get(taken)

    def stop(self, timeout: float = 5.0) -> None:
        """Let every process end by itself, then make sure."""
        with contextlib.suppress(Exception):  # `kill` follows, whatever the error
            ray.get(self.actors["coordinator"].stop.remote(), timeout=timeout)
            ray.wait(list(self._runs), num_returns=len(self._runs), timeout=timeout)
        self.kill()

    def kill(self) -> None:
        """End every process now and give back its place. A start that is under way fails."""
        with self._guard:
            self._ended, self._store = True, None
            ended = self._take(list(self.actors), list(self._groups))
        _end(*ended)

    def _take(
        self, names: Iterable[str], roles: Iterable[str]
    ) -> tuple[list[tuple[ray.actor.ActorHandle, int | None]], list]:
        """Forget processes and places, so as to end them. Processes come with their ids, where those may be needed for
        that."""
        names, runs = set(names), {name: run for run, name in self._runs.items()}
        over = set(ray.wait(list(runs.values()), num_returns=len(runs), timeout=0)[0]) if runs else set()
        actors = []
        for name in names:
            process = self._processes.pop(name, None)
            ended = name not in runs or runs[name] in over
            self._probes.pop(name, None)
            self._waited.pop(name, None)
            actors.append((self.actors.pop(name), None if process is None or ended else cluster.local_pid(process)))
        self._runs = {run: name for run, name in self._runs.items() if name not in names}
        return actors, [self._groups.pop(role) for role in roles if role in self._groups]

    @contextlib.contextmanager
    def _adding(self) -> Iterator[None]:
        """Around whatever `kill` has to end too."""
        with self._guard:
            if self._ended:
                raise WorkerGroupError("the worker group was told to end while it started")
            yield

    def _start(self) -> None:
        config, host = self._config, ray.util.get_node_ip_address()
        limit = timedelta(seconds=config.start_timeout)
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        self._rendezvous = Rendezvous(
            host, self._store.port, self.incarnation, self.secret, config.link, config.start_timeout
        )
        warn_of_few_gpus(config)
        for role in ModelRole:
            self._start_side(role, self._rendezvous)
        beside = None
        if config.near_target:
            beside, _ = ray.get(self._processes[f"{ModelRole.TARGET}0"], timeout=config.start_timeout)
        with self._adding():
            self.actors["coordinator"] = coordinator = cluster.start_coordinator(beside)
            spec = pickle.dumps(coordinator_spec(config, self._pair, self._rendezvous))
            started: ray.ObjectRef = coordinator.start.remote(spec)
        logger.info("epoch %d: waiting until %s are ready", self.incarnation, ", ".join(self.actors))
        if not self._wait_for([started, *self._runs], self._runs, config.start_timeout):
            raise WorkerGroupError(f"the worker group was not ready after {config.start_timeout:g} s")
        self.address = ray.get(started)
        with self._adding():
            self._runs[coordinator.wait.remote()] = "coordinator"

    def _start_side(self, role: ModelRole, rendezvous: Rendezvous) -> None:
        """Every rank of a model begins to load it."""
        config = self._config
        degree, resource, gpus = config.degree(role), config.resource(role), config.device == "cuda"
        with self._adding():
            group = self._groups[role] = cluster.reserve(degree, gpus, resource)
        cluster.wait_for(group, degree, gpus, resource, config.start_timeout)
        for rank in range(degree):
            with self._adding():
                name = f"{role}{rank}"
                self.actors[name] = actor = cluster.start_rank(group, role, rank, gpus)
                self._processes[name] = actor.process.remote()
                spec = pickle.dumps(rank_spec(config, self._pair, rendezvous, role, Shard(rank, degree)))
                self._runs[actor.run.remote(spec)] = name

    def _wait_for(self, some: list[ray.ObjectRef], runs: dict[ray.ObjectRef, str], timeout: float | None) -> bool:
        """Wait until one of these calls has returned; False: none has. Raises WorkerGroupError if a process of `runs`
        has ended."""
        ended, _ = ray.wait(some, timeout=timeout)
        if ended and ended[0] in runs:
            raise self._failure(ended[0], runs[ended[0]])
        return bool(ended)

    def _failure(self, run: ray.ObjectRef, name: str) -> WorkerGroupError:
        """Why a process has ended."""
        draft = _is_draft(name) and self._config.outlives_draft
        try:
            ray.get(run)
        except ray.exceptions.RayTaskError as error:
            # A step that takes too long is no evidence against its requests: any step does on a machine that pauses.
            lost = isinstance(error.cause, LinkError) and not error.cause.began_here
            fault = not (lost or isinstance(error.cause, EngineStuck))
            return WorkerGroupError(f"{name} failed: {_first_line(error.cause)}", fault=fault, draft=draft)
        except ray.exceptions.RayError as error:
            return WorkerGroupError(f"{name} died: {_first_line(error)}", draft=draft)
        return WorkerGroupError(f"{name} ended", draft=draft)


def _percent(store: dist.TCPStore, name: str) -> int:
    """0: nothing has been said yet."""
    return int(store.get(name)) if store.check([name]) else 0


def _is_draft(name: str) -> bool:
    return name.startswith("draft")


def _end(actors: Iterable[tuple[ray.actor.ActorHandle, int | None]], groups: Iterable[PlacementGroup]) -> None:
    for actor, pid in actors:
        cluster.end(actor, pid)
    for group in groups:
        with contextlib.suppress(Exception):
            cluster.release(group)


def _cause(error: Exception) -> Exception:
    return error.cause if isinstance(error, ray.exceptions.RayTaskError) else error


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
