"""What `smc.evaluation.advise` foretells, as a picture: tokens a second of all requests against how many there are,
arrangement by arrangement, each at its best setting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from smc.evaluation.advise import LOCKSTEP, LOOKAHEAD, PLAIN, Foretold

COLOURS = {PLAIN: "#000000", LOCKSTEP: "#d55e00", LOOKAHEAD: "#0072b2"}
"""By form; told apart by people who see colours differently (Okabe and Ito)."""
LINES = ("-", "--", ":", "-.")
"""Of the arrangements of a form, in their order."""


def draw(speeds: Sequence[Foretold], path: Path, title: str) -> None:
    """One line an arrangement."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=8, loc="left")
    axes.set_xlabel("requests decoded side by side")
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
        style = LINES[drawn.count(arrangement.form) % len(LINES)]
        drawn.append(arrangement.form)
        points = ([speed.requests for speed in own], [speed.total for speed in own])
        axes.plot(
            *points,
            style,
            color=COLOURS[arrangement.form],
            linewidth=1.5,
            marker="o",
            markersize=3,
            label=arrangement.name,
        )
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
