"""The quality table: the share of held-out problems that each way of decoding solves, and how fast. Prints nothing.

Every problem is one request with its own seed, so a setting's answers do not depend on how many are in flight.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from smc.demo.dense import MAX_ANSWER
from smc.demo.problems import Problem, grade
from smc.engine.local import ModelPair
from smc.engine.request import Answer, Request, SamplingParams
from smc.evaluation.batch import fitted_engine, run_in_flight
from smc.runtime.config import EngineConfig
from smc.statistics import Accuracy

LOCKSTEP_PARTICLES = (4, 8, 16, 32)
LOOKAHEAD_PARTICLES = (8, 16, 32)
BLOCKS = (8, 5)
BRANCHES = (1, 2, 4, 8)
WARM_UP_PROBLEMS = 5


@dataclass(frozen=True)
class Setting:
    """One way of decoding. Fields that a method does not have are None."""

    name: str
    method: str
    particles: int | None = None
    """N."""
    form: str | None = None
    block: int | None = None
    """K."""
    branches: int | None = None
    """F; look-ahead only."""

    @staticmethod
    def plain(method: str) -> Setting:
        return Setting(f"{method} alone", method)

    @staticmethod
    def lockstep(particles: int, block: int) -> Setting:
        return Setting(f"lockstep N={particles} K={block}", "smc", particles, "lockstep", block)

    @staticmethod
    def lookahead(particles: int, block: int, branches: int) -> Setting:
        return Setting(f"look-ahead N={particles} K={block} F={branches}", "smc", particles, "lookahead", block, branches)

    @property
    def engine(self) -> EngineConfig:
        """Plain decoding is not SMC in any form: what the engine is set to then does not matter."""
        return EngineConfig(form=self.form, block=self.block, branches=self.branches) if self.form else EngineConfig()


@dataclass(frozen=True)
class Row:
    """What one setting did. `rounds` and below are means over answers; None where the method has no such thing."""

    setting: Setting
    accuracy: Accuracy
    tokens: float
    """Length of an answer."""
    batch_tokens_per_second: float
    """Answer tokens per second with many requests in flight."""
    rounds: float | None
    resamples: float | None
    mean_ess_share: float | None
    """Effective sample size before resampling, as a share of N."""
    collapses: int
    """Rounds, over all answers, after which every weight was zero."""
    tokens_per_second: float | None = None
    """Answer tokens per second with one request at a time, where that was measured."""

    @property
    def resample_rate(self) -> float | None:
        """Share of rounds that ended in resampling."""
        return self.resamples / self.rounds if self.rounds else None


def grid(particles: Sequence[int] | None = None, blocks: Sequence[int] = BLOCKS, branches: Sequence[int] = BRANCHES) -> list[Setting]:
    """Both models alone, lockstep for every N and K, look-ahead for every N, K and F.

    `particles` None stands for the usual ones, which leave out look-ahead with fewer than 8.
    """
    settings = [Setting.plain("target"), Setting.plain("draft")]
    for block in dict.fromkeys(blocks):
        settings += [Setting.lockstep(n, block) for n in dict.fromkeys(particles or LOCKSTEP_PARTICLES)]
    for block in dict.fromkeys(blocks):
        for n in dict.fromkeys(particles or LOOKAHEAD_PARTICLES):
            settings += [Setting.lookahead(n, block, f) for f in dict.fromkeys(branches)]
    return settings


def measure(
    pair: ModelPair,
    setting: Setting,
    problems: Sequence[Problem],
    concurrency: int,
    seed: int,
    threshold: float | None = None,
    on_answer: Callable[[Problem, Answer], None] | None = None,
) -> Row:
    """Answer every problem with `concurrency` requests in flight. Raises RuntimeError if an answer ends in an error."""
    requests = problem_requests(pair, setting, problems, seed, threshold)
    answers = []
    began = time.perf_counter()
    for problem, answer in _answers(pair, setting, problems, requests, concurrency):
        answers.append((problem, answer))
        if on_answer:
            on_answer(problem, answer)
    seconds = time.perf_counter() - began
    return _row(setting, answers, seconds)


def measure_speed(pair: ModelPair, setting: Setting, problems: Sequence[Problem], seed: int, threshold: float | None = None) -> float:
    """Answer tokens per second, one request at a time, after a few that are not counted: first uses of a shape are slow."""
    requests = problem_requests(pair, setting, problems, seed, threshold)
    engine = fitted_engine(pair, setting.engine, requests)
    for _ in run_in_flight(engine, requests[:WARM_UP_PROBLEMS], 1):
        pass
    tokens, began = 0, time.perf_counter()
    for output in run_in_flight(engine, requests, 1):
        tokens += len(output.tokens)
    return tokens / (time.perf_counter() - began)


def problem_requests(
    pair: ModelPair, setting: Setting, problems: Sequence[Problem], seed: int, threshold: float | None = None
) -> list[Request]:
    """One request a problem, named by its index, with a seed that depends on nothing but `seed` and that index."""
    smc = {"particles": setting.particles, "ess_threshold": threshold} if setting.form else {}
    return [
        Request(
            str(index),
            tuple(pair.tokenizer.chat([{"role": "user", "content": problem.question}])),
            SamplingParams(method=setting.method, max_tokens=MAX_ANSWER, seed=derived_seed(seed, index), **smc),
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
    means = {"rounds": None, "resamples": None, "mean_ess_share": None}
    if setting.form:
        means = {
            "rounds": sum(s.rounds for s in statistics) / count,
            "resamples": sum(s.resamples for s in statistics) / count,
            "mean_ess_share": sum(s.mean_ess / s.particles for s in statistics) / count,
        }
    return Row(
        setting=setting,
        accuracy=Accuracy(sum(grade(problem, answer.text) for problem, answer in answers), count),
        tokens=tokens / count,
        batch_tokens_per_second=tokens / seconds,
        collapses=sum(s.collapses for s in statistics),
        **means,
    )
