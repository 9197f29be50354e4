"""The quality table: the share of held-out problems that each way of decoding solves, and how fast. Prints nothing.

Every problem is one request with its own seed, so a setting's answers do not depend on how many are in flight.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smc.api.engine_config import EngineConfig
from smc.api.limits import UNSET
from smc.api.outputs import Answer
from smc.api.request import Request
from smc.api.sampling_params import POPULATIONS, SamplingParams
from smc.demo import MAX_ANSWER
from smc.demo.problems import Problem, grade
from smc.statistics import Accuracy

if TYPE_CHECKING:
    from smc.local_engine import ModelPair
    from smc.model.tokenizer import Tokenizer

EXACT_PARTICLES, EXACT_BLOCKS = (1, 4, 8, 16), (4, 5, 8)
WIDE, WIDE_BRANCHES, EXACT_BRANCHES = 16, 2, 4
"""From so many rows on a tree is wide: fewer branches of each will do."""
REJECTION_PARTICLES, REJECTION_BLOCKS = (1, 4, 8), (5,)
SMC_PARTICLES = (4, 8, 16, 32)
LOCKSTEP_BLOCKS, LOOKAHEAD_BLOCKS = (8, 5), (5,)
BRANCHES = (1, 2, 4)
WARM_UP_PROBLEMS = 5


@dataclass(frozen=True)
class Setting:
    """One way of decoding. Fields that a method does not have are None."""

    name: str
    method: str
    particles: int | None = None
    """N; of exact decoding, rows of the tree."""
    form: str | None = None
    block: int | None = None
    """K."""
    branches: int | None = None
    """F; look-ahead only."""
    population: str | None = None
    """SMC only."""
    verification: str | None = None
    """Exact decoding only, where it is not by the walk."""

    @staticmethod
    def plain(method: str) -> Setting:
        return Setting(f"{method} alone", method)

    @staticmethod
    def lockstep(kind: str, particles: int, block: int) -> Setting:
        """`kind`: `exact`, `rejection`, or the population of SMC."""
        return Setting(f"{kind} lockstep N={particles} K={block}", *_method(kind, particles, "lockstep", block, None))

    @staticmethod
    def lookahead(kind: str, particles: int, block: int, branches: int) -> Setting:
        name = f"{kind} look-ahead N={particles} K={block} F={branches}"
        return Setting(name, *_method(kind, particles, "lookahead", block, branches))

    @property
    def kind(self) -> str:
        return self.population or self.verification or self.method

    @property
    def engine(self) -> EngineConfig:
        """Plain decoding has no form: what the engine is set to then does not matter."""
        if not self.form:
            return EngineConfig()
        assert self.block is not None
        return EngineConfig(
            form=self.form, block=self.block, branches=UNSET if self.branches is None else self.branches
        )


@dataclass(frozen=True)
class Terms:
    """What all settings of a table have in common."""

    seed: int
    temperature: float = 1.0
    ess_threshold: float | None = None
    """Of independent particles."""


@dataclass(frozen=True)
class Row:
    """What one setting did. `rounds` and below are means over answers; None where the method has no such thing."""

    setting: Setting
    accuracy: Accuracy
    tokens: float
    """Length of an answer."""
    batch_tokens_per_second: float | None
    """Answer tokens per second with many requests in flight; None where the answers are from another record."""
    rounds: float | None
    resamples: float | None
    mean_ess_share: float | None
    """Effective sample size before resampling, as a share of N; independent particles only."""
    collapses: int
    """Rounds, over all answers, after which every weight was zero."""
    hit_share: float | None = None
    """Rounds after which what had been drafted ahead went on as the target did, as a share of all; exact decoding ahead
    only."""
    mean_logp: float | None = None
    """Of an answer's token under the target's law. Not of the draft alone, where the target does not run."""
    tokens_per_second: float | None = None
    """Answer tokens per second with one request at a time, from the first token on, where that was measured."""
    first_token: float | None = None
    """Milliseconds until then, the mean."""

    @property
    def tokens_a_round(self) -> float | None:
        """But for the first token of an answer, which comes with the prompt."""
        return (self.tokens - 1) / self.rounds if self.rounds else None

    @property
    def resample_rate(self) -> float | None:
        """Share of rounds that ended in resampling."""
        return self.resamples / self.rounds if self.rounds and self.resamples is not None else None


def grid(
    particles: Sequence[int] | None = None, blocks: Sequence[int] | None = None, branches: Sequence[int] | None = None
) -> list[Setting]:
    """Both models alone, then exact decoding, by rejection too, and SMC of both populations in both forms. None stands
    for usual values."""
    settings = [Setting.plain("target"), Setting.plain("draft")]
    exact = [(block, n) for block in _each(blocks, EXACT_BLOCKS) for n in _each(particles, EXACT_PARTICLES)]
    for block, n in exact:
        usual = (WIDE_BRANCHES if n >= WIDE else EXACT_BRANCHES,)
        settings += [Setting.lookahead("exact", n, block, f) for f in _each(branches, usual)]
    settings += [Setting.lockstep("exact", n, block) for block, n in exact]
    chains = [(block, n) for block in _each(blocks, REJECTION_BLOCKS) for n in _each(particles, REJECTION_PARTICLES)]
    for block, n in chains:
        settings += [Setting.lookahead("rejection", n, block, f) for f in _each(branches, (EXACT_BRANCHES,))]
    settings += [Setting.lockstep("rejection", n, block) for block, n in chains]
    for kind in POPULATIONS:
        for block in _each(blocks, LOCKSTEP_BLOCKS):
            settings += [Setting.lockstep(kind, n, block) for n in _each(particles, SMC_PARTICLES)]
        for block in _each(blocks, LOOKAHEAD_BLOCKS):
            for n in _each(particles, SMC_PARTICLES):
                settings += [Setting.lookahead(kind, n, block, f) for f in _each(branches, BRANCHES)]
    return settings


def measure(
    pair: ModelPair,
    setting: Setting,
    problems: Sequence[Problem],
    concurrency: int,
    terms: Terms,
    on_answer: Callable[[Problem, Answer], None] | None = None,
) -> Row:
    """Answer every problem with `concurrency` requests in flight. Raises RuntimeError if an answer ends in an error."""
    requests = problem_requests(pair.tokenizer, setting, problems, terms, logprobs=setting.method != "draft")
    answers = []
    began = time.perf_counter()
    for problem, answer in _answers(pair, setting, problems, requests, concurrency):
        answers.append((problem, answer))
        if on_answer:
            on_answer(problem, answer)
    seconds = time.perf_counter() - began
    return _row(setting, answers, seconds)


def measure_speed(pair: ModelPair, setting: Setting, problems: Sequence[Problem], terms: Terms) -> tuple[float, float]:
    """Answer tokens per second from an answer's first token on, and the milliseconds before: one request at a time.

    After a few that are not counted: first uses of a shape are slow.
    """
    from smc.evaluation.batch import fitted_engine, run_in_flight

    requests = problem_requests(pair.tokenizer, setting, problems, terms)
    engine = fitted_engine(pair, setting.engine, requests)
    for _ in run_in_flight(engine, requests[:WARM_UP_PROBLEMS], 1):
        pass
    tokens, decoding, waiting = 0, 0.0, 0.0
    asked, first = time.perf_counter(), None
    for output in run_in_flight(engine, requests, 1):
        now = time.perf_counter()
        if first is not None:
            tokens += len(output.tokens)
        elif output.tokens:
            first = now
            waiting += first - asked
        if output.answer is not None:
            decoding += now - (first or now)
            asked, first = now, None
    return tokens / decoding, 1e3 * waiting / len(requests)


def seconds_of(pair: ModelPair, setting: Setting, problems: Sequence[Problem], terms: Terms) -> float:
    """How long it takes to answer these, all in flight."""
    began = time.perf_counter()
    for _ in _answers(
        pair, setting, problems, problem_requests(pair.tokenizer, setting, problems, terms), len(problems)
    ):
        pass
    return time.perf_counter() - began


def problem_requests(
    tokenizer: Tokenizer, setting: Setting, problems: Sequence[Problem], terms: Terms, logprobs: bool = False
) -> list[Request]:
    """One request a problem, named by its index, with a seed that depends on nothing but the terms' seed and that
    index."""
    own: dict[str, Any] = {
        "particles": setting.particles,
        "population": setting.population,
        "verification": setting.verification,
    }
    if setting.population == "independent":
        own["ess_threshold"] = terms.ess_threshold
    own |= {"method": setting.method, "temperature": terms.temperature, "max_tokens": MAX_ANSWER, "logprobs": logprobs}
    return [
        Request(
            str(index),
            tuple(tokenizer.chat([{"role": "user", "content": problem.question}])),
            SamplingParams(seed=derived_seed(terms.seed, index), **own),
        )
        for index, problem in enumerate(problems)
    ]


def derived_seed(seed: int, index: int) -> int:
    """63 bits of a hash, so that neighbouring seeds and indices have nothing in common."""
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8]) >> 1


def _answers(
    pair: ModelPair, setting: Setting, problems: Sequence[Problem], requests: list[Request], concurrency: int
) -> Iterator[tuple[Problem, Answer]]:
    """In the order in which they end."""
    from smc.evaluation.batch import fitted_engine, run_in_flight

    engine = fitted_engine(pair, setting.engine, requests, concurrency)
    for output in run_in_flight(engine, requests, concurrency):
        if output.answer is None:
            continue
        if output.answer.error:
            raise RuntimeError(f"{setting.name}, problem {output.request_id}: {output.answer.error}")
        yield problems[int(output.request_id)], output.answer
    engine.check_books()


def _row(setting: Setting, answers: list[tuple[Problem, Answer]], seconds: float) -> Row:
    count = len(answers)
    tokens = sum(len(answer.tokens) for _, answer in answers)
    statistics = [answer.statistics for _, answer in answers]
    known = [answer.logprobs for _, answer in answers if answer.logprobs is not None]
    tried = sum(s.hits + s.misses for s in statistics)
    resamples = setting.population == "independent"
    return Row(
        setting=setting,
        accuracy=Accuracy(sum(grade(problem, answer.text) for problem, answer in answers), count),
        tokens=tokens / count,
        batch_tokens_per_second=tokens / seconds,
        rounds=sum(s.rounds for s in statistics) / count if setting.form else None,
        resamples=sum(s.resamples for s in statistics) / count if resamples else None,
        mean_ess_share=sum(s.mean_ess / s.particles for s in statistics) / count if resamples else None,
        collapses=sum(s.collapses for s in statistics),
        hit_share=sum(s.hits for s in statistics) / tried if tried else None,
        mean_logp=sum(map(sum, known)) / tokens if known else None,
    )


def _method(kind: str, *shape: object) -> tuple:
    """Fields of a setting of so many particles, a form, K and F."""
    if kind in ("exact", "rejection"):
        return "exact", *shape, None, None if kind == "exact" else kind
    return "smc", *shape, kind, None


def _each(given: Sequence[int] | None, usual: Sequence[int]) -> list[int]:
    return list(dict.fromkeys(given or usual))
