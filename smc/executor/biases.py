"""What is added to logits before they become a law: the biases of requests, and -inf for what would end an answer too early. The reference,
in plain torch; `smc.kernels.biases` has what GPUs use.

Both models' logits are changed alike, so proposals stay close to the target's law, and every log-probability is of the law after it. It is
done in no round but those of requests that ask for it. Axes: E entries of the tables, B tokens of an entry, R rows, V columns, S slots.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from smc.api.limits import MAX_BIASES, MAX_STOP_IDS
from smc.arrays import to_device
from smc.stops import StopMachine

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
        """`columns`: of the logits; `ids_M`: the token of each, ascending, where they are not all tokens in their order."""
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
        for table_EB, values_B in ((self.column_EB, column_B[is_there_B]), (self.early_EB, early_B), (self.late_EB, late_B)):
            table_EB[entry].fill_(0)
            table_EB[entry, :count] = to_device(values_B, self.device).to(table_EB.dtype)


Lives = tuple[Tensor, Tensor]
"""Of all slots: entries, and how many tokens of the sequence do not end it."""
AddBiases = Callable[[BiasTables, Lives, Tensor, Tensor, Tensor, int], Tensor]


def add_biases(tables: BiasTables, lives: Lives, logits_RV: Tensor, slot_X: Tensor, position_R: Tensor, width: int) -> Tensor:
    """Logits of rows, as many for each of X slots, whose next token is at `position` of the sequence. They may be changed in place."""
    entry_S, least_S = lives
    slot_R = slot_X.long().repeat_interleave(len(logits_RV) // len(slot_X))
    entry_R, is_early_R1 = entry_S[slot_R], (position_R < least_S[slot_R])[:, None]
    value_RB = torch.where(is_early_R1, tables.early_EB[entry_R, :width], tables.late_EB[entry_R, :width])
    return logits_RV.scatter_add(1, tables.column_EB[entry_R, :width].long(), value_RB.to(logits_RV.dtype))
