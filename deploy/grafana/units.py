"""Formats numbers as Grafana does. Supports the units of our dashboards only."""

from __future__ import annotations

import math

TIMES = ((86400, " d"), (3600, " h"), (60, " min"), (1, " s"), (1e-3, " ms"), (1e-6, " µs"))
SIZES = ((2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB"), (1, " B"))
PLAIN = ((1e9, " G"), (1e6, " M"), (1e3, " K"), (1, ""))
AFTER = {"none": "", "reqps": " req/s", "cpm": " /min"}


def format_value(value: float, unit: str) -> str:
    """The value as text, with its unit. Raises ValueError if the unit is not supported."""
    if math.isnan(value):
        return "no data"
    if unit == "percentunit":
        return f"{_digits(100 * value)}%"
    if unit == "s":
        return _scaled(value, TIMES) if value else "0"
    if unit == "bytes":
        return _scaled(value, SIZES)
    if unit in AFTER:
        return _scaled(value, PLAIN) + AFTER[unit]
    if unit.startswith("suffix:"):
        return _scaled(value, PLAIN) + unit.removeprefix("suffix:")
    raise ValueError(f"unit={unit!r}; allowed: percentunit, s, bytes, suffix:.., {', '.join(AFTER)}")


def _scaled(value: float, scale: tuple[tuple[float, str], ...]) -> str:
    """The value in the largest unit that is not above it."""
    size, name = next((step for step in scale if abs(value) >= step[0]), scale[-1])
    return f"{_digits(value / size)}{name}"


def _digits(value: float) -> str:
    """Three significant digits without trailing zeros."""
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1g}"
