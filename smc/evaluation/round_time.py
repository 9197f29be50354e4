"""Where the time of a round goes: the models' forward passes, laws and draws, and the host's own work around them.

The host's part is what an accelerator would wait for, so it is measured on its own. CPU only: a GPU's work is asynchronous.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

from smc.demo.problems import generate
from smc.engine.admission import pages_needed
from smc.engine.config import EngineConfig
from smc.engine.engine import Engine
from smc.engine.local import ModelPair, local_engine
from smc.engine.request import Request, SamplingParams

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
    """Scheduling, block tables, selection, building batches: everything but the next two."""
    sampling: float
    """Laws, draws and log-probabilities of both workers."""
    forward: float
    """Layers, attention and output head of both models."""


def measure(pair: ModelPair, config: EngineConfig, requests: int, particles: int, rounds: int) -> RoundTime:
    """Rounds of `requests` problems that run side by side and are kept from ending. Sizes `config` to hold them."""
    prompts = [pair.tokenizer.chat([{"role": "user", "content": p.question}]) for p in generate(PROBLEM_SEED, requests, "test")]
    # While the last prompt is prefilled, the first request may already run: room for that, and for one round to spare.
    longest = (rounds + WARM_UP + len(prompts) + 1) * (config.block + 1)
    params = SamplingParams(particles=particles, seed=0, ignore_eos=True, max_tokens=longest)
    asked = [Request(str(i), tuple(prompt), params) for i, prompt in enumerate(prompts)]
    pages = sum(max(pages_needed(request, config).values()) for request in asked)
    config = replace(config, max_slots=requests * particles, pages=pages)
    engine = local_engine(pair, config)
    for request in asked:
        engine.submit(request)
    while engine.num_running < requests:
        engine.step()
    for _ in range(WARM_UP):
        engine.step()
    samples = [_timed_step(engine) for _ in range(rounds)]
    host, sampling, forward = (1e3 * statistics.median(column) for column in zip(*samples))
    return RoundTime(config.form, config.block, config.branches, requests, particles, rounds, host, sampling, forward)


def _timed_step(engine: Engine) -> tuple[float, float, float]:
    workers = engine.workers.values()
    before = [(w.times.forward.seconds, w.times.sampling.seconds) for w in workers]
    begin = time.perf_counter()
    engine.step()
    whole = time.perf_counter() - begin
    forward = sum(w.times.forward.seconds - f for w, (f, _) in zip(workers, before))
    sampling = sum(w.times.sampling.seconds - s for w, (_, s) in zip(workers, before))
    return whole - forward - sampling, sampling, forward
