"""What each model keeps for every slot between rounds, and how particles enter slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

import numpy as np
import torch
from torch import Tensor

from smc.arrays import to_device
from smc.memory.pages import DUMMY_PAGE
from smc.round.plan import RoundPlan
from smc.stops import START, StopMachine, StopTables
from smc.types import Array, Decoding

KEPT_CANDIDATES = 16
"""Number of candidate tokens that are kept for an inner node."""


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


class JoiningParticles(NamedTuple, Generic[Array]):
    """The numbers of a `SequenceHandoff`, one for each particle; int64, so that one copy takes all."""

    slots_N: Array
    base_N: Array
    limit_N: Array
    least_N: Array
    entry_N: Array
    end_N: Array
    pending_N: Array
    text_N: Array
    bits_N: Array
    """The bits of the float64 log-weight."""
    ended_N: Array
    alive_N: Array
    pending_NQ: Array

    @staticmethod
    def of(group: SequenceHandoff, device: torch.device) -> JoiningParticles[Tensor]:
        """Return the numbers on the device, as views of one tensor in the order of the fields."""
        *each_N, pending_NQ = JoiningParticles[Any](
            slots_N=group.slots_N,
            base_N=group.base,
            limit_N=group.limit,
            least_N=group.least,
            entry_N=group.stops,
            end_N=group.end_N,
            pending_N=group.pending_N,
            text_N=group.text_N,
            bits_N=group.logw_N.view(np.int64),
            ended_N=group.ended_N,
            alive_N=group.alive_N,
            pending_NQ=group.pending_NQ,
        )
        columns = np.broadcast_arrays(*each_N, *pending_NQ.T)
        numbers_FN: Tensor = to_device(np.stack(columns, dtype=np.int64), device)
        return JoiningParticles._make((*numbers_FN[: len(each_N)], numbers_FN[len(each_N) :].T))


class SlotState(NamedTuple):
    """Sequences of particles at one model, by slot; the last slot is a dummy that padding points to. Keys and values
    are stored for all positions but the last `pending`."""

    table_SL: Tensor
    """int32 page of every position."""
    base_S: Tensor
    """int64 number of leading positions whose pages no round changes."""
    end_S: Tensor
    """int64 number of tokens of the sequence, prompt included."""
    limit_S: Tensor
    """int64 maximum number of tokens of the sequence."""
    least_S: Tensor
    """int64 number of leading tokens of the sequence that must not end the answer."""
    pending_SQ: Tensor
    """int64 pending tokens: the sequence's last tokens, in order. Between rounds the draft has one, the target its next
    block (look-ahead) or the block's seed (lockstep)."""
    pending_S: Tensor
    """int64 number of pending tokens, which have no keys and values yet."""
    ended_S: Tensor
    """bool: the last token is terminal, or the slot holds no particle."""
    alive_S: Tensor
    """bool: the slot holds a particle, with or without weight."""
    text_S: Tensor
    """int64 state of the group's stop machine before the pending tokens."""
    logw_S: Tensor
    """float64 log-weight of the particle; at the draft, the log mass by which groups distribute their rows."""
    entry_S: Tensor
    """int64 entry of the group in the stop tables and the bias tables."""
    stops: StopTables

    @staticmethod
    def allocate(slots: int, width: int, pending: int, stops: StopTables, device: torch.device) -> SlotState:
        """`width`: positions of a block table; `pending`: maximum number of tokens without keys and values between
        rounds."""

        def integers(value: int) -> Tensor:
            return torch.full((slots + 1,), value, dtype=torch.int64, device=device)

        return SlotState(
            table_SL=torch.full((slots + 1, width), DUMMY_PAGE, dtype=torch.int32, device=device),
            base_S=integers(0),
            end_S=integers(1),
            limit_S=integers(1),
            least_S=integers(0),
            pending_SQ=torch.zeros(slots + 1, pending, dtype=torch.int64, device=device),
            pending_S=integers(1),
            ended_S=torch.ones(slots + 1, dtype=torch.bool, device=device),
            alive_S=torch.zeros(slots + 1, dtype=torch.bool, device=device),
            text_S=integers(START),
            logw_S=torch.zeros(slots + 1, dtype=torch.float64, device=device),
            entry_S=integers(0),
            stops=stops,
        )

    @property
    def device(self) -> torch.device:
        return self.end_S.device

    @property
    def dummy(self) -> int:
        """The dummy slot."""
        return len(self.end_S) - 1

    def held(self, slot_A: Tensor) -> Tensor:
        """Return the number of positions [A] whose keys and values are stored."""
        return self.end_S[slot_A] - self.pending_S[slot_A]

    def join(self, group: SequenceHandoff) -> Tensor:
        """Write particles to their slots. Returns the slots as an index.

        All numbers take one copy. Assigning a Python number by index would copy it by itself, from memory that is not
        pinned, and such a copy waits for all work queued on the device."""
        there = JoiningParticles.of(group, self.device)
        slots_N = there.slots_N
        for field_S, values_N in (
            (self.base_S, there.base_N),
            (self.limit_S, there.limit_N),
            (self.least_S, there.least_N),
            (self.end_S, there.end_N),
            (self.pending_S, there.pending_N),
            (self.ended_S, there.ended_N.bool()),
            (self.alive_S, there.alive_N.bool()),
            (self.text_S, there.text_N),
            (self.logw_S, there.bits_N.view(torch.float64)),
            (self.entry_S, there.entry_N),
            (self.pending_SQ[:, : there.pending_NQ.shape[1]], there.pending_NQ),
        ):
            field_S.index_copy_(0, slots_N, values_N)
        pages_NL = to_device(group.pages_RL, self.device).expand(len(slots_N), -1)
        self.table_SL[:, : pages_NL.shape[1]].index_copy_(0, slots_N, pages_NL)
        if group.machine is not None:
            self.stops.set(group.stops, group.machine)
        return slots_N

    def reweigh(self, plan: RoundPlan[Tensor]) -> tuple[()]:
        """Replace the particles' log-weights by those of the plan, where it has any. A distinct particle that has lost
        its weight is removed."""
        assert plan.weights_A is not None, "a round with potentials"
        slot_A, given_A = plan.arrays.slot_A, ~torch.isnan(plan.weights_A)
        lost_A = given_A & plan.is_decoded_by(Decoding.DISTINCT) & (plan.weights_A == -torch.inf)
        self.logw_S[slot_A] = torch.where(given_A, plan.weights_A, self.logw_S[slot_A])
        self.alive_S[slot_A] = self.alive_S[slot_A] & ~lost_A
        self.ended_S[slot_A] = self.ended_S[slot_A] | lost_A
        return ()


