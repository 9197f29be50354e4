"""`smcserve bench --advise`: predicts from a latency model which split of GPUs, and which N, F and K, decode a number
of requests fastest."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.reports.speed import MOST_ROWS, latency_table
from smc.terminal import err, out

if TYPE_CHECKING:
    from benchmarks.advise import AcceptanceCurve, PredictedSpeed, TreeShapes
    from benchmarks.backends import PromptBackend
    from smc.scheduler.speculation import LatencyModel

LOADS = (1, 8, 64)
LEGEND = (
    "predicted for exact decoding{distribution}, of {how}; requests of {context:,} tokens each, without their prompts. "
    "tok a round: tokens that a round adds to an answer; tok/s: of one request; total: of all. x plain: relative to "
    "the fastest plain decoding on the same number of GPUs, by several services or with the target split."
)
FORM_COLOURS = {"plain": "#000000", "lockstep": "#d55e00", "look-ahead": "#0072b2"}
"""Form -> colour. Colour-blind readers can tell them apart (Okabe and Ito)."""
LINE_STYLES = ("-", "--", ":", "-.")
"""Line styles of the arrangements of one form, in their order."""
COLUMNS = "GPUs N F K tok_a_round tok/s total x_plain"


@dataclass(frozen=True)
class AdvisePlan:
    """The options of --advise. Raises ValueError naming the option, the value and what is allowed."""

    gpus: int
    degrees: Sequence[int]
    """Numbers of GPUs of the target that are tried."""
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
        if too_many := [degree for degree in self.degrees if degree > self.gpus]:
            raise ValueError(f"--target-tp {too_many[0]}; allowed with {self.gpus} GPUs: 1..{self.gpus}")

    @property
    def settings(self) -> TreeShapes:
        from benchmarks.advise import TreeShapes

        given = {"particles": self.particles, "branches": self.branches, "blocks": self.blocks}
        return TreeShapes(**{name: tuple(values) for name, values in given.items() if values})

    @property
    def rows(self) -> int:
        """Maximum number of rows of a timed draft step; times of more rows are predicted in proportion."""
        among = self.settings
        return min(MOST_ROWS, max(self.loads) * max(among.particles) * max(among.branches))

    def split(self, degree: int) -> tuple[int, int]:
        """Return the GPUs of draft and target while the models are timed. The draft gets its own GPU if the target is
        split and one more GPU is free."""
        return (1, degree) if 1 < degree < self.gpus else (0, degree)


def run(plan: AdvisePlan, backend: PromptBackend, compiles: bool) -> None:
    """Measure, then print the advice. `compiles`: the backend compiles and records rounds of a kind before they can be
    timed."""
    from benchmarks.advise import AcceptanceCurve, advise, arrangements, measure_acceptance, measure_split
    from smc.calibration.latency import STEADY, THOROUGH

    curves = {}
    for degree in plan.degrees:
        err.print(f"timing rounds, the target on {degree}", style="dim")
        curves[degree] = measure_split(backend, plan.split(degree), THOROUGH if compiles else STEADY, plan.rows)
    if plan.acceptance is not None:
        acceptance = AcceptanceCurve(plan.acceptance)
    else:
        err.print("answering problems, to measure acceptance", style="dim")
        acceptance = measure_acceptance(backend, plan.split(plan.degrees[0]), plan.distribution)

    def speeds(loads: Sequence[int]) -> list[PredictedSpeed]:
        return advise(arrangements(plan.gpus, curves), loads, acceptance, plan.settings, plan.context)

    report(plan, curves, acceptance, speeds)


def report(
    plan: AdvisePlan,
    curves: Mapping[int, LatencyModel],
    acceptance: AcceptanceCurve,
    speeds: Callable[[Sequence[int]], list[PredictedSpeed]],
) -> None:
    """Print the tables; write the same numbers and a picture if the plan says so. `speeds`: predicts the speeds at
    several loads."""
    how = (
        f"whose draft, with one row, has the target's next token with probability {acceptance.one:.3f}"
        f" ({'given' if plan.acceptance else 'measured'}), and with N rows misses it "
        f"N^{acceptance.gain:.2f} times less often"
    )
    distribution = "".join(f", {name} {value:g}" for name, value in plan.distribution.items())
    found = speeds(plan.loads)
    for degree, latency in curves.items():
        out.print(latency_table(latency, degree))
    out.print(
        advice_table(found),
        LEGEND.format(distribution=distribution, how=f"a pair {how}", context=plan.context),
        sep="\n",
    )
    if plan.json is not None:
        plan.json.write_text(json_module.dumps(_record(curves, acceptance, found), indent=1) + "\n")
    if plan.picture is not None:
        most = max(plan.loads)
        doubling = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
        title = (
            f"exact decoding on {plan.gpus} GPUs{distribution}, predicted for contexts of {plan.context:,} tokens: "
            f"a drafted row has the target's token with probability {acceptance.one:.3f}"
        )
        draw_advice(speeds(sorted({*doubling, *plan.loads})), plan.picture, title)


def advice_table(speeds: Sequence[PredictedSpeed]) -> Table:
    """Return the table: the arrangements at every load, the fastest first."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=0)
    table.add_column("requests", justify="right", no_wrap=True)
    table.add_column("arrangement", no_wrap=True)
    for header in COLUMNS.split():
        table.add_column("\n".join(header.replace("_", " ").rsplit(" ", 1)), justify="right", no_wrap=True)
    last = None
    for speed in speeds:
        arrangement, setting, new = speed.arrangement, speed.setting, speed.requests != last
        if new and last is not None:
            table.add_section()
        last = speed.requests
        shape: tuple[object, ...] = ("", "", "")
        if setting is not None:
            branches = setting.branches if arrangement.form == "look-ahead" else ""
            shape = (setting.particles, branches, setting.block)
        base = plain_of(speeds, speed.requests)
        rates = (
            f"{speed.tokens:.1f}",
            f"{speed.per_request:,.0f}",
            f"{speed.total:,.0f}",
            f"{speed.per_request / base:.2f}",
        )
        used = arrangement.gpus * arrangement.copies
        table.add_row(
            str(speed.requests) if new else "",
            arrangement.name,
            str(used),
            *map(str, shape),
            *rates,
            style="bold" if new else None,
        )
    return table


