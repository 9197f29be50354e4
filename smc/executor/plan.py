"""What the host tells the two models about rounds. NumPy on the host's side, tensors on the models'.

See the package's legend for axes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Generic, cast

import numpy as np
import torch
from torch import Tensor

from smc.algorithm.expansion import PopulationKind
from smc.algorithm.resampling import Bounds
from smc.distributions import DistributionSpec
from smc.stops import StopMachine
from smc.types import Array, ModelRole

ALIGNMENT = 16
SHORT, SHORT_SINGLE = 384, 640
"""Positions up to which it is cheaper that each row reads them by itself, in general and where hardly any row shares
them."""
PARTS = ("target_distribution", "draft_distribution", "target_unconditional", "penalties", "constraints")
"""Of a plan, those that hold arrays themselves."""
IN_FLIGHT = 9
"""Rounds of one shape whose memory must not be used again yet: two for each of at most four micro-batches, and the
next."""


class Program(StrEnum):
    """Which models a round runs, and how."""

    PAIR = "pair"
    """The draft proposes, the target weighs and chooses."""
    TARGET = "target"
    """The target decodes alone."""
    DRAFT = "draft"
    """The draft decodes alone."""


class Contexts(StrEnum):
    """How a round's rows read the positions before their tokens. What comes of it is the same."""

    SHORT = "short"
    """Few positions, which each row reads by itself."""
    SINGLE = "single"
    """More, of groups with hardly more than one batch index each: few queries read the same."""
    SHARED = "shared"
    """More, of groups with several batch indices, for which what they share is read once."""

    @staticmethod
    def of(columns: int, batch_size: int, groups: int) -> Contexts:
        """Where no row holds more than `columns` positions when the round ends."""
        short, longer = (SHORT_SINGLE, Contexts.SINGLE) if 2 * batch_size < 3 * groups else (SHORT, Contexts.SHARED)
        return Contexts.SHORT if columns <= short else longer


@dataclass(frozen=True)
class SequenceHandoff:
    """Particles that take part on one side from the next round on: a request that starts, or one that is
    resumed."""

    slots_N: np.ndarray
    """int32."""
    pages_XL: np.ndarray
    """int32 [N, L], or [1, L] where all have the same: page of every position whose keys and values are there."""
    base: int
    """Leading positions whose pages no round will change: the prompt's."""
    limit: int
    """Tokens, prompt included, that a sequence may have."""
    least: int
    """Of a sequence's tokens, prompt included, the first so many do not end the answer."""
    end_N: np.ndarray
    """int32 tokens of the sequence so far, prompt included."""
    pending_NQ: np.ndarray
    """int32: the last of them, whose keys and values are not there yet."""
    pending_N: np.ndarray
    """int32: how many those are; at least 1."""
    logq_NQ: np.ndarray
    """float32 log-probability of those under the proposal; the first one's is not used."""
    ended_N: np.ndarray
    """bool: the last token is terminal."""
    alive_N: np.ndarray
    """bool: the slot holds a particle; one that does not has ended, too."""
    text_N: np.ndarray
    """int32 state of the stop machine before the pending tokens."""
    logw_N: np.ndarray
    """float64."""
    stops: int
    """Entry of the stop tables."""
    machine: StopMachine | None
    """What belongs there; None: it is there already."""
    tokens_XL: np.ndarray | None = None
    """int32 token of every page of `pages_XL`, for a request with penalties or a constraint; None: it has none."""


@dataclass(frozen=True)
class UnconditionalRows(Generic[Array]):
    """Of a round with guided requests, at one model: the U sequences that guided batch indices have there besides,
    after the negative prompts, group after group. See `smc.executor.guidance`. U is padded, and so is the number of
    their groups, to as many: a padding one is of the dummy slot, of batch index 0 and of the last group, which has none
    then."""

    scale_A: Array
    """float32 scale of guidance; 1: none."""
    of_A: Array
    """int64 which of the U is the batch index's; 0 where a batch index has none."""
    index_U: Array
    """int64 the batch index that it is of."""
    slot_U: Array
    """int64 slot of which the block table is the unconditional row's."""
    shift_U: Array
    """int64 positions by which its sequence is longer than the batch index's; below 0, shorter."""
    group_U: Array
    """int64 which of their groups it belongs to."""
    first_U: Array
    """int32 first unconditional row of each group."""
    size_U: Array
    """int32 unconditional rows of each group."""
    shared_U: Array
    """int32 leading positions at which the unconditional rows of a group have the same tokens."""
    pages_UW: Array
    """int32 pages beside those that its batch index is given for the round, pending tokens first."""


