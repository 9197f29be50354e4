"""Measures how fast a model pair decodes on GPUs, mode by mode: plain decoding by the target, and every form of SMC and
of exact decoding.

SMC rejects no token, so its speed is the same with random weights. The speed of exact decoding depends on the
weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

from benchmarks.backends import OWN, BenchBackend, Mode, numerics_of_models
from benchmarks.load import ClosedLoop, Load, Waves, repeated, sized_config
from benchmarks.rounds import decoding_name
from smc.api.sampling_params import Method, SamplingParams
from smc.calibration.compile_ahead import compile_ahead
from smc.calibration.warm_up import DECODINGS, UsualSampling, warm_up, warm_up_plans, warm_up_prompts
from smc.executor.worker import ModelWorker
from smc.scheduler.engine import Engine
from smc.scheduler.methods import rules_of
from smc.scheduler.speculation import LatencyModel
from smc.types import Decoding, ModelRole

BANDWIDTH = 4.26e12
"""Bytes a second that an H200 reads and writes in a device copy."""
WARM_UP = 4
"""Rounds before the timed ones: the first two compile and record."""
SETTLED = 60
"""Rounds before the timed ones if a latency model chooses the trees, which change for a while."""


@dataclass(frozen=True)
class Speed:
    """Medians over rounds, in milliseconds unless said otherwise. `round` is a mean where rounds are of several kinds,
    because a latency model chooses what they draft or because some draft again: those that take longer bring other
    numbers of tokens, and `tokens` is a mean, too."""

    mode: str
    decoding: str
    """`target`, `exact`, or the population of SMC."""
    numerics: str
    """Order of sums that ran; see `benchmarks.backends.numerics_of_models`."""
    particles: int
    block: int
    branches: int
    requests: int
    context: int
    """Prompt tokens."""
    prompts: str
    """File of the prompts; empty: there is none."""
    temperature: float
    gpus: int
    target_gpus: int
    rows: float
    """Rows of a request: the mean over rounds in which something was drafted for it; in plain decoding 1."""
    alone: float
    """Share of the rounds of exact decoding in which nothing was drafted for a request, since drafting did not pay."""
    tokens: float
    """Answer tokens of one request in a round; in exact decoding, the mean number that these rounds confirmed."""
    per_request: float
    """Answer tokens a second of one request."""
    total: float
    """Answer tokens a second of all requests that ran: when answers end, a few less than `requests`."""
    round: float
    draft: float
    """Time of the draft's steps."""
    target: float
    """Time of the target's pass."""
    select: float
    """Time of computing weights, and of choosing the rows that continue."""
    link: float
    """Time in which no model works: messages are in transit, or the host is late. Only as exact as the clocks of the
    processes agree."""
    host: float
    """The host's time to plan and queue a round. It is hidden behind the models' time unless it is longer."""
    idle: float
    """Share of the round in which the slower model has nothing to do."""
    floor: float
    """Time to read the weights once for every pass at full bandwidth, as a share of the round."""
    memory: float
    """GiB in use on the fullest GPU."""
    kernels: str = OWN
    """Those of `Mode`."""
    steps: float | None = None
    """Mean number of draft steps of a round in which something was drafted; None: K in every round, or nothing was
    drafted in any."""


@dataclass(frozen=True)
class TracedRound:
    """One step of the host, and the round that it read. Times are nanoseconds of the host's monotonic clock."""

    begin: int
    end: int
    waited: tuple[int, int]
    """Begin and end of the host's wait."""
    worked: dict[str, tuple[int, int]]
    """Begin and end of the models' work, by name; a model's pass has the name of its role."""


