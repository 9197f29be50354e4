"""Accuracy with its confidence interval. Knows nothing about models."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Accuracy:
    """Number of problems solved, of all problems."""

    correct: int
    count: int

    @property
    def share(self) -> float:
        return self.correct / self.count

    @property
    def interval(self) -> tuple[float, float]:
        """95% Wilson score interval of the share."""
        z, n, p = 1.96, self.count, self.share
        middle, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, middle - spread) / (1 + z * z / n), min(1 + z * z / n, middle + spread) / (1 + z * z / n)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.share:.1%} ({self.correct} of {self.count}; 95% interval {low:.1%} to {high:.1%})"
