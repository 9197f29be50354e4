"""Measures the time to the first token by the length of a prompt: alone and beside requests that are being decoded, for
new and for cached prompts.

Knows an engine and the times that its workers report for prompts; knows nothing about processes or terminals.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.backends import Mode, PromptBackend, numerics_of_models
from benchmarks.load import ClosedLoop, Load, repeated
from benchmarks.speed import WARM_UP
from smc.api.engine_config import GPU_PREFILL, EngineConfig
from smc.api.request import Answer, Output, Request
from smc.api.sampling_params import Method, SamplingParams
from smc.executor.messages import Pending, PromptResult
from smc.memory.kv_cache import pool_for
from smc.model.config import ModelConfig
from smc.scheduler.engine import Engine
from smc.scheduler.methods import rules_of
from smc.scheduler.prefill_budget import LEAST
from smc.types import ModelRole, Numerics

PEAK = 7.9e14
"""Operations a second that an H200 reaches in matrix products in bfloat16."""
BESIDE_TOKENS = 256
"""Maximum number of prompt tokens of the requests that are decoded meanwhile."""
BESIDE_ROUNDS, ROUNDS_A_CHUNK = 64, 3
"""Rounds of a request that is decoded meanwhile, beyond the rounds before a prompt; and further rounds for each of the
prompt's smallest chunks. The request must outlast the prompt."""
MOST_BESIDE = 1 << 19
"""Maximum number of positions of all particles of all these requests: 64 GiB in an 8B model. Longer answers are cut."""
REPEATS = 3

PromptRuns = dict[str, list[Pending[PromptResult[np.ndarray]]]]
"""Results of prompts, by role."""


@dataclass(frozen=True)
class FirstToken:
    """Medians over prompts, in milliseconds unless said otherwise."""

    mode: str
    numerics: str
    """Order of sums that ran; see `benchmarks.backends.numerics_of_models`."""
    particles: int
    """N, K and F of the mode; those of the requests that are decoded meanwhile."""
    block: int
    branches: int
    gpus: int
    context: int
    """Prompt tokens."""
    cached: int
    """Prompt tokens found in the prefix cache."""
    beside: int
    """Number of requests that are decoded meanwhile."""
    ttft: float
    """Time from submission to the first token."""
    draft: float
    """The draft's time on the prompt."""
    target: float
    """The target's time on the prompt."""
    draft_peak: float
    """Share of the peak arithmetic of the draft's GPUs during `draft`."""
    target_peak: float
    chunks: int
    """Number of the target's passes over the prompt."""
    round: float | None
    """Mean time of a round without a prompt; None: no other request is decoded."""
    round_beside: float | None
    """Mean time of a round while the prompt runs."""
    longest: float | None
    """Longest round while the prompt runs."""

    @property
    def stretch(self) -> float | None:
        """Ratio of the mean rounds while the prompt runs and without a prompt."""
        return None if self.round is None or self.round_beside is None else self.round_beside / self.round


@dataclass(frozen=True)
class _Run:
    """One prompt, from submission to its first token."""

    ttft: float
    """Seconds, like all times here."""
    steps: list[float]
    """Times of the engine's steps meanwhile in which all requests had rounds."""
    took: dict[str, float]
    """Time of each model on the prompt, by role."""
    chunks: int
    answer: Answer


