"""Terminal output and options of the commands: two consoles, errors and warnings, progress bars, option panels, and
commands whose options are made from a table."""

from __future__ import annotations

import importlib.util
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import typer
from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderResult
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.rule import Rule
from rich.text import Text

FULL_WIDTH = 2000
"""Columns of what is printed to a file or a pipe: no table of ours has as many."""
PROGRESS_SECONDS = 10.0
"""Seconds between two lines of progress where there is no terminal."""


class FullWidthConsole(Console):
    """A console that wraps and shortens text only for a terminal: a table in a file or a pipe has its full width."""

    @property
    def size(self) -> ConsoleDimensions:
        found = super().size
        return found if self.file.isatty() else ConsoleDimensions(max(found.width, FULL_WIDTH), found.height)

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size


out = FullWidthConsole(highlight=False)
"""Standard output: answers and tables."""
err = FullWidthConsole(stderr=True, highlight=False)
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


class Heading:
    """A line over a section: a rule in a terminal, the text alone elsewhere."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Rule(self._text, align="left", style="dim") if console.file.isatty() else Text(f"-- {self._text} --")


class PlainProgress(Progress):
    """A progress bar on standard error that disappears at the end. Where that is not a terminal, it is a line now and
    then, so that a long run in a log shows that it goes on."""

    def __init__(self, *columns: ProgressColumn, **settings: Any) -> None:
        self._shown = time.monotonic()
        self._plain = not err.file.isatty()
        super().__init__(*columns, console=err, transient=True, disable=self._plain, **settings)

    def advance(self, task_id: Any, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._say(task_id)

    def update(self, task_id: Any, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._say(task_id)

    def _say(self, task_id: Any) -> None:
        now = time.monotonic()
        if not self._plain or now - self._shown < PROGRESS_SECONDS:
            return
        self._shown = now
        task = self._tasks[task_id]
        share = f": {100 * task.completed / task.total:.0f}%" if task.total else ""
        left = f", about {task.time_remaining:.0f} s left" if task.time_remaining else ""
        err.print(Text(f"{task.description}{share}, {task.elapsed or 0.0:.0f} s{left}"), soft_wrap=True)


def progress_bar() -> PlainProgress:
    """A progress bar with the current description and the likely time left."""
    return PlainProgress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())


def number(value: float, form: str) -> str:
    """Return a number in the format `form`; what is rounded to zero has no sign."""
    text = format(value, form)
    return text if any(digit in text for digit in "123456789") else text.lstrip("+-")


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
