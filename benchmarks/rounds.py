"""Measures the time of a round on a CPU, split into the draft's part, the target's part and the host's work; with both
models in this process, or each rank in its own process.

On a GPU the host's part overlaps with the models (smc/scheduler/decode.py)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.load import ClosedLoop, endless_requests, problem_prompts, sized_for
from benchmarks.processes import RankProcesses
from services.coordinator.process import RemoteEngine
from services.launch.config import WorkerGroupConfig
from smc.api.engine_config import EngineConfig
from smc.api.sampling_params import Method, SamplingParams
from smc.local_engine import ModelPair, fitted_engine
from smc.scheduler.stats import RoundTimes

WARM_UP = 3


@dataclass(frozen=True)
class RoundTime:
    """Medians over rounds, in milliseconds."""

    decoding: str
    """`exact`, or the population of SMC."""
    form: str
    block: int
    branches: int
    requests: int
    particles: int
    rounds: int
    tokens: float
    """Tokens that a round adds to an answer; in exact decoding, the tokens it confirms."""
    host: float
    """Time of scheduling, planning and recording."""
    draft: float
    """Time of the draft's forward passes and draws."""
    target: float
    """Time of the target's pass, scores, resampling and remapping."""


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


def measure_rounds(
    pair: ModelPair,
    config: EngineConfig,
    requests: int,
    sampling: Mapping[str, Any],
    rounds: int,
    prompts: Sequence[Sequence[int]] = (),
) -> RoundTime:
    """Time rounds of `requests` concurrent requests. Values of `config` that depend on the load, such as `max_slots`
    and `pages`, are replaced.

    `sampling`: settings of `SamplingParams`, by name. `prompts`: token ids; default: problems.
    """
    # The first round runs in the step that prefills.
    prompts = prompts or problem_prompts(pair.tokenizer, requests)
    problems = endless_requests(prompts, config, requests, sampling, rounds + WARM_UP + 1)
    chunk = sum(len(request.prompt) for request in problems)
    engine = fitted_engine(pair, replace(config, prefill_chunk=chunk), problems, requests)
    loop = ClosedLoop(engine, problems, requests)
    for _ in range(1 + WARM_UP):
        loop.step()
    assert engine.num_running == requests
    engine.take_stats()
    medians = [1e3 * statistics.median(column) for column in zip(*(_timed_step(loop) for _ in range(rounds)))]
    params, stride = problems[0].params, engine.rounds_of(Method.SMC).decoding.stride(config)
    tokens = engine.take_stats().spec["walk"].tokens_a_round or stride
    shape = (config.form, config.block, config.branches, requests, params.rows, rounds)
    return RoundTime(decoding_name(params), *shape, tokens, *medians)


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
                    times = _process_times(remote, count, sampling, rounds)
                    found.append(_process_row(replace(config, engine=engine), count, params, times))
                    done()
    return found


def decoding_name(params: SamplingParams) -> str:
    return params.population or (params.verification if params.verification == "rejection" else params.method.value)


def _timed_step(loop: ClosedLoop) -> tuple[float, float, float]:
    """Run a step; return its seconds as (host, draft, target)."""
    begin = time.perf_counter()
    loop.step()
    whole = time.perf_counter() - begin
    read = loop.engine.rounds_of(Method.SMC).last
    assert read is not None
    spans = read.spans()
    times = {name: 1e-9 * (end - begin) for name, (begin, end) in spans.items()}
    draft = times.pop("draft")
    # All other timed work is the target's: its pass, the choice of rows, and the remapping.
    target = sum(times.values())
    return whole - draft - target, draft, target


def _process_times(remote: RemoteEngine, requests: int, sampling: Mapping[str, Any], rounds: int) -> list[RoundTimes]:
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


def _process_row(
    config: WorkerGroupConfig, requests: int, params: SamplingParams, times: list[RoundTimes]
) -> ProcessRoundTime:
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
        draft_tp=config.draft_tp,
        target_tp=config.target_tp,
        requests=requests,
        particles=params.rows,
        rounds=len(times),
        **medians,
    )
