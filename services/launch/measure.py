"""Rounds of a whole gang, each rank in a process of its own: what working in separate processes costs, and how fast
GPUs are then."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from services.coordinator.remote import RemoteEngine
from services.launch.config import GangConfig
from services.launch.processes import Processes
from smc.api.engine_config import EngineConfig
from smc.api.sampling_params import SamplingParams
from smc.evaluation.machine import Mode, read_bytes
from smc.evaluation.round_time import WARM_UP, GangRound, decoding_name, steady_requests
from smc.model.config import ModelConfig
from smc.model.decoder import empty_decoder
from smc.model.linear import DTYPES
from smc.model.parallel import Shard, local_config
from smc.scheduler.admission import sized_for
from smc.scheduler.engine import Engine
from smc.scheduler.timeline import RoundTimes
from smc.types import ModelRole


def measure(
    config: GangConfig,
    engines: list[EngineConfig],
    concurrency: list[int],
    sampling: Mapping[str, Any],
    rounds: int,
    done: Callable[[], None],
) -> list[GangRound]:
    """`concurrency` requests side by side in turn, with every engine; `done` is called after each. Raises GangError.

    `sampling`: settings of `SamplingParams`, by name.
    """
    found, params = [], SamplingParams(**sampling)
    with Processes(config) as processes:
        for engine in engines:
            with processes.engine(sized_for(engine, params, max(concurrency))) as remote:
                for count in concurrency:
                    times = _times(remote, count, sampling, rounds)
                    found.append(_row(replace(config, engine=engine), count, params, times))
                    done()
    return found


def _times(remote: RemoteEngine, requests: int, sampling: Mapping[str, Any], rounds: int) -> list[RoundTimes]:
    """Of rounds in which all requests take part, without the first few."""
    engine = remote.engine
    for request in steady_requests(engine.tokenizer, engine.config, requests, sampling, rounds):
        engine.submit(request)
    found = []
    while not engine.idle:
        begin = time.monotonic_ns()
        engine.step()
        times = remote.timeline.end_step(begin, time.monotonic_ns())
        if times and engine.num_running == requests:
            found.append(times)
    return found[WARM_UP:]


def _row(config: GangConfig, requests: int, params: SamplingParams, times: list[RoundTimes]) -> GangRound:
    engine = config.engine
    medians = {
        name: 1e3 * statistics.median(getattr(t, name) for t in times) for name in RoundTimes.__dataclass_fields__
    }
    medians["link_time"] = medians.pop("link")
    return GangRound(
        link=config.link,
        decoding=decoding_name(params),
        form=engine.form,
        block=engine.block,
        branches=engine.branches,
        draft_tp=config.draft_tp,
        target_tp=config.target_tp,
        requests=requests,
        particles=params.rows,
        rounds=len(times),
        **medians,
    )


class GangMachine:
    """`smc.evaluation.machine.Machine` whose ranks are processes, each with a GPU that it shares with nobody at
    work."""

    def __init__(self, config: GangConfig, gpus: int | None = None) -> None:
        """`gpus` there are; None on CPUs."""
        self._config, self._gpus = config, gpus
        self.tokenizer = config.serving_pair().tokenizer
        self._processes: tuple[dict[str, list[int]], Processes] | None = None
        self._remote: RemoteEngine | None = None

    def close(self) -> None:
        if self._processes is not None:
            self._processes[1].close()
            self._processes = None

    @contextmanager
    def engine(self, mode: Mode, config: EngineConfig) -> Iterator[Engine]:
        with self._for(mode.degrees).engine(config) as self._remote:
            yield self._remote.engine

    def weight_bytes(self, mode: Mode, role: ModelRole) -> int:
        whole, degree = self._config.sources.of_role(role).config, max(1, mode.degrees[list(ModelRole).index(role)])
        dtype = DTYPES[self._config.dtypes[role]]
        model, vocab = (
            empty_decoder(local_config(whole, Shard(0, degree)), None, dtype, "meta"),
            self._config.sources.draft_vocab,
        )
        return read_bytes(model, vocab.head(model) if vocab and role == ModelRole.DRAFT else None)

    def shape(self, mode: Mode, role: ModelRole) -> ModelConfig:
        return self._config.sources.of_role(role).config

    def memory(self, mode: Mode) -> int:
        assert self._remote is not None
        return max(worker.status().device_bytes for worker in self._remote.workers.values())

    def _for(self, degrees: tuple[int, int]) -> Processes:
        """Kept as long as it has what is asked for; weights are loaded once for all of its modes."""
        config = self._config
        roles = placed(degrees, (config.draft_tp, config.target_tp), self._gpus)
        if self._processes is None or self._processes[0] != roles:
            self.close()
            config = replace(config, draft_tp=len(roles[ModelRole.DRAFT]), target_tp=len(roles[ModelRole.TARGET]))
            self._processes = (roles, Processes(config, None if self._gpus is None else roles))
        return self._processes[1]


def placed(degrees: tuple[int, int], apart: tuple[int, int], gpus: int | None) -> dict[str, list[int]]:
    """Which GPU each rank of draft and target is on, of `gpus` (None: as many as you like).

    A draft that is not asked for (degree 0) is there all the same, idle: where it is when the models are `apart`, if
    the target is the same then and there are GPUs enough, so that processes can serve both; else on the target's first.
    """
    draft, target = degrees
    if not draft and target == apart[1] and (gpus is None or sum(apart) <= gpus):
        draft = apart[0]
    return {ModelRole.DRAFT: list(range(max(1, draft))), ModelRole.TARGET: list(range(draft, draft + target))}
