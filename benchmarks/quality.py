"""The quality table: measures the share of held-out problems that each way of decoding solves, and its speed. Also
reads and writes the file from which `smcserve eval` resumes. Prints nothing.

Every problem is one request with its own seed, so a setting's answers do not depend on the number of requests in
flight.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smc.api.constraint import Constraint
from smc.api.engine_config import EngineConfig
from smc.api.limits import UNSET
from smc.api.request import Answer, Request
from smc.api.sampling_params import POPULATIONS, SamplingParams
from smc.demo import MAX_ANSWER
from smc.demo.problems import Accuracy, Problem, derived_seed, grade
from smc.loading import DEMO

if TYPE_CHECKING:
    from smc.local_engine import ModelPair
    from smc.model.tokenizer import Tokenizer
    from smc.scheduler.engine import Engine

EXACT_PARTICLES, EXACT_BLOCKS = (1, 4, 8, 16), (4, 5, 8)
WIDE, WIDE_BRANCHES, EXACT_BRANCHES = 16, 2, 4
"""Number of rows from which a tree counts as wide, branches of a row in a wide tree, and in other trees."""
REJECTION_PARTICLES, REJECTION_BLOCKS = (1, 4, 8), (5,)
SMC_PARTICLES = (4, 8, 16, 32)
LOCKSTEP_BLOCKS, LOOKAHEAD_BLOCKS = (8, 5), (5,)
BRANCHES = (1, 2, 4)
WARM_UP_PROBLEMS = 5
VERSION = 3
"""Version of the file. Version 1 had no population and drew answers differently; speeds of version 2 included
prompts."""


SAME_ANSWERS = ("problems", "seed", "temperature", "ess_threshold", "weights_sha256", "draft_vocab")
"""Conditions that decide which problems are solved, apart from noise in the logits. Weights in FP8 and int4 also matter
(`solved_before` checks them). All other conditions affect only the speed."""


@dataclass(frozen=True)
class DecodingSetting:
    """One way of decoding. None: the method has no such field."""

    name: str
    method: str
    particles: int | None = None
    """N; in exact decoding, rows of the tree."""
    form: str | None = None
    block: int | None = None
    """K."""
    branches: int | None = None
    """F; look-ahead only."""
    population: str | None = None
    """SMC only."""
    verification: str | None = None
    """Exact decoding only; None: walk."""

    @staticmethod
    def plain(method: str) -> DecodingSetting:
        return DecodingSetting(f"{method} alone", method)

    @staticmethod
    def lockstep(kind: str, particles: int, block: int) -> DecodingSetting:
        """`kind`: `exact`, `rejection`, or the population of SMC."""
        return DecodingSetting(
            f"{kind} lockstep N={particles} K={block}", *_method(kind, particles, "lockstep", block, None)
        )

    @staticmethod
    def lookahead(kind: str, particles: int, block: int, branches: int) -> DecodingSetting:
        name = f"{kind} look-ahead N={particles} K={block} F={branches}"
        return DecodingSetting(name, *_method(kind, particles, "lookahead", block, branches))

    @property
    def kind(self) -> str:
        return self.population or self.verification or self.method

    @property
    def engine(self) -> EngineConfig:
        """Configuration of the engine. Plain decoding has no form, and the engine's form does not affect it."""
        if not self.form:
            return EngineConfig()
        assert self.block is not None
        return EngineConfig(
            form=self.form,
            block=self.block,
            smc_block=self.block,
            branches=UNSET if self.branches is None else self.branches,
        )


@dataclass(frozen=True)
class Terms:
    """Sampling settings that all rows of a table share."""

    seed: int
    temperature: float = 1.0
    ess_threshold: float | None = None
    """ESS threshold of independent particles."""
    max_tokens: int = MAX_ANSWER
    """Maximum number of tokens of an answer."""
    alpha: float | None = None
    """Power of the target's probability; SMC only."""
    constraint: Constraint | None = None
    constraint_scope: str | None = None
    """SMC only."""


