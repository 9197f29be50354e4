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
restart, after a whole block, and after a part of one. All of them fall with N and with F (`Falls`). If the draft drafts
again instead (`smc.executor.draft_tree`), a block follows with miss rates of its own, which fall as in lockstep.

Local axes: Y pairs of a number of rows and a number of branches, P numbers of tokens that are drafted again. K are
depths of a tree."""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
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
WIDE, WIDE_TOKENS = 8, 4
"""A tree of eight rows has about four distinct tokens at its first depth, because rows share them."""
PRIOR_MISSES = 4.0
"""Weight of the initial gain, in draws that the draft's first token missed."""
PRIOR_MISS_RATE = 0.03
"""Miss rate before anything was observed, that of a good draft: a draft that is never used cannot be measured."""
PRIOR_WEIGHT = 4.0
"""Weight of the prior, in tokens of one row."""
PRIOR_OUTCOMES = 2.0
"""Weight of the prior of outcomes, of which a round has only one."""
PRIOR_REQUEST = 1.0
"""Weight, in misses, of the assumption that a request is like all others."""
MAX_DEPTH = 32
"""Maximum number of depths."""
UNTRIED = 0.1
"""Share of a round by which a depth that the round did not reach is forgotten. If little is drafted, deep tokens are
rarely tried: their miss rates are then remembered for many rounds, but not for ever."""
FORGOTTEN = 1e-3
"""Number of tried tokens for a width of trees below which the width is dropped."""


class Falls(NamedTuple):
    """How a miss rate falls: it is proportional to rows^-rows and to branches^-branches."""

    rows: float
    branches: float = 0.0

    def share(self, rows: Any, branches: Any) -> Any:
        """Return the miss rate of this many rows and branches, as a share of that of one row and one branch."""
        return rows**-self.rows * branches**-self.branches


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


AHEAD_FALLS = {
    Miss.TOKEN: Falls(0.2, 0.05),
    Miss.RESTART: Falls(0.2, 0.2),
    Miss.WHOLE: Falls(0.3, 0.6),
    Miss.PART: Falls(0.15, 0.4),
}
"""How rates fall in look-ahead (benchmarks/notes/policy.md). Blocks have fewer rows than N there, so that more rows
bring less than in lockstep."""
OUTCOMES = (Miss.RESTART, Miss.WHOLE, Miss.PART)
LEAST_FOUND = 0.02
"""Minimum probability in forecasts that a block follows a restart: the miss rate of few rows, taken from that of many,
may be above 1."""
PRIORS = {Miss.TOKEN: PRIOR_MISS_RATE, Miss.RESTART: 0.1, Miss.WHOLE: PRIOR_MISS_RATE, Miss.PART: 0.7}
"""Miss rates of one row and one branch before anything was observed."""
SHARED_MEMORY, REQUEST_MEMORY = 0.999, 0.99
"""Weight that earlier draws keep after each draw, in the fit of all requests and in that of one request."""
INHERITED = 16.0
"""Maximum information that a request takes over from the fit of all requests: about as many draws."""


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
        parts = {name: {"points": part.curve.points, "read": part.read} for name, part in self.parts.items()}
        return json.dumps(parts | {"round_overhead": self.round_overhead, "redraft_overhead": self.redraft_overhead})

    @staticmethod
    def from_json(text: str) -> LatencyModel:
        """Parse the output of `to_json`. Raises ValueError, KeyError or TypeError for other text."""
        found = json.loads(text)
        parts = {
            name: ModelLatency(LatencyCurve(tuple(map(tuple, found[name]["points"]))), found[name]["read"])
            for name in PARTS
        }
        return LatencyModel(**parts, round_overhead=found["round_overhead"], redraft_overhead=found["redraft_overhead"])

    def __str__(self) -> str:
        return f"ms of {'; '.join(map(self._describe, PARTS))}; {1e3 * self.round_overhead:.2f} ms a round besides"

    def _describe(self, name: str) -> str:
        part = self.parts[name]
        points = ", ".join(f"{size}: {1e3 * seconds:.2f}" for size, seconds in part.curve.points)
        return f"{NAMES[name]} {points}, and {1e9 * part.read:.0f} ns a token of context"


def falls_of(lookahead: bool, gain: Any = WIDTH_GAIN) -> Mapping[Miss, Falls]:
    """Return how each rate falls in this form of rounds. `gain`: that of a tree's rows in lockstep."""
    return dict.fromkeys(Miss, Falls(gain)) | (AHEAD_FALLS if lookahead else {})


