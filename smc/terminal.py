"""Terminal output and options of the commands: two consoles, errors and warnings, progress bars, option panels."""

from __future__ import annotations

import importlib.util
import math

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

out = Console(highlight=False)
"""Standard output: answers and tables."""
err = Console(stderr=True, highlight=False)
"""Standard error: statistics, progress, warnings and errors."""


def print_error(message: str) -> None:
    err.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


def print_warning(message: str) -> None:
    err.print(Text.assemble(("warning: ", "bold yellow"), message), soft_wrap=True)


def finite(value: object) -> object:
    """Replace every number that JSON cannot represent (NaN, inf) by None, in nested lists and dicts as well."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def progress_bar() -> Progress:
    """A progress bar that disappears at the end. Disabled if standard error is not a terminal."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), console=err, transient=True, disable=not err.is_terminal
    )


def check_drawing() -> None:
    """Raise ValueError if matplotlib is not installed, as in the serving images."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("pictures are drawn by matplotlib, which is not installed here; pip install 'smcserve[plots]'")


def option(panel: str, text: str, *names: str, metavar: str | None = None, show_default: bool | str = True):
    """Declare a command-line option in a panel of `--help`."""
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar, show_default=show_default)
