"""Runs `smcserve bench`: orders the measurements, and makes the tables of speeds, of first tokens, of the time of a
round, and of latency models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.reports import number_cell
from smc.terminal import err, progress_bar
from smc.types import ModelRole, Numerics

if TYPE_CHECKING:
    from benchmarks.backends import BenchBackend, Mode, PromptBackend
    from benchmarks.load import Load
    from benchmarks.process_rounds import ProcessRoundTime
    from benchmarks.prompts import FirstToken
    from benchmarks.rounds import RoundTime
    from benchmarks.speed import Speed, TracedRound
    from smc.api.engine_config import EngineConfig
    from smc.local_engine import ModelPair
    from smc.scheduler.speculation import LatencyModel, ModelLatency, Point

MOST_ROWS = 512
"""Maximum number of rows of a draft step whose cost is timed."""
MODES = ("plain", "lockstep", "lockstep-apart", "lookahead")
"""plain: the target alone; lockstep: both models on one GPU; lockstep-apart, lookahead: each model on its own GPUs."""
WIDE = "plain-tp"
"""The target alone on all GPUs that the two models have together. `plain` uses all of them, too, unless each model has
one GPU."""
APART = ("plain", "lockstep-apart", "lookahead")
"""Default modes if each model is in its own process."""
NUMERICS_LEGEND = "numerics: order of sums that ran, fastest unless all models of the mode run invariant. "
"""Part of a legend."""
KERNELS = ("own", "library")
"""Kernels of rounds, the default first; see `benchmarks.library_products`."""
SPEED_LEGEND = (
    "medians of {rounds} rounds, milliseconds; round, rounds/s and tok/s of exact decoding are of the mean round with "
    "--drafting adaptive or --redrafting always. {numerics}"
    "T: temperature; rows: rows of a request; alone: share of its rounds "
    "with nothing drafted (--drafting adaptive); tok/round: tokens that a round adds to an answer (exact: tokens "
    "confirmed; others: as many as it can add, although an answer's last round may add fewer); rounds/s: rounds a "
    "second; tok/s: answer tokens a second of one request, total: of all that ran. step: one "
    "step of the draft; draft: its K steps (--drafting adaptive: K at most, see steps in --json); target: its pass "
    "(plain: its K steps); select: weighting and resampling; "
    "link: time in which no model works; host: planning and queueing a round, hidden unless longer than the models' "
    "time; idle: share of the round in which the slower model waits; floor: share of the time that reading all "
    "weights once a pass takes at 4.26 TB/s; by library: with --kernels library."
)
SPEED_COLUMNS = (
    "N K F GPUs T context requests rows alone tok/round rounds/s tok/s total x_plain "
    "round step draft target select link host idle floor GiB"
)


class TableLine(NamedTuple):
    """What one line of the table measures."""

    mode: Mode
    requests: int
    context: int | None
    """Prompt tokens; None: prompts have lengths of their own."""
    prompts: str = ""
    """Name of the file of prompts; empty: problems, or random tokens."""
    temperature: float | None = None
    """None: that of `SamplingParams`."""


PROMPT_CONTEXTS = (256, 4096, 16384, 65536)
SHORT_PROMPT_CONTEXTS = (64, 256)
"""Default contexts of --prompts on a CPU."""
PROMPTS_BESIDE = (8,)
PROMPT_LEGEND = (
    "medians of {repeats} prompts, milliseconds. {numerics}"
    "cached: prompt tokens found in the prefix cache; beside: requests "
    "that are decoded meanwhile; ttft: from submission to the first token, over all models of the mode; draft, target: "
    "their time on the prompt, and the share of peak arithmetic (790 TFLOP/s a GPU) in it; chunks: passes of the "
    "target. round: the mean of {rounds} rounds without a prompt; beside it: of rounds while one runs; x: how many "
    "times as long; longest: the longest of them."
)
PROMPT_COLUMNS = "N K F GPUs context cached beside ttft draft of_peak target of_peak chunks round beside_it x longest"
LOCAL_LEGEND = (
    "N={particles}, medians of {rounds} rounds, milliseconds, both models in one process. tokens: tokens that a round "
    "adds to an answer; draft, target: their forward passes and draws; host: the rest, which overlaps with the models "
    "on a GPU."
)
PROCESS_LEGEND = (
    "N={particles}, medians, milliseconds, each model in its own process. draft, target: at work; link: messages "
    "between them; coordinator: planning and recording; stalls: a model without work."
)
CURVES_LEGEND = (
    "times by these rounds, at their contexts: milliseconds of a draft step by rows, of a target pass by positions, "
    "and of a target pass in plain decoding by sequences."
)
LATENCY_COLUMNS = {
    "draft": ("rows", "draft step ms"),
    "target": ("positions", "target pass ms"),
    "alone": ("sequences", "alone ms"),
}
"""Headers of the parts of `smc.scheduler.speculation.LatencyModel`."""


@dataclass(frozen=True)
class SpeedPlan:
    """The measurements to make. Raises ValueError naming the option, the value and what is allowed."""

    degrees: tuple[int, int]
    """GPUs of draft and target in modes where each model has its own."""
    modes: Sequence[str]
    particles: Sequence[int]
    blocks: Sequence[int]
    branches: Sequence[int]
    contexts: Sequence[int]
    """Prompt tokens; empty: prompts are problems of any length."""
    concurrency: Sequence[int]
    rounds: int
    distribution: Mapping[str, Any]
    """Settings of `SamplingParams`, by name."""
    prefix_cache: bool = True
    """`prefix_cache` of `EngineConfig`."""
    decodings: Sequence[Mapping[str, Any]] = ({"method": "smc"},)
    """Ways of decoding in modes that use both models, one after another: method, population and verification, by their
    names in `SamplingParams`."""
    drafting: str = "always"
    """`drafting` of `EngineConfig`; with `adaptive`, the models are timed first."""
    prompts: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    """Token ids of prompts that replace problems, by the name of their file."""
    temperatures: Sequence[float | None] = (None,)
    """Temperatures of the target's distribution; None: that of `SamplingParams`."""
    verified: str | None = None
    """`verified` of `EngineConfig`."""
    redrafting: str = "adaptive"
    """`redrafting` of `EngineConfig`, in look-ahead."""
    numerics: Sequence[str] = (Numerics.FASTEST.value,)
    """Values of `numerics` of `EngineConfig`: every mode is measured with each."""
    kernels: Sequence[str] = KERNELS[:1]
    """Some of `KERNELS`: every mode runs with each of them."""

    def __post_init__(self) -> None:
        from smc.api.engine_config import EngineConfig
        from smc.api.sampling_params import SamplingParams

        for numerics in self.numerics:
            EngineConfig(drafting=self.drafting, verified=self.verified, numerics=numerics)
        EngineConfig(redrafting=self.redrafting)
        for mode in self.modes:
            if mode not in (*MODES, WIDE):
                raise ValueError(f"--mode {mode!r}; allowed: {', '.join((*MODES, WIDE))}")
        for name in self.kernels:
            if name not in KERNELS:
                raise ValueError(f"--kernels {name!r}; allowed: {', '.join(KERNELS)}")
            if name != KERNELS[0] and Numerics.INVARIANT in self.numerics:
                raise ValueError(f"--kernels {name}, whose sums have no one order; allowed: --numerics fastest")
        of_pair = self.decodings if set(self.modes) - {"plain", WIDE} else ()
        for decoding, temperature in product(({"method": "target"}, *of_pair), self.temperatures):
            SamplingParams(**decoding, **self.drawn_at(temperature))
        for context in self.contexts:
            if context < 1:
                raise ValueError(f"--context {context}; allowed: >= 1")

    @property
    def names_numerics(self) -> bool:
        """Whether tables have a column for numerics: something besides the default was asked."""
        return {*self.numerics} != {Numerics.FASTEST}

    def rows(self, gpus: int) -> Iterator[TableLine]:
        """Yield the lines of the table: for every load all modes, in the order given, each with all numerics and all
        kernels."""
        modes = [
            replace(mode, config=replace(mode.config, numerics=numerics), kernels=kernels)
            for mode, numerics, kernels in product(self._modes(gpus), self.numerics, self.kernels)
        ]
        loads = product(self.prompts or ("",), self.temperatures, self.contexts or (None,), self.concurrency)
        for prompts, temperature, context, requests in loads:
            for mode in modes:
                yield TableLine(mode, requests, context, prompts, temperature)

    def drawn_at(self, temperature: float | None) -> dict[str, Any]:
        """Return the settings of the distribution with this temperature."""
        return {**self.distribution} if temperature is None else {**self.distribution, "temperature": temperature}

    def _modes(self, gpus: int) -> Iterator[Mode]:
        from benchmarks.backends import Mode
        from smc.api.engine_config import EngineConfig
        from smc.api.sampling_params import Method
        from smc.calibration.forecast import PLAIN_BLOCK

        names = ("prefix_cache", "drafting", "verified")
        common: dict[str, Any] = {name: getattr(self, name) for name in names}
        for name in self.modes:
            degrees = self._degrees(name)
            needed = sum(degrees)
            if gpus < needed:
                err.print(f"[yellow]{name} needs {needed} GPUs; there are {gpus}: left out[/yellow]")
            elif name == WIDE and "plain" in self.modes and degrees == self._degrees("plain"):
                err.print(f"[yellow]{name} is plain here, on all {needed} GPUs: measured once[/yellow]")
            elif name in ("plain", WIDE):
                yield Mode(name, Method.TARGET, EngineConfig(block=PLAIN_BLOCK, **common), 1, degrees)
            else:
                form: dict[str, Any] = {"form": "lockstep"} if name != "lookahead" else {"redrafting": self.redrafting}
                branches = [{"branches": count} for count in self.branches] if name == "lookahead" else [{}]
                for own, n, f, k in product(self._decodings(), self.particles, branches, self.blocks):
                    config = EngineConfig(block=k, smc_block=k, **form, **f, **common)
                    yield Mode(name, config=config, particles=n, degrees=degrees, **own)

    def _degrees(self, name: str) -> tuple[int, int]:
        """Return the GPUs of draft and target in this mode; 0: the draft is on the target's GPU."""
        # For a fair comparison plain decoding gets as many GPUs as the other modes, unless each model has only one.
        if name == WIDE or (name == "plain" and max(self.degrees) > 1):
            return (0, sum(self.degrees))
        return (0, 1) if name in ("plain", "lockstep") else self.degrees

    def _decodings(self) -> Iterator[dict[str, Any]]:
        """Yield the fields of `Mode` for each way of decoding."""
        from smc.api.sampling_params import Method

        for decoding in self.decodings:
            own = {name: decoding.get(name) for name in ("population", "verification")}
            yield {"method": Method(decoding["method"]), **own}


