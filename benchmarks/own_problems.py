"""Measures `smcserve eval --problems FILE`: a pair answers the problems of a file in several ways of decoding.

For problems with an expected answer, measures the share solved; for all problems, agreement with the target's answers,
log-probability, and the share of drafted tokens that are accepted at each depth."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.problem_file import FileProblem
from benchmarks.quality import DecodingSetting, Terms, answers_of, prompt_requests
from benchmarks.reports import interval, number_cell
from smc.api.request import Answer, FinishReason
from smc.demo.problems import Accuracy
from smc.local_engine import ModelPair, fitted_engine
from smc.scheduler.stats import ExactStats
from smc.terminal import out, progress_bar

USUAL = (
    DecodingSetting.plain("target"),
    DecodingSetting.plain("draft"),
    DecodingSetting.lockstep("exact", 8, 5),
    DecodingSetting.lockstep("distinct", 8, 5),
)
"""Default ways of decoding."""
MAX_TOKENS = 256
HEADERS = (
    "decoding",
    "solved",
    "95%",
    "cut",
    "same",
    "log p",
    "round",
    "log Z",
    "tok",
)
LEGEND = (
    "solved: of the answers that came to an end; 95%: its interval; cut: answers that reached --max-tokens first; "
    "same: share of problems whose answer is the target's own, token by token; "
    "log p: "
    "mean log-probability of an answer token under the target, minus that of the target's own answers; round: tokens "
    "that a round confirms; "
    "accepted by depth: share of rounds in which the first, the first two, .. drafted tokens were accepted; log Z: of "
    "SMC, a token, far below 0 where the draft does not know the text; tok: tokens of an answer."
)
SMC_MEANING = "SMC draws other answers, from a distribution that nears the target's as N grows: see solved and log p."
MEANINGS = {
    "exact": "Exact decoding by walk gives the target's own answers in float32. In other types sums depend on the rows "
    "of a pass, so near ties between tokens may fall otherwise, and the answers differ from there on.",
    "rejection": "Exact decoding by rejection follows the target's distribution, but draws other answers from it.",
    "independent": SMC_MEANING,
    "distinct": SMC_MEANING,
    "draft": "The draft answers by itself: it shows what is lost without the target.",
}
"""What agreement with the target's answers means, by `DecodingSetting.kind`."""


@dataclass(frozen=True)
class OwnRow:
    """Results of one setting. None: the method has no such value."""

    decoding: str
    problems: int
    graded: int
    """Number of answers that came to an end and have an expected answer to compare with."""
    correct: int
    cut: int
    """Number of answers that reached the maximum number of tokens."""
    same_as_target: float | None
    mean_logp: float | None
    """Mean log-probability of an answer token under the target."""
    tokens_a_round: float | None
    accepted_by_depth: tuple[float, ...]
    log_evidence: float | None
    tokens: float
    """Mean length of an answer."""
    batch_tokens_per_second: float


def evaluate_own(
    pair: ModelPair,
    problems: Sequence[FileProblem],
    settings: Sequence[DecodingSetting],
    terms: Terms,
    concurrency: int,
    json_path: Path | None,
) -> list[OwnRow]:
    """Measure every setting and print the table. Raises ValueError for a problem that is too long, before any problem
    is answered."""
    prompts = [_fitting(pair, problem, terms) for problem in problems]
    for setting in settings:  # invalid ones are refused before anything is answered
        prompt_requests(prompts[:1], setting, terms, logprobs=False)
    others = [setting for setting in settings if setting.method != "target"]
    rows, texts = [], {}
    with progress_bar() as progress:
        task = progress.add_task(USUAL[0].name, total=len(prompts) * (1 + len(others)))

        def answer_all(setting: DecodingSetting) -> Answered:
            progress.update(task, description=setting.name)
            return _answer_all(pair, setting, prompts, terms, concurrency, lambda: progress.advance(task))

        target = answer_all(USUAL[0])
        for setting in settings:
            answered = target if setting.method == "target" else answer_all(setting)
            rows.append(_row(setting, problems, answered, target))
            texts[setting.name] = [answer.text for answer in answered.answers]
            if json_path is not None:
                _write(json_path, asdict(terms) | {"concurrency": concurrency}, rows, problems, texts)
    base = mean_logp_of(target.answers)
    depths = [
        f"accepted by depth, {row.decoding}: {' '.join(f'{share:.0%}' for share in row.accepted_by_depth)}"
        for row in rows
        if row.accepted_by_depth
    ]
    meanings = dict.fromkeys(MEANINGS[setting.kind] for setting in settings if setting.kind in MEANINGS)
    out.print(own_table(rows, base), *depths, LEGEND, *meanings, sep="\n", soft_wrap=True)
    if not any(problem.answer is not None for problem in problems):
        out.print("The file has no answers, so the share of solved problems is not known.", style="dim")
    return rows


