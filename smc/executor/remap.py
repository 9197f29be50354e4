"""The remap stage of a round: sequences, block tables and slots follow the choice. This is the torch form; the Triton
form is `smc.kernels.remap`. See the package's legend for axes; W tokens that are pending after the round."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smc.executor.messages import DraftedRows, RoundChoice
from smc.executor.plan import RoundPlan
from smc.executor.state import SlotState


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
    pages from `end` on. Positions below `base` already have the same pages.

    A slot that others copy from copies from itself, so no page that is read is overwritten. `columns`: maximum number
    of positions that any row holds, including `tail`."""
    table_SL[slot_A, :columns] = table_SL[source_A, :columns]
    column_AB = end_A[:, None] + torch.arange(tail_AB.shape[1], device=table_SL.device)
    table_SL[slot_A[:, None], column_AB] = tail_AB


@dataclass(frozen=True)
class Followed:
    """How sequences continue at the target, by batch index after the choice."""

    end_A: Tensor
    """int64 number of tokens of the sequence."""
    tokens_AW: Tensor
    """int64 tokens of the next block: K in look-ahead; in lockstep one, its seed."""
    pending_A: Tensor
    """int64 number of these tokens that exist."""


def follow(
    state: SlotState,
    logq_SQ: Tensor,
    plan: RoundPlan[Tensor],
    drafted: DraftedRows,
    choice: RoundChoice,
    lookahead: bool,
) -> Followed:
    """Remap the block tables, and log q of the pending tokens, to the choice. The other new values of the slots are
    returned, because the present ones are still read."""
    slot_A, source_A = plan.slot_A, plan.slot_A[choice.ancestor_A]
    block_A = choice.ancestor_A if lookahead else choice.row_A
    has_bonus_A = choice.bonus_A >= 0
    remap_block_table(
        state.table_SL,
        slot_A,
        source_A,
        state.base_S[slot_A],
        state.held(source_A),
        plan.target_pages_AQ[block_A],
        plan.columns,
    )
    end_A = state.end_S[source_A] - choice.cut_A + choice.count_A + has_bonus_A.long()
    bonus_A1 = choice.bonus_A.clamp(min=0)[:, None]
    if lookahead:
        tokens_AW = torch.where(has_bonus_A[:, None], bonus_A1, drafted.tokens_XK[choice.row_A].long())
        logq_AW, count_A = drafted.logq_XK[choice.row_A], torch.where(has_bonus_A, 1, choice.count_A)
    else:
        tokens_AW, logq_AW, count_A = bonus_A1, torch.zeros_like(bonus_A1, dtype=torch.float32), torch.ones_like(end_A)
    logq_SQ[slot_A, : logq_AW.shape[1]] = logq_AW
    # A particle that had ended keeps its last token, which is neither run nor scored again.
    return Followed(end_A, tokens_AW, count_A.clamp(min=1))


def advance(
    state: SlotState,
    slot_A: Tensor,
    choice: RoundChoice,
    end_A: Tensor,
    tokens_AW: Tensor,
    pending_A: Tensor,
    text_A: Tensor,
) -> None:
    """Write the new state of the slots: sequences end at `end`, and the first `pending` of `tokens` are pending; `text`
    is the state of the stop machine before them."""
    state.end_S[slot_A] = end_A
    state.pending_SQ[slot_A, : tokens_AW.shape[1]] = tokens_AW
    state.pending_S[slot_A] = pending_A
    state.text_S[slot_A] = text_A
    state.ended_S[slot_A], state.alive_S[slot_A] = choice.ended_A, choice.alive_A
    state.logw_S[slot_A] = choice.mass_A
    # Padding has written to the dummy slot, too; it must stay ended, and short.
    state.alive_S[state.dummy :].fill_(False)
    state.logw_S[state.dummy :].fill_(0.0)
    state.ended_S[state.dummy :].fill_(True)
    state.end_S[state.dummy :].fill_(1)
    state.pending_S[state.dummy :].fill_(1)
