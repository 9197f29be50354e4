"""How long drafting takes and how many tokens it brings.

**Latency model**: seconds of a draft step and of a target pass, as curves through measured points, and the additional
seconds for reading contexts. It knows nothing about how they were measured.

**Acceptance** of drafted tokens: how often they equal the target's own draws in a request, and how many tokens trees of
other sizes would bring. After d accepted tokens, the next one is missing from a tree of N rows with probability about
miss rate / N^gain; each depth has a miss rate of its own. The gain follows from how the draft ranks the target's draws:
how often the draft's first token is wrong, and how often its first four are. Exponents of coupled drafting
(`smc.algorithm.coupling`) are learnt from the same draws: one for each temperature, fitted to all requests, and one for
each request, which starts from that of its temperature.

In look-ahead there are two kinds of rounds. One verifies a block, as above. Unless rows ahead begin with the outcome,
the next one verifies a single token, which is known: it *restarts*. The outcome has a miss rate of its own after a
restart, after a whole block, and after a part of one. All of them fall with N and with F (`Falls`), and the outcomes of
all depths of a block share the rows ahead: those of longer blocks are missed more often. If the draft drafts
again instead (`smc.executor.redraft`), a block follows with miss rates of its own, which fall as in lockstep.

Local axes: Z things that may be missed, U widths of trees, Y pairs of a number of rows and a number of branches, P
numbers of tokens that are drafted again. K are depths of a tree."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from smc.algorithm.coupling import FIRST_EXPONENT, FIRST_GREEDY_EXPONENT, DrawObservation, ExponentFit

Point = tuple[int, float]
"""A size and its time in seconds."""
NAMES = {
    "draft": "a draft step by rows",
    "target": "a target pass by positions",
    "alone": "the target alone by sequences",
}
"""Description of each part, and of its size."""
PARTS = tuple(NAMES)
WIDTH_GAIN = 0.6
"""Gain before anything was observed: eight rows miss 3.5 times less often than one, as on the shipped pair before
drafting was coupled to the target's noise. With coupling, the gain at temperature 1 is 0.29 (`python -m
benchmarks.exactness misses --problems 24`)."""
MOST_GAIN = 1.5
BLOCK = 5
"""Tokens of the blocks for which the miss rates of outcomes are."""
WIDE, WIDE_TOKENS = 8, 4
"""A tree of eight rows has about four distinct tokens at its first depth, because rows share them."""
PRIOR_MISSES = 4.0
"""Weight of the initial gain, in draws that the draft's first token missed."""
PRIOR_MISS_RATE = 0.03
"""Miss rate before anything was observed, that of a good draft: a draft that is never used cannot be measured."""
PRIOR_WEIGHT = 4.0
"""Weight of the prior, in tokens that were tried."""
PRIOR_OUTCOMES = 2.0
"""Weight of the prior of outcomes, of which a round has only one."""
PRIOR_REQUEST = 1.0
"""Weight, in misses, of the assumption that a request is like all others."""
UNTRIED = 0.1
"""Share of a round by which a depth that the round did not reach is forgotten. If little is drafted, deep tokens are
rarely tried: their miss rates are then remembered for many rounds, but not for ever."""
RANKED = 0.1
"""Share of a round by which earlier ranks are forgotten with each draw. Draws that are none of the draft's first tokens
are rare, one in a hundred with a good draft: few rounds say little about the gain."""
FORGOTTEN = 1e-3
"""Count below which it is dropped."""
LEAST_FOUND = 0.02
"""Minimum probability in forecasts that a block follows a restart: the miss rate of few rows, taken from that of many,
may be above 1."""
INHERITED = 16.0
"""Maximum information that a request takes over from the fit of all requests: about as many draws."""


class Falls(NamedTuple):
    """How a miss rate falls with the width of trees: it is proportional to (rows^-rows * branches^-branches)^gain. The
    gain says how much the draft's next tokens bring where its first one is wrong."""

    rows: float
    branches: float = 0.0
    rows_are_shared: bool = False
    """Whether the depths of a block share all rows but one, so that more depths have fewer rows each."""
    branches_are_shared: bool = False
    """Whether the depths of a block share the rows ahead, so that more depths have fewer branches each."""

    def log_share(self, rows: Any, branches: Any, block: Any = BLOCK) -> Any:
        """Return the logarithm of the share of a miss rate that is left, with a gain of 1. The whole is the rate of one
        row and one branch, with blocks of `BLOCK` tokens."""
        if self.rows_are_shared:
            rows = 1 + (rows - 1) * BLOCK / block
        if self.branches_are_shared:
            branches = branches * BLOCK / block
        return -self.rows * np.log(rows) - self.branches * np.log(branches)

    def share(self, gain: Any, rows: Any, branches: Any, block: Any = BLOCK) -> Any:
        """Return the share of a miss rate that is left."""
        return np.exp(gain * self.log_share(rows, branches, block))


class Miss(StrEnum):
    """What a round may miss."""

    TOKEN = "token"
    """The next token of a block, after a number of accepted ones."""
    AGAIN = "again"
    """The next token of a block that was drafted again after a miss (look-ahead). Such a block has all rows of a tree,
    as in lockstep."""
    RESTART = "restart"
    """The target's draw after the only token of a restart, among the rows ahead (look-ahead)."""
    WHOLE = "whole"
    """The target's draw after a whole block, among the rows ahead."""
    PART = "part"
    """The outcome of a block of which a part is accepted, among the rows ahead."""


ROWS_FALLS = Falls(0.7, rows_are_shared=True)
"""How rates fall in lockstep (benchmarks/notes/policy.md). The gain is that of the first token of a block; rows bring
less further down."""
AHEAD_FALLS = {
    Miss.TOKEN: Falls(0.4, 0.05),
    Miss.AGAIN: ROWS_FALLS,
    Miss.RESTART: Falls(0.5, 1.0),
    Miss.WHOLE: Falls(0.3, 0.9, branches_are_shared=True),
    Miss.PART: Falls(0.0, 0.7, branches_are_shared=True),
}
"""How rates fall in look-ahead (benchmarks/notes/policy.md). Blocks have fewer rows than N there, so that more rows
bring less than in lockstep; and parts of a block that a wider tree misses are harder to guess."""
FALLS = {True: AHEAD_FALLS, False: dict.fromkeys(Miss, ROWS_FALLS)}
"""How rates fall, by whether rounds look ahead."""
OUTCOMES = (Miss.RESTART, Miss.WHOLE, Miss.PART)
DEEP = (Miss.TOKEN, Miss.AGAIN)
"""What is missed at each depth."""
DEPTH_ROWS = len(DEEP)
ROWS = {miss: row for row, miss in enumerate((*OUTCOMES, *DEEP))}
"""Row of each thing in the counts of `Acceptance`, at the first depth."""
PRIORS = {Miss.TOKEN: PRIOR_MISS_RATE, Miss.RESTART: 0.1, Miss.WHOLE: PRIOR_MISS_RATE, Miss.PART: 0.7}
"""Miss rates of one row and one branch before anything was observed."""
SHARED_MEMORY, REQUEST_MEMORY = 0.999, 0.99
"""Weight that earlier draws keep after each draw, in the fit of all requests and in that of one request."""


@dataclass(frozen=True)
class LatencyCurve:
    """Seconds as a function of size: never decreasing, linear between points. Raises ValueError for invalid points."""

    points: tuple[Point, ...]
    """At least one point, in ascending order of sizes."""

    def __post_init__(self) -> None:
        sizes, seconds = [size for size, _ in self.points], [each for _, each in self.points]
        if not self.points or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError(f"sizes={sizes}; allowed: at least one, each larger than the one before, from 1 on")
        if seconds != sorted(seconds) or seconds[0] <= 0 or not math.isfinite(seconds[-1]):
            raise ValueError(f"seconds={seconds}; allowed: finite, above 0, and never less for a larger size")

    @staticmethod
    def through(samples: Iterable[Point]) -> LatencyCurve:
        """Make a curve from samples in any order: the median for each size; where a larger size took less time, the
        mean of both."""
        found: dict[int, list[float]] = {}
        for size, seconds in samples:
            found.setdefault(size, []).append(seconds)
        levels: list[tuple[float, list[int]]] = []
        for size in sorted(found):
            levels.append((statistics.median(found[size]), [size]))
            while len(levels) > 1 and levels[-2][0] > levels[-1][0]:
                (low, before), (high, after) = levels[-2:]
                mean = (low * len(before) + high * len(after)) / (len(before) + len(after))
                levels[-2:] = [(mean, before + after)]
        return LatencyCurve(tuple((size, seconds) for seconds, sizes in levels for size in sizes))

    def at(self, size: float) -> float:
        """Return the seconds for a size. Below the first point: its seconds, which are spent on reading the weights.
        Beyond the last point: as steep as the last segment and at least in proportion, so that no policy prefers sizes
        that were never measured."""
        sizes = [each for each, _ in self.points]
        (first, least), (last, most) = self.points[0], self.points[-1]
        if size <= first:
            return least
        if size >= last:
            return most + (size - last) * max(self._last_slope(), most / last)
        right = bisect_right(sizes, size)
        (low, below), (high, above) = self.points[right - 1], self.points[right]
        return below + (above - below) * (size - low) / (high - low)

    def _last_slope(self) -> float:
        if len(self.points) < 2:
            return 0.0
        (low, below), (high, above) = self.points[-2:]
        return (above - below) / (high - low)


@dataclass(frozen=True)
class ModelLatency:
    """Seconds of one step or pass of a model. Raises ValueError for an impossible `read`."""

    curve: LatencyCurve
    """Seconds by size, for sequences without context."""
    read: float = 0.0
    """Additional seconds for every token of context. The context of a request counts once, for all of its rows."""

    def __post_init__(self) -> None:
        if not 0 <= self.read < math.inf:
            raise ValueError(f"read={self.read!r}; allowed: finite, >= 0")

    def at(self, size: int, context: float) -> float:
        """Return the seconds for a size. `context`: tokens of the contexts of all requests together."""
        return self.curve.at(size) + self.read * context

    def record(self) -> dict[str, Any]:
        """Return the content for a JSON file."""
        return {"points": self.curve.points, "read": self.read}

    @staticmethod
    def of_record(content: Mapping[str, Any]) -> ModelLatency:
        """Read the result of `record`. Raises ValueError, KeyError or TypeError for other content."""
        return ModelLatency(LatencyCurve(tuple(map(tuple, content["points"]))), content["read"])


@dataclass(frozen=True)
class LatencyModel:
    """Latencies of one model pair on its devices."""

    draft: ModelLatency
    """A step of the draft; its size is the number of rows."""
    target: ModelLatency
    """A pass of the target over drafted tokens; its size is the number of positions."""
    alone: ModelLatency
    """A pass of the target that decodes alone; its size is the number of sequences, each of which reads its context."""
    round_overhead: float
    """Seconds of a round besides the draft's steps and the target's pass: selection, messages, and host work that does
    not overlap with them."""
    redraft_overhead: float = 0.0
    """Seconds that a round spends for each step that could draft again after a miss, if no request has missed."""

    def __post_init__(self) -> None:
        for name in ("round_overhead", "redraft_overhead"):
            if not 0 <= (seconds := getattr(self, name)) < math.inf:
                raise ValueError(f"{name}={seconds!r}; allowed: finite, >= 0")

    @property
    def parts(self) -> dict[str, ModelLatency]:
        return {name: getattr(self, name) for name in PARTS}

    def to_json(self) -> str:
        parts = {name: part.record() for name, part in self.parts.items()}
        return json.dumps(parts | {"round_overhead": self.round_overhead, "redraft_overhead": self.redraft_overhead})

    @staticmethod
    def from_json(text: str) -> LatencyModel:
        """Parse the output of `to_json`. Raises ValueError, KeyError or TypeError for other text."""
        found = json.loads(text)
        parts = {name: ModelLatency.of_record(found[name]) for name in PARTS}
        return LatencyModel(**parts, round_overhead=found["round_overhead"], redraft_overhead=found["redraft_overhead"])

    def __str__(self) -> str:
        return f"ms of {'; '.join(map(self._describe, PARTS))}; {1e3 * self.round_overhead:.2f} ms a round besides"

    def _describe(self, name: str) -> str:
        part = self.parts[name]
        points = ", ".join(f"{size}: {1e3 * seconds:.2f}" for size, seconds in part.curve.points)
        return f"{NAMES[name]} {points}, and {1e9 * part.read:.0f} ns a token of context"


@dataclass(frozen=True)
class MissRates:
    """Probabilities that what the target draws is missing, with one row and one branch: see `Miss`."""

    token: tuple[float, ...]
    """By depth; at greater depths the last one applies."""
    restart: float = PRIORS[Miss.RESTART]
    whole: float = PRIORS[Miss.WHOLE]
    part: float = PRIORS[Miss.PART]
    gain: float = WIDTH_GAIN
    """That of `Falls`."""
    again: tuple[float, ...] = ()
    """As `token`, of blocks that were drafted again; empty: the same."""

    def to(self, depth: int, kind: Miss = Miss.TOKEN) -> tuple[float, ...]:
        """Return the rates of the first `depth` tokens."""
        rates = self.again if kind is Miss.AGAIN and self.again else self.token
        return (*rates, *rates[-1:] * depth)[:depth]


class Acceptance:
    """How often drafted tokens are accepted, as moving averages over rounds.

    Tries and misses of Z things are counted: of each outcome, and of the next token at each depth in blocks and in
    blocks that were drafted again. Tries are counted by width (`Widths`). Requests are many, and each round of each of
    them is counted: so all is in one array."""

    def __init__(self, memory: float) -> None:
        """`memory`: weight that earlier rounds keep after every round."""
        self.memory = memory
        self.counts_ZU = np.zeros((len(OUTCOMES), 1))
        """Row z: the misses of a thing, then its tries by width."""
        self._depths = dict.fromkeys(DEEP, 0)
        """Number of depths at which each was tried."""
        self._missed_first = 0.0
        """Draws of the target that were not the draft's first token."""
        self._missed_wide = 0.0
        """Draws of the target that were none of the draft's first `WIDE_TOKENS` tokens."""

    def count(
        self,
        tried: int,
        missed: bool,
        rows: int,
        branches: int = 1,
        block: int = BLOCK,
        *,
        again: bool = False,
        outcome: tuple[Miss, bool] | None = None,
        times: int = 1,
    ) -> None:
        """Count rounds in which `tried` tokens were looked up in a tree. `missed`: whether the last of them was
        missing; the ones before were not. `block`: tokens of the block in look-ahead. `again`: the tree was drafted
        again after a miss. `outcome`: that of the round in look-ahead, and whether it was missing. `times`: number of
        such rounds."""
        kind, column = Miss.AGAIN if again else Miss.TOKEN, WIDTHS.column(rows, branches, block)
        self._depths[kind] = max(tried, self._depths[kind])
        first = _row(kind)
        self._decay(column, first + DEPTH_ROWS * tried, (kind, tried), outcome and outcome[0], times)
        counts_ZU = self.counts_ZU
        counts_ZU[first : first + DEPTH_ROWS * tried : DEPTH_ROWS, column] += times
        if missed:
            counts_ZU[first + DEPTH_ROWS * (tried - 1), 0] += times
        if outcome is not None:
            self._add_outcome(*outcome, column, times)

    def count_outcome(self, kind: Miss, missed: bool, rows: int, branches: int, times: int = 1) -> None:
        """Count the outcomes of restarts in look-ahead, in which no tokens were looked up."""
        column = WIDTHS.column(rows, branches, BLOCK)
        self._decay(column, 0, None, kind, times)
        self._add_outcome(kind, missed, column, times)

    def _decay(self, column: int, end: int, tried: tuple[Miss, int] | None, outcome: Miss | None, times: int) -> None:
        """Make room for a column and for rows up to `end`, and let earlier counts decay."""
        size, width = self.counts_ZU.shape
        if column >= width or end > size:
            self.counts_ZU = np.pad(self.counts_ZU, ((0, max(0, end - size)), (0, max(0, column + 1 - width))))
        kept_Z1 = _kept(self.memory, len(self.counts_ZU), tried, outcome)
        self.counts_ZU *= kept_Z1 if times == 1 else kept_Z1**times

    def _add_outcome(self, kind: Miss, missed: bool, column: int, times: int) -> None:
        row = _row(kind)
        self.counts_ZU[row, column] += times
        if missed:
            self.counts_ZU[row, 0] += times

    def count_rank(self, rank: float) -> None:
        """Count a draw of the target. `rank`: number of tokens that the draft ranked above it."""
        kept = self.memory**RANKED
        self._missed_first = kept * self._missed_first + (rank >= 1)
        self._missed_wide = kept * self._missed_wide + (rank >= WIDE_TOKENS)

    def gain(self) -> float:
        """Return the gain: trees of N rows miss N^gain times less often than one row."""
        missed = self._missed_first + PRIOR_MISSES
        still_missed = self._missed_wide + PRIOR_MISSES * WIDE**-WIDTH_GAIN
        return min(math.log(missed / still_missed) / math.log(WIDE), MOST_GAIN)

    def fade(self, share: float) -> None:
        """Keep only this share of all counts."""
        self.counts_ZU *= share
        if not share:
            self._depths = dict.fromkeys(self._depths, 0)
        self._missed_first *= share
        self._missed_wide *= share

    def tries(self, kind: Miss, depth: int = 0) -> float:
        """Return how often something was tried with trees of any size."""
        row = _row(kind, depth)
        return float(self.counts_ZU[row, 1:].sum()) if row < len(self.counts_ZU) else 0.0

    def rates(self, lookahead: bool) -> MissRates:
        """Return the miss rates. If a depth is better or worse than expected, so are greater depths until they are
        observed."""
        # Numbers that are hardly above 0 would make the processor slow.
        self.counts_ZU[self.counts_ZU < FORGOTTEN] = 0.0
        gain, counts_ZU = self.gain(), self.counts_ZU
        exposure = (counts_ZU * _shares(lookahead, gain, *counts_ZU.shape)).sum(1).tolist()
        missed, tries = counts_ZU[:, 0].tolist(), counts_ZU[:, 1:].sum(1).tolist()

        def rate(row: int, prior: float, weight: float) -> float:
            """Return the miss rate of one row and one branch. `prior`: its value where little was observed, with the
            weight of that many tries of such trees as were tried."""
            if row >= len(missed) or not tries[row]:
                return prior
            weight *= exposure[row] / tries[row]
            return (missed[row] + prior * weight) / (exposure[row] + weight)

        def by_depth(kind: Miss, ratio: float = 1.0) -> tuple[float, ...]:
            found, before = [], ratio * PRIOR_MISS_RATE
            for depth in range(max(1, self._depths[kind])):
                before = rate(_row(kind, depth), before, PRIOR_WEIGHT)
                found.append(before)
            return tuple(found)

        def outcome(kind: Miss, ratio: float = 1.0) -> float:
            return rate(_row(kind), ratio * PRIORS[kind], PRIOR_OUTCOMES)

        # A request either restarts or drafts again: what one of them misses tells about the other.
        again_ratio = rate(_row(Miss.AGAIN), PRIOR_MISS_RATE, PRIOR_WEIGHT) / PRIOR_MISS_RATE
        restart_ratio = outcome(Miss.RESTART) / PRIORS[Miss.RESTART]
        restart = outcome(Miss.RESTART, again_ratio)
        return MissRates(
            # If every round restarts, no block shows what its tokens miss: the restarts do.
            by_depth(Miss.TOKEN, max(1.0, restart / PRIORS[Miss.RESTART])),
            restart=restart,
            whole=outcome(Miss.WHOLE),
            part=outcome(Miss.PART),
            gain=gain,
            again=by_depth(Miss.AGAIN, restart_ratio),
        )

    def rates_among(self, all_rates: MissRates, lookahead: bool) -> MissRates:
        """Return the miss rates of one request: see `rates_of_requests`."""
        (found,) = rates_of_requests(all_rates, [self], lookahead)
        return found


def rates_of_requests(all_rates: MissRates, requests: Sequence[Acceptance], lookahead: bool) -> Iterator[MissRates]:
    """Yield the miss rates of each request. `all_rates`: those of all requests. Tokens are missed more or less often
    than these say, by one factor for all depths, and so are outcomes: the few rounds of a request say little about each
    depth."""
    sums: dict[tuple[int, ...], np.ndarray] = {}
    for request in requests:
        counts_ZU = request.counts_ZU
        if counts_ZU.shape not in sums:
            sums[counts_ZU.shape] = _sums_of(all_rates, lookahead, *counts_ZU.shape)
        missed, missed_outcomes, expected, expected_outcomes = (sums[counts_ZU.shape] @ counts_ZU.ravel()).tolist()
        more = (missed + PRIOR_REQUEST) / (expected + PRIOR_REQUEST)
        more_outcomes = (missed_outcomes + PRIOR_REQUEST) / (expected_outcomes + PRIOR_REQUEST)
        yield MissRates(
            tuple([more * rate for rate in all_rates.token]),
            more_outcomes * all_rates.restart,
            more_outcomes * all_rates.whole,
            more_outcomes * all_rates.part,
            all_rates.gain,
            tuple([more * rate for rate in all_rates.again]),
        )


def _sums_of(all_rates: MissRates, lookahead: bool, size: int, columns: int) -> np.ndarray:
    """Return a matrix whose product with raveled counts [Z, U] is: the tokens that a request missed, its missed
    outcomes, and how many there would be of both if it were like all."""
    depths = 1 + (size - len(OUTCOMES)) // DEPTH_ROWS
    by_depth = (each for pair in zip(*(all_rates.to(depths, kind) for kind in DEEP)) for each in pair)
    rate_Z = np.array([*(getattr(all_rates, kind) for kind in OUTCOMES), *by_depth])[:size]
    found = np.zeros((2, 2, size, columns))
    for sums, (first, end) in zip(found.swapaxes(0, 1), ((len(OUTCOMES), size), (0, len(OUTCOMES)))):
        sums[0, first:end, 0] = 1.0
        sums[1, first:end] = (rate_Z[:, None] * _shares(lookahead, all_rates.gain, size, columns))[first:end]
    return found.reshape(4, -1)


def _row(kind: Miss, depth: int = 0) -> int:
    """Return the row of something in the counts of `Acceptance`."""
    return ROWS[kind] + DEPTH_ROWS * depth


class Widths:
    """Columns of widths in the counts of `Acceptance`: 1, 2, .. in order of their first use, by any request. A width is
    rows and branches, both rounded up to powers of two, and the tokens of a block."""

    def __init__(self) -> None:
        self._columns: dict[tuple[int, int, int], int] = {}

    def column(self, rows: int, branches: int, block: int) -> int:
        width = 1 << (rows - 1).bit_length(), 1 << (branches - 1).bit_length(), block
        return self._columns.setdefault(width, len(self._columns) + 1)

    def first(self, count: int) -> np.ndarray:
        """Return rows, branches and tokens of the first widths [3, count]."""
        return np.array(list(itertools.islice(self._columns, count)), dtype=float).reshape(-1, 3).T


WIDTHS = Widths()


def _shares(lookahead: bool, gain: float, size: int, columns: int) -> np.ndarray:
    """Return the share of a miss rate that is left, for each of the counts [Z, U]; for column 0, which has misses,
    0."""
    share_ZU = np.exp(gain * _log_shares(lookahead, size, columns))
    share_ZU[:, 0] = 0.0
    return share_ZU


@cache
def _log_shares(lookahead: bool, size: int, columns: int) -> np.ndarray:
    """Return the logarithm of `_shares` with a gain of 1; for column 0, 0."""
    log_ZU = np.zeros((size, columns))
    for kind, falls in FALLS[lookahead].items():
        log_ZU[_row(kind) :: DEPTH_ROWS if kind in DEEP else size, 1:] = falls.log_share(*WIDTHS.first(columns - 1))
    return log_ZU


@cache
def _kept(memory: float, size: int, tried: tuple[Miss, int] | None, outcome: Miss | None) -> np.ndarray:
    """Return the share [Z, 1] of each count that is left after a round. `tried`: the tokens that it has looked up, and
    their number; `outcome`: the kind of its outcome."""
    kept_Z1 = np.ones((size, 1))
    if tried is not None:
        kind, count = tried
        kept_Z1[_row(kind) :: DEPTH_ROWS] = memory**UNTRIED
        kept_Z1[_row(kind) : _row(kind, count) : DEPTH_ROWS] = memory
    if outcome is not None:
        kept_Z1[: len(OUTCOMES)] = memory**UNTRIED
        kept_Z1[_row(outcome)] = memory
    return kept_Z1


class Confirmed(NamedTuple):
    """What rounds bring a request on average: arrays [G, Y, K, P]."""

    tokens: np.ndarray
    """Tokens that a round confirms."""
    restarts: np.ndarray
    """Share of rounds after a miss, which restart or draft again."""


def tokens_a_round(
    rates: Sequence[MissRates],
    rows_GY: np.ndarray,
    branches_Y: np.ndarray | int,
    block: int,
    lookahead: bool,
    redrafted: Sequence[int] = (0,),
) -> Confirmed:
    """Return what rounds confirm if they draft 1, 2, .. `block` tokens. Each of the G requests has its rates, and Y
    numbers of rows and branches. `redrafted`: P numbers of tokens that are drafted again after a miss; 0: none."""
    gain_G11, branches_Y1 = np.array([[[each.gain]] for each in rates]), np.reshape(branches_Y, (-1, 1))

    def share(kind: Miss, blocks: Any = BLOCK) -> np.ndarray:
        return FALLS[lookahead][kind].share(gain_G11, rows_GY[..., None], branches_Y1, blocks)

    def missed(kind: Miss, rate_GX: Sequence[Any], blocks: Any = BLOCK) -> np.ndarray:
        return np.minimum(np.array(rate_GX).reshape(len(rates), 1, -1) * share(kind, blocks), 1.0)

    def outcome(kind: Miss, blocks: Any = BLOCK) -> np.ndarray:
        return missed(kind, [getattr(each, kind) for each in rates], blocks)

    def in_a_row(kind: Miss, sizes: Sequence[int], blocks: Any) -> np.ndarray:
        """Probability [G, Y, X, K] that the first 1, 2, .. of `sizes` [X] tokens are right; 0 beyond these tokens."""
        rate_GK = np.array([each.to(max(sizes), kind) for each in rates])
        right_GYXK = 1 - np.minimum(rate_GK[:, None, None] * share(kind, blocks)[..., None], 1.0)
        return np.cumprod(right_GYXK, -1) * (np.arange(max(sizes)) < np.array(sizes)[:, None])

    if not lookahead:
        drafted_K = np.arange(1, block + 1)
        tokens_GYKP = (1 + in_a_row(Miss.TOKEN, drafted_K.tolist(), drafted_K).sum(-1))[..., None]
        return Confirmed(tokens_GYKP, np.zeros_like(tokens_GYKP))
    right_GYK = 1 - missed(Miss.TOKEN, [each.to(block) for each in rates])
    # The first token of a block is known to be right. After a miss, rounds confirm one token each until the target's
    # next token is among the drafted ones.
    whole_GYK = np.cumprod(np.concatenate((np.ones_like(right_GYK[..., :1]), right_GYK[..., :-1]), -1), -1)
    drafted_K = np.arange(1, block + 1)
    misses_GYK = whole_GYK * outcome(Miss.WHOLE, drafted_K) + (1 - whole_GYK) * outcome(Miss.PART, drafted_K)
    tokens_GYP, again_GYP = np.ones((1, 1, 1)), outcome(Miss.RESTART)
    if any(redrafted):
        # With R tokens that are drafted again, these rounds confirm more, and miss as after other blocks.
        redrafted_P, blocks_P = np.array(redrafted), 1 + np.array(redrafted)
        right_GYPK = in_a_row(Miss.AGAIN, redrafted, blocks_P)
        tokens_GYP = 1 + right_GYPK.sum(-1)
        last_11P1 = np.maximum(redrafted_P - 1, 0)[None, None, :, None]
        all_right_GYP = np.take_along_axis(right_GYPK, last_11P1, -1)[..., 0]
        missed_GYP = all_right_GYP * outcome(Miss.WHOLE, blocks_P) + (1 - all_right_GYP) * outcome(Miss.PART, blocks_P)
        again_GYP = np.where(redrafted_P > 0, missed_GYP, again_GYP)
    ratio_GYKP = misses_GYK[..., None] / np.maximum(1 - again_GYP, LEAST_FOUND)[:, :, None]
    tokens_GYKP = whole_GYK.cumsum(-1)[..., None] + ratio_GYKP * tokens_GYP[:, :, None]
    return Confirmed(tokens_GYKP / (1 + ratio_GYKP), ratio_GYKP / (1 + ratio_GYKP))


class DraftExponents:
    """Exponents of coupled drafting of one engine, by temperature."""

    def __init__(self) -> None:
        self._by_temperature: dict[float, ExponentFit] = {}

    def begin(self, temperature: float) -> ExponentFit:
        """Return the fit that a request of this temperature starts with."""
        shared = self._shared(temperature)
        return replace(shared, memory=REQUEST_MEMORY, information=min(shared.information, INHERITED))

    def observe(self, temperature: float, own: ExponentFit, draw: DrawObservation) -> None:
        """Update both fits by a draw of the target: that of the request, `own`, and that of its temperature."""
        own.observe(draw)
        self._shared(temperature).observe(draw)

    def forget(self) -> None:
        """Discard all fits."""
        self._by_temperature.clear()

    def _shared(self, temperature: float) -> ExponentFit:
        first = FIRST_EXPONENT if temperature else FIRST_GREEDY_EXPONENT
        return self._by_temperature.setdefault(round(temperature, 1), ExponentFit(SHARED_MEMORY, math.log(first)))
