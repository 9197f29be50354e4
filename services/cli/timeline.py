"""`smcserve timeline`: a picture of recorded rounds, and how busy each side was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli import options
from services.cli.terminal import check_drawing, out

LANES = ("draft", "coordinator", "target")
KINDS = {
    "prompt": ("#999999", "run a prompt"),
    "draft": ("#0072b2", "draft K tokens of every branch"),
    "target": ("#d55e00", "score a block"),
    "choose": ("#cc79a7", "choose"),
    "follow": ("#e69f00", "let the chosen go on"),
    "work": ("#009e73", "plan and record"),
}
"""Of work, by its name in a trace: colour and label."""
OTHER = ("#000000", "other")


def timeline(
    trace: Annotated[Path, typer.Argument(help="A trace, of `smcserve serve --trace` or `bench --trace`.", show_default=False)],
    picture: Annotated[Path, typer.Argument(help="Where to draw it (png).", show_default=False)],
    begin: Annotated[float, options.option(options.OUTPUT, "Milliseconds from the first round to start at.", metavar="MS")] = 0.0,
    length: Annotated[float, options.option(options.OUTPUT, "Milliseconds to show.", metavar="MS")] = 150.0,
) -> None:
    """Draw who worked when: draft, target and coordinator on one clock."""
    if length <= 0:
        raise ValueError(f"--length {length:g}; allowed: > 0")
    check_drawing()
    events = _read(trace)
    start = min(event["ts"] for event in events) / 1e3 + begin
    shown = [event for event in events if start < (event["ts"] + event["dur"]) / 1e3 and event["ts"] / 1e3 < start + length]
    if not shown:
        last = max(event["ts"] for event in events) / 1e3
        raise ValueError(f"--begin {begin:g}: nothing was recorded there; the trace ends {last - start + begin:.0f} ms after its start")
    _draw(shown, start, length, picture)
    for lane in LANES:
        busy = sum(_within(event, start, length) for event in shown if event["lane"] == lane)
        out.print(f"{lane:12} busy {busy / length:6.1%} of {length:g} ms")


def _within(event: dict[str, Any], start: float, length: float) -> float:
    """Milliseconds of a span that lie in what is shown."""
    begin, end = event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3
    return min(end, start + length) - max(begin, start)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        events = json.loads(path.read_text())["traceEvents"]
        names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
        spans = [event | {"lane": names[event["tid"]]} for event in events if event["ph"] == "X"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a trace of smcserve serve --trace ({type(error).__name__}: {error})") from error
    if not spans:
        raise ValueError(f"{path} holds no rounds: nothing was asked of that service")
    return spans


def _draw(events: list[dict[str, Any]], start: float, length: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(figsize=(12, 2.6), layout="constrained")
    for event in events:
        y = LANES.index(event["lane"])
        span = [(event["ts"] / 1e3 - start, event["dur"] / 1e3)]
        axes.broken_barh(span, (y - 0.36, 0.72), facecolors=KINDS.get(event["name"], OTHER)[0], edgecolor="white", linewidth=0.5)
    axes.set(xlim=(0, length), ylim=(len(LANES) - 0.5, -0.5), xlabel="milliseconds", yticks=range(len(LANES)), yticklabels=LANES)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    shown = {KINDS.get(event["name"], OTHER) for event in events}
    patches = [Patch(color=colour, label=label) for colour, label in (*KINDS.values(), OTHER) if (colour, label) in shown]
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
