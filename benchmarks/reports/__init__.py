"""Presentation of measurements: progress of runs, tables, pictures. Knows nothing about how a command is called."""

from smc.demo.problems import Accuracy
from smc.terminal import number


def number_cell(value: float | None, form: str, unit: str = "") -> str:
    """Return a number in the format `form` as a cell of a table; None is empty."""
    return "" if value is None else number(value, form) + unit


def interval(accuracy: Accuracy) -> str:
    """Return the 95% interval of an accuracy, in percent."""
    low, high = accuracy.interval
    return f"{100 * low:.1f}-{100 * high:.1f}"
