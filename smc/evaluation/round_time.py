"""Where the time of a round goes on a CPU: the draft's part, the target's, and the host's own work around them.

The host's part is what an accelerator would wait for, if it were not done while the models run
(smc/scheduler/decode.py)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import Method, SamplingParams
from smc.demo.problems import generate
from smc.evaluation.batch import fitted_engine
from smc.local_engine import ModelPair
from smc.model.tokenizer import Tokenizer
from smc.scheduler.engine import Engine

PROBLEM_SEED = 20_261_121
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
    """By which an answer grows in a round: of exact decoding, as many as these rounds confirmed."""
    host: float
    """Scheduling, planning, recording: all that is neither of the next two."""
    draft: float
    """Forward passes and draws of the draft."""
    target: float
    """The target's pass, the law of what it scored, the choice, and its own following of it."""


@dataclass(frozen=True)
class GangRound:
    """Medians over rounds, in milliseconds; see `smc.scheduler.timeline.RoundTimes` for the parts."""

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


def measure(
    pair: ModelPair, config: EngineConfig, requests: int, sampling: Mapping[str, Any], rounds: int
) -> RoundTime:
    """Rounds of `requests` problems that run side by side and are kept from ending. Sizes `config` to hold them.

    `sampling`: settings of `SamplingParams`, by name.
    """
    asked = steady_requests(pair.tokenizer, config, requests, sampling, rounds)
    chunk = sum(len(request.prompt) for request in asked)
    engine = fitted_engine(pair, replace(config, prefill_chunk=chunk), asked, requests)
    for request in asked:
        engine.submit(request)
    for _ in range(1 + WARM_UP):
        engine.step()
    assert engine.num_running == requests
    engine.take_stats()
    medians = [1e3 * statistics.median(column) for column in zip(*(_timed_step(engine) for _ in range(rounds)))]
    params, stride = asked[0].params, engine.rounds_of(Method.SMC).decoding.stride(config)
    tokens = engine.take_stats().spec["walk"].tokens_a_round or stride
    shape = (config.form, config.block, config.branches, requests, params.rows, rounds)
    return RoundTime(decoding_name(params), *shape, tokens, *medians)


def decoding_name(params: SamplingParams) -> str:
    return params.population or (params.verification if params.verification == "rejection" else params.method.value)


def steady_requests(
    tokenizer: Tokenizer, config: EngineConfig, requests: int, sampling: Mapping[str, Any], rounds: int
) -> list[Request]:
    """Problems that stay in flight for `rounds` rounds and a warm-up: nothing ends them but their length."""
    prompts = [
        tokenizer.chat([{"role": "user", "content": p.question}]) for p in generate(PROBLEM_SEED, requests, "test")
    ]
    longest = (rounds + WARM_UP + 1) * (config.block + 1)  # the first round runs in the step that prefills
    params = SamplingParams(**sampling, seed=0, ignore_eos=True, max_tokens=longest)
    return [Request(str(i), tuple(prompt), params) for i, prompt in enumerate(prompts)]


def _timed_step(engine: Engine) -> tuple[float, float, float]:
    """(host, draft, target), seconds."""
    begin = time.perf_counter()
    engine.step()
    whole = time.perf_counter() - begin
    read = engine.rounds_of(Method.SMC).last
    assert read is not None
    spans = read.spans()
    times = {name: 1e-9 * (end - begin) for name, (begin, end) in spans.items()}
    draft = times.pop("draft")
    # All else that is timed is the target's: its pass, the choice, and what follows from it.
    target = sum(times.values())
    return whole - draft - target, draft, target
