"""Draws recorded rounds from a Chrome trace: when draft, target and coordinator worked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LANES = ("draft", "coordinator", "target")
KINDS = {
    "prompt": ("#999999", "run a prompt"),
    "redraft": ("#56b4e9", "draft again after a miss"),
    "draft": ("#0072b2", "draft K tokens of every branch"),
    "target": ("#d55e00", "score a block"),
    "select": ("#cc79a7", "select"),
    "remap": ("#e69f00", "remap to the selected rows"),
    "work": ("#009e73", "plan and record"),
}
"""Name of work in a trace -> its colour and label."""
OTHER = ("#000000", "other")


def within(event: dict[str, Any], start: float, length: float) -> float:
    """Return the milliseconds of an event that lie in the shown interval of `length` milliseconds from `start`."""
    begin, end = event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3
    return min(end, start + length) - max(begin, start)


def read(path: Path) -> list[dict[str, Any]]:
    try:
        events = json.loads(path.read_text())["traceEvents"]
        names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
        spans = [event | {"lane": names[event["tid"]]} for event in events if event["ph"] == "X"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a trace of smcserve serve --trace ({type(error).__name__}: {error})"
        ) from error
    if not spans:
        raise ValueError(f"{path} holds no rounds; record a trace while the service answers requests")
    return spans


def draw(events: list[dict[str, Any]], start: float, length: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(figsize=(12, 2.6), layout="constrained")
    for event in events:
        y = LANES.index(event["lane"])
        span = [(event["ts"] / 1e3 - start, event["dur"] / 1e3)]
        axes.broken_barh(
            span, (y - 0.36, 0.72), facecolors=KINDS.get(event["name"], OTHER)[0], edgecolor="white", linewidth=0.5
        )
    axes.set(
        xlim=(0, length),
        ylim=(len(LANES) - 0.5, -0.5),
        xlabel="milliseconds",
        yticks=range(len(LANES)),
        yticklabels=LANES,
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    shown = {KINDS.get(event["name"], OTHER) for event in events}
    patches = [
        Patch(color=colour, label=label) for colour, label in (*KINDS.values(), OTHER) if (colour, label) in shown
    ]
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
