"""What each side keeps per slot between rounds. The last slot is a dummy that padding points to. See the package's legend for axes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from smc.arrays import to_device
from smc.executor.biases import BiasTables, Lives
from smc.executor.outcome import Choice
from smc.executor.plan import Join
from smc.memory.pages import DUMMY_PAGE
from smc.stops import START, StopTables
from smc.types import TensorOptions


class SlotState:
    """Sequences of `slots` particles, as one model knows them: keys and values of all positions but the last `pending` are there."""

    def __init__(
        self, slots: int, width: int, pending: int, stops: StopTables, device: torch.device, advance: Advance | None = None
    ) -> None:
        """`width`: positions of a block table; `pending`: tokens at most whose keys and values are not there between rounds; `advance`:
        what writes how sequences go on, the reference if not given."""
        integers: TensorOptions = {"dtype": torch.int64, "device": device}
        self.device, self.dummy, self.stops = device, slots, stops
        self._advance = advance or write_advance
        self.table_SL = torch.full((slots + 1, width), DUMMY_PAGE, dtype=torch.int32, device=device)
        self.base_S = torch.zeros(slots + 1, **integers)
        """Leading positions whose pages no round changes."""
        self.end_S = torch.ones(slots + 1, **integers)
        """Tokens of the sequence, the prompt's included."""
        self.limit_S = torch.ones(slots + 1, **integers)
        """Tokens that it may have."""
        self.least_S = torch.zeros(slots + 1, **integers)
        """Of its tokens, the first so many do not end the answer."""
        self.pending_SQ = torch.zeros(slots + 1, pending, **integers)
        """The sequence's last tokens, in their order."""
        self.pending_S = torch.ones(slots + 1, **integers)
        """How many of those have no keys and values yet."""
        self.ended_S = torch.ones(slots + 1, dtype=torch.bool, device=device)
        """The last token is terminal, or the slot holds no particle."""
        self.alive_S = torch.zeros(slots + 1, dtype=torch.bool, device=device)
        """The slot holds a particle, be it without weight."""
        self.text_S = torch.full((slots + 1,), START, **integers)
        """State of the group's stop machine before the pending tokens."""
        self.logw_S = torch.zeros(slots + 1, dtype=torch.float64, device=device)
        """Log-weight of the particle; at the draft, what rows are dealt out by."""
        self.entry_S = torch.zeros(slots + 1, **integers)
        """The group's entry of the stop tables, and of those of biases."""
        self.biases: list[BiasTables] = []

    def join(self, group: Join) -> Tensor:
        """Take over particles. Returns their slots as an index."""
        slots_N = self._here(group.slots_N)
        self.table_SL[slots_N, : group.pages_XL.shape[1]] = to_device(group.pages_XL, self.device)
        self.base_S[slots_N] = group.base
        self.limit_S[slots_N] = group.limit
        self.least_S[slots_N] = group.least
        self.end_S[slots_N] = self._here(group.end_N)
        self.pending_SQ[slots_N, : group.pending_NQ.shape[1]] = self._here(group.pending_NQ)
        self.pending_S[slots_N] = self._here(group.pending_N)
        self.ended_S[slots_N] = to_device(group.ended_N, self.device)
        self.alive_S[slots_N] = to_device(group.alive_N, self.device)
        self.text_S[slots_N] = self._here(group.text_N)
        self.logw_S[slots_N] = to_device(group.logw_N, self.device)
        self.entry_S[slots_N] = group.stops
        if group.machine is not None:
            self.stops.set(group.stops, group.machine)
            for biases in self.biases:
                biases.set(group.stops, group.machine)
        return slots_N

    @property
    def lives(self) -> Lives:
        """What biases depend on."""
        return self.entry_S, self.least_S

    def held(self, slot_A: Tensor) -> Tensor:
        """Positions [A] whose keys and values are there."""
        return self.end_S[slot_A] - self.pending_S[slot_A]

    def advance(self, slot_A: Tensor, choice: Choice, end_A: Tensor, tokens_AW: Tensor, pending_A: Tensor, text_A: Tensor) -> None:
        """Sequences end at `end`, with so many pending tokens of these; `text` is the state before them."""
        self._advance(self, slot_A, choice, end_A, tokens_AW, pending_A, text_A)

    def _here(self, values: np.ndarray) -> Tensor:
        return to_device(values, self.device).long()


Advance = Callable[[SlotState, Tensor, Choice, Tensor, Tensor, Tensor, Tensor], None]


def write_advance(
    state: SlotState, slot_A: Tensor, choice: Choice, end_A: Tensor, tokens_AW: Tensor, pending_A: Tensor, text_A: Tensor
) -> None:
    """`SlotState.advance`: the reference, in plain torch; `smc.executor.kernel_follow` has what GPUs use."""
    state.end_S[slot_A] = end_A
    state.pending_SQ[slot_A, : tokens_AW.shape[1]] = tokens_AW
    state.pending_S[slot_A] = pending_A
    state.text_S[slot_A] = text_A
    state.ended_S[slot_A], state.alive_S[slot_A] = choice.ended_A, choice.alive_A
    state.logw_S[slot_A] = choice.mass_A
    # Padding has written to the dummy slot like any other; it must stay ended, and short.
    # Fills: an assignment would copy from the host.
    state.alive_S[state.dummy :].fill_(False)
    state.logw_S[state.dummy :].fill_(0.0)
    state.ended_S[state.dummy :].fill_(True)
    state.end_S[state.dummy :].fill_(1)
    state.pending_S[state.dummy :].fill_(1)
