"""What is drafted for requests of exact decoding, by what it costs and by how often it was right: trees of few rows or many, or nothing.

A pure function of what it is given. Knows nothing about groups, rounds or answers.

Axes: G requests, L numbers of rows, M rows added one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from smc.engine.acceptance import tokens_a_round
from smc.engine.costs import Costs
from smc.engine.policy import Beside, Tree
from smc.engine.rounds import bucket
from smc.runtime.config import EngineConfig

FREE = 1.01
"""A round that rows ahead make longer by no more than this has them: for tokens in a hundred that fewer would miss."""
MARGIN = 1.1
"""Tokens a second that larger, smaller or new trees must promise, as a multiple of what is expected as things are. To stop drafting, more
will do: what one cannot be is slower than plain decoding."""


class CostsDecide:
    """As many tokens a second as possible, of all requests together. Where no costs are known, all stay as they are."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._known: tuple[Costs, Forecast] | None = None

    def begin(self, tree: Tree, others: Sequence[Tree], beside: Beside, costs: Costs | None) -> int | None:
        if costs is None:
            return None
        forecast, rows = self._forecast(costs), [other.rows for other in others]
        # It does as all do that run: whether all should do otherwise is asked next.
        options = [0, *_levels(tree.most)]
        if all(rows) != (not any(rows)):
            options = options[1:] if all(rows) else [0]
        return options[int(np.argmax([forecast.speed([*others, tree], [*rows, more], beside) for more in options]))]

    def change(self, trees: Sequence[Tree], waiting: Sequence[Tree], beside: Beside, costs: Costs | None) -> Sequence[int] | None:
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
        return alone[: len(trees)] if speed_alone > speed else None

    def branches(self, places: int, costs: Costs | None) -> int:
        return self._config.branches if costs is None else self._forecast(costs).branches(places)

    def _forecast(self, costs: Costs) -> Forecast:
        if self._known is None or self._known[0] is not costs:
            self._known = costs, Forecast(self._config, costs)
        return self._known[1]


class Forecast:
    """What rounds take, and bring."""

    def __init__(self, config: EngineConfig, costs: Costs) -> None:
        self._config, self._overhead = config, costs.round_overhead
        self._step, self._pass = cache(costs.draft_step), cache(costs.target_pass)
        self._seconds, self.branches = cache(self._seconds_of), cache(self._branches_of)

    def speed(self, trees: Sequence[Tree], rows: Sequence[int], beside: Beside) -> float:
        """Tokens a second of all requests, with trees of so many rows."""
        config, rows_G = self._config, np.array(rows)
        drafted_G = rows_G > 0
        hazard_G = np.array([tree.hazard for tree in trees])[drafted_G]
        confirmed = tokens_a_round(hazard_G, rows_G[drafted_G][:, None], config.block, config.lookahead).sum()
        alone = int((~drafted_G).sum()) + beside.target
        tokens = confirmed + alone * config.block + beside.pair * config.target_tokens
        return float(tokens) / self.seconds(int(rows_G.sum()) + beside.pair_rows, alone, beside.pair > 0)

    def best(self, trees: Sequence[Tree], beside: Beside, slots: int) -> list[int]:
        """Rows of each, at least one, and as many as there are slots: more are given to whom they bring most, as long as all are the faster
        for it."""
        config, level_L = self._config, np.array(_levels(max(tree.most for tree in trees)))
        most_G1 = np.array([[tree.most] for tree in trees])
        rows_GL = np.minimum(level_L, most_G1)
        tokens_GL = tokens_a_round(np.array([tree.hazard for tree in trees]), rows_GL, config.block, config.lookahead)
        added_GL, gain_GL = np.diff(rows_GL), np.diff(tokens_GL)
        # Nobody gets the second helping before the first.
        worth_GL = np.minimum.accumulate(gain_GL / np.maximum(added_GL, 1), axis=1)
        order_M = np.argsort(-np.where(added_GL > 0, worth_GL, 0.0), axis=None, kind="stable")
        order_M = order_M[added_GL.flat[order_M] > 0]
        rows_M = len(trees) + np.concatenate(([0], np.cumsum(added_GL.flat[order_M])))
        rows_M = rows_M[: max(1, np.searchsorted(rows_M, slots, side="right"))]
        tokens_M = tokens_GL[:, 0].sum() + np.concatenate(([0.0], np.cumsum(gain_GL.flat[order_M])))[: len(rows_M)]
        tokens_M += beside.pair * config.target_tokens + beside.target * config.block
        speed_M = tokens_M / np.array([self.seconds(rows, beside.target, beside.pair > 0) for rows in (rows_M + beside.pair_rows).tolist()])
        taken_GL = np.zeros(added_GL.shape, dtype=bool)
        taken_GL.flat[order_M[: int(speed_M.argmax())]] = True
        return (rows_GL[:, 0] + (added_GL * taken_GL).sum(1)).tolist()

    def seconds(self, rows: int, alone: int, mixed: bool) -> float:
        """From a round to the next: of the pair, with so many rows, and of so many sequences that the target decodes alone. `mixed`: some
        rows are of other methods."""
        places = bucket(rows) if rows else 0
        branches = self._config.branches if mixed else self.branches(places)
        return self._seconds(places, bucket(alone) if alone else 0, branches)

    def _branches_of(self, places: int) -> int:
        """As many as cost nothing, for the target takes as long: trees are seldom wrong for want of them. On the shipped pair, rounds with
        F=1 confirm 0 to 2% fewer tokens than with F=4 (temperatures 1 to 2, N from 1 to 8; `tests.engine.confirmed_tokens`)."""
        most = self._config.branches
        return most if self._seconds(places, 0, most) <= FREE * self._seconds(places, 0, 1) else 1

    def _seconds_of(self, places: int, alone: int, branches: int) -> float:
        config = self._config
        by_itself = config.block * self._pass(alone) if alone else 0.0
        if not places:
            return by_itself
        draft = self._step(places) + (config.block - 1) * self._step(places * branches)
        target = self._pass(places * config.target_tokens)
        # What the target decodes alone fits beside the draft's steps in look-ahead only.
        both = max(draft, target + by_itself) if config.lookahead else draft + target + by_itself
        return both + self._overhead


def _levels(most: int) -> list[int]:
    """Numbers of rows that are considered: the powers of two, and the largest."""
    return [*(1 << n for n in range((most - 1).bit_length())), most]
