"""What the host sends to the two models: the plan of a round, and particles that join before it. Plans are NumPy arrays
on the host and tensors at the models."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any, Generic, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from smc.algorithm.resampling import Spans
from smc.arrays import is_one_of, map_tensors
from smc.distributions import NO_PROCESSORS, DistributionSpec, Processors
from smc.philox import RoundKeys
from smc.stops import StopMachine
from smc.types import EXACT, SEPARATE, Array, Decoding, ModelRole

SHORT, SHORT_SINGLE = 384, 640
"""Numbers of positions up to which it is cheaper that each row reads them separately: in general, and if hardly any
rows share positions."""
IN_FLIGHT = 9
"""Number of buffers for the rounds of one shape, so that no round overwrites memory that is still in use: two for each
of at most four micro-batches, and one for the next round."""


class Contexts(IntEnum):
    """How a round's rows read the positions before their tokens. Results do not depend on it."""

    SHORT = 0
    """Few positions, which each row reads by itself."""
    SINGLE = 1
    """More positions, in groups with hardly more than one batch index each, so that few queries read the same
    positions."""
    SHARED = 2
    """More positions, in groups with several batch indices; positions that a group shares are read once."""

    @staticmethod
    def of(columns: int, batch_size: int, groups: int) -> Contexts:
        """Choose the fastest way for a round at whose end no row holds more than `columns` positions."""
        short, longer = (SHORT_SINGLE, Contexts.SINGLE) if 2 * batch_size < 3 * groups else (SHORT, Contexts.SHARED)
        return Contexts.SHORT if columns <= short else longer


class UnconditionalRows(NamedTuple, Generic[Array]):
    """The U unconditional sequences (after negative prompts) that guided batch indices have at one model in a round,
    group after group. See `smc.executor.guidance`. U is padded, and the number of their groups is padded to U. A
    padding row belongs to the dummy slot, to batch index 0 and to the last group, which then has size 0."""

    scale_A: Array
    """float32 scale of guidance; 1: no guidance."""
    of_A: Array
    """int64 index, among the U, of the batch index's unconditional row; 0 if it has none."""
    index_U: Array
    """int64 batch index that the unconditional row belongs to."""
    slot_U: Array
    """int64 slot whose block table is the unconditional row's."""
    shift_U: Array
    """int64 number of positions by which its sequence is longer than that of the batch index; negative if it is
    shorter."""
    group_U: Array
    """int64 group of the unconditional row, counted among groups of such rows."""
    first_U: Array
    """int32 first unconditional row of each group."""
    size_U: Array
    """int32 number of unconditional rows of each group."""
    shared_U: Array
    """int32 number of leading positions at which the unconditional rows of a group have the same tokens."""
    pages_UB: Array
    """int32 pages of the unconditional row, one for each page that its batch index gets for the round; those for
    pending tokens come first."""


class Penalties(NamedTuple, Generic[Array]):
    """Penalties of a round with penalised requests, per batch index; see `smc.executor.logit_changes`."""

    presence_A: Array
    """float32 presence penalty; 0: none."""
    frequency_A: Array
    """float32 frequency penalty; 0: none."""
    repetition_A: Array
    """float32 repetition penalty; 1: none."""
    prompt_A: Array
    """int64 number of tokens of the prompt."""


class ConstrainedRows(NamedTuple, Generic[Array]):
    """Constraints of a round with constrained requests, per batch index; see `smc.executor.masks`."""

    entry_A: Array
    """int32 entry of the stop tables, whose machine has the constraint; 0: none."""
    prompt_A: Array
    """int64 number of tokens of the prompt."""
    by_answer_A: Array
    """bool: the distribution is that of whole answers, given the constraint."""


