"""`smcserve bench --advise`: finds the division of GPUs, with N, F and K, that decodes a number of requests fastest,
and stores what it measured for `smcserve serve --gpus`."""

from __future__ import annotations

import json as json_module
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.reports.speed import MOST_ROWS, draft_table, latency_table
from smc.terminal import err, out

if TYPE_CHECKING:
    from benchmarks.backends import PromptBackend
    from services.launch.config import WorkerGroupConfig
    from services.launch.division import Degrees, DegreeTimes, Division, DivisionSpeed
    from services.launch.division_choice import DivisionMeasurement
    from smc.calibration.forecast import AcceptanceCurve, TreeShapes

LOADS = (1, 8, 64)
RUN = 3
"""Number of divisions that are run briefly for each load."""
SHOWN = 10
"""Maximum number of divisions in the table of one load; the file of --json has all."""
LEGEND = (
    "exact decoding{distribution}, of {how}; requests of {context:,} tokens each, without their prompts. tok a round: "
    "tokens that a round adds to an answer; forecast: tok/s of one request by the times of each degree; measured: in a "
    "brief run of one worker group; total: of all requests; x plain: relative to the fastest plain decoding. d + t: "
    "GPUs of draft and target; TP t: both models are divided among t GPUs, or the draft is whole on each."
)
FORM_COLOURS = {"plain": "#000000", "lockstep": "#d55e00", "look-ahead": "#0072b2"}
"""Form -> colour. Colour-blind readers can tell them apart (Okabe and Ito)."""
LINE_STYLES = ("-", "--", ":", "-.")
"""Line styles of the divisions of one form, in their order."""
COLUMNS = "GPUs N F K tok_a_round forecast measured total x_plain"


@dataclass(frozen=True)
class AdvisePlan:
    """The options of --advise. Raises ValueError naming the option, the value and what is allowed."""

    gpus: int
    degrees: Degrees
    """Numbers of GPUs of each model that are tried."""
    runs: bool
    """The best divisions can be run, since each process has a device of its own."""
    loads: Sequence[int]
    """Numbers of concurrent requests."""
    context: int
    """Tokens of each request."""
    particles: Sequence[int] | None
    branches: Sequence[int] | None
    blocks: Sequence[int] | None
    acceptance: float | None
    """Acceptance of one row; None: measured."""
    distribution: Mapping[str, Any]
    """Settings of `SamplingParams`, by name."""
    prompts: Sequence[Sequence[int]]
    """Token ids of prompts; none: demo problems."""
    json: Path | None
    picture: Path | None

    def __post_init__(self) -> None:
        from smc.api.engine_config import EngineConfig
        from smc.api.sampling_params import Method, SamplingParams

        SamplingParams(method=Method.EXACT, **self.distribution)
        if self.acceptance is not None and not 0 < self.acceptance < 1:
            raise ValueError(f"--acceptance {self.acceptance:g}; allowed: between 0 and 1, both excluded")
        if self.context < 1:
            raise ValueError(f"--context {self.context}; allowed: >= 1")
        if self.gpus < 1:
            raise ValueError(f"--gpus {self.gpus}; allowed: >= 1")
        among = self.settings
        for particles, branches, block in product(among.particles, among.branches, among.blocks):
            SamplingParams(method=Method.EXACT, particles=particles)
            EngineConfig(block=block, branches=branches)

    @property
    def settings(self) -> TreeShapes:
        from smc.calibration.forecast import TreeShapes

        given = {"particles": self.particles, "branches": self.branches, "blocks": self.blocks}
        return TreeShapes(**{name: tuple(values) for name, values in given.items() if values})

    @property
    def rows(self) -> int:
        """Maximum number of rows of a timed draft step; times of more rows are predicted in proportion."""
        among = self.settings
        return min(MOST_ROWS, max(self.loads) * max(among.particles) * max(among.branches))


def run(plan: AdvisePlan, backend: PromptBackend, config: WorkerGroupConfig, compiles: bool) -> None:
    """Measure, print the advice and store the measurement. `compiles`: the backend compiles and records rounds of a
    kind before they can be timed."""
    from benchmarks.advise import Advisor
    from services.launch.division import divisions
    from services.launch.division_choice import DivisionMeasurement, gpu_memory, weights_fit
    from smc.calibration.forecast import PLAIN, AcceptanceCurve
    from smc.calibration.latency import STEADY, THOROUGH

    advisor = Advisor(backend, plan.distribution, plan.prompts, lambda text: err.print(text, style="dim", markup=False))
    fits = weights_fit(config, gpu_memory() if config.device == "cuda" else None)
    times = advisor.times(plan.degrees, plan.gpus, fits, THOROUGH if compiles else STEADY, plan.rows)
    found = [
        each
        for each in divisions(plan.gpus, plan.degrees, fits)
        if times.knows(each) and times.left_out_of(each) is None
    ]
    if plan.acceptance is not None:
        acceptance = AcceptanceCurve(plan.acceptance)
    else:
        advisor.say("answering prompts, to measure acceptance")
        shared = (each for each in reversed(found) if each.placement == "shared" and each.form != PLAIN)
        acceptance = advisor.acceptance(next(shared, found[-1]))
    ranked = _ranked(plan, found, times, acceptance, plan.loads)
    if plan.runs and plan.acceptance is None:
        ranked = _run_best(ranked, advisor.run)
    speeds = [speed for of_load in ranked.values() for speed in of_load]
    measurement = DivisionMeasurement(
        times, acceptance, plan.context, tuple(speed for speed in speeds if speed.measured is not None)
    )
    report(plan, measurement, speeds, found)
    if plan.acceptance is None:
        where = store_measurement(config, measurement)
        out.print(f"stored in {where}; `smcserve serve --gpus {plan.gpus}` starts the best division", soft_wrap=True)


