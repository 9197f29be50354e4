"""Messages from the host to the two models about rounds: the plan of a round, and particles that join. NumPy arrays on
the host, tensors at the models.

See the package's legend for axes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import cycle
from typing import Any, Generic, cast

import numpy as np
import torch
from torch import Tensor

from smc.algorithm.expansion import PopulationKind
from smc.distributions import DistributionSpec
from smc.stops import StopMachine
from smc.types import Array, ModelRole

ALIGNMENT = 16
SHORT, SHORT_SINGLE = 384, 640
"""Numbers of positions up to which it is cheaper that each row reads them separately: in general, and if hardly any
rows share positions."""
PARTS = ("target_distribution", "draft_distribution", "target_unconditional", "penalties", "constraints")
"""Fields of a plan that are dataclasses of arrays."""
IN_FLIGHT = 9
"""Number of buffers for the rounds of one shape, so that no round overwrites memory that is still in use: two for each
of at most four micro-batches, and one for the next round."""


class Program(StrEnum):
    """The models that a round runs."""

    PAIR = "pair"
    """The draft proposes; the target scores and chooses."""
    TARGET = "target"
    """The target decodes alone."""
    DRAFT = "draft"
    """The draft decodes alone."""


class Contexts(StrEnum):
    """How a round's rows read the positions before their tokens. Results do not depend on it."""

    SHORT = "short"
    """Few positions, which each row reads by itself."""
    SINGLE = "single"
    """More positions, in groups with hardly more than one batch index each, so that few queries read the same
    positions."""
    SHARED = "shared"
    """More positions, in groups with several batch indices; positions that a group shares are read once."""

    @staticmethod
    def of(columns: int, batch_size: int, groups: int) -> Contexts:
        """Choose the fastest way for a round at whose end no row holds more than `columns` positions."""
        short, longer = (SHORT_SINGLE, Contexts.SINGLE) if 2 * batch_size < 3 * groups else (SHORT, Contexts.SHARED)
        return Contexts.SHORT if columns <= short else longer


@dataclass(frozen=True)
class SequenceHandoff:
    """Particles that take part at one model from the next round on. Their request starts or is resumed."""

    slots_N: np.ndarray
    """int32 slots."""
    pages_XL: np.ndarray
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
    tokens_XL: np.ndarray | None = None
    """int32 token of every page of `pages_XL`, for a request with penalties or a constraint; None for other
    requests."""


@dataclass(frozen=True)
class UnconditionalRows(Generic[Array]):
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
    pages_UW: Array
    """int32 pages of the unconditional row, one for each page that its batch index gets for the round; those for
    pending tokens come first."""


@dataclass(frozen=True)
class Penalties(Generic[Array]):
    """Penalties of a round with penalised requests, per batch index; see `smc.executor.state`."""

    presence_A: Array
    """float32 presence penalty; 0: none."""
    frequency_A: Array
    """float32 frequency penalty; 0: none."""
    repetition_A: Array
    """float32 repetition penalty; 1: none."""
    prompt_A: Array
    """int64 number of tokens of the prompt."""


@dataclass(frozen=True)
class ConstrainedRows(Generic[Array]):
    """Constraints of a round with constrained requests, per batch index; see `smc.executor.masks`."""

    entry_A: Array
    """int32 entry of the stop tables, whose machine has the constraint; 0: none."""
    prompt_A: Array
    """int64 number of tokens of the prompt."""
    by_answer_A: Array
    """bool: the distribution is that of whole answers, given the constraint."""
    every_step: bool
    """The draft waits for the masks of all its steps; otherwise only for those of the first step."""
    has_answers: bool
    """`by_answer` is true for some batch index."""


