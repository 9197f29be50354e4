"""What a gateway is told of the engine behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from smc.scheduler.stats import EngineStats
from smc.types import ModelRole


@dataclass(frozen=True)
class ServiceStatus:
    """What only who runs the workers knows."""

    epoch: int
    """Grows by one with every restart of the workers."""
    running: int
    """Requests that hold slots."""
    queued: int
    tokens_held: int = 0
    """Positions that requests hold in the fuller of the two KV pools; what the prefix cache keeps can be let go, and
    does not count."""
    tokens_room: int = 0
    """Positions of that pool; 0 before the first step."""
    pages: Mapping[ModelRole, int] = field(default_factory=dict)
    """KV pages of each model; empty until the workers have said."""

    @staticmethod
    def of(epoch: int, stats: EngineStats) -> ServiceStatus:
        held = {role: max(0, stats.pages_used[role] - stats.pages_cached.get(role, 0)) for role in stats.pages_total}
        fullest = max(held, key=lambda role: held[role] / stats.pages_total[role], default=ModelRole.TARGET)
        room = stats.pages_total.get(fullest, 0)
        return ServiceStatus(epoch, stats.running, stats.queued, held.get(fullest, 0), room, stats.pages_total)