@dataclass(frozen=True)
class QualityRow:
    """The results of one setting. `rounds` and below are means over answers; None: the method has no such value."""

    setting: DecodingSetting
    accuracy: Accuracy
    tokens: float
    """Mean length of an answer."""
    batch_tokens_per_second: float | None
    """Answer tokens per second with many requests in flight, prompts and first uses of a shape included; None if the
    answers are from another record."""
    rounds: float | None
    resamples: float | None
    mean_ess_share: float | None
    """Effective sample size before resampling, as a share of N; independent particles only."""
    collapses: int
    """Number of rounds, over all answers, after which every weight was zero."""
    hit_share: float | None = None
    """Hits as a share of hits and misses; exact decoding in look-ahead only."""
    mean_logp: float | None = None
    """Mean log-probability of an answer's token under the target; None for the draft alone."""
    tokens_per_second: float | None = None
    """Answer tokens per second with one request at a time, from the first token on; None: not measured."""
    first_token: float | None = None
    """Mean time until the first token, in milliseconds."""

    @property
    def tokens_a_round(self) -> float | None:
        """Mean tokens of a round. The first token of an answer does not count: the pass over the prompt yields it."""
        return (self.tokens - 1) / self.rounds if self.rounds else None

    @property
    def resample_rate(self) -> float | None:
        """Share of rounds that ended in resampling."""
        return self.resamples / self.rounds if self.rounds and self.resamples is not None else None


def grid(
    particles: Sequence[int] | None = None, blocks: Sequence[int] | None = None, branches: Sequence[int] | None = None
) -> list[DecodingSetting]:
    """Return the settings of the table: both models alone, exact decoding by walk and by rejection, and SMC with both
    populations, in both forms. None: the usual values."""
    settings = [DecodingSetting.plain("target"), DecodingSetting.plain("draft")]
    exact = [(block, n) for block in _each(blocks, EXACT_BLOCKS) for n in _each(particles, EXACT_PARTICLES)]
    for block, n in exact:
        usual = (WIDE_BRANCHES if n >= WIDE else EXACT_BRANCHES,)
        settings += [DecodingSetting.lookahead("exact", n, block, f) for f in _each(branches, usual)]
    settings += [DecodingSetting.lockstep("exact", n, block) for block, n in exact]
    chains = [(block, n) for block in _each(blocks, REJECTION_BLOCKS) for n in _each(particles, REJECTION_PARTICLES)]
    for block, n in chains:
        settings += [DecodingSetting.lookahead("rejection", n, block, f) for f in _each(branches, (EXACT_BRANCHES,))]
    settings += [DecodingSetting.lockstep("rejection", n, block) for block, n in chains]
    for kind in POPULATIONS:
        for block in _each(blocks, LOCKSTEP_BLOCKS):
            settings += [DecodingSetting.lockstep(kind, n, block) for n in _each(particles, SMC_PARTICLES)]
        for block in _each(blocks, LOOKAHEAD_BLOCKS):
            for n in _each(particles, SMC_PARTICLES):
                settings += [DecodingSetting.lookahead(kind, n, block, f) for f in _each(branches, BRANCHES)]
    return settings


def measure(
    pair: ModelPair,
    setting: DecodingSetting,
    problems: Sequence[Problem],
    concurrency: int,
    terms: Terms,
    on_answer: Callable[[Problem, Answer], None] | None = None,
) -> QualityRow:
    """Answer every problem with `concurrency` requests in flight. Raises RuntimeError if an answer ends in an error."""
    from smc.local_engine import fitted_engine

    requests = problem_requests(pair.tokenizer, setting, problems, terms, logprobs=setting.method != "draft")
    answers = []
    engine = fitted_engine(pair, setting.engine, requests, concurrency)
    began = time.perf_counter()
    for answer in answers_of(engine, setting, requests, concurrency):
        problem = problems[int(answer.request_id)]
        answers.append((problem, answer))
        if on_answer:
            on_answer(problem, answer)
    seconds = time.perf_counter() - began
    return _row(setting, answers, seconds)


def measure_speed(
    pair: ModelPair, setting: DecodingSetting, problems: Sequence[Problem], terms: Terms
) -> tuple[float, float]:
    """Answer problems one at a time. Return answer tokens per second from an answer's first token on, and the mean
    milliseconds until that token.

    A few problems are answered first without being timed, since the first uses of a shape are slow.
    """
    from benchmarks.load import ClosedLoop
    from smc.local_engine import fitted_engine

    requests = problem_requests(pair.tokenizer, setting, problems, terms)
    engine = fitted_engine(pair, setting.engine, requests)
    for _ in ClosedLoop(engine, requests[:WARM_UP_PROBLEMS], 1).run():
        pass
    tokens, decoding, waiting = 0, 0.0, 0.0
    submitted, first = time.perf_counter(), None
    for output in ClosedLoop(engine, requests, 1).run():
        now = time.perf_counter()
        if first is not None:
            tokens += len(output.tokens)
        elif output.tokens:
            first = now
            waiting += first - submitted
        if output.answer is not None:
            decoding += now - (first or now)
            submitted, first = now, None
    return tokens / decoding, 1e3 * waiting / len(requests)