def in_turn(rows: Sequence[TableLine]) -> list[tuple[int, TableLine]]:
    """Return the lines in the order in which they are run, each with its index in `rows`. Lines with the same number of
    GPUs for the target follow each other: processes load the target for one split, and a large model takes minutes to
    load. Ranks that share a model are loaded for one order of sums; then lines with the same numerics follow each
    other, too. Among these, lines of one mode and number of requests do, which can share an engine."""
    split = any(max(line.mode.degrees) > 1 for line in rows)
    loaded = [(line.mode.degrees[1], line.mode.config.numerics if split else "") for line in rows]
    turns, engines = list(dict.fromkeys(loaded)), [one_engine(line) for line in rows]
    return sorted(enumerate(rows), key=lambda row: (turns.index(loaded[row[0]]), engines.index(engines[row[0]])))


def one_engine(line: TableLine) -> tuple[Mode, int]:
    """Return what lines that can share an engine have in common."""
    return line.mode, line.requests


def measure_speed(
    plan: SpeedPlan, backend: BenchBackend, gpus: int, trace: Path | None, keep_rows: Callable[[Sequence[Speed]], None]
) -> list[Speed]:
    """Measure all lines; return their speeds in the order of `plan.rows`. `trace`: file for a Chrome trace of all timed
    rounds. `keep_rows` is called after each measurement with all speeds so far."""
    from benchmarks.advise import measure_split
    from benchmarks.load import file_load, problem_load, random_load
    from benchmarks.speed import ModeTimer
    from smc.calibration.latency import THOROUGH
    from smc.scheduler.stats import Timeline

    timeline = Timeline(trace=True)

    def keep(turn: TracedRound) -> None:
        for name, span in turn.worked.items():
            timeline.worked(ModelRole.DRAFT if name == "draft" else ModelRole.TARGET, name, *span)
        timeline.waited(*turn.waited)
        timeline.end_step(turn.begin, turn.end)

    latencies: dict[tuple[tuple[int, int], str, int | None, str, str], LatencyModel] = {}

    def latency(mode: Mode) -> LatencyModel:
        key = (mode.degrees, mode.config.form, mode.config.branches, mode.config.numerics, mode.kernels)
        if key not in latencies:
            timed = replace(mode, name="lockstep") if mode.degrees == (0, 1) else mode
            rows = min(MOST_ROWS, max(plan.concurrency) * max(plan.particles))
            latencies[key] = measure_split(backend, timed, THOROUGH, rows)
            err.print(f"latency model: {latencies[key]}", style="dim")
        return latencies[key]

    def load_of(line: TableLine) -> Load:
        if line.context is not None:
            load = random_load(backend.tokenizer, line.requests, line.context)
        elif line.prompts:
            load = file_load(plan.prompts[line.prompts], line.requests)
        else:
            load = problem_load(backend.tokenizer, line.requests)
        return replace(load, name=line.prompts, distribution=plan.drawn_at(line.temperature))

    decide = latency if plan.drafting == "adaptive" else (lambda mode: None)
    bench = ModeTimer(backend, keep if trace else None, decide)
    todo = in_turn(list(plan.rows(gpus)))
    # Warming up for trees of all sizes takes a minute or more; an engine without a latency model needs none.
    shared = groupby(todo, (lambda turn: one_engine(turn[1])) if plan.drafting == "adaptive" else None)
    measured: dict[int, Speed] = {}
    with progress_bar() as progress:
        task = progress.add_task("modes", total=len(todo))
        for _, turns in shared:
            lines = list(turns)
            loads = [load_of(line) for _, line in lines]
            # Strict, so that the generator ends and its engine with it.
            for (index, _), speed in zip(lines, bench.run(lines[0][1].mode, loads, plan.rounds), strict=True):
                measured[index] = speed
                keep_rows(_in_order(measured))
                progress.advance(task)
    if trace is not None:
        timeline.write(trace)
    return _in_order(measured)


