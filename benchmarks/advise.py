"""Measures what divisions of GPUs are compared by (`services.launch.division`): the times of both models at every
degree, how often the draft is right, and the speed of the divisions that look best."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.backends import Mode, PromptBackend
from benchmarks.load import (
    ClosedLoop,
    Load,
    Waves,
    file_load,
    problem_load,
    repeated,
    sized_config,
)
from benchmarks.speed import WARM_UP
from services.launch.config import WorkerGroupError
from services.launch.division import Degrees, DegreeTimes, Division, DivisionSpeed
from smc.api.engine_config import EngineConfig
from smc.api.sampling_params import Method, SamplingParams
from smc.calibration.forecast import LOCKSTEP, LOOKAHEAD, PLAIN, PLAIN_BLOCK, AcceptanceCurve
from smc.calibration.latency import Effort, measure_latency, room_for
from smc.memory.kv_cache import pool_for
from smc.scheduler.speculation import LatencyModel
from smc.scheduler.stats import EngineStats
from smc.types import ModelRole

PROBED_BLOCK = 5
WIDE_ROWS = 8
"""Rows in the second run that measures acceptance. The first has one row; the gain of width follows from both."""
PROBED_PROBLEMS = 16
BESIDE = 4
"""Number of requests in flight while acceptance is measured."""
MOST_GAIN = 2.0
RUN_SECONDS, RUN_ROUNDS = 4.0, 40
"""Seconds and rounds that a brief run times at least."""
PATIENCE = 8
"""A brief run ends after this many times `RUN_SECONDS`, whatever it has timed."""
FAILURES = (WorkerGroupError, torch.OutOfMemoryError, ValueError)
"""Errors of a division that does not fit, or that does not start."""


@dataclass(frozen=True)
class Advisor:
    """Measures on a backend."""

    backend: PromptBackend
    distribution: Mapping[str, Any]
    """Settings of `SamplingParams`, by name."""
    prompts: Sequence[Sequence[int]] = ()
    """Token ids of prompts; none: demo problems."""
    say: Callable[[str], None] = lambda text: None
    """Gets each line of progress."""

    def load(self, requests: int) -> Load:
        return file_load(self.prompts, requests) if self.prompts else problem_load(self.backend.tokenizer, requests)

    def times(
        self, degrees: Degrees, gpus: int, fits: Callable[[Division], bool], effort: Effort, rows: int
    ) -> DegreeTimes:
        """Time both models at every degree at which they fit into memory, one at a time. `rows`: maximum number of
        rows of a timed draft step. Raises ValueError if they fit at no degree."""
        found: dict[int, LatencyModel] = {}
        for degree in sorted({*degrees.draft, *degrees.target}):
            division = _timed_division(degree, degrees, gpus)
            if division is None or not fits(division):
                continue
            self.say(f"timing both models, draft on {division.draft}, target on {division.target}")
            try:
                found[degree] = measure_split(self.backend, _mode_of(division), effort, rows)
            except FAILURES as error:
                self.say(f"left out: {error}")
        if not found.keys() & {*degrees.target}:
            raise ValueError("the models fit on these GPUs at no degree; give more GPUs or smaller types of weights")
        return DegreeTimes(found, self._apart_overhead(found, degrees, gpus, effort))

    def _apart_overhead(self, found: Mapping[int, LatencyModel], degrees: Degrees, gpus: int, effort: Effort) -> float:
        """Measure the seconds of a round besides the models' passes where each has processes of its own."""
        least = min(found)
        targets = [degree for degree in degrees.target if degree in found and degree + degrees.draft[0] <= gpus]
        if not targets:
            return found[least].round_overhead
        division = Division(LOOKAHEAD, "apart", degrees.draft[0], targets[0], 1)
        self.say(f"timing rounds with the models apart, draft on {division.draft}, target on {division.target}")
        brief = replace(effort, seconds=0.0)
        try:
            return measure_split(self.backend, _mode_of(division), brief, WIDE_ROWS).round_overhead
        except FAILURES as error:
            self.say(f"not timed, taken as in one process: {error}")
            return found[least].round_overhead

    def acceptance(self, division: Division, problems: int = PROBED_PROBLEMS) -> AcceptanceCurve:
        """Measure acceptance in exact answers to prompts, with one row and with `WIDE_ROWS`."""
        missed = {}
        for rows in (1, WIDE_ROWS):
            load = self.load(problems)
            assert load.answer is not None
            params = SamplingParams(method=Method.EXACT, particles=rows, **self.distribution)
            requests = load.make_requests(params, load.answer)[:problems]
            config = sized_config(EngineConfig(form="lockstep", block=PROBED_BLOCK), requests, BESIDE)
            with self.backend.engine(replace(_mode_of(division), config=config, particles=rows), config) as engine:
                for _ in ClosedLoop(engine, requests, BESIDE).run():
                    pass
                missed[rows] = missed_share(engine.take_stats(), problems)
        gain = math.log(missed[1] / missed[WIDE_ROWS]) / math.log(WIDE_ROWS)
        return AcceptanceCurve(1 - missed[1], min(max(gain, 0.0), MOST_GAIN))

    def run(self, speed: DivisionSpeed) -> float:
        """Run one group of a division briefly with its share of the requests. Returns tokens a second of one request; 0
        if it does not run."""
        division, setting, here = speed.division, speed.setting, speed.division.requests(speed.requests)
        load = self.load(here)
        assert load.answer is not None
        if setting is None:
            params = SamplingParams(method=Method.TARGET, **self.distribution)
            config = EngineConfig(form="lockstep", block=PLAIN_BLOCK)
        else:
            params = SamplingParams(method=Method.EXACT, particles=setting.particles, **self.distribution)
            lockstep = {"form": "lockstep", "micro_batches": min(division.micro_batches, here)}
            form = {"branches": setting.branches} if division.form == LOOKAHEAD else lockstep
            config = EngineConfig(block=setting.block, **form)
        requests = load.make_requests(params, load.answer)
        mode = replace(_mode_of(division), method=params.method, particles=params.rows, config=config)
        try:
            with self.backend.engine(mode, sized_config(config, requests, here)) as engine:
                found = tokens_a_second(Waves(engine, repeated(requests), here))
        except FAILURES as error:
            self.say(f"{division.name} with {speed.requests} requests did not run: {error}")
            return 0.0
        self.say(f"{division.name} with {speed.requests} requests: {found:,.0f} tokens a second of each")
        return found


