"""Numbers as Grafana writes them, by the name of a unit. Knows the units that our dashboards use, and no others."""

from __future__ import annotations

import math

TIMES = ((86400, " d"), (3600, " h"), (60, " min"), (1, " s"), (1e-3, " ms"), (1e-6, " µs"))
SIZES = ((2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB"), (1, " B"))
PLAIN = ((1e9, " G"), (1e6, " M"), (1e3, " K"), (1, ""))
AFTER = {"none": "", "reqps": " req/s", "cpm": " /min"}


def written(value: float, unit: str) -> str:
    """Raises ValueError for a unit that is not known."""
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
    """In the largest step that fits."""
    size, name = next((step for step in scale if abs(value) >= step[0]), scale[-1])
    return f"{_digits(value / size)}{name}"


def _digits(value: float) -> str:
    """Three that count, and no zeros after them."""
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1g}"
