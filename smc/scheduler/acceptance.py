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
PRIOR_RECOVERY = 0.3
"""Share of the rounds in which a block missed a token, and rows ahead from an inner node go on, before anything has been
seen."""


@dataclass
class Acceptance:
    """A moving average over rounds."""

    memory: float
    """Weight that earlier rounds keep after every round."""
    misses: float = 0.0
    exposure: float = 0.0
    """Tokens that were tried, each divided by how much less often its tree of rows misses than one row."""
    broken: float = 0.0
    """Rounds in which a block missed a token (look-ahead)."""
    recovered: float = 0.0
    """Those of them after which rows ahead from an inner node go on."""

    def count(self, tried: int, missed: bool, rows: int) -> None:
        """Count a round whose tree had so many rows and in which so many tokens were tried: only the last can have been
        missing."""
        self.misses = self.memory * self.misses + missed
        self.exposure = self.memory * self.exposure + tried / rows**WIDTH_GAIN

    def count_broken(self, recovered: bool) -> None:
        """Count a look-ahead round in which the block missed a token, and whether rows ahead go on."""
        self.broken, self.recovered = self.memory * self.broken + 1, self.memory * self.recovered + recovered

    def fade(self, share: float) -> None:
        """Keep only this share of what was seen."""
        self.misses *= share
        self.exposure *= share
        self.broken *= share
        self.recovered *= share

    def miss_rate(self, prior: float = PRIOR_MISS_RATE) -> float:
        """Probability that a token is missing from one row; `prior`: its value where little has been seen."""
        return (self.misses + prior * PRIOR_WEIGHT) / (self.exposure + PRIOR_WEIGHT)

    def recovery(self, prior: float = PRIOR_RECOVERY) -> float:
        """Probability that rows ahead go on after a block that missed a token."""
        return (self.recovered + prior * PRIOR_WEIGHT) / (self.broken + PRIOR_WEIGHT)


def tokens_a_round(
    miss_rate_G: np.ndarray, rows_GL: np.ndarray, block: int, lookahead: bool, recovery_G: np.ndarray | float = 0.0
) -> np.ndarray:
    """Tokens that a round confirms on average [G, L], of requests with these miss rates, recoveries and trees of so many
    rows."""
    right_GL = 1 - np.minimum(miss_rate_G[:, None] / rows_GL**WIDTH_GAIN, 1.0)
    reached_GL = sum(right_GL**k for k in range(block))
    if not lookahead:
        return reached_GL + right_GL**block
    # After a miss, rounds confirm one token each until the target's next token is among the drafted ones.
    recovery_G1 = np.broadcast_to(recovery_G, miss_rate_G.shape)[:, None]
    hits_GL = right_GL**block + (1 - right_GL ** (block - 1)) * recovery_G1
    restarts_GL = (1 - hits_GL) / np.maximum(right_GL, 1e-9)
    return (reached_GL + restarts_GL) / (1 + restarts_GL)