@dataclass
class TimedRounds:
    """Measurements of timed rounds."""

    spans: list[tuple[int, float]] = field(default_factory=list)
    """Number of the wave, and seconds from one round to the next."""
    hosts: list[float] = field(default_factory=list)
    """Seconds of planning and queueing."""
    work: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    """Work of the models in each round: begin and end, by name."""
    runs: list[int] = field(default_factory=list)
    """Number of the run of each entry of `work`. Rounds of one run follow each other directly; between two runs are
    rounds that were not timed."""
    delivered: int = 0
    """Number of tokens delivered to all requests."""
    took_part: int = 0
    """Sum over rounds of the number of requests that took part."""

    @property
    def round(self) -> float:
        """Seconds of a round: the median over waves of their means."""
        waves = [[span for _, span in steps] for _, steps in groupby(self.spans, key=lambda step: step[0])]
        return statistics.median(map(statistics.mean, waves))

    @property
    def mean_round(self) -> float:
        """Mean seconds of a round, over all of them."""
        return statistics.mean(span for _, span in self.spans)

    @property
    def running(self) -> float:
        """Mean number of requests that took part in a round."""
        return self.took_part / len(self.spans)

    @property
    def link(self) -> float:
        """Mean seconds of a round in which no model works."""
        runs = [
            [worked for _, worked in rounds]
            for _, rounds in groupby(zip(self.runs, self.work), key=lambda round: round[0])
        ]
        return sum(map(unattended, runs)) / max(1, len(self.work) - len(runs))

    @property
    def tokens(self) -> float:
        """Mean number of tokens of a request in a round."""
        return self.delivered / self.took_part


class ModeTimer:
    """Times modes on a machine."""

    def __init__(
        self,
        backend: BenchBackend,
        on_round: Callable[[TracedRound], None] | None = None,
        latency: Callable[[Mode], LatencyModel | None] = lambda mode: None,
    ) -> None:
        """`on_round` is called with every timed round. `latency`: the latency model that chooses the trees of a mode;
        None: trees are as large as the mode says."""
        self._backend, self._on_round, self._latency = backend, on_round, latency

    def run(self, mode: Mode, loads: Sequence[Load], rounds: int) -> Iterator[Speed]:
        """Time `rounds` rounds of each load, one after another in one engine. Loads have the same number of concurrent
        requests."""
        rows: dict[str, Any] = {
            "particles": mode.particles,
            "population": mode.population,
            "verification": mode.verification,
        }
        latency = self._latency(mode) if mode.method is Method.EXACT else None
        untimed = WARM_UP if latency is None else SETTLED
        varied = latency is not None or mode.config.redrafted > 0
        params = [
            SamplingParams(method=mode.method, **({} if mode.method.plain else rows), **load.distribution)
            for load in loads
        ]
        longest = rules_of(params[0]).stride(mode.config) * (rounds + untimed + 4) + 1
        requests = [load.make_requests(own, longest) for load, own in zip(loads, params)]
        config = sized_config(mode.config, list(chain(*requests)), loads[0].requests)
        with self._backend.engine(mode, config) as engine:
            if latency is not None:
                engine.latency = latency
                _warm_up(engine, UsualSampling.of(loads[0].distribution))
            for load, own, ours in zip(loads, params, requests):
                loop = (ClosedLoop if load.answer is None else Waves)(engine, repeated(ours), load.requests)
                while engine.num_running < load.requests:
                    loop.step()
                for _ in range(untimed):
                    loop.step()
                yield self._timed(mode, loop, own, load, rounds, varied=varied)
                loop.stop()

    def _timed(
        self,
        mode: Mode,
        loop: ClosedLoop | Waves,
        params: SamplingParams,
        load: Load,
        rounds: int,
        *,
        varied: bool,
    ) -> Speed:
        """`varied`: rounds of exact decoding are of several kinds."""
        loop.engine.take_stats()
        seen = self._watch(loop, mode.method, rounds)
        work, stats = seen.work, loop.engine.take_stats()
        whole = seen.mean_round if varied and mode.method is Method.EXACT else seen.round
        draft, target, select = (median_length(work, name) for name in (*ModelRole, "select"))
        busy = draft + target if mode.config.form == "lockstep" or mode.method.plain else max(draft, target)
        spec, alone = stats.exact[mode.verification or "walk"], stats.exact_alone_rounds
        tokens = seen.tokens if mode.method is Method.EXACT else rules_of(params).stride(mode.config)
        is_chosen = varied and mode.config.drafting == "adaptive" and spec.rounds > 0
        chosen = spec.draft_tokens / spec.rounds if is_chosen else None
        alone_share = alone / (alone + spec.rounds) if alone else 0.0
        return Speed(
            mode=mode.name,
            decoding=decoding_name(params),
            numerics=numerics_of_models(loop.engine, params.decoding).value,
            particles=params.rows,
            block=mode.config.block,
            branches=1 if mode.method.plain else mode.config.branches,
            requests=load.requests,
            context=load.context,
            prompts=load.name,
            temperature=params.temperature,
            gpus=mode.gpus,
            target_gpus=mode.degrees[1],
            rows=spec.rows / spec.rounds if spec.rounds else params.rows,
            alone=alone_share,
            tokens=tokens,
            per_request=tokens / whole,
            total=seen.running * tokens / whole,
            round=1e3 * whole,
            draft=1e3 * draft,
            target=1e3 * target,
            select=1e3 * select,
            link=1e3 * seen.link,
            host=1e3 * statistics.median(seen.hosts),
            idle=max(0.0, 1 - busy / whole),
            floor=self._floor(mode, chosen or mode.config.block, alone_share) / whole,
            memory=self._backend.memory(mode) / 2**30,
            kernels=mode.kernels,
            steps=chosen,
        )

    def _watch(self, loop: ClosedLoop | Waves, method: Method, rounds: int) -> TimedRounds:
        """Time `rounds` rounds."""
        sources, seen = (
            [
                loop.engine.rounds_of(SamplingParams(method=one).decoding)
                for one in dict.fromkeys((method, Method.TARGET))
            ],
            TimedRounds(),
        )
        last, run = time.monotonic_ns(), 0
        while len(seen.spans) < rounds:
            read = [source.last for source in sources]
            for source in sources:
                source.queued = 0.0
            running, outputs, now = loop.running, loop.step(), time.monotonic_ns()
            if loop.steady:
                seen.spans.append((loop.wave, 1e-9 * (now - last)))
                seen.hosts.append(sum(source.queued for source in sources))
                seen.delivered += sum(len(output.tokens) for output in outputs)
                seen.took_part += running
                for source, before in zip(sources, read):
                    if source.last is None or source.last is before:
                        continue
                    seen.work.append(source.last.spans())
                    seen.runs.append(run)
                    if self._on_round is not None:
                        self._on_round(TracedRound(last, now, source.waited, seen.work[-1]))
            run += not loop.steady
            # The next round is timed from here, without a gap: the GPUs work meanwhile, so a gap would make them look
            # faster.
            last = now
        return seen

    def _floor(self, mode: Mode, steps: float, alone: float) -> float:
        """Return the seconds that reading the weights once for every pass of a round takes at full bandwidth. `steps`:
        of the draft; `alone`: share of rounds in which the target decodes alone, with K passes."""
        draft, target = (self._backend.weight_bytes(mode, role) / BANDWIDTH for role in ModelRole)
        if mode.method is Method.TARGET:
            return mode.config.block * target
        ahead = mode.config.lookahead and mode.degrees[0]
        both = max(steps * draft, target) if ahead else steps * draft + target
        return (1 - alone) * both + alone * mode.config.block * target


