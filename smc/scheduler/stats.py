"""Statistics of an engine: its current state, and counters since the last reading. Also the timeline of its rounds:
when each model worked, when the coordinator waited, and a Chrome trace of both. Times are in nanoseconds of the
coordinator's monotonic clock."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path

from smc.api.request import Statistics
from smc.api.sampling_params import VERIFICATIONS
from smc.types import ModelRole, Numerics, is_mask_span

MOST_SAMPLES = 8192
"""Number of newest individual values that are kept between two readings."""
MAX_EVENTS = 400_000
"""Maximum spans of a trace: about an hour of one request's rounds."""
LANES = {"coordinator": 0, "draft": 1, "target": 2}


@dataclass
class ExactStats:
    """Counters of exact decoding since the last reading, over rounds that drafted something."""

    rounds: int = 0
    """A round counts once for each request that took part."""
    draft_tokens: int = 0
    """Drafted tokens of one path of each tree, summed over those rounds."""
    accepted_tokens: int = 0
    """Drafted tokens that equal the target's own draws (walk), or that were kept (rejection)."""
    accepted_by_position: list[int] = field(default_factory=list)
    """Entry i: rounds in which more than i tokens were accepted."""
    hits: int = 0
    """Rounds after which rows that had been drafted ahead continued (look-ahead)."""
    misses: int = 0
    rows: int = 0
    """Rows of the trees, or chains, of all those rounds."""

    @property
    def accepted_by_depth(self) -> tuple[float, ...]:
        """Share of rounds in which the first, the first two, ... drafted tokens were accepted."""
        return tuple(count / self.rounds for count in self.accepted_by_position)

    @property
    def tokens_a_round(self) -> float | None:
        """Average number of tokens that a pass of the target confirms: a round ends with the target's own draw, unless
        that was drafted ahead. None if there were no rounds."""
        return (self.accepted_tokens - self.hits) / self.rounds + 1 if self.rounds else None

    def count(self, accepted: int, block: int, rows: int, ahead: bool, hit: bool) -> None:
        """Count a round in which `accepted` of at most `block` drafted tokens were accepted."""
        self.rounds += 1
        self.rows += rows
        self.draft_tokens += block
        self.accepted_tokens += accepted
        self.hits += hit
        self.misses += ahead and not hit
        self.accepted_by_position += [0] * (block - len(self.accepted_by_position))
        for position in range(min(accepted, block)):
            self.accepted_by_position[position] += 1


@dataclass
class PotentialStats:
    """Calls of potentials since the last reading."""

    seconds: list[float] = field(default_factory=list)
    """Duration of each call that has ended."""
    errors: int = 0
    """Requests that ended because their potential failed or returned an invalid log phi."""
    timeouts: int = 0
    """Requests that ended because their potential took too long."""
    collapses: int = 0
    """Calls after which no particle of the request would have had weight."""

    def count_call(self, seconds: float) -> None:
        """Record the duration of a call. The newest ones are kept, however rarely they are read."""
        self.seconds.append(seconds)
        del self.seconds[:-MOST_SAMPLES]


@dataclass
class EngineStats:
    """State after a step, and counters since the last reading."""

    queued: int = 0
    """Requests that wait to be admitted."""
    running: int = 0
    """Requests that hold slots or are rescored."""
    slots_free: int = 0
    pages_used: dict[ModelRole, int] = field(default_factory=dict)
    """Pages that requests, the prefix cache or both hold."""
    pages_cached: dict[ModelRole, int] = field(default_factory=dict)
    """Pages that only the prefix cache holds. Blocks of a prompt that is still being run count, too."""
    pages_total: dict[ModelRole, int] = field(default_factory=dict)
    numerics: dict[ModelRole, Numerics] = field(default_factory=dict)
    """What the bits of each model's results depend on."""
    pages_leaked: dict[ModelRole, int] = field(default_factory=dict)
    """References to pages and unassigned pages without an owner (see `KVCacheManager.leaked`); only set while there are
    no requests."""
    prefix_queries: dict[ModelRole, int] = field(default_factory=dict)
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hits: dict[ModelRole, int] = field(default_factory=dict)
    """Prompt tokens that were found in the prefix cache."""
    preemptions: int = 0
    """Preemptions of requests."""
    shrinks: int = 0
    """Populations that were reduced because memory was short."""
    resamples: int = 0
    collapses: int = 0
    ess_shares: list[float] = field(default_factory=list)
    """ESS / N before resampling, one value for each round of each SMC request with independent particles."""
    committed_lags: list[int] = field(default_factory=list)
    """Tokens between the committed prefix and the longest particle, one value for each round of each SMC request."""
    mask_seconds: list[float] = field(default_factory=list)
    """Seconds spent on masks of constrained requests, one value per round and model."""
    potentials: PotentialStats = field(default_factory=PotentialStats)

    exact: dict[str, ExactStats] = field(default_factory=lambda: {name: ExactStats() for name in VERIFICATIONS})
    """Counters of exact decoding, by the requests' setting `verification`: `walk` and `rejection`."""
    exact_alone_rounds: int = 0
    """Rounds of requests of exact decoding in which nothing was drafted."""

    def count_masks(self, nanoseconds: Iterable[int]) -> None:
        """Record the durations of a round's masks, at each model that computed any."""
        self.mask_seconds += [1e-9 * duration for duration in nanoseconds]
        del self.mask_seconds[:-MOST_SAMPLES]

    def count_round(self, ess_share: float | None, lag: int, resampled: bool, collapsed: bool) -> None:
        """Count a round of an SMC request. `ess_share` is None for distinct particles, whose weights are as unequal as
        the distribution that they are drawn from."""
        if ess_share is not None:
            self.ess_shares.append(ess_share)
        self.committed_lags.append(lag)
        self.resamples += resampled
        self.collapses += collapsed
        del self.ess_shares[:-MOST_SAMPLES], self.committed_lags[:-MOST_SAMPLES]


