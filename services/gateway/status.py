"""The state of the service: that of every worker group, and what follows from all of them together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from smc.scheduler.stats import EngineStats
from smc.types import ModelRole, Numerics


@dataclass(frozen=True)
class WorkerGroupStatus:
    """State of one worker group, from its supervisor."""

    incarnation: int
    """Grows by one with every start of all its processes, or of its draft alone."""
    stats: EngineStats = field(default_factory=EngineStats)
    has_target: bool = True
    """Whether it decodes."""
    has_draft: bool = True
    draft_degree: int = 0
    """Number of ranks among which the draft is divided; 0 before the first start."""

    def document(self) -> dict[str, Any]:
        """Return the state as JSON for users."""
        running, waiting = self.stats.running, self.stats.queued
        return {"serving": self.has_target, "has_draft": self.has_draft, "running": running, "waiting": waiting}

    @property
    def tokens(self) -> tuple[int, int]:
        """Positions that requests hold in the fuller of the two KV pools, and positions of that pool: 0 before the
        first step. Positions in the prefix cache do not count, because they can be released."""
        used, cached, total = self.stats.pages_used, self.stats.pages_cached, self.stats.pages_total
        held = {role: max(0, used[role] - cached.get(role, 0)) for role in total}
        fullest = max(held, key=lambda role: held[role] / total[role], default=ModelRole.TARGET)
        return held.get(fullest, 0), total.get(fullest, 0)


@dataclass(frozen=True)
class ServiceStatus:
    """State of all worker groups, in order."""

    groups: tuple[WorkerGroupStatus, ...]

    @property
    def incarnation(self) -> int:
        """Grows by one with every start of a worker group, or of a draft alone."""
        return sum(group.incarnation for group in self.groups)

    @property
    def running(self) -> int:
        """Requests that hold slots."""
        return sum(group.stats.running for group in self.groups)

    @property
    def queued(self) -> int:
        return sum(group.stats.queued for group in self.groups)

    @property
    def tokens(self) -> tuple[int, int]:
        """See `WorkerGroupStatus.tokens`. Those of worker groups that do not serve do not count."""
        tokens = [group.tokens for group in self.groups if group.has_target]
        return sum(held for held, _ in tokens), sum(room for _, room in tokens)

    @property
    def num_serving(self) -> int:
        """Number of worker groups that decode."""
        return sum(group.has_target for group in self.groups)

    @property
    def pages(self) -> dict[ModelRole, int]:
        """KV pages that a request can have, of each model: those of the smallest pool. Empty until a worker group has
        reported them."""
        totals = [group.stats.pages_total for group in self.groups if group.stats.pages_total]
        return {role: min(total[role] for total in totals) for role in totals[0]} if totals else {}

    @property
    def draft_degree(self) -> int:
        """Number of ranks among which the draft is divided, in the first worker group that has started; 0 before."""
        return next((group.draft_degree for group in self.groups if group.draft_degree), 0)

    @property
    def numerics(self) -> Numerics | None:
        """What the bits of results depend on: invariant if every model of every worker group runs so. None until a
        worker group has reported it."""
        found = [one for group in self.groups for one in group.stats.numerics.values()]
        if not found:
            return None
        return Numerics.INVARIANT if set(found) == {Numerics.INVARIANT} else Numerics.FASTEST