def seconds_of(pair: ModelPair, setting: DecodingSetting, problems: Sequence[Problem], terms: Terms) -> float:
    """Return the seconds that it takes to answer these problems, all in flight at once."""
    from smc.local_engine import fitted_engine

    began = time.perf_counter()
    requests = problem_requests(pair.tokenizer, setting, problems, terms)
    engine = fitted_engine(pair, setting.engine, requests, len(problems))
    for _ in answers_of(engine, setting, requests, len(problems)):
        pass
    return time.perf_counter() - began


def problem_requests(
    tokenizer: Tokenizer, setting: DecodingSetting, problems: Sequence[Problem], terms: Terms, logprobs: bool = False
) -> list[Request]:
    """Return one request for each problem; see `prompt_requests`."""
    chats = (tokenizer.chat([{"role": "user", "content": problem.question}]) for problem in problems)
    return prompt_requests([tuple(chat) for chat in chats], setting, terms, logprobs)


def prompt_requests(
    prompts: Sequence[tuple[int, ...]], setting: DecodingSetting, terms: Terms, logprobs: bool
) -> list[Request]:
    """Return one request for each prompt. Its id is the prompt's index; its seed depends only on the terms' seed and
    that index."""
    own: dict[str, Any] = {
        "method": setting.method,
        "particles": setting.particles,
        "population": setting.population,
        "verification": setting.verification,
        "ess_threshold": terms.ess_threshold if setting.population == "independent" else None,
        "temperature": terms.temperature,
        "max_tokens": terms.max_tokens,
        "constraint": terms.constraint,
        "logprobs": logprobs,
    }
    if setting.method == "smc":
        own |= {"alpha": terms.alpha, "constraint_scope": terms.constraint_scope}
    return [
        Request(str(index), prompt, SamplingParams(seed=derived_seed(terms.seed, index), **own))
        for index, prompt in enumerate(prompts)
    ]


def answers_of(
    engine: Engine, setting: DecodingSetting, requests: Sequence[Request], concurrency: int
) -> Iterator[Answer]:
    """Yield the answers to problems in the order in which they end. Raises RuntimeError if one ends in an error."""
    from benchmarks.load import ClosedLoop

    for output in ClosedLoop(engine, requests, concurrency).run():
        if output.answer is None:
            continue
        if output.answer.error:
            raise RuntimeError(f"{setting.name}, problem {output.request_id}: {output.answer.error}")
        yield output.answer
    engine.check_books()


