"""The work behind `smcserve eval`: every setting measured in turn, shown as it goes, recorded, and reported at the
end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from smc.api.sampling_params import SamplingParams
from smc.demo.problems import Problem, generate
from smc.evaluation.picture import draw
from smc.evaluation.quality import Row, Setting, Terms, measure, measure_speed, problem_requests, seconds_of
from smc.evaluation.record import Record, machine, solved_before
from smc.evaluation.reports.quality_table import LEGEND, interval, quality_markdown, quality_table
from smc.loading import DEMO, LoadedModels, loaded_models, use_threads
from smc.model.source import name_dtypes
from smc.terminal import err, out, print_warning
from smc.types import ModelRole

if TYPE_CHECKING:
    from smc.local_engine import ModelPair


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


@dataclass(frozen=True)
class Pairs:
    """The demo pair, in the shapes and on the devices that settings have it in."""

    models: LoadedModels
    load: str
    device: str

    @staticmethod
    def of(load: str, target: str | None, draft: str | None, device: str, own: tuple[Any, ...]) -> Pairs:
        """`own`: what else `loaded_models` takes, in its order. Raises ValueError for what cannot be."""
        if load not in ("files", "grown"):
            raise ValueError(f"--load {load}; allowed: files, grown")
        for name, shape in (("target", target), ("draft", draft)):
            if shape is not None and load == "files":
                raise ValueError(f"--{name} {shape} has no effect without --load grown; leave it out")
            if shape is None and load == "grown":
                raise ValueError(f"--load grown needs --{name}, the name of a published shape")
        places = (Path(target), Path(draft)) if target is not None and draft is not None else DEMO
        return Pairs(loaded_models(load, places, device, *own), load, device)

    def placed(self, setting: Setting) -> ModelPair:
        """Look-ahead has a GPU for each model where there are two; all else is on one, which is that of the target."""
        if self.device == "cpu":
            return self.models.pair("cpu", "cpu")
        last = f"cuda:{_gpus() - 1}"
        return self.models.pair("cuda:0" if setting.form == "lookahead" else last, last)

    def conditions(self) -> dict[str, object]:
        """Part of a record's."""
        sources = self.models.sources
        shapes = {str(role): sources.of_role(role).name for role in ModelRole} if self.load == "grown" else {}
        gpus = {} if self.device == "cpu" else {"gpus": _gpus()}
        head = {} if sources.draft_vocab is None else {"draft_vocab": len(sources.draft_vocab.ids_M)}
        return machine(self.device) | {
            "dtype": name_dtypes(self.models.dtypes),
            "load": self.load,
            **shapes,
            **gpus,
            **head,
        }


def _gpus() -> int:
    """Those that are used of those that are there."""
    import torch

    return min(2, torch.cuda.device_count())


def prepare(
    plan: Plan, settings: Sequence[Setting], pairs: Pairs, path: Path | None, resume: bool, solved: Sequence[Path] = ()
) -> tuple[Record, dict[str, Row]]:
    """Open the record, and find out now whether any setting would be refused later. `solved`: records of what has been
    answered before; returned are their rows, too."""
    use_threads(plan.threads, DEMO)
    for setting in settings:
        problem_requests(pairs.models.tokenizer, setting, plan.make_problems(1), plan.terms)
        _ = setting.engine
    conditions = asdict(plan) | pairs.conditions()
    known, measured_with = solved_before(solved, conditions)
    record = Record.open(path, conditions | ({"answers": measured_with} if known else {}), resume)
    record.write()
    return record, known


