"""The policy for the number of rows of trees of exact decoding.

The policy compares the latency model with the miss rate of the draft and chooses small trees, large trees, or no
drafting. It is a pure function of its arguments; it knows nothing about slots, rounds or answers. `TreeController`
calls the policy, and `DraftFallback` carries out the switches between the draft-target pair and the target alone.

Local axes: Y sizes of rounds, U pairs of a number of rows and one of branches, Z rows that are added one after another.
F and R are numbers of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from smc.api.engine_config import PATHS, EngineConfig
from smc.scheduler.methods import TARGET_ALONE, DecodingRules, fixed_steps
from smc.scheduler.planner import DraftSize, bucket, coarse_bucket, node_room
from smc.scheduler.prefill import PrefillManager
from smc.scheduler.preparation import Preparation
from smc.scheduler.queue import RequestRegistry
from smc.scheduler.sequence_group import ADMITTED, QUEUED, SequenceGroup
from smc.scheduler.speculation import (
    Acceptance,
    Confirmed,
    LatencyCurve,
    LatencyModel,
    MissRates,
    rates_of_requests,
    tokens_a_round,
)
from smc.types import BOTH_MODELS, Decoding, ModelRole

MARGIN = 1.1
"""Throughput that new trees must promise, as a multiple of plain decoding's."""
CHANGE = 1.03
"""Throughput that new trees must promise, as a multiple of that of the present trees. A change costs a request about a
round."""
SURE = 1.05
"""Throughput that trees must keep promising, as a multiple of plain decoding's. Forecasts err by some per cent, and
drafting must not be slower than plain decoding."""
EVERY = 8
"""Steps between two calls of the policy about the same requests."""
FIRST = 3
"""Steps between the first and the second call about new requests: a useless draft shows in its first rounds."""
REST = 16
"""Steps without a call after a change, so that its effect can show, unless fewer than half of the requests remain."""
FADE = 0.999
"""Share of the acceptance counts that is left after each step in which nothing is drafted, and so nothing is learnt: a
draft that was bad for earlier requests is tried again after thousands of steps."""
AT_ONCE = 8
"""Requests for which every round chooses how much it drafts; with n times as many, a choice stays for n + 1 rounds, and
for others that have as many rows. Of more requests, one that comes or goes does not call the policy either."""
MOST_SIZES = 16
"""Maximum number of such choices that are kept: those of the micro-batches, and of requests that come and go."""


@dataclass(frozen=True)
class TreeRequest:
    """The properties of a request of exact decoding that a policy uses."""

    most: int
    """Maximum number of rows of the tree."""
    rates: MissRates
    """How often the draft misses what the target draws in this request."""
    context: int
    """Tokens of the prompt and of the answer so far."""
    rows: int = 0
    """Current number of rows of the tree; 0: the target decodes the request alone."""


@dataclass(frozen=True)
class OtherLoad:
    """Requests that the models run whatever the policy decides."""

    pair: int = 0
    """Requests in rounds of the draft-target pair."""
    pair_rows: int = 0
    """Particles of the requests in rounds of the pair."""
    pair_context: int = 0
    """Context tokens of the requests in rounds of the pair."""
    pair_decodings: frozenset[Decoding] = frozenset()
    """How the requests in rounds of the pair are decoded. It decides how many tokens all rows of these rounds draft."""
    target: int = 0
    """Sequences that the target decodes alone."""
    target_context: int = 0
    """Context tokens of the sequences that the target decodes alone."""
    slots: int = 0
    """Slots that all of these requests hold."""


