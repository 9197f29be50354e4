"""One life of the gang: every rank of both models and the coordinator, started together and ended together."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Iterator
from datetime import timedelta

import ray
import torch.distributed as dist

from services.backend import ServingPair
from services.coordinator.process import EngineStuck
from services.launch import cluster
from services.launch.config import GangConfig
from services.launch.errors import GangError
from services.launch.specs import coordinator_spec, rank_spec
from services.link.base import LinkError
from services.link.connect import Meeting
from smc.models.parallel import Shard
from smc.runtime.messages import SIDES

logger = logging.getLogger(__name__)


class Gang:
    """Not restarted: after a failure a new one is made, with the next epoch."""

    def __init__(self, config: GangConfig, pair: ServingPair, epoch: int) -> None:
        self._config, self._pair, self.epoch = config, pair, epoch
        self.secret = secrets.token_hex(16)
        self.actors: dict[str, ray.actor.ActorHandle] = {}
        """`coordinator`, `draft0`, `draft1`, .., `target0`, .."""
        self._groups: list = []
        self._guard = threading.Lock()
        self._ended = False
        """`kill` has been called, maybe in the middle of the start."""
        self._lives: dict[ray.ObjectRef, str] = {}
        self._store: dist.TCPStore | None = None
        self.address = ""

    def start(self) -> None:
        """Returns when the coordinator serves. Raises GangError; then nothing is left of it."""
        try:
            self._start()
        except GangError:
            self.kill()
            raise
        except Exception as error:
            self.kill()
            cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
            raise GangError(f"the gang did not start: {_first_line(cause)}") from error

    def check(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for a process to end. Raises GangError, naming it, if one has."""
        ended, _ = ray.wait(list(self._lives), timeout=timeout)
        if ended:
            raise self._failure(ended[0])

    def stop(self, timeout: float = 5.0) -> None:
        """Let every process end by itself, then make sure."""
        with contextlib.suppress(Exception):  # whatever it is, `kill` comes next
            ray.get(self.actors["coordinator"].stop.remote(), timeout=timeout)
            ray.wait(list(self._lives), num_returns=len(self._lives), timeout=timeout)
        self.kill()

    def kill(self) -> None:
        """End every process now and give back its place. A start that is under way fails."""
        with self._guard:
            self._ended = True
            actors, groups = self.actors, self._groups
            self.actors, self._groups, self._lives, self._store = {}, [], {}, None
        for actor in actors.values():
            with contextlib.suppress(Exception):
                ray.kill(actor)
        for group in groups:
            with contextlib.suppress(Exception):
                cluster.release(group)

    @contextlib.contextmanager
    def _adding(self) -> Iterator[None]:
        """Around whatever `kill` has to end too."""
        with self._guard:
            if self._ended:
                raise GangError("the gang was told to end while it started")
            yield

    def _start(self) -> None:
        config, host = self._config, ray.util.get_node_ip_address()
        limit = timedelta(seconds=config.start_timeout)
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        meeting = Meeting(host, self._store.port, self.epoch, self.secret, config.link, config.start_timeout)
        gpus = config.device == "cuda"
        for side in SIDES:
            degree, mark = config.degree(side), config.resource(side)
            with self._adding():
                group = cluster.reserve(degree, gpus, mark)
                self._groups.append(group)
            cluster.wait_for(group, degree, gpus, mark, config.start_timeout)
            for rank in range(degree):
                with self._adding():
                    self.actors[f"{side}{rank}"] = actor = cluster.start_rank(group, side, rank, gpus)
                    self._lives[actor.run.remote(rank_spec(config, self._pair, meeting, side, Shard(rank, degree)))] = f"{side}{rank}"
        with self._adding():
            self.actors["coordinator"] = coordinator = cluster.start_coordinator()
            started = coordinator.start.remote(coordinator_spec(config, self._pair, meeting))
        logger.info("epoch %d: waiting until %s are ready", self.epoch, ", ".join(self.actors))
        ended, _ = ray.wait([started, *self._lives], timeout=config.start_timeout)
        if not ended:
            raise GangError(f"the gang was not ready after {config.start_timeout:g} s")
        if ended[0] != started:
            raise self._failure(ended[0])
        self.address = ray.get(started)
        with self._adding():
            self._lives[coordinator.wait.remote()] = "coordinator"

    def _failure(self, life: ray.ObjectRef) -> GangError:
        """What has become of a process that has ended."""
        name = self._lives[life]
        try:
            ray.get(life)
        except ray.exceptions.RayTaskError as error:
            # A step that takes too long says little of what was asked: a machine that pauses makes any.
            lost = isinstance(error.cause, LinkError) and not error.cause.began_here
            fault = not (lost or isinstance(error.cause, EngineStuck))
            return GangError(f"{name} failed: {_first_line(error.cause)}", fault=fault)
        except ray.exceptions.RayError as error:
            return GangError(f"{name} died: {_first_line(error)}")
        return GangError(f"{name} ended")


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