@dataclass
class MissCounts:
    """How often something was missed, as moving sums."""

    missed: float = 0.0
    tried: dict[tuple[int, int], float] = field(default_factory=dict)
    """Tries by rows and branches, both rounded up to powers of two."""

    def keep(self, share: float) -> None:
        """Keep only this share of all counts."""
        self.missed *= share
        self.tried = {width: left for width, tries in self.tried.items() if (left := share * tries) > FORGOTTEN}

    def count(self, missed: bool, rows: int, branches: int) -> None:
        width = 1 << (rows - 1).bit_length(), 1 << (branches - 1).bit_length()
        self.missed += missed
        self.tried[width] = self.tried.get(width, 0.0) + 1

    def exposure(self, falls: Falls) -> float:
        """Return the number of tries of one row and one branch with the same expected number of misses."""
        return sum(tries * falls.share(rows, branches) for (rows, branches), tries in self.tried.items())

    def rate(self, prior: float, falls: Falls, weight: float = PRIOR_WEIGHT) -> float:
        """Return the miss rate of one row and one branch. `prior`: its value where little was observed, with the weight
        of that many tries."""
        return (self.missed + prior * weight) / (self.exposure(falls) + weight)


@dataclass(frozen=True)
class MissRates:
    """Probabilities that what the target draws is missing, with one row and one branch: see `Miss`."""

    token: tuple[float, ...]
    """By depth; at greater depths the last one applies."""
    restart: float = PRIORS[Miss.RESTART]
    whole: float = PRIORS[Miss.WHOLE]
    part: float = PRIORS[Miss.PART]
    gain: float = WIDTH_GAIN
    """Exponent by which they fall with the number of rows in lockstep."""
    again: tuple[float, ...] = ()
    """As `token`, of blocks that were drafted again; empty: the same."""

    def to(self, depth: int, kind: Miss = Miss.TOKEN) -> tuple[float, ...]:
        """Return the rates of the first `depth` tokens."""
        rates = self.again if kind is Miss.AGAIN and self.again else self.token
        return (*rates, *rates[-1:] * depth)[:depth]


@dataclass
class Acceptance:
    """How often drafted tokens are accepted, as moving averages over rounds."""

    memory: float
    """Weight that earlier rounds keep after every round."""
    tokens_K: list[MissCounts] = field(default_factory=list)
    """Counts of `Miss.TOKEN` at each depth that was tried."""
    again_K: list[MissCounts] = field(default_factory=list)
    """Counts of `Miss.AGAIN` at each depth that was tried."""
    outcomes: dict[Miss, MissCounts] = field(default_factory=lambda: {miss: MissCounts() for miss in OUTCOMES})
    """Counts of the others (look-ahead)."""
    missed_first: float = 0.0
    """Draws of the target that were not the draft's first token."""
    missed_wide: float = 0.0
    """Draws of the target that were none of the draft's first `WIDE_TOKENS` tokens."""

    def count(self, tried: int, missed: bool, rows: int, branches: int = 1, *, again: bool = False) -> None:
        """Count a round in which `tried` tokens were looked up in a tree. `missed`: whether the last of them was
        missing; the ones before were not. `again`: the tree was drafted again after a miss."""
        of_kind_K = self.again_K if again else self.tokens_K
        of_kind_K += [MissCounts() for _ in range(tried - len(of_kind_K))]
        for depth, counts in enumerate(of_kind_K):
            counts.keep(self.memory if depth < tried else self.memory**UNTRIED)
            if depth < tried:
                counts.count(missed and depth == tried - 1, rows, branches)

    def count_outcome(self, kind: Miss, missed: bool, rows: int, branches: int) -> None:
        """Count the outcome of a round in look-ahead."""
        for each, counts in self.outcomes.items():
            counts.keep(self.memory if each is kind else self.memory**UNTRIED)
        self.outcomes[kind].count(missed, rows, branches)

    def count_rank(self, rank: float) -> None:
        """Count a draw of the target. `rank`: number of tokens that the draft ranked above it."""
        self.missed_first = self.memory * self.missed_first + (rank >= 1)
        self.missed_wide = self.memory * self.missed_wide + (rank >= WIDE_TOKENS)

    def gain(self) -> float:
        """Return the gain: trees of N rows miss N^gain times less often than one row."""
        missed = self.missed_first + PRIOR_MISSES
        still_missed = self.missed_wide + PRIOR_MISSES * WIDE**-WIDTH_GAIN
        return min(math.log(missed / still_missed) / math.log(WIDE), MOST_GAIN)

    def fade(self, share: float) -> None:
        """Keep only this share of all counts."""
        for counts in (*self.tokens_K, *self.again_K, *self.outcomes.values()):
            counts.keep(share)
        if not share:
            self.tokens_K.clear()
            self.again_K.clear()
        self.missed_first *= share
        self.missed_wide *= share

    def rates(self, lookahead: bool) -> MissRates:
        """Return the miss rates. If a depth is better or worse than expected, so are greater depths until they are
        observed."""
        gain = self.gain()
        falls = falls_of(lookahead, gain)

        def by_depth(kind: Miss, counts_K: Sequence[MissCounts], ratio: float = 1.0) -> tuple[float, ...]:
            found, before = [], ratio * PRIOR_MISS_RATE
            for counts in counts_K or (MissCounts(),):
                before = counts.rate(before, falls[kind])
                found.append(before)
            return tuple(found)

        def outcome(kind: Miss, ratio: float = 1.0) -> float:
            return self.outcomes[kind].rate(ratio * PRIORS[kind], falls[kind], PRIOR_OUTCOMES)

        # A request either restarts or drafts again: what one of them misses tells about the other.
        again_ratio = by_depth(Miss.AGAIN, self.again_K)[0] / PRIOR_MISS_RATE
        restart_ratio = outcome(Miss.RESTART) / PRIORS[Miss.RESTART]
        restart = outcome(Miss.RESTART, again_ratio)
        return MissRates(
            # If every round restarts, no block shows what its tokens miss: the restarts do.
            by_depth(Miss.TOKEN, self.tokens_K, max(1.0, restart / PRIORS[Miss.RESTART])),
            restart=restart,
            whole=outcome(Miss.WHOLE),
            part=outcome(Miss.PART),
            gain=gain,
            again=by_depth(Miss.AGAIN, self.again_K, restart_ratio),
        )

    def rates_among(self, all_rates: MissRates, lookahead: bool) -> MissRates:
        """Return the miss rates of one request. `all_rates`: those of all requests. Tokens are missed more or less
        often than these say, by one factor for all depths, and so are outcomes: the few rounds of a request say little
        about each depth."""
        falls = falls_of(lookahead, all_rates.gain)
        of_kind = ((Miss.TOKEN, self.tokens_K), (Miss.AGAIN, self.again_K))
        token = [
            (counts, rate, falls[kind])
            for kind, counts_K in of_kind
            for counts, rate in zip(counts_K, all_rates.to(MAX_DEPTH, kind))
        ]
        outcome = [(counts, getattr(all_rates, miss), falls[miss]) for miss, counts in self.outcomes.items()]
        more, more_outcomes = map(_factor, (token, outcome))
        return MissRates(
            tuple(more * rate for rate in all_rates.token),
            **{miss: more_outcomes * getattr(all_rates, miss) for miss in self.outcomes},
            gain=all_rates.gain,
            again=tuple(more * rate for rate in all_rates.again),
        )