def _ranked(
    plan: AdvisePlan,
    found: Sequence[Division],
    times: DegreeTimes,
    acceptance: AcceptanceCurve,
    loads: Sequence[int],
) -> dict[int, list[DivisionSpeed]]:
    """Return all divisions for each load, the fastest forecast first."""
    from services.launch.division import rank_divisions

    among = plan.settings
    return {requests: rank_divisions(found, times, requests, acceptance, among, plan.context) for requests in loads}


def _run_best(
    ranked: Mapping[int, list[DivisionSpeed]], run: Callable[[DivisionSpeed], float]
) -> dict[int, list[DivisionSpeed]]:
    """Run the best divisions of every load. Divisions with the same processes run one after another, since to load
    weights takes longer than to run."""
    todo = [speed for of_load in ranked.values() for speed in to_run(of_load, RUN)]
    todo.sort(key=lambda speed: (speed.division.placement, speed.division.target, speed.division.draft or 1))
    measured = {(speed.division, speed.requests): run(speed) for speed in todo}
    return {requests: with_runs(of_load, measured) for requests, of_load in ranked.items()}


def to_run(ranked: Sequence[DivisionSpeed], count: int) -> list[DivisionSpeed]:
    """Return the first `count` divisions and the fastest plain decoding, which the others are compared with."""
    from smc.calibration.forecast import PLAIN

    plain = next((speed for speed in ranked if speed.division.form == PLAIN), None)
    best = list(ranked[:count])
    return best if plain is None or plain in best else [*best, plain]


def with_runs(ranked: Sequence[DivisionSpeed], measured: Mapping[tuple[Division, int], float]) -> list[DivisionSpeed]:
    """Return all divisions: those that ran first, the fastest first, then the others in their order, and last those
    whose run failed. `measured`: tokens a second of one request, by division and number of requests; 0: it failed."""
    known = {speed: measured.get((speed.division, speed.requests)) for speed in ranked}
    ran, failed = (
        [replace(speed, measured=each) for speed, each in known.items() if each is not None and bool(each) == works]
        for works in (True, False)
    )
    others = (speed for speed, each in known.items() if each is None)
    return [*sorted(ran, key=lambda speed: -speed.per_request), *others, *failed]


def store_measurement(config: WorkerGroupConfig, found: DivisionMeasurement) -> Path:
    """Store a measurement in place of an earlier one. Returns its file. Raises OSError if it cannot be written."""
    from services.launch.division_choice import measurement_file

    path = measurement_file(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process reads either the whole file or the one before.
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".new", delete=False, encoding="utf-8") as file:
        file.write(found.to_json())
    os.replace(file.name, path)
    return path


def report(
    plan: AdvisePlan, measurement: DivisionMeasurement, speeds: Sequence[DivisionSpeed], found: Sequence[Division]
) -> None:
    """Print the tables and the winners; write the same numbers and a picture if the plan says so."""
    acceptance = measurement.acceptance
    how = (
        f"whose draft, with one row, has the target's next token with probability {acceptance.one:.3f}"
        f" ({'given' if plan.acceptance else 'measured'}), and with N rows misses it "
        f"N^{acceptance.gain:.2f} times less often"
    )
    distribution = "".join(f", {name} {value:g}" for name, value in plan.distribution.items())
    times = measurement.times
    for degree, latency in times.of_target.items():
        out.print(latency_table(latency, degree))
    beside = [latency.draft for latency in times.of_target.values()]
    for degree, draft in times.of_draft.items():
        if draft not in beside:
            out.print(draft_table(draft, degree))
    out.print(
        advice_table(speeds),
        LEGEND.format(distribution=distribution, how=f"a pair {how}", context=plan.context),
        *(winner(of_load) for of_load in _by_load(speeds)),
        sep="\n",
    )
    if plan.json is not None:
        plan.json.write_text(json_module.dumps(_record(measurement, speeds), indent=1) + "\n")
    if plan.picture is not None:
        most = max(plan.loads)
        doubling = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
        title = (
            f"exact decoding on {plan.gpus} GPUs{distribution}, forecast for contexts of {plan.context:,} tokens: "
            f"a drafted row has the target's token with probability {acceptance.one:.3f}"
        )
        best = list(dict.fromkeys(speed.division for of_load in _by_load(speeds) for speed in of_load[:RUN]))
        points = _ranked(plan, best, measurement.times, acceptance, sorted({*doubling, *plan.loads}))
        draw_advice([speed for of_load in points.values() for speed in of_load], plan.picture, title)


