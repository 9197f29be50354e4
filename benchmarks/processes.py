"""Runs the ranks of both models as processes of this host, without Ray. Models stay loaded from one engine to the
next."""

from __future__ import annotations

import gc
import multiprocessing.connection
import os
import secrets
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.backends import OWN, Mode, read_bytes
from services.coordinator.process import RemoteEngine
from services.launch.config import WorkerGroupConfig, WorkerGroupError
from services.launch.worker_group import coordinator_spec, rank_spec
from services.link.base import SHARED, failure_text
from services.link.connect import Rendezvous
from services.link.store import StoreServer
from services.workers.process import load_rank, run_rank
from smc.api.engine_config import EngineConfig
from smc.api.limits import AUTO_DTYPE
from smc.model.config import ModelConfig
from smc.model.decoder import empty_decoder
from smc.model.linear import DTYPES
from smc.model.parallel import Shard, local_config
from smc.scheduler.engine import Engine
from smc.types import ModelRole

HOST = "127.0.0.1"
END_SECONDS = 20.0
"""Time for a rank to leave an engine, and for its process to end."""
DEATH_SECONDS = 1.0
"""Time to wait after a rank has failed, in which the death of another rank may explain the failure."""


class RemoteTraceback(Exception):
    """A traceback of another process, as text. It is the cause of the error that names the process: so it is shown
    with that error, whose message stays one line."""


class RankProcesses:
    """The ranks of both models, each in its own process. `close` ends the processes."""

    def __init__(
        self, config: WorkerGroupConfig, gpus: dict[str, list[int]] | None = None, *, warm_up: bool = False
    ) -> None:
        """`gpus`: by the name of their ranks (`RankGroup`), the GPU of each rank, as an index into the GPUs that this
        process sees; two ranks may share one. `warm_up`: warm up every engine, as a service does before it serves."""
        self._config, self._incarnation, self._warm_up = config, 0, warm_up
        used = [gpu for of_group in (gpus or {}).values() for gpu in of_group]
        self._shares_gpu = len(used) > len({*used})
        self._secret = secrets.token_hex(16)
        self._store = StoreServer(HOST, self._secret, config.start_timeout)
        self._ranks = {
            (group.name, group.size, rank): _Rank(
                f"{group.name}{rank}", None if gpus is None else gpus[group.name][rank]
            )
            for group in config.rank_groups
            for rank in range(group.size)
        }

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for rank in self._ranks.values():
            rank.end()

    @contextmanager
    def engine(self, engine: EngineConfig) -> Iterator[RemoteEngine]:
        """Make an engine with these settings over the models. Raises WorkerGroupError if it fails; the processes cannot
        be used after that."""
        self._incarnation += 1
        config = replace(self._config, engine=engine)
        pair = config.serving_pair()
        rendezvous = Rendezvous(
            HOST, self._store.port, self._incarnation, self._secret, config.link, config.start_timeout
        )
        for (name, size, number), rank in self._ranks.items():
            place = Shard(number, size)
            rank.pipe.send(rank_spec(config, pair, rendezvous, name, place, shares_gpu=self._shares_gpu))
        self._hear("loaded", config.start_timeout)
        try:
            remote = RemoteEngine(coordinator_spec(config, pair, rendezvous, warm_up=self._warm_up))
            try:
                yield remote
            finally:
                remote.stop()
        except RuntimeError as error:  # an error of the link, or of the store where the ranks meet
            self._hear("ended", END_SECONDS)
            raise WorkerGroupError(str(error)) from error
        self._hear("ended", END_SECONDS)

    def _hear(self, word: str, timeout: float) -> None:
        """Wait until every rank has sent this word. Raises WorkerGroupError, naming the rank, if one fails, dies or
        stays silent. When a rank dies, other ranks fail as a consequence; then the error names the one that died."""
        silent, deadline = {rank.pipe: rank.name for rank in self._ranks.values()}, time.monotonic() + timeout
        failed: tuple[str, _Failure] | None = None
        while silent:
            ready: list[Any] = multiprocessing.connection.wait(list(silent), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                name = silent.pop(pipe)
                try:
                    message = pipe.recv()
                except (EOFError, OSError):
                    raise WorkerGroupError(f"{name} died") from None
                if isinstance(message, _Failure):
                    failed, deadline = failed or (name, message), min(deadline, time.monotonic() + DEATH_SECONDS)
                else:
                    assert message == word, f"{name} said {message!r} where {word!r} comes next"
        if failed is not None:
            name, failure = failed
            raise WorkerGroupError(f"{name}: {failure.text}") from RemoteTraceback(
                f"in the process of {name}\n{failure.traceback}"
            )
        if silent:
            raise WorkerGroupError(f"{', '.join(silent.values())}: not {word} within {timeout:g} s")


@dataclass(frozen=True)
class _Failure:
    """The last message of a rank's process if it fails."""

    text: str
    traceback: str
    """The traceback as text; frames cannot be sent."""


class _Rank:
    """The process of one rank, which serves one engine after another."""

    def __init__(self, name: str, gpu: int | None) -> None:
        self.name = name
        context = multiprocessing.get_context("forkserver")
        # With a fork server that has imported this module, a process starts in a tenth of the time.
        context.set_forkserver_preload([__name__])
        self.pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, gpu), name=name, daemon=True)
        self._process.start()
        there.close()

    def end(self) -> None:
        with suppress(OSError):
            self.pipe.send(None)
        self._process.join(END_SECONDS)
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _serve(pipe: Connection, gpu: int | None) -> None:
    """Run a rank's process. It sends `loaded` and `ended` for every engine, or a `_Failure`."""
    loaded = None
    for spec in iter(pipe.recv, None):
        try:
            if loaded is None and gpu is not None:
                see_only(gpu)
            loaded = loaded or load_rank(spec)
            pipe.send("loaded")
            run_rank(spec, HOST, loaded)
            pipe.send("ended")
        except Exception as error:
            pipe.send(_Failure(failure_text(error), traceback.format_exc()))
            return
        gc.collect()
        if gpu is not None:
            torch.cuda.empty_cache()