class FirstTokenTimer:
    """Measures first tokens on a machine. `on_prompt` is called whenever a prompt has been run."""

    def __init__(
        self,
        backend: PromptBackend,
        quiet: int,
        on_prompt: Callable[[], None] = lambda: None,
        distribution: Mapping[str, Any] | None = None,
    ) -> None:
        """`quiet`: number of rounds before each prompt, with which the rounds beside the prompt are compared.
        `distribution`: settings of `SamplingParams`, by name, of the requests that are decoded meanwhile."""
        self._backend, self._quiet, self._on_prompt, self._distribution = backend, quiet, on_prompt, distribution or {}

    def run(self, mode: Mode, context: int, beside: int) -> list[FirstToken]:
        """Return a row for new prompts, and one for the same prompts again. Raises ValueError for a context that is too
        long for the models."""
        names = () if mode.method.plain else ("particles", "population", "verification")
        rows: dict[str, Any] = {name: getattr(mode, name) for name in names}
        params = SamplingParams(method=mode.method, **rows, **self._distribution)
        longest = min(self._backend.shape(mode, role).max_context for role in ModelRole)
        if context >= longest:
            raise ValueError(f"--context {context}; allowed: below {longest}, what both models were made for")
        load = Load(beside, self._prompts(beside, min(longest // 2, BESIDE_TOKENS), 1), None)
        background = load.make_requests(params, min(longest // 2, self._lifetime(mode, params, context, beside)))
        prompts = self._prompts(REPEATS + 1, context, 2)
        runs: dict[str, list[_Run]] = {"new": [], "again": []}
        quiet: list[float] = []
        with self._backend.engine(mode, _fitted(mode, background, context)) as engine, _listening(engine) as pending:
            for i, prompt in enumerate(prompts):
                loop = _begun(engine, background, beside)
                between = [_timed_step(loop)[0] for _ in range(self._quiet)] if beside else []
                # The first prompt is not counted: it compiles, records, and chooses the fastest kernels.
                quiet += between if i else []
                for name, found in runs.items():
                    run = _first_token(mode, loop, pending, f"{name} {i}", tuple(prompt))
                    found += [run] if i else []
                    self._on_prompt()
                loop.stop()
            numerics = numerics_of_models(engine, params.decoding)
        return [self._row(mode, numerics, context, beside, quiet, found) for found in runs.values()]

    def _lifetime(self, mode: Mode, params: SamplingParams, context: int, beside: int) -> int:
        """Return the number of answer tokens of a request that is decoded meanwhile."""
        stride = rules_of(params).stride(mode.config)
        rounds = WARM_UP + self._quiet + BESIDE_ROUNDS + ROUNDS_A_CHUNK * context // LEAST
        return min(stride * rounds, MOST_BESIDE // max(1, beside * params.rows))

    def _prompts(self, count: int, tokens: int, seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        low = min(10, self._backend.tokenizer.size // 2)
        return torch.randint(low, self._backend.tokenizer.size, (count, tokens), generator=generator).tolist()

    def _row(
        self, mode: Mode, numerics: Numerics, context: int, beside: int, quiet: list[float], runs: list[_Run]
    ) -> FirstToken:
        median = lambda values: 1e3 * statistics.median(values)  # noqa: E731
        cached = runs[0].answer.cached_tokens
        took = {role: statistics.median(run.took[role] for run in runs) for role in ModelRole}
        steps = [step for run in runs for step in run.steps]
        return FirstToken(
            mode=mode.name,
            numerics=numerics.value,
            particles=1 if mode.method.plain else mode.particles,
            block=mode.config.block,
            branches=1 if mode.method.plain else mode.config.branches,
            gpus=mode.gpus,
            context=context,
            cached=cached,
            beside=beside,
            ttft=median(run.ttft for run in runs),
            draft=1e3 * took[ModelRole.DRAFT],
            target=1e3 * took[ModelRole.TARGET],
            draft_peak=self._peak(mode, ModelRole.DRAFT, context, cached, took[ModelRole.DRAFT]),
            target_peak=self._peak(mode, ModelRole.TARGET, context, cached, took[ModelRole.TARGET]),
            chunks=statistics.median_low(run.chunks for run in runs),
            round=1e3 * statistics.mean(quiet) if beside else None,
            round_beside=1e3 * statistics.mean(steps) if steps else None,
            longest=1e3 * max(steps) if steps else None,
        )

    def _peak(self, mode: Mode, role: ModelRole, context: int, cached: int, seconds: float) -> float:
        gpus = max(1, mode.degrees[list(ModelRole).index(role)])
        return (
            operations(self._backend.shape(mode, role), context - cached, cached) / (seconds * gpus * PEAK)
            if seconds
            else 0.0
        )


def operations(config: ModelConfig, tokens: int, past: int) -> float:
    """Return the multiplications and additions for `tokens` tokens after `past` positions, with the head for the last
    token only."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    seen = tokens * past + tokens * (tokens + 1) / 2
    return 2.0 * config.vocab_size * config.hidden_size + config.num_layers * (
        2.0 * layer * tokens + 4.0 * queries * seen
    )


@contextmanager
def _listening(engine: Engine) -> Iterator[PromptRuns]:
    """Collect the results of the prompts that the engine's workers run, by role."""
    prompts: PromptRuns = {role: [] for role in ModelRole}
    for role, worker in engine.workers.items():

        def listen(batch, ask=worker.run_prompts, to=prompts[role]):
            to.append(ask(batch))
            return to[-1]

        # Replaces the method for this worker only.
        vars(worker)["run_prompts"] = listen
    yield prompts
    for worker in engine.workers.values():
        del vars(worker)["run_prompts"]


def _begun(engine: Engine, background: list[Request], requests: int) -> ClosedLoop:
    """Return a loop in which all background requests are being decoded. Raises ValueError if some have ended before
    others have begun."""
    loop = ClosedLoop(engine, repeated(background), requests)
    while engine.num_running < requests:
        ended = any(output.answer is not None for output in loop.step())
        if ended:
            raise ValueError(
                f"--concurrency {requests}: some requests end before all have begun; give a lower --concurrency, or "
                "fewer --particles"
            )
    for _ in range(WARM_UP):
        loop.step()
    return loop


def _first_token(mode: Mode, loop: ClosedLoop, pending: PromptRuns, name: str, prompt: tuple[int, ...]) -> _Run:
    for prompts in pending.values():
        prompts.clear()
    begin, answer = time.monotonic(), None
    steps: list[float] = []
    loop.engine.submit(Request(name, prompt, _asking(mode)))
    while answer is None:
        decoded = 0 < loop.running <= loop.engine.num_running
        step, outputs = _timed_step(loop)
        steps += [step] if decoded else []
        answer = next((output.answer for output in outputs if output.request_id == name), None)
    ttft, spans = time.monotonic() - begin, {}
    for role, prompts in pending.items():
        for one in prompts:
            one.result()
        spans[role] = [one.spans()["prompt"] for one in prompts]
    took = {role: sum(1e-9 * (end - begin) for begin, end in of_role) for role, of_role in spans.items()}
    return _Run(ttft, steps, took, len(spans["target"]), answer)


def _timed_step(loop: ClosedLoop) -> tuple[float, list[Output]]:
    begin = time.monotonic()
    outputs = loop.step()
    return time.monotonic() - begin, outputs


def _asking(mode: Mode) -> SamplingParams:
    """Return the settings of a request that needs every model of a mode, and ends after its first token."""
    rows = {"method": Method.TARGET} if mode.method.plain else {"method": Method.EXACT, "particles": 1}
    return SamplingParams(**rows, max_tokens=1, ignore_eos=True, seed=1)


def _fitted(mode: Mode, background: list[Request], context: int) -> EngineConfig:
    """Return the configuration with room for the background requests and for two prompts, one of which may be cached.
    Earlier cached prompts are evicted."""
    params = [(request.params, len(request.prompt)) for request in background] + [(_asking(mode), context)] * 2
    needs = [rules_of(one).ample_pages(mode.config, one, prompt) for one, prompt in params]
    pages = pool_for(sum(max(need.get(role, 0) for role in ModelRole) for need in needs))
    longest = max(prompt + one.max_tokens for one, prompt in params)
    slots = sum(one.rows * one.slots_per_row for one, _ in params)
    chains = sum(rules_of(one).chains(one.rows) for one, _ in params)
    return replace(mode.config, max_slots=slots, max_chains=chains, max_context=longest, pages=pages, **GPU_PREFILL)