@dataclass(frozen=True)
class Answered:
    """The answers of one setting, in the order of the problems."""

    answers: list[Answer]
    spec: ExactStats
    seconds: float


def _fitting(pair: ModelPair, problem: FileProblem, terms: Terms) -> tuple[int, ...]:
    tokens = tuple(problem.tokens(pair.tokenizer, raw=False))
    if len(tokens) + terms.max_tokens > pair.max_context:
        raise ValueError(
            f"line {problem.number}: the prompt has {len(tokens)} tokens; allowed: at most "
            f"{pair.max_context - terms.max_tokens} beside answers of {terms.max_tokens} (--max-tokens)"
        )
    return tokens


def _answer_all(
    pair: ModelPair,
    setting: DecodingSetting,
    prompts: Sequence[tuple[int, ...]],
    terms: Terms,
    concurrency: int,
    on_answer: Callable[[], object],
) -> Answered:
    """Answer all prompts with one setting. Raises RuntimeError if an answer ends in an error."""
    requests = prompt_requests(prompts, setting, terms, logprobs=setting.method != "draft")
    engine = fitted_engine(pair, setting.engine, requests, concurrency)
    begin = time.perf_counter()
    found = {}
    for answer in answers_of(engine, setting, requests, concurrency):
        found[answer.request_id] = answer
        on_answer()
    seconds = time.perf_counter() - begin
    spec = engine.take_stats().exact[setting.verification or "walk"]
    return Answered([found[request.request_id] for request in requests], spec, seconds)


def _row(setting: DecodingSetting, problems: Sequence[FileProblem], answered: Answered, target: Answered) -> OwnRow:
    answers, spec = answered.answers, answered.spec
    ended = [answer.finish_reason is not FinishReason.LENGTH for answer in answers]
    grades = [problem.grade(answer.text) for problem, answer, whole in zip(problems, answers, ended) if whole]
    tokens = sum(len(answer.tokens) for answer in answers)
    same = sum(one.tokens == other.tokens for one, other in zip(answers, target.answers)) / len(answers)
    return OwnRow(
        decoding=setting.name,
        problems=len(problems),
        graded=sum(grade is not None for grade in grades),
        correct=sum(grade is True for grade in grades),
        cut=ended.count(False),
        same_as_target=None if setting.method == "target" else same,
        mean_logp=mean_logp_of(answers),
        tokens_a_round=spec.tokens_a_round,
        accepted_by_depth=spec.accepted_by_depth,
        log_evidence=sum(one.statistics.log_z for one in answers) / tokens if setting.method == "smc" else None,
        tokens=tokens / len(answers),
        batch_tokens_per_second=tokens / answered.seconds,
    )


def mean_logp_of(answers: Sequence[Answer]) -> float | None:
    known = [value for answer in answers if answer.logprobs is not None for value in answer.logprobs]
    return sum(known) / len(known) if known else None


def own_table(rows: Sequence[OwnRow], target_logp: float | None) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), show_edge=False)
    for header in HEADERS:
        table.add_column(header, justify="left" if header == "decoding" else "right", no_wrap=True)
    for row in rows:
        accuracy = Accuracy(row.correct, row.graded) if row.graded else None
        logp = None if row.mean_logp is None or target_logp is None else row.mean_logp - target_logp
        table.add_row(
            row.decoding,
            f"{accuracy.share:.1%}" if accuracy else "",
            interval(accuracy) if accuracy else "",
            str(row.cut),
            number_cell(row.same_as_target, ".0%"),
            number_cell(logp, "+.3f"),
            number_cell(row.tokens_a_round, ".2f"),
            number_cell(row.log_evidence, "+.2f"),
            f"{row.tokens:.1f}",
        )
    return table


def _write(
    path: Path,
    conditions: dict[str, Any],
    rows: Sequence[OwnRow],
    problems: Sequence[FileProblem],
    texts: dict[str, list[str]],
) -> None:
    answers = [
        {"line": problem.number, "answers": {name: found[i] for name, found in texts.items()}}
        for i, problem in enumerate(problems)
    ]
    content = {"conditions": conditions, "rows": [asdict(row) for row in rows], "problems": answers}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