def see_only(gpu: int) -> None:
    """Restrict this process to one of its GPUs. Call it before CUDA starts. Raises ValueError if the process has fewer
    GPUs."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(gpu)] if given is None else [name for name in given.split(",") if name]
    index = 0 if given is None else gpu
    if index >= len(names):
        raise ValueError(f"GPU number {gpu} is asked for, but CUDA_VISIBLE_DEVICES={given!r} shows {len(names)}")
    os.environ["CUDA_VISIBLE_DEVICES"] = names[index]


class ProcessBackend:
    """A `BenchBackend` whose ranks are processes, each with its own GPU."""

    def __init__(self, config: WorkerGroupConfig, gpus: int | None = None) -> None:
        """`gpus`: number of GPUs of this host; None on CPUs. Raises ValueError for a draft of type `auto`, which is
        decided only in the rank's process."""
        if config.draft_dtype == AUTO_DTYPE:
            raise ValueError("draft_dtype='auto' has no effect on what is measured over links; give a type")
        self._config, self._gpus = config, gpus
        self.tokenizer = config.serving_pair().tokenizer
        self._processes: tuple[object, RankProcesses] | None = None
        self._remote: RemoteEngine | None = None

    def close(self) -> None:
        if self._processes is not None:
            self._processes[1].close()
            self._processes = None

    @contextmanager
    def engine(self, mode: Mode, config: EngineConfig) -> Iterator[Engine]:
        assert mode.kernels == OWN, "only an engine of this process can have other operations"
        try:
            with self._for(mode).engine(config) as self._remote:
                yield self._remote.engine
        except WorkerGroupError:
            self.close()  # the processes cannot be used any more
            raise

    def weight_bytes(self, mode: Mode, role: ModelRole) -> int:
        whole, degree = self._config.shape(role), max(1, mode.degrees[list(ModelRole).index(role)])
        dtype = DTYPES[self._config.dtypes[role]]
        model, vocab = (
            empty_decoder(local_config(whole, Shard(0, degree)), None, dtype, "meta"),
            self._config.sources.draft_vocab,
        )
        return read_bytes(model, vocab.head(model) if vocab and role == ModelRole.DRAFT else None)

    def shape(self, mode: Mode, role: ModelRole) -> ModelConfig:
        return self._config.shape(role)

    def memory(self, mode: Mode) -> int:
        assert self._remote is not None
        return max(worker.status().device_bytes for worker in self._remote.workers.values())

    def _for(self, mode: Mode) -> RankProcesses:
        """Return the processes of the last mode if it has the same GPUs, so that weights are loaded once; otherwise
        start new ones. Ranks that share a model add their parts in the order that they are loaded with."""
        config, (draft, target) = self._config, mode.degrees
        if mode.shared:
            places = {SHARED: list(range(target))}
        else:
            places = placed(mode.degrees, (config.degree(ModelRole.DRAFT), config.target_tp), self._gpus)
            draft, target = (len(places[role]) for role in ModelRole)
        numerics = mode.config.numerics if max(draft, target) > 1 else None
        key = ((draft, target), places, numerics)
        if self._processes is None or self._processes[0] != key:
            self.close()
            engine = EngineConfig(form="lockstep") if mode.shared else config.engine
            placement = SHARED if mode.shared else "apart"
            config = replace(config, draft_tp=draft, target_tp=target, placement=placement, engine=engine)
            self._processes = (key, RankProcesses(config, None if self._gpus is None else places))
        return self._processes[1]


def placed(degrees: tuple[int, int], apart: tuple[int, int], gpus: int | None) -> dict[str, list[int]]:
    """Return, by role, the GPU of each rank. `gpus`: the number of GPUs (None: no limit).

    A draft of degree 0 has an idle rank all the same. If possible it gets the GPUs that it has when the models are
    `apart`, so that the same processes run both modes: this needs enough GPUs, and a target with the same degree.
    Otherwise it shares the target's first GPU.
    """
    draft, target = degrees
    if not draft and target == apart[1] and (gpus is None or sum(apart) <= gpus):
        draft = apart[0]
    return {ModelRole.DRAFT: list(range(max(1, draft))), ModelRole.TARGET: list(range(draft, draft + target))}
