"""How many particles a running group should have, given what there is. The default shrinks populations only where memory is short."""

from __future__ import annotations

from typing import Protocol

from smc.engine.group import Group


class ParticlePolicy(Protocol):
    def wanted(self, group: Group, *, short: bool) -> int:
        """Particles that the group should have after its next round, between its `min_particles` and `particles`; `short`: there are too
        few pages for the rounds of all."""
        ...


class ShrinkWhenShort:
    """Halves a population when memory is short, down to what its request allows."""

    def wanted(self, group: Group, *, short: bool) -> int:
        if not short:
            return group.count
        return max(group.params.least_rows, group.count // 2)
