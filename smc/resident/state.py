"""What each side keeps per slot between rounds, and how an answer grows: integer arithmetic that both sides do alike.

The last slot is a dummy that padding points to. See the package's legend for axes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smc.arrays import to_device
from smc.engine.matcher import DONE, MAX_KINDS, MAX_STATES, START, StopMatcher
from smc.kv.pages import DUMMY_PAGE
from smc.resident.plan import Joining, RoundPlan


@dataclass(frozen=True)
class Growth:
    """What became of tokens that were appended to answers."""

    count_A: Tensor
    """How many exist: up to the first that ends the answer or fills its room."""
    ends_A: Tensor
    """bool: the last of them ends it."""
    text_A: Tensor
    """State of the matcher after them."""


class SlotState:
    """State that both sides have. The entries of `table_SL` past what a slot holds are the pages it will write next."""

    def __init__(self, slots: int, width: int, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self.dummy = slots
        self.table_SL = torch.full((slots + 1, width), DUMMY_PAGE, dtype=torch.int32, device=device)
        self.ended_S = torch.ones(slots + 1, dtype=torch.bool, device=device)
        self.is_stop_SV = torch.zeros(slots + 1, vocab_size, dtype=torch.bool, device=device)
        self.column_L = torch.arange(width, device=device)
        self.text_S = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        """How far a particle has come in its group's stop strings: a state of the matcher."""
        self._kind_SV: Tensor | None = None
        self._next_SXC: Tensor | None = None
        """Tables of a group's matcher, in its first slot; made when a group has one for the first time."""

    def join(self, group: Joining) -> Tensor:
        """Take over a group's pages, stops and ended particles. Returns its slots as an index."""
        start = group.start
        slots_N = to_device(start.slots_N, self.device).long()
        pages_NL = to_device(group.pages_NL, self.device)
        self.table_SL[slots_N, : pages_NL.shape[1]] = pages_NL
        self.ended_S[slots_N] = to_device(start.ended_N, self.device)
        self.is_stop_SV[slots_N] = False
        if start.stop_ids:
            self.is_stop_SV[slots_N[:, None], torch.tensor(start.stop_ids, device=self.device)] = True
        self.text_S[slots_N] = to_device(start.text_N, self.device)
        self._set_matcher(int(start.slots_N[0]), start.matcher)
        return slots_N

    def grow(self, plan: RoundPlan, from_A: Tensor, tokens_AK: Tensor, room_A: Tensor, text_A: Tensor | None = None) -> Growth:
        """Tokens appended to the answers of slots `from`, or to what has come to be in state `text` after those."""
        k = tokens_AK.shape[1]
        text_A = self.text_S[from_A] if text_A is None else text_A
        stop_AK = self.is_stop_SV[from_A[:, None], tokens_AK]
        if plan.matching:
            text_AK = self._match(plan.owner_A, tokens_AK, text_A)
            stop_AK = stop_AK | (text_AK == DONE)
        index_K = torch.arange(1, k + 1, device=self.device)
        first_A = torch.where(stop_AK, index_K, k + 1).amin(-1)
        count_A = torch.minimum(first_A, room_A).clamp(max=k)
        if plan.matching:
            text_A = torch.cat((text_A[:, None], text_AK), 1).gather(1, count_A[:, None])[:, 0]
        return Growth(count_A, (first_A <= count_A) | (count_A == room_A), text_A)

    def _set_matcher(self, slot: int, matcher: StopMatcher | None) -> None:
        if self._kind_SV is None:
            if matcher is None:
                return
            slots, vocabulary = self.is_stop_SV.shape
            self._kind_SV = torch.zeros(slots, vocabulary, dtype=torch.int16, device=self.device)
            self._next_SXC = torch.zeros(slots, MAX_STATES, MAX_KINDS, dtype=torch.int16, device=self.device)
        # All zero, every token leads to the start.
        self._kind_SV[slot] = 0
        self._next_SXC[slot] = 0
        if matcher is not None:
            self._kind_SV[slot] = to_device(matcher.kind_V, self.device)
            states, kinds = matcher.next_XC.shape
            self._next_SXC[slot, :states, :kinds] = to_device(matcher.next_XC, self.device)

    def _match(self, owner_A: Tensor, tokens_AK: Tensor, text_A: Tensor) -> Tensor:
        """States [A, K] after each token."""
        kind_AK, states = self._kind_SV[owner_A[:, None], tokens_AK].long(), []
        for kind_A in kind_AK.unbind(1):
            text_A = self._next_SXC[owner_A, text_A, kind_A].long()
            states.append(text_A)
        return torch.stack(states, 1)

    def reroot(self, slots_A: Tensor, source_AL: Tensor, end_A: Tensor) -> None:
        """Positions below `end` of the slots become those of `source` (rows of a table); the rest stays what it was."""
        self.table_SL[slots_A] = torch.where(self.column_L < end_A[:, None], source_AL, self.table_SL[slots_A])

    def keep_dummy(self) -> None:
        """Padding has written to the dummy slot like any other; it must stay ended, and hold nothing."""
        self.text_S[self.dummy :].fill_(START)
        self.ended_S[self.dummy :].fill_(True)  # a fill, not an assignment, which would copy from the host
