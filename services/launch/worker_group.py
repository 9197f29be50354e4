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

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from services.backend import ServingPair, StartProgress
from services.coordinator.process import CoordinatorSpec, EngineStuck
from services.launch import cluster
from services.launch.config import RankGroup, WorkerGroupConfig, WorkerGroupError, warn_of_few_gpus
from services.link.base import LinkError, first_line
from services.link.connect import Rendezvous
from services.link.store import GroupStore, StoreServer
from services.workers.spec import ModelSpec, RankSpec
from smc.calibration.latency import BRIEF, THOROUGH
from smc.calibration.warm_up import UsualSampling
from smc.model.parallel import WHOLE, Shard
from smc.types import ModelRole

LOOK_SECONDS = 0.1
"""Time between two checks whether a draft has loaded its weights."""
ASK_SECONDS = 1.0
"""Least time between two probes of a process."""
PROBE_SECONDS = 5.0
"""Time in which a live process answers a probe, whatever else it does."""
logger = logging.getLogger(__name__)


def rank_spec(
    config: WorkerGroupConfig,
    pair: ServingPair,
    rendezvous: Rendezvous,
    name: str,
    place: Shard,
    *,
    shares_gpu: bool = False,
) -> RankSpec:
    """Return the start parameters of one rank, at its place among the ranks of the group `name`. `shares_gpu`: ranks of
    both models, in processes of their own, are on one GPU, so the leaders do not talk over NCCL, which does not accept
    two ranks on one GPU."""
    (group,) = (group for group in config.rank_groups if group.name == name)
    models = {
        role: ModelSpec(
            source=config.sources.of_role(role),
            shard=place if degree > 1 else WHOLE,
            dtype=config.dtypes[role],
            draft_vocab=config.sources.draft_vocab if role == ModelRole.DRAFT else None,
            or_shard=place if role == ModelRole.DRAFT and config.may_divide_draft else None,
        )
        for role, degree in group.degrees.items()
    }
    return RankSpec(
        rendezvous=rendezvous,
        name=group.name,
        place=place,
        models=models,
        vocabulary=config.sources.target,
        device=config.device,
        context=pair.context,
        shares_gpu=shares_gpu,
        vocab_size=pair.tokenizer.size,
        # A worker must outlast a coordinator that waits for the other worker.
        timeout=2 * max(config.link_timeout, config.start_timeout),
        threads=config.threads,
        engine=pair.engine,
        sampling=UsualSampling.of(pair.sampling),
        outlives_peer=name == ModelRole.TARGET and config.outlives_draft,
    )


def coordinator_spec(
    config: WorkerGroupConfig, pair: ServingPair, rendezvous: Rendezvous, *, warm_up: bool = True
) -> CoordinatorSpec:
    """Return the coordinator's start parameters. `warm_up`: time the models as a service does before it accepts
    requests, and run dummy rounds where kernels are compiled."""
    compiles, times = config.device == "cuda", warm_up and pair.engine.drafting == "adaptive"
    return CoordinatorSpec(
        rendezvous=rendezvous,
        ranks={role: config.ranks_of(role).name for role in ModelRole},
        target=config.sources.target,
        engine=pair.engine,
        context=pair.context,
        timeout=config.link_timeout,
        heartbeat=config.heartbeat,
        warm_up=warm_up and compiles,
        sampling=UsualSampling.of(pair.sampling),
        timing=(THOROUGH if compiles else BRIEF) if times else None,
        trace=config.trace.absolute() if config.trace else None,
        outlives_draft=config.outlives_draft,
    )