def _in_order(measured: Mapping[int, Speed]) -> list[Speed]:
    return [measured[index] for index in sorted(measured)]


def count_gpus() -> int:
    """Return the number of GPUs. Raises ValueError if there is none."""
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        raise ValueError(
            "--device cuda, but torch sees no GPU here; leave it out to split the time of a round on a CPU"
        )
    return gpus


def _columns_of_modes(headers: str, numerics: bool) -> Table:
    """Return a table without lines: a column for the mode, one for its numerics if they are named, and these."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0))
    for header in ("mode", "numerics") if numerics else ("mode",):
        table.add_column(header, no_wrap=True)
    for header in headers.split():
        table.add_column(header.replace("_", " "), justify="right", no_wrap=True)
    return table


def speed_table(rows: Sequence[Speed], numerics: bool = False) -> Table:
    """Return the table of speeds. `numerics`: name the order of sums of each line."""
    table = _columns_of_modes(SPEED_COLUMNS, numerics)
    # Lines are compared with plain decoding by our own kernels, where that was measured.
    by_ours_last = sorted(rows, key=lambda row: row.kernels == KERNELS[0])
    plain = {(_load_of(row), row.numerics): row.per_request for row in by_ours_last if row.mode == "plain"}
    # Where only the target runs invariant, or nothing does, there may be no plain decoding with a line's numerics.
    any_plain = {load: speed for (load, _), speed in plain.items()}
    for row in rows:
        base = plain.get((_load_of(row), row.numerics), any_plain.get(_load_of(row)))
        shape = (row.particles, row.block, row.branches, row.gpus, f"{row.temperature:g}", row.context, row.requests)
        decoding, kernels = "" if row.decoding == "target" else row.decoding, _by_library(row)
        name = " ".join(filter(None, (row.prompts, decoding, row.mode, kernels)))
        names = (name, row.numerics) if numerics else (name,)
        drafted = (f"{row.rows:.1f}", f"{row.alone:.0%}" if row.decoding == "exact" else "")
        rates = (
            f"{row.tokens:.1f}",
            f"{1e3 / row.round:.0f}",
            f"{row.per_request:.0f}",
            f"{row.total:.0f}",
            f"{row.per_request / base:.2f}" if base else "",
        )
        # Where a latency model chose the numbers of steps, they differ from round to round.
        step = row.draft / row.block if row.steps is None else None
        parts = (row.round, step, row.draft, row.target, row.select, row.link, row.host)
        times = (number_cell(value, ".2f") for value in parts)
        table.add_row(
            *names,
            *map(str, shape),
            *drafted,
            *rates,
            *times,
            f"{row.idle:.0%}",
            f"{row.floor:.0%}",
            f"{row.memory:.1f}",
        )
    return table


def _by_library(row: Speed) -> str:
    """Return what the name of a line says about its kernels."""
    return "" if row.kernels == KERNELS[0] else f"by {row.kernels}"


def _load_of(row: Speed) -> tuple[str, float, int, int]:
    """Return what lines that are compared with each other have in common."""
    return row.prompts, row.temperature, row.context, row.requests


def measure_prompts(plan: SpeedPlan, backend: PromptBackend, gpus: int) -> list[FirstToken]:
    """Measure first tokens. `plan.concurrency`: numbers of requests that are decoded meanwhile; 0: none."""
    from benchmarks.prompts import REPEATS, FirstTokenTimer

    todo = in_turn(list(plan.rows(gpus)))
    found: dict[int, list[FirstToken]] = {}
    with progress_bar() as progress:
        task = progress.add_task("prompts", total=len(todo) * 2 * (1 + REPEATS))
        bench = FirstTokenTimer(backend, plan.rounds, lambda: progress.advance(task), plan.distribution)
        for index, (mode, beside, context, *_) in todo:
            assert context is not None, "prompts have lengths"
            progress.update(task, description=f"{mode.name}, {context:,} tokens, {beside} beside")
            found[index] = bench.run(mode, context, beside)
    return [row for index in sorted(found) for row in found[index]]


def first_token_table(rows: Sequence[FirstToken], numerics: bool = False) -> Table:
    """Return the table of first tokens. `numerics`: name the order of sums of each line."""
    table = _columns_of_modes(PROMPT_COLUMNS, numerics)
    for row in rows:
        shape = (row.particles, row.block, row.branches, row.gpus, f"{row.context:,}", f"{row.cached:,}", row.beside)
        work = (
            f"{row.ttft:.1f}",
            f"{row.draft:.1f}",
            f"{row.draft_peak:.0%}",
            f"{row.target:.1f}",
            f"{row.target_peak:.0%}",
            row.chunks,
        )
        rounds = (number_cell(value, ".2f") for value in (row.round, row.round_beside, row.stretch, row.longest))
        names = (row.mode, row.numerics) if numerics else (row.mode,)
        table.add_row(*names, *map(str, (*shape, *work)), *rounds)
    return table


def time_rounds(
    pair: ModelPair,
    configs: Sequence[EngineConfig],
    concurrency: Sequence[int],
    sampling: Mapping[str, object],
    rounds: int,
    prompts: Sequence[Sequence[int]] = (),
) -> list[RoundTime]:
    """Time rounds of every engine with every number of concurrent requests. `prompts`: token ids; default: problems."""
    from benchmarks.rounds import measure_rounds as measure

    rows = []
    with progress_bar() as progress:
        task = progress.add_task("rounds", total=len(configs) * len(concurrency))
        for config in configs:
            for requests in concurrency:
                rows.append(measure(pair, config, requests, sampling, rounds, prompts))
                progress.advance(task)
    return rows


def round_table(times: Sequence[RoundTime]) -> Table:
    table = _round_columns("decoding", "form", "K", "F", "requests", "tokens", "round ms", "draft", "target", "host")
    for time in times:
        shape = (str(value) for value in (time.block, time.branches, time.requests))
        parts = (time.draft, time.target, time.host)
        table.add_row(
            time.decoding, time.form, *shape, f"{time.tokens:.1f}", *(f"{part:.2f}" for part in (sum(parts), *parts))
        )
    return table


def process_round_table(rows: Sequence[ProcessRoundTime]) -> Table:
    columns = ("round ms", "draft", "target", "link", "coordinator", "draft stall", "target stall")
    table = _round_columns("link", "decoding", "form", "K", "F", "requests", *columns)
    for row in rows:
        shape = (str(value) for value in (row.block, row.branches, row.requests))
        parts = (row.whole, row.draft, row.target, row.link_time, row.coordinator, row.draft_stall, row.target_stall)
        table.add_row(row.link, row.decoding, row.form, *shape, *(f"{part:.2f}" for part in parts))
    return table


def _round_columns(*headers: str) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=0)
    for header in headers:
        words = header in ("decoding", "form", "link")
        table.add_column(header.replace(" ", "\n", 1), justify="left" if words else "right", no_wrap=True)
    return table


@dataclass(frozen=True)
class MeasuredLatency:
    """The times in a measured line of a table, in milliseconds."""

    on: str
    """Name of the GPUs or the link that run the target, with the numerics if there are several."""
    requests: int
    particles: int
    branches: int
    block: int
    form: str
    """`plain`, `lockstep` or `lookahead`."""
    draft: float
    """Time of K steps."""
    target: float
    """Time of a pass; in plain decoding, of K passes."""

    def samples(self) -> Iterable[tuple[str, Point]]:
        """Yield points by parts of the latency model: size, and milliseconds of one step or pass."""
        rows = self.requests * self.particles
        if self.form == "plain":
            yield "alone", (self.requests, self.target / self.block)
            return
        yield "draft", (rows * self.branches, self.draft / self.block)
        yield "target", (rows * (self.block + (self.form == "lockstep")), self.target)


def latency_of_speeds(rows: Sequence[Speed], drafting: str) -> list[MeasuredLatency]:
    """Return the times in measured speeds. `drafting`: that of `EngineConfig`; with `adaptive`, lines of exact decoding
    are left out, since the numbers of rows varied."""
    several = len({row.numerics for row in rows}) > 1
    return [
        MeasuredLatency(
            on=_place(row, numerics=several),
            form="plain" if row.decoding == "target" else "lookahead" if row.mode == "lookahead" else "lockstep",
            **{name: getattr(row, name) for name in ("requests", "particles", "branches", "block", "draft", "target")},
        )
        for row in rows
        if drafting == "always" or row.decoding != "exact"
    ]


def _place(row: Speed, numerics: bool) -> str:
    gpus = f"{row.target_gpus} GPUs" if row.target_gpus > 1 else "a GPU"
    place = " ".join(filter(None, (gpus, _by_library(row))))
    return f"{place}, {row.numerics}" if numerics else place


def latency_of_rounds(rows: Sequence[RoundTime | ProcessRoundTime]) -> list[MeasuredLatency]:
    """Return the times measured on a CPU."""
    names = ("requests", "particles", "branches", "block", "form", "draft", "target")
    return [
        MeasuredLatency(on=getattr(row, "link", ""), **{name: getattr(row, name) for name in names}) for row in rows
    ]


def curve_tables(measured: Sequence[MeasuredLatency]) -> list[Table]:
    """Return one table for every value of `MeasuredLatency.on`."""
    return [
        _measured_table([each for each in measured if each.on == on], on)
        for on in dict.fromkeys(each.on for each in measured)
    ]


def latency_table(latency: LatencyModel, degree: int) -> Table:
    """Return the table of a latency model with this number of GPUs of the target."""
    reads = ", ".join(f"{1e9 * part.read:.0f} ({name})" for name, part in latency.parts.items())
    caption = (
        f"without contexts; {reads} ns more for every token of context, "
        f"{1e3 * latency.round_overhead:.2f} ms a round besides"
    )
    points = {name: _milliseconds(part) for name, part in latency.parts.items()}
    return _curve_table(points, f"target on {degree}", caption)


def draft_table(latency: ModelLatency, degree: int) -> Table:
    """Return the table of a draft step with this number of GPUs of the draft."""
    caption = f"without contexts; {1e9 * latency.read:.0f} ns more for every token of context"
    return _curve_table({"draft": _milliseconds(latency)}, f"draft on {degree}", caption)


def _milliseconds(latency: ModelLatency) -> list[Point]:
    return [(size, 1e3 * seconds) for size, seconds in latency.curve.points]


def _curve_table(points: Mapping[str, Sequence[Point]], title: str, caption: str | None = None) -> Table:
    """Return a table of latency curves. `points`: sizes and milliseconds, by parts of the latency model; parts without
    points are left out."""
    table = Table(
        box=SIMPLE_HEAD,
        header_style="bold",
        padding=(0, 1, 0, 0),
        title=title or None,
        caption=caption,
        title_justify="left",
    )
    found = {name: points[name] for name in LATENCY_COLUMNS if points.get(name)}
    for name in found:
        for header in LATENCY_COLUMNS[name]:
            table.add_column(header, justify="right", no_wrap=True)
    for row in zip_longest(*found.values()):
        cells = (("", "") if point is None else (f"{point[0]:,}", f"{point[1]:.2f}") for point in row)
        table.add_row(*(cell for two in cells for cell in two))
    return table


def _measured_table(measured: Sequence[MeasuredLatency], on: str) -> Table:
    from smc.scheduler.speculation import LatencyCurve

    samples: dict[str, list[Point]] = {}
    for name, point in (sample for each in measured for sample in each.samples()):
        samples.setdefault(name, []).append(point)
    points = {name: LatencyCurve.through(own).points for name, own in samples.items()}
    return _curve_table(points, f"target on {on}" if "GPU" in on else on)
