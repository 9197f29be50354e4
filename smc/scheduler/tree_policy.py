"""How many rows a running group should have, given what there is. The default shrinks populations of SMC only where
memory is short; trees of exact decoding are as costs have it (`smc.scheduler.tree_policy`).

What is drafted for requests of exact decoding, by what it costs and by how often it was right: trees of few rows or
many, or nothing.

A pure function of what it is given. Knows nothing about groups, rounds or answers.

Axes: G requests, L numbers of rows, M rows added one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np

from smc.api.engine_config import EngineConfig
from smc.scheduler.acceptance import tokens_a_round
from smc.scheduler.latency_model import LatencyModel
from smc.scheduler.round_plan import bucket
from smc.scheduler.sequence_group import SequenceGroup


class ParticlePolicy(Protocol):
    def wanted(self, group: SequenceGroup, *, short: bool) -> int:
        """Particles that the group should have after its next round, between its `min_particles` and `particles`;
        `short`: there are too few pages for the rounds of all."""
        ...


class ShrinkWhenShort:
    """Halves a population when memory is short, down to what its request allows."""

    def wanted(self, group: SequenceGroup, *, short: bool) -> int:
        if not short:
            return group.count
        return max(group.params.least_rows, group.count // 2)


@dataclass(frozen=True)
class TreeRequest:
    """What is known of a request of exact decoding."""

    most: int
    """Rows that it may have."""
    miss_rate: float
    """How often the target's draw is not what one row drafted: `smc.scheduler.acceptance`."""
    context: int
    """Tokens of its prompt, and of its answer so far."""
    rows: int = 0
    """That it has; 0: the target decodes it alone."""


@dataclass(frozen=True)
class OtherLoad:
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

    def begin(
        self, tree: TreeRequest, others: Sequence[TreeRequest], beside: OtherLoad, costs: LatencyModel | None
    ) -> int | None:
        """Rows, up to its `most`, that one which is about to start shall have; 0: the target decodes it alone. None: it
        stays as it is."""
        ...

    def change(
        self,
        trees: Sequence[TreeRequest],
        waiting: Sequence[TreeRequest],
        beside: OtherLoad,
        costs: LatencyModel | None,
    ) -> Sequence[int] | None:
        """Rows that each of the running ones shall have from now on. None: all stay as they are. `waiting`: those that
        wait for nothing but slots, of which a tree has one for each row."""
        ...

    def branches(self, places: int, context: int, costs: LatencyModel | None) -> int:
        """F of a round of so many places, all of exact decoding, whose requests have so many tokens of context
        together: at most the config's."""
        ...


FREE = 1.01
"""A round that rows ahead make longer by no more than this has them: for tokens in a hundred that fewer would miss."""
MARGIN = 1.1
"""Tokens a second that larger, smaller or new trees must promise, as a multiple of what is expected as things are."""
SURE = 1.05
"""And that trees must keep promising, as a multiple of plain decoding's: what one cannot be is slower than that, and a
forecast is right to some per cent."""