class WorkerGroup:
    """The processes of one incarnation. A worker group is not restarted: after a failure the supervisor makes a new one
    with the next incarnation. Only the draft's ranks can start again beside the other processes."""

    def __init__(self, config: WorkerGroupConfig, pair: ServingPair, incarnation: int, name: str = "") -> None:
        """`name`: begins the names of its processes; empty if there is only one worker group."""
        self._config, self._pair, self.incarnation = config, pair, incarnation
        self._prefix = name and f"{name}, "
        self.secret = secrets.token_hex(16)
        self.actors: dict[str, ray.actor.ActorHandle] = {}
        """Keys: `coordinator`, `draft0`, `draft1`, .., `target0`, ..; for ranks with both models `shared0`, .."""
        self._groups: dict[str, PlacementGroup] = {}
        """Reservations, by name of the ranks."""
        self._guard = threading.Lock()
        self._processes: dict[str, ray.ObjectRef] = {}
        """Results of `RankActor.process`, by name of the actor."""
        self._draft_starts = False
        """`start_draft` is running and watches the draft's processes itself; `check` leaves them out."""
        self._ended = False
        """`kill` has been called, maybe in the middle of the start."""
        self._runs: dict[ray.ObjectRef, str] = {}
        """Calls that return when an actor's work ends -> name of the actor."""
        self._probes: dict[str, ray.ObjectRef] = {}
        """Last liveness probe of each process."""
        self._waited: dict[str, float] = {}
        """Seconds that `check` has waited since the last probe of each process."""
        self._store: StoreServer | None = None
        self._rendezvous: Rendezvous | None = None
        self.address = ""
        self.draft_degree = 0
        """Number of ranks among which the draft is divided; 0 before the start."""

    def start(self) -> None:
        """Start every process; return when the coordinator serves. If the start fails, ends every process and raises
        WorkerGroupError."""
        try:
            self._start()
        except WorkerGroupError:
            self.kill()
            raise
        except Exception as error:
            self.kill()
            raise WorkerGroupError(f"the worker group did not start: {_reason(error)}") from error

    def progress(self) -> StartProgress:
        """Return the progress of the start."""
        with self._guard:
            server, rendezvous, begun = self._store, self._rendezvous, set(self.actors)
        if server is None or rendezvous is None or len(begun - {"coordinator"}) < self._config.ranks:
            return StartProgress("reserve")
        sizes = {role: self._config.ranks_of(role).size for role in ModelRole}
        percent = {
            role.value: min(_percent(server.store, rendezvous.loaded(role, rank)) for rank in range(size))
            for role, size in sizes.items()
        }
        if min(percent.values()) < 100:
            return StartProgress("load", percent)
        has_begun = server.store.check([rendezvous.warmed])
        return StartProgress("prepare", percent, _percent(server.store, rendezvous.warmed) if has_begun else None)

    def check(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for a process to end. Raises WorkerGroupError, naming the process, if one has
        ended, or has not answered a probe during `PROBE_SECONDS` of such waits. The sum of the waits is counted, not
        elapsed time, so that a pause of this process is not held against the others."""
        with self._guard:
            runs = {run: name for run, name in self._runs.items() if not (self._draft_starts and _is_draft(name))}
        self._wait_for(list(runs), runs, timeout)
        with self._guard:
            self._look_for_silence({name for name in runs.values() if name in self.actors}, timeout)

    def _look_for_silence(self, names: set[str], waited: float) -> None:
        """Probe periodically whether these processes are alive. `waited`: seconds since the last call. Raises
        WorkerGroupError for a process that has been silent for too long."""
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
        """Probe all processes except the draft's. Raises WorkerGroupError if one has ended, or does not answer within
        `PROBE_SECONDS`."""
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
        """End the draft's processes now, and release their reservation."""
        with self._guard:
            ended = self._take(filter(_is_draft, list(self.actors)), [ModelRole.DRAFT])
        _end(*ended)

    def detach_draft(self) -> None:
        """Make the coordinator go on without the draft; call it after `end_draft`. Raises WorkerGroupError if the
        coordinator does not confirm."""
        with self._adding():
            told: ray.ObjectRef = self.actors["coordinator"].detach_draft.remote()
        try:
            ray.get(told, timeout=3 * self._config.link_timeout)
        except ray.exceptions.RayError as error:
            raise WorkerGroupError(f"the coordinator did not continue without the draft: {_reason(error)}") from error

    def start_draft(self, incarnation: int) -> None:
        """Start another draft in place of the one that has ended; return when requests can use it. Raises
        WorkerGroupError if it does not start; then its processes have been ended."""
        self._draft_starts = True
        try:
            assert self._rendezvous is not None
            self._start_draft(replace(self._rendezvous, incarnation=incarnation))
        except Exception as error:
            self.end_draft()
            if isinstance(error, WorkerGroupError):
                raise
            raise WorkerGroupError(f"the draft did not start: {_reason(error)}") from error
        finally:
            self._draft_starts = False

    def _start_draft(self, rendezvous: Rendezvous) -> None:
        deadline = time.monotonic() + rendezvous.start_timeout
        self._start_ranks(self._config.ranks_of(ModelRole.DRAFT), rendezvous)
        runs = {run: name for run, name in self._runs.items() if _is_draft(name)}
        while (server := self._store) is not None and not server.store.check([rendezvous.name("draft/pages")]):
            self._wait_for(list(runs), runs, LOOK_SECONDS)
            if time.monotonic() > deadline:
                raise WorkerGroupError(f"the draft was not ready after {rendezvous.start_timeout:g} s")
        with self._adding():
            taken: ray.ObjectRef = self.actors["coordinator"].attach_draft.remote(rendezvous.incarnation)
        self._wait_for([taken, *runs], runs, None)
        ray.get(taken)

    def stop(self, timeout: float = 5.0) -> None:
        """Let every process end by itself, for up to twice `timeout` seconds; then kill those that remain."""
        with contextlib.suppress(Exception):  # `kill` follows, whatever the error
            ray.get(self.actors["coordinator"].stop.remote(), timeout=timeout)
            ray.wait(list(self._runs), num_returns=len(self._runs), timeout=timeout)
        self.kill()

    def kill(self) -> None:
        """End every process now and release its reservation. A start that is under way fails."""
        with self._guard:
            self._ended, store, self._store = True, self._store, None
            ended = self._take(list(self.actors), list(self._groups))
        if store is not None:
            store.close()
        _end(*ended)

    def _take(
        self, names: Iterable[str], groups: Iterable[str]
    ) -> tuple[list[tuple[ray.actor.ActorHandle, int | None]], list]:
        """Remove processes and reservations from the records, so that the caller can end them. Returns the actors, each
        with the id of its process if that is on this host and may still run, otherwise with None; and the
        reservations of the ranks `groups`."""
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
        return actors, [self._groups.pop(name) for name in groups if name in self._groups]

    @contextlib.contextmanager
    def _adding(self) -> Iterator[None]:
        """Hold the lock while something is started that `kill` must end. Raises WorkerGroupError if `kill` has been
        called."""
        with self._guard:
            if self._ended:
                raise WorkerGroupError("the worker group was stopped while it was starting")
            yield

    def _start(self) -> None:
        config, host = self._config, ray.util.get_node_ip_address()
        with self._adding():
            self._store = StoreServer(host, self.secret, config.start_timeout)
        self._rendezvous = Rendezvous(
            host, self._store.port, self.incarnation, self.secret, config.link, config.start_timeout
        )
        warn_of_few_gpus(config)
        for group in config.rank_groups:
            self._start_ranks(group, self._rendezvous)
        beside = None
        if config.near_target:
            leader = f"{config.ranks_of(ModelRole.TARGET).name}0"
            beside, _ = ray.get(self._processes[leader], timeout=config.start_timeout)
        with self._adding():
            self.actors["coordinator"] = coordinator = cluster.start_coordinator(beside, f"{self._prefix}coordinator")
            spec = pickle.dumps(coordinator_spec(config, self._pair, self._rendezvous))
            started: ray.ObjectRef = coordinator.start.remote(spec)
        actors = ", ".join(self.actors)
        logger.info("%sincarnation %d: waiting until %s are ready", self._prefix, self.incarnation, actors)
        if not self._wait_for([started, *self._runs], self._runs, config.start_timeout):
            raise WorkerGroupError(f"the worker group was not ready after {config.start_timeout:g} s")
        self.address, self.draft_degree = ray.get(started), self._draft_degree(self._rendezvous)
        with self._adding():
            self._runs[coordinator.wait.remote()] = "coordinator"

    def _draft_degree(self, rendezvous: Rendezvous) -> int:
        """Return the number of ranks among which the draft is divided, as they have chosen it."""
        if not self._config.may_divide_draft:
            return self._config.degree(ModelRole.DRAFT)
        with self._adding():
            assert self._store is not None
            return int(self._store.store.get(rendezvous.draft_degree))

    def _start_ranks(self, group: RankGroup, rendezvous: Rendezvous) -> None:
        """Reserve room for every rank of a group, and start them; each begins to load its weights."""
        config, size = self._config, group.size
        gpus = config.device == "cuda"
        with self._adding():
            room = self._groups[group.name] = cluster.reserve(size, gpus, group.resource)
        cluster.wait_for(room, size, gpus, group.resource, config.start_timeout)
        for rank in range(size):
            with self._adding():
                name = f"{group.name}{rank}"
                self.actors[name] = actor = cluster.start_rank(room, f"{self._prefix}{group.name}", rank, gpus)
                self._processes[name] = actor.process.remote()
                spec = pickle.dumps(rank_spec(config, self._pair, rendezvous, group.name, Shard(rank, size)))
                self._runs[actor.run.remote(spec)] = name

    def _wait_for(self, some: list[ray.ObjectRef], runs: dict[ray.ObjectRef, str], timeout: float | None) -> bool:
        """Wait until one of the calls `some` has returned; return False if none has after `timeout` seconds. Raises
        WorkerGroupError if that call is one of `runs`: its process has ended."""
        ended, _ = ray.wait(some, timeout=timeout)
        if ended and ended[0] in runs:
            raise self._failure(ended[0], runs[ended[0]])
        return bool(ended)

    def _failure(self, run: ray.ObjectRef, name: str) -> WorkerGroupError:
        """Return the error that says why a process has ended."""
        draft = _is_draft(name) and self._config.outlives_draft
        try:
            ray.get(run)
        except ray.exceptions.RayTaskError as error:
            # A step that takes too long is no evidence against its requests: a pause of the machine can delay any step.
            lost = isinstance(error.cause, LinkError) and not error.cause.began_here
            fault = not (lost or isinstance(error.cause, EngineStuck))
            return WorkerGroupError(f"{name} failed: {first_line(error.cause)}", fault=fault, draft=draft)
        except ray.exceptions.RayError as error:
            return WorkerGroupError(f"{name} died: {first_line(error)}", draft=draft)
        return WorkerGroupError(f"{name} ended", draft=draft)


def _percent(store: GroupStore, name: str) -> int:
    """Return the percentage that a rank has reported under `name`; 0 if it has not reported yet."""
    return int(store.get(name)) if store.check([name]) else 0


def _is_draft(name: str) -> bool:
    return name.startswith("draft")


def _end(actors: Iterable[tuple[ray.actor.ActorHandle, int | None]], groups: Iterable[PlacementGroup]) -> None:
    for actor, pid in actors:
        cluster.end(actor, pid)
    for group in groups:
        with contextlib.suppress(Exception):
            remove_placement_group(group)


def _reason(error: Exception) -> str:
    """Return the first line of an error, or of the error that an actor's method raised."""
    return first_line(error.cause if isinstance(error, ray.exceptions.RayTaskError) else error)
