"""Guidance on the target: beside every place's sequence runs its companion, the same answer after the negative prompt, and the law is that
of l_u + s (l_c - l_u), l_c the logits after the prompt and l_u those after the negative one.

Logits, not log-probabilities: the two differ by a constant of the row, which the softmax after it takes away, so nothing is normalised
twice. Temperature and truncation come afterwards; the draft is not guided. A companion is a further row of the same pass, at the
target alone; its pages follow the choice as its place's do. See the package's legend for axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from smc.runtime import tables
from smc.runtime.forward import Rows, StaticForward
from smc.runtime.plan import Companions, RoundPlan
from smc.runtime.state import SlotState


@dataclass(frozen=True)
class Pass:
    """A model's logits for the tokens of rows; who is guided does not concern it."""

    forward: StaticForward
    logits: Callable[[Tensor], Tensor]
    """Of hidden states, [R, V], or [R, M] of a head of its own."""

    def __call__(
        self, plan: RoundPlan, tokens_T: Tensor, rows: Rows, asked_X: Tensor | None = None, root_R: Tensor | None = None
    ) -> Tensor:
        """Logits after all tokens [T, V], or those asked about [X, V]. `root_R`: the place whose particle a row continues, if not its
        own."""
        hidden_TE = self.forward(tokens_T, rows)
        return self.logits(hidden_TE if asked_X is None else hidden_TE[asked_X])

    def follow(self, plan: RoundPlan, ancestor_A: Tensor, block_A: Tensor) -> None:
        """What else is kept of particles follows the choice, before their own sequences have moved on: place `ancestor` goes on, with what
        was run for the block of place `block`."""


@dataclass(frozen=True)
class GuidedPass(Pass):
    """One that runs the companions of guided places, too. Every place has one row."""

    state: SlotState
    guide: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Logits [T, V] of rows and of their companions, and scales [T] -> guided logits [T, V]."""
    reroot: tables.Reroot

    def __call__(
        self, plan: RoundPlan, tokens_T: Tensor, rows: Rows, asked_X: Tensor | None = None, root_R: Tensor | None = None
    ) -> Tensor:
        if plan.companions is None:
            return super().__call__(plan, tokens_T, rows, asked_X)
        both = with_companions(self.state, plan.companions, rows, root_R)
        logits_2TV, tokens = self.logits(self.forward(tokens_T.repeat(2), both)), len(tokens_T)
        scale_T = plan.companions.scale_A.repeat_interleave(rows.queries)
        guided_TV = self.guide(logits_2TV[:tokens], logits_2TV[tokens:], scale_T)
        return guided_TV if asked_X is None else guided_TV[asked_X]

    def follow(self, plan: RoundPlan, ancestor_A: Tensor, block_A: Tensor) -> None:
        """Companions' pages do."""
        companions, state = plan.companions, self.state
        if companions is None:
            return
        slot_A, source_A = companions.slot_A, companions.slot_A[ancestor_A]
        end_A = state.held(plan.slot_A[ancestor_A]) + companions.shift_A
        self.reroot(state.table_SL, slot_A, source_A, state.base_S[slot_A], end_A, companions.pages_AW[block_A], plan.columns)


def with_companions(state: SlotState, companions: Companions[Tensor], rows: Rows, root_R: Tensor | None) -> Rows:
    """The rows, and after them those of their companions: the same tokens, each at its own position, and none where nobody guides.

    What a companion holds is in the table of its own slot; pages of what this round runs are its place's.
    """
    slot_R, shift_R, is_guided_R = companions.slot_A, companions.shift_A, companions.scale_A != 1
    if root_R is not None:
        slot_R = slot_R[root_R]
    begin_R = state.held(rows.slot_R.long()) + shift_R
    width = companions.pages_AW.shape[1]
    tail_RB, tail_R = rows.tail_RB, rows.tail_R
    if tail_RB is None or tail_R is None:
        # All are in the table: no position lies beyond it.
        tail_RB, tail_R = torch.zeros_like(companions.pages_AW), torch.full_like(rows.start_R, state.table_SL.shape[1])
    else:
        tail_RB = pad(tail_RB, (0, width - tail_RB.shape[1]))
    return replace(
        rows,
        slot_R=torch.cat((rows.slot_R, slot_R.int())),
        tail_RB=torch.cat((tail_RB, companions.pages_AW)),
        tail_R=torch.cat((tail_R, begin_R.int())),
        start_R=torch.cat((rows.start_R, (rows.start_R + shift_R).int())),
        count_R=torch.cat((rows.count_R, rows.count_R * is_guided_R)).int(),
        group_R=torch.cat((rows.group_R, rows.group_R + len(rows.first_G))),
        first_G=torch.cat((rows.first_G, rows.first_G + len(rows.slot_R))),
        size_G=torch.cat((rows.size_G, companions.size_G)),
        shared_G=torch.cat((rows.shared_G, companions.shared_G)),
    )
