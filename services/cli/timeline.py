"""`smcserve timeline`: a picture of recorded rounds, and how busy each side was."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli import options
from smc.terminal import check_drawing, out


def timeline(
    trace: Annotated[
        Path, typer.Argument(help="A trace, of `smcserve serve --trace` or `bench --trace`.", show_default=False)
    ],
    picture: Annotated[Path, typer.Argument(help="Where to draw it (png).", show_default=False)],
    begin: Annotated[
        float, options.option(options.OUTPUT, "Milliseconds from the first round to start at.", metavar="MS")
    ] = 0.0,
    length: Annotated[float, options.option(options.OUTPUT, "Milliseconds to show.", metavar="MS")] = 150.0,
) -> None:
    """Draw who worked when: draft, target and coordinator on one clock."""
    from smc.evaluation.reports.timeline import LANES, draw, read, within

    if length <= 0:
        raise ValueError(f"--length {length:g}; allowed: > 0")
    check_drawing()
    events = read(trace)
    start = min(event["ts"] for event in events) / 1e3 + begin
    shown = [
        event for event in events if start < (event["ts"] + event["dur"]) / 1e3 and event["ts"] / 1e3 < start + length
    ]
    if not shown:
        last = max(event["ts"] for event in events) / 1e3
        raise ValueError(
            f"--begin {begin:g}: nothing was recorded there; the trace ends {last - start + begin:.0f} ms after its start"
        )
    draw(shown, start, length, picture)
    for lane in LANES:
        busy = sum(within(event, start, length) for event in shown if event["lane"] == lane)
        out.print(f"{lane:12} busy {busy / length:6.1%} of {length:g} ms")
