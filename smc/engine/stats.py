"""What an engine tells whoever watches it: its state now, and what happened since it was last asked."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class EngineStats:
    """State after a step, and sums since the stats before."""

    queued: int = 0
    running: int = 0
    """Requests that hold slots."""
    slots_free: int = 0
    pages_reserved: dict[str, int] = field(default_factory=dict)
    pages_total: dict[str, int] = field(default_factory=dict)
    pages_leaked: dict[str, int] = field(default_factory=dict)
    """Pages that a worker, asked while nothing ran, still held. Only whoever runs the workers can fill this in."""
    resamples: int = 0
    collapses: int = 0
    ess_shares: list[float] = field(default_factory=list)
    """ESS / N before resampling, one per SMC request and round."""
    committed_lags: list[int] = field(default_factory=list)
    """Tokens between the committed prefix and the longest particle, one per SMC request and round."""