@dataclass(frozen=True)
class Penalties(Generic[Array]):
    """Of a round with penalised requests, per batch index; see `smc.executor.state`."""

    presence_A: Array
    """float32; 0: none."""
    frequency_A: Array
    """float32; 0: none."""
    repetition_A: Array
    """float32; 1: none."""
    prompt_A: Array
    """int64 tokens of the prompt."""


@dataclass(frozen=True)
class ConstrainedRows(Generic[Array]):
    """Of a round with constrained requests, per batch index; see `smc.executor.masks`."""

    entry_A: Array
    """int32 entry of the stop tables, whose machine has the constraint; 0: none."""
    prompt_A: Array
    """int64 tokens of the prompt."""
    by_answer_A: Array
    """bool: the distribution is that of whole answers, given the constraint."""
    every_step: bool
    """The draft waits for the masks of all of its steps; else of the first."""
    has_answers: bool
    """`by_answer` holds somewhere."""


@dataclass(frozen=True)
class RoundPlan(Generic[Array]):
    """One round of G groups on A batch indices: everything about it that does not depend on what a model says. Arrays,
    or tensors where the model is. Both numbers are padded: a padding batch index is of the dummy slot and of a padding
    group, which has no batch indices."""

    program: Program
    contexts: Contexts
    columns: int
    """Positions that any row holds when the round ends, at most."""
    kinds: frozenset[PopulationKind]
    """How groups may be continued; where more than one is, all three that are common."""
    target_distribution: DistributionSpec[Array]
    """Per batch index."""
    draft_distribution: DistributionSpec[Array]
    slot_A: Array
    """int64."""
    group_A: Array
    """int64."""
    particle_A: Array
    """int64 number of the particle in its group."""
    seed_A: Array
    """int64."""
    round_A: Array
    """int64, from 1: part of the key of random numbers."""
    alpha_A: Array
    """float64."""
    exponent_A: Array
    """float32 exponent of coupled drafting (`smc.algorithm.coupling`); 0: the group is not drafted so."""
    first_G: Array
    """int32 first batch index."""
    size_G: Array
    """int32 batch indices."""
    count_G: Array
    """int32 particles before the round's choice."""
    draws_G: Array
    """int32 particles after it."""
    shared_G: Array
    """int32 leading positions at which all particles of a group have the same tokens."""
    threshold_G: Array
    """float64 share of N below which the effective sample size leads to resampling."""
    kind_G: Array
    """int32 `smc.algorithm.expansion.PopulationKind`: how the group is continued."""
    chain_C: Array
    """int64 batch indices of groups whose rows are chains, group after group; padded by repeating the first."""
    distribution_C: Array
    """int64 where the draft keeps the distributions of each."""
    scheme_G: Array
    """int32 index of `smc.algorithm.resampling.SCHEME_NAMES`."""
    target_pages_AQ: Array
    """int32 pages for the tokens that the target runs."""
    begin_pages_AP: Array
    """int32 pages for a particle's pending tokens, at the draft or the model that decodes alone."""
    branch_pages_XB: Array
    """int32 pages for the tokens of branches that are run within the round, branch after branch."""
    biased: int = 0
    """Tokens at most whose logits are changed for a row, of `smc.executor.state.WIDTHS`; 0: of no row."""
    steps: int | None = None
    """Tokens that the draft extends every row by; None: all K of a block. Fewer in rounds of exact decoding alone."""
    target_unconditional: UnconditionalRows[Array] | None = None
    """None: no row is guided."""
    penalties: Penalties[Array] | None = None
    """None: no row is penalised."""
    constraints: ConstrainedRows[Array] | None = None
    """None: no row is constrained."""
    weights_A: Array | None = None
    """float64 log-weights that particles have had since the last round, as potentials were applied to them; NaN: as the
    models have them. None: no request has a potential."""

    @property
    def branches(self) -> int:
        """F: rows that the draft makes of every batch index."""
        return len(self.branch_pages_XB) // len(self.slot_A)

    @property
    def bounds(self: RoundPlan[Tensor]) -> Bounds:
        return Bounds(self.first_G, self.size_G, self.count_G, self.draws_G)

    @property
    def seed_G(self: RoundPlan[Tensor]) -> Tensor:
        return self._of_group(self.seed_A)

    @property
    def round_G(self: RoundPlan[Tensor]) -> Tensor:
        return self._of_group(self.round_A)

    @property
    def key(self) -> tuple:
        """Rounds of the same key run the same operations on the same shapes."""
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
        )

    def unconditional_at(self, role: ModelRole) -> UnconditionalRows[Array] | None:
        return self.target_unconditional if role is ModelRole.TARGET else None

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays, by name."""
        own = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        parts = {name: getattr(self, name) for name in PARTS}
        within = {
            f"{part}.{name}": value for part, values in parts.items() if values for name, value in vars(values).items()
        }
        return own | {name: value for name, value in within.items() if isinstance(value, np.ndarray)}

    def with_arrays(self, tensors: dict[str, Tensor]) -> RoundPlan[Tensor]:
        """The same plan over tensors of the same names."""
        parts: dict[str, dict[str, Tensor]] = {name: {} for name in PARTS}
        for name, tensor in tensors.items():
            if "." in name:
                part, field = name.split(".")
                parts[part][field] = tensor
        unconditional, penalties = parts["target_unconditional"], parts["penalties"]
        constraints = self.constraints
        return RoundPlan(
            program=self.program,
            contexts=self.contexts,
            columns=self.columns,
            kinds=self.kinds,
            target_distribution=DistributionSpec(
                **parts["target_distribution"], active=self.target_distribution.active
            ),
            draft_distribution=DistributionSpec(**parts["draft_distribution"], active=self.draft_distribution.active),
            biased=self.biased,
            steps=self.steps,
            target_unconditional=UnconditionalRows(**unconditional) if unconditional else None,
            penalties=Penalties(**penalties) if penalties else None,
            constraints=constraints and replace(cast(Any, constraints), **parts["constraints"]),
            **{name: tensor for name, tensor in tensors.items() if "." not in name},
        )

    def has_kind(self: RoundPlan[Tensor], kind: PopulationKind) -> Tensor:
        """bool [A]: the batch index's group is continued so."""
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
        """Some group may be decoded exactly."""
        return max(self.kinds) >= PopulationKind.BEST

    @property
    def all_exact(self) -> bool:
        """No group is decoded otherwise."""
        return min(self.kinds) >= PopulationKind.BEST

    def index_of_rows(self: RoundPlan[Tensor], width: int) -> Tensor:
        """int64 [X]: where every batch index has `width` rows, the batch index that each belongs to."""
        return torch.arange(len(self.slot_A), device=self.slot_A.device).repeat_interleave(width)

    def any_of_group(self: RoundPlan[Tensor], mask_XR: Tensor, group_R: Tensor) -> Tensor:
        """Whether a mask holds anywhere in a group, bool [X, G]; `group_R` names the group of every entry."""
        counts_XG = torch.zeros(len(mask_XR), len(self.first_G), device=mask_XR.device)
        return counts_XG.index_add(1, group_R, mask_XR.float()) > 0

    def _of_group(self: RoundPlan[Tensor], values_A: Tensor) -> Tensor:
        return values_A[self.first_G.long().clamp(max=len(values_A) - 1)]


