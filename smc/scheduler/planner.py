"""Plans of rounds: the inputs of a round for the models, as arrays. They follow from the state of the requests when the
round is launched and do not depend on results in flight. Changes nothing.

A guided request has an unconditional row for each of its rows, in a separate slot, of which only the pages count.
Whenever a round allocates a page for a row, it also allocates one for the unconditional row. The lineage of a row
therefore applies to the pages of both.

Local axes: P chains, U unconditional rows, Y guided groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from smc.api.engine_config import EngineConfig
from smc.api.limits import SCHEME_NAMES
from smc.api.sampling_params import SamplingParams
from smc.distributions import DistributionSpec
from smc.executor.logit_changes import width_of
from smc.round.plan import ConstrainedRows, Contexts, Penalties, RoundArrays, RoundKind, RoundPlan, UnconditionalRows
from smc.scheduler.methods import DecodingRules, fixed_steps
from smc.scheduler.sequence_group import SequenceGroup
from smc.scheduler.slots import REDRAFTED, RoundPages, Slots, Stream
from smc.types import Decoding, ModelRole

COMMON = frozenset({Decoding.INDEPENDENT, Decoding.DISTINCT, Decoding.WALK})
"""A round with several kinds is treated as having all of these, so that graphs are captured for few combinations."""
ROUNDING = 1e-6
"""Keeps whole numbers of nodes from being rounded down."""
NODE_SHARES = (1 / 2, 5 / 8, 3 / 4)
"""Shares of a round's tokens for which there may be nodes: few, since rounds of each have recordings of their own."""


class SlotBatch:
    """The slots of several requests, one request after another: A slots in all."""

    def __init__(
        self, groups: Sequence[SequenceGroup], members: Sequence[tuple[np.ndarray, np.ndarray]] | None = None
    ) -> None:
        """`members`: slots and particles of every request; default: its current ones."""
        self.groups = list(groups)
        self._members = members or [(g.slots, g.particles) for g in self.groups]
        slots, particles = zip(*self._members)
        self.size_G = np.array([len(slots_N) for slots_N in slots], dtype=np.int64)
        self.slot_A = np.concatenate(slots).astype(np.int64)
        self.particle_A = np.concatenate(particles)
        self.group_A = np.repeat(np.arange(len(self.groups)), self.size_G)
        self.first_G = np.cumsum(self.size_G) - self.size_G
        """Index of each group's first slot."""
        self.seed_G = np.array([g.seed for g in self.groups], dtype=np.int64)

    def take(self, index_G: np.ndarray) -> SlotBatch:
        """Return the batch of the requests with these indices, with the slots that they have here."""
        return SlotBatch([self.groups[g] for g in index_G], [self._members[g] for g in index_G])

    @cached_property
    def params(self) -> list[SamplingParams]:
        return [g.params for g in self.groups]

    def distribution_of(self, role: ModelRole) -> DistributionSpec[np.ndarray]:
        """Token distribution per request: that of the target, or of the proposal; for a draft that decodes alone, the
        draft's own."""
        params = self.params
        if role is ModelRole.DRAFT:
            temperatures = [g.requested.draft_temperature(g.params) for g in self.groups]
        else:
            temperatures = [p.temperature for p in params]
        return DistributionSpec.of_settings(params, temperatures).canonical()

    def by_index(self, values: Sequence[Any], kind: type[np.generic], size: int, none: float) -> np.ndarray:
        """Return values of requests by batch index, padded to `size` of them by `none`."""
        return padded(np.array(values, kind)[self.group_A], size, none)

    def by_rules(self) -> list[tuple[DecodingRules, np.ndarray | slice]]:
        """Return each decoding of the requests with the indices of the slots that it decodes, out of A."""
        decodings = list(dict.fromkeys(g.rules for g in self.groups))
        if len(decodings) == 1:
            return [(decodings[0], slice(None))]
        index_A = np.array([decodings.index(g.rules) for g in self.groups])[self.group_A]
        return [(decoding, np.flatnonzero(index_A == i)) for i, decoding in enumerate(decodings)]

    def least(self, values_A: np.ndarray) -> np.ndarray:
        """Smallest value of every group [G]."""
        return np.minimum.reduceat(values_A, self.first_G)

    def largest(self, values_A: np.ndarray) -> np.ndarray:
        return np.maximum.reduceat(values_A, self.first_G)

    def sums(self, values_A: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values_A, self.first_G)


def room(count: int, size: int) -> int:
    """Padded number of unconditional rows for `count` guided rows in a batch of `size` rows: the next power of two, at
    most `size`. So there are few sizes, and at most twice the rows that are guided."""
    return min(1 << (count - 1).bit_length(), size)