class LatencyTreePolicy:
    """Decides about trees of exact decoding; answers do not depend on its decisions. Maximises the throughput of all
    requests together. Without a latency model it changes nothing."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._known: tuple[LatencyModel, ThroughputForecast] | None = None

    def begin(
        self, tree: TreeRequest, others: Sequence[TreeRequest], beside: OtherLoad, latency: LatencyModel | None
    ) -> int | None:
        """Return the number of rows, at most `tree.most`, with which a request starts; 0: the target decodes it alone.
        None: no change."""
        if latency is None:
            return None
        forecast, rows = self._forecast(latency), [other.rows for other in others]
        # The request does as all running requests do; `change` decides whether all should do otherwise.
        if rows and not any(rows):
            return 0
        # The request's share of the slots if all requests began now.
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
        latency: LatencyModel | None,
    ) -> Sequence[int] | None:
        """Return the number of rows that each running request should have from now on. None: no change. `waiting`:
        requests that wait only for slots, of which a tree takes one for each row."""
        if latency is None:
            return None
        forecast, slots = self._forecast(latency), self._config.max_slots - beside.slots
        # With smaller trees, waiting requests could run, too.
        served = [*trees, *waiting][: max(slots, len(trees))]
        alone, best = [0] * len(served), forecast.best(served, beside, slots)
        speed = forecast.speed(trees, [tree.rows for tree in trees], beside)
        speed_alone, speed_of_best = (forecast.speed(served, rows, beside) for rows in (alone, best))
        if speed_of_best > max(CHANGE * speed, MARGIN * speed_alone):
            return best[: len(trees)]
        drafts = any(tree.rows for tree in trees)
        return alone[: len(trees)] if drafts and SURE * speed_alone > speed else None

    def draft_size(
        self, trees: Iterable[TreeRequest], rows: int, context: int, latency: LatencyModel | None
    ) -> DraftSize:
        """Return how much is drafted in a round of these requests. `rows`: those of the round; `context`: tokens of
        their contexts together. Called for every round; `trees` is iterable so that it costs nothing if it is not
        used."""
        if latency is None:
            return DraftSize(self._config.branches, None, redrafted=self._config.redrafted)
        size = self._forecast(latency).size(list(trees), rows, context)
        return size._replace(steps=None if size.steps == self._config.block else size.steps)

    def _forecast(self, latency: LatencyModel) -> ThroughputForecast:
        if self._known is None or self._known[0] is not latency:
            self._known = latency, ThroughputForecast(self._config, latency)
        return self._known[1]


class RoundSizes(NamedTuple):
    """The Y sizes that a round may have: how much it drafts and verifies. All arrays are [Y]."""

    at: tuple[np.ndarray, np.ndarray, np.ndarray]
    """Index of each size among the branches, the drafted tokens and the tokens drafted again of `tokens_a_round`."""
    branches_Y: np.ndarray
    steps_Y: np.ndarray
    redrafted_Y: np.ndarray


class CurveTable:
    """Looks up the seconds of a latency curve for arrays of sizes."""

    def __init__(self, curve: LatencyCurve) -> None:
        self._curve, self._seconds = curve, np.empty(0)

    def at(self, sizes: np.ndarray) -> np.ndarray:
        if (most := int(sizes.max())) >= len(self._seconds):
            self._seconds = np.array([self._curve.at(size) for size in range(bucket(most) + 1)])
        return self._seconds[sizes]


class ThroughputForecast:
    """Forecasts how long rounds take and how many tokens they bring.

    Every forecast is for the best of the config's `draft_sizes`: drafted tokens, branches, and tokens that are drafted
    again after a miss."""

    def __init__(self, config: EngineConfig, latency: LatencyModel) -> None:
        self._config, self._latency = config, latency
        self._branches = config.branch_levels
        self._again = config.redraft_levels if config.redrafted else (0, *config.redraft_levels)
        self._draft, self._target = CurveTable(latency.draft.curve), CurveTable(latency.target.curve)
        self._sizes = self._sizes_of(
            (self._branches.index(branches), steps - 1, self._again.index(again), branches, steps, again)
            for steps, branches, again in config.draft_sizes
        )
        self._whole = self._whole_of(config.block)

    def _whole_of(self, steps: int) -> RoundSizes:
        """Return the size of rounds with so many drafted tokens on all branches."""
        return self._sizes_of([(0, steps - 1, 0, self._config.branches, steps, self._again[0])])

    def _steps_beside(self, beside: OtherLoad) -> int:
        """Return the number of drafted tokens in rounds with requests for which the latency model does not choose
        it."""
        fixed = fixed_steps(self._config, beside.pair_decodings) if beside.pair_decodings else None
        return fixed or self._config.block

    @staticmethod
    def _sizes_of(levels: Iterable[tuple[int, ...]]) -> RoundSizes:
        branches_index, steps_index, again_index, *numbers = np.array(list(levels)).T
        return RoundSizes((branches_index, steps_index, again_index), *numbers)

    def speed(self, trees: Sequence[TreeRequest], rows: Sequence[int], beside: OtherLoad) -> float:
        """Return the tokens per second of all requests, with trees of these numbers of rows."""
        config, rows_G, context_G = self._config, np.array(rows), np.array([tree.context for tree in trees])
        drafted_G = rows_G > 0
        drafted = [tree for tree, is_drafted in zip(trees, drafted_G) if is_drafted]
        alone = int((~drafted_G).sum()) + beside.target
        tokens = alone * config.block + beside.pair * config.scored(self._steps_beside(beside))
        by_itself = self._by_itself(alone, int(context_G[~drafted_G].sum()) + beside.target_context)
        rows_of_pair = int(rows_G.sum()) + beside.pair_rows
        context = int(context_G[drafted_G].sum()) + beside.pair_context
        if not rows_of_pair:
            return tokens / by_itself
        groups = 0 if beside.pair else len(drafted)
        confirmed, missed = self._confirmed(drafted, rows_G[drafted_G][:, None])
        sizes = self._sizes if groups else self._whole_of(self._steps_beside(beside))
        tokens_Y, again_Y = tokens + confirmed.sum(0)[0][sizes.at], _any(missed[:, 0])[sizes.at]
        seconds_YR = self._seconds(sizes, np.array([rows_of_pair]), groups, context, by_itself, again_Y)
        return float((tokens_Y / seconds_YR[:, 0]).max())

    def _confirmed(self, trees: Sequence[TreeRequest], rows_GF: np.ndarray) -> Confirmed:
        """What a round confirms for each request, with trees of `rows_GF` rows, by branches, drafted tokens and tokens
        drafted again: arrays [G, F, branches, K, again]."""
        config, shape = self._config, (*rows_GF.shape, len(self._branches), self._config.block, len(self._again))
        if not trees:
            return Confirmed(np.zeros(shape), np.zeros(shape))
        rows_GU, branches_U = np.repeat(rows_GF, len(self._branches), 1), np.tile(self._branches, rows_GF.shape[1])
        rates = [tree.rates for tree in trees]
        found = tokens_a_round(rates, rows_GU, branches_U, config.block, config.lookahead, self._again)
        return Confirmed(*(values.reshape(shape) for values in found))

    def best(self, trees: Sequence[TreeRequest], beside: OtherLoad, slots: int) -> list[int]:
        """Return the rows of each tree: at least one, and together at most as many as there are slots. Rows are given
        to the trees for which they bring most tokens, as long as the throughput of all requests grows."""
        level_F, most_G1 = np.array(_levels(max(tree.most for tree in trees))), np.array([[t.most] for t in trees])
        rows_GF = np.minimum(level_F, most_G1)
        count, steps = len(trees), self._steps_beside(beside)
        sizes = self._whole_of(steps) if beside.pair else self._sizes
        tokens_YGF, restarts_YGF = (
            np.moveaxis(values[:, :, *sizes.at], -1, 0) for values in self._confirmed(trees, rows_GF)
        )
        added_GF, gain_YGF = np.diff(rows_GF), np.diff(tokens_YGF)
        # A tree grows level by level. Levels that add no row come last, and are left out.
        worth_YGF = np.minimum.accumulate(gain_YGF / np.maximum(added_GF, 1), axis=2)
        key_YZ = np.where(added_GF > 0, -worth_YGF, np.inf).reshape(len(tokens_YGF), -1)
        order_YZ = np.argsort(key_YZ, axis=1, kind="stable")[:, : int((added_GF > 0).sum())]
        gain_YZ = np.take_along_axis(gain_YGF.reshape(key_YZ.shape), order_YZ, 1)
        rows_YZ = count + _from_zero(added_GF.flat[order_YZ])
        tokens_YZ = tokens_YGF[:, :, 0].sum(1)[:, None] + _from_zero(gain_YZ)
        tokens_YZ += beside.pair * self._config.scored(steps) + beside.target * self._config.block
        fits_YZ = rows_YZ <= max(slots, count)
        rows_R = np.arange(count, int(rows_YZ[fits_YZ].max()) + 1) + beside.pair_rows
        seconds_YR = self._seconds(
            sizes,
            rows_R,
            0 if beside.pair else count,
            sum(tree.context for tree in trees) + beside.pair_context,
            self._by_itself(beside.target, beside.target_context),
            _any(np.moveaxis(restarts_YGF[:, :, -1], 1, 0)),
        )
        index_YZ = np.minimum(rows_YZ - count, len(rows_R) - 1)
        speed_YZ = np.where(fits_YZ, tokens_YZ / np.take_along_axis(seconds_YR, index_YZ, 1), -np.inf)
        size, taken = np.unravel_index(int(speed_YZ.argmax()), speed_YZ.shape)
        taken_GF = np.zeros(added_GF.shape, dtype=bool)
        taken_GF.flat[order_YZ[size, :taken]] = True
        return (rows_GF[:, 0] + (added_GF * taken_GF).sum(1)).tolist()

    def _by_itself(self, sequences: int, context: int) -> float:
        """Seconds of the target's passes over sequences that it decodes alone, one pass for each token of a block."""
        return self._config.block * self._latency.alone.at(bucket(sequences), context) if sequences else 0.0

    def size(self, trees: Sequence[TreeRequest], rows: int, context: int) -> DraftSize:
        """Return how much a round of these requests drafts and verifies: what brings most tokens per second."""
        config, sizes = self._config, self._sizes
        confirmed, missed = self._confirmed(trees, np.array([[max(1, tree.rows)] for tree in trees]))
        tokens_Y, again_Y = confirmed.sum(0)[0][sizes.at], _any(missed[:, 0])[sizes.at]
        seconds_YR = self._seconds(sizes, np.array([rows]), len(trees), context, 0.0, again_Y)
        best = int((tokens_Y / seconds_YR[:, 0]).argmax())
        branches, steps, more = (int(numbers_Y[best]) for numbers_Y in sizes[1:])
        batch_size = coarse_bucket(rows, config.max_slots) if best else bucket(rows)
        nodes = 0
        if config.verified != PATHS:
            nodes = int(node_room(rows, len(trees), config.scored(steps), batch_size))
        return DraftSize(branches, steps, nodes, more, batch_size)

    def seconds_of_round(self, rows: int) -> float:
        """Return the seconds of a round of this many rows that drafts a whole block with all branches."""
        return float(self._seconds(self._whole, np.array([rows]), 0, 0, 0.0, np.zeros(1))[0, 0])

    def _seconds(
        self,
        sizes: RoundSizes,
        rows_R: np.ndarray,
        groups: int,
        context: int,
        by_itself: float,
        again_Y: np.ndarray,
    ) -> np.ndarray:
        """Return the seconds [Y, R] of a round of the pair. `rows`: rows of its trees; `groups`: number of its trees, 0
        if some rows belong to other methods; `context`: tokens of their contexts together; `by_itself`: seconds for
        which the target decodes other sequences in the same step; `again`: probability that some request drafts again,
        for which the target waits."""
        config, latency = self._config, self._latency
        branches_Y1, steps_Y1, redrafted_Y1, again_Y1 = (each[:, None] for each in (*sizes[1:], again_Y))
        batch_YR, scored_Y1 = self._batch_sizes(rows_R, len(steps_Y1)), config.scored(steps_Y1)
        step_YR = self._draft.at(batch_YR)
        draft_YR = step_YR + (steps_Y1 - 1) * self._draft.at(batch_YR * branches_Y1)
        draft_YR += steps_Y1 * latency.draft.read * context
        nodes_YR = batch_YR * scored_Y1
        if groups and config.verified != PATHS:
            room_YR = node_room(rows_R, groups, scored_Y1, batch_YR)
            nodes_YR = np.where(room_YR > 0, room_YR, nodes_YR)
        target_YR = self._target.at(nodes_YR) + (latency.target.read * context + by_itself)
        waits_YR = again_Y1 * (step_YR + latency.draft.read * context) + latency.redraft_overhead
        # Passes over the target's own sequences overlap with the draft's steps in look-ahead only.
        overlapping_YR = np.maximum(draft_YR, target_YR) if config.lookahead else draft_YR + target_YR
        return overlapping_YR + redrafted_Y1 * waits_YR + latency.round_overhead

    def _batch_sizes(self, rows_R: np.ndarray, sizes: int) -> np.ndarray:
        """Return the batch indices [Y, R] of rounds of these rows, padding included. The first size is a whole
        block."""
        most, rows = self._config.max_slots, rows_R.tolist()
        coarse_R = [coarse_bucket(each, most) for each in rows]
        return np.array([[bucket(each) for each in rows], *[coarse_R] * (sizes - 1)])


