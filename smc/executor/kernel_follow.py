"""Slots follow a choice, as kernels: same interfaces as the references in `smc.executor.verify` and
`smc.executor.state`. See the package's legend for axes; W tokens that are pending from now on."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from smc.executor.messages import DraftedRows, RoundChoice
from smc.executor.plan import RoundPlan
from smc.executor.state import SlotState
from smc.executor.verify import Followed
from smc.kernels import follow as following
from smc.kernels.tables import CHUNK


def follow(
    state: SlotState,
    logq_SQ: Tensor,
    plan: RoundPlan[Tensor],
    drafted: DraftedRows,
    choice: RoundChoice,
    lookahead: bool,
) -> Followed:
    """As `smc.executor.verify.follow`; pages follow in the same launch."""
    (places, q), rows, width = plan.target_pages_AQ.shape, drafted.all_WX.shape[1], drafted.block if lookahead else 1
    end_A, pending_A = torch.empty(2, places, dtype=torch.int64, device=state.device)
    tokens_AW = torch.empty(places, width, dtype=torch.int64, device=state.device)
    following.follow[(places,)](
        plan.slot_A, choice.all_9A, plan.target_pages_AQ, drafted.all_WX, state.table_SL, state.table_SL.stride(0),
        state.base_S, state.end_S, state.pending_S, logq_SQ, logq_SQ.stride(0), end_A, tokens_AW, pending_A, places, rows,
        K=drafted.block, Q=q, W=width, BLOCK_Q=triton.next_power_of_2(q), CHUNK=CHUNK, LOOKAHEAD=lookahead, num_warps=4,
    )  # fmt: skip
    return Followed(end_A, tokens_AW, pending_A)


def advance(
    state: SlotState,
    slot_A: Tensor,
    choice: RoundChoice,
    end_A: Tensor,
    tokens_AW: Tensor,
    pending_A: Tensor,
    text_A: Tensor,
) -> None:
    """As `smc.executor.state.write_advance`."""
    places, width = tokens_AW.shape
    following.advance[(places,)](
        slot_A, choice.all_9A, end_A, tokens_AW, *tokens_AW.stride(), pending_A, text_A,
        state.end_S, state.pending_SQ, state.pending_SQ.stride(0), state.pending_S, state.text_S, state.ended_S, state.alive_S,
        state.logw_S, state.dummy, places, W=width, BLOCK_W=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