def _factor(counted: Iterable[tuple[MissCounts, float, Falls]]) -> float:
    """Return how many times more often something was missed than expected. `counted`: counts, expected rates of one row
    and one branch, and how these fall."""
    parts = list(counted)
    missed = sum(counts.missed for counts, _, _ in parts)
    expected = sum(rate * counts.exposure(falls) for counts, rate, falls in parts)
    return (missed + PRIOR_REQUEST) / (expected + PRIOR_REQUEST)


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
    falls = falls_of(lookahead, np.array([[each.gain] for each in rates]))

    def missed(kind: Miss, rate_GX: Sequence[Any]) -> np.ndarray:
        share_GY1 = falls[kind].share(rows_GY, branches_Y)[..., None]
        return np.minimum(np.array(rate_GX).reshape(len(rates), 1, -1) * share_GY1, 1.0)

    right_GYK = 1 - missed(Miss.TOKEN, [each.to(block) for each in rates])
    if not lookahead:
        tokens_GYKP = (1 + np.cumprod(right_GYK, -1).cumsum(-1))[..., None]
        return Confirmed(tokens_GYKP, np.zeros_like(tokens_GYKP))
    # The first token of a block is known to be right. After a miss, rounds confirm one token each until the target's
    # next token is among the drafted ones.
    whole_GYK = np.cumprod(np.concatenate((np.ones_like(right_GYK[..., :1]), right_GYK[..., :-1]), -1), -1)
    restart, whole, part = (missed(kind, [getattr(each, kind) for each in rates]) for kind in OUTCOMES)
    misses_GYK = whole_GYK * whole + (1 - whole_GYK) * part
    # With R tokens that are drafted again, these rounds confirm more, and miss as after other blocks.
    one_GY1, again = np.ones((*rows_GY.shape, 1)), [each.to(max(redrafted), Miss.AGAIN) for each in rates]
    right_GYK = np.concatenate((one_GY1, 1 - missed(Miss.AGAIN, again)), -1) if max(redrafted) else one_GY1
    all_right_GYP = np.cumprod(right_GYK, -1)[..., list(redrafted)]
    tokens_GYP = np.cumprod(right_GYK, -1).cumsum(-1)[..., list(redrafted)]
    again_GYP = np.where(np.array(redrafted) > 0, all_right_GYP * whole + (1 - all_right_GYP) * part, restart)
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
