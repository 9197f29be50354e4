"""Where the time of a round goes on a CPU: the draft's part, the target's, and the host's own work around them.

The host's part is what an accelerator would wait for, if it were not done while the models run (smc/engine/cohorts.py).
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

from smc.demo.problems import generate
from smc.engine.engine import Engine
from smc.engine.local import ModelPair
from smc.engine.request import Method, Request, SamplingParams
from smc.evaluation.batch import fitted_engine
from smc.models.tokenizer import Tokenizer
from smc.runtime.config import EngineConfig
from smc.runtime.messages import SIDES

PROBLEM_SEED = 20_261_121
WARM_UP = 3


@dataclass(frozen=True)
class RoundTime:
    """Medians over rounds, in milliseconds."""

    form: str
    block: int
    branches: int
    requests: int
    particles: int
    rounds: int
    host: float
    """Scheduling, planning, recording: all that is neither of the next two."""
    draft: float
    """Forward passes and draws of the draft."""
    target: float
    """The target's pass, the law of what it scored and, in lockstep, the choice."""


def measure(pair: ModelPair, config: EngineConfig, requests: int, particles: int, rounds: int) -> RoundTime:
    """Rounds of `requests` problems that run side by side and are kept from ending. Sizes `config` to hold them."""
    asked = steady_requests(pair.tokenizer, config, requests, particles, rounds)
    chunk = sum(len(request.prompt) for request in asked)
    engine = fitted_engine(pair, replace(config, prefill_chunk=chunk), asked, requests)
    for request in asked:
        engine.submit(request)
    for _ in range(1 + WARM_UP):
        engine.step()
    assert engine.num_running == requests
    medians = (1e3 * statistics.median(column) for column in zip(*(_timed_step(engine) for _ in range(rounds))))
    return RoundTime(config.form, config.block, config.branches, requests, particles, rounds, *medians)


def steady_requests(tokenizer: Tokenizer, config: EngineConfig, requests: int, particles: int, rounds: int) -> list[Request]:
    """Problems that stay in flight for `rounds` rounds and a warm-up: nothing ends them but their length."""
    prompts = [tokenizer.chat([{"role": "user", "content": p.question}]) for p in generate(PROBLEM_SEED, requests, "test")]
    longest = (rounds + WARM_UP + 1) * (config.block + 1)  # the first round runs in the step that prefills
    params = SamplingParams(particles=particles, seed=0, ignore_eos=True, max_tokens=longest)
    return [Request(str(i), tuple(prompt), params) for i, prompt in enumerate(prompts)]


def _timed_step(engine: Engine) -> tuple[float, float, float]:
    """(host, draft, target), seconds."""
    begin = time.perf_counter()
    engine.step()
    whole = time.perf_counter() - begin
    spans = engine.rounds_of(Method.SMC).last.spans()
    draft, target = (1e-9 * (spans[side][1] - spans[side][0]) for side in SIDES)
    return whole - draft - target, draft, target
