"""Finds or starts a Ray cluster, and runs the service's processes in its actors. Ray is not used for anything else.

The code of an actor is imported only in the actor's process, so that a cluster can be reserved before torch is
imported. Arguments are pickled. Otherwise Ray would import their modules, and torch with them, before the actor's
method is called, while the garbage collector is active (`_without_collections`)."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import pickle
import secrets
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray import PlacementGroupID
from ray._private import ray_constants
from ray._private import services as ray_services
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

logger = logging.getLogger(__name__)
LOCAL_CPUS = 64
"""CPUs that a cluster started here declares: its processes share this machine's cores anyway."""
OBJECT_STORE_BYTES = 100_000_000
LOG_LIMITS = {"RAY_ROTATION_MAX_BYTES": str(16 << 20), "RAY_ROTATION_BACKUP_COUNT": "1"}
"""Each of Ray's log files, of which there are about twenty, is replaced at this size, and so many old ones are kept.
Ray's own limit is 512 MiB."""
SLOW_STARTS = ("timed out during startup", "Timed out waiting for file")
"""Text in Ray's error when its processes were not up in time."""
RESOURCE_SHARE = 0.001
"""Amount of a custom resource that a rank requests: so little that a host that has 1 of it has enough for all its
ranks."""
SIGNS = "signs"
"""Concurrency group of liveness probes: they are answered while other calls of the actor run."""


class RankActor:
    """The process of one rank."""

    def run(self, spec: bytes) -> None:
        """Run the rank until it is told to stop. Raises its errors."""
        with _without_collections():
            from services.workers.process import run_rank

        _quiet()
        run_rank(pickle.loads(spec), ray.util.get_node_ip_address())

    def process(self) -> tuple[str, int]:
        """Return Ray's id of the process's host, and the process's id there."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    @ray.method(concurrency_group=SIGNS)
    def pid(self) -> int:
        return os.getpid()


class CoordinatorActor:
    """The process of the coordinator."""

    def start(self, spec: bytes) -> str:
        """Start the coordinator; return its address once the engine has warmed up (see `RemoteEngine`)."""
        with _without_collections():
            from services.coordinator.process import Coordinator

        _quiet()
        self._coordinator = Coordinator(pickle.loads(spec), ray.util.get_node_ip_address())
        return self._coordinator.address

    def wait(self) -> None:
        """Wait until the coordinator is told to stop. Raises the error that stops it otherwise."""
        self._coordinator.wait()

    def stop(self) -> None:
        self._coordinator.stop()

    def detach_draft(self) -> None:
        self._coordinator.detach_draft()

    def attach_draft(self, incarnation: int) -> None:
        """See `Coordinator.attach_draft`."""
        self._coordinator.attach_draft(incarnation)

    @ray.method(concurrency_group=SIGNS)
    def pid(self) -> int:
        return os.getpid()


def import_meanwhile(module: str) -> None:
    """Import a module in a thread of its own. Call it before `connect`, which takes seconds in which this process only
    waits for others."""

    def work() -> None:
        with _without_collections():
            importlib.import_module(module)

    threading.Thread(target=work, daemon=True).start()


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Suspend garbage collection during the import of torch. Nearly all objects that the import makes stay, and the
    collector would scan them again and again, for a fifth of the time. The objects are frozen, so later collections do
    not scan them either."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def connect(address: str | None) -> bool:
    """Join the cluster at `address` or at RAY_ADDRESS; if neither is given, start one on this machine. Return whether
    it was started here.

    A cluster that was started here ends with this process. Raises ConnectionError if there is none at the address.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address=address, logging_level=logging.WARNING)
        if not is_token_auth_enabled():
            logger.warning(
                "the Ray cluster at %s asks for no token: every program that reaches its ports can run code on its "
                "hosts; set RAY_AUTH_MODE=token on every host and here",
                address,
            )
        return False
    # Ray asks for a token unless RAY_AUTH_MODE says otherwise. Only this process and its children know this one, which
    # keeps other users of this machine from running code as this user.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    for name, value in LOG_LIMITS.items():
        os.environ.setdefault(name, value)
    options: dict[str, Any] = {
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "logging_level": logging.ERROR,
    }
    start: dict[str, Any] = {"address": "local", "num_cpus": LOCAL_CPUS, "_node_ip_address": "127.0.0.1", **options}
    with _own_sessions(), _on_loopback():
        try:
            ray.init(**start)
        except Exception as error:
            # Ray allows half a minute for its start, which may be too short on a busy machine.
            if not any(words in str(error) for words in SLOW_STARTS):
                raise
            logger.warning("Ray did not start in time; starting it once more")
            ray.shutdown()
            ray.init(**start)
    return True