@dataclass(frozen=True)
class RoundKind:
    """The static part of a plan: rounds of one kind run the same operations on the same shapes, so they share their
    recordings."""

    contexts: Contexts
    decodings: frozenset[Decoding]
    """How groups may be decoded. A round of several kinds counts as one of all three common ones."""
    steps: int | None = None
    """Number of tokens by which the draft extends every row; None: all K of a block. Rounds have fewer where
    the latency model chooses it, or a request has a K of its own."""
    biased: int = 0
    """Maximum number of tokens whose logits are changed for a row, one of `smc.executor.logit_changes.WIDTHS`; 0: no
    row has any."""
    every_step: bool = False
    """The draft waits for the masks of all its steps; otherwise only for those of the first step."""
    has_answers: bool = False
    """`ConstrainedRows.by_answer` is true for some batch index."""
    nodes: int = 0
    """Maximum number of tokens that the target runs, if blocks that begin with the same tokens run these only once
    (`smc.executor.verify`): only in rounds in which all groups have draft trees. 0: it runs every block by itself."""
    raw_logprobs: bool = False
    """The target also reports log-probabilities under the softmax of its own logits."""
    redrafted: int = 0
    """R: tokens that the draft first drafts for groups whose last round was a miss (`smc.executor.redraft`)."""
    batch_size: int = 0
    """A."""
    branches: int = 0
    """F: number of rows that the draft grows for every batch index."""
    queries: int = 0
    """Q: tokens of a block that the target runs."""
    chains: int = 0
    """P: length of `RoundArrays.chain_P`."""
    unconditional: int = 0
    """U; 0: no row is guided."""
    target_processors: Processors = NO_PROCESSORS
    """Processors of the target's distributions that some row uses."""
    draft_processors: Processors = NO_PROCESSORS
    penalised: bool = False
    constrained: bool = False
    weighted: bool = False
    """The host has set weights."""

    @property
    def has_exact(self) -> bool:
        """Whether any group may be decoded exactly."""
        return bool(self.decodings & EXACT)

    @property
    def all_exact(self) -> bool:
        """Whether all groups are decoded exactly."""
        return self.decodings <= EXACT

    @property
    def has_separate(self) -> bool:
        """Whether the rows of any group may continue separately."""
        return bool(self.decodings & SEPARATE)

    @property
    def has_competing(self) -> bool:
        """Whether the rows of any group compete for its places: in a walk, rejection, or a distinct population."""
        return bool(self.decodings - SEPARATE)

    @property
    def roles(self) -> tuple[ModelRole, ...]:
        """The models that take part. The first one drafts, or decodes alone."""
        return next(iter(self.decodings)).roles


class RoundArrays(NamedTuple, Generic[Array]):
    """The arrays of every plan, which kernels read."""

    slot_A: Array
    """int64 slot."""
    group_A: Array
    """int64 group."""
    particle_A: Array
    """int64 index of the particle in its group."""
    seed_A: Array
    """int64 seed of the request."""
    round_A: Array
    """int64, from 1: part of the key of random numbers."""
    alpha_A: Array
    """float64 power to which the target's distribution is raised."""
    exponent_A: Array
    """float32 exponent of coupled drafting (`smc.algorithm.coupling`); 0: the group's rows are not coupled."""
    first_G: Array
    """int32 first batch index of each group."""
    size_G: Array
    """int32 number of batch indices of each group."""
    count_G: Array
    """int32 number of particles before the round's selection."""
    next_count_G: Array
    """int32 number of particles after the round's selection, which draws them."""
    shared_G: Array
    """int32 number of leading positions at which all particles of a group have the same tokens."""
    threshold_G: Array
    """float64: an effective sample size below this share of N leads to resampling."""
    decoding_G: Array
    """int32 `smc.types.Decoding`."""
    nodes_G: Array
    """int32 maximum number of different tokens that the target runs for the group's tree; see `RoundKind.nodes`."""
    scheme_G: Array
    """int32 index of `smc.api.limits.SCHEME_NAMES`."""
    chain_P: Array
    """int64 batch indices of groups whose rows are chains, group after group; padded by repeating the first one."""
    distribution_P: Array
    """int64 index at which the draft keeps the distributions of each of these chains."""
    target_pages_AQ: Array
    """int32 pages for the tokens that the target runs."""
    begin_pages_AQ: Array
    """int32 pages for a particle's pending tokens, at the draft or the model that decodes alone."""
    branch_pages_XB: Array
    """int32 pages for those tokens of branches that run within the round, branch after branch."""

    @property
    def branches(self) -> int:
        """F: number of rows that the draft grows for every batch index."""
        return len(self.branch_pages_XB) // len(self.slot_A)

    @property
    def groups(self) -> Spans:
        """The batch indices of every group."""
        return Spans(cast(Any, self.first_G), cast(Any, self.size_G))


