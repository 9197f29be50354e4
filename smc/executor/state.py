"""What each model keeps per slot between rounds, and what is added to logits before they become a token distribution:
the biases of requests, and -inf for tokens that would end an answer too early. The last slot is a dummy that padding
points to.

Both models' logits are changed alike, so proposals stay close to the target's distribution, and every log-probability
is of the distribution after the change. Only rounds of requests that ask for it do so. `add_biases` is the torch form;
`smc.kernels.sampling` has the Triton form.

See the package's legend for axes; E entries of the tables, B tokens of an entry, R rows, V columns."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from smc.algorithm.expansion import PopulationKind
from smc.api.limits import MAX_BIASES, MAX_STOP_IDS
from smc.arrays import to_device
from smc.executor.plan import RoundPlan, SequenceHandoff
from smc.memory.pages import DUMMY_PAGE
from smc.stops import START, StopMachine, StopTables
from smc.types import TensorOptions

MAX_EOS = 64
WIDTHS = (16, 256, MAX_STOP_IDS + MAX_BIASES + MAX_EOS)
"""Tokens of an entry that rounds look at: rounds of few kinds are worth more than few operations."""


def biased_tokens(machine: StopMachine) -> dict[int, tuple[float, float]]:
    """What is added to a token's logit while the answer must not end, and afterwards."""
    found = {token: (bias, bias) for token, bias in machine.biases}
    return found | {token: (-np.inf, found.get(token, (0.0, 0.0))[1]) for token in machine.stop_ids}


def width_of(machine: StopMachine) -> int:
    """The width of rounds with a request of this machine."""
    count = len({token for token, _ in machine.biases}.union(machine.stop_ids))
    return next(width for width in WIDTHS if count <= width)


class BiasTables:
    """What is added on one device, by entry of the stop tables."""

    def __init__(self, entries: int, columns: int, device: torch.device, ids_M: np.ndarray | None = None) -> None:
        """`columns`: of the logits; `ids_M`: the token of each, ascending, where they are not all tokens in their
        order."""
        self.device, self._columns, self._ids_M = device, columns, ids_M
        self.column_EB = torch.zeros(entries, WIDTHS[-1], dtype=torch.int32, device=device)
        self.early_EB, self.late_EB = torch.zeros(2, entries, WIDTHS[-1], device=device)
        self.count_E = torch.zeros(entries, dtype=torch.int32, device=device)

    def set(self, entry: int, machine: StopMachine) -> None:
        """Tokens that have no column are left out."""
        added = biased_tokens(machine)
        token_B = np.array(sorted(added), dtype=np.int64)
        column_B = token_B
        if self._ids_M is not None:
            column_B = np.searchsorted(self._ids_M, token_B).clip(max=len(self._ids_M) - 1)
            column_B = np.where(self._ids_M[column_B] == token_B, column_B, self._columns)
        is_there_B = column_B < self._columns
        values_B2 = np.array([added[token] for token in token_B[is_there_B].tolist()], dtype=np.float32).reshape(-1, 2)
        count = len(values_B2)
        self.count_E[entry].fill_(count)
        # Past them a row adds 0, to whichever column.
        early_B, late_B = np.ascontiguousarray(values_B2.T)
        for table_EB, values_B in (
            (self.column_EB, column_B[is_there_B]),
            (self.early_EB, early_B),
            (self.late_EB, late_B),
        ):
            table_EB[entry].fill_(0)
            table_EB[entry, :count] = to_device(values_B, self.device).to(table_EB.dtype)


SlotEntries = tuple[Tensor, Tensor]
"""Of all slots: entries, and how many tokens of the sequence do not end it."""


def add_biases(
    tables: BiasTables, entries: SlotEntries, logits_RV: Tensor, slot_X: Tensor, position_R: Tensor, width: int
) -> Tensor:
    """Logits of rows, as many for each of X slots, whose next token is at `position` of the sequence. They may be
    changed in place."""
    entry_S, least_S = entries
    slot_R = slot_X.long().repeat_interleave(len(logits_RV) // len(slot_X))
    entry_R, is_early_R1 = entry_S[slot_R], (position_R < least_S[slot_R])[:, None]
    value_RB = torch.where(is_early_R1, tables.early_EB[entry_R, :width], tables.late_EB[entry_R, :width])
    return logits_RV.scatter_add(1, tables.column_EB[entry_R, :width].long(), value_RB.to(logits_RV.dtype))


class SlotState:
    """Sequences of `slots` particles, as one model knows them: keys and values of all positions but the last `pending`
    are there."""

    def __init__(
        self,
        slots: int,
        width: int,
        pending: int,
        stops: StopTables,
        device: torch.device,
    ) -> None:
        """`width`: positions of a block table; `pending`: tokens at most whose keys and values are not there between
        rounds."""
        integers: TensorOptions = {"dtype": torch.int64, "device": device}
        self.device, self.dummy, self.stops = device, slots, stops
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
        self.nan = torch.full((1, 1), torch.nan, device=device)
        """For reports of draws that were not seen, without a launch."""

    def join(self, group: SequenceHandoff) -> Tensor:
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

    def reweigh(self, plan: RoundPlan[Tensor]) -> tuple[()]:
        """Particles get the log-weights of the plan, where it has any. A distinct particle without weight is none."""
        if plan.weights_A is None:
            return ()
        slot_A, given_A = plan.slot_A, ~torch.isnan(plan.weights_A)
        lost_A = given_A & plan.has_kind(PopulationKind.DISTINCT) & (plan.weights_A == -torch.inf)
        self.logw_S[slot_A] = torch.where(given_A, plan.weights_A, self.logw_S[slot_A])
        self.alive_S[slot_A] = self.alive_S[slot_A] & ~lost_A
        self.ended_S[slot_A] = self.ended_S[slot_A] | lost_A
        return ()

    @property
    def entries(self) -> SlotEntries:
        """What biases depend on."""
        return self.entry_S, self.least_S

    def held(self, slot_A: Tensor) -> Tensor:
        """Positions [A] whose keys and values are there."""
        return self.end_S[slot_A] - self.pending_S[slot_A]

    def _here(self, values: np.ndarray) -> Tensor:
        return to_device(values, self.device).long()