def median_length(work: list[dict[str, tuple[int, int]]], name: str) -> float:
    """Return the median over rounds of the seconds of the span `name`, which count as 0 in rounds without it."""
    ends = (worked.get(name, (0, 0)) for worked in work)
    return statistics.median(1e-9 * (end - begin) for begin, end in ends)


def unattended(work: list[dict[str, tuple[int, int]]]) -> float:
    """Return the seconds in which no model works, between the begins of the first and the last round."""
    first, last = (min(begin for begin, _ in worked.values()) for worked in (work[0], work[-1]))
    idle, reached = 0, first
    for begin, end in sorted(span for worked in work for span in worked.values()):
        idle += max(0, min(begin, last) - reached)
        reached = max(reached, min(end, last))
    return 1e-9 * idle


def _warm_up(engine: Engine, usual: UsualSampling) -> None:
    """Warm up as a service does, since a latency model chooses trees of all sizes."""
    here = {role: worker for role, worker in engine.workers.items() if isinstance(worker, ModelWorker)}
    if here:  # models in processes of their own are not asked
        compile_ahead(engine.config, engine.context, here, usual)
    warm_up_prompts(engine)
    warm_up(
        engine,
        warm_up_plans(
            engine.config,
            engine.context,
            [decodings for decodings in DECODINGS if Decoding.DISTINCT not in decodings],
            [usual.truncation],
            usual,
        ),
    )
