"""How long drafting takes and how many tokens it brings.

**Latency model**: seconds of a draft step and of a target pass, as curves through measured points, and the additional
seconds for reading contexts. It knows nothing about how they were measured.

**Acceptance** of drafted tokens: how often they equal the target's own draws in a request, and how many tokens trees of
other sizes would bring. After d accepted tokens, the next one is missing from a tree of N rows with probability about
miss rate / N^gain; each depth has a miss rate of its own. The gain follows from how the draft ranks the target's draws:
how often the draft's first token is wrong, and how often its first four are. Exponents of coupled drafting
(`smc.algorithm.coupling`) are learnt from the same draws: one for each temperature, fitted to all requests, and one for
each request, which starts from that of its temperature.

In rates and numbers of tokens, F are numbers of rows and K depths of a tree."""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

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
UNTRIED = 0.1
"""Share of a round by which a depth that the round did not reach is forgotten. If little is drafted, deep tokens are
rarely tried: their miss rates are then remembered for many rounds, but not for ever."""
FORGOTTEN = 1e-3
"""Number of tried tokens for a width of trees below which the width is dropped."""
PRIOR_RECOVERY = 0.3
"""Recovery before anything was observed: the share of rounds with a missed token after which rows drafted ahead from an
inner node continue."""
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

    def __post_init__(self) -> None:
        if not 0 <= self.round_overhead < math.inf:
            raise ValueError(f"round_overhead={self.round_overhead!r}; allowed: finite, >= 0")

    @property
    def parts(self) -> dict[str, ModelLatency]:
        return {name: getattr(self, name) for name in PARTS}

    def to_json(self) -> str:
        parts = {name: {"points": part.curve.points, "read": part.read} for name, part in self.parts.items()}
        return json.dumps(parts | {"round_overhead": self.round_overhead})

    @staticmethod
    def from_json(text: str) -> LatencyModel:
        """Parse the output of `to_json`. Raises ValueError, KeyError or TypeError for other text."""
        found = json.loads(text)
        parts = {
            name: ModelLatency(LatencyCurve(tuple(map(tuple, found[name]["points"]))), found[name]["read"])
            for name in PARTS
        }
        return LatencyModel(**parts, round_overhead=found["round_overhead"])

    def __str__(self) -> str:
        return f"ms of {'; '.join(map(self._describe, PARTS))}; {1e3 * self.round_overhead:.2f} ms a round besides"

    def _describe(self, name: str) -> str:
        part = self.parts[name]
        points = ", ".join(f"{size}: {1e3 * seconds:.2f}" for size, seconds in part.curve.points)
        return f"{NAMES[name]} {points}, and {1e9 * part.read:.0f} ns a token of context"


