"""`smcserve bench`: where the time of a round goes."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.box import SIMPLE_HEAD
from rich.progress import track
from rich.table import Table

from services.cli import options
from services.cli.terminal import err, out

if TYPE_CHECKING:
    from smc.engine.config import EngineConfig
    from smc.evaluation.round_time import RoundTime

LEGEND = (
    "N={particles}, medians of {rounds} rounds, milliseconds. host: all that is neither model nor sampling; "
    "host alone: the same with the models left out, as when they run on an accelerator."
)


def bench(
    target: options.Target = None,
    draft: options.Draft = None,
    particles: Annotated[int, options.option(options.PARTICLES, "N.", "--particles", "-n", metavar="N")] = 8,
    block: options.BlockList = (8, 5),
    branches: options.BranchesList = (4,),
    concurrency: Annotated[
        list[int], options.option(options.MEASURE, "Requests side by side; may be repeated.", "--concurrency", "-c", metavar="COUNT")
    ] = (1, 16),
    rounds: Annotated[int, options.option(options.MEASURE, "Rounds timed for each line of the table.", metavar="COUNT")] = 30,
    threads: options.Threads = None,
    json: Annotated[Path | None, options.option(options.OUTPUT, "Write the numbers here.", metavar="FILE")] = None,
) -> None:
    """Split the time of a round into models, sampling and the host's own work (CPU)."""
    for name, values in (("concurrency", concurrency), ("rounds", [rounds])):
        if min(values) < 1:
            raise ValueError(f"--{name} {min(values)}; allowed: >= 1")
    if json is not None and not json.absolute().parent.is_dir():
        raise ValueError(f"cannot write {json}: its directory does not exist")
    from services.cli.pair import load_pair, pair_places, use_threads
    from smc.evaluation.round_time import measure

    places = pair_places(target, draft)
    configs = _configs(block, branches)
    use_threads(threads, places)
    pair = load_pair(places, "cpu", None)
    lines = [(config, requests) for config in configs for requests in concurrency]
    times = [
        measure(pair, config, requests, particles, rounds)
        for config, requests in track(lines, "rounds", console=err, transient=True, disable=not err.is_terminal)
    ]
    out.print(round_table(times))
    out.print(LEGEND.format(particles=particles, rounds=rounds), style="dim")
    if json is not None:
        json.write_text(json_module.dumps([asdict(time) for time in times], indent=1) + "\n")


def round_table(times: list[RoundTime]) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold")
    for header in ("form", "K", "F", "requests", "round ms", "models", "sampling", "host", "host alone"):
        table.add_column(header, justify="left" if header == "form" else "right", no_wrap=header == "form")
    for time in times:
        shape = (str(value) for value in (time.block, time.branches, time.requests))
        parts = (time.forward, time.sampling, time.host)
        table.add_row(time.form, *shape, *(f"{part:.2f}" for part in (sum(parts), *parts)), f"{time.host_alone:.2f}")
    return table


def _configs(blocks: list[int], branches: list[int]) -> list[EngineConfig]:
    from smc.engine.config import EngineConfig

    lockstep = [EngineConfig(form="lockstep", block=block) for block in blocks]
    return lockstep + [EngineConfig(block=block, branches=count) for block in blocks for count in branches]
