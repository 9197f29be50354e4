"""What one turn of the engine brought, as the coordinator tells it to the gateway. Knows nothing about how it
travels."""

from __future__ import annotations

from dataclasses import dataclass, field

from smc.api.outputs import Output
from smc.scheduler.stats import EngineStats
from smc.scheduler.timeline import RoundTimes


@dataclass(frozen=True)
class Step:
    """What one turn of the loop brought."""

    outputs: list[Output] = field(default_factory=list)
    refusals: dict[str, Exception] = field(default_factory=dict)
    """Why a submission was not taken (ValueError, QueueFull, RequestFailed, Unavailable) or goes no further
    (Unavailable), by id."""
    stats: EngineStats = field(default_factory=EngineStats)
    times: RoundTimes | None = None
    """Where the time of the turn's rounds went; None where that is not known or no model worked."""
    lost_draft: int = 0
    """Epoch of the draft that was lost last; 0 if none was."""