@dataclass
class RequestCounters:
    """Running sums from which `Statistics` are computed."""

    particles: int
    rounds: int = 0
    resamples: int = 0
    collapses: int = 0
    preemptions: int = 0
    alone_rounds: int = 0
    rows_sum: int = 0
    confirmed: int = 0
    hits: int = 0
    misses: int = 0
    ess_sum: float = 0.0
    ess_min: float = float("inf")
    draft_tokens: int = 0
    target_tokens: int = 0
    lag_sum: int = 0

    def count_tokens(self, role: ModelRole, tokens: int) -> None:
        if role is ModelRole.DRAFT:
            self.draft_tokens += tokens
        else:
            self.target_tokens += tokens

    def count_population(self, ess: float, resampled: bool, collapsed: bool) -> None:
        self.resamples += resampled
        self.collapses += collapsed
        self.ess_sum += ess
        self.ess_min = min(self.ess_min, ess)

    def count_tree(self, confirmed: int, rows: int, ahead: bool, hit: bool) -> None:
        self.confirmed += confirmed
        self.rows_sum += rows
        self.hits += hit
        self.misses += ahead and not hit

    def statistics(self, log_z: float, particles_left: int, draft_exponent: float, numerics: Numerics) -> Statistics:
        rounds, drafted = max(self.rounds, 1), max(self.rounds - self.alone_rounds, 1)
        # Counters that are reported as they are have the same names there.
        counters = {each.name: getattr(self, each.name) for each in fields(Statistics) if hasattr(self, each.name)}
        return Statistics(
            **counters,
            particles_left=particles_left,
            mean_ess=self.ess_sum / rounds,
            min_ess=self.ess_min if self.ess_sum else 0.0,
            log_z=log_z,
            committed_lag=self.lag_sum / rounds,
            accepted_per_round=self.confirmed / drafted,
            mean_rows=self.rows_sum / drafted,
            draft_exponent=draft_exponent,
            numerics=numerics.value,
        )


@dataclass(frozen=True)
class RoundTimes:
    """Parts of one engine step in which a model worked, in seconds."""

    whole: float
    draft: float
    target: float
    link: float
    """Time in which the coordinator waited and neither model worked: messages were in flight."""
    coordinator: float
    """Time in which the coordinator did not wait."""
    draft_stall: float
    target_stall: float


@dataclass(frozen=True)
class Span:
    lane: str
    name: str
    begin: int
    end: int


class Timeline:
    """Collects the spans of the current step; keeps those of earlier steps only if a trace is wanted."""

    def __init__(self, trace: bool = False) -> None:
        self._step: list[Span] = []
        self._waits: list[tuple[int, int]] = []
        self._trace: list[Span] | None = [] if trace else None

    def worked(self, role: ModelRole, name: str, begin: int, end: int) -> None:
        if is_mask_span(name):
            # Masks are made beside the model's work.
            return
        self._step.append(Span(role, name, begin, end))

    def waited(self, begin: int, end: int) -> None:
        self._waits.append((begin, end))

    def forget(self) -> None:
        """Drop the spans since the last step, which belong to no round."""
        self._step, self._waits = [], []

    def end_step(self, begin: int, end: int) -> RoundTimes | None:
        """End the step and return its times by part; None if no model worked."""
        spans, waits = self._step, self._waits
        self._step, self._waits = [], []
        if not spans:
            return None
        self._keep(spans, waits, begin, end)
        busy = {role: sum(s.end - s.begin for s in spans if s.lane == role) for role in ModelRole}
        waited = sum(stop - start for start, stop in waits)
        idle = waited - sum(overlap(wait, [(s.begin, s.end) for s in spans]) for wait in waits)
        parts = (end - begin, busy[ModelRole.DRAFT], busy[ModelRole.TARGET], idle, end - begin - waited)
        stalls = (max(0, end - begin - busy[role]) for role in ModelRole)
        return RoundTimes(*(1e-9 * part for part in (*parts, *stalls)))

    def _keep(self, spans: list[Span], waits: list[tuple[int, int]], begin: int, end: int) -> None:
        if self._trace is None or len(self._trace) >= MAX_EVENTS:
            return
        self._trace += spans
        edges = [begin, *(edge for wait in waits for edge in wait), end]
        self._trace += [Span("coordinator", "work", a, b) for a, b in zip(edges[::2], edges[1::2]) if b > a]

    def write(self, path: Path) -> None:
        """Write the spans as a Chrome trace (chrome://tracing, Perfetto). Needs `trace=True`."""
        assert self._trace is not None
        events = [
            {"ph": "M", "pid": 0, "tid": lane, "name": "thread_name", "args": {"name": name}}
            for name, lane in LANES.items()
        ]
        for span in self._trace:
            times = {"ts": span.begin / 1e3, "dur": (span.end - span.begin) / 1e3}
            events.append({"ph": "X", "pid": 0, "tid": LANES[span.lane], "name": span.name, **times})
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def overlap(interval: tuple[int, int], others: list[tuple[int, int]]) -> int:
    """Length of the part of `interval` that the union of `others` covers."""
    covered, position = 0, interval[0]
    for begin, end in sorted(others):
        begin, end = max(begin, position), min(end, interval[1])
        if end > begin:
            covered, position = covered + end - begin, end
    return covered