def plain_of(speeds: Sequence[PredictedSpeed], requests: int) -> float:
    """Return the tokens a second of one request with the fastest plain decoding."""
    return max(speed.per_request for speed in speeds if speed.requests == requests and speed.setting is None)


def _record(
    curves: Mapping[int, LatencyModel], acceptance: AcceptanceCurve, speeds: Sequence[PredictedSpeed]
) -> dict[str, object]:
    rows = [
        {
            "requests": speed.requests,
            "arrangement": speed.arrangement.name,
            "gpus": speed.arrangement.gpus * speed.arrangement.copies,
            "setting": speed.setting and asdict(speed.setting),
            "tokens": speed.tokens,
            "seconds": speed.seconds,
            "per_request": speed.per_request,
            "total": speed.total,
        }
        for speed in speeds
    ]
    latency = {str(degree): json_module.loads(each.to_json()) for degree, each in curves.items()}
    return {"latency": latency, "acceptance": asdict(acceptance), "speeds": rows}


def draw_advice(speeds: Sequence[PredictedSpeed], path: Path, title: str) -> None:
    """Draw total speed against concurrent requests, with one line for each arrangement."""
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
    for arrangement in dict.fromkeys(speed.arrangement for speed in speeds):
        own = sorted((speed for speed in speeds if speed.arrangement == arrangement), key=lambda speed: speed.requests)
        style = LINE_STYLES[drawn.count(arrangement.form) % len(LINE_STYLES)]
        drawn.append(arrangement.form)
        points = ([speed.requests for speed in own], [speed.total for speed in own])
        axes.plot(
            *points,
            style,
            color=FORM_COLOURS[arrangement.form],
            linewidth=1.5,
            marker="o",
            markersize=3,
            label=arrangement.name,
        )
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
