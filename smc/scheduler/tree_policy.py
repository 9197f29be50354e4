"""The policy for the number of rows of trees of exact decoding.

The policy compares the latency model with the miss rate of the draft and chooses small trees, large trees, or no
drafting. It is a pure function of its arguments; it knows nothing about slots, rounds or answers. `TreeController`
calls the policy, and `DraftFallback` carries out the switches between the draft-target pair and the target alone.

Local axes: Y numbers of branches, P numbers of tokens that are drafted again, U pairs of a number of rows and one of
branches, Z rows that are added one after another. F are numbers of rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from smc.api.engine_config import PATHS, EngineConfig
from smc.scheduler.methods import TARGET_ALONE, DecodingRules
from smc.scheduler.planner import DraftSize, bucket, node_room
from smc.scheduler.prefill import PrefillManager
from smc.scheduler.queue import RequestRegistry
from smc.scheduler.sequence_group import SequenceGroup
from smc.scheduler.speculation import Acceptance, Confirmed, LatencyModel, MissRates, tokens_a_round
from smc.types import BOTH_MODELS, ModelRole

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
"""Requests for which every round chooses how much it drafts; with n times as many, a choice stays for n + 1 rounds."""
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
        self, trees: Iterable[TreeRequest], batch_size: int, context: int, latency: LatencyModel | None
    ) -> DraftSize:
        """Return how much is drafted in a round of these requests. `batch_size`: rows of the round; `context`: tokens
        of their contexts together. Called for every round; `trees` is iterable so that it costs nothing if it is not
        used."""
        if latency is None:
            return DraftSize(self._config.branches, None, redrafted=self._config.redrafted)
        size = self._forecast(latency).size(list(trees), batch_size, context)
        return size._replace(steps=None if size.steps == self._config.block else size.steps)

    def _forecast(self, latency: LatencyModel) -> ThroughputForecast:
        if self._known is None or self._known[0] is not latency:
            self._known = latency, ThroughputForecast(self._config, latency)
        return self._known[1]


class TreeRows(NamedTuple):
    """The rows of a round of the draft-target pair."""

    rows: int
    groups: int
    """Number of their trees; 0 if some rows belong to other methods."""
    batch_size: int
    """Number of rows, padding included."""


class ThroughputForecast:
    """Forecasts how long rounds take and how many tokens they bring.

    Every forecast is for the best number of drafted tokens, of branches, and of tokens that are drafted again after a
    miss, among the levels of the config (axes K, Y and P below)."""

    def __init__(self, config: EngineConfig, latency: LatencyModel) -> None:
        self._config, self._latency = config, latency
        self._branches = config.branch_levels
        self._again = config.redraft_levels if config.redrafted else (0, *config.redraft_levels)
        # The caches have at most as many entries as a round can have rows.
        self._padded, self._models = cache(bucket), cache(self._models_of)

    def speed(self, trees: Sequence[TreeRequest], rows: Sequence[int], beside: OtherLoad) -> float:
        """Return the tokens per second of all requests, with trees of these numbers of rows."""
        config, rows_G, context_G = self._config, np.array(rows), np.array([tree.context for tree in trees])
        drafted_G = rows_G > 0
        drafted = [tree for tree, is_drafted in zip(trees, drafted_G) if is_drafted]
        alone = int((~drafted_G).sum()) + beside.target
        tokens = alone * config.block + beside.pair * config.target_tokens
        by_itself = self._by_itself(alone, int(context_G[~drafted_G].sum()) + beside.target_context)
        batch_size = self._padded(int(rows_G.sum()) + beside.pair_rows)
        context = int(context_G[drafted_G].sum()) + beside.pair_context
        if not batch_size:
            return tokens / by_itself
        of = TreeRows(int(rows_G.sum()) + beside.pair_rows, 0 if beside.pair else len(drafted), batch_size)
        confirmed, missed = self._confirmed(drafted, rows_G[drafted_G][:, None])
        tokens_YKP, again_YKP = tokens + confirmed.sum(0)[0], _any(missed[:, 0])
        return max(
            tokens_YKP[index] / self.seconds_of_round(batch_size, context, by_itself, size, again_YKP[index])
            for index, size in self._sizes(of)
        )

    def _sizes(self, of: TreeRows) -> Iterator[tuple[tuple[int, int, int], DraftSize]]:
        """Yield the sizes that a round may have, each with its index [Y, K, P]. Methods other than exact decoding need
        all branches, and all of a block."""
        config, again = self._config, self._again
        if not of.groups:
            yield (0, config.block - 1, 0), DraftSize(config.branches, config.block, redrafted=again[0])
            return
        for steps in config.block_levels:
            nodes = 0
            if config.verified != PATHS:
                nodes = node_room(of.rows, of.groups, config.scored(steps), of.batch_size)
            for (y, branches), (w, more) in itertools.product(enumerate(self._branches), enumerate(again)):
                yield (y, steps - 1, w), DraftSize(branches, steps, nodes, more)

    def _confirmed(self, trees: Sequence[TreeRequest], rows_GF: np.ndarray) -> Confirmed:
        """What a round confirms for each request, with trees of `rows_GF` rows, by branches, drafted tokens and tokens
        drafted again: arrays [G, F, Y, K, P]."""
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
        confirmed = self._confirmed(trees, rows_GF)
        sizes = self._sizes(TreeRows(len(trees), 0 if beside.pair else len(trees), self._padded(len(trees))))
        found = (
            self._best(trees, beside, slots, rows_GF, Confirmed(*(values[:, :, *index] for values in confirmed)), size)
            for index, size in sizes
        )
        return max(found, key=lambda best: best[0])[1]

    def _best(
        self,
        trees: Sequence[TreeRequest],
        beside: OtherLoad,
        slots: int,
        rows_GF: np.ndarray,
        confirmed: Confirmed,
        size: DraftSize,
    ) -> tuple[float, list[int]]:
        """Tokens per second and the rows of each tree, if rounds have this size. `confirmed`: arrays [G, F]."""
        config, tokens_GF = self._config, confirmed.tokens
        added_GF, gain_GF = np.diff(rows_GF), np.diff(tokens_GF)
        # A tree grows level by level.
        worth_GF = np.minimum.accumulate(gain_GF / np.maximum(added_GF, 1), axis=1)
        order_Z = np.argsort(-np.where(added_GF > 0, worth_GF, 0.0), axis=None, kind="stable")
        order_Z = order_Z[added_GF.flat[order_Z] > 0]
        rows_Z = len(trees) + np.concatenate(([0], np.cumsum(added_GF.flat[order_Z])))
        rows_Z = rows_Z[: max(1, np.searchsorted(rows_Z, slots, side="right"))]
        tokens_Z = tokens_GF[:, 0].sum() + np.concatenate(([0.0], np.cumsum(gain_GF.flat[order_Z])))[: len(rows_Z)]
        tokens_Z += beside.pair * config.target_tokens + beside.target * config.block
        again = float(_any(confirmed.restarts[:, -1]))
        speed_Z = tokens_Z / self._seconds_of_pair(rows_Z + beside.pair_rows, trees, beside, size, again)
        taken_GF = np.zeros(added_GF.shape, dtype=bool)
        taken_GF.flat[order_Z[: int(speed_Z.argmax())]] = True
        return float(speed_Z.max()), (rows_GF[:, 0] + (added_GF * taken_GF).sum(1)).tolist()

    def _seconds_of_pair(
        self, rows_Z: np.ndarray, trees: Sequence[TreeRequest], beside: OtherLoad, size: DraftSize, again: float
    ) -> np.ndarray:
        """Seconds of a round that drafts for all trees, by the pair's number of rows [Z]. `again`: see
        `seconds_of_round`."""
        config, by_itself = self._config, self._by_itself(beside.target, beside.target_context)
        context, groups = sum(tree.context for tree in trees) + beside.pair_context, 0 if beside.pair else len(trees)
        steps, has_nodes = size.steps or config.block, groups and config.verified != PATHS

        # Many numbers of rows are padded to the same size.
        @cache
        def seconds(batch_size: int, nodes: int) -> float:
            return self.seconds_of_round(batch_size, context, by_itself, size._replace(nodes=nodes), again)

        def nodes_of(rows: int, batch_size: int) -> int:
            return node_room(rows, groups, config.scored(steps), batch_size) if has_nodes else 0

        sizes = [(rows, self._padded(rows)) for rows in rows_Z.tolist()]
        return np.array([seconds(batch_size, nodes_of(rows, batch_size)) for rows, batch_size in sizes])

    def _by_itself(self, sequences: int, context: int) -> float:
        """Seconds of the target's passes over sequences that it decodes alone, one pass for each token of a block."""
        return self._config.block * self._latency.alone.at(self._padded(sequences), context) if sequences else 0.0

    def size(self, trees: Sequence[TreeRequest], batch_size: int, context: int) -> DraftSize:
        """Return how much a round of these requests drafts and verifies: what brings most tokens per second."""
        rows_G1 = np.array([[max(1, tree.rows)] for tree in trees])
        confirmed, missed = self._confirmed(trees, rows_G1)
        tokens_YKP, again_YKP = confirmed.sum(0)[0], _any(missed[:, 0])
        of = TreeRows(int(rows_G1.sum()), len(trees), batch_size)

        def speed(each: tuple[tuple[int, int, int], DraftSize]) -> float:
            index, size = each
            return tokens_YKP[index] / self.seconds_of_round(batch_size, context, 0.0, size, again_YKP[index])

        return max(self._sizes(of), key=speed)[1]

    def seconds_of_round(
        self, batch_size: int, context: int, by_itself: float, size: DraftSize, again: float = 0.0
    ) -> float:
        """Return the seconds of a round of the pair. `batch_size`: rows; `context`: tokens of their contexts together;
        `by_itself`: seconds for which the target decodes other sequences in the same step; `size`: how much is
        drafted; `again`: probability that some request drafts again, for which the target waits."""
        config, latency, steps = self._config, self._latency, size.steps or self._config.block
        draft, target = self._models(batch_size, size.branches, steps, size.nodes)
        draft += steps * latency.draft.read * context
        target += latency.target.read * context + by_itself
        waits = again * latency.draft.at(batch_size, context) + latency.redraft_overhead if size.redrafted else 0.0
        # Passes over the target's own sequences overlap with the draft's steps in look-ahead only.
        overlapping = max(draft, target) if config.lookahead else draft + target
        return overlapping + size.redrafted * waits + latency.round_overhead

    def _models_of(self, batch_size: int, branches: int, steps: int, nodes: int) -> tuple[float, float]:
        """Seconds of the draft and of the target in a round, without reading contexts."""
        config, draft, target = self._config, self._latency.draft.curve, self._latency.target.curve
        drafting = draft.at(batch_size) + (steps - 1) * draft.at(batch_size * branches)
        return drafting, target.at(nodes or batch_size * config.scored(steps))


