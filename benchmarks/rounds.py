"""Measures the time of a round on a CPU, split into the draft's part, the target's part and the host's work, with both
models in this process. `benchmarks.process_rounds` gives each rank a process of its own.

On a GPU the host's part overlaps with the models (smc/scheduler/decode.py)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.load import ClosedLoop, endless_requests, problem_prompts
from smc.api.engine_config import EngineConfig
from smc.api.sampling_params import SamplingParams
from smc.local_engine import ModelPair, fitted_engine
from smc.scheduler.methods import rules_of
from smc.types import Decoding

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
    params, stats = problems[0].params, engine.take_stats()
    confirmed = None if params.verification is None else stats.exact[params.verification].tokens_a_round
    tokens = confirmed or rules_of(params).stride(config)
    shape = (config.form, config.block, config.branches, requests, params.rows, rounds)
    return RoundTime(decoding_name(params), *shape, tokens, *medians)


def decoding_name(params: SamplingParams) -> str:
    return params.population or (params.verification if params.verification == "rejection" else params.method.value)


def _timed_step(loop: ClosedLoop) -> tuple[float, float, float]:
    """Run a step; return its seconds as (host, draft, target)."""
    begin = time.perf_counter()
    loop.step()
    whole = time.perf_counter() - begin
    read = loop.engine.rounds_of(Decoding.INDEPENDENT).last
    assert read is not None
    spans = read.spans()
    times = {name: 1e-9 * (end - begin) for name, (begin, end) in spans.items()}
    draft = times.pop("draft")
    # All other timed work is the target's: its pass, the choice of rows, and the remapping.
    target = sum(times.values())
    return whole - draft - target, draft, target
