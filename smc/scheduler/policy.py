"""How many rows a running group should have, given what there is. The default shrinks populations of SMC only where memory is short; trees
of exact decoding are as costs have it (`smc.scheduler.tree_policy`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from smc.scheduler.latency_model import Costs
from smc.scheduler.sequence_group import Group


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


@dataclass(frozen=True)
class Tree:
    """What is known of a request of exact decoding."""

    most: int
    """Rows that it may have."""
    hazard: float
    """How often the target's draw is not what one row drafted: `smc.scheduler.acceptance`."""
    context: int
    """Tokens of its prompt, and of its answer so far."""
    rows: int = 0
    """That it has; 0: the target decodes it alone."""


@dataclass(frozen=True)
class Beside:
    """Other requests, which the models run whatever is decided."""

    pair: int = 0
    """In rounds of the pair."""
    pair_rows: int = 0
    """Their particles."""
    pair_context: int = 0
    """Tokens of their contexts together."""
    target: int = 0
    """That the target decodes by itself."""
    target_context: int = 0
    """Of these."""
    slots: int = 0
    """That all of them hold."""


class TreePolicy(Protocol):
    """Answers do not depend on what it decides."""

    def begin(self, tree: Tree, others: Sequence[Tree], beside: Beside, costs: Costs | None) -> int | None:
        """Rows, up to its `most`, that one which is about to start shall have; 0: the target decodes it alone. None: it stays as it is."""
        ...

    def change(self, trees: Sequence[Tree], waiting: Sequence[Tree], beside: Beside, costs: Costs | None) -> Sequence[int] | None:
        """Rows that each of the running ones shall have from now on. None: all stay as they are. `waiting`: those that wait for nothing but
        slots, of which a tree has one for each row."""
        ...

    def branches(self, places: int, context: int, costs: Costs | None) -> int:
        """F of a round of so many places, all of exact decoding, whose requests have so many tokens of context together: at most the
        config's."""
        ...
