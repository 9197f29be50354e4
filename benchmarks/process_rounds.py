"""Times the rounds of worker groups whose ranks each have a process of their own, as in a service."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.load import ClosedLoop, endless_requests, problem_prompts, sized_for
from benchmarks.processes import RankProcesses
from benchmarks.rounds import WARM_UP, decoding_name
from services.coordinator.process import RemoteEngine
from services.launch.config import WorkerGroupConfig
from smc.api.engine_config import EngineConfig
from smc.api.sampling_params import SamplingParams
from smc.scheduler.stats import RoundTimes
from smc.types import ModelRole


@dataclass(frozen=True)
class ProcessRoundTime:
    """Medians over rounds, in milliseconds; see `smc.scheduler.stats.RoundTimes` for the parts."""

    link: str
    decoding: str
    """`exact`, or the population of SMC."""
    form: str
    block: int
    branches: int
    draft_tp: int
    target_tp: int
    requests: int
    particles: int
    rounds: int
    whole: float
    draft: float
    target: float
    link_time: float
    coordinator: float
    draft_stall: float
    target_stall: float


def measure_process_rounds(
    config: WorkerGroupConfig,
    engines: list[EngineConfig],
    concurrency: list[int],
    sampling: Mapping[str, Any],
    rounds: int,
    done: Callable[[], None],
) -> list[ProcessRoundTime]:
    """Time rounds with every engine and every number of concurrent requests in `concurrency`, each rank in its own
    process. `done` is called after each measurement. Raises WorkerGroupError.

    `sampling`: settings of `SamplingParams`, by name.
    """
    found, params = [], SamplingParams(**sampling)
    with RankProcesses(config) as processes:
        for engine in engines:
            with processes.engine(sized_for(engine, params, max(concurrency))) as remote:
                for count in concurrency:
                    times = _times(remote, count, sampling, rounds)
                    found.append(_row(replace(config, engine=engine), count, params, times))
                    done()
    return found


def _times(remote: RemoteEngine, requests: int, sampling: Mapping[str, Any], rounds: int) -> list[RoundTimes]:
    """Return the times of the rounds in which all requests take part, without the first few."""
    engine = remote.engine
    prompts = problem_prompts(engine.tokenizer, requests)
    problems = endless_requests(prompts, engine.config, requests, sampling, rounds + WARM_UP + 1)
    loop, found = ClosedLoop(engine, problems, requests), []
    while not engine.idle:
        begin = time.monotonic_ns()
        loop.step()
        times = remote.timeline.end_step(begin, time.monotonic_ns())
        if times and engine.num_running == requests:
            found.append(times)
    return found[WARM_UP:]


def _row(config: WorkerGroupConfig, requests: int, params: SamplingParams, times: list[RoundTimes]) -> ProcessRoundTime:
    engine = config.engine
    medians = {
        name: 1e3 * statistics.median(getattr(t, name) for t in times) for name in RoundTimes.__dataclass_fields__
    }
    medians["link_time"] = medians.pop("link")
    return ProcessRoundTime(
        link=config.link,
        decoding=decoding_name(params),
        form=engine.form,
        block=engine.block,
        branches=engine.branches,
        draft_tp=config.degree(ModelRole.DRAFT),
        target_tp=config.target_tp,
        requests=requests,
        particles=params.rows,
        rounds=len(times),
        **medians,
    )
