"""The work behind `smcserve demo`."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, Progress, TextColumn
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from services.cli.generate import summary
from services.cli.pair import DEMO, load_pair, use_threads
from services.cli.terminal import err, out
from smc.demo.problems import Problem, generate, grade
from smc.engine.local import ModelPair
from smc.engine.request import Answer
from smc.evaluation.batch import fitted_engine
from smc.evaluation.quality import Row, Setting, measure, problem_requests

QUESTIONS = 3
CONCURRENCY = 8
LOOKAHEAD = Setting.lookahead(particles=8, block=5, branches=4)
OTHERS = (Setting.plain("target"), Setting.plain("draft"), Setting.lockstep(particles=8, block=8))
MORE = Setting.lookahead(particles=32, block=5, branches=2)
LESSON = """\
Every answer is drawn at temperature 1. The draft alone is fast and mostly wrong. Particles weighed by the target make it right \
more often, and the more of them, the more often. A wide batch is nearly free on a GPU and is not on a CPU: these speeds are a \
CPU's only.
"""
NEXT = """\
Next:  smcserve generate "Mia has 12 apples. She buys 30 more. How many now?"
       smcserve eval --problems 100 --only alone --only "N=8 K=5"
       docs/quality.md: what N, K and F do to quality and speed\
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
    out.print(Text(f"{LOOKAHEAD.name}, as it comes:", style="dim"))
    answer = _answer(pair, LOOKAHEAD, problem, seed, aloud=True)
    out.print(_mark(problem, answer))
    out.print(Text(summary(answer), style="dim"))
    others = [(setting, _answer(pair, setting, problem, seed)) for setting in OTHERS]
    out.print(Text("\n").join(Text(f"{setting.name:17} ").append_text(_result(problem, answer)) for setting, answer in others))
    out.print()


def _answer(pair: ModelPair, setting: Setting, problem: Problem, seed: int, aloud: bool = False) -> Answer:
    requests = problem_requests(pair, setting, [problem], seed)
    for output in fitted_engine(pair, setting.engine, requests).run(requests):
        if aloud:
            print(output.text, end="", flush=True)
        answer = output.answer
    if answer.error:
        raise RuntimeError(answer.error)
    return answer


def _mark(problem: Problem, answer: Answer) -> Text:
    """Goes right behind a streamed answer."""
    if grade(problem, answer.text):
        return Text("  ✓ right", style="bold green")
    return Text(f"  ✗ wrong, it is {problem.result}", style="bold red")


def _result(problem: Problem, answer: Answer) -> Text:
    last = answer.text.rpartition("####")[2].strip() if "####" in answer.text else "no result"
    right = grade(problem, answer.text)
    mark = Text.assemble((f"{last} ✓" if right else f"{last} ✗", "green" if right else "red"))
    return mark.append(f"   {len(answer.tokens) / answer.seconds:.0f} tok/s", style="dim")


def _compare(pair: ModelPair, problems: list[Problem], seed: int) -> list[Row]:
    settings = (*OTHERS, LOOKAHEAD, MORE)
    with Progress(TextColumn("{task.description:24}"), BarColumn(), console=err, transient=True) as progress:
        task = progress.add_task("", total=len(settings) * len(problems))
        rows = []
        for setting in settings:
            progress.update(task, description=setting.name)
            rows.append(measure(pair, setting, problems, CONCURRENCY, seed, on_answer=lambda *_: progress.advance(task)))
    return rows


def _table(rows: list[Row]) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("decoding", "right", "tok/s", "rounds per answer", "resamples per answer", "mean ESS / N"):
        table.add_column(name.replace(" per ", "\nper ").replace("mean ", "mean\n"), justify="left" if name == "decoding" else "right")
    for row in rows:
        smc = (row.rounds, row.resamples, row.mean_ess_share)
        table.add_row(
            row.setting.name,
            f"{row.accuracy.correct} of {row.accuracy.count}",
            f"{row.batch_tokens_per_second:,.0f}",
            *("" if value is None else format(value, form) for value, form in zip(smc, (".1f", ".1f", ".0%"))),
        )
    return table
