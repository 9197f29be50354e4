"""Measures what divisions of GPUs are compared by (`services.launch.division`): the times of both models at every
degree, how often the draft is right, and the speed of the divisions that look best."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
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
from services.launch.division import Degrees, DegreeTimes, Division, DivisionSpeed, LeftOut
from services.link.base import first_line
from smc.api.engine_config import EngineConfig
from smc.api.sampling_params import Method, SamplingParams
from smc.calibration.forecast import LOCKSTEP, LOOKAHEAD, PLAIN, PLAIN_BLOCK, AcceptanceCurve
from smc.calibration.latency import Effort, measure_latency, room_for
from smc.memory.kv_cache import pool_for
from smc.scheduler.speculation import LatencyModel, ModelLatency
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
NO_ROOM = "its weights do not fit"
"""Why a degree is left out at which a model does not fit into memory."""


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
        rows of a timed draft step. Raises ValueError if one of them fits at no degree."""
        timing = _Timing(degrees, gpus, fits, lambda division: self._timed(division, effort, rows))
        for degree in degrees.target:
            timing.time_target(degree)
        for degree in degrees.draft:
            timing.time_draft(degree)
        if not timing.of_target or not timing.of_draft:
            raise ValueError("the models fit on these GPUs at no degree; give more GPUs or smaller types of weights")
        overhead = self._apart_overhead(timing, effort)
        return DegreeTimes(timing.of_target, timing.of_draft, overhead, tuple(timing.left_out))

    def _timed(self, division: Division, effort: Effort, rows: int) -> LatencyModel | str:
        """Return the latency model of a division; if it does not run, the reason."""
        self.say(f"timing both models {division.placement}, draft on {division.draft}, target on {division.target}")
        try:
            return measure_split(self.backend, _mode_of(division), effort, rows)
        except FAILURES as error:
            self.say(f"left out: {error}")
            return first_line(error)

    def _apart_overhead(self, timing: _Timing, effort: Effort) -> float:
        """Return the seconds of a round besides the models' passes where each has processes of its own: those of the
        fewest GPUs that were timed so, or else of rounds that are timed now."""
        if timing.apart:
            return timing.apart[min(timing.apart, key=lambda division: division.size)].round_overhead
        in_one = timing.of_target[min(timing.of_target)].round_overhead
        division = timing.least_apart()
        if division is None:
            return in_one
        found = self._timed(division, replace(effort, seconds=0.0), WIDE_ROWS)
        if isinstance(found, str):
            self.say("the overhead of models apart is taken to be that of one process")
            return in_one
        return found.round_overhead

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


class _Timing:
    """Chooses the divisions in which models are timed.

    A target is timed with the draft in the same processes, divided alike if possible, which times both. Where that
    does not fit or fails, it is timed apart from a draft on few GPUs. A draft that is not timed then, because no target
    fits beside it on as many GPUs, is timed with another target."""

    def __init__(
        self,
        degrees: Degrees,
        gpus: int,
        fits: Callable[[Division], bool],
        time_division: Callable[[Division], LatencyModel | str],
    ) -> None:
        """`time_division` returns the latency model of a division, or why there is none."""
        self._degrees, self._gpus, self._fits, self._time = degrees, gpus, fits, time_division
        self.of_target: dict[int, LatencyModel] = {}
        self.of_draft: dict[int, ModelLatency] = {}
        self.apart: dict[Division, LatencyModel] = {}
        """Divisions with the models apart that were timed."""
        self.left_out: list[LeftOut] = []
        self._failed: dict[Division, str] = {}

    def time_target(self, degree: int) -> None:
        alike = Division(LOCKSTEP, "shared", degree if degree in self._degrees.draft else 1, degree, 1)
        apart = (self._apart(draft, degree) for draft in self._degrees.draft if draft + degree <= self._gpus)
        if not self._fits(alike):
            # A whole draft on each GPU takes more room still.
            self.left_out.append(LeftOut("the weights of both models do not fit", "shared", target=degree))
        if not self._fits(Division(PLAIN, "shared", 0, degree, 1)):
            self.left_out.append(LeftOut(NO_ROOM, target=degree))
        elif (failure := self._time_first([alike, *self._first(apart), replace(alike, draft=1)])) is not None:
            self.left_out.append(LeftOut(failure, target=degree))

    def time_draft(self, degree: int) -> None:
        if degree in self.of_draft:
            return
        apart = [self._apart(degree, target) for target in self.of_target]
        shared = [Division(LOCKSTEP, "shared", degree, target, 1) for target in self.of_target if degree in (1, target)]
        if not any(map(self._fits, apart)):
            self.left_out.append(LeftOut(NO_ROOM, draft=degree))
        here = (division for division in apart if division.size <= self._gpus)
        if (failure := self._time_first([*self._first(here), *self._first(shared)])) is not None:
            self.left_out.append(LeftOut(failure, draft=degree))

    def least_apart(self) -> Division | None:
        """Return the division with the models apart and the fewest GPUs, of degrees that were timed."""
        both = (self._apart(draft, target) for draft in self.of_draft for target in self.of_target)
        here = [division for division in both if division.size <= self._gpus and self._fits(division)]
        return min(here, key=lambda division: division.size, default=None)

    @staticmethod
    def _apart(draft: int, target: int) -> Division:
        return Division(LOCKSTEP, "apart", draft, target, 1)

    def _first(self, some: Iterable[Division]) -> list[Division]:
        """Return the first division that fits and has not failed, if there is one."""
        return list(islice((each for each in some if self._fits(each) and each not in self._failed), 1))

    def _time_first(self, some: Sequence[Division]) -> str | None:
        """Time the first of these divisions that fits and runs. Returns why the first of them does not run, if none of
        them does."""
        failures = []
        for division in dict.fromkeys(filter(self._fits, some)):
            found = self._time(division)
            if not isinstance(found, str):
                self.of_target.setdefault(division.target, found)
                self.of_draft.setdefault(division.draft, found.draft)
                if division.placement == "apart":
                    self.apart[division] = found
                return None
            self._failed[division] = found
            self.left_out.append(LeftOut(found, division.placement, division.draft, division.target))
            failures.append(found)
        return failures[0] if failures else None


def _mode_of(division: Division) -> Mode:
    """Return the mode of exact decoding in which one group of a division runs. Plain decoding has an idle draft."""
    config = EngineConfig(form="lockstep", block=PROBED_BLOCK)
    names = {PLAIN: "plain", LOCKSTEP: "lockstep", LOOKAHEAD: "lookahead"}
    degrees = (division.draft or 1, division.target)
    shared = division.placement == "shared"
    return Mode(names[division.form], Method.EXACT, config, WIDE_ROWS, degrees, shared=shared)


def measure_split(backend: PromptBackend, mode: Mode, effort: Effort, rows: int) -> LatencyModel:
    """Measure the latency model of the devices of a mode, for draft steps of up to `rows` rows. Models that share GPUs
    work one at a time, so that they do not slow each other down."""
    shape = {"form": mode.config.form, "branches": mode.config.branches} if mode.degrees[0] else {"form": "lockstep"}
    probed = EngineConfig(block=PROBED_BLOCK, numerics=mode.config.numerics, **shape)
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
