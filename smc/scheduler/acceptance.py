"""Acceptance of drafted tokens: how often they are the target's own draws, as seen of a request, and what other trees
would bring.

A token is missing from a tree of N rows with probability about miss rate / N^gain. Knows nothing about latency.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

WIDTH_GAIN = 0.6
"""Eight rows miss 3.5 times less often than one. On the shipped pair it is 3.7 times at temperature 1, 3.0 at 1.5 and
1.5 at 2 (`python -m benchmarks.exactness misses --problems 24`)."""
PRIOR_MISS_RATE = 0.03
"""Miss rate before anything has been seen, that of a good draft: a draft that is never asked cannot be measured."""
PRIOR_WEIGHT = 4.0
"""Tokens of one row that the prior counts for."""


@dataclass
class Acceptance:
    """A moving average over rounds."""

    memory: float
    """Weight that earlier rounds keep after every round."""
    misses: float = 0.0
    exposure: float = 0.0
    """Tokens that were tried, each divided by how much less often its tree of rows misses than one row."""

    def count(self, tried: int, missed: bool, rows: int) -> None:
        """Count a round whose tree had so many rows and in which so many tokens were tried: only the last can have been
        missing."""
        self.misses = self.memory * self.misses + missed
        self.exposure = self.memory * self.exposure + tried / rows**WIDTH_GAIN

    def fade(self, share: float) -> None:
        """Keep only this share of what was seen."""
        self.misses *= share
        self.exposure *= share

    def miss_rate(self, prior: float = PRIOR_MISS_RATE) -> float:
        """Probability that a token is missing from one row; `prior`: its value where little has been seen."""
        return (self.misses + prior * PRIOR_WEIGHT) / (self.exposure + PRIOR_WEIGHT)


def tokens_a_round(miss_rate_G: np.ndarray, rows_GL: np.ndarray, block: int, lookahead: bool) -> np.ndarray:
    """Tokens that a round confirms on average [G, L], of requests with these miss rates and trees of so many rows."""
    right_GL = 1 - np.minimum(miss_rate_G[:, None] / rows_GL**WIDTH_GAIN, 1.0)
    reached_GL = sum(right_GL**k for k in range(block))
    if not lookahead:
        return reached_GL + right_GL**block
    # After a miss, rounds confirm one token each until the target's next token is among the drafted ones.
    whole_GL = right_GL**block
    restarts_GL = (1 - whole_GL) / np.maximum(right_GL, 1e-9)
    return (reached_GL + restarts_GL) / (1 + restarts_GL)
