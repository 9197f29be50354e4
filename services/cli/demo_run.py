"""The work behind `smcserve demo`."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, Progress, TextColumn
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from services.cli.generate import summary
from smc.api.outputs import Answer
from smc.demo.problems import Problem, generate, grade
from smc.evaluation.batch import fitted_engine
from smc.evaluation.quality import Row, Setting, Terms, measure, problem_requests
from smc.loading import DEMO, load_pair, use_threads
from smc.local_engine import ModelPair
from smc.terminal import err, out

QUESTIONS = 3
CONCURRENCY = 8
TARGET, DRAFT = Setting.plain("target"), Setting.plain("draft")
EXACT = Setting.lockstep("exact", particles=4, block=5)
SMC = Setting.lockstep("distinct", particles=8, block=5)
MORE = (
    Setting.lookahead("exact", 8, 5, 4),
    Setting.lookahead("distinct", 8, 5, 4),
    Setting.lockstep("distinct", 32, 5),
)
LESSON = """\
Every answer is drawn at temperature 1. The draft alone is fast and mostly wrong. Exact decoding gives the target's own answers in few \
of its passes. SMC comes near them; it needs as few passes however far apart the two models are, and is right more often the more \
particles it has. On a GPU a pass over many rows costs about what one over a single row does, so passes are time. On a CPU it costs more, \
and look-ahead, made for models that work at the same time, gains nothing: these speeds are a CPU's only.
"""
NEXT = """\
Next:  smcserve generate "Mia has 12 apples. She buys 30 more. How many now?"
       smcserve eval --problems 100 --only alone --only "lockstep N=8 K=5"
       docs/quality.md: what method, N, K and F do to quality and speed\
"""


def show(count: int, seed: int) -> None:
    """Three questions one by one, then `count` further ones in a table."""
    use_threads(None, DEMO)
    pair = load_pair(DEMO, "cpu", None)
    problems = generate(seed, QUESTIONS + count, "test")
    for number, problem in enumerate(problems[:QUESTIONS], 1):
        out.print(Rule(f"Question {number} of {QUESTIONS}", align="left", style="dim"))
        _ask(pair, problem, seed + number)
    if count:
        out.print(Rule(f"{count} further questions, {CONCURRENCY} in flight", align="left", style="dim"))
        out.print(_table(_compare(pair, problems[QUESTIONS:], seed)))
        out.print(LESSON)
    out.print(NEXT, soft_wrap=True)


def _ask(pair: ModelPair, problem: Problem, seed: int) -> None:
    out.print(Text(problem.question, style="bold"))
    out.print()
    out.print(Text(f"{EXACT.name}, as it comes:", style="dim"))
    exact = _answer(pair, EXACT, problem, seed, aloud=True)
    out.print(_verdict(problem, exact))
    out.print(Text(summary(exact), style="dim"))
    answers = [(EXACT, exact), *((setting, _answer(pair, setting, problem, seed)) for setting in (TARGET, SMC, DRAFT))]
    table = Table(box=None, header_style="dim", padding=(0, 3, 0, 0), pad_edge=False)
    for name in ("", "result", "tokens", "target's passes", "time"):
        table.add_column(name, justify="left" if name in ("", "result") else "right")
    for setting, answer in answers:
        passes = _passes(setting, len(answer.tokens), answer.statistics.rounds)
        table.add_row(
            setting.name, _result(problem, answer), str(len(answer.tokens)), f"{passes:.0f}", f"{answer.seconds:.2f} s"
        )
    out.print(table)
    out.print()


def _passes(setting: Setting, tokens: float, rounds: float | None) -> float:
    """Of the target, after the one over the prompt, which brings the first token: one a token, or one a round."""
    if setting.form:
        assert rounds is not None
        return rounds
    return tokens - 1 if setting.method == "target" else 0


def _answer(pair: ModelPair, setting: Setting, problem: Problem, seed: int, aloud: bool = False) -> Answer:
    requests = problem_requests(pair.tokenizer, setting, [problem], Terms(seed))
    for output in fitted_engine(pair, setting.engine, requests).run(requests):
        if aloud:
            print(output.text, end="", flush=True)
        answer = output.answer
    assert answer is not None
    if answer.error:
        raise RuntimeError(answer.error)
    return answer


def _verdict(problem: Problem, answer: Answer) -> Text:
    """Goes right behind a streamed answer."""
    if grade(problem, answer.text):
        return Text("  ✓ right", style="bold green")
    return Text(f"  ✗ wrong, it is {problem.result}", style="bold red")


def _result(problem: Problem, answer: Answer) -> Text:
    last = answer.text.rpartition("####")[2].strip() if "####" in answer.text else "no result"
    right = grade(problem, answer.text)
    return Text(f"{last} ✓" if right else f"{last} ✗", style="green" if right else "red")


def _compare(pair: ModelPair, problems: list[Problem], seed: int) -> list[Row]:
    settings = (TARGET, DRAFT, EXACT, SMC, *MORE)
    with Progress(TextColumn("{task.description:33}"), BarColumn(), console=err, transient=True) as progress:
        task = progress.add_task("", total=len(settings) * len(problems))
        rows = []
        for setting in settings:
            progress.update(task, description=setting.name)
            rows.append(
                measure(pair, setting, problems, CONCURRENCY, Terms(seed), on_answer=lambda *_: progress.advance(task))
            )
    return rows


def _table(rows: list[Row]) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("decoding", "right", "tok/s", "tokens\nper answer", "target's passes\nper answer"):
        table.add_column(name, justify="left" if name == "decoding" else "right")
    for row in rows:
        passes = _passes(row.setting, row.tokens, row.rounds)
        solved = f"{row.accuracy.correct} of {row.accuracy.count}"
        table.add_row(
            row.setting.name, solved, f"{row.batch_tokens_per_second:,.0f}", f"{row.tokens:.1f}", f"{passes:.1f}"
        )
    return table