def reports_raw(config: EngineConfig, params: Sequence[SamplingParams]) -> bool:
    """Whether log-probabilities under the softmax of the target's own logits are reported for some request."""
    return config.logprobs_mode == "raw" and any(p.logprobs for p in params)


def padded(values_A: np.ndarray, size: int, fill: float) -> np.ndarray:
    """Extend an array to `size` rows filled with `fill`."""
    if len(values_A) == size:
        return values_A
    padded = np.full((size, *values_A.shape[1:]), fill, dtype=values_A.dtype)
    padded[: len(values_A)] = values_A
    return padded


class DraftSize(NamedTuple):
    """How much is drafted in a round."""

    branches: int
    """F, the number of rows that continue each row of the batch."""
    steps: int | None
    """Tokens that are drafted for each row; None: all K of a block."""
    nodes: int = 0
    """Maximum number of different tokens that the target runs; 0: it runs every row by itself."""
    redrafted: int = 0
    """R: tokens that are drafted again for requests whose last round was a miss."""
    batch_size: int | None = None
    """Number of batch indices, padding included; None: `bucket` of the rows."""


def without_redrafting(size: DraftSize) -> DraftSize:
    """Return the size without tokens that are drafted again."""
    is_whole = size.redrafted and size.steps is None
    return size._replace(redrafted=0, batch_size=None if is_whole else size.batch_size)


DecideSize = Callable[[Sequence[SequenceGroup], int, int], DraftSize]
"""Decides how much is drafted in a round. Arguments: the requests, all with an adaptive tree; the number of rows; the
tokens of context. The result is one of `EngineConfig.draft_sizes`."""


