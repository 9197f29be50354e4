"""The quality table, for a terminal and as markdown: the same cells in both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

if TYPE_CHECKING:
    from smc.evaluation.quality import Row, Setting
    from smc.statistics import Accuracy

HEADERS = (
    *("decoding", "N", "K", "F", "accuracy", "95% interval"),
    *("tok/s", "of target", "rounds", "resam-pled", "ESS / N", "tok/s batch"),
)
LEGEND = (
    "N particles, K tokens a round, F branches. tok/s: one request at a time, and of target: against the target alone; "
    "tok/s batch: {concurrency} requests in flight. rounds: per answer; resampled: share of rounds."
)


def quality_table(rows: Sequence[Row]) -> Table:
    """Fits 80 columns."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=0)
    for header in HEADERS:
        narrow = header.replace("-", "-\n") if header == "resam-pled" else header.replace(" ", "\n", 1)
        table.add_column(narrow, justify="left" if header == "decoding" else "right", no_wrap=True)
    target = target_speed(rows)
    for above, row in zip((None, *rows), rows):
        new_block = above is not None and _family(above.setting) != _family(row.setting)
        if new_block:
            table.add_section()
        table.add_row(*cells(row, target))
    return table


def quality_markdown(rows: Sequence[Row], about: str, concurrency: int) -> str:
    """A document of one table, what it was measured with, and what its columns mean."""
    headers = [header.replace("resam-pled", "resampled") for header in HEADERS]
    target = target_speed(rows)
    lines = [headers, [":---", *["---:"] * (len(headers) - 1)], *(cells(row, target) for row in rows)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{about}\n\n{table}\n\n{LEGEND.format(concurrency=concurrency)}\n"


def cells(row: Row, target: float | None) -> list[str]:
    """`target`: tokens per second of the target alone."""
    setting, speed = row.setting, row.tokens_per_second
    return [
        {"lockstep": "lockstep", "lookahead": "look-ahead", None: setting.name}[setting.form],
        *("" if value is None else str(value) for value in (setting.particles, setting.block, setting.branches)),
        f"{row.accuracy.share:.1%}",
        interval(row.accuracy),
        "" if speed is None else f"{speed:,.0f}",
        "" if speed is None or target is None else f"{speed / target:.2f}x",
        _number(row.rounds, ".1f"),
        _number(row.resample_rate, ".0%"),
        _number(row.mean_ess_share, ".2f"),
        f"{row.batch_tokens_per_second:,.0f}",
    ]


def interval(accuracy: Accuracy) -> str:
    low, high = accuracy.interval
    return f"{100 * low:.1f}-{100 * high:.1f}"


def target_speed(rows: Sequence[Row]) -> float | None:
    return next((row.tokens_per_second for row in rows if row.setting.method == "target"), None)


def _family(setting: Setting) -> tuple[str | None, int | None]:
    return setting.form, setting.block


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