def measure_all(
    pairs: Pairs, plan: Plan, settings: Sequence[Setting], record: Record, known: Mapping[str, Row]
) -> None:
    """Measure what the record does not hold yet; of settings that are `known`, by name, speed alone. One that
    was stopped says how to go on."""
    todo = [setting for setting in settings if setting.name not in record.rows]
    if len(todo) < len(settings):
        err.print(f"{len(settings) - len(todo)} of {len(settings)} settings are in {record.path} already", style="dim")
    columns = (TextColumn("{task.description}"), BarColumn(None), TaskProgressColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=err, expand=True, transient=True, speed_estimate_period=3600) as progress:
            if new := [setting for setting in todo if setting.name not in known]:
                look = progress.add_task("how long it will take", total=None)
                progress.console.print(f"about {_duration(forecast(pairs, plan, new))} for all", style="dim")
                progress.remove_task(look)
            # An answer's cost grows about as its particles, so that is what the bar over everything counts.
            whole = progress.add_task(
                f"all {len(todo)} settings", total=plan.problems * sum(setting.particles or 1 for setting in todo)
            )
            for setting in todo:
                row = _measure(pairs.placed(setting), plan, setting, known.get(setting.name), progress, whole)
                record.add(row)
                progress.console.print(Text(f"{setting.name}: {_in_words(row)}", style="dim"))
    except KeyboardInterrupt:
        if record.path:
            err.print(f"stopped; {len(record.rows)} settings are in {record.path}, --resume goes on from there")
        raise


def forecast(pairs: Pairs, plan: Plan, settings: Sequence[Setting]) -> float:
    """Seconds that all settings will take, by a few answers of each: at most a tenth of the work."""
    count, seconds = min(plan.concurrency, max(1, plan.problems // 10)), 0.0
    for setting in settings:
        few = seconds_of(pairs.placed(setting), setting, plan.make_problems(count), plan.terms)
        seconds += few / count * (plan.problems + plan.speed_problems)
    return seconds


def _duration(seconds: float) -> str:
    """In the unit that says it in few digits."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes / 60:.1f} hours"


def _measure(pair: ModelPair, plan: Plan, setting: Setting, row: Row | None, progress: Progress, whole: TaskID) -> Row:
    """`row`: what is known of it, but for speed."""
    task = progress.add_task(setting.name, total=plan.problems)

    def advance(*_answer: object) -> None:
        progress.advance(task)
        progress.advance(whole, setting.particles or 1)

    if row is None:
        row = measure(pair, setting, plan.make_problems(plan.problems), plan.concurrency, plan.terms, advance)
    else:
        progress.update(whole, advance=plan.problems * (setting.particles or 1))
    if plan.speed_problems:
        progress.update(task, description=f"{setting.name}, one at a time")
        speed, first = measure_speed(pair, setting, plan.make_problems(plan.speed_problems), plan.terms)
        row = replace(row, tokens_per_second=speed, first_token=first)
    progress.remove_task(task)
    return row


def report(
    plan: Plan, settings: Sequence[Setting], record: Record, markdown: Path | None, picture: Path | None
) -> None:
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
        f"ESS threshold {with_['ess_threshold']:g}; "
        + (f"grown into {with_['target']} and {with_['draft']}; " if with_["load"] == "grown" else "")
        + (f"draft vocabulary of {with_['draft_vocab']:,}; " if "draft_vocab" in with_ else "")
        + f"{with_['device_name']}{' x 2' if with_.get('gpus') == 2 else ''}, {with_['dtype']}, torch {with_['torch']}"
        + (f", {with_['threads']} thread" + "s" * (with_["threads"] > 1) if with_["device"] == "cpu" else "")
        + (f"; answers of the small pair, {', '.join(with_['answers'])}" if "answers" in with_ else "")
    )


def _in_words(row: Row) -> str:
    parts = [f"{row.accuracy.share:.1%} ({interval(row.accuracy)})"]
    if row.setting.method == "exact":
        parts += [f"{row.tokens_a_round:.1f} tokens a round"]
    if row.hit_share is not None:
        parts += [f"{row.hit_share:.0%} hits"]
    if row.tokens_per_second is not None:
        parts += [f"{row.tokens_per_second:,.0f} tok/s"]
    if row.batch_tokens_per_second is not None:
        parts += [f"{row.batch_tokens_per_second:,.0f} tok/s in the batch"]
    return ", ".join(parts)
