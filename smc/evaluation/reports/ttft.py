"""`smcserve bench --prompts`: time to the first token, alone and beside requests that are decoded, new and cached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from smc.evaluation.reports.speed import SpeedPlan, in_turn
from smc.terminal import progress_bar

if TYPE_CHECKING:
    from smc.evaluation.ttft import FirstToken, PromptMachine

CONTEXTS = (256, 4096, 16384, 65536)
SHORT_CONTEXTS = (64, 256)
"""Of a CPU."""
BESIDE = (8,)
LEGEND = (
    "medians of {repeats} prompts, milliseconds. cached: prompt tokens found in the prefix cache; beside: requests that are decoded "
    "meanwhile; ttft: from submission to the first token, by all models of the mode; draft, target: at the prompt, and the share of the "
    "arithmetic peak (790 TFLOP/s a GPU) meanwhile; chunks: passes of the target. round: the mean of {rounds} rounds without a prompt; "
    "beside it: of those while one runs, how many times as long, and the longest."
)
COLUMNS = "GPUs context cached beside ttft draft of_peak target of_peak chunks round beside_it x longest"


def measure(plan: SpeedPlan, machine: PromptMachine, gpus: int) -> list[FirstToken]:
    """`plan.concurrency`: requests beside; every mode is measured alone first."""
    from smc.evaluation.ttft import REPEATS, FirstTokens

    todo = in_turn(list(plan.rows(gpus)))
    found: dict[int, list[FirstToken]] = {}
    with progress_bar() as progress:
        task = progress.add_task("prompts", total=len(todo) * 2 * (1 + REPEATS))
        bench = FirstTokens(machine, plan.rounds, lambda: progress.advance(task), plan.law)
        for place, (mode, beside, context) in todo:
            assert context is not None, "prompts have lengths"
            progress.update(task, description=f"{mode.name}, {context:,} tokens, {beside} beside")
            found[place] = bench.run(mode, context, beside)
    return [row for place in sorted(found) for row in found[place]]


def first_token_table(rows: Sequence[FirstToken]) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("mode", no_wrap=True)
    for header in COLUMNS.split():
        table.add_column(header.replace("_", " "), justify="right", no_wrap=True)
    for row in rows:
        shape = (row.gpus, f"{row.context:,}", f"{row.cached:,}", row.beside)
        work = (
            f"{row.ttft:.1f}",
            f"{row.draft:.1f}",
            f"{row.draft_peak:.0%}",
            f"{row.target:.1f}",
            f"{row.target_peak:.0%}",
            row.chunks,
        )
        rounds = (_number(value) for value in (row.round, row.round_beside, row.stretch, row.longest))
        table.add_row(row.mode, *map(str, (*shape, *work)), *rounds)
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
