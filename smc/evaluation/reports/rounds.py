"""Where the time of a round goes on a CPU, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from smc.terminal import progress_bar

if TYPE_CHECKING:
    from smc.api.engine_config import EngineConfig
    from smc.evaluation.round_time import GangRound, RoundTime
    from smc.local_engine import ModelPair

LOCAL_LEGEND = (
    "N={particles}, medians of {rounds} rounds, milliseconds, both models in one process. tokens: by which an answer grew in a round; "
    "draft, target: forward passes, laws and draws; host: all that is neither, which on an accelerator is done while the models run."
)
GANG_LEGEND = (
    "N={particles}, medians, milliseconds, each model in its own process. draft, target: at work; link: nobody at work, messages on "
    "their way; coordinator: planning and bookkeeping; stalls: a group without work."
)


def measure_rounds(
    pair: ModelPair,
    configs: Sequence[EngineConfig],
    concurrency: Sequence[int],
    sampling: Mapping[str, object],
    rounds: int,
) -> list[RoundTime]:
    """Every engine with every number of requests side by side."""
    from smc.evaluation.round_time import measure

    rows = []
    with progress_bar() as progress:
        task = progress.add_task("rounds", total=len(configs) * len(concurrency))
        for config in configs:
            for requests in concurrency:
                rows.append(measure(pair, config, requests, sampling, rounds))
                progress.advance(task)
    return rows


def round_table(times: Sequence[RoundTime]) -> Table:
    table = _table("decoding", "form", "K", "F", "requests", "tokens", "round ms", "draft", "target", "host")
    for time in times:
        shape = (str(value) for value in (time.block, time.branches, time.requests))
        parts = (time.draft, time.target, time.host)
        table.add_row(
            time.decoding, time.form, *shape, f"{time.tokens:.1f}", *(f"{part:.2f}" for part in (sum(parts), *parts))
        )
    return table


def gang_table(rows: Sequence[GangRound]) -> Table:
    columns = ("round ms", "draft", "target", "link", "coordinator", "draft stall", "target stall")
    table = _table("link", "decoding", "form", "K", "F", "requests", *columns)
    for row in rows:
        shape = (str(value) for value in (row.block, row.branches, row.requests))
        parts = (row.whole, row.draft, row.target, row.link_time, row.coordinator, row.draft_stall, row.target_stall)
        table.add_row(row.link, row.decoding, row.form, *shape, *(f"{part:.2f}" for part in parts))
    return table


def _table(*headers: str) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=0)
    for header in headers:
        words = header in ("decoding", "form", "link")
        table.add_column(header.replace(" ", "\n", 1), justify="left" if words else "right", no_wrap=True)
    return table
