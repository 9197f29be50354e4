"""The remap stage of a round: sequences, block tables and slots follow what was chosen. The torch form;
`smc.kernels.remap` is the Triton form. See the package's legend for axes; W tokens that are pending afterwards."""

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
    tail_AB: Tensor | None,
    columns: int,
) -> None:
    """Positions from `base` up to `end` of the slots become those of `source`; `tail` are the pages of those from `end`
    on.

    A source keeps its own: no slot that is read is written. `columns` bounds what any row holds, tail included.
    """
    table_SL[slot_A, :columns] = table_SL[source_A, :columns]
    if tail_AB is not None:
        column_AB = end_A[:, None] + torch.arange(tail_AB.shape[1], device=table_SL.device)
        table_SL[slot_A[:, None], column_AB] = tail_AB


@dataclass(frozen=True)
class Followed:
    """How sequences go on, by batch index after the choice."""

    end_A: Tensor
    """int64 tokens of the sequence."""
    tokens_AW: Tensor
    """int64: the next block, in look-ahead K tokens; in lockstep one, the seed of it."""
    pending_A: Tensor
    """int64: how many of these exist."""


def follow(
    state: SlotState,
    logq_SQ: Tensor,
    plan: RoundPlan[Tensor],
    drafted: DraftedRows,
    choice: RoundChoice,
    lookahead: bool,
) -> Followed:
    """Pages follow the choice, and so does log q of what is pending; what else becomes of the slots is returned: others
    read them yet."""
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
    # Of a particle that had ended, its last token remains; nothing of it is run or scored again.
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
    """Sequences end at `end`, with so many pending tokens of these; `text` is the state of the stop machine before
    them."""
    state.end_S[slot_A] = end_A
    state.pending_SQ[slot_A, : tokens_AW.shape[1]] = tokens_AW
    state.pending_S[slot_A] = pending_A
    state.text_S[slot_A] = text_A
    state.ended_S[slot_A], state.alive_S[slot_A] = choice.ended_A, choice.alive_A
    state.logw_S[slot_A] = choice.mass_A
    # Padding has written to the dummy slot like any other; it must stay ended, and short.
    # Fills: an assignment would copy from the host.
    state.alive_S[state.dummy :].fill_(False)
    state.logw_S[state.dummy :].fill_(0.0)
    state.ended_S[state.dummy :].fill_(True)
    state.end_S[state.dummy :].fill_(1)
    state.pending_S[state.dummy :].fill_(1)
