"""What an engine is asked for while its rounds are timed: always so many requests side by side."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from smc.api.engine_config import EngineConfig
from smc.api.outputs import Output
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.demo import MAX_ANSWER
from smc.demo.problems import generate
from smc.evaluation.round_time import PROBLEM_SEED
from smc.memory.kv_cache import pool_for
from smc.model.tokenizer import Tokenizer
from smc.scheduler.admission import sized_for
from smc.scheduler.engine import Engine
from smc.scheduler.methods import decoding_of
from smc.types import ModelRole

PROBLEMS = 128
"""Least number of different ones."""
LONG_PROMPT = 1024
LEFT = 0.9
"""Of requests that began together: with fewer, others take the place of all."""


@dataclass(frozen=True)
class Load:
    """What is asked for while rounds are timed: always so many requests at once."""

    requests: int
    prompts: Sequence[Sequence[int]]
    """Token ids. As many as requests, or more: then one that ends makes room for the next."""
    answer: int | None
    """Tokens that end an answer; None: it goes on for as long as rounds are timed."""

    @property
    def context(self) -> int:
        """Prompt tokens, the mean."""
        return round(statistics.mean(map(len, self.prompts)))

    def asked(self, params: SamplingParams, longest: int) -> list[Request]:
        """One request a prompt; `longest`: tokens of an answer that is to go on."""
        own = (
            replace(params, max_tokens=longest, ignore_eos=True)
            if self.answer is None
            else replace(params, max_tokens=self.answer)
        )
        return [Request(str(i), tuple(prompt), replace(own, seed=i)) for i, prompt in enumerate(self.prompts)]


def random_load(tokenizer: Tokenizer, requests: int, context: int) -> Load:
    """Prompts of tokens that mean nothing, and answers that do not end."""
    generator = torch.Generator().manual_seed(1)
    return Load(requests, torch.randint(10, tokenizer.size, (requests, context), generator=generator).tolist(), None)


def problem_load(tokenizer: Tokenizer, requests: int) -> Load:
    """Problems, and answers that end where the model ends them."""
    problems = generate(PROBLEM_SEED, PROBLEMS + 2 * requests, "test")
    return Load(
        requests, [tokenizer.chat([{"role": "user", "content": problem.question}]) for problem in problems], MAX_ANSWER
    )


class Asked:
    """Requests that an engine has, in turn and from the first again, until told to stop."""

    def __init__(self, engine: Engine, asked: Sequence[Request], requests: int) -> None:
        self.engine, self._asked, self._requests = engine, asked, requests
        self._open: set[str] = set()
        self._next, self.wave = 0, 0

    @property
    def running(self) -> int:
        return len(self._open)

    def stop(self) -> None:
        for request_id in self._open:
            self.engine.abort(request_id)
        self.engine.step()
        self._open.clear()

    def _submit(self, count: int) -> None:
        """So many more; each time that all have had their turn with other seeds."""
        for number in range(self._next, self._next + count):
            turn, place = divmod(number, len(self._asked))
            request = self._asked[place]
            params = replace(request.params, seed=(request.params.seed or 0) + turn * len(self._asked))
            self.engine.submit(replace(request, request_id=str(number), params=params))
            self._open.add(str(number))
        self._next += count

    def _ended(self, outputs: Sequence[Output]) -> int:
        """How many of these requests ended with them."""
        ended = self._open & {output.request_id for output in outputs if output.answer is not None}
        self._open -= ended
        return len(ended)


class ClosedLoop(Asked):
    """Keeps so many requests with an engine: one that ends makes room for the next."""

    def __init__(self, engine: Engine, asked: Sequence[Request], requests: int) -> None:
        super().__init__(engine, asked, requests)
        self._submit(requests)

    @property
    def steady(self) -> bool:
        """Whether the last step is to be timed: here every one is, by itself."""
        return self.engine.num_running == len(self._open)

    def step(self) -> list[Output]:
        self.wave += 1
        outputs = self.engine.step()
        self._submit(self._ended(outputs))
        return outputs


class Waves(Asked):
    """Requests that begin together. When one in ten has ended, the others are given up, and as many new ones begin: so
    what is timed are rounds of all of them, without the prompts of any. Every wave is timed from its first round on."""

    def __init__(self, engine: Engine, asked: Sequence[Request], requests: int) -> None:
        super().__init__(engine, asked, requests)
        self.steady = False
        self._since = 0
        """Steps since all have begun."""

    def step(self) -> list[Output]:
        if len(self._open) < LEFT * self._requests:
            self.stop()
            self._submit(self._requests)
            self.wave, self._since = self.wave + 1, 0
        outputs, begun = self.engine.step(), self.engine.num_running == self._requests
        # The step after that in which the last began asks for a first round, and waits for none.
        self.steady = self._since > 1
        self._since += self._since > 0 or begun
        self._ended(outputs)
        return outputs


def fitted(config: EngineConfig, asked: list[Request], requests: int) -> EngineConfig:
    """With room for so many of these requests at once."""
    needs = [decoding_of(request.params).ample_pages(config, request.params, len(request.prompt)) for request in asked]
    pages = requests * max(max(need.get(role, 0) for role in ModelRole) for need in needs)
    longest = max(len(request.prompt) for request in asked)
    most = max(request.params.max_tokens or 0 for request in asked)
    # All at once, so that they start together; long ones in pieces, so that what a layer makes of them stays small.
    chunk = requests * longest if longest <= LONG_PROMPT else 512
    context = longest + most
    sized = sized_for(config, asked[0].params, requests)
    return replace(sized, max_context=context, pages=pool_for(pages), prefill_chunk=chunk)
