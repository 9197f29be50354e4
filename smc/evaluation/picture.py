"""Quality against speed as a picture: where each way of decoding lies between the draft alone and the target alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from smc.evaluation.quality import Row

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Told apart by people who see colours differently (Okabe and Ito). One for every kind and form."""
LINES = ("-", "--", ":", "-.")
"""One for every K."""
MARKERS = "osD^vP*X"
"""One for every N."""


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Accuracy with its 95% interval against tokens per second of one request. Rows without a speed are left out."""
    from matplotlib.figure import Figure

    timed = [row for row in rows if row.tokens_per_second is not None]
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=8, loc="left")
    axes.set_xlabel("answer tokens per second, one request at a time")
    axes.set_ylabel("problems solved, with 95% interval")
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.grid(alpha=0.25)
    _draw_points(axes, [row for row in timed if row.setting.form])
    _draw_references(axes, [row for row in timed if not row.setting.form])
    axes.set_xlim(left=0)
    figure.savefig(path, dpi=130)


def _draw_references(axes, plain: Sequence[Row]) -> None:
    """Each model alone as a level; the target's speed, which is the one to beat, as an upright line."""
    for row in plain:
        style = "-" if row.setting.method == "target" else "--"
        axes.axhline(row.accuracy.share, color="0.35", linewidth=1, linestyle=style, zorder=0)
        label = f"{row.setting.name}: {row.accuracy.share:.1%} at {row.tokens_per_second:,.0f} tok/s"
        axes.annotate(
            label, (0.01, row.accuracy.share), (0, -11), xycoords=axes.get_yaxis_transform(), textcoords="offset points", fontsize=8
        )
        if row.setting.method == "target":
            axes.axvline(row.tokens_per_second, color="0.35", linewidth=1, zorder=0)


def _draw_points(axes, rows: Sequence[Row]) -> None:
    """A colour for every kind and form, a line for every K, a marker for every N; look-ahead of one N and K is joined in the order of F."""
    colours = dict(zip(dict.fromkeys(map(_series, rows)), COLOURS * len(rows)))
    lines = dict(zip(sorted({row.setting.block for row in rows}), LINES * len(rows)))
    markers = dict(zip(sorted({row.setting.particles for row in rows}), MARKERS * len(rows)))
    by_line = sorted(rows, key=lambda row: (*_line(row), row.setting.branches or row.setting.particles))
    for (series, block, _), line in groupby(by_line, key=_line):
        line = list(line)
        speeds, shares = [row.tokens_per_second for row in line], [row.accuracy.share for row in line]
        axes.plot(speeds, shares, color=colours[series], linestyle=lines[block], linewidth=1, alpha=0.6)
        for row in line:
            _draw_point(axes, row, colours[series], markers[row.setting.particles])
    _draw_legend(axes, colours, lines, markers)


def _draw_point(axes, row: Row, colour: str, marker: str) -> None:
    share, (low, high) = row.accuracy.share, row.accuracy.interval
    axes.errorbar(
        *(row.tokens_per_second, share, [[share - low], [high - share]]),
        fmt=marker,
        color=colour,
        markersize=6,
        elinewidth=0.8,
        capsize=2,
        alpha=0.9,
    )
    if row.setting.branches:
        at = (row.tokens_per_second, share)
        axes.annotate(f"F{row.setting.branches}", at, (5, 4), textcoords="offset points", fontsize=7, color=colour)


def _draw_legend(axes, colours: dict[str, str], lines: dict[int, str], markers: dict[int, str]) -> None:
    handles = [axes.plot([], [], color=colour, linewidth=3, label=series)[0] for series, colour in colours.items()]
    handles += [axes.plot([], [], color="0.2", linewidth=1, linestyle=style, label=f"K={block}")[0] for block, style in lines.items()]
    handles += [
        axes.plot([], [], color="0.2", linestyle="", marker=marker, label=f"{n} particle" + "s" * (n > 1))[0]
        for n, marker in markers.items()
    ]
    if handles:
        axes.figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def _series(row: Row) -> str:
    return f"{row.setting.kind} {'lockstep' if row.setting.form == 'lockstep' else 'look-ahead'}"


def _line(row: Row) -> tuple[str, int, int]:
    """Lockstep is joined in the order of N, so all of one K is one line."""
    return _series(row), row.setting.block, row.setting.particles if row.setting.branches else 0