def _timed_division(degree: int, degrees: Degrees, gpus: int) -> Division | None:
    """Return the division in which a degree is timed; None if too few GPUs are left for the other model."""
    if degree in degrees.target:
        return Division(LOCKSTEP, "shared", degree if degree in degrees.draft else 1, degree, 1)
    least = degrees.target[0]
    return Division(LOCKSTEP, "apart", degree, least, 1) if degree + least <= gpus else None


def _mode_of(division: Division) -> Mode:
    """Return the mode of exact decoding in which one group of a division runs. Plain decoding has an idle draft."""
    config = EngineConfig(form="lockstep", block=PROBED_BLOCK)
    names = {PLAIN: "plain", LOCKSTEP: "lockstep", LOOKAHEAD: "lookahead"}
    degrees = (division.draft or 1, division.target)
    shared = division.placement == "shared"
    return Mode(names[division.form], Method.EXACT, config, WIDE_ROWS, degrees, shared=shared)


def measure_split(backend: PromptBackend, mode: Mode, effort: Effort, rows: int) -> LatencyModel:
    """Measure the latency model of the devices of a mode, for draft steps of up to `rows` rows. One model works at a
    time, so that models on one GPU do not slow each other down."""
    probed = EngineConfig(form="lockstep", block=PROBED_BLOCK, numerics=mode.config.numerics)
    mode = replace(mode, config=probed, particles=WIDE_ROWS)
    longest = min(backend.shape(mode, role).max_context for role in ModelRole)
    context = min(room_for(effort.context, PROBED_BLOCK), longest)
    # Every timed row reads its own pages, and so does the request whose whole rounds are timed.
    pages = pool_for(max(4, min(rows, effort.crowd)) * context)
    config = replace(mode.config, max_slots=rows, max_context=context, pages=pages)
    with backend.engine(mode, config) as engine:
        latency = measure_latency(engine, effort)
    assert latency is not None, "the context has room for a prompt"
    return latency


def tokens_a_second(loop: Waves) -> float:
    """Return the tokens a second of one request, over rounds with nearly all requests of the loop."""
    while loop.engine.num_running < loop.concurrency:
        loop.step()
    for _ in range(WARM_UP):
        loop.step()
    tokens, spent, taken, rounds = 0, 0.0, 0.0, 0
    begin = last = time.perf_counter()
    while (spent < RUN_SECONDS or rounds < RUN_ROUNDS) and last - begin < PATIENCE * RUN_SECONDS:
        running, outputs, now = loop.running, loop.step(), time.perf_counter()
        if loop.steady:
            tokens += sum(len(output.tokens) for output in outputs)
            taken += running * (now - last)
            spent, rounds = spent + now - last, rounds + 1
        last = now
    loop.stop()
    return tokens / taken if taken else 0.0


def missed_share(stats: EngineStats, answers: int) -> float:
    """Return the share of the tokens compared by rounds in lockstep that the target drew differently. It is never 0 or
    1, however few tokens were compared.

    A round compares tokens up to the first wrong one; the last round of an answer, up to the answer's end.
    """
    accepted = stats.exact["walk"].accepted_by_position
    found, unfinished = sum(accepted), stats.exact["walk"].rounds - accepted[-1]
    missed = max(0, unfinished - answers)
    return (missed + 0.5) / (found + missed + 1)
