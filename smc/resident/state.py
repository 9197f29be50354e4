"""What each side keeps per slot between rounds, and how an answer grows: integer arithmetic that both sides do alike.

The last slot is a dummy that padding points to. See the package's legend for axes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smc.arrays import to_device
from smc.kv.pages import DUMMY_PAGE
from smc.resident.plan import Joining


class SlotState:
    """State that both sides have. The entries of `table_SL` past what a slot holds are the pages it will write next."""

    def __init__(self, slots: int, width: int, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self.dummy = slots
        self.table_SL = torch.full((slots + 1, width), DUMMY_PAGE, dtype=torch.int32, device=device)
        self.ended_S = torch.ones(slots + 1, dtype=torch.bool, device=device)
        self.is_stop_SV = torch.zeros(slots + 1, vocab_size, dtype=torch.bool, device=device)
        self.column_L = torch.arange(width, device=device)

    def join(self, group: Joining) -> Tensor:
        """Take over a group's pages, stops and ended particles. Returns its slots as an index."""
        slots_N = to_device(group.slots_N, self.device).long()
        pages_NL = to_device(group.pages_NL, self.device)
        self.table_SL[slots_N, : pages_NL.shape[1]] = pages_NL
        self.ended_S[slots_N] = to_device(group.ended_N, self.device)
        self.is_stop_SV[slots_N] = False
        if group.stop_ids:
            self.is_stop_SV[slots_N[:, None], torch.tensor(group.stop_ids, device=self.device)] = True
        return slots_N

    def grow(self, slots_A: Tensor, tokens_AK: Tensor, room_A: Tensor) -> tuple[Tensor, Tensor]:
        """How many of the tokens exist [A], up to the first that ends the answer or fills its room; and whether it has ended [A]."""
        k = tokens_AK.shape[1]
        stop_AK = self.is_stop_SV[slots_A[:, None], tokens_AK]
        index_K = torch.arange(1, k + 1, device=self.device)
        first_A = torch.where(stop_AK, index_K, k + 1).amin(-1)
        count_A = torch.minimum(first_A, room_A).clamp(max=k)
        return count_A, (first_A <= count_A) | (count_A == room_A)

    def reroot(self, slots_A: Tensor, source_AL: Tensor, end_A: Tensor) -> None:
        """Positions below `end` of the slots become those of `source` (rows of a table); the rest stays what it was."""
        self.table_SL[slots_A] = torch.where(self.column_L < end_A[:, None], source_AL, self.table_SL[slots_A])

    def keep_dummy(self) -> None:
        """Padding has written to the dummy slot like any other; it must stay ended, and hold nothing."""
        self.ended_S[self.dummy :].fill_(True)  # a fill, not an assignment, which would copy from the host
