"""Terminal output and options of the commands: two consoles, errors and warnings, progress bars, option panels, and
commands whose options are made from a table."""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

out = Console(highlight=False)
"""Standard output: answers and tables."""
err = Console(stderr=True, highlight=False)
"""Standard error: statistics, progress, warnings and errors."""
USAGE_ERROR: Any = typer.BadParameter.__base__
"""click's class of usage errors, found without its name, which depends on typer's version."""


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


def flag(panel: str, text: str, name: str):
    """Declare an option that takes no value and has no opposite; `--help` shows no default."""
    return option(panel, text, name, metavar="", show_default=False)


def with_parameters(call: Any, parameters: Sequence[inspect.Parameter]) -> Any:
    """Return the command `call`, for which typer makes options of these parameters."""
    call.__signature__ = inspect.Signature(parameters)
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    return call


def with_mappings(command: Callable[..., int], **options: Mapping[str, Any]) -> Callable[..., int]:
    """Replace keyword parameters of a command: each one that is named in `options` becomes options of the command line,
    given by name and annotated type. The command gets a mapping of those that the user gave."""
    parameters: list[inspect.Parameter] = []
    for one in inspect.signature(command, eval_str=True).parameters.values():
        if one.name in options:
            made = options[one.name].items()
            parameters += [one.replace(name=name, default=None, annotation=kind) for name, kind in made]
        else:
            parameters.append(one)

    @wraps(command)
    def call(**arguments: Any) -> int:
        mappings = {
            parameter: {name: value for name in kinds if (value := arguments.pop(name)) not in (None, [])}
            for parameter, kinds in options.items()
        }
        return command(**mappings, **arguments)

    return with_parameters(call, parameters)
