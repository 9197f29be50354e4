"""Quality against speed as a picture: the settings that no other beats in both, and the best of every kind and form
that has none of these, each with its name beside it; where there are many, all others faint."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from smc.evaluation.quality import Row

COLOURS = {
    "exact": "#0072b2",
    "distinct": "#009e73",
    "independent": "#d55e00",
    "rejection": "#cc79a7",
    "target": "#000000",
    "draft": "#777777",
}
"""By kind; told apart by people who see colours differently (Okabe and Ito)."""
MARKERS = {"lookahead": "o", "lockstep": "s", None: "D"}
"""By form."""
FORMS = {"lookahead": "look-ahead: a GPU for each model", "lockstep": "lockstep: both on one", None: "one model alone"}
STEP = 0.03
"""Least distance between labels, as a share of the picture's height."""
TITLE = 150
"""Characters of a line of the title."""
FEW = 8
"""Settings that all have their names beside them."""


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Accuracy with its 95% interval against tokens per second of one request. Rows without a speed are left out."""
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


def frontier(rows: Sequence[Row]) -> list[Row]:
    """Rows that none other beats in speed without losing accuracy, the slowest first."""
    best: list[Row] = []
    for row in sorted(rows, key=lambda row: (-_speed(row), -row.accuracy.share)):
        if not best or row.accuracy.share > best[-1].accuracy.share:
            best.append(row)
    return best[::-1]


def leaders(rows: Sequence[Row], best: Sequence[Row]) -> list[Row]:
    """Of every kind and form that is not among the best: the row that solves most, of several the fastest."""
    there = {(row.setting.kind, row.setting.form) for row in best}
    found: dict[tuple[str, str | None], Row] = {}
    for row in sorted(rows, key=lambda row: (row.accuracy.share, _speed(row))):
        found[row.setting.kind, row.setting.form] = row
    return [row for which, row in found.items() if which not in there]


def _speed(row: Row) -> float:
    assert row.tokens_per_second is not None, "rows without a speed are left out"
    return row.tokens_per_second


def _draw_point(axes, row: Row, is_named: bool) -> None:
    share, (low, high) = row.accuracy.share, row.accuracy.interval
    colour, marker = COLOURS[row.setting.kind], MARKERS[row.setting.form]
    if is_named:
        # Of shares of 0 and 1 the bound is the share itself, up to rounding.
        spread = [[max(0.0, share - low)], [max(0.0, high - share)]]
        axes.errorbar(
            row.tokens_per_second, share, spread, fmt=marker, color=colour, markersize=7, elinewidth=0.8, capsize=2
        )
    else:
        axes.plot(row.tokens_per_second, share, marker=marker, color=colour, markersize=5, alpha=0.35, linestyle="")


def _draw_labels(axes, rows: Sequence[Row], left: Sequence[Row]) -> None:
    """To the right of their points or, of some, to the left; where two would lie on each other, the lower one gives way
    downwards."""
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


def _draw_legend(axes, rows: Sequence[Row]) -> None:
    kinds = [kind for kind in COLOURS if any(row.setting.kind == kind for row in rows)]
    forms = [form for form in MARKERS if any(row.setting.form == form for row in rows)]
    handles = [axes.plot([], [], color=COLOURS[kind], linewidth=3, label=kind)[0] for kind in kinds]
    handles += [
        axes.plot([], [], color="0.3", linestyle="", marker=MARKERS[form], label=FORMS[form])[0] for form in forms
    ]
    if handles:
        axes.figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
