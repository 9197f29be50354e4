"""The cost curves of what `smcserve bench` has run, for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

if TYPE_CHECKING:
    from smc.engine.costs import Costs, Curve, Point
    from smc.evaluation.round_time import GangRound, RoundTime
    from smc.evaluation.speed import Speed

CURVES_LEGEND = "what these rounds say of costs: milliseconds of a draft step, by rows, and of a target pass, by positions."


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
        """Of either model: size, and milliseconds of one step or pass."""
        rows = self.requests * self.particles
        if self.form == "plain":
            yield "target", (self.requests, self.target / self.block)
            return
        yield "draft", (rows * self.branches, self.draft / self.block)
        yield "target", (rows * (self.block + (self.form == "lockstep")), self.target)


def seen_of_speeds(rows: Sequence[Speed]) -> list[Seen]:
    forms = {"plain": "plain", "lookahead": "lookahead"}
    return [
        Seen(
            on=f"{row.target_gpus} GPUs" if row.target_gpus > 1 else "a GPU",
            form=forms.get(row.mode, "lockstep"),
            **{name: getattr(row, name) for name in ("requests", "particles", "branches", "block", "draft", "target")},
        )
        for row in rows
    ]


def seen_of_rounds(rows: Sequence[RoundTime | GangRound]) -> list[Seen]:
    """Of a CPU."""
    names = ("requests", "particles", "branches", "block", "form", "draft", "target")
    return [Seen(on=getattr(row, "link", ""), **{name: getattr(row, name) for name in names}) for row in rows]


def curve_tables(seen: Sequence[Seen]) -> list[Table]:
    """One for everything that models have run on."""
    return [_seen_table([each for each in seen if each.on == on], on) for on in dict.fromkeys(each.on for each in seen)]


def costs_tables(curves: Mapping[int, Costs]) -> list[Table]:
    """By the GPUs of the target."""
    return [
        curve_table(costs.draft, costs.target, f"target on {degree}", 1e3, f"{1e3 * costs.round_overhead:.2f} ms a round besides")
        for degree, costs in curves.items()
    ]


def curve_table(draft: Curve | None, target: Curve | None, title: str, unit: float = 1.0, caption: str | None = None) -> Table:
    """`unit`: by which seconds are multiplied."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), title=title or None, caption=caption, title_justify="left")
    for header in ("rows", "draft step ms", "positions", "target pass ms"):
        table.add_column(header, justify="right", no_wrap=True)
    points = ([] if curve is None else curve.points for curve in (draft, target))
    for pair in zip_longest(*points):
        cells = (("", "") if point is None else (f"{point[0]:,}", f"{unit * point[1]:.2f}") for point in pair)
        table.add_row(*(cell for two in cells for cell in two))
    return table


def _seen_table(seen: Sequence[Seen], on: str) -> Table:
    from smc.engine.costs import Curve

    samples = [sample for each in seen for sample in each.samples()]
    curves: dict[str, Curve | None] = {}
    for side in ("draft", "target"):
        own = [point for name, point in samples if name == side]
        curves[side] = Curve.through(own) if own else None
    return curve_table(curves["draft"], curves["target"], f"target on {on}" if "GPU" in on else on)
