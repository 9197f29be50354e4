"""The load driver of all measurements: makes the requests of a load, and submits them to an engine in several ways.

Knows nothing about what is measured.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from smc.api.engine_config import EngineConfig
from smc.api.request import Output, Request
from smc.api.sampling_params import SamplingParams
from smc.demo import MAX_ANSWER
from smc.demo.problems import generate
from smc.memory.kv_cache import pool_for
from smc.model.tokenizer import Tokenizer
from smc.scheduler.engine import Engine
from smc.scheduler.methods import rules_of
from smc.types import ModelRole

PROBLEM_SEED = 20_261_121
PROBLEMS = 128
"""Minimum number of different problems of a load."""
LONG_PROMPT = 1024
"""Prompt tokens above which prompts run in chunks."""
LEFT = 0.9
"""A wave ends when a smaller share of its requests than this is still running."""


@dataclass(frozen=True)
class Load:
    """Prompts, and a number of concurrent requests."""

    requests: int
    prompts: Sequence[Sequence[int]]
    """Token ids of at least as many prompts as requests. With more prompts, a request that ends makes room for the
    next."""
    answer: int | None
    """Maximum number of tokens of an answer; None: answers last as long as rounds are timed."""
    name: str = ""
    """Where the prompts come from, for tables."""
    distribution: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `SamplingParams` that the requests' tokens are drawn with, by name."""

    @property
    def context(self) -> int:
        """Mean number of prompt tokens."""
        return round(statistics.mean(map(len, self.prompts)))

    def make_requests(self, params: SamplingParams, longest: int) -> list[Request]:
        """Return one request for each prompt. `longest`: tokens of an answer if `answer` is None."""
        own = (
            replace(params, max_tokens=longest, ignore_eos=True)
            if self.answer is None
            else replace(params, max_tokens=self.answer)
        )
        return [Request(str(i), tuple(prompt), replace(own, seed=i)) for i, prompt in enumerate(self.prompts)]


def random_load(tokenizer: Tokenizer, requests: int, context: int) -> Load:
    """Return a load with prompts of `context` random tokens, and answers that do not end."""
    generator = torch.Generator().manual_seed(1)
    return Load(requests, torch.randint(10, tokenizer.size, (requests, context), generator=generator).tolist(), None)


def problem_load(tokenizer: Tokenizer, requests: int) -> Load:
    """Return a load with demo problems as prompts, and answers that end where the model ends them."""
    return Load(requests, problem_prompts(tokenizer, PROBLEMS + 2 * requests), MAX_ANSWER)


def problem_prompts(tokenizer: Tokenizer, count: int, seed: int = PROBLEM_SEED) -> list[list[int]]:
    """Return the token ids of `count` demo problems as prompts."""
    problems = generate(seed, count, "test")
    return [list(tokenizer.chat([{"role": "user", "content": problem.question}])) for problem in problems]


def file_load(prompts: Sequence[Sequence[int]], requests: int) -> Load:
    """Return a load with the given prompts, and answers that end where the model ends them. Prompts are repeated if
    there are fewer than two for each request."""
    count = max(len(prompts), 2 * requests)
    return Load(requests, list(itertools.islice(itertools.cycle(prompts), count)), MAX_ANSWER)


def endless_requests(
    prompts: Sequence[Sequence[int]], config: EngineConfig, requests: int, sampling: Mapping[str, Any], rounds: int
) -> list[Request]:
    """Return requests whose answers last for `rounds` rounds: only their length ends them. Prompts are repeated if
    there are fewer than requests; seeds differ. `sampling`: settings of `SamplingParams`, by name."""
    params = SamplingParams(**sampling, ignore_eos=True, max_tokens=rounds * (config.block + 1))
    chosen = itertools.islice(itertools.cycle(prompts), requests)
    return [Request(str(i), tuple(prompt), replace(params, seed=i)) for i, prompt in enumerate(chosen)]


def repeated(requests: Sequence[Request]) -> Iterator[Request]:
    """Yield these requests in an endless loop, with new ids, and with other seeds each time."""
    for number in itertools.count():
        turn, index = divmod(number, len(requests))
        params = requests[index].params
        seed = (params.seed or 0) + turn * len(requests)
        yield replace(requests[index], request_id=str(number), params=replace(params, seed=seed))


