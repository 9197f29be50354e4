"""Runs `smcserve eval`: measures every setting in turn, shows the progress, records the results, and reports them as a
table, as markdown and as a picture.

`python -m benchmarks.reports.quality benchmarks/notes/quality.png` draws docs/quality.json.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import sub, truediv
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from benchmarks.quality import (
    DecodingSetting,
    QualityRecord,
    QualityRow,
    Terms,
    environment,
    measure,
    measure_speed,
    problem_requests,
    seconds_of,
    solved_before,
)
from benchmarks.reports import interval, number_cell
from smc.api.sampling_params import Method, SamplingParams
from smc.demo.problems import Problem, generate
from smc.loading import DEMO, LoadedModels, loaded_models, use_threads
from smc.model.source import name_dtypes
from smc.terminal import PlainProgress, err, out, print_warning
from smc.types import ModelRole

if TYPE_CHECKING:
    from smc.local_engine import ModelPair

HEADERS = (
    *("decoding", "N", "K", "F", "solved", "95% interval", "tok/s", "of target", "tok a round", "hits", "log p"),
    *("rounds", "resampled", "ESS / N", "first token", "tok/s batch"),
)
NOT_SHOWN = ("rounds", "resampled", "ESS / N", "first token")
"""Columns that are left out in a terminal, for lack of room."""
LEGEND = (
    "N particles, or rows of the tree of exact decoding; K tokens a round, F branches. tok/s: one request at a time, "
    "from its first token on; of target: relative to the target alone; tok/s batch: {concurrency} requests in flight, "
    "their prompts and first uses of a shape included. "
    "tok a round: tokens of an answer by its rounds, without the first token. hits: share of rounds after which rows "
    "that were drafted ahead went on. log p: mean log-probability of an answer's token under the target, minus that "
    "of the target's own answers."
)
MORE_LEGEND = (
    "rounds: per answer; resampled: share of rounds; ESS / N: effective share of independent particles; first token: "
    "milliseconds to the first token."
)
COLOURS = {
    "exact": "#0072b2",
    "distinct": "#009e73",
    "independent": "#d55e00",
    "rejection": "#cc79a7",
    "target": "#000000",
    "draft": "#777777",
}
"""Kind -> colour. Colour-blind readers can tell them apart (Okabe and Ito)."""
MARKERS = {"lookahead": "o", "lockstep": "s", None: "D"}
"""Markers by form."""
FORMS = {"lookahead": "look-ahead: a GPU for each model", "lockstep": "lockstep: both on one", None: "one model alone"}
STEP = 0.03
"""Minimum distance between labels, as a share of the picture's height."""
TITLE = 150
"""Maximum number of characters in a line of the title."""
FEW = 8
"""Maximum number of settings that are all labelled with their names."""
RECORDS = Path(__file__).parents[2] / "docs" / "quality.json"


@dataclass(frozen=True)
class QualityPlan:
    """The options of the command that affect measurements. Raises ValueError for invalid ones."""

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
            usual = SamplingParams(method=Method.SMC, population="independent").ess_threshold
            object.__setattr__(self, "ess_threshold", usual)

    @property
    def terms(self) -> Terms:
        return Terms(self.seed, self.temperature, self.ess_threshold)

    def make_problems(self, count: int) -> list[Problem]:
        return generate(self.seed, count, "test")


@dataclass(frozen=True)
class DemoPairs:
    """The demo pair, in its own shape or padded to larger ones, on the devices that settings need."""

    models: LoadedModels
    load: str
    device: str

    @staticmethod
    def of(
        load: str, target: str | None, draft: str | None, device: str, dtype: str | None, own: Mapping[str, Any]
    ) -> DemoPairs:
        """`own`: further arguments of `loaded_models`, by name. Raises ValueError for invalid options."""
        if load not in ("files", "grown"):
            raise ValueError(f"--load {load}; allowed: files, grown")
        for name, shape in (("target", target), ("draft", draft)):
            if shape is not None and load == "files":
                raise ValueError(f"--{name} {shape} has no effect without --load grown; leave it out")
            if shape is None and load == "grown":
                raise ValueError(f"--load grown needs --{name}, the name of a published shape")
        directories = (Path(target), Path(draft)) if target is not None and draft is not None else DEMO
        return DemoPairs(loaded_models(load, directories, device, dtype, **own), load, device)

    def placed(self, setting: DecodingSetting) -> ModelPair:
        """Return the pair on the devices for a setting. In look-ahead each model has its own GPU if there are two; all
        other settings run on the target's GPU."""
        if self.device == "cpu":
            return self.models.pair("cpu", "cpu")
        last = f"cuda:{_gpus() - 1}"
        return self.models.pair("cuda:0" if setting.form == "lookahead" else last, last)

    def conditions(self) -> dict[str, object]:
        """Return the part of a record's conditions that depends on the pair."""
        sources = self.models.sources
        shapes = {str(role): sources.of_role(role).name for role in ModelRole} if self.load == "grown" else {}
        gpus = {} if self.device == "cpu" else {"gpus": _gpus()}
        head = {} if sources.draft_vocab is None else {"draft_vocab": len(sources.draft_vocab.ids_M)}
        return environment(self.device) | {
            "dtype": name_dtypes(self.models.dtypes),
            "load": self.load,
            **shapes,
            **gpus,
            **head,
        }