def _by_load(speeds: Sequence[DivisionSpeed]) -> list[list[DivisionSpeed]]:
    return [list(of_load) for _, of_load in groupby(speeds, key=lambda speed: speed.requests)]


def winner(of_load: Sequence[DivisionSpeed]) -> str:
    """Return a sentence about the fastest division of a load, and what it beat."""
    from services.launch.division_choice import describe

    best, *others = of_load
    requests = f"{best.requests} request{'' if best.requests == 1 else 's'}"
    how = "forecast" if best.measured is None else "measured"
    beaten = ", ".join(f"{speed.division.name} ({speed.per_request:,.0f})" for speed in others[: RUN - 1])
    return (
        f"{requests}: {describe(best)} makes {best.per_request:,.0f} tokens a second of each ({how})"
        f"{f'; it beat {beaten}' if beaten else ''}"
    )


def advice_table(speeds: Sequence[DivisionSpeed]) -> Table:
    """Return the table: the best divisions at every load, the fastest first, and the fastest plain decoding."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=0)
    table.add_column("requests", justify="right", no_wrap=True)
    table.add_column("division", no_wrap=True)
    for header in COLUMNS.split():
        table.add_column("\n".join(header.replace("_", " ").rsplit(" ", 1)), justify="right", no_wrap=True)
    for number, of_load in enumerate(_by_load(speeds)):
        if number:
            table.add_section()
        plain = plain_of(of_load)
        shown = of_load[:SHOWN]
        for row, speed in enumerate(shown if plain in shown else [*shown, plain]):
            division, setting = speed.division, speed.setting
            shape: tuple[object, ...] = ("", "", "")
            if setting is not None:
                branches = setting.branches if division.form == "look-ahead" else ""
                shape = (setting.particles, branches, setting.block)
            rates = (
                f"{speed.tokens:.1f}",
                f"{speed.forecast:,.0f}",
                "" if speed.measured is None else f"{speed.measured:,.0f}",
                f"{speed.total:,.0f}",
                f"{speed.per_request / plain.per_request:.2f}" if plain.per_request else "",
            )
            cells = (str(speed.requests) if not row else "", division.name, str(division.gpus), *map(str, shape))
            table.add_row(*cells, *rates, style="bold" if not row else None)
    return table


def plain_of(of_load: Sequence[DivisionSpeed]) -> DivisionSpeed:
    """Return the fastest plain decoding of a load."""
    return max((speed for speed in of_load if speed.division.form == "plain"), key=lambda speed: speed.per_request)


def _record(measurement: DivisionMeasurement, speeds: Sequence[DivisionSpeed]) -> dict[str, object]:
    times = measurement.times.record()
    rows = [
        {
            "requests": speed.requests,
            "division": speed.division.name,
            "gpus": speed.division.gpus,
            "setting": speed.setting and asdict(speed.setting),
            "tokens": speed.tokens,
            "seconds": speed.seconds,
            "forecast": speed.forecast,
            "measured": speed.measured,
            "per_request": speed.per_request,
            "total": speed.total,
        }
        for speed in speeds
    ]
    return {
        "latency": times["of_target"],
        "draft_latency": times["of_draft"],
        "acceptance": asdict(measurement.acceptance),
        "speeds": rows,
    }


def draw_advice(speeds: Sequence[DivisionSpeed], path: Path, title: str) -> None:
    """Draw total speed against concurrent requests, with one line for each division."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=8, loc="left")
    axes.set_xlabel("concurrent requests")
    axes.set_ylabel("answer tokens a second, of all requests")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:,.0f}" if f"{value:e}"[0] in "235" else "")
    axes.grid(alpha=0.25, which="both")
    drawn: list[str] = []
    for division in dict.fromkeys(speed.division for speed in speeds):
        own = sorted((speed for speed in speeds if speed.division == division), key=lambda speed: speed.requests)
        style = LINE_STYLES[drawn.count(division.form) % len(LINE_STYLES)]
        drawn.append(division.form)
        points = ([speed.requests for speed in own], [speed.total for speed in own])
        looks: dict[str, Any] = {"color": FORM_COLOURS[division.form], "linewidth": 1.5, "marker": "o", "markersize": 3}
        axes.plot(*points, style, label=division.name, **looks)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
