"""What people see of commands: the two consoles, the few forms in which numbers and errors are printed, and options in
panels."""

from __future__ import annotations

import importlib.util
import math

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

out = Console(highlight=False)
"""Answers and tables."""
err = Console(stderr=True, highlight=False)
"""Everything about them: statistics, progress, warnings, errors."""


def print_error(message: str) -> None:
    err.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


def print_warning(message: str) -> None:
    err.print(Text.assemble(("warning: ", "bold yellow"), message), soft_wrap=True)


def finite(value: object) -> object:
    """`value` with every number that JSON cannot hold as None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def progress_bar() -> Progress:
    """A bar that goes when the work is done; nothing where nobody watches."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), console=err, transient=True, disable=not err.is_terminal
    )


def check_drawing() -> None:
    """ValueError where no picture can be drawn, as in an image that only serves."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("pictures are drawn by matplotlib, which is not installed here; pip install 'smcserve[plots]'")


def option(panel: str, text: str, *names: str, metavar: str | None = None, show_default: bool | str = True):
    """An option, in a panel of `--help`."""
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar, show_default=show_default)
