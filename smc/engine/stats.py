"""What an engine tells whoever watches it: its state now, and what happened since it was last asked."""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_SAMPLES = 4096
"""Rounds that are remembered one by one between two readings."""


@dataclass
class EngineStats:
    """State after a step, and sums since the stats before."""

    queued: int = 0
    running: int = 0
    """Requests that hold slots."""
    slots_free: int = 0
    pages_used: dict[str, int] = field(default_factory=dict)
    """Pages that are not free: of requests, of the prefix cache, or of both."""
    pages_cached: dict[str, int] = field(default_factory=dict)
    """Positions that the prefix cache keeps, whoever else holds them."""
    pages_total: dict[str, int] = field(default_factory=dict)
    pages_leaked: dict[str, int] = field(default_factory=dict)
    """Pages that were held although nothing ran, when that was last seen."""
    prefix_queries: dict[str, int] = field(default_factory=dict)
    """Prompt tokens that the prefix cache was asked for."""
    prefix_hits: dict[str, int] = field(default_factory=dict)
    """Of those, the ones that it had."""
    preemptions: int = 0
    """Requests that gave up their memory to others, and were or will be taken up again."""
    shrinks: int = 0
    """Populations that were made smaller for want of memory."""
    resamples: int = 0
    collapses: int = 0
    ess_shares: list[float] = field(default_factory=list)
    """ESS / N before resampling, one per SMC request and round."""
    committed_lags: list[int] = field(default_factory=list)
    """Tokens between the committed prefix and the longest particle, one per SMC request and round."""

    def count_round(self, ess_share: float, lag: int, resampled: bool, collapsed: bool) -> None:
        self.ess_shares.append(ess_share)
        self.committed_lags.append(lag)
        self.resamples += resampled
        self.collapses += collapsed
        if len(self.ess_shares) > 2 * MOST_SAMPLES:
            # Nobody reads them: the newest are enough.
            del self.ess_shares[:-MOST_SAMPLES], self.committed_lags[:-MOST_SAMPLES]
