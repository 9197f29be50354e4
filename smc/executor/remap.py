"""The remap stage of a round: slots and block tables follow the selection. `smc.kernels.remap` has the Triton form.

`remap_draft` and `remap_target` let the block tables of a model refer to the pages of the selected rows, and return the
other new values of the slots, which `advance` writes. Keys and values stay where they are."""

from __future__ import annotations

import torch
from torch import Tensor

from smc.round.plan import RoundPlan
from smc.round.slot_state import Lineage, NextSequences, RoundSelection, SlotState
from smc.round.tensors import DraftedRows, TokenTree


def remap_draft(
    state: SlotState, plan: RoundPlan[Tensor], tree: TokenTree, selection: RoundSelection[Tensor], steps: int
) -> tuple[Lineage[Tensor], NextSequences]:
    """Remap the block tables to the chosen rows. The other new values of the slots are returned, because the present
    ones are still read. `steps`: tokens of a whole row."""
    slot_A, row_A = plan.arrays.slot_A, selection.particles.row_A
    ancestor_A, taken_A, cut_A = selection.particles.ancestor_A, selection.taken_A, selection.cut_A
    source_A = slot_A[ancestor_A]
    end_A, pending_A = state.end_S[source_A], state.pending_S[source_A]
    # A particle that had ended continues if its end is rolled back.
    open_A = ~state.ended_S[source_A] | (cut_A > 0)
    has_bonus_A = selection.bonus_A >= 0
    tail_AB = tree.tail_XB[row_A]
    path_AB = torch.cat((plan.arrays.begin_pages_AQ[ancestor_A], tail_AB), 1)
    left_A = end_A - cut_A
    remap_block_table(state.table_SL, slot_A, source_A, state.base_S[slot_A], left_A, tail_AB, plan.columns)
    # The last token of a whole row has not been run, and a token that ends an answer never is. The last token of a
    # shorter row has been run. It runs again, on a page of the next round, if no bonus token is pending.
    last_A = (taken_A == steps) | (~has_bonus_A & (taken_A > 0))
    run_A = taken_A - last_A.long()
    bonus_A, last_token_A = selection.bonus_A.clamp(min=0), tree.tokens_XK[row_A, (taken_A - 1).clamp(min=0)]
    tokens_A2 = torch.stack((torch.where(last_A, last_token_A, bonus_A), bonus_A), 1)
    unrun_A = torch.where(selection.ended_A, 1, last_A.long() + has_bonus_A.long())
    stays_A = (pending_A - cut_A).clamp(min=0)
    kept_A = torch.where(open_A, stays_A + run_A, 0)
    dropped_A = torch.where(open_A, (cut_A - pending_A).clamp(min=0), 0)
    return _lineage(plan, path_AB, stays_A, kept_A, dropped_A), NextSequences(
        end_A=left_A + taken_A + has_bonus_A.long(),
        tokens_AQ=tokens_A2[:, : state.pending_SQ.shape[1]],
        pending_A=unrun_A.clamp(min=1),
        text_A=torch.where(last_A, tree.before_X[row_A], selection.text_A),
    )


def _lineage(
    plan: RoundPlan[Tensor], path_AB: Tensor, stays_A: Tensor, kept_A: Tensor, dropped_A: Tensor
) -> Lineage[Tensor]:
    """Return the pages in order: those of a particle's pending tokens that stay, of which there may be fewer than
    columns, then those of its row."""
    column_B = torch.arange(path_AB.shape[1], device=path_AB.device)
    skipped_A1 = (plan.arrays.begin_pages_AQ.shape[1] - stays_A)[:, None]
    shifted_AB = torch.where(column_B < stays_A[:, None], column_B, column_B + skipped_A1)
    path_AB = path_AB.gather(1, shifted_AB.clamp(max=path_AB.shape[1] - 1))
    return Lineage(path_AB, kept_A.int(), dropped_A.int())


def remap_target(
    state: SlotState,
    logq_SQ: Tensor,
    plan: RoundPlan[Tensor],
    drafted: DraftedRows,
    selection: RoundSelection[Tensor],
    lookahead: bool,
) -> NextSequences:
    """Remap the block tables, and log q of the pending tokens, to the selection. The other new values of the slots are
    returned, because the present ones are still read."""
    slot_A, source_A = plan.arrays.slot_A, plan.arrays.slot_A[selection.particles.ancestor_A]
    block_A = selection.particles.ancestor_A if lookahead else selection.particles.row_A
    has_bonus_A = selection.bonus_A >= 0
    remap_block_table(
        state.table_SL,
        slot_A,
        source_A,
        state.base_S[slot_A],
        state.held(source_A),
        plan.arrays.target_pages_AQ[block_A],
        plan.columns,
    )
    end_A = state.end_S[source_A] - selection.cut_A + selection.taken_A + has_bonus_A.long()
    bonus_A1 = selection.bonus_A.clamp(min=0)[:, None]
    if lookahead:
        tokens_AQ = torch.where(has_bonus_A[:, None], bonus_A1, drafted.tokens_XK[selection.particles.row_A].long())
        logq_AQ, count_A = drafted.logq_XK[selection.particles.row_A], torch.where(has_bonus_A, 1, selection.taken_A)
    else:
        tokens_AQ, logq_AQ, count_A = bonus_A1, torch.zeros_like(bonus_A1, dtype=torch.float32), torch.ones_like(end_A)
    logq_SQ[slot_A, : logq_AQ.shape[1]] = logq_AQ
    # A particle that had ended keeps its last token, which is neither run nor scored again.
    return NextSequences(end_A, tokens_AQ, count_A.clamp(min=1), selection.text_A)


def remap_block_table(
    table_SL: Tensor,
    slot_A: Tensor,
    source_A: Tensor,
    base_A: Tensor,
    end_A: Tensor,
    tail_AB: Tensor,
    columns: int,
) -> None:
    """Replace the pages of the slots' positions from `base` up to `end` by those of `source`, and enter `tail` as the
    pages from `end` on. Positions below `base` already have the same pages; only the Triton form leaves them out.

    A slot that others copy from copies from itself, so no page that is read is overwritten. `columns`: maximum number
    of positions that any row holds, including `tail`."""
    table_SL[slot_A, :columns] = table_SL[source_A, :columns]
    column_AB = end_A[:, None] + torch.arange(tail_AB.shape[1], device=table_SL.device)
    table_SL[slot_A[:, None], column_AB] = tail_AB


def advance(state: SlotState, slot_A: Tensor, selection: RoundSelection[Tensor], next_: NextSequences) -> None:
    """Write the new state of the slots."""
    state.end_S[slot_A] = next_.end_A
    state.pending_SQ[slot_A, : next_.tokens_AQ.shape[1]] = next_.tokens_AQ
    state.pending_S[slot_A] = next_.pending_A
    state.text_S[slot_A] = next_.text_A
    state.ended_S[slot_A], state.alive_S[slot_A] = selection.ended_A, selection.particles.alive_A
    state.logw_S[slot_A] = selection.particles.logw_A
    # Padding has written to the dummy slot, too; it must stay ended, and short.
    state.alive_S[state.dummy :].fill_(False)
    state.logw_S[state.dummy :].fill_(0.0)
    state.ended_S[state.dummy :].fill_(True)
    state.end_S[state.dummy :].fill_(1)
    state.pending_S[state.dummy :].fill_(1)