class BiasTables(NamedTuple):
    """Values that are added to logits on one device, by entry of the stop tables; T tokens of an entry. What an entry
    does not use adds 0 to column 0."""

    column_ZT: Tensor
    """int32 columns of the logits."""
    early_ZT: Tensor
    """float32 values while the answer must not end."""
    late_ZT: Tensor
    """float32 values afterwards."""
    count_Z: Tensor
    """int32 number of columns."""


class InnerNodes(NamedTuple):
    """The inner nodes of the block in flight, by slot; C candidate tokens of a node."""

    token_SKC: Tensor
    """int32 candidate tokens."""
    share_SKC: Tensor
    """float32 log of the candidate's share of the node's mass; -inf: not an outcome."""
    mass_SK: Tensor
    """float64 log mass of the node, on the same scale as the mass of the slot's row."""
    text_SK: Tensor
    """int64 state of the stop machine at the node."""
    count_S: Tensor
    """int64 number of tokens of the block."""

    @staticmethod
    def allocate(slots: int, block: int, columns: int, device: torch.device) -> InnerNodes:
        """`columns`: number of tokens that the draft can propose."""
        shape, most = (slots + 1, block - 1), min(KEPT_CANDIDATES, columns)
        return InnerNodes(
            token_SKC=torch.zeros(*shape, most, dtype=torch.int32, device=device),
            share_SKC=torch.full((*shape, most), -torch.inf, device=device),
            mass_SK=torch.zeros(*shape, dtype=torch.float64, device=device),
            text_SK=torch.zeros(*shape, dtype=torch.int64, device=device),
            count_S=torch.zeros(slots + 1, dtype=torch.int64, device=device),
        )

    @property
    def block(self) -> int:
        """K: tokens of a block."""
        return self.mass_SK.shape[1] + 1

    def forget(self, slots_N: Tensor) -> None:
        """Remove the outcomes of slots that new particles take, each with a block of one token."""
        self.share_SKC.index_fill_(0, slots_N, -torch.inf)
        self.count_S.index_fill_(0, slots_N, 0)