class CostBasedTreePolicy:
    """As many tokens a second as possible, of all requests together. Where no costs are known, all stay as they are."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._known: tuple[LatencyModel, Forecast] | None = None

    def begin(
        self, tree: TreeRequest, others: Sequence[TreeRequest], beside: OtherLoad, costs: LatencyModel | None
    ) -> int | None:
        if costs is None:
            return None
        forecast, rows = self._forecast(costs), [other.rows for other in others]
        # It does as all do that run: whether all should do otherwise is asked next.
        if rows and not any(rows):
            return 0
        # As many as would be its share if all began now.
        most = forecast.best([*others, tree], beside, self._config.max_slots - beside.slots)[-1]
        if rows and all(rows):
            return most
        alone, drafted = (forecast.speed([*others, tree], [*rows, more], beside) for more in (0, most))
        return most if drafted > SURE * alone else 0

    def change(
        self,
        trees: Sequence[TreeRequest],
        waiting: Sequence[TreeRequest],
        beside: OtherLoad,
        costs: LatencyModel | None,
    ) -> Sequence[int] | None:
        if costs is None:
            return None
        forecast, slots = self._forecast(costs), self._config.max_slots - beside.slots
        # Were all others smaller, those that wait could run, too.
        served = [*trees, *waiting][: max(slots, len(trees))]
        alone, best = [0] * len(served), forecast.best(served, beside, slots)
        speed = forecast.speed(trees, [tree.rows for tree in trees], beside)
        speed_alone, speed_of_best = (forecast.speed(served, rows, beside) for rows in (alone, best))
        if speed_of_best > MARGIN * max(speed, speed_alone):
            return best[: len(trees)]
        drafts = any(tree.rows for tree in trees)
        return alone[: len(trees)] if drafts and SURE * speed_alone > speed else None

    def branches(self, places: int, context: int, costs: LatencyModel | None) -> int:
        return self._config.branches if costs is None else self._forecast(costs).branches(places, context)

    def _forecast(self, costs: LatencyModel) -> Forecast:
        if self._known is None or self._known[0] is not costs:
            self._known = costs, Forecast(self._config, costs)
        return self._known[1]


class Forecast:
    """What rounds take, and bring."""

    def __init__(self, config: EngineConfig, costs: LatencyModel) -> None:
        self._config, self._costs = config, costs
        # As many entries as a round can have rows.
        self._places, self._models = cache(bucket), cache(self._models_of)

    def speed(self, trees: Sequence[TreeRequest], rows: Sequence[int], beside: OtherLoad) -> float:
        """Tokens a second of all requests, with trees of so many rows."""
        config, rows_G, context_G = self._config, np.array(rows), np.array([tree.context for tree in trees])
        drafted_G = rows_G > 0
        miss_rate_G = np.array([tree.miss_rate for tree in trees])[drafted_G]
        confirmed = tokens_a_round(miss_rate_G, rows_G[drafted_G][:, None], config.block, config.lookahead).sum()
        alone = int((~drafted_G).sum()) + beside.target
        tokens = float(confirmed) + alone * config.block + beside.pair * config.target_tokens
        by_itself = self._by_itself(alone, int(context_G[~drafted_G].sum()) + beside.target_context)
        places = self._places(int(rows_G.sum()) + beside.pair_rows)
        context = int(context_G[drafted_G].sum()) + beside.pair_context
        return tokens / (self._seconds(places, context, by_itself, beside.pair > 0) if places else by_itself)

    def best(self, trees: Sequence[TreeRequest], beside: OtherLoad, slots: int) -> list[int]:
        """Rows of each, at least one, and as many as there are slots: more are given to whom they bring most, as long
        as all are the faster for it."""
        config, level_L = self._config, np.array(_levels(max(tree.most for tree in trees)))
        most_G1 = np.array([[tree.most] for tree in trees])
        rows_GL = np.minimum(level_L, most_G1)
        tokens_GL = tokens_a_round(
            np.array([tree.miss_rate for tree in trees]), rows_GL, config.block, config.lookahead
        )
        added_GL, gain_GL = np.diff(rows_GL), np.diff(tokens_GL)
        # Nobody gets the second helping before the first.
        worth_GL = np.minimum.accumulate(gain_GL / np.maximum(added_GL, 1), axis=1)
        order_M = np.argsort(-np.where(added_GL > 0, worth_GL, 0.0), axis=None, kind="stable")
        order_M = order_M[added_GL.flat[order_M] > 0]
        rows_M = len(trees) + np.concatenate(([0], np.cumsum(added_GL.flat[order_M])))
        rows_M = rows_M[: max(1, np.searchsorted(rows_M, slots, side="right"))]
        tokens_M = tokens_GL[:, 0].sum() + np.concatenate(([0.0], np.cumsum(gain_GL.flat[order_M])))[: len(rows_M)]
        tokens_M += beside.pair * config.target_tokens + beside.target * config.block
        speed_M = tokens_M / self._seconds_of_pair(rows_M + beside.pair_rows, trees, beside)
        taken_GL = np.zeros(added_GL.shape, dtype=bool)
        taken_GL.flat[order_M[: int(speed_M.argmax())]] = True
        return (rows_GL[:, 0] + (added_GL * taken_GL).sum(1)).tolist()

    def _seconds_of_pair(self, rows_M: np.ndarray, trees: Sequence[TreeRequest], beside: OtherLoad) -> np.ndarray:
        """Of a round in which all trees are drafted for, by rows of the pair."""
        by_itself = self._by_itself(beside.target, beside.target_context)
        context, mixed = sum(tree.context for tree in trees) + beside.pair_context, beside.pair > 0
        places_M = [self._places(rows) for rows in rows_M.tolist()]
        seconds = {places: self._seconds(places, context, by_itself, mixed) for places in set(places_M)}
        return np.array([seconds[places] for places in places_M])

    def _by_itself(self, sequences: int, context: int) -> float:
        """Of as many passes of the target over what it decodes alone as a block has tokens."""
        return self._config.block * self._costs.alone.at(self._places(sequences), context) if sequences else 0.0

    def branches(self, places: int, context: int) -> int:
        """As many as cost nothing, for the target takes as long: trees are seldom wrong for want of them. On the
        shipped pair, rounds with F=1 confirm 0 to 2% fewer tokens than with F=4 (temperatures 1 to 2, N from 1 to 8;
        `benchmarks.exactness`)."""
        most = self._config.branches
        wide, lean = (self._seconds_of(places, context, 0.0, branches) for branches in (most, 1))
        return most if wide <= FREE * lean else 1

    def _seconds(self, places: int, context: int, by_itself: float, mixed: bool) -> float:
        """From a round of the pair to the next. `mixed`: some rows are of other methods."""
        return self._seconds_of(
            places, context, by_itself, self._config.branches if mixed else self.branches(places, context)
        )

    def _seconds_of(self, places: int, context: int, by_itself: float, branches: int) -> float:
        config, costs = self._config, self._costs
        draft, target = self._models(places, branches)
        draft += config.block * costs.draft.read * context
        target += costs.target.read * context + by_itself
        # What the target decodes alone fits beside the draft's steps in look-ahead only.
        return (max(draft, target) if config.lookahead else draft + target) + costs.round_overhead

    def _models_of(self, places: int, branches: int) -> tuple[float, float]:
        """Seconds of the draft and of the target in a round, but for contexts."""
        config, draft, target = self._config, self._costs.draft.curve, self._costs.target.curve
        steps = draft.at(places) + (config.block - 1) * draft.at(places * branches)
        return steps, target.at(places * config.target_tokens)


def _levels(most: int) -> list[int]:
    """Numbers of rows that are considered: the powers of two, and the largest."""
    return [*(1 << n for n in range((most - 1).bit_length())), most]
