"""Where the time of a round goes: the models' forward passes, laws and draws, and the host's own work around them.

The host's part is what an accelerator would wait for, so it is measured on its own: between forward passes on the same CPU,
which leave its caches cold, and with the models left out, as when they run elsewhere. CPU only: a GPU's work is asynchronous.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smc.demo.problems import generate
from smc.engine.config import EngineConfig
from smc.engine.engine import Engine
from smc.engine.local import ModelPair
from smc.engine.request import Request, SamplingParams
from smc.evaluation.batch import fitted_engine
from smc.models.decoder import Attend, Decoder
from smc.models.tokenizer import Tokenizer

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
    host_alone: float
    """`host` of rounds whose models do nothing."""


class IdleModel:
    """Stands in for a decoder: a fixed law after any token, at no cost. Target and draft get different ones, so weights vary."""

    def __init__(self, model: Decoder, vocab_size: int, seed: int) -> None:
        self.config, self.embed = model.config, model.embed
        self._logits_V = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed))

    def __call__(self, tokens_T: Tensor, _rope: Tensor, _attend: Attend) -> Tensor:
        return tokens_T[:, None]

    def logits(self, hidden_TE: Tensor) -> Tensor:
        return self._logits_V.expand(len(hidden_TE), -1)


def measure(pair: ModelPair, config: EngineConfig, requests: int, particles: int, rounds: int) -> RoundTime:
    """Rounds of `requests` problems that run side by side and are kept from ending. Sizes `config` to hold them."""
    host, sampling, forward = _medians(pair, config, requests, particles, rounds)
    size = pair.tokenizer.size
    idle = replace(pair, target=IdleModel(pair.target, size, 1), draft=IdleModel(pair.draft, size, 2))
    host_alone, _, _ = _medians(idle, config, requests, particles, rounds)
    return RoundTime(config.form, config.block, config.branches, requests, particles, rounds, host, sampling, forward, host_alone)


def steady_requests(tokenizer: Tokenizer, config: EngineConfig, requests: int, particles: int, rounds: int) -> list[Request]:
    """Problems that stay in flight for `rounds` rounds and a warm-up: nothing ends them but their length."""
    prompts = [tokenizer.chat([{"role": "user", "content": p.question}]) for p in generate(PROBLEM_SEED, requests, "test")]
    longest = (rounds + WARM_UP + 1) * (config.block + 1)  # the first round runs in the step that prefills
    params = SamplingParams(particles=particles, seed=0, ignore_eos=True, max_tokens=longest)
    return [Request(str(i), tuple(prompt), params) for i, prompt in enumerate(prompts)]


def _medians(pair: ModelPair, config: EngineConfig, requests: int, particles: int, rounds: int) -> tuple[float, float, float]:
    """(host, sampling, forward), milliseconds."""
    asked = steady_requests(pair.tokenizer, config, requests, particles, rounds)
    chunk = sum(len(request.prompt) for request in asked)
    engine = fitted_engine(pair, replace(config, prefill_chunk=chunk), asked, requests)
    for request in asked:
        engine.submit(request)
    for _ in range(1 + WARM_UP):
        engine.step()
    assert engine.num_running == requests
    host, sampling, forward = (1e3 * statistics.median(column) for column in zip(*(_timed_step(engine) for _ in range(rounds))))
    return host, sampling, forward


def _timed_step(engine: Engine) -> tuple[float, float, float]:
    workers = engine.workers.values()
    before = [(w.times.forward.seconds, w.times.sampling.seconds) for w in workers]
    begin = time.perf_counter()
    engine.step()
    whole = time.perf_counter() - begin
    forward = sum(w.times.forward.seconds - f for w, (f, _) in zip(workers, before))
    sampling = sum(w.times.sampling.seconds - s for w, (_, s) in zip(workers, before))
    return whole - forward - sampling, sampling, forward