def _any(probability_GYKP: np.ndarray) -> np.ndarray:
    """Return the probability that something happens to at least one of the requests [Y, K, P]."""
    return 1 - np.prod(1 - probability_GYKP, 0)


def _levels(most: int) -> list[int]:
    """Numbers of rows that are considered: the powers of two below `most`, and `most`."""
    return [*(1 << n for n in range((most - 1).bit_length())), most]


class DraftFallback:
    """Switches requests of a registry to the target alone, and back to the draft-target pair."""

    def __init__(self, registry: RequestRegistry, prefill: PrefillManager) -> None:
        self._registry, self._prefill = registry, prefill
        self.has_draft = True

    def fall_back(self, group: SequenceGroup) -> None:
        """Let the target decode a request alone from now on, whatever state the request is in. The draft runs nothing
        more for it. Rounds of both models in flight are not waited for, and their results are discarded."""
        group.cancel_switch()
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
        or without a draft, nothing changes."""
        if not self.has_draft or not group.alone or not self._fits_pair(group):
            return
        rows = rows or group.most_rows
        if group.is_queued:
            group.choose(group.requested, rows)
        else:
            group.request_switch(rows)

    def apply_switches(self) -> None:
        """Carry out pending switches of requests that have no round in flight."""
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

    def begin(
        self, group: SequenceGroup, running: Sequence[SequenceGroup], share: int, latency: LatencyModel | None
    ) -> None:
        """Decide how an adaptive request starts that waits and has not begun. `share`: number of free slots per waiting
        request."""
        if not group.adaptive or group.has_begun:
            return
        tree, *others = self._trees([group, *_adaptive(running)])
        rows = self._policy.begin(replace(tree, most=min(tree.most, max(1, share))), others, _load(running), latency)
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
        if not groups or self._left > self._patience(groups):
            return
        self._left = min(FIRST, EVERY) if groups != self._known else EVERY
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
        self, groups: Sequence[SequenceGroup], batch_size: int, context: int, latency: LatencyModel | None
    ) -> DraftSize:
        """Return how much is drafted in a round of these requests: see `LatencyTreePolicy.draft_size`. The more
        requests there are, the longer the choice takes and the longer it stays."""
        key = (batch_size, *((group.id, group.tree_rows) for group in groups))
        known, left, size = self._sizes.pop(key, (None, 0, None))
        if size is None or known is not latency or not left:
            left, size = (
                len(groups) // AT_ONCE,
                self._policy.draft_size(self._trees(groups), batch_size, context, latency),
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

    def _patience(self, groups: Sequence[SequenceGroup]) -> float:
        """Maximum of `_left` at which the policy is called about these requests: 0 for the requests of the last call,
        `EVERY` if at least half of the requests are the same, else infinite."""
        if groups == self._known:
            return 0
        still = len(set(groups) & set(self._known))
        return EVERY if 2 * still >= max(len(groups), len(self._known)) else math.inf

    def _change(self, group: SequenceGroup, rows: int) -> None:
        """Change a request to `rows` rows, 0: to the target alone, as soon as no round of it is in flight."""
        if group.alone and rows:
            self._fallback.reenable_draft(group, rows)
        elif rows:
            group.request_rows(rows)
        elif group.alone:
            group.cancel_switch()
        elif group.is_running:
            group.request_switch(0)
        else:
            self._fallback.fall_back(group)

    def _trees(self, groups: Sequence[SequenceGroup]) -> Iterator[TreeRequest]:
        of_all = self._acceptance.rates(self._lookahead)
        for group in groups:
            yield TreeRequest(
                most=group.most_rows,
                rates=group.acceptance.rates_among(of_all, self._lookahead),
                context=group.context,
                rows=group.tree_rows,
            )


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
        target=sum(group.slots_needed for group in of_target),
        target_context=sum(group.slots_needed * group.context for group in of_target),
        slots=sum(group.slots_needed for group in others),
    )