class LoadDriver:
    """Submits requests to an engine, and keeps track of those that run."""

    def __init__(self, engine: Engine, requests: Iterable[Request], concurrency: int) -> None:
        self.engine, self.concurrency = engine, concurrency
        self._requests = iter(requests)
        self._running: set[str] = set()
        self.wave = 0
        """Number of the wave. Steps of one wave are timed together."""

    @property
    def running(self) -> int:
        return len(self._running)

    def stop(self) -> None:
        """Abort the running requests."""
        for request_id in self._running:
            self.engine.abort(request_id)
        self.engine.step()
        self._running.clear()

    def _submit_missing(self) -> None:
        """Submit further requests until `concurrency` of them run, or there are no more."""
        while len(self._running) < self.concurrency and (request := next(self._requests, None)) is not None:
            self.engine.submit(request)
            self._running.add(request.request_id)

    def _remove_finished(self, outputs: Sequence[Output]) -> None:
        self._running -= {output.request_id for output in outputs if output.answer is not None}


class ClosedLoop(LoadDriver):
    """Keeps `concurrency` requests running: each request that ends makes room for the next."""

    def __init__(self, engine: Engine, requests: Iterable[Request], concurrency: int) -> None:
        super().__init__(engine, requests, concurrency)
        self._submit_missing()

    @property
    def steady(self) -> bool:
        """Whether the last step is to be timed, since all requests took part in it."""
        return self.engine.num_running == len(self._running)

    def step(self) -> list[Output]:
        self.wave += 1
        outputs = self.engine.step()
        self._remove_finished(outputs)
        self._submit_missing()
        return outputs

    def run(self) -> Iterator[Output]:
        """Step until every request is answered."""
        while self._running:
            yield from self.step()


class Waves(LoadDriver):
    """Runs requests in waves that begin together. When a tenth of a wave has ended, the others are aborted and a new
    wave begins. So the timed rounds have nearly all requests, and no prompts between them. Every wave is timed from its
    first round on."""

    def __init__(self, engine: Engine, requests: Iterable[Request], concurrency: int) -> None:
        super().__init__(engine, requests, concurrency)
        self.steady = False
        self._steps_of_all = 0
        """Number of steps since all requests of the wave have begun."""

    def step(self) -> list[Output]:
        if len(self._running) < LEFT * self.concurrency:
            self.stop()
            self._submit_missing()
            self.wave, self._steps_of_all = self.wave + 1, 0
        outputs, all_run = self.engine.step(), self.engine.num_running == self.concurrency
        # The step after the one in which the last request began queues a first round, and waits for no round.
        self.steady = self._steps_of_all > 1
        self._steps_of_all += self._steps_of_all > 0 or all_run
        self._remove_finished(outputs)
        return outputs


def sized_for(config: EngineConfig, params: SamplingParams, requests: int) -> EngineConfig:
    """Return the config with just enough slots, and room for the distributions of chains, for this many such requests
    at once."""
    rows = requests * params.rows
    return replace(config, max_slots=rows * params.slots_per_row, max_chains=rules_of(params).chains(rows))


def sized_config(config: EngineConfig, requests: Sequence[Request], concurrency: int) -> EngineConfig:
    """Return `config` with room for `concurrency` of these requests at once."""
    needs = [rules_of(one.params).ample_pages(config, one.params, len(one.prompt)) for one in requests]
    pages = concurrency * max(max(need.get(role, 0) for role in ModelRole) for need in needs)
    longest = max(len(request.prompt) for request in requests)
    most = max(request.params.max_tokens or 0 for request in requests)
    # Short prompts run in one chunk, so that requests start together; long ones in several chunks, to limit the memory
    # of a layer's intermediate results.
    chunk = concurrency * longest if longest <= LONG_PROMPT else 512
    sized = sized_for(config, requests[0].params, concurrency)
    return replace(sized, max_context=longest + most, pages=pool_for(pages), prefill_chunk=chunk)