@dataclass(frozen=True)
class RoundPlan(Generic[Array]):
    """Plan of one round of G groups on A batch indices: everything about the round that does not depend on the models'
    outputs. Both numbers are padded: a padding batch index belongs to the dummy slot and to a padding group, whose size
    is 0."""

    kind: RoundKind
    columns: int
    """Maximum number of positions that any row holds when the round ends."""
    arrays: RoundArrays[Array]
    target_distribution: DistributionSpec[Array]
    """The target's distributions, per batch index."""
    draft_distribution: DistributionSpec[Array]
    target_unconditional: UnconditionalRows[Array] | None = None
    """Unconditional rows at the target; None: no row is guided."""
    penalties: Penalties[Array] | None = None
    """None: no row is penalised."""
    constraints: ConstrainedRows[Array] | None = None
    """None: no row is constrained."""
    weights_A: Array | None = None
    """float64 log-weights that the host has set since the last round by applying potentials; NaN: the models' own
    weights stay. None: no request has a potential."""
    redraft_pages_AB: Array | None = None
    """int32 pages at the draft for tokens that are run to draft again; 0 for groups that never do. None: the round does
    not draft again."""

    def sized(self) -> RoundPlan[Array]:
        """Return the plan with the sizes of its arrays, and the parts that it has, noted in its kind."""
        arrays, unconditional = self.arrays, self.target_unconditional
        kind = replace(
            self.kind,
            batch_size=len(arrays.slot_A),
            branches=arrays.branches,
            queries=arrays.target_pages_AQ.shape[1],
            chains=len(arrays.chain_P),
            unconditional=0 if unconditional is None else len(unconditional.index_U),
            target_processors=self.target_distribution.active,
            draft_processors=self.draft_distribution.active,
            penalised=self.penalties is not None,
            constrained=self.constraints is not None,
            weighted=self.weights_A is not None,
        )
        return replace(self, kind=kind)

    @property
    def parts(self) -> tuple[Any, ...]:
        """Everything that has arrays."""
        return tuple(getattr(self, name) for name in PARTS)

    @property
    def keys_G(self: RoundPlan[Tensor]) -> RoundKeys:
        """Keys of each group's random numbers: those of its first batch index."""
        first_G = self.arrays.first_G.long().clamp(max=len(self.arrays.seed_A) - 1)
        return RoundKeys(self.arrays.seed_A[first_G], self.arrays.round_A[first_G])

    def penalising(self: RoundPlan[Tensor], index_R: Tensor) -> RoundPlan[Tensor]:
        """Return the plan with the penalties of rows that belong to these batch indices."""
        return replace(self, penalties=map_tensors(lambda values_A: values_A[index_R], self.penalties))

    def with_target_pages(self: RoundPlan[Tensor], pages_AQ: Tensor) -> RoundPlan[Tensor]:
        """Return the plan with other pages for the tokens that the target runs."""
        return replace(self, arrays=self.arrays._replace(target_pages_AQ=pages_AQ))

    def unconditional_at(self, role: ModelRole) -> UnconditionalRows[Array] | None:
        return self.target_unconditional if role is ModelRole.TARGET else None

    def is_decoded_by(self: RoundPlan[Tensor], *decodings: Decoding) -> Tensor:
        """Return bool [A]: the batch index's group is decoded in one of these ways."""
        return is_one_of(self.arrays.decoding_G, decodings)[self.arrays.group_A]

    @property
    def is_exact_G(self: RoundPlan[Tensor]) -> Tensor:
        """bool: the group is decoded exactly."""
        return is_one_of(self.arrays.decoding_G, EXACT)

    @property
    def is_separate_G(self: RoundPlan[Tensor]) -> Tensor:
        """bool: the rows of the group continue separately."""
        return is_one_of(self.arrays.decoding_G, SEPARATE)

    @property
    def is_exact_A(self: RoundPlan[Tensor]) -> Tensor:
        return self.is_exact_G[self.arrays.group_A]

    def index_of_rows(self: RoundPlan[Tensor], width: int) -> Tensor:
        """Return the batch index that each row belongs to, int64 [X], if every batch index has `width` rows."""
        slot_A = self.arrays.slot_A
        return torch.arange(len(slot_A), device=slot_A.device).repeat_interleave(width)

    def any_of_group(self: RoundPlan[Tensor], mask_R: Tensor, group_R: Tensor | None = None) -> Tensor:
        """Return whether a mask holds anywhere in a group, bool [G]. `group_R`: the group of every entry; by default
        there is one for each batch index."""
        counts_G = torch.zeros(len(self.arrays.first_G), device=mask_R.device)
        return counts_G.index_add(0, self.arrays.group_A if group_R is None else group_R, mask_R.float()) > 0


PARTS = tuple(field.name for field in fields(RoundPlan))[2:]
"""Fields of a plan that have arrays."""


@dataclass(frozen=True)
class SequenceHandoff:
    """Particles that take part at one model from the next round on. Their request starts or is resumed."""

    slots_N: np.ndarray
    """int32 slots."""
    pages_RL: np.ndarray
    """int32 page of every position whose keys and values are stored: [N, L], or [1, L] if all particles have the
    same."""
    base: int
    """Number of leading positions whose pages no round changes: those of the prompt."""
    limit: int
    """Maximum number of tokens of a sequence, prompt included."""
    least: int
    """Number of leading tokens of a sequence, prompt included, that must not end the answer."""
    end_N: np.ndarray
    """int32 number of tokens of the sequence so far, prompt included."""
    pending_NQ: np.ndarray
    """int32 last tokens of the sequence, whose keys and values are not stored yet."""
    pending_N: np.ndarray
    """int32 number of these tokens, at least 1."""
    logq_NQ: np.ndarray
    """float32 log-probability of these tokens under the proposal; that of the first one is not used."""
    ended_N: np.ndarray
    """bool: the last token is terminal."""
    alive_N: np.ndarray
    """bool: the slot holds a particle. A slot without one counts as ended."""
    text_N: np.ndarray
    """int32 state of the stop machine before the pending tokens."""
    logw_N: np.ndarray
    """float64 log-weight."""
    stops: int
    """Entry of the request in the stop tables."""
    machine: StopMachine | None
    """Stop machine to write to that entry; None: it is already there."""
    tokens_RL: np.ndarray | None = None
    """int32 token of every page of `pages_RL`, for a request with penalties or a constraint; None for other
    requests."""