def _from_zero(added_YZ: np.ndarray) -> np.ndarray:
    """Return the sums of the first 0, 1, .. entries of each row."""
    return np.concatenate((np.zeros((len(added_YZ), 1), added_YZ.dtype), added_YZ), 1).cumsum(1)


def _any(probability_GX: np.ndarray) -> np.ndarray:
    """Return the probability that something happens to at least one of the requests; X are any axes."""
    return 1 - np.prod(1 - probability_GX, 0)


def _levels(most: int) -> list[int]:
    """Numbers of rows that are considered: the powers of two below `most`, and `most`."""
    return [*(1 << n for n in range((most - 1).bit_length())), most]


class DraftFallback:
    """Switches requests of a registry to the target alone, and back to the draft-target pair."""

    def __init__(self, registry: RequestRegistry, prefill: PrefillManager, preparation: Preparation) -> None:
        self._registry, self._prefill, self._preparation = registry, prefill, preparation
        self.has_draft = True
        self._returning: dict[SequenceGroup, int | None] = {}
        """Requests that return to the pair once its workers have compiled their constraints, and their rows then."""

    def fall_back(self, group: SequenceGroup) -> None:
        """Let the target decode a request alone from now on, whatever state the request is in. The draft runs nothing
        more for it. Rounds of both models in flight are not waited for, and their results are discarded."""
        self.cancel(group)
        if group.alone or group.error:
            return
        if group.is_running:
            self._switch(group, TARGET_ALONE, 1)
        elif group.is_queued:
            group.choose(TARGET_ALONE)
        else:
            self._prefill.fall_back(group)

    def reenable_draft(self, group: SequenceGroup, rows: int | None = None) -> None:
        """Return a request to rounds of the draft-target pair, as soon as no round of it is in flight and the draft has
        run the tokens that it lacks. `rows`: rows of its tree, by default its maximum. Without enough slots or pages,
        or without a draft, nothing changes. Until both models have compiled its constraint, the target goes on
        alone."""
        self._returning.pop(group, None)
        if not self.has_draft or not group.alone or not self._fits_pair(group):
            return
        if not self._preparation.is_ready(group, group.requested):
            self._returning[group] = rows
            return
        rows = rows or group.most_rows
        if group.is_queued:
            group.choose(group.requested, rows)
        else:
            group.request_switch(rows)

    def tree_rows(self, group: SequenceGroup) -> int:
        """Rows that are drafted for a request after all changes, also if it returns to the pair; 0: none."""
        return group.tree_rows if group not in self._returning else self._returning[group] or group.most_rows

    def cancel(self, group: SequenceGroup) -> None:
        """Cancel a switch that has not been carried out yet."""
        self._returning.pop(group, None)
        group.cancel_switch()

    def apply_switches(self) -> None:
        """Carry out pending switches of requests that have no round in flight. Raises RuntimeError if a worker is
        lost."""
        for group, rows in list(self._returning.items()):
            if group.state not in (*QUEUED, *ADMITTED):
                del self._returning[group]
            elif self._preparation.poll(group, group.requested):
                self.reenable_draft(group, rows)
        for group in [group for group in self._registry.admitted if group.switches]:
            if group.is_running and not group.in_flight:
                self._switch(group, *group.after_switch)
                group.cancel_switch()

    def _fits_pair(self, group: SequenceGroup) -> bool:
        """Whether the pools can hold the request; a new draft may have fewer pages than the one at its admission."""
        config, capacity = self._prefill.config, self._prefill.memory.capacity
        needs = group.requested.most_pages(config, group.params, group.prompt_size, negative=group.negative_size)
        return all(pages <= capacity[role] for role, pages in needs.items())

    def _switch(self, group: SequenceGroup, rules: DecodingRules, rows: int) -> None:
        rounds = self._registry.rounds[group.rules.roles]
        if not group.error and not self._registry.complete(group) and self._prefill.switch(group, rules, rows):
            rounds.remove(group)