def _gpus() -> int:
    """Return the number of GPUs that are used."""
    import torch

    return min(2, torch.cuda.device_count())


def prepare(
    plan: QualityPlan,
    settings: Sequence[DecodingSetting],
    pairs: DemoPairs,
    path: Path | None,
    resume: bool,
    solved: Sequence[Path] = (),
) -> tuple[QualityRecord, dict[str, QualityRow]]:
    """Check that no setting will be refused later, and open the record. `solved`: records of earlier answers. Returns
    the record, and the rows of the earlier ones by name."""
    use_threads(plan.threads, DEMO)
    for setting in settings:
        problem_requests(pairs.models.tokenizer, setting, plan.make_problems(1), plan.terms)
        _ = setting.engine
    conditions = asdict(plan) | pairs.conditions()
    known, measured_with = solved_before(solved, conditions)
    record = QualityRecord.open(path, conditions | ({"answers": measured_with} if known else {}), resume)
    record.write()
    return record, known


def measure_all(
    pairs: DemoPairs,
    plan: QualityPlan,
    settings: Sequence[DecodingSetting],
    record: QualityRecord,
    known: Mapping[str, QualityRow],
) -> None:
    """Measure the settings that the record lacks; for settings in `known` (by name), only the speed. If the run is
    interrupted, prints how to resume it."""
    todo = [setting for setting in settings if setting.name not in record.rows]
    if len(todo) < len(settings):
        err.print(f"{len(settings) - len(todo)} of {len(settings)} settings are in {record.path} already", style="dim")
    columns = (TextColumn("{task.description}"), BarColumn(None), TaskProgressColumn(), TimeRemainingColumn())
    try:
        with PlainProgress(*columns, expand=True, speed_estimate_period=3600) as progress:
            if new := [setting for setting in todo if setting.name not in known]:
                look = progress.add_task("estimating the time", total=None)
                progress.console.print(f"about {_duration(forecast(pairs, plan, new))} for all", style="dim")
                progress.remove_task(look)
            # The cost of an answer is about proportional to its particles, so the overall bar counts these.
            whole = progress.add_task(
                f"all {len(todo)} settings", total=plan.problems * sum(setting.particles or 1 for setting in todo)
            )
            for setting in todo:
                row = _measure(pairs.placed(setting), plan, setting, known.get(setting.name), progress, whole)
                record.add(row)
                progress.console.print(Text(f"{setting.name}: {_in_words(row)}", style="dim"))
    except KeyboardInterrupt:
        if record.path:
            err.print(f"stopped; {len(record.rows)} settings are in {record.path}, --resume continues from there")
        raise


