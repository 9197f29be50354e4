"""Draws the speeds that README.md and docs/performance.md begin with: a published pair first, the shipped pair last.

`python -m benchmarks.reports.speed_picture docs/speed.svg` draws docs/speed.json. Knows recorded figures; knows nothing
about how they are measured."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.reports.quality import COLOURS
from benchmarks.reports.quality import RECORDS as QUALITY
from smc.terminal import check_drawing

SPEEDS = QUALITY.with_name("speed.json")
KINDS = {
    "plain": ("0.55", "the target alone, one GPU"),
    "plain-tp": ("0.75", "the target alone, divided between two GPUs (TP)"),
    "lockstep": (COLOURS["exact"], "exact, both models on one GPU (lockstep)"),
    "lookahead": ("#e69f00", "exact, a GPU for each model (look-ahead)"),
    "smc": (COLOURS["distinct"], "SMC, 8 distinct particles, a GPU for each model"),
}
"""Kind -> colour and label. Colour-blind readers can tell them apart (Okabe and Ito)."""
MEASURED = ("bench", "http")
"""How a speed was measured: by `smcserve bench`, or by `benchmarks.worker_groups` over HTTP."""
TITLE = (
    "Left and middle: Qwen2.5-Coder-1.5B-Instruct, grown to the size of Qwen3-8B, with Qwen2.5-Coder-0.5B-Instruct in "
    "FP8 as its draft, temperature 0.7\n"
    "NVIDIA H200; more is better; (x): times the target alone on one GPU"
)
HEIGHT = 4.4
"""Height of the picture, in inches."""
GAP = 0.6
"""Space between the groups of a panel, in bars."""
ROOM = 1.55
"""Length of the axis, in longest bars: labels stand to the right of bars."""


@dataclass(frozen=True)
class Bar:
    """One recorded speed. Raises ValueError for a kind or a way of measuring that is not known."""

    group: str
    """What is decoded, such as the kind of prompts."""
    kind: str
    """Key of KINDS."""
    speed: float
    """Answer tokens a second."""
    plain: float
    """Those of the target alone on one GPU, in the same run."""
    commit: str
    by: str
    """One of MEASURED."""
    setting: str = ""
    """N, K and F, where they are fixed."""
    plain_tp: float | None = None
    """Tokens a second of the target alone on as many GPUs; None: not measured."""
    solved: str | None = None
    """Name of the row of docs/quality.json with the same method, N, K and F; None: exact or plain."""

    def __post_init__(self) -> None:
        for name, value, allowed in (("kind", self.kind, tuple(KINDS)), ("by", self.by, MEASURED)):
            if value not in allowed:
                raise ValueError(f"{name} {value!r}; allowed: {', '.join(allowed)}")
        if self.kind == "smc" and self.solved is None:
            raise ValueError(f"{self.group}: a speed of SMC needs the share solved at the same N, K and F")

    @property
    def label(self) -> str:
        """The speed, how many times plain decoding's it is, and the share solved."""
        if self.kind == "plain":
            return f"{self.speed:,.0f}"
        tp = f", {self.speed / self.plain_tp:.2f}x TP" if self.plain_tp else ""
        solved = f"\n{solved_share(self.solved):.1%} solved" if self.solved else ""
        return f"{self.speed:,.0f} ({self.speed / self.plain:.2f}x{tp}){solved}"


@dataclass(frozen=True)
class Panel:
    """Speeds that share an axis, in the order of rows. A group has one speed of each kind."""

    title: str
    unit: str
    bars: tuple[Bar, ...]

    @property
    def places(self) -> dict[tuple[str, str], float]:
        """Group and kind -> the middle of the row, in rows from the top."""
        rows = list(dict.fromkeys((bar.group, bar.kind) for bar in self.bars))
        groups = list(dict.fromkeys(group for group, _ in rows))
        return {row: number + GAP * groups.index(row[0]) for number, row in enumerate(rows)}


def read(path: Path = SPEEDS) -> list[Panel]:
    """Return the panels of a file like docs/speed.json."""
    return [
        Panel(one["title"], one["unit"], tuple(Bar(**bar) for bar in one["bars"]))
        for one in json.loads(path.read_text())
    ]


def solved_share(name: str) -> float:
    """Return the share of problems that the shipped pair, not grown, solves at temperature 1 by a setting of
    docs/quality.json."""
    (share,) = (
        row["accuracy"]
        for record in json.loads(QUALITY.read_text())
        for row in record["rows"]
        if (record["conditions"]["load"], record["conditions"]["temperature"], row["name"]) == ("files", 1, name)
    )
    return share


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Draw a row of panels with horizontal bars. SVG keeps its texts as texts, and is the same for the same figures."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "speed", "font.size": 8.5}):
        figure = Figure(figsize=(11, HEIGHT), layout="constrained")
        figure.suptitle(TITLE, fontsize=9, x=0.01, ha="left")
        for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
            _draw_panel(axes, panel)
        _draw_legend(figure, [bar for panel in panels for bar in panel.bars])
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_panel(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(panel.title, fontsize=9.5, fontweight="bold", loc="left")
    axes.set_xlabel(panel.unit, fontsize=8, loc="left")
    axes.set_ylim(max(panel.places.values()) + 0.5, -0.5)
    axes.set_xlim(0, ROOM * max(bar.speed for bar in panel.bars))
    axes.xaxis.set_major_formatter(lambda speed, _: f"{speed:,.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10]))
    axes.tick_params(axis="x", labelsize=7.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    of_group: dict[str, list[float]] = {}
    for (group, _), at in panel.places.items():
        of_group.setdefault(group, []).append(at)
    axes.set_yticks([sum(places) / len(places) for places in of_group.values()], list(of_group))
    for bar in panel.bars:
        at = panel.places[bar.group, bar.kind]
        axes.barh(at, bar.speed, height=0.8, color=KINDS[bar.kind][0])
        axes.annotate(bar.label, (bar.speed, at), xytext=(3, 0), textcoords="offset points", va="center")


def _draw_legend(figure: Any, bars: Sequence[Bar]) -> None:
    from matplotlib.patches import Patch

    shown = {bar.kind for bar in bars}
    handles = [Patch(color=colour, label=label) for kind, (colour, label) in KINDS.items() if kind in shown]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, fontsize=8, frameon=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="the picture, SVG or PNG")
    given = parser.parse_args()
    check_drawing()
    draw(read(), given.path)
