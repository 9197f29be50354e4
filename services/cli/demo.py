"""`smcserve demo`: three questions answered before your eyes, then ways of decoding on a few more."""

from __future__ import annotations

from typing import Annotated

import typer

from services.cli import options


def demo(
    problems: Annotated[
        int, options.option(options.MEASURE, "Problems behind the table; 0 = no table.", metavar="COUNT")
    ] = 20,
    seed: Annotated[int, options.option(options.MEASURE, "Of the problems and of the answers.", metavar="SEED")] = 1,
) -> None:
    """Answer three questions with the shipped model pair, and compare ways of decoding."""
    if problems < 0:
        raise typer.BadParameter(f"{problems}; allowed: >= 0", param_hint="'--problems'")
    from services.cli.demo_run import show

    show(problems, seed)
