"""Guidance on the target: beside every place's sequence runs its companion, the same answer after the negative prompt, and the law is that
of l_u + s (l_c - l_u), l_c the logits after the prompt and l_u those after the negative one.

Logits, not log-probabilities: the two differ by a constant of the row, which the softmax after it takes away, so nothing is normalised
twice. Temperature and truncation come afterwards; the draft is not guided. A companion is a further row of the same pass, at the
target alone; its pages follow the choice as its place's do. See the package's legend for axes; U companions.
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
    guide: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """See `smc.runtime.sampling.Sampling.guide`."""
    reroot: tables.Reroot

    def __call__(
        self, plan: RoundPlan, tokens_T: Tensor, rows: Rows, asked_X: Tensor | None = None, root_R: Tensor | None = None
    ) -> Tensor:
        companions, q = plan.companions, rows.queries
        if companions is None:
            return super().__call__(plan, tokens_T, rows, asked_X)
        theirs_UQ, tokens = tokens_T.view(-1, q)[companions.place_U], len(tokens_T)
        both = with_companions(self.state, companions, rows, root_R)
        logits_XV = self.logits(self.forward(torch.cat((tokens_T, theirs_UQ.flatten())), both))
        of_AQ = companions.of_A[:, None] * q + torch.arange(q, device=tokens_T.device)
        scale_T = companions.scale_A.repeat_interleave(q)
        guided_TV = self.guide(logits_XV[:tokens], logits_XV[tokens:], of_AQ.flatten(), scale_T)
        return guided_TV if asked_X is None else guided_TV[asked_X]

    def follow(self, plan: RoundPlan, ancestor_A: Tensor, block_A: Tensor) -> None:
        """Companions' pages do."""
        companions, state = plan.companions, self.state
        if companions is None:
            return
        slot_U, place_U = companions.slot_U, companions.place_U
        source_U, block_U = (_beside(companions, values_A) for values_A in (ancestor_A, block_A))
        end_U = state.held(plan.slot_A[ancestor_A[place_U]]) + companions.shift_U
        tail_UW = companions.pages_UW[block_U]
        self.reroot(state.table_SL, slot_U, slot_U[source_U], state.base_S[slot_U], end_U, tail_UW, plan.columns)


def with_companions(state: SlotState, companions: Companions[Tensor], rows: Rows, root_R: Tensor | None) -> Rows:
    """The rows, and after them those of companions: the same tokens, each at its own position.

    What a companion holds is in the table of its own slot; pages of what this round runs are its place's.
    """
    place_U, shift_U = companions.place_U, companions.shift_U
    slot_U = companions.slot_U if root_R is None else companions.slot_U[_beside(companions, root_R)]
    begin_U = state.held(rows.slot_R[place_U].long()) + shift_U
    width = companions.pages_UW.shape[1]
    tail_RB, tail_R = rows.tail_RB, rows.tail_R
    if tail_RB is None or tail_R is None:
        # All are in the table: no position lies beyond it.
        tail_RB, tail_R = rows.start_R.new_zeros(len(rows.start_R), width), torch.full_like(rows.start_R, state.table_SL.shape[1])
    else:
        tail_RB = pad(tail_RB, (0, width - tail_RB.shape[1]))
    return replace(
        rows,
        slot_R=torch.cat((rows.slot_R, slot_U.int())),
        tail_RB=torch.cat((tail_RB, companions.pages_UW)),
        tail_R=torch.cat((tail_R, begin_U.int())),
        start_R=torch.cat((rows.start_R, (rows.start_R[place_U] + shift_U).int())),
        count_R=torch.cat((rows.count_R, torch.where(_exist(companions), rows.count_R[place_U], 0))).int(),
        group_R=torch.cat((rows.group_R, companions.group_U.int() + len(rows.first_G))),
        first_G=torch.cat((rows.first_G, companions.first_U + len(rows.slot_R))),
        size_G=torch.cat((rows.size_G, companions.size_U)),
        shared_G=torch.cat((rows.shared_G, companions.shared_U)),
    )


def _exist(companions: Companions[Tensor]) -> Tensor:
    """bool [U]: all but padding."""
    return companions.size_U[companions.group_U] > 0


def _beside(companions: Companions[Tensor], place_A: Tensor) -> Tensor:
    """int64 [U]: where a place goes on with another, that one's companion; of padding, itself."""
    own_U = torch.arange(len(companions.place_U), device=place_A.device)
    return torch.where(_exist(companions), companions.of_A[place_A[companions.place_U]], own_U)
