"""The quality table, for a terminal and as markdown: the same cells in both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import sub, truediv
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

if TYPE_CHECKING:
    from smc.evaluation.quality import Row, Setting
    from smc.statistics import Accuracy

HEADERS = (
    *("decoding", "N", "K", "F", "solved", "95% interval", "tok/s", "of target", "tok a round", "hits", "log p"),
    *("rounds", "resampled", "ESS / N", "first token", "tok/s batch"),
)
NOT_SHOWN = ("rounds", "resampled", "ESS / N", "first token")
"""In a terminal, for want of room."""
LEGEND = (
    "N particles, or rows of the tree of exact decoding; K tokens a round, F branches. tok/s: one request at a time, from its first token "
    "on, and of target: against the target alone; tok/s batch: {concurrency} requests in flight. tok a round: of an answer, its first left "
    "out. hits: share of rounds after which what had been drafted ahead was right. log p: mean log-probability of an answer's token under "
    "the target's law, less that of the target's own answers."
)
MORE_LEGEND = (
    "rounds: per answer; resampled: share of rounds; ESS / N: effective share of independent particles; first token: milliseconds until "
    "there is one."
)


def quality_table(rows: Sequence[Row]) -> Table:
    """Fits 80 columns."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=0, show_edge=False)
    for header in HEADERS:
        if header not in NOT_SHOWN:
            table.add_column(
                "\n".join(header.rsplit(" ", 1)), justify="left" if header == "decoding" else "right", no_wrap=True
            )
    target = target_alone(rows)
    for above, row in zip((None, *rows), rows):
        if above is not None and _family(above.setting) != _family(row.setting):
            table.add_section()
        name, *others = (cell for header, cell in zip(HEADERS, cells(row, target)) if header not in NOT_SHOWN)
        table.add_row(name.replace("independent", "indep.").replace("look-ahead", "ahead"), *others)
    return table


def quality_markdown(rows: Sequence[Row], about: str, concurrency: int) -> str:
    """A document of one table, what it was measured with, and what its columns mean."""
    target = target_alone(rows)
    lines = [list(HEADERS), [":---", *["---:"] * (len(HEADERS) - 1)], *(cells(row, target) for row in rows)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{about}\n\n{table}\n\n{LEGEND.format(concurrency=concurrency)} {MORE_LEGEND}\n"


def cells(row: Row, target: Row | None) -> list[str]:
    """In the order of HEADERS. `target`: the row of the target alone."""
    setting, speed = row.setting, row.tokens_per_second
    name = (
        f"{setting.kind} {'lockstep' if setting.form == 'lockstep' else 'look-ahead'}" if setting.form else setting.name
    )
    return [
        name,
        *("" if value is None else str(value) for value in (setting.particles, setting.block, setting.branches)),
        f"{row.accuracy.share:.1%}",
        interval(row.accuracy),
        _number(speed, ",.0f"),
        _number(_against(speed, target.tokens_per_second if target else None, truediv), ".2f", "x"),
        _number(row.tokens_a_round, ".1f"),
        _number(row.hit_share, ".0%"),
        _number(_against(row.mean_logp, target.mean_logp if target else None, sub), "+.3f"),
        _number(row.rounds, ".1f"),
        _number(row.resample_rate, ".0%"),
        _number(row.mean_ess_share, ".2f"),
        _number(row.first_token, ".1f"),
        _number(row.batch_tokens_per_second, ",.0f"),
    ]


def interval(accuracy: Accuracy) -> str:
    low, high = accuracy.interval
    return f"{100 * low:.1f}-{100 * high:.1f}"


def target_alone(rows: Sequence[Row]) -> Row | None:
    return next((row for row in rows if row.setting.method == "target"), None)


def _family(setting: Setting) -> str | None:
    return setting.kind if setting.form else None


def _against(value: float | None, of_target: float | None, by: Callable[[float, float], float]) -> float | None:
    return None if value is None or of_target is None else by(value, of_target)


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else format(value, form) + unit