@contextlib.contextmanager
def _own_sessions() -> Iterator[None]:
    """Give processes that Ray starts inside this context, and so their children, the ranks, sessions of their own. A
    signal to the process group of this process, such as one from `timeout` or a terminal, must not end them before
    calls in flight have finished. They end with this process, since Ray asks the kernel for that."""
    services: Any = ray_services  # Ray has no setting for this.
    starter = services.ConsolePopen

    def start(*arguments: Any, **options: Any) -> subprocess.Popen:
        return starter(*arguments, **options | {"start_new_session": True})

    services.ConsolePopen = start
    try:
        yield
    finally:
        services.ConsolePopen = starter


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Make Ray processes that are started inside this context listen on the loopback interface only, as they do on
    systems where Ray is for one machine. On Linux Ray replaces `_node_ip_address` by the host's address on the network
    if it is one of the loopback interface."""
    constants: Any = ray_constants  # Ray reads this setting from the environment when it is imported.
    clusters, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = clusters


def disconnect() -> None:
    """Leave the cluster; end it if it was started here."""
    ray.shutdown()


def reserve(ranks: int, gpus: bool, resource: str | None) -> PlacementGroup:
    """Request room for ranks that share models on one host, which must have the custom resource `resource` if one is
    given. Does not wait until there is room (`wait_for`)."""
    name = f"{_owner()}{secrets.token_hex(8)}"
    return placement_group([_bundle(gpus, resource)] * ranks, strategy="STRICT_PACK", name=name)


def _owner() -> str:
    """Return the prefix of the names of this actor's reservations. It is the same in every process of the actor."""
    return f"smcserve {ray.get_runtime_context().get_actor_id() or 'driver'} "


def release_left() -> None:
    """Release what an earlier process of this actor has reserved. After restarting an actor, Ray keeps these
    reservations until the actor ends."""
    for group_id, group in ray.util.placement_group_table().items():
        if group["name"].startswith(_owner()) and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(group_id)))


def count_that_fit(bundles: Sequence[tuple[int, bool, str | None]]) -> int:
    """Count how many times all of these reservations fit into the resources that are free now. Each reservation is a
    tuple of the arguments of `reserve`: number of ranks, whether they have GPUs, custom resource."""
    free = [dict(host) for host in available_resources_per_node().values()]
    count = 0
    while all(_take(free, ranks, _bundle(gpus, resource)) for ranks, gpus, resource in bundles):
        count += 1
    return count


def _take(free: list[dict[str, float]], ranks: int, bundle: dict[str, float]) -> bool:
    """Take one reservation from the host with the fewest free GPUs and CPUs that has enough; return False if no host
    has."""
    needs = {name: amount * ranks for name, amount in bundle.items()}
    hosts = [host for host in free if all(host.get(name, 0) >= amount for name, amount in needs.items())]
    if not hosts:
        return False
    host = min(hosts, key=lambda one: (one.get("GPU", 0), one.get("CPU", 0)))
    for name, amount in needs.items():
        host[name] -= amount
    return True


def wait_for(group: PlacementGroup, ranks: int, gpus: bool, resource: str | None, timeout: float) -> None:
    """Wait until a reservation has been granted. Raises RuntimeError if no host has room within `timeout` seconds."""
    if not group.wait(timeout):
        bundle = _bundle(gpus, resource)
        if resource and resource not in ray.cluster_resources():
            raise RuntimeError(
                f"no host of the cluster has the resource {resource!r}; "
                f"start one with: ray start --resources='{{\"{resource}\": 1}}' .., "
                "or name another resource"
            )
        free = ray.available_resources()
        has = ", ".join(f"{free.get(name, 0):g} {name}" for name in bundle)
        raise RuntimeError(f"no host of the cluster has room for {ranks} x {bundle} (free in the whole cluster: {has})")


def _bundle(gpus: bool, resource: str | None) -> dict[str, float]:
    return {"CPU": 1} | ({"GPU": 1} if gpus else {}) | ({resource: RESOURCE_SHARE} if resource else {})


def start_rank(group: PlacementGroup, name: str, rank: int, gpus: bool) -> ray.actor.ActorHandle:
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
    # Two calls at a time: `run` occupies one until the rank stops.
    options: dict[str, Any] = {"num_cpus": 1, "num_gpus": int(gpus), "max_restarts": 0, "max_concurrency": 2}
    return _remote(RankActor, f"{name} rank {rank}").options(scheduling_strategy=strategy, **options).remote()


def end(actor: ray.actor.ActorHandle, pid: int | None) -> None:
    """End an actor's process now. `pid`: its process id if it is on this host and may be alive (`local_pid`); it is
    then killed directly, since Ray first gives a process five seconds to end by itself, which a process stopped by
    SIGSTOP never does."""
    with contextlib.suppress(Exception):
        ray.kill(actor)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def local_pid(process: ray.ObjectRef) -> int | None:
    """Return the process id from a result of `RankActor.process`; None if there is no result yet or the process is on
    another host."""
    ready, _ = ray.wait([process], timeout=0)
    try:
        node, pid = ray.get(ready[0]) if ready else (None, None)
    except ray.exceptions.RayError:
        return None
    return pid if node == ray.get_runtime_context().get_node_id() else None


def start_coordinator(host: str | None, name: str) -> ray.actor.ActorHandle:
    """Start the coordinator's actor on `host` (Ray's id of it); None: on the host of this process, where the gateway
    is."""
    here = NodeAffinitySchedulingStrategy(host or ray.get_runtime_context().get_node_id(), soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 4}
    return _remote(CoordinatorActor, name).options(scheduling_strategy=here, **options).remote()


def _quiet() -> None:
    """Log one line a message, without debug messages, in this process."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")


def _remote(actor: type, name: str) -> Any:
    """Return the actor class for Ray, under a name that identifies its process in `ps`, Ray's tools and Ray's logs."""
    remote: Any = ray.remote  # Its types do not include concurrency groups.
    return remote(concurrency_groups={SIGNS: 1})(type(f"smcserve: {name}", (actor,), {}))
