"""How often drafted tokens are the target's own draws: what has been seen of a request, and what is to be expected of
other trees.

Of a tree of N rows, a token is missing with probability about hazard / N^gain. Knows nothing about costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

WIDTH_GAIN = 0.6
"""Eight rows miss 3.5 times less often than one. On the shipped pair it is 3.7 times at temperature 1, 3.0 at 1.5 and
1.5 at 2 (`python -m benchmarks.exactness misses --problems 24`)."""
PRIOR_MISS_RATE = 0.03
"""Before anything has been seen, as if the draft were a good one: nothing is learnt of one that is never asked."""
PRIOR_WEIGHT = 4.0
"""Tokens of one row that what is known of others counts for."""


@dataclass
class Acceptance:
    """A moving average over rounds."""

    memory: float
    """By which what was seen weighs less after every round."""
    misses: float = 0.0
    exposure: float = 0.0
    """Tokens that were tried, each divided by how much less often the rows that it was tried with miss."""

    def count(self, tried: int, missed: bool, rows: int) -> None:
        """A round whose tree had so many rows: tokens that the target was compared at, of which only the last can have
        been missing."""
        self.misses = self.memory * self.misses + missed
        self.exposure = self.memory * self.exposure + tried / rows**WIDTH_GAIN

    def fade(self, share: float) -> None:
        """So much is left of what was seen; of 0, nothing."""
        self.misses *= share
        self.exposure *= share

    def miss_rate(self, prior: float = PRIOR_MISS_RATE) -> float:
        """Of one row; `prior`: what is expected where little has been seen."""
        return (self.misses + prior * PRIOR_WEIGHT) / (self.exposure + PRIOR_WEIGHT)


def tokens_a_round(miss_rate_G: np.ndarray, rows_GL: np.ndarray, block: int, lookahead: bool) -> np.ndarray:
    """Tokens that a round confirms on average [G, L], of requests with these hazards and trees of so many rows."""
    right_GL = 1 - np.minimum(miss_rate_G[:, None] / rows_GL**WIDTH_GAIN, 1.0)
    reached_GL = sum(right_GL**k for k in range(block))
    if not lookahead:
        return reached_GL + right_GL**block
    # A miss leaves one token to start from: rounds of one token follow until the target's next is among what is
    # drafted.
    whole_GL = right_GL**block
    restarts_GL = (1 - whole_GL) / np.maximum(right_GL, 1e-9)
    return (reached_GL + restarts_GL) / (1 + restarts_GL)
