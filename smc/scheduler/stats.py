"""What an engine tells whoever watches it: its state now, and what happened since it was last asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from smc.api.sampling_params import VERIFICATIONS
from smc.types import ModelRole

MOST_SAMPLES = 4096
"""Rounds that are remembered one by one between two readings."""


@dataclass
class SpecStats:
    """Rounds of exact decoding with something drafted, since the stats before."""

    rounds: int = 0
    """One for each request that took part."""
    draft_tokens: int = 0
    """Tokens that one path of a tree has, over those rounds."""
    accepted_tokens: int = 0
    """Of those, the ones that were the target's own draws, or kept."""
    accepted_by_position: list[int] = field(default_factory=list)
    """Rounds in which at least so many were, from 1 on."""
    hits: int = 0
    """Rounds after which what had been drafted ahead was right (look-ahead)."""
    misses: int = 0
    rows: int = 0
    """Rows of the trees, or chains, of all those rounds."""

    @property
    def tokens_a_round(self) -> float | None:
        """Confirmed by a pass of the target, on average: a round ends with the target's own draw, unless that had been
        drafted ahead."""
        return (self.accepted_tokens - self.hits) / self.rounds + 1 if self.rounds else None

    def count(self, accepted: int, block: int, rows: int, ahead: bool, hit: bool) -> None:
        """A round: how many drafted tokens were accepted, of `block` at most."""
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
class EngineStats:
    """State after a step, and sums since the stats before."""

    queued: int = 0
    """Requests that wait to be decoded."""
    running: int = 0
    """Requests that hold slots."""
    slots_free: int = 0
    pages_used: dict[ModelRole, int] = field(default_factory=dict)
    """Pages that are not free: of requests, of the prefix cache, or of both."""
    pages_cached: dict[ModelRole, int] = field(default_factory=dict)
    """Positions that the prefix cache keeps, whoever else holds them."""
    pages_total: dict[ModelRole, int] = field(default_factory=dict)
    pages_leaked: dict[ModelRole, int] = field(default_factory=dict)
    """Pages that were held although nothing ran, when that was last seen."""
    prefix_queries: dict[ModelRole, int] = field(default_factory=dict)
    """Prompt tokens that the prefix cache was asked for."""
    prefix_hits: dict[ModelRole, int] = field(default_factory=dict)
    """Of those, the ones that it had."""
    preemptions: int = 0
    """Requests that gave up their memory to others, and were or will be taken up again."""
    shrinks: int = 0
    """Populations that were made smaller for want of memory."""
    resamples: int = 0
    collapses: int = 0
    ess_shares: list[float] = field(default_factory=list)
    """ESS / N before resampling, one per SMC request of independent particles and round."""
    committed_lags: list[int] = field(default_factory=list)
    """Tokens between the committed prefix and the longest particle, one per SMC request and round."""

    spec: dict[str, SpecStats] = field(default_factory=lambda: {name: SpecStats() for name in VERIFICATIONS})
    """By verification."""
    spec_alone_rounds: int = 0
    """Rounds of requests of exact decoding in which nothing was drafted."""

    def count_round(self, ess_share: float | None, lag: int, resampled: bool, collapsed: bool) -> None:
        """A round of SMC. `ess_share`: None of distinct particles, whose weights are as unequal as the law that they
        are drawn from."""
        if ess_share is not None:
            self.ess_shares.append(ess_share)
        self.committed_lags.append(lag)
        self.resamples += resampled
        self.collapses += collapsed
        if len(self.committed_lags) > 2 * MOST_SAMPLES:
            # Nobody reads them: the newest are enough.
            del self.ess_shares[:-MOST_SAMPLES], self.committed_lags[:-MOST_SAMPLES]
