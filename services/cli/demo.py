"""`smcserve demo`: answers three questions one by one, streaming the text, then compares ways of decoding in a
table."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, TextColumn
from rich.table import Table
from rich.text import Text

from services.cli import options
from services.cli.generate import summary
from smc.api.engine_config import EngineConfig
from smc.api.request import Answer, Request
from smc.api.sampling_params import SamplingParams
from smc.demo import MAX_ANSWER
from smc.demo.problems import Problem, derived_seed, generate, grade
from smc.loading import DEMO, load_pair, use_threads
from smc.terminal import Heading, PlainProgress, out

if TYPE_CHECKING:
    from smc.local_engine import ModelPair


QUESTIONS = 3
CONCURRENCY = 8
LOCKSTEP, LOOKAHEAD = EngineConfig(form="lockstep", block=5), EngineConfig(form="lookahead", block=5, branches=4)
LESSON = """\
Every answer is drawn at temperature 1. The draft alone is fast and mostly wrong. Exact decoding gives the target's \
own answers in few of its passes. SMC comes close to them. It needs the same number of passes however far apart the \
two models are, and gives more right answers with more particles. On a GPU a pass over many rows takes about as long \
as a pass over one row, so the number of passes determines the time. On a CPU it takes longer, and look-ahead, which \
is made for models that work at the same time, gains nothing: these speeds hold only for CPUs.
"""
WORDS = """\
N: rows that are decoded at once: particles, which are weighted answers in progress, or in exact decoding drafted \
alternatives of one answer. K: tokens drafted in a round. F: continuations drafted ahead of each row. \
exact: the target's own answer. distinct: SMC whose particles all differ. lockstep: the models work in turn; \
look-ahead: at the same time.
"""
NEXT = """\
Next:  smcserve generate "Mia has 12 apples. She buys 30 more. How many now?"
       smcserve eval --problems 100 --only alone --only "lockstep N=8 K=5"
       docs/quality.md: what method, N, K and F do to quality and speed\
"""


@dataclass(frozen=True)
class DemoDecoding:
    """One way of decoding: a row of the table."""

    name: str
    sampling: dict[str, Any]
    """Settings of `SamplingParams`, by name."""
    engine: EngineConfig = field(default_factory=EngineConfig)

    def passes(self, tokens: float, rounds: float) -> float:
        """Return the number of target passes after the one over the prompt, which yields the first token: one a token,
        or one a round."""
        if self.sampling["method"] == "draft":
            return 0
        return tokens - 1 if self.sampling["method"] == "target" else rounds

    def requests(self, pair: ModelPair, problems: list[Problem], seed: int) -> list[Request]:
        """Return one request for each problem, with the problem's index as its id."""
        prompts = [pair.tokenizer.chat([{"role": "user", "content": problem.question}]) for problem in problems]
        return [
            Request(
                str(index),
                tuple(prompt),
                SamplingParams(seed=derived_seed(seed, index), max_tokens=MAX_ANSWER, **self.sampling),
            )
            for index, prompt in enumerate(prompts)
        ]


def _exact(particles: int) -> dict[str, Any]:
    return {"method": "exact", "particles": particles}


def _smc(particles: int) -> dict[str, Any]:
    return {"method": "smc", "population": "distinct", "particles": particles}


TARGET = DemoDecoding("target alone", {"method": "target"})
DRAFT = DemoDecoding("draft alone", {"method": "draft"})
EXACT = DemoDecoding("exact lockstep N=4 K=5", _exact(4), LOCKSTEP)
SMC = DemoDecoding("distinct lockstep N=8 K=5", _smc(8), LOCKSTEP)
MORE = (
    DemoDecoding("exact look-ahead N=8 K=5 F=4", _exact(8), LOOKAHEAD),
    DemoDecoding("distinct look-ahead N=8 K=5 F=4", _smc(8), LOOKAHEAD),
    DemoDecoding("distinct lockstep N=32 K=5", _smc(32), LOCKSTEP),
)


def _ask(pair: ModelPair, problem: Problem, seed: int) -> None:
    out.print(Text(problem.question, style="bold"))
    out.print()
    out.print(Text(f"{EXACT.name}, streamed:", style="dim"))
    exact = _answer(pair, EXACT, problem, seed, aloud=True)
    out.print(_verdict(problem, exact))
    out.print(Text(summary(exact), style="dim"))
    others = [(decoding, _answer(pair, decoding, problem, seed)) for decoding in (TARGET, SMC, DRAFT)]
    table = Table(box=None, header_style="dim", padding=(0, 3, 0, 0), pad_edge=False)
    for name in ("", "result", "tokens", "target's passes", "time"):
        table.add_column(name, justify="left" if name in ("", "result") else "right")
    for decoding, answer in [(EXACT, exact), *others]:
        tokens = len(answer.tokens)
        passes = decoding.passes(tokens, answer.statistics.rounds)
        table.add_row(decoding.name, _result(problem, answer), str(tokens), f"{passes:.0f}", f"{answer.seconds:.2f} s")
    out.print(table)
    out.print()