def _row(setting: DecodingSetting, answers: list[tuple[Problem, Answer]], seconds: float) -> QualityRow:
    count = len(answers)
    tokens = sum(len(answer.tokens) for _, answer in answers)
    statistics = [answer.statistics for _, answer in answers]
    known = [answer.logprobs for _, answer in answers if answer.logprobs is not None]
    tried = sum(s.hits + s.misses for s in statistics)
    resamples = setting.population == "independent"
    return QualityRow(
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
    """Return the fields of a setting after its name. `shape`: particles, form, K and F."""
    if kind in ("exact", "rejection"):
        return "exact", *shape, None, None if kind == "exact" else kind
    return "smc", *shape, kind, None


def _each(given: Sequence[int] | None, usual: Sequence[int]) -> list[int]:
    return list(dict.fromkeys(given or usual))


class QualityRecord:
    """Rows measured under one set of conditions, in a file if `path` is given."""

    def __init__(self, path: Path | None, conditions: dict[str, Any], rows: dict[str, QualityRow]) -> None:
        """`rows`: by the name of their setting."""
        self.path, self.conditions, self.rows = path, conditions, rows

    @staticmethod
    def open(path: Path | None, conditions: dict[str, Any], resume: bool) -> QualityRecord:
        """Return a new record, or with `resume` the one in the file. Raises ValueError if the file exists without
        `resume`, or has other conditions."""
        if path is None or not path.exists():
            if resume and path is None:
                raise ValueError("--resume has no effect without --json FILE; leave it out")
            return QualityRecord(path, conditions, {})
        if not resume:
            raise ValueError(f"{path} exists already; use --resume to continue it, or another file")
        return QualityRecord(path, conditions, _read(path, conditions, None, "resumed")[0])

    def add(self, row: QualityRow) -> None:
        self.rows[row.setting.name] = row
        self.write()

    def write(self) -> None:
        """Write a new file and rename it, so that an interrupted run leaves the old one intact."""
        if self.path is None:
            return
        content = {
            "version": VERSION,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "conditions": self.conditions,
            "rows": [_as_dict(row) for row in self.rows.values()],
        }
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(part, self.path)


def solved_before(paths: Sequence[Path], conditions: dict[str, Any]) -> tuple[dict[str, QualityRow], list[str]]:
    """Read other records with the same `SAME_ANSWERS`. Return their rows by the names of their settings, without
    speeds; and descriptions of the types and devices that they were measured with. Raises ValueError for a record with
    other conditions."""
    rows: dict[str, QualityRow] = {}
    measured_with = set()
    for path in paths:
        found, theirs = _read(path, conditions, SAME_ANSWERS, "taken for --accuracy-from")
        types = f"{theirs['dtype']} {conditions['dtype']}"
        if any(name in types for name in ("fp8", "int4")) and theirs["dtype"] != conditions["dtype"]:
            raise ValueError(
                f"{path} cannot be taken for --accuracy-from: dtype was {theirs['dtype']!r} and is now "
                f"{conditions['dtype']!r}, and FP8 and int4 solve other problems"
            )
        rows |= {
            name: replace(row, batch_tokens_per_second=None, tokens_per_second=None, first_token=None)
            for name, row in found.items()
        }
        measured_with.add(f"{theirs['dtype']} on {theirs['device_name']}")
    return rows, sorted(measured_with)


def _read(
    path: Path, conditions: dict[str, Any], same: Sequence[str] | None, use: str
) -> tuple[dict[str, QualityRow], dict[str, Any]]:
    """Return the rows and conditions of a file. Raises ValueError if it is no record, or differs in the conditions
    `same` (None: in any condition). `use`: what the record is used for, for the message."""
    try:
        found = json.loads(path.read_text())
        outdated = "rows" in found and found.get("version") != VERSION
        rows = {} if outdated else {row["name"]: _row_of(row) for row in found["rows"]}
        before = found["conditions"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a record of smcserve eval ({type(error).__name__}: {error}); use another file"
        ) from error
    if outdated:
        raise ValueError(f"{path} cannot be {use}: it is of an earlier version of smcserve eval; use another file")
    compared = dict.fromkeys((*conditions, *before)) if same is None else same
    different = [key for key in compared if before.get(key) != conditions.get(key)]
    if different:
        differences = "; ".join(
            f"{key} was {before.get(key)!r} and is now {conditions.get(key)!r}" for key in different
        )
        raise ValueError(f"{path} cannot be {use}: {differences}")
    return rows, before


def environment(device: str) -> dict[str, Any]:
    """Return the part of a record's conditions that describes the demo pair's weights, torch and device."""
    weights = {
        directory.name: hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest() for directory in DEMO
    }
    return {"weights_sha256": weights, **machine(device)}


def machine(device: str) -> dict[str, str]:
    """Return the part of a record's conditions that describes torch and device."""
    import torch

    return {
        "torch": torch.__version__,
        "device": device,
        "device_name": torch.cuda.get_device_name() if device == "cuda" else _cpu_name(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _as_dict(row: QualityRow) -> dict[str, Any]:
    values = asdict(row)
    setting, accuracy = values.pop("setting"), values.pop("accuracy")
    low, high = row.accuracy.interval
    return {**setting, **accuracy, "accuracy": row.accuracy.share, "interval_95": [low, high], **values}


def _row_of(values: dict[str, Any]) -> QualityRow:
    setting = DecodingSetting(**{name: values[name] for name in DecodingSetting.__dataclass_fields__})
    others = {name: values[name] for name in QualityRow.__dataclass_fields__ if name not in ("setting", "accuracy")}
    return QualityRow(setting=setting, accuracy=Accuracy(values["correct"], values["count"]), **others)