class RoundPlanner:
    """Plans rounds of requests with the same models."""

    def __init__(
        self,
        config: EngineConfig,
        slots: Slots,
        rules: DecodingRules,
        width: int,
        decide: DecideSize | None = None,
    ) -> None:
        """`width`: positions of the models' block tables. `decide`: called for rounds in which all requests are
        adaptive."""
        self.config, self.slots, self.rules = config, slots, rules
        self.shape, self.width = rules.shape(config), width
        self._decide = decide

    def size(self, batch: SlotBatch) -> DraftSize:
        """Return how much a round drafts. A round with a request whose answer depends on K drafts that many tokens for
        all, so its answer does not depend on the others. Rounds that are guided or have masks do not draft again: they
        have further work between the steps of the draft."""
        groups, config, params = batch.groups, self.config, batch.params
        if self._decide and all(g.adaptive for g in groups):
            context = int(self._shared(batch).sum())
            chosen = self._decide(groups, len(batch.slot_A), context)
        else:
            steps = fixed_steps(config, {g.rules.decoding for g in groups})
            chosen = DraftSize(self.shape.branches, steps, redrafted=config.redrafted)
        may_redraft = self.rules.ahead(config) and any(g.rules.redrafts for g in groups)
        if not may_redraft or any(p.guided or p.masked for p in params):
            return without_redrafting(chosen)
        return chosen

    def _shared(self, batch: SlotBatch) -> np.ndarray:
        """Number of leading positions that all particles of each group share [G]. Particles of rounds in flight are
        copies of those that the host knows, so they share the same positions."""
        prompt_G = np.array([g.prompt_size for g in batch.groups], dtype=np.int64)
        least_G = batch.least(self.slots.length_S[batch.slot_A])
        return prompt_G + np.minimum([g.committed for g in batch.groups], least_G - 1)

    def plan(self, batch: SlotBatch, pages: list[RoundPages], chosen: DraftSize) -> RoundPlan[np.ndarray]:
        """`chosen`: from `size`. If it drafts again, `pages` has pages for that."""
        size, columns = chosen.batch_size or bucket(len(batch.slot_A)), self._columns(batch, pages)
        shared_G, row_A = self._shared(batch), padded(batch.group_A, size, 0)
        arrays = self._arrays(batch, pages, chosen, size, shared_G)
        width = arrays.target_pages_AQ.shape[1] or None
        return RoundPlan(
            kind=self._kind(batch, chosen, columns),
            columns=columns,
            arrays=arrays,
            target_distribution=batch.distribution_of(ModelRole.TARGET).take(row_A),
            draft_distribution=batch.distribution_of(ModelRole.DRAFT).take(row_A),
            target_unconditional=self._unconditional(batch, pages, size, shared_G, width),
            penalties=_penalties(batch, size),
            constraints=_constraints(batch, size),
            weights_A=self._weights(batch, size),
            redraft_pages_AB=padded(self._redraft_pages(batch, pages), size, 0) if chosen.redrafted else None,
        ).sized()

    def _columns(self, batch: SlotBatch, pages: list[RoundPages]) -> int:
        """Maximum number of positions that any row holds when the round ends."""
        groups, config = batch.groups, self.config
        rounds_G = np.array([len(g.in_flight) + 1 for g in groups], dtype=np.int64)
        # A round that drafts again grows an answer by that block, too.
        again_G = np.array([sum(REDRAFTED in each for each in (*g.in_flight, own)) for g, own in zip(groups, pages)])
        stride = max(rules.stride(config) for rules in {g.rules for g in groups})
        grown_G = stride * rounds_G + self.shape.branch * again_G
        prompt_G = np.maximum([g.prompt_size for g in groups], [g.negative_size for g in groups])
        length_G = batch.largest(self.slots.length_S[batch.slot_A])
        return min(int((prompt_G + length_G + grown_G).max()) + config.block + 2, self.width)

    def _kind(self, batch: SlotBatch, chosen: DraftSize, columns: int) -> RoundKind:
        """What is static in a round, but for the sizes of its arrays."""
        groups, params = batch.groups, batch.params
        decodings = frozenset(g.rules.decoding for g in groups)
        constrained = [g for g in groups if g.params.masked]
        return RoundKind(
            contexts=Contexts.of(columns, len(batch.slot_A), len(groups)),
            decodings=decodings if len(decodings) == 1 else COMMON | decodings,
            steps=chosen.steps,
            biased=self._biased(batch),
            nodes=chosen.nodes,
            every_step=any(g.rules.needs_every_mask for g in constrained),
            raw_logprobs=reports_raw(self.config, params),
            redrafted=chosen.redrafted,
            has_answers=any(g.params.constraint_scope == "answer" for g in constrained),
        )

    def _arrays(
        self, batch: SlotBatch, pages: list[RoundPages], chosen: DraftSize, size: int, shared_G: np.ndarray
    ) -> RoundArrays[np.ndarray]:
        """The arrays of a plan, padded to `size` batch indices. `shared_G`: from `_shared`."""
        groups, params, shape, group_A = batch.groups, batch.params, self.shape, batch.group_A
        total, branches = len(group_A), chosen.branches
        own = {
            role: np.concatenate([given[Stream(role)] for given in pages]).reshape(total, -1)
            for role in self.rules.roles
        }
        begun = own[ModelRole.DRAFT] if ModelRole.DRAFT in own else own[ModelRole.TARGET]
        # The target runs no more tokens than were drafted. Unused pages, and those of branches beyond `branches`, are
        # freed together with those of branches that are not selected.
        target_pages_AQ = own[ModelRole.TARGET] if shape.target else np.zeros((total, 0), np.int32)
        target_pages_AQ = target_pages_AQ[:, : self._queries(groups, chosen)]
        branches_XB = begun[:, shape.begin : shape.begin + branches * shape.branch].reshape(
            total * branches, shape.branch
        )
        drafted = max(target_pages_AQ.shape[1], chosen.steps or self.config.block)
        nodes_G = shared_nodes(chosen.nodes, batch.size_G, drafted) if chosen.nodes else np.zeros(len(groups))
        decoding_G = np.array([g.rules.decoding for g in groups], dtype=np.int32)
        chain_P, distribution_P = self._chains(batch, decoding_G)
        return RoundArrays(
            slot_A=padded(batch.slot_A, size, self.config.max_slots),
            group_A=padded(group_A, size, size - 1),
            particle_A=padded(batch.particle_A, size, 0),
            seed_A=padded(batch.seed_G[group_A], size, 0),
            round_A=batch.by_index([g.launched + 1 for g in groups], np.int64, size, 1),
            alpha_A=batch.by_index([p.alpha or 1.0 for p in params], np.float64, size, 1.0),
            exponent_A=batch.by_index([g.draft_exponent for g in groups], np.float32, size, 0.0),
            first_G=padded(batch.first_G.astype(np.int32), size, 0),
            size_G=padded(batch.size_G.astype(np.int32), size, 0),
            count_G=padded(np.array([g.count for g in groups], np.int32), size, 0),
            next_count_G=padded(
                np.array([g.count if g.next_rows is None else g.next_rows for g in groups], np.int32), size, 0
            ),
            shared_G=padded(shared_G.astype(np.int32), size, 0),
            threshold_G=padded(np.array([p.ess_threshold or 0.0 for p in params], np.float64), size, 0.0),
            decoding_G=padded(decoding_G, size, int(Decoding.TARGET)),
            chain_P=chain_P,
            distribution_P=distribution_P,
            nodes_G=padded(nodes_G.astype(np.int32), size, 0),
            scheme_G=padded(
                np.array([SCHEME_NAMES.index(p.resampling) if p.resampling else 0 for p in params], np.int32), size, 0
            ),
            target_pages_AQ=padded(target_pages_AQ, size, 0),
            begin_pages_AQ=padded(begun[:, : shape.begin], size, 0),
            branch_pages_XB=padded(branches_XB.astype(np.int32), size * branches, 0),
        )

    def _chains(self, batch: SlotBatch, decoding_G: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Batch indices of chains, and the indices of their distributions [P]."""
        chain_P = np.flatnonzero(decoding_G[batch.group_A] == Decoding.REJECTION)
        distribution_P = self.slots.distribution_S[batch.slot_A[chain_P]].astype(np.int64)
        if not len(chain_P):
            return chain_P, distribution_P
        chains = min(bucket(len(chain_P)), self.slots.chains)
        return padded(chain_P, chains, chain_P[0]), padded(distribution_P, chains, distribution_P[0])

    def _redraft_pages(self, batch: SlotBatch, pages: list[RoundPages]) -> np.ndarray:
        """Pages for tokens that are drafted again [A, K - 1]; 0 for requests that never do."""
        has_G = np.array([REDRAFTED in given for given in pages])
        pages_AB = np.zeros((len(batch.slot_A), self.shape.branch), dtype=np.int32)
        given_B = np.concatenate([given[REDRAFTED] for given in pages if REDRAFTED in given])
        pages_AB[has_G[batch.group_A]] = given_B.reshape(-1, pages_AB.shape[1])
        return pages_AB

    def _queries(self, groups: Sequence[SequenceGroup], size: DraftSize) -> int:
        """Tokens of a block that the target runs. In look-ahead blocks were drafted in earlier rounds. Those that are
        shorter than the rows of this one are padded, and where one is longer all have K tokens: this leaves fewer kinds
        of rounds."""
        config, most, steps = self.config, self.shape.target, size.steps
        if not self.rules.ahead(config):
            return most if steps is None else min(most, config.scored(steps))
        if steps is None and not (self._decide and all(g.adaptive for g in groups)):
            return most
        needed = max(group.drafted if group.in_flight else self._pending(group) for group in groups)
        own = config.level_of(max(steps or config.block, size.redrafted + 1))
        return own if needed <= own else most

    def _pending(self, group: SequenceGroup) -> int:
        """Maximum number of tokens of a row that the target has not run. No round of the request is in flight."""
        return int((self.slots.unscored(group.slots) + 1).max())

    def _unconditional(
        self, batch: SlotBatch, pages: list[RoundPages], size: int, shared_G: np.ndarray, width: int | None
    ) -> UnconditionalRows[np.ndarray] | None:
        """Plan the unconditional rows at the target, for a batch of `size` rows; None if no request is guided there.
        `shared_G`: shared positions of the conditional rows; `width`: pages of a row that the round uses, None:
        all."""
        groups, group_A, stream = batch.groups, batch.group_A, Stream(ModelRole.TARGET, unconditional=True)
        guided_G = np.array([stream in given for given in pages])
        if not guided_G.any():
            return None
        is_guided_A, shift_G = guided_G[group_A], np.array([g.negative_size - g.prompt_size for g in groups])
        index_U, size_Y = np.flatnonzero(is_guided_A), batch.size_G[guided_G]
        scale_G = np.where(guided_G, [g.params.guidance_scale for g in groups], 1.0).astype(np.float32)
        slot_U = self.slots.unconditional_S[batch.slot_A[index_U]].astype(np.int64)
        pages_B = np.concatenate([given[stream] for given in pages if stream in given])
        most = room(len(index_U), size)
        return UnconditionalRows(
            scale_A=padded(scale_G[group_A], size, 1.0),
            of_A=padded(np.where(is_guided_A, np.cumsum(is_guided_A) - 1, 0), size, 0),
            index_U=padded(index_U, most, 0),
            slot_U=padded(slot_U, most, self.config.max_slots),
            shift_U=padded(shift_G[group_A[index_U]], most, 0),
            group_U=padded(np.repeat(np.arange(len(size_Y)), size_Y), most, most - 1),
            first_U=padded((np.cumsum(size_Y) - size_Y).astype(np.int32), most, 0),
            size_U=padded(size_Y.astype(np.int32), most, 0),
            shared_U=padded((shared_G + shift_G)[guided_G].astype(np.int32), most, 0),
            pages_UB=padded(pages_B.reshape(len(index_U), -1)[:, :width], most, 0),
        )

    def _weights(self, batch: SlotBatch, size: int) -> np.ndarray | None:
        """Weights of requests with a potential, which has changed them since the last round; NaN for other requests
        [A]."""
        params = batch.params
        if not any(p.potential for p in params):
            return None
        has_potential_G = np.array([p.potential is not None for p in params])
        logw_A = self.slots.logw_S[batch.slot_A]
        return padded(np.where(has_potential_G[batch.group_A], logw_A, np.nan), size, np.nan)

    def _biased(self, batch: SlotBatch) -> int:
        """Maximum number of tokens whose logits a request changes; 0 if no logit is changed any more: there are no
        biases and all answers are longer than their `min_tokens`."""
        if not any(group.params.logit_bias or group.params.min_tokens for group in batch.groups):
            return 0
        # Tokens after the first one of a block may still be drawn or scored.
        next_G = batch.least(self.slots.block_S[batch.slot_A]) + 1
        widths = [
            width_of(group.stop_rules.machine)
            for group, next_ in zip(batch.groups, next_G.tolist())
            if group.params.logit_bias or next_ < group.params.min_tokens
        ]
        return max(widths, default=0)


def _penalties(batch: SlotBatch, size: int) -> Penalties[np.ndarray] | None:
    """Penalties by batch index; None if no group has any."""
    params = batch.params
    if not any(p.penalised for p in params):
        return None
    return Penalties(
        presence_A=batch.by_index([p.presence_penalty for p in params], np.float32, size, 0.0),
        frequency_A=batch.by_index([p.frequency_penalty for p in params], np.float32, size, 0.0),
        repetition_A=batch.by_index([p.repetition_penalty for p in params], np.float32, size, 1.0),
        prompt_A=batch.by_index([g.prompt_size for g in batch.groups], np.int64, size, 0),
    )


def _constraints(batch: SlotBatch, size: int) -> ConstrainedRows[np.ndarray] | None:
    """Constraints by batch index; None if no group has any."""
    groups = batch.groups
    if not any(p.masked for p in batch.params):
        return None
    entries = [g.stop_entry if g.params.masked else 0 for g in groups]
    by_answer = [g.params.masked and g.params.constraint_scope == "answer" for g in groups]
    return ConstrainedRows(
        entry_A=batch.by_index(entries, np.int32, size, 0),
        prompt_A=batch.by_index([g.prompt_size for g in groups], np.int64, size, 0),
        by_answer_A=batch.by_index(by_answer, np.bool_, size, False),
    )


def tree_nodes(rows: Any, groups: int, queries: int) -> Any:
    """Return the number of nodes that trees of `rows` rows in all have room for, in `groups` groups with blocks of
    `queries` tokens: the first token of a block, and (N + 1) / 2 nodes for each further token of N rows. That is a
    little less than such trees have on real text; the likeliest nodes are kept (`benchmarks/notes/real-pair.md`). A
    tree of one row has all of its tokens."""
    return groups + (queries - 1) * (rows + groups) / 2


def node_room(rows: Any, groups: int, queries: Any, batch_size: Any) -> Any:
    """Return the maximum number of nodes of a round with `batch_size` batch indices, padding included: the smallest
    share of its tokens that suffices; 0 if all tokens are needed. All but `groups` may be arrays."""
    tokens, needed = batch_size * queries, tree_nodes(rows, groups, queries)
    room: Any = 0
    for share in reversed(NODE_SHARES):
        nodes = np.floor(share * tokens).astype(np.int64)
        room = np.where(nodes >= needed, nodes, room)
    return room


def shared_nodes(nodes: int, size_G: np.ndarray, queries: int) -> np.ndarray:
    """Divide nodes among trees of `size` rows [G]: each gets one, and the rest in proportion to what it needs
    (`tree_nodes`), but no more than it has tokens. There must be at least one node for each tree."""
    needed_G = tree_nodes(size_G, 1, queries) - 1
    rest_G = (nodes - len(size_G)) * needed_G / max(needed_G.sum(), 1) + ROUNDING
    return np.minimum(1 + rest_G.astype(np.int64), size_G * queries)


def bucket(count: int) -> int:
    """Round up to one of few sizes, four for each doubling: at most a quarter larger."""
    step = 1 << max(0, (count - 1).bit_length() - 3)
    return -(-count // step) * step


def coarse_bucket(count: int, most: int) -> int:
    """Round up to one of fewer sizes, two for each doubling from 8 to 64, else one: at most `bucket(most)`. For rounds
    that draft less than a whole block on all branches, of which there are many kinds."""
    power = 1 << (count - 1).bit_length()
    between = 3 * power // 4
    return min(between if 8 < power <= 64 and count <= between else power, bucket(most))