class PlanBuffer:
    """A plan's arrays in one piece of memory, so that one copy brings them to a device; for plans of one key."""

    def __init__(self, plan: RoundPlan[np.ndarray], device: torch.device) -> None:
        offset = 0
        self._spans = {}
        arrays = plan.arrays()
        for name, array in arrays.items():
            self._spans[name] = (offset, array.nbytes)
            offset += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        self.nbytes = offset
        # In turn: the next plan is written while those before it are still on their way.
        pinned = device.type == "cuda"
        self._hosts = [
            torch.zeros(offset, dtype=torch.uint8, pin_memory=pinned) for _ in range(IN_FLIGHT if pinned else 1)
        ]
        self._turn = 0
        self._there = torch.zeros(offset, dtype=torch.uint8, device=device)
        self._tensors = {name: self._view(self._there, name, array) for name, array in arrays.items()}

    def load(self, plan: RoundPlan[np.ndarray]) -> RoundPlan[Tensor]:
        """Bring a plan of the key to the device: always the same tensors."""
        host = self._hosts[self._turn]
        self._turn = (self._turn + 1) % len(self._hosts)
        for name, array in plan.arrays().items():
            self._view(host, name, array).numpy()[...] = array
        self._there.copy_(host, non_blocking=True)
        return plan.with_arrays(self._tensors)

    def _view(self, memory: Tensor, name: str, like: np.ndarray) -> Tensor:
        begin, size = self._spans[name]
        return memory[begin : begin + size].view(torch.from_numpy(like[:0]).dtype).view(like.shape)