def _answer(pair: ModelPair, decoding: DemoDecoding, problem: Problem, seed: int, aloud: bool = False) -> Answer:
    """Answer one problem. `aloud`: print the answer as it is streamed. Raises RuntimeError if it ends in an error."""
    from smc.local_engine import fitted_engine

    requests = decoding.requests(pair, [problem], seed)
    for output in fitted_engine(pair, decoding.engine, requests).run(requests):
        if aloud:
            print(output.text, end="", flush=True)
        answer = output.answer
    assert answer is not None
    if answer.error:
        raise RuntimeError(answer.error)
    return answer


def _verdict(problem: Problem, answer: Answer) -> Text:
    """Return the text that is printed directly after a streamed answer: whether it is right."""
    if grade(problem, answer.text):
        return Text("  ✓ right", style="bold green")
    return Text(f"  ✗ wrong, it is {problem.result}", style="bold red")


def _result(problem: Problem, answer: Answer) -> Text:
    last = answer.text.rpartition("####")[2].strip() if "####" in answer.text else "no result"
    right = grade(problem, answer.text)
    return Text(f"{last} ✓" if right else f"{last} ✗", style="green" if right else "red")


def _compare(pair: ModelPair, problems: list[Problem], seed: int) -> list[tuple[str, ...]]:
    """Answer all problems with every way of decoding; return the rows of the table."""
    decodings = (TARGET, DRAFT, EXACT, SMC, *MORE)
    with PlainProgress(TextColumn("{task.description:33}"), BarColumn()) as progress:
        task = progress.add_task("", total=len(decodings) * len(problems))
        rows = []
        for decoding in decodings:
            progress.update(task, description=decoding.name)
            rows.append(_row(pair, decoding, problems, seed, lambda: progress.advance(task)))
    return rows


def _row(
    pair: ModelPair, decoding: DemoDecoding, problems: list[Problem], seed: int, on_answer: Callable[[], None]
) -> tuple[str, ...]:
    """Answer all problems with one way of decoding; return its row of the table. `on_answer` is called after each
    answer. Raises RuntimeError if an answer ends in an error."""
    from smc.local_engine import fitted_engine

    begin, solved, tokens, rounds = time.perf_counter(), 0, 0, 0
    requests = decoding.requests(pair, problems, seed)
    for output in fitted_engine(pair, decoding.engine, requests, CONCURRENCY).run(requests):
        if (answer := output.answer) is None:
            continue
        if answer.error:
            raise RuntimeError(f"{decoding.name}, problem {answer.request_id}: {answer.error}")
        solved += grade(problems[int(answer.request_id)], answer.text)
        tokens, rounds = tokens + len(answer.tokens), rounds + answer.statistics.rounds
        on_answer()
    seconds, count = time.perf_counter() - begin, len(problems)
    passes = decoding.passes(tokens / count, rounds / count)
    speed = f"{tokens / seconds:,.0f}"
    return decoding.name, f"{solved} of {count}", speed, f"{tokens / count:.1f}", f"{passes:.1f}"


def _table(rows: list[tuple[str, ...]]) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("decoding", "right", "tok/s", "tokens\nper answer", "target's passes\nper answer"):
        table.add_column(name, justify="left" if name == "decoding" else "right")
    for row in rows:
        table.add_row(*row)
    return table


def demo(
    problems: Annotated[
        int,
        options.option(
            options.MEASURE, "Number of problems that are answered for the table; 0 = no table.", metavar="COUNT"
        ),
    ] = 20,
    seed: Annotated[
        int, options.option(options.MEASURE, "Seed of the problems and of the answers.", metavar="SEED")
    ] = 1,
) -> None:
    """Answer three questions with the shipped model pair, and compare ways of decoding."""
    if problems < 0:
        raise typer.BadParameter(f"{problems}; allowed: >= 0", param_hint="'--problems'")
    use_threads(None, DEMO)
    pair = load_pair(DEMO, "cpu", None)
    generated = generate(seed, QUESTIONS + problems, "test")
    out.print(Text(WORDS, style="dim"))
    for number, problem in enumerate(generated[:QUESTIONS], 1):
        out.print(Heading(f"Question {number} of {QUESTIONS}"))
        _ask(pair, problem, seed + number)
    if problems:
        out.print(Heading(f"{problems} further questions, {CONCURRENCY} in flight"))
        out.print(_table(_compare(pair, generated[QUESTIONS:], seed)))
        out.print(LESSON)
    out.print(NEXT, soft_wrap=True)