def forecast(pairs: DemoPairs, plan: QualityPlan, settings: Sequence[DecodingSetting]) -> float:
    """Estimate the seconds that all settings will take, from a few answers of each: at most a tenth of the work."""
    count, seconds = min(plan.concurrency, max(1, plan.problems // 10)), 0.0
    for setting in settings:
        few = seconds_of(pairs.placed(setting), setting, plan.make_problems(count), plan.terms)
        seconds += few / count * (plan.problems + plan.speed_problems)
    return seconds


def _duration(seconds: float) -> str:
    """Return a duration as text, in the unit with the fewest digits."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes / 60:.1f} hours"


def _measure(
    pair: ModelPair,
    plan: QualityPlan,
    setting: DecodingSetting,
    row: QualityRow | None,
    progress: PlainProgress,
    whole: TaskID,
) -> QualityRow:
    """Measure one setting. `row`: its known results, without speed; None: there are none."""
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
    plan: QualityPlan,
    settings: Sequence[DecodingSetting],
    record: QualityRecord,
    markdown: Path | None,
    picture: Path | None,
) -> None:
    """Print the table in the order of `settings`; also write it as markdown and as a picture if the paths are given."""
    rows = [record.rows[setting.name] for setting in settings]
    about = _about(record)
    out.print(about, soft_wrap=True)
    out.print(quality_table(rows))
    out.print(LEGEND.format(concurrency=plan.concurrency), style="dim")
    if collapses := sum(row.collapses for row in rows):
        print_warning(f"all weights were zero after {collapses} rounds; answers continued from prefixes with weight")
    if markdown:
        markdown.write_text(quality_markdown(rows, about, plan.concurrency))
    if picture:
        draw_quality(rows, picture, about)


def _about(record: QualityRecord) -> str:
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


def _in_words(row: QualityRow) -> str:
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


def quality_table(rows: Sequence[QualityRow]) -> Table:
    """Return the table for a terminal. It fits into 80 columns."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=0, show_edge=False)
    for header in HEADERS:
        if header not in NOT_SHOWN:
            table.add_column(
                "\n".join(header.rsplit(" ", 1)), justify="left" if header == "decoding" else "right", no_wrap=True
            )
    target = target_alone(rows)
    for above, row in zip((None, *rows), rows):
        if above is not None and _family(above.setting) != _family(row.setting):
            table.add_section()
        name, *others = (cell for header, cell in zip(HEADERS, cells(row, target)) if header not in NOT_SHOWN)
        table.add_row(name.replace("independent", "indep.").replace("look-ahead", "ahead"), *others)
    return table


def quality_markdown(rows: Sequence[QualityRow], about: str, concurrency: int) -> str:
    """Return a markdown document with the conditions of the measurement, the table, and the meaning of its columns."""
    target = target_alone(rows)
    lines = [list(HEADERS), [":---", *["---:"] * (len(HEADERS) - 1)], *(cells(row, target) for row in rows)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{about}\n\n{table}\n\n{LEGEND.format(concurrency=concurrency)} {MORE_LEGEND}\n"


def cells(row: QualityRow, target: QualityRow | None) -> list[str]:
    """Return the cells of a row in the order of HEADERS. `target`: the row of the target alone."""
    setting, speed = row.setting, row.tokens_per_second
    name = (
        f"{setting.kind} {'lockstep' if setting.form == 'lockstep' else 'look-ahead'}" if setting.form else setting.name
    )
    return [
        name,
        *("" if value is None else str(value) for value in (setting.particles, setting.block, setting.branches)),
        f"{row.accuracy.share:.1%}",
        interval(row.accuracy),
        number_cell(speed, ",.0f"),
        number_cell(_against(speed, target.tokens_per_second if target else None, truediv), ".2f", "x"),
        number_cell(row.tokens_a_round, ".1f"),
        number_cell(row.hit_share, ".0%"),
        number_cell(_against(row.mean_logp, target.mean_logp if target else None, sub), "+.3f"),
        number_cell(row.rounds, ".1f"),
        number_cell(row.resample_rate, ".0%"),
        number_cell(row.mean_ess_share, ".2f"),
        number_cell(row.first_token, ".1f"),
        number_cell(row.batch_tokens_per_second, ",.0f"),
    ]


def target_alone(rows: Sequence[QualityRow]) -> QualityRow | None:
    return next((row for row in rows if row.setting.method == "target"), None)


def _family(setting: DecodingSetting) -> str | None:
    return setting.kind if setting.form else None


def _against(value: float | None, of_target: float | None, by: Callable[[float, float], float]) -> float | None:
    return None if value is None or of_target is None else by(value, of_target)


def draw_quality(rows: Sequence[QualityRow], path: Path, title: str) -> None:
    """Draw accuracy with its 95% interval against tokens per second of one request. Rows without a speed are left
    out."""
    from matplotlib.figure import Figure

    timed = [row for row in rows if row.tokens_per_second is not None]
    best = frontier([row for row in timed if row.setting.method != "draft"])
    behind = leaders(timed, best)
    named = [row for row in timed if len(timed) <= FEW or row in best or row in behind or not row.setting.form]
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(textwrap.fill(title, TITLE), fontsize=8, loc="left")
    axes.set_xlabel("answer tokens per second of one request, from its first token on")
    axes.set_ylabel("problems solved, with 95% interval")
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.grid(alpha=0.25)
    for row in timed:
        _draw_point(axes, row, row in named)
    axes.plot([_speed(row) for row in best], [row.accuracy.share for row in best], color="0.6", linewidth=1, zorder=0)
    axes.set_xlim(0, 1.6 * max((_speed(row) for row in timed), default=1.0))
    _draw_labels(axes, named, [row for row in behind if row.setting.form])
    _draw_legend(axes, timed)
    figure.savefig(path, dpi=130)


def frontier(rows: Sequence[QualityRow]) -> list[QualityRow]:
    """Return the rows on the Pareto frontier of speed and accuracy, the slowest first."""
    best: list[QualityRow] = []
    for row in sorted(rows, key=lambda row: (-_speed(row), -row.accuracy.share)):
        if not best or row.accuracy.share > best[-1].accuracy.share:
            best.append(row)
    return best[::-1]


def leaders(rows: Sequence[QualityRow], best: Sequence[QualityRow]) -> list[QualityRow]:
    """Return, for every kind and form without a row in `best`, the row that solves most; among equals the fastest."""
    there = {(row.setting.kind, row.setting.form) for row in best}
    found: dict[tuple[str, str | None], QualityRow] = {}
    for row in sorted(rows, key=lambda row: (row.accuracy.share, _speed(row))):
        found[row.setting.kind, row.setting.form] = row
    return [row for which, row in found.items() if which not in there]


def _speed(row: QualityRow) -> float:
    assert row.tokens_per_second is not None, "rows without a speed are left out"
    return row.tokens_per_second


def _draw_point(axes, row: QualityRow, is_named: bool) -> None:
    share, (low, high) = row.accuracy.share, row.accuracy.interval
    colour, marker = COLOURS[row.setting.kind], MARKERS[row.setting.form]
    if is_named:
        # For shares of 0 and 1 one bound equals the share, up to rounding.
        spread = [[max(0.0, share - low)], [max(0.0, high - share)]]
        axes.errorbar(
            row.tokens_per_second, share, spread, fmt=marker, color=colour, markersize=7, elinewidth=0.8, capsize=2
        )
    else:
        axes.plot(row.tokens_per_second, share, marker=marker, color=colour, markersize=5, alpha=0.35, linestyle="")


def _draw_labels(axes, rows: Sequence[QualityRow], left: Sequence[QualityRow]) -> None:
    """Draw labels to the right of their points, or to the left for the rows in `left`. If two labels would overlap, the
    lower one moves down."""
    bottom, top = axes.get_ylim()
    least, reached = STEP * (top - bottom), top
    for row in sorted(rows, key=lambda row: -row.accuracy.share):
        at = min(row.accuracy.share, reached - least)
        reached = at
        text = f"{row.setting.name}: {row.accuracy.share:.1%}, {row.tokens_per_second:,.0f} tok/s"
        side = -1 if row in left else 1
        axes.annotate(
            text,
            (row.tokens_per_second, row.accuracy.share),
            xytext=(row.tokens_per_second + side * 0.012 * axes.get_xlim()[1], at),
            ha="left" if side > 0 else "right",
            va="center",
            fontsize=7.5,
            color=COLOURS[row.setting.kind],
        )


def _draw_legend(axes, rows: Sequence[QualityRow]) -> None:
    kinds = [kind for kind in COLOURS if any(row.setting.kind == kind for row in rows)]
    forms = [form for form in MARKERS if any(row.setting.form == form for row in rows)]
    handles = [axes.plot([], [], color=COLOURS[kind], linewidth=3, label=kind)[0] for kind in kinds]
    handles += [
        axes.plot([], [], color="0.3", linestyle="", marker=MARKERS[form], label=FORMS[form])[0] for form in forms
    ]
    if handles:
        axes.figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def timed_rows() -> tuple[list[QualityRow], str]:
    """Return the rows of docs/quality.json that were timed at the large size at temperature 1, and a title. Look-ahead
    and the target alone were timed on two GPUs, lockstep on one."""
    records = [
        one
        for one in json.loads(RECORDS.read_text())
        if (one["conditions"]["load"], one["conditions"]["temperature"]) == ("grown", 1)
    ]
    records.sort(key=lambda one: -one["conditions"]["gpus"])
    rows: dict[str, QualityRow] = {}
    with TemporaryDirectory() as directory:
        for number, one in enumerate(records):
            path = Path(directory) / f"{number}.json"
            path.write_text(json.dumps(one))
            rows |= {
                name: row
                for name, row in QualityRecord.open(path, one["conditions"], resume=True).rows.items()
                if name not in rows
            }
    how = records[0]["conditions"]
    return [*rows.values()], (
        f"{how['problems']:,} held-out problems, temperature {how['temperature']:g}; the demo pair grown into "
        f"{how['target']} and {how['draft']}; {how['device_name']}, {how['dtype']}, torch {how['torch']}; "
        f"speeds of {how['speed_problems']} problems, one at a time"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=timed_rows.__doc__)
    parser.add_argument("path", type=Path)
    found, title = timed_rows()
    draw_quality(found, parser.parse_args().path, title)
