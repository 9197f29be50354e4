"""Time to the first token, by the length of a prompt: alone and beside requests that are decoded, computed and found in
the prefix cache.

Knows an engine and what its workers say of the prompts that they run; nothing about processes or terminals.
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

from benchmarks.backends import Mode, PromptBackend
from benchmarks.load import ClosedLoop, Load, repeated
from benchmarks.speed import WARM_UP
from smc.api.engine_config import GPU_PREFILL, EngineConfig
from smc.api.request import Answer, Output, Request
from smc.api.sampling_params import Method, SamplingParams
from smc.executor.messages import Pending, PromptResult
from smc.memory.kv_cache import pool_for
from smc.model.config import ModelConfig
from smc.scheduler.engine import Engine
from smc.scheduler.methods import decoding_of
from smc.scheduler.prefill import LEAST
from smc.types import ModelRole

PEAK = 7.9e14
"""Operations a second that an H200 reaches in products of bfloat16."""
BESIDE_TOKENS = 256
"""Prompt tokens of requests that are decoded meanwhile, at most."""
BESIDE_ROUNDS, ROUNDS_A_CHUNK = 64, 3
"""Rounds that such a request takes part in besides those before a prompt, and further ones for each of the prompt's
smallest chunks: the request must outlast the prompt."""
MOST_BESIDE = 1 << 19
"""Positions of all particles of all such requests, at most: 64 GiB of an 8B model. Longer answers are cut."""
REPEATS = 3

PromptRuns = dict[str, list[Pending[PromptResult[np.ndarray]]]]
"""Prompts, by role."""


@dataclass(frozen=True)
class FirstToken:
    """Medians over prompts; milliseconds unless said otherwise. Shares are those of the time that a model's GPUs were
    at the prompt."""

    mode: str
    gpus: int
    context: int
    """Prompt tokens."""
    cached: int
    """Prompt tokens found in the prefix cache."""
    beside: int
    """Requests that are decoded meanwhile."""
    ttft: float
    """Time from submission to the first token."""
    draft: float
    """The draft at the prompt."""
    target: float
    draft_peak: float
    """Share of the arithmetic peak."""
    target_peak: float
    chunks: int
    """Passes of the target."""
    round: float | None
    """A round without a prompt, the mean; None where no other request is decoded."""
    round_beside: float | None
    """A round while the prompt runs, the mean."""
    longest: float | None
    """The longest of these."""

    @property
    def stretch(self) -> float | None:
        """How many times as long rounds are while the prompt runs."""
        return None if self.round is None or self.round_beside is None else self.round_beside / self.round


@dataclass(frozen=True)
class _Run:
    """One prompt, from submission to its first token."""

    ttft: float
    """Seconds, as all here."""
    steps: list[float]
    """Steps of the engine meanwhile in which all requests had rounds."""
    took: dict[str, float]
    """Time of each model at the prompt."""
    chunks: int
    answer: Answer


class FirstTokenTimer:
    """Measures on a machine, for requests of one distribution; `on_prompt` is told whenever a prompt has been run."""

    def __init__(
        self,
        backend: PromptBackend,
        quiet: int,
        on_prompt: Callable[[], None] = lambda: None,
        distribution: Mapping[str, Any] | None = None,
    ) -> None:
        """`quiet`: rounds before each prompt, which those beside it are compared with; `distribution`: settings of
        `SamplingParams` of the requests that are decoded meanwhile, by name."""
        self._backend, self._quiet, self._on_prompt, self._distribution = backend, quiet, on_prompt, distribution or {}

    def run(self, mode: Mode, context: int, beside: int) -> list[FirstToken]:
        """Rows for new prompts and for the same prompts again. Raises ValueError for a context that is too long for the
        models."""
        rows: dict[str, Any] = {} if mode.method.plain else {"particles": mode.particles, "population": mode.population}
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
                # The first compile, record, and find out what is fastest.
                quiet += between if i else []
                for name, found in runs.items():
                    run = _first_token(mode, loop, pending, f"{name} {i}", tuple(prompt))
                    found += [run] if i else []
                    self._on_prompt()
                loop.stop()
        return [self._row(mode, context, beside, quiet, found) for found in runs.values()]

    def _lifetime(self, mode: Mode, params: SamplingParams, context: int, beside: int) -> int:
        """Tokens of a request that is decoded meanwhile."""
        stride = decoding_of(params).stride(mode.config)
        rounds = WARM_UP + self._quiet + BESIDE_ROUNDS + ROUNDS_A_CHUNK * context // LEAST
        return min(stride * rounds, MOST_BESIDE // max(1, beside * params.rows))

    def _prompts(self, count: int, tokens: int, seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        low = min(10, self._backend.tokenizer.size // 2)
        return torch.randint(low, self._backend.tokenizer.size, (count, tokens), generator=generator).tolist()

    def _row(self, mode: Mode, context: int, beside: int, quiet: list[float], runs: list[_Run]) -> FirstToken:
        median = lambda values: 1e3 * statistics.median(values)  # noqa: E731
        cached = runs[0].answer.cached_tokens
        took = {role: statistics.median(run.took[role] for run in runs) for role in ModelRole}
        steps = [step for run in runs for step in run.steps]
        return FirstToken(
            mode=mode.name,
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
    """Multiplications and additions that so many tokens behind a past take, the head for the last one alone."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    seen = tokens * past + tokens * (tokens + 1) / 2
    return 2.0 * config.vocab_size * config.hidden_size + config.num_layers * (
        2.0 * layer * tokens + 4.0 * queries * seen
    )


@contextmanager
def _listening(engine: Engine) -> Iterator[PromptRuns]:
    """The prompts that the engine's workers run, by role."""
    prompts: PromptRuns = {role: [] for role in ModelRole}
    for role, worker in engine.workers.items():

        def listen(batch, ask=worker.run_prompts, to=prompts[role]):
            to.append(ask(batch))
            return to[-1]

        # In place of the method, for this worker alone.
        vars(worker)["run_prompts"] = listen
    yield prompts
    for worker in engine.workers.values():
        del vars(worker)["run_prompts"]


def _begun(engine: Engine, background: list[Request], requests: int) -> ClosedLoop:
    """All are decoded. Raises ValueError if some have ended before others have begun."""
    loop = ClosedLoop(engine, repeated(background), requests)
    while engine.num_running < requests:
        ended = any(output.answer is not None for output in loop.step())
        if ended:
            raise ValueError(
                f"--concurrency {requests}: some end before all have begun; allowed: fewer, or smaller ones"
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
    """Settings for a first token that needs every model of a mode; further tokens are not decoded."""
    rows = {"method": Method.TARGET} if mode.method.plain else {"method": Method.EXACT, "particles": 1}
    return SamplingParams(**rows, max_tokens=1, ignore_eos=True, seed=1)


def _fitted(mode: Mode, background: list[Request], context: int) -> EngineConfig:
    """With room for those that are decoded and for two prompts, of which one may be cached; what was cached before
    makes room."""
    params = [(request.params, len(request.prompt)) for request in background] + [(_asking(mode), context)] * 2
    needs = [decoding_of(one).ample_pages(mode.config, one, prompt) for one, prompt in params]
    pages = pool_for(sum(max(need.get(role, 0) for role in ModelRole) for need in needs))
    longest = max(prompt + one.max_tokens for one, prompt in params)
    return replace(
        mode.config, max_slots=sum(one.rows for one, _ in params), max_context=longest, pages=pages, **GPU_PREFILL
    )