@dataclass(frozen=True)
class RoundPlan(Generic[Array]):
    """Plan of one round of G groups on A batch indices: everything about the round that does not depend on the models'
    outputs. Both numbers are padded: a padding batch index belongs to the dummy slot and to a padding group, whose size
    is 0."""

    program: Program
    contexts: Contexts
    columns: int
    """Maximum number of positions that any row holds when the round ends."""
    kinds: frozenset[PopulationKind]
    """How groups may be continued. A round with more than one kind counts as one of all three common kinds."""
    target_distribution: DistributionSpec[Array]
    """The target's distributions, per batch index."""
    draft_distribution: DistributionSpec[Array]
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
    """int32 number of particles before the round's choice."""
    draws_G: Array
    """int32 number of particles after the round's choice."""
    shared_G: Array
    """int32 number of leading positions at which all particles of a group have the same tokens."""
    threshold_G: Array
    """float64: an effective sample size below this share of N leads to resampling."""
    kind_G: Array
    """int32 `smc.algorithm.expansion.PopulationKind`: how the group is continued."""
    chain_C: Array
    """int64 batch indices of groups whose rows are chains, group after group; padded by repeating the first one."""
    distribution_C: Array
    """int64 index at which the draft keeps the distributions of each of these chains."""
    scheme_G: Array
    """int32 index of `smc.algorithm.resampling.SCHEME_NAMES`."""
    target_pages_AQ: Array
    """int32 pages for the tokens that the target runs."""
    begin_pages_AP: Array
    """int32 pages for a particle's pending tokens, at the draft or the model that decodes alone."""
    branch_pages_XB: Array
    """int32 pages for those tokens of branches that run within the round, branch after branch."""
    biased: int = 0
    """Maximum number of tokens whose logits are changed for a row, one of `smc.executor.state.WIDTHS`; 0: no row has
    any."""
    steps: int | None = None
    """Number of tokens by which the draft extends every row; None: all K of a block. Only rounds of exact decoding
    alone have fewer."""
    target_unconditional: UnconditionalRows[Array] | None = None
    """Unconditional rows at the target; None: no row is guided."""
    penalties: Penalties[Array] | None = None
    """None: no row is penalised."""
    constraints: ConstrainedRows[Array] | None = None
    """None: no row is constrained."""
    raw_logprobs: bool = False
    """The target also reports log-probabilities under the softmax of its own logits."""
    weights_A: Array | None = None
    """float64 log-weights that the host has set since the last round by applying potentials; NaN: the models' own
    weights stay. None: no request has a potential."""

    @property
    def branches(self) -> int:
        """F: number of rows that the draft grows for every batch index."""
        return len(self.branch_pages_XB) // len(self.slot_A)

    @property
    def seed_G(self: RoundPlan[Tensor]) -> Tensor:
        return self._of_group(self.seed_A)

    @property
    def round_G(self: RoundPlan[Tensor]) -> Tensor:
        return self._of_group(self.round_A)

    @property
    def key(self) -> tuple:
        """Key of recorded rounds: rounds with the same key run the same operations on the same shapes."""
        return (
            self.program,
            self.contexts,
            len(self.slot_A),
            len(self.chain_C),
            self.branches,
            self.steps,
            self.biased,
            tuple(sorted(self.kinds)),
            *(
                tuple(sorted(distribution.active))
                for distribution in (self.target_distribution, self.draft_distribution)
            ),
            len(self.target_unconditional.index_U) if self.target_unconditional else 0,
            self.penalties is not None,
            (self.constraints.every_step, self.constraints.has_answers) if self.constraints else None,
            self.weights_A is not None,
            self.raw_logprobs,
        )

    def unconditional_at(self, role: ModelRole) -> UnconditionalRows[Array] | None:
        return self.target_unconditional if role is ModelRole.TARGET else None

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all arrays by name; an array of a part is named `part.name`."""
        own = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        parts = {name: getattr(self, name) for name in PARTS}
        within = {
            f"{part}.{name}": value for part, values in parts.items() if values for name, value in vars(values).items()
        }
        return own | {name: value for name, value in within.items() if isinstance(value, np.ndarray)}

    def with_arrays(self, tensors: dict[str, Tensor]) -> RoundPlan[Tensor]:
        """Return the same plan over tensors of the same names."""
        found: dict[str, Any] = {}
        within: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in tensors.items():
            part, _, field = name.rpartition(".")
            (within[part] if part else found)[field] = tensor
        found |= {part: replace(getattr(self, part), **values) for part, values in within.items()}
        return replace(cast(Any, self), **found)

    def has_kind(self: RoundPlan[Tensor], kind: PopulationKind) -> Tensor:
        """Return bool [A]: the batch index's group is of this kind."""
        return (self.kind_G == kind)[self.group_A]

    @property
    def is_exact_G(self: RoundPlan[Tensor]) -> Tensor:
        """bool: the group is decoded exactly."""
        return self.kind_G >= PopulationKind.BEST

    @property
    def is_exact_A(self: RoundPlan[Tensor]) -> Tensor:
        return self.is_exact_G[self.group_A]

    @property
    def has_exact(self) -> bool:
        """Whether any group may be decoded exactly."""
        return max(self.kinds) >= PopulationKind.BEST

    @property
    def all_exact(self) -> bool:
        """Whether all groups are decoded exactly."""
        return min(self.kinds) >= PopulationKind.BEST

    def index_of_rows(self: RoundPlan[Tensor], width: int) -> Tensor:
        """Return the batch index that each row belongs to, int64 [X], if every batch index has `width` rows."""
        return torch.arange(len(self.slot_A), device=self.slot_A.device).repeat_interleave(width)

    def any_of_group(self: RoundPlan[Tensor], mask_XR: Tensor, group_R: Tensor) -> Tensor:
        """Return whether a mask holds anywhere in a group, bool [X, G]; `group_R` is the group of every entry."""
        counts_XG = torch.zeros(len(mask_XR), len(self.first_G), device=mask_XR.device)
        return counts_XG.index_add(1, group_R, mask_XR.float()) > 0

    def _of_group(self: RoundPlan[Tensor], values_A: Tensor) -> Tensor:
        return values_A[self.first_G.long().clamp(max=len(values_A) - 1)]


class PlanBuffer:
    """Memory for the arrays of plans of one key, in one piece, so that one copy brings a plan to a device."""

    def __init__(self, plan: RoundPlan[np.ndarray], device: torch.device) -> None:
        offset = 0
        self._spans = {}
        arrays = plan.arrays()
        for name, array in arrays.items():
            self._spans[name] = (offset, array.nbytes)
            offset += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        # Used in turn: the next plan is written while those before it are still being copied.
        pinned = device.type == "cuda"
        self._hosts = cycle(
            [torch.zeros(offset, dtype=torch.uint8, pin_memory=pinned) for _ in range(IN_FLIGHT if pinned else 1)]
        )
        self._there = torch.zeros(offset, dtype=torch.uint8, device=device)
        self._tensors = {name: self._view(self._there, name, array) for name, array in arrays.items()}

    def load(self, plan: RoundPlan[np.ndarray]) -> RoundPlan[Tensor]:
        """Copy a plan to the device. Returns it over tensors that are the same in every call."""
        host = next(self._hosts)
        for name, array in plan.arrays().items():
            self._view(host, name, array).numpy()[...] = array
        self._there.copy_(host, non_blocking=True)
        return plan.with_arrays(self._tensors)

    def _view(self, memory: Tensor, name: str, like: np.ndarray) -> Tensor:
        begin, size = self._spans[name]
        return memory[begin : begin + size].view(torch.from_numpy(like[:0]).dtype).view(like.shape)
