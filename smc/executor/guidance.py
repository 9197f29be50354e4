"""Guidance: beside a sequence runs its unconditional row, which is the same answer after the negative prompt. The
guided logits are l_u + s (l_c - l_u), with l_c the logits after the prompt and l_u those after the negative prompt.

The formula uses logits instead of log-probabilities: the two differ by a constant for each row, which the softmax
afterwards removes, so nothing is normalised twice. Temperature and truncation come afterwards. Unconditional rows are
further rows of the same pass, at the target, for every guided request. The plan of a round names a page beside each
page of a guided batch index, so unconditional rows follow wherever page numbers go: through trees that are reparented
and after the selection.

Local axes: U unconditional rows of a batch, Y those of a pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from smc.executor.forward import StaticForward
from smc.round.plan import RoundPlan, UnconditionalRows
from smc.round.tensors import PageTokens, RowGroups, Rows, RowSpans, RowTables, SlotState
from smc.types import ModelRole


class PassLogits(NamedTuple):
    """Logits after tokens of a pass, or after one token of each row."""

    logits_TV: Tensor
    """Guided and penalised as the plan says."""
    raw_TV: Tensor | None
    """The model's own logits; None: the round does not report log-probabilities under them."""


@dataclass(frozen=True)
class GuidedPass:
    """Computes a model's logits for the tokens of rows, guided where the plan says so: then the unconditional rows run
    in the same pass. All batch indices have equally many rows."""

    forward: StaticForward
    logits: Callable[[Tensor], Tensor]
    """Maps hidden states to logits [R, V], or to [R, M] with a head of its own."""
    state: SlotState
    guide: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """See `smc.executor.sampling.Sampling.guide`."""
    penalise: Callable[..., Tensor]
    """See `smc.executor.logit_changes.penalise`."""
    remap_block_table: Callable[..., None]
    """See `smc.executor.select.remap_block_table`."""
    role: ModelRole
    beside_B: Tensor
    """int32: for every page of a guided batch index in this round, the unconditional row's page beside it."""
    page_tokens: PageTokens

    def begin(self, plan: RoundPlan[Tensor], pending_AQ: Tensor, pages_AB: Tensor) -> None:
        """Begin a round that gives its batch indices pages: `pending` for pending tokens, which are read from the block
        tables, and `pages` for the tokens that run after them."""
        unconditional, state = plan.unconditional_at(self.role), self.state
        if unconditional is None:
            return
        index_U, slot_U1, theirs_UB = unconditional.index_U, unconditional.slot_U[:, None], unconditional.pages_UB
        own_UB, pending = torch.cat((pending_AQ[index_U], pages_AB[index_U]), 1), pending_AQ.shape[1]
        # Padding maps the dummy page only.
        own_UB = torch.where(_exist(unconditional)[:, None], own_UB, 0)
        self.beside_B.index_copy_(0, own_UB.flatten().long(), theirs_UB.flatten())
        held_U1 = (state.held(plan.arrays.slot_A[index_U]) + unconditional.shift_U)[:, None]
        state.table_SL[slot_U1, held_U1 + torch.arange(pending, device=state.device)] = theirs_UB[:, :pending]

    def __call__(
        self,
        plan: RoundPlan[Tensor],
        tokens_T: Tensor,
        rows: Rows,
        output_R: Tensor | None = None,
        root_R: Tensor | None = None,
    ) -> PassLogits:
        """Return logits after all tokens [T, V], or after one token of each row [R, V], the `output`-th of the T.
        `root_R`: the batch index whose particle a row continues, if not its own."""
        logits_TV, own_TV = self._guided(plan, tokens_T, rows, output_R, root_R)
        raw_TV = None
        if plan.kind.raw_logprobs and self.role is ModelRole.TARGET:
            # Biases are added in place.
            raw_TV = own_TV.clone() if plan.kind.biased else own_TV
        if plan.penalties is not None or plan.constraints is not None:
            self.page_tokens.store(tokens_T, rows)
        if plan.penalties is not None:
            logits_TV = self.penalise(self.page_tokens, logits_TV, plan.penalties, tokens_T, rows, output_R)
        return PassLogits(logits_TV, raw_TV)

    def _guided(
        self, plan: RoundPlan[Tensor], tokens_T: Tensor, rows: Rows, output_R: Tensor | None, root_R: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the guided logits and the model's own."""
        unconditional, q = plan.unconditional_at(self.role), rows.queries
        forward = self.forward.of(plan.kind.decodings)
        if unconditional is None:
            hidden_TE = forward(tokens_T, rows)
            logits_TV = self.logits(hidden_TE if output_R is None else hidden_TE[output_R])
            return logits_TV, logits_TV
        width = len(rows.tables.slot_R) // len(plan.arrays.slot_A)
        row_Y = _rows(unconditional.index_U, width)
        theirs_YQ = tokens_T.view(-1, q)[row_Y]
        hidden_TE = forward(
            torch.cat((tokens_T, theirs_YQ.flatten())), self._with_unconditional(unconditional, rows, row_Y, root_R)
        )
        own, each = len(tokens_T), q
        if output_R is not None:
            beside_Y = own + torch.arange(len(row_Y), device=row_Y.device) * q + output_R[row_Y] % q
            hidden_TE, own, each = hidden_TE[torch.cat((output_R, beside_Y))], len(output_R), 1
        logits_TV = self.logits(hidden_TE)
        scale_T = unconditional.scale_A.repeat_interleave(width * each)
        own_TV, of_T = logits_TV[:own], _rows(unconditional.of_A, width * each)
        return self.guide(own_TV, logits_TV[own:], of_T, scale_T), own_TV

    def remap(
        self, plan: RoundPlan[Tensor], ancestor_A: Tensor, pages_XB: Tensor, row_A: Tensor, *, pending: bool
    ) -> None:
        """Remap the unconditional rows after the selection, before sequences have advanced. The unconditional row of
        each batch index continues that of batch index `ancestor`, by the pages beside this round's pages of row `row`.
        With `pending`, pending tokens had pages of their own, and these new pages come after them."""
        unconditional, state = plan.unconditional_at(self.role), self.state
        if unconditional is None:
            return
        index_U, slot_U = unconditional.index_U, unconditional.slot_U
        ancestor_U, tail_UB = ancestor_A[index_U], self.beside_B[pages_XB[row_A[index_U]].long()]
        from_U = plan.arrays.slot_A[ancestor_U]
        end_U = (state.end_S[from_U] if pending else state.held(from_U)) + unconditional.shift_U
        source_U = _slots_of(unconditional, ancestor_U, slot_U)
        self.remap_block_table(state.table_SL, slot_U, source_U, state.base_S[slot_U], end_U, tail_UB, plan.columns)

    def _with_unconditional(
        self, unconditional: UnconditionalRows[Tensor], rows: Rows, row_Y: Tensor, root_R: Tensor | None
    ) -> Rows:
        """Return the rows, followed by the unconditional rows of those in `row`: the same tokens, each at its own
        position.

        The block table of an unconditional row is that of its own slot. For every page that its row has for itself, it
        has the page beside that one."""
        width = len(row_Y) // len(unconditional.index_U)
        shift_Y, exist_Y = (
            values_U.repeat_interleave(width) for values_U in (unconditional.shift_U, _exist(unconditional))
        )
        slot_Y = unconditional.slot_U.repeat_interleave(width)
        if root_R is not None:
            slot_Y = _slots_of(unconditional, root_R[row_Y], slot_Y)
        tables, spans, groups = rows.tables, rows.spans, rows.groups
        tail_RB, tail_R = tables.tail_RB, tables.tail_R
        if tail_RB is not None and tail_R is not None:
            tail_RB = torch.cat((tail_RB, self.beside_B[tail_RB[row_Y].long()]))
            tail_R = torch.cat((tail_R, (tail_R[row_Y] + shift_Y).int()))
        return rows._replace(
            tables=RowTables(tables.table_SL, torch.cat((tables.slot_R, slot_Y.int())), tail_RB, tail_R),
            spans=RowSpans(
                start_R=torch.cat((spans.start_R, (spans.start_R[row_Y] + shift_Y).int())),
                count_R=torch.cat((spans.count_R, torch.where(exist_Y, spans.count_R[row_Y], 0))).int(),
            ),
            groups=RowGroups(
                group_R=torch.cat(
                    (groups.group_R, (unconditional.group_U.repeat_interleave(width) + len(groups.first_G)).int())
                ),
                first_G=torch.cat((groups.first_G, unconditional.first_U * width + len(tables.slot_R))),
                size_G=torch.cat((groups.size_G, unconditional.size_U * width)),
                shared_G=torch.cat((groups.shared_G, unconditional.shared_U)),
            ),
        )


def _slots_of(unconditional: UnconditionalRows[Tensor], index_Y: Tensor, own_Y: Tensor) -> Tensor:
    """Return the slots of the unconditional rows of batch indices, int64 [Y]; padding rows keep their `own` slots."""
    exist_Y = _exist(unconditional).repeat_interleave(len(own_Y) // len(unconditional.index_U))
    return torch.where(exist_Y, unconditional.slot_U[unconditional.of_A[index_Y]], own_Y)


def _rows(index_U: Tensor, width: int) -> Tensor:
    """Return the entries of these batch indices, int64 [U * width], in arrays with `width` entries for each batch
    index."""
    return (index_U[:, None] * width + torch.arange(width, device=index_U.device)).flatten()


def _exist(unconditional: UnconditionalRows[Tensor]) -> Tensor:
    """Return bool [U]: true except for padding."""
    return unconditional.size_U[unconditional.group_U] > 0
