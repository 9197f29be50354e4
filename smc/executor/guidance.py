"""Guidance: beside a sequence runs its companion, the same answer after the negative prompt, and the distribution is
that of l_u + s (l_c - l_u), l_c the logits after the prompt and l_u those after the negative one.

Logits, not log-probabilities: the two differ by a constant of the row, which the softmax after it takes away, so
nothing is normalised twice. Temperature and truncation come afterwards. Companions are further rows of the same pass:
at the target of every guided request. A round names a page
beside each one that it gives a guided place, so wherever names of pages go, through trees that are re-parented and
after the choice, companions follow. See the package's legend for axes; U companions of places, Y companions of their
rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smc.executor.forward import Rows, StaticForward
from smc.executor.ops import RoundOps
from smc.executor.plan import RoundPlan, UnconditionalRows
from smc.executor.state import SlotState
from smc.types import ModelRole


@dataclass(frozen=True)
class GuidedPass:
    """A model's logits for the tokens of rows, guided where the plan says so: then companions of their rows run with
    them. Every place has equally many rows."""

    forward: StaticForward
    logits: Callable[[Tensor], Tensor]
    """Of hidden states, [R, V], or [R, M] of a head of its own."""
    state: SlotState
    guide: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """See `smc.executor.sampling.Sampling.guide`."""
    ops: RoundOps
    role: ModelRole
    beside_P: Tensor
    """int32: of every page of a guided place in this round, the companion's beside it."""

    def begin(self, plan: RoundPlan[Tensor], pending_AP: Tensor, pages_AW: Tensor) -> None:
        """A round begins that gives its places pages: for pending tokens, which are run from the tables, and for what
        is run after them."""
        companions, state = plan.companions_at(self.role), self.state
        if companions is None:
            return
        place_U, slot_U1, theirs_UW = companions.place_U, companions.slot_U[:, None], companions.pages_UW
        own_UW, pending = torch.cat((pending_AP[place_U], pages_AW[place_U]), 1), pending_AP.shape[1]
        # Padding stands beside the dummy page.
        own_UW = torch.where(_exist(companions)[:, None], own_UW, 0)
        self.beside_P.index_copy_(0, own_UW.flatten().long(), theirs_UW.flatten())
        held_U1 = (state.held(plan.slot_A[place_U]) + companions.shift_U)[:, None]
        state.table_SL[slot_U1, held_U1 + torch.arange(pending, device=state.device)] = theirs_UW[:, :pending]

    def __call__(
        self,
        plan: RoundPlan[Tensor],
        tokens_T: Tensor,
        rows: Rows,
        asked_R: Tensor | None = None,
        root_R: Tensor | None = None,
    ) -> Tensor:
        """Logits after all tokens [T, V], or after one of each row [R, V], the `asked`-th of the T. `root_R`: the place
        whose particle a row continues, if not its own."""
        companions, q = plan.companions_at(self.role), rows.queries
        if companions is None:
            hidden_TE = self.forward(tokens_T, rows)
            return self.logits(hidden_TE if asked_R is None else hidden_TE[asked_R])
        width = len(rows.slot_R) // len(plan.slot_A)
        row_Y = _rows(companions.place_U, width)
        theirs_YQ = tokens_T.view(-1, q)[row_Y]
        hidden_TE = self.forward(
            torch.cat((tokens_T, theirs_YQ.flatten())), self._with_companions(companions, rows, row_Y, root_R)
        )
        own, each = len(tokens_T), q
        if asked_R is not None:
            beside_Y = own + torch.arange(len(row_Y), device=row_Y.device) * q + asked_R[row_Y] % q
            hidden_TE, own, each = hidden_TE[torch.cat((asked_R, beside_Y))], len(asked_R), 1
        logits_TV = self.logits(hidden_TE)
        scale_T = companions.scale_A.repeat_interleave(width * each)
        return self.guide(logits_TV[:own], logits_TV[own:], _rows(companions.of_A, width * each), scale_T)

    def follow(
        self, plan: RoundPlan[Tensor], ancestor_A: Tensor, pages_XB: Tensor, row_A: Tensor, *, pending: bool
    ) -> None:
        """After the choice, before sequences have moved on: companions of places go on with those of places `ancestor`,
        then with what is beside the pages of this round that row `row` has, after the `pending` tokens if these were
        given pages of their own."""
        companions, state = plan.companions_at(self.role), self.state
        if companions is None:
            return
        place_U, slot_U = companions.place_U, companions.slot_U
        ancestor_U, tail_UB = ancestor_A[place_U], self.beside_P[pages_XB[row_A[place_U]].long()]
        from_U = plan.slot_A[ancestor_U]
        end_U = (state.end_S[from_U] if pending else state.held(from_U)) + companions.shift_U
        source_U = _slots_of(companions, ancestor_U, slot_U)
        self.ops.remap_block_table(state.table_SL, slot_U, source_U, state.base_S[slot_U], end_U, tail_UB, plan.columns)

    def _with_companions(
        self, companions: UnconditionalRows[Tensor], rows: Rows, row_Y: Tensor, root_R: Tensor | None
    ) -> Rows:
        """The rows, and after them companions of those in `row`: the same tokens, each at its own position.

        What a companion holds is in the table of its own slot; of pages that a row has for itself, it has those beside
        them."""
        width = len(row_Y) // len(companions.place_U)
        shift_Y, exist_Y = (values_U.repeat_interleave(width) for values_U in (companions.shift_U, _exist(companions)))
        slot_Y = companions.slot_U.repeat_interleave(width)
        if root_R is not None:
            slot_Y = _slots_of(companions, root_R[row_Y], slot_Y)
        tail_RB, tail_R = rows.tail_RB, rows.tail_R
        if tail_RB is not None and tail_R is not None:
            tail_RB = torch.cat((tail_RB, self.beside_P[tail_RB[row_Y].long()]))
            tail_R = torch.cat((tail_R, (tail_R[row_Y] + shift_Y).int()))
        return replace(
            rows,
            slot_R=torch.cat((rows.slot_R, slot_Y.int())),
            tail_RB=tail_RB,
            tail_R=tail_R,
            start_R=torch.cat((rows.start_R, (rows.start_R[row_Y] + shift_Y).int())),
            count_R=torch.cat((rows.count_R, torch.where(exist_Y, rows.count_R[row_Y], 0))).int(),
            group_R=torch.cat((rows.group_R, (companions.group_U.repeat_interleave(width) + len(rows.first_G)).int())),
            first_G=torch.cat((rows.first_G, companions.first_U * width + len(rows.slot_R))),
            size_G=torch.cat((rows.size_G, companions.size_U * width)),
            shared_G=torch.cat((rows.shared_G, companions.shared_U)),
        )


def _slots_of(companions: UnconditionalRows[Tensor], place_Y: Tensor, own_Y: Tensor) -> Tensor:
    """int64 [Y]: slots of the companions of places; where there is none but padding, its own."""
    exist_Y = _exist(companions).repeat_interleave(len(own_Y) // len(companions.place_U))
    return torch.where(exist_Y, companions.slot_U[companions.of_A[place_Y]], own_Y)


def _rows(place_U: Tensor, width: int) -> Tensor:
    """int64 [U * width]: where everything comes `width` times, the places of what these have."""
    return (place_U[:, None] * width + torch.arange(width, device=place_U.device)).flatten()


def _exist(companions: UnconditionalRows[Tensor]) -> Tensor:
    """bool [U]: all but padding."""
    return companions.size_U[companions.group_U] > 0