class TreeController:
    """Calls a policy, and switches requests to the target alone or back to the pair."""

    def __init__(
        self, policy: LatencyTreePolicy, acceptance: Acceptance, fallback: DraftFallback, *, lookahead: bool
    ) -> None:
        """`acceptance`: that of all requests together. `lookahead`: the form of rounds."""
        self._policy, self._acceptance, self._fallback, self._lookahead = policy, acceptance, fallback, lookahead
        self._known: list[SequenceGroup] = []
        """Requests of the last call."""
        self._left = 0
        """Steps until the next call about the same requests."""
        self._since = 0
        """Steps since the last call."""
        self._sizes: dict[tuple, tuple[LatencyModel | None, int, DraftSize]] = {}
        """How much rounds draft, by their size and requests; for how many more rounds, and by which latency model."""
        self._begins: dict[tuple[int, ...], tuple[LatencyModel | None, int | None]] = {}
        """With how many rows requests begin, by what they are and what runs, since the last call of the policy about
        running requests; and by which latency model."""

    def begin(
        self, group: SequenceGroup, running: Sequence[SequenceGroup], share: int, latency: LatencyModel | None
    ) -> None:
        """Decide how an adaptive request starts that waits and has not begun. `share`: number of free slots per waiting
        request."""
        if not group.adaptive or group.has_begun:
            return
        groups, most = _adaptive(running), min(group.most_rows, max(1, share))
        rows_G = [each.tree_rows for each in groups]
        # All requests that have not begun have the same rates.
        others = bucket(len(running) + 1), len(running) - len(groups), any(rows_G), all(rows_G)
        key = most, group.context.bit_length(), *others
        if key not in self._begins or self._begins[key][0] is not latency:
            tree, *trees = self._trees([group, *groups])
            rows = self._policy.begin(replace(tree, most=most), trees, _load(running), latency)
            self._begins[key] = latency, rows
        _, rows = self._begins[key]
        if rows == 0:
            self._fallback.fall_back(group)
        elif rows and group.alone:
            self._fallback.reenable_draft(group, rows)
        elif rows:
            group.choose(group.rules, rows)

    def follow(
        self, running: Sequence[SequenceGroup], waiting: Sequence[SequenceGroup], latency: LatencyModel | None
    ) -> None:
        """Called once a step: call the policy about running requests if it is time, and apply its changes. `waiting`:
        requests that wait only for slots."""
        groups, self._left, self._since = _adaptive(running), self._left - 1, self._since + 1
        if groups and self._left > self._patience(groups):
            return
        self._begins.clear()
        if not groups:
            return
        self._left = min(FIRST, EVERY) if self._patience(groups) else EVERY
        self._known, since, self._since = groups, self._since, 0
        trees = list(self._trees(groups))
        if not any(tree.rows for tree in trees):
            self._acceptance.fade(FADE**since)
        rows = self._policy.change(trees, list(self._trees(_adaptive(waiting))), _load(running), latency)
        for group, tree, wanted in zip(groups, trees, rows or ()):
            if wanted != tree.rows:
                self._left = EVERY + REST
                self._change(group, wanted)

    def draft_size(
        self, groups: Sequence[SequenceGroup], rows: int, context: int, latency: LatencyModel | None
    ) -> DraftSize:
        """Return how much is drafted in a round of these requests: see `LatencyTreePolicy.draft_size`. The more
        requests there are, the longer the choice takes and the longer it stays."""
        rows_G = [group.tree_rows for group in groups]
        key = (
            (len(groups), rows, sum(rows_G)) if len(groups) > AT_ONCE else (rows, *zip((g.id for g in groups), rows_G))
        )
        known, left, size = self._sizes.pop(key, (None, 0, None))
        if size is None or known is not latency or not left:
            left, size = (
                len(groups) // AT_ONCE,
                self._policy.draft_size(self._trees(groups), rows, context, latency),
            )
        else:
            left -= 1
        if len(self._sizes) >= MOST_SIZES:
            self._sizes.clear()
        self._sizes[key] = latency, left, size
        return size

    def forget(self) -> None:
        """Discard the acceptance counts."""
        self._acceptance.fade(0.0)
        self._sizes.clear()
        self._begins.clear()

    def _patience(self, groups: Sequence[SequenceGroup]) -> float:
        """Maximum of `_left` at which the policy is called about these requests: 0 if nearly all of them are those of
        the last call, `EVERY` if at least half of them are, else infinite."""
        if groups == self._known:
            return 0
        most, still = max(len(groups), len(self._known)), len(set(groups) & set(self._known))
        if AT_ONCE * (most - still) < most:
            return 0
        return EVERY if 2 * still >= most else math.inf

    def _change(self, group: SequenceGroup, rows: int) -> None:
        """Change a request to `rows` rows, 0: to the target alone, as soon as no round of it is in flight."""
        if group.alone and rows:
            self._fallback.reenable_draft(group, rows)
        elif rows:
            group.request_rows(rows)
        elif group.alone:
            self._fallback.cancel(group)
        elif group.is_running:
            group.request_switch(0)
        else:
            self._fallback.fall_back(group)

    def _trees(self, groups: Sequence[SequenceGroup]) -> Iterator[TreeRequest]:
        of_all, own = self._acceptance.rates(self._lookahead), [group.acceptance for group in groups]
        for group, rates in zip(groups, rates_of_requests(of_all, own, self._lookahead)):
            rows = self._fallback.tree_rows(group)
            yield TreeRequest(most=group.most_rows, rates=rates, context=group.context, rows=rows)


def _adaptive(groups: Sequence[SequenceGroup]) -> list[SequenceGroup]:
    return [group for group in groups if group.adaptive]


def _load(groups: Sequence[SequenceGroup]) -> OtherLoad:
    """Summarise the requests that are not adaptive."""
    others = [group for group in groups if not group.adaptive]
    of_pair = [group for group in others if group.rules.roles == BOTH_MODELS]
    of_target = [group for group in others if group.rules.roles == (ModelRole.TARGET,)]
    return OtherLoad(
        pair=len(of_pair),
        pair_rows=sum(group.slots_needed for group in of_pair),
        pair_context=sum(group.context for group in of_pair),
        pair_decodings=frozenset(group.rules.decoding for group in of_pair),
        target=sum(group.slots_needed for group in of_target),
        target_context=sum(group.slots_needed * group.context for group in of_target),
        slots=sum(group.slots_needed for group in others),
    )