@dataclass
class Acceptance:
    """How often drafted tokens are accepted, as moving averages over rounds."""

    memory: float
    """Weight that earlier rounds keep after every round."""
    misses_K: list[float] = field(default_factory=list)
    """Missing tokens at each depth that was tried."""
    tried_K: list[dict[int, float]] = field(default_factory=list)
    """Tried tokens at each depth, by the number of rows of their tree, rounded up to a power of two."""
    missed_first: float = 0.0
    """Draws of the target that were not the draft's first token."""
    missed_wide: float = 0.0
    """Draws of the target that were none of the draft's first `WIDE_TOKENS` tokens."""
    broken: float = 0.0
    """Rounds in which a block missed a token (look-ahead)."""
    recovered: float = 0.0
    """Rounds in which a block missed a token and rows drafted ahead from an inner node continue."""

    def count(self, tried: int, missed: bool, rows: int) -> None:
        """Count a round whose tree had `rows` rows and in which `tried` tokens were tried. `missed`: whether the last
        of them was missing; the ones before were not."""
        width = 1 << (rows - 1).bit_length()
        for depth in range(max(tried, len(self.misses_K))):
            if depth == len(self.misses_K):
                self.misses_K.append(0.0)
                self.tried_K.append({})
            kept, of_depth = self.memory if depth < tried else self.memory**UNTRIED, self.tried_K[depth]
            self.misses_K[depth] *= kept
            for each, weight in list(of_depth.items()):
                if weight * kept > FORGOTTEN:
                    of_depth[each] = weight * kept
                else:
                    del of_depth[each]
            if depth < tried:
                of_depth[width] = of_depth.get(width, 0.0) + 1
        if tried:
            self.misses_K[tried - 1] += missed

    def count_rank(self, rank: float) -> None:
        """Count a draw of the target. `rank`: number of tokens that the draft ranked above it."""
        self.missed_first = self.memory * self.missed_first + (rank >= 1)
        self.missed_wide = self.memory * self.missed_wide + (rank >= WIDE_TOKENS)

    def gain(self) -> float:
        """Return the gain: trees of N rows miss N^gain times less often than one row."""
        missed = self.missed_first + PRIOR_MISSES
        still_missed = self.missed_wide + PRIOR_MISSES * WIDE**-WIDTH_GAIN
        return min(math.log(missed / still_missed) / math.log(WIDE), MOST_GAIN)

    def count_broken(self, recovered: bool) -> None:
        """Count a look-ahead round in which the block missed a token. `recovered`: whether rows drafted ahead
        continue."""
        self.broken, self.recovered = self.memory * self.broken + 1, self.memory * self.recovered + recovered

    def fade(self, share: float) -> None:
        """Keep only this share of all counts."""
        self.misses_K = [share * value for value in self.misses_K] if share else []
        self.tried_K = (
            [{rows: share * tried for rows, tried in of_depth.items()} for of_depth in self.tried_K] if share else []
        )
        self.missed_first *= share
        self.missed_wide *= share
        self.broken *= share
        self.recovered *= share

    def miss_rates(self, prior_K: Sequence[float] = (PRIOR_MISS_RATE,), gain: float = WIDTH_GAIN) -> tuple[float, ...]:
        """Return the probabilities, by depth, that a token is missing from one row; at greater depths the last one
        applies. `prior_K`: likewise, the values where little was observed. If a depth is better or worse than its
        prior, so are greater depths until they are observed. `gain`: that of trees with more rows."""
        rates: list[float] = []
        ratio, share = 1.0, cache(lambda rows: rows**-gain)
        for depth in range(max(len(self.misses_K), len(prior_K))):
            is_known = depth < len(self.misses_K)
            misses, of_depth = (self.misses_K[depth], self.tried_K[depth]) if is_known else (0.0, {})
            # Number of tokens of one row with the same expected number of misses.
            exposure = sum(tried * share(rows) for rows, tried in of_depth.items())
            prior = prior_K[min(depth, len(prior_K) - 1)]
            rate = (misses + ratio * prior * PRIOR_WEIGHT) / (exposure + PRIOR_WEIGHT)
            rates.append(rate)
            ratio = rate / prior if prior else 1.0
        return tuple(rates)

    def recovery(self, prior: float = PRIOR_RECOVERY) -> float:
        """Return the probability that rows drafted ahead continue after a block that missed a token."""
        return (self.recovered + prior * PRIOR_WEIGHT) / (self.broken + PRIOR_WEIGHT)


def tokens_a_round(
    miss_rate_GK: np.ndarray,
    rows_GF: np.ndarray,
    block: int,
    lookahead: bool,
    recovery_G: np.ndarray | float = 0.0,
    gain_G: np.ndarray | float = WIDTH_GAIN,
) -> np.ndarray:
    """Return the average number of tokens that a round confirms [G, F]. `miss_rate_GK`: miss rates of each request by
    depth; `rows_GF`: rows of its tree; `block`: drafted tokens of a row; recoveries and gains as in `Acceptance`."""
    gain_G1 = np.broadcast_to(gain_G, len(miss_rate_GK))[:, None]
    right_GFK = 1 - np.minimum(miss_rate_GK[:, None, :block] / (rows_GF**gain_G1)[:, :, None], 1.0)
    all_right_GFK = np.cumprod(right_GFK, axis=2)
    if not lookahead:
        return 1 + all_right_GFK.sum(2)
    # After a miss, rounds confirm one token each until the target's next token is among the drafted ones.
    recovery_G1 = np.broadcast_to(recovery_G, len(miss_rate_GK))[:, None]
    before_last_GF = all_right_GFK[:, :, -2] if block > 1 else 1.0
    hits_GF = all_right_GFK[:, :, -1] + (1 - before_last_GF) * recovery_G1
    restarts_GF = (1 - hits_GF) / np.maximum(right_GFK[:, :, 0], 1e-9)
    return (1 + all_right_GFK[:, :, :-1].sum(2) + restarts_GF) / (1 + restarts_GF)


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
