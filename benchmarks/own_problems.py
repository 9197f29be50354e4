"""Measures `smcserve eval` over a pair and problems of one's own: the pair answers files of problems in several ways of
decoding, at several temperatures.

For problems with an expected answer, measures the share solved; for all problems, agreement with the target's answers,
log-probability, and the share of drafted tokens that are accepted at each depth. Settings of one block size share an
engine, so that kernels are compiled and graphs captured once for all of them."""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from rich.markup import escape
from rich.text import Text

from benchmarks.load import ClosedLoop
from benchmarks.own_record import OwnAnswer, OwnRecord, OwnRow, RowKey
from benchmarks.problem_file import FileProblem
from benchmarks.quality import DecodingSetting, Terms, prompt_requests
from benchmarks.reports.own import in_words, print_report
from smc.api.constraint import Constraint
from smc.api.engine_config import EngineConfig
from smc.api.request import Answer, Request
from smc.demo.problems import generate
from smc.local_engine import ModelPair, fitted_config, local_engine
from smc.scheduler.engine import Engine
from smc.terminal import err, print_error, print_warning, progress_bar

TARGET = DecodingSetting.plain("target")
"""Always measured: all other settings are compared with it."""
USUAL = (
    TARGET,
    DecodingSetting.plain("draft"),
    DecodingSetting.lockstep("exact", 8, 5),
    DecodingSetting.lockstep("distinct", 8, 5),
)
"""Default ways of decoding."""
MAX_TOKENS = 256
WORD_PROBLEMS = "word_problems"
"""Name of the problems that are given by their number."""
REASONING = "\n\nReason step by step. Then write the result on a line of its own, as #### and the number."
"""What follows a word problem when a model that was not trained on such problems is asked."""


@dataclass(frozen=True)
class OwnTask:
    """What one row measures."""

    key: RowKey
    problems: str
    """Name of the problems, a key of `OwnPlan.problems`."""
    setting: DecodingSetting

    @property
    def cost(self) -> int:
        """About proportional to the cost of an answer."""
        return self.setting.particles or 1

    @property
    def words(self) -> str:
        problems, temperature, setting = self.key
        return f"{problems}, T = {temperature:g}, {setting}"


