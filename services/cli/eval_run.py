"""The work behind `smcserve eval`: every setting measured in turn, shown as it goes, recorded, and reported at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from services.cli.eval_record import Record, machine
from services.cli.pair import DEMO, dtypes_of, load_pair, use_threads
from services.cli.tables import LEGEND, interval, quality_markdown, quality_table
from services.cli.terminal import err, out, print_warning
from smc.demo.problems import Problem, generate
from smc.engine.local import ModelPair
from smc.engine.request import SamplingParams
from smc.evaluation.picture import draw
from smc.evaluation.quality import Row, Setting, Terms, measure, measure_speed, problem_requests
from smc.models.source import name_dtypes


@dataclass(frozen=True)
class Plan:
    """The command's options that say how settings are measured. Raises ValueError for what cannot be."""

    problems: int
    seed: int
    temperature: float
    ess_threshold: float | None
    speed_problems: int
    concurrency: int
    threads: int

    def __post_init__(self) -> None:
        for name, low in (("problems", 1), ("speed_problems", 0), ("concurrency", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}; allowed: >= {low}")
        if self.ess_threshold is None:
            object.__setattr__(self, "ess_threshold", SamplingParams(population="independent").ess_threshold)

    @property
    def terms(self) -> Terms:
        return Terms(self.seed, self.temperature, self.ess_threshold)

    def make_problems(self, count: int) -> list[Problem]:
        return generate(self.seed, count, "test")


def prepare(
    plan: Plan, settings: Sequence[Setting], device: str, dtypes: tuple[str | None, str | None, str | None], path: Path | None, resume: bool
) -> tuple[ModelPair, Record]:
    """Load the pair, open the record, and find out now whether any setting would be refused later. `dtypes`: of both, of the target alone,
    of the draft alone."""
    use_threads(plan.threads, DEMO)
    pair = load_pair(DEMO, device, *dtypes)
    for setting in settings:
        problem_requests(pair, setting, plan.make_problems(1), plan.terms)
        _ = setting.engine
    conditions = asdict(plan) | machine(device) | {"dtype": name_dtypes(dtypes_of(device, *dtypes))}
    record = Record.open(path, conditions, resume)
    record.write()
    return pair, record


def measure_all(pair: ModelPair, plan: Plan, settings: Sequence[Setting], record: Record) -> None:
    """Measure what the record does not hold yet. One that was stopped says how to go on."""
    todo = [setting for setting in settings if setting.name not in record.rows]
    if len(todo) < len(settings):
        err.print(f"{len(settings) - len(todo)} of {len(settings)} settings are in {record.path} already", style="dim")
    columns = (TextColumn("{task.description}"), BarColumn(None), TaskProgressColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=err, expand=True, transient=True, speed_estimate_period=3600) as progress:
            # An answer's cost grows about as its particles, so that is what the bar over everything counts.
            whole = progress.add_task(f"all {len(todo)} settings", total=plan.problems * sum(setting.particles or 1 for setting in todo))
            for setting in todo:
                row = _measure(pair, plan, setting, progress, whole)
                record.add(row)
                progress.console.print(Text(f"{setting.name}: {_in_words(row)}", style="dim"))
    except KeyboardInterrupt:
        if record.path:
            err.print(f"stopped; {len(record.rows)} settings are in {record.path}, --resume goes on from there")
        raise


def _measure(pair: ModelPair, plan: Plan, setting: Setting, progress: Progress, whole) -> Row:
    task = progress.add_task(setting.name, total=plan.problems)

    def advance(*_answer: object) -> None:
        progress.advance(task)
        progress.advance(whole, setting.particles or 1)

    row = measure(pair, setting, plan.make_problems(plan.problems), plan.concurrency, plan.terms, advance)
    if plan.speed_problems:
        progress.update(task, description=f"{setting.name}, one at a time")
        speed = measure_speed(pair, setting, plan.make_problems(plan.speed_problems), plan.terms)
        row = replace(row, tokens_per_second=speed)
    progress.remove_task(task)
    return row


def report(plan: Plan, settings: Sequence[Setting], record: Record, markdown: Path | None, picture: Path | None) -> None:
    """The table in the terminal, and wherever else it was asked for; in the order of `settings`."""
    rows = [record.rows[setting.name] for setting in settings]
    about = _about(record)
    out.print(about, soft_wrap=True)
    out.print(quality_table(rows))
    out.print(LEGEND.format(concurrency=plan.concurrency), style="dim")
    if collapses := sum(row.collapses for row in rows):
        print_warning(f"every weight was zero after {collapses} rounds; the answers concerned are not to be trusted")
    if markdown:
        markdown.write_text(quality_markdown(rows, about, plan.concurrency))
    if picture:
        draw(rows, picture, about)


def _about(record: Record) -> str:
    with_ = record.conditions
    return (
        f"{with_['problems']:,} held-out problems (seed {with_['seed']}), temperature {with_['temperature']:g}, "
        f"ESS threshold {with_['ess_threshold']:g}; {with_['device_name']}, {with_['dtype']}, torch {with_['torch']}"
        + (f", {with_['threads']} thread" + "s" * (with_["threads"] > 1) if with_["device"] == "cpu" else "")
    )


def _in_words(row: Row) -> str:
    parts = [f"{row.accuracy.share:.1%} ({interval(row.accuracy)})"]
    if row.setting.method == "exact":
        parts += [f"{row.tokens_a_round:.1f} tokens a round"]
    if row.hit_share is not None:
        parts += [f"{row.hit_share:.0%} hits"]
    if row.tokens_per_second is not None:
        parts += [f"{row.tokens_per_second:,.0f} tok/s"]
    return ", ".join([*parts, f"{row.batch_tokens_per_second:,.0f} tok/s in the batch"])
