"""`smcserve eval`, `bench`, `timeline` and `grow`: commands of the package `benchmarks`, which is in the repository and
not in the wheel. It is imported when one of them is called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import typer

CHECKOUT = Path(__file__).resolve().parents[2]
"""The root of the repository, where this package is in one."""
COMMANDS = {
    "eval": "Measure quality and speed of every way of decoding, on problems made for it, or on those of a file.",
    "bench": "Measure speed: on GPUs answer tokens a second of every mode, on a CPU where the time of a round goes.",
    "timeline": "Draw when draft, target and coordinator worked, on one clock.",
    "grow": "Write a small model in a large shape, the rest zeros: the small one's answers at the large one's cost.",
}


def add_commands(app: typer.Typer) -> None:
    """Every option goes to the command in `benchmarks`, --help among them."""
    pass_on = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    for name, text in COMMANDS.items():
        app.command(name, help=text, context_settings=pass_on)(_command(name))


def _command(name: str) -> Callable[[typer.Context], int]:
    def command(ctx: typer.Context) -> int:
        if (CHECKOUT / "benchmarks").is_dir() and str(CHECKOUT) not in sys.path:
            sys.path.insert(0, str(CHECKOUT))
        try:
            from benchmarks.cli import run
        except ModuleNotFoundError as error:
            if error.name not in ("benchmarks", "benchmarks.cli"):
                raise
            raise ValueError(
                f"smcserve {name} needs the package benchmarks, which the wheel does not hold; run it from a checkout "
                "of the repository, installed by pip install -e ."
            ) from error
        return run(name, ctx.args)

    return command
