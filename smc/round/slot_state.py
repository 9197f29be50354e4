"""What each model keeps for every slot between rounds."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from smc.memory.pages import DUMMY_PAGE
from smc.stops import START, StopTables

KEPT_CANDIDATES = 16
"""Number of candidate tokens that are kept for an inner node."""


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
        self.share_SKC[slots_N] = -torch.inf
        self.count_S[slots_N] = 0
