"""Acceptance of drafted tokens: how often they are the target's own draws, as seen of a request, and what other trees
would bring.

A token at depth d, after d that were right, is missing from a tree of N rows with probability about miss rate / N^gain;
each depth has a miss rate of its own. Knows nothing about latency.

Axes: G requests, L numbers of rows, D depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

WIDTH_GAIN = 0.6
"""Eight rows miss 3.5 times less often than one. On the shipped pair it is 3.7 times at temperature 1, 3.0 at 1.5 and
1.5 at 2 (`python -m benchmarks.exactness misses --problems 24`)."""
PRIOR_MISS_RATE = 0.03
"""Miss rate before anything has been seen, that of a good draft: a draft that is never asked cannot be measured."""
PRIOR_WEIGHT = 4.0
"""Tokens of one row that the prior counts for."""
UNTRIED = 0.1
"""Share of a round by which a depth that the round did not reach is forgotten. Where little is drafted, deep tokens are
rarely tried: the engine remembers their miss rates for many rounds, and forgets them in the end."""
PRIOR_RECOVERY = 0.3
"""Share of the rounds in which a block missed a token, and rows ahead from an inner node go on, before anything has been
seen."""


@dataclass
class Acceptance:
    """A moving average over rounds."""

    memory: float
    """Weight that earlier rounds keep after every round."""
    misses_D: list[float] = field(default_factory=list)
    """Of tokens at each depth that was tried, those that were missing."""
    exposure_D: list[float] = field(default_factory=list)
    """Tokens that were tried, each divided by how much less often its tree of rows misses than one row."""
    broken: float = 0.0
    """Rounds in which a block missed a token (look-ahead)."""
    recovered: float = 0.0
    """Those of them after which rows ahead from an inner node go on."""

    def count(self, tried: int, missed: bool, rows: int) -> None:
        """Count a round whose tree had so many rows and in which so many tokens were tried: only the last can have been
        missing."""
        new, share = max(0, tried - len(self.misses_D)), rows**-WIDTH_GAIN
        untried = max(0, len(self.misses_D) - tried)
        kept_D = [self.memory] * tried + [self.memory**UNTRIED] * untried
        self.misses_D = [kept * value for kept, value in zip(kept_D, self.misses_D + [0.0] * new)]
        self.exposure_D = [
            kept * value + share * (depth < tried)
            for depth, (kept, value) in enumerate(zip(kept_D, self.exposure_D + [0.0] * new))
        ]
        if tried:
            self.misses_D[tried - 1] += missed

    def count_broken(self, recovered: bool) -> None:
        """Count a look-ahead round in which the block missed a token, and whether rows ahead go on."""
        self.broken, self.recovered = self.memory * self.broken + 1, self.memory * self.recovered + recovered

    def fade(self, share: float) -> None:
        """Keep only this share of what was seen."""
        self.misses_D = [share * value for value in self.misses_D] if share else []
        self.exposure_D = [share * value for value in self.exposure_D] if share else []
        self.broken *= share
        self.recovered *= share

    def miss_rates(self, prior_D: Sequence[float] = (PRIOR_MISS_RATE,)) -> tuple[float, ...]:
        """Probabilities that a token is missing from one row, by depth; below the last, as there. `prior`: likewise,
        their values where little has been seen. Where a depth is better or worse than its prior, so are those below
        it, until they have been seen."""
        rates: list[float] = []
        ratio = 1.0
        for depth in range(max(len(self.misses_D), len(prior_D))):
            misses, exposure = (
                values_D[depth] if depth < len(values_D) else 0.0 for values_D in (self.misses_D, self.exposure_D)
            )
            prior = prior_D[min(depth, len(prior_D) - 1)]
            rate = (misses + ratio * prior * PRIOR_WEIGHT) / (exposure + PRIOR_WEIGHT)
            rates.append(rate)
            ratio = rate / prior if prior else 1.0
        return tuple(rates)

    def recovery(self, prior: float = PRIOR_RECOVERY) -> float:
        """Probability that rows ahead go on after a block that missed a token."""
        return (self.recovered + prior * PRIOR_WEIGHT) / (self.broken + PRIOR_WEIGHT)


def tokens_a_round(
    miss_rate_GD: np.ndarray, rows_GL: np.ndarray, block: int, lookahead: bool, recovery_G: np.ndarray | float = 0.0
) -> np.ndarray:
    """Tokens that a round of `block` drafted tokens confirms on average [G, L], of requests with these miss rates by
    depth, recoveries and trees of so many rows."""
    right_GLD = 1 - np.minimum(miss_rate_GD[:, None, :block] / rows_GL[:, :, None] ** WIDTH_GAIN, 1.0)
    all_right_GLD = np.cumprod(right_GLD, axis=2)
    if not lookahead:
        return 1 + all_right_GLD.sum(2)
    # After a miss, rounds confirm one token each until the target's next token is among the drafted ones.
    recovery_G1 = np.broadcast_to(recovery_G, len(miss_rate_GD))[:, None]
    before_last_GL = all_right_GLD[:, :, -2] if block > 1 else 1.0
    hits_GL = all_right_GLD[:, :, -1] + (1 - before_last_GL) * recovery_G1
    restarts_GL = (1 - hits_GL) / np.maximum(right_GLD[:, :, 0], 1e-9)
    return (1 + all_right_GLD[:, :, :-1].sum(2) + restarts_GL) / (1 + restarts_GL)
