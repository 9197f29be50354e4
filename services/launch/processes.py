"""A gang of processes on this host, without Ray: for measuring. Models stay loaded from one engine to the next."""

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
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from services.coordinator.remote import RemoteEngine
from services.launch.config import GangConfig
from services.launch.errors import GangError, RemoteTraceback
from services.launch.specs import coordinator_spec, rank_spec
from services.link.base import failure_text
from services.link.connect import Rendezvous
from services.workers.process import load_rank, run_rank
from smc.api.engine_config import EngineConfig
from smc.model.parallel import Shard
from smc.types import ModelRole

HOST = "127.0.0.1"
END_SECONDS = 20.0
"""For a rank to come back from an engine, and for its process to end."""


class Processes:
    """Every rank of a gang in a process of its own. Ends them when it is closed."""

    def __init__(self, config: GangConfig, gpus: dict[str, list[int]] | None = None, *, rehearse: bool = False) -> None:
        """`gpus`: which of the GPUs that this process sees each rank of a side sees; two ranks may see the same one.
        `rehearse`: every engine, as a service does before it serves."""
        self._config, self._epoch, self._rehearse = config, 0, rehearse
        self._shares_gpu = gpus is not None and bool({*gpus[ModelRole.DRAFT]} & {*gpus[ModelRole.TARGET]})
        limit = timedelta(seconds=config.start_timeout)
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=limit)
        self._ranks = {
            (role, rank): _Rank(f"{role}{rank}", None if gpus is None else gpus[role][rank])
            for role in ModelRole
            for rank in range(config.degree(role))
        }

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for rank in self._ranks.values():
            rank.end()

    @contextmanager
    def engine(self, engine: EngineConfig) -> Iterator[RemoteEngine]:
        """An engine of these settings over the models. Raises GangError if it fails; then nothing more can be done
        here."""
        self._epoch += 1
        config = replace(self._config, engine=engine)
        pair = config.serving_pair()
        rendezvous = Rendezvous(
            HOST, self._store.port, self._epoch, secrets.token_hex(16), config.link, config.start_timeout
        )
        for (role, number), rank in self._ranks.items():
            rank.pipe.send(
                rank_spec(
                    config, pair, rendezvous, role, Shard(number, config.degree(role)), shares_gpu=self._shares_gpu
                )
            )
        self._hear("loaded", config.start_timeout)
        try:
            remote = RemoteEngine(coordinator_spec(config, pair, rendezvous, rehearse=self._rehearse))
            try:
                yield remote
            finally:
                remote.stop()
        except RuntimeError as error:  # of the link, or of the store where the ranks meet
            self._hear("ended", END_SECONDS)
            raise GangError(str(error)) from error
        self._hear("ended", END_SECONDS)

    def _hear(self, word: str, timeout: float) -> None:
        """Wait until every rank has said it. Raises GangError, naming a rank, if one has failed or died, or says
        nothing."""
        silent, deadline = {rank.pipe: rank.name for rank in self._ranks.values()}, time.monotonic() + timeout
        while silent:
            ready: list[Any] = multiprocessing.connection.wait(list(silent), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise GangError(f"{', '.join(silent.values())}: not {word} within {timeout:g} s")
            for pipe in ready:
                name = silent.pop(pipe)
                try:
                    said = pipe.recv()
                except (EOFError, OSError):
                    raise GangError(f"{name} died") from None
                if isinstance(said, _Failure):
                    raise GangError(f"{name}: {said.text}") from RemoteTraceback(
                        f"in the process of {name}\n{said.traceback}"
                    )
                assert said == word, f"{name} said {said!r} where {word!r} comes next"


@dataclass(frozen=True)
class _Failure:
    """The last that a rank's process says, if it fails."""

    text: str
    traceback: str
    """Of that process; frames themselves do not travel."""


class _Rank:
    """A process that carries out one engine after the other."""

    def __init__(self, name: str, gpu: int | None) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
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
    """The life of a rank's process. It says `loaded`, then `ended`, of every engine; or what went wrong."""
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
    """One of the GPUs that this process was given. Raises ValueError if it was not given so many. Before anything asks
    for a GPU."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(gpu)] if given is None else [name for name in given.split(",") if name]
    index = 0 if given is None else gpu
    if index >= len(names):
        raise ValueError(f"GPU number {gpu} is asked for, but CUDA_VISIBLE_DEVICES={given!r} shows {len(names)}")
    os.environ["CUDA_VISIBLE_DEVICES"] = names[index]
