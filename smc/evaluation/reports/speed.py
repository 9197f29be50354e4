"""`smcserve bench --device cuda`: answer tokens a second, mode by mode, beside plain decoding and beside the hardware's
limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from smc.evaluation.reports.advise import MOST_ROWS
from smc.terminal import err, progress_bar
from smc.types import ModelRole

if TYPE_CHECKING:
    from smc.api.engine_config import EngineConfig
    from smc.evaluation.machine import Machine, Mode
    from smc.evaluation.speed import Speed
    from smc.model.config import ModelConfig
    from smc.scheduler.engine import Engine
    from smc.scheduler.latency_model import LatencyModel

MODES = ("plain", "lockstep", "lockstep-apart", "lookahead")
"""plain: the target alone; lockstep: both models on one GPU; lockstep-apart, lookahead: each on its own."""
WIDE = "plain-tp"
"""The target alone on all GPUs that the two models have together; so has `plain`, unless each has one."""
APART = ("plain", "lockstep-apart", "lookahead")
"""The default for models in processes of their own."""
LEGEND = (
    "medians of {rounds} rounds, milliseconds; rows: of a request, alone: share of its rounds with nothing drafted (--drafting costs); "
    "tok/round: by which an answer grows (exact: as many as were confirmed); "
    "tok/s: answer tokens a second, per request and in total. step: one step of the draft, draft: its K steps, target: its "
    "pass (plain: its K steps), choose: weighing and choosing what goes on, link: nobody at work, host: planning and queueing a "
    "round, hidden unless longer than the models; idle: share of the round in which the slower side waits; floor: share of the time that "
    "reading all weights once a pass takes at 4.26 TB/s."
)
COLUMNS = "N K F GPUs context requests rows alone tok/round tok/s total x_plain round step draft target choose link host idle floor GiB"

Turn = tuple["Mode", int, int | None]
"""What one line of the table is of: mode, requests, context."""


@dataclass(frozen=True)
class SpeedPlan:
    """What to measure. Raises ValueError naming the option, the value and what is allowed."""

    degrees: tuple[int, int]
    """GPUs of draft and target, where each has its own."""
    modes: Sequence[str]
    particles: Sequence[int]
    blocks: Sequence[int]
    branches: Sequence[int]
    contexts: Sequence[int]
    """Prompt tokens; empty: prompts are problems, as long as these are."""
    concurrency: Sequence[int]
    rounds: int
    law: Mapping[str, Any]
    """Of `SamplingParams`, by name."""
    prefix_cache: bool = True
    """Of `EngineConfig`."""
    decodings: Sequence[Mapping[str, Any]] = ({},)
    """Method, population and verification of the modes of both models, of each in turn; of `SamplingParams`, by
    name."""
    drafting: str = "always"
    """Of `EngineConfig`; `costs`: they are timed first."""

    def __post_init__(self) -> None:
        from smc.api.sampling_params import SamplingParams

        for mode in self.modes:
            if mode not in (*MODES, WIDE):
                raise ValueError(f"--mode {mode!r}; allowed: {', '.join((*MODES, WIDE))}")
        of_pair = self.decodings if set(self.modes) - {"plain", WIDE} else ()
        for decoding in ({"method": "target"}, *of_pair):
            SamplingParams(**decoding, **self.law)
        for context in self.contexts:
            if context < 1:
                raise ValueError(f"--context {context}; allowed: >= 1")

    def rows(self, gpus: int) -> Iterator[Turn]:
        """For every load the modes, in the order given."""
        modes = list(self._modes(gpus))
        for context, requests in product(self.contexts or (None,), self.concurrency):
            for mode in modes:
                yield mode, requests, context

    def _modes(self, gpus: int) -> Iterator[Mode]:
        from smc.api.engine_config import EngineConfig
        from smc.api.sampling_params import Method
        from smc.evaluation.machine import Mode
        from smc.evaluation.speed import PLAIN_BLOCK

        common: dict[str, Any] = {"prefix_cache": self.prefix_cache, "drafting": self.drafting}
        for name in self.modes:
            degrees = self._degrees(name)
            needed = sum(degrees)
            if gpus < needed:
                err.print(f"[yellow]{name} needs {needed} GPUs; there are {gpus}: left out[/yellow]")
            elif name == WIDE and "plain" in self.modes and degrees == self._degrees("plain"):
                err.print(f"[yellow]{name} is plain here, on all {needed} GPUs: measured once[/yellow]")
            elif name in ("plain", WIDE):
                yield Mode(name, Method.TARGET, EngineConfig(block=PLAIN_BLOCK, **common), 1, degrees)
            elif name == "lookahead":
                for own, n, f, k in product(self._decodings(), self.particles, self.branches, self.blocks):
                    yield Mode(
                        name, config=EngineConfig(block=k, branches=f, **common), particles=n, degrees=degrees, **own
                    )
            else:
                for own, n, k in product(self._decodings(), self.particles, self.blocks):
                    yield Mode(
                        name,
                        config=EngineConfig(form="lockstep", block=k, **common),
                        particles=n,
                        degrees=degrees,
                        **own,
                    )

    def _degrees(self, name: str) -> tuple[int, int]:
        """GPUs of draft and target in this mode; 0: the draft is on the target's."""
        # Plain decoding is on as many GPUs as the others have, or on one if it fits there: whoever has them would use
        # them all.
        if name == WIDE or (name == "plain" and max(self.degrees) > 1):
            return (0, sum(self.degrees))
        return (0, 1) if name in ("plain", "lockstep") else self.degrees

    def _decodings(self) -> Iterator[dict[str, Any]]:
        """What `Mode` has to be told of each."""
        from smc.api.sampling_params import Method

        for decoding in self.decodings:
            own = {name: decoding.get(name) for name in ("population", "verification")}
            yield {"method": Method(decoding.get("method", "smc")), **own}