@dataclass(frozen=True)
class OwnPlan:
    """What is measured, in this order: for each temperature, for each setting, every file."""

    problems: Mapping[str, Sequence[FileProblem]]
    """By the name of their file."""
    temperatures: Sequence[float]
    settings: Sequence[DecodingSetting]
    seed: int
    ess_threshold: float | None
    max_tokens: int
    concurrency: int
    """Maximum number of requests in flight."""
    max_rows: int | None
    """Maximum number of rows of all requests in flight; None: no limit. One request may always run."""
    deadline: float | None
    """Time, by `time.monotonic`, at which measuring stops; None: never."""

    alpha: float | None = None
    """Power of the target's probability; SMC only."""
    regex: str | None = None
    """What every answer matches."""
    constraint_scope: str | None = None
    """SMC only."""
    numerics: str = EngineConfig().numerics
    """Order of sums on GPUs. With `invariant` the target's answers are the same in every record."""

    def terms(self, temperature: float) -> Terms:
        constraint = None if self.regex is None else Constraint.of({"regex": self.regex}, "--regex")
        return Terms(
            self.seed,
            temperature,
            self.ess_threshold,
            self.max_tokens,
            alpha=self.alpha,
            constraint=constraint,
            constraint_scope=self.constraint_scope,
        )

    def name(self, setting: DecodingSetting) -> str:
        """Return the name of a setting, with what SMC alone has."""
        if setting.method != "smc":
            return setting.name
        alpha = "" if self.alpha is None else f" alpha={self.alpha:g}"
        return setting.name + alpha + ("" if self.constraint_scope is None else f" scope={self.constraint_scope}")

    def in_flight(self, setting: DecodingSetting) -> int:
        """Return the number of requests in flight."""
        rows = setting.particles or 1
        return self.concurrency if self.max_rows is None else max(1, min(self.concurrency, self.max_rows // rows))

    def tasks(self) -> Iterator[OwnTask]:
        """Yield what is to be measured, the most important first. SMC is not defined at temperature 0."""
        constrained = "" if self.regex is None else f" matching {self.regex}"
        for temperature in self.temperatures:
            for setting in self.settings:
                if setting.method == "smc" and temperature == 0:
                    continue
                for name in self.problems:
                    yield OwnTask((name + constrained, temperature, self.name(setting)), name, setting)

    def conditions(self) -> dict[str, object]:
        """Return the part of a record's conditions that decides which problems are solved."""
        texts = {
            name: repr([(each.prompt, each.answer, each.check) for each in problems])
            for name, problems in self.problems.items()
        }
        return {
            "seed": self.seed,
            "ess_threshold": self.ess_threshold,
            "max_tokens": self.max_tokens,
            "numerics": self.numerics,
            "problems": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()},
        }


def word_problems(seed: int, count: int, reasoning: bool) -> list[FileProblem]:
    """Return generated word problems of the test split. `reasoning`: whether the question asks for reasoning and for
    the form of the result, which the demo pair writes by itself."""
    return [
        FileProblem(number, problem.question + REASONING * reasoning, str(problem.result), "number")
        for number, problem in enumerate(generate(seed, count, "test"), 1)
    ]


def evaluate_own(pair: ModelPair, plan: OwnPlan, record: OwnRecord) -> bool:
    """Measure what the record lacks, and print the tables. Return whether all has been measured: a setting whose answer
    ends in an error is reported and left out. Raises ValueError for a problem that is too long, and for invalid
    settings, before any problem is answered."""
    measurement = _Measurement(pair, plan)
    todo = [task for task in plan.tasks() if task.key not in record.rows]
    done = len(record.rows)
    if done:
        err.print(f"{done} rows are in {record.path} already", style="dim")
    failed, late = 0, False
    try:
        with progress_bar() as progress:
            bar = progress.add_task("", total=sum(task.cost * len(plan.problems[task.problems]) for task in todo))
            for task in todo:
                progress.update(bar, description=escape(task.words))
                try:
                    row = measurement.row(task, partial(progress.advance, bar, task.cost))
                except _AnswerError as error:
                    print_error(str(error))
                    failed += 1
                    continue
                if row is None:
                    late = True
                    break
                record.add(row)
                progress.console.print(Text(in_words(row, record.target_of(row)), style="dim"), soft_wrap=True)
    except KeyboardInterrupt:
        if record.path:
            err.print(f"stopped; {len(record.rows)} rows are in {record.path}, --resume continues from there")
        raise
    if late:
        print_warning(
            f"the time limit ended the measurement: {len(record.rows) - done} of {len(todo)} rows are new"
            + (f"; --resume continues from {record.path}" if record.path else "")
        )
    print_report(record, [setting.kind for setting in plan.settings])
    return not failed and not late


class _AnswerError(RuntimeError):
    """An answer ended in an error."""


class _Measurement:
    """Measures rows one after the other, with one engine for as many of them as possible."""

    def __init__(self, pair: ModelPair, plan: OwnPlan) -> None:
        self._pair, self._plan = pair, plan
        self._prompts = {
            name: [self._fitting(problem) for problem in problems] for name, problems in plan.problems.items()
        }
        for task in plan.tasks():  # invalid settings are refused before anything is answered
            self._requests(task)
        self._config: EngineConfig | None = None
        self._engine: Engine | None = None

    def row(self, task: OwnTask, on_answer: Callable[[], object]) -> OwnRow | None:
        """Answer all problems; None if the deadline passes before. Raises _AnswerError if an answer ends in an
        error."""
        setting, problems = task.setting, self._plan.problems[task.problems]
        requests, in_flight = self._requests(task), self._plan.in_flight(setting)
        engine = self._engine_for(setting)
        engine.take_stats()
        full, spans = min(in_flight, len(requests)), []
        found: dict[str, Answer] = {}
        began = time.perf_counter()
        loop = ClosedLoop(engine, requests, in_flight)
        while loop.running:
            if self._plan.deadline is not None and time.monotonic() > self._plan.deadline:
                loop.stop()
                return None
            # Requests whose prompts run are not running yet.
            all_run, before = engine.num_running == full, time.perf_counter()
            answers = [output.answer for output in loop.step() if output.answer is not None]
            if all_run:
                spans.append(time.perf_counter() - before)
            for answer in answers:
                if answer.error:
                    loop.stop()
                    raise _AnswerError(f"{task.words}, problem {answer.request_id}: {answer.error}")
                found[answer.request_id] = answer
                on_answer()
        engine.check_books()
        spec = engine.take_stats().exact[setting.verification or "walk"]
        whole = [found[request.request_id] for request in requests]
        return OwnRow(
            *task.key,
            in_flight=full,
            tokens_a_round=spec.tokens_a_round,
            accepted_by_depth=spec.accepted_by_depth,
            tokens_per_second=_speed(whole, full, spans),
            seconds=time.perf_counter() - began,
            answers=tuple(
                OwnAnswer.of(answer, solved, is_smc=setting.method == "smc")
                for answer, solved in zip(whole, _grades(whole, problems))
            ),
        )

    def _requests(self, task: OwnTask) -> list[Request]:
        """Return one request for each problem. Settings do not share cached prompts, so that none is faster for coming
        later."""
        terms, logprobs = self._plan.terms(task.key[1]), task.setting.method != "draft"
        requests = prompt_requests(self._prompts[task.problems], task.setting, terms, logprobs=logprobs)
        return [replace(request, cache_salt=task.words) for request in requests]

    def _engine_for(self, setting: DecodingSetting) -> Engine:
        """Return an engine of the setting's configuration, large enough for all settings of the same one. At most one
        engine is held."""
        wanted = self._config_of(setting)
        if self._engine is None or wanted != self._config:
            self._engine, self._config = None, wanted  # memory is free before the next engine takes it
            fitted = [
                fitted_config(self._pair, wanted, self._requests(task), self._plan.in_flight(task.setting))
                for task in self._plan.tasks()
                if self._config_of(task.setting) == wanted
            ]
            sized = replace(
                wanted,
                max_slots=max(each.max_slots for each in fitted),
                pages=max(each.pages or 0 for each in fitted),
                max_context=self._plan.max_tokens + max(map(len, chain.from_iterable(self._prompts.values()))),
            )
            self._engine = local_engine(self._pair, sized)
        return self._engine

    def _config_of(self, setting: DecodingSetting) -> EngineConfig:
        """Return the configuration of a setting's engine, sizes apart. A model alone has that of the first setting with
        both models, whose form does not affect it."""
        both = next((each for each in self._plan.settings if each.form), setting)
        config = setting.engine if setting.form else both.engine
        # Raw log-probabilities would keep the logits of every token of a round with each recorded graph.
        return replace(config, logprobs_mode="processed", numerics=self._plan.numerics)

    def _fitting(self, problem: FileProblem) -> tuple[int, ...]:
        tokens, longest = tuple(problem.tokens(self._pair.tokenizer, raw=False)), self._plan.max_tokens
        if len(tokens) + longest > self._pair.max_context:
            raise ValueError(
                f"line {problem.number}: the prompt has {len(tokens)} tokens; allowed: at most "
                f"{self._pair.max_context - longest} beside answers of {longest} (--max-tokens)"
            )
        return tokens


def _grades(answers: Sequence[Answer], problems: Sequence[FileProblem]) -> list[bool | None]:
    """Grade answers, several at a time: the code of an answer runs in a process of its own."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda answer, problem: problem.grade(answer.text), answers, problems))


def _speed(answers: Sequence[Answer], in_flight: int, spans: Sequence[float]) -> float | None:
    """Return answer tokens per second of `in_flight` requests: tokens a round by the median duration of a step. So
    prompts, and first uses of a shape, do not count."""
    rounds = sum(answer.statistics.rounds for answer in answers)
    if not spans or not rounds:
        return None
    tokens = sum(len(answer.tokens) - 1 for answer in answers) / rounds
    return in_flight * tokens / statistics.median(spans)
