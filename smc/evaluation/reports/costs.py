"""The cost curves of what `smcserve bench` has run, for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

if TYPE_CHECKING:
    from smc.evaluation.round_time import GangRound, RoundTime
    from smc.evaluation.speed import Speed
    from smc.scheduler.latency_model import LatencyModel, Point

CURVES_LEGEND = (
    "what these rounds say of costs, with the contexts that they had: milliseconds of a draft step, by rows, of a target pass, by "
    "positions, and of a pass of the target that decodes alone, by sequences."
)
COLUMNS = {
    "draft": ("rows", "draft step ms"),
    "target": ("positions", "target pass ms"),
    "alone": ("sequences", "alone ms"),
}
"""Of the parts of `smc.scheduler.latency_model`."""


@dataclass(frozen=True)
class Seen:
    """A measured line of a table, as far as costs go. Milliseconds."""

    on: str
    """What runs the models."""
    requests: int
    particles: int
    branches: int
    block: int
    form: str
    """`plain`, `lockstep` or `lookahead`."""
    draft: float
    """K steps."""
    target: float
    """A pass; of plain decoding K."""

    def samples(self) -> Iterable[tuple[str, Point]]:
        """Of parts of the costs: size, and milliseconds of one step or pass."""
        rows = self.requests * self.particles
        if self.form == "plain":
            yield "alone", (self.requests, self.target / self.block)
            return
        yield "draft", (rows * self.branches, self.draft / self.block)
        yield "target", (rows * (self.block + (self.form == "lockstep")), self.target)


def seen_of_speeds(rows: Sequence[Speed], drafting: str) -> list[Seen]:
    """`drafting` of `EngineConfig`: where costs decided, who had how many rows, and when, is not known of exact
    decoding."""
    return [
        Seen(
            on=f"{row.target_gpus} GPUs" if row.target_gpus > 1 else "a GPU",
            form="plain" if row.decoding == "target" else "lookahead" if row.mode == "lookahead" else "lockstep",
            **{name: getattr(row, name) for name in ("requests", "particles", "branches", "block", "draft", "target")},
        )
        for row in rows
        if drafting == "always" or row.decoding != "exact"
    ]


def seen_of_rounds(rows: Sequence[RoundTime | GangRound]) -> list[Seen]:
    """Of a CPU."""
    names = ("requests", "particles", "branches", "block", "form", "draft", "target")
    return [Seen(on=getattr(row, "link", ""), **{name: getattr(row, name) for name in names}) for row in rows]


def curve_tables(seen: Sequence[Seen]) -> list[Table]:
    """One for everything that models have run on."""
    return [_seen_table([each for each in seen if each.on == on], on) for on in dict.fromkeys(each.on for each in seen)]


def costs_tables(costs: Mapping[int, LatencyModel]) -> list[Table]:
    """By the GPUs of the target."""
    return [_costs_table(each, f"target on {degree}") for degree, each in costs.items()]


def _costs_table(costs: LatencyModel, title: str) -> Table:
    reads = ", ".join(f"{1e9 * part.read:.0f} ({name})" for name, part in costs.parts.items())
    caption = f"without contexts; {reads} ns more for every token of context, {1e3 * costs.round_overhead:.2f} ms a round besides"
    points = {
        name: [(size, 1e3 * seconds) for size, seconds in part.curve.points] for name, part in costs.parts.items()
    }
    return curve_table(points, title, caption)


def curve_table(points: Mapping[str, Sequence[Point]], title: str, caption: str | None = None) -> Table:
    """`points`: size and milliseconds, by parts of the costs; those without any are left out."""
    table = Table(
        box=SIMPLE_HEAD,
        header_style="bold",
        padding=(0, 1, 0, 0),
        title=title or None,
        caption=caption,
        title_justify="left",
    )
    found = {name: points[name] for name in COLUMNS if points.get(name)}
    for name in found:
        for header in COLUMNS[name]:
            table.add_column(header, justify="right", no_wrap=True)
    for row in zip_longest(*found.values()):
        cells = (("", "") if point is None else (f"{point[0]:,}", f"{point[1]:.2f}") for point in row)
        table.add_row(*(cell for two in cells for cell in two))
    return table


def _seen_table(seen: Sequence[Seen], on: str) -> Table:
    from smc.scheduler.latency_model import LatencyCurve

    samples: dict[str, list[Point]] = {}
    for name, point in (sample for each in seen for sample in each.samples()):
        samples.setdefault(name, []).append(point)
    points = {name: LatencyCurve.through(own).points for name, own in samples.items()}
    return curve_table(points, f"target on {on}" if "GPU" in on else on)