def in_turn(rows: Sequence[Turn]) -> list[tuple[int, Turn]]:
    """In the order in which they are run, each with its place in `rows`: those whose target has as many GPUs follow
    each other, whatever their load. Processes hold a target as it is split among them, and a large one takes minutes to
    load."""
    splits = list(dict.fromkeys(mode.degrees[1] for mode, _, _ in rows))
    return sorted(enumerate(rows), key=lambda row: splits.index(row[1][0].degrees[1]))


def measure(
    plan: SpeedPlan, machine: Machine, gpus: int, trace: Path | None, keep_rows: Callable[[Sequence[Speed]], None]
) -> list[Speed]:
    """In the order of `plan.rows`, whatever is run first. With `trace`, all timed rounds are written there as a Chrome
    trace. `keep_rows` is told of those so far after each."""
    from smc.calibration.costs import THOROUGH
    from smc.evaluation.load import problem_load, random_load
    from smc.evaluation.probes import measure_costs
    from smc.evaluation.speed import Bench, Recorded
    from smc.scheduler.timeline import Timeline

    timeline = Timeline(trace=True)

    def keep(turn: Recorded) -> None:
        for name, span in turn.worked.items():
            timeline.worked(ModelRole.DRAFT if name == "draft" else ModelRole.TARGET, name, *span)
        timeline.waited(*turn.waited)
        timeline.end_step(turn.begin, turn.end)

    @cache
    def costs(degrees: tuple[int, int]) -> LatencyModel:
        found = measure_costs(machine, degrees, THOROUGH, min(MOST_ROWS, max(plan.concurrency) * max(plan.particles)))
        err.print(f"costs: {found}", style="dim")
        return found

    decide = (lambda mode: costs(mode.degrees)) if plan.drafting == "costs" else (lambda mode: None)
    bench = Bench(machine, keep if trace else None, plan.law, decide)
    todo = in_turn(list(plan.rows(gpus)))
    measured: dict[int, Speed] = {}
    with progress_bar() as progress:
        task = progress.add_task("modes", total=len(todo))
        for place, (mode, requests, context) in todo:
            load = (
                problem_load(machine.tokenizer, requests)
                if context is None
                else random_load(machine.tokenizer, requests, context)
            )
            measured[place] = bench.run(mode, load, plan.rounds)
            keep_rows(_in_place(measured))
            progress.advance(task)
    if trace is not None:
        timeline.write(trace)
    return _in_place(measured)


def _in_place(measured: Mapping[int, Speed]) -> list[Speed]:
    return [measured[place] for place in sorted(measured)]


class Machines:
    """A pair on one GPU runs in this process, where its models can tell each other without the host; all else by
    `apart`."""

    def __init__(self, local: Machine, apart: Machine) -> None:
        self._local, self._apart, self.tokenizer = local, apart, apart.tokenizer

    def engine(self, mode: Mode, config: EngineConfig) -> AbstractContextManager[Engine]:
        return self._of(mode).engine(mode, config)

    def weight_bytes(self, mode: Mode, role: ModelRole) -> int:
        return self._of(mode).weight_bytes(mode, role)

    def shape(self, mode: Mode, role: ModelRole) -> ModelConfig:
        return self._of(mode).shape(mode, role)

    def memory(self, mode: Mode) -> int:
        return self._of(mode).memory(mode)

    def _of(self, mode: Mode) -> Machine:
        return self._local if mode.name == "lockstep" else self._apart


def count_gpus() -> int:
    """Raises ValueError if there is none."""
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        raise ValueError(
            "--device cuda, but torch sees no GPU here; leave it out to split the time of a round on a CPU"
        )
    return gpus


def speed_table(rows: Sequence[Speed]) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("mode", no_wrap=True)
    for header in COLUMNS.split():
        table.add_column(header.replace("_", " "), justify="right", no_wrap=True)
    plain = {(row.context, row.requests): row.per_request for row in rows if row.mode == "plain"}
    for row in rows:
        base = plain.get((row.context, row.requests))
        shape = (row.particles, row.block, row.branches, row.gpus, row.context, row.requests)
        name = row.mode if row.decoding == "target" else f"{row.decoding} {row.mode}"
        drafted = (f"{row.rows:.1f}", f"{row.alone:.0%}" if row.decoding == "exact" else "")
        rates = (
            f"{row.tokens:.1f}",
            f"{row.per_request:.0f}",
            f"{row.total:.0f}",
            f"{row.per_request / base:.2f}" if base else "",
        )
        times = (
            f"{x:.2f}"
            for x in (row.round, row.draft / row.block, row.draft, row.target, row.choose, row.link, row.host)
        )
        table.add_row(
            name, *map(str, shape), *drafted, *rates, *times, f"{row.idle:.0%}", f"{row.floor:.0%}", f"{row.memory:.1f}"
        )
    return table
