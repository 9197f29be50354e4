"""What the target runs, and its verdict, as kernels: same interfaces as the references in `smc.executor.verify`. See
the package's legend for axes."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from smc.api.limits import MAX_PARTICLES
from smc.executor.forward import Rows
from smc.executor.messages import DraftedRows
from smc.executor.plan import RoundPlan
from smc.executor.sampling import DrawKeys
from smc.executor.state import SlotState
from smc.executor.verify import Blocks, TargetDraws, VerifyInputs, VerifyOutputs
from smc.kernels import blocks as kernels
from smc.kernels.program_ids import programs
from smc.laws import LawSpec
from smc.philox import STREAMS_PER_PARTICLE, Purpose
from smc.types import TensorOptions

PLACES = 16
"""Places of a program that judges."""


def lay_out(state: SlotState, logq_SQ: Tensor, plan: RoundPlan[Tensor], drafted: DraftedRows | None) -> VerifyInputs:
    """As `smc.executor.verify.lay_out`."""
    places, groups, q, law, device = (
        len(plan.slot_A),
        len(plan.first_G),
        logq_SQ.shape[1],
        plan.target_law,
        state.device,
    )
    integers: TensorOptions = {"dtype": torch.int64, "device": device}
    floats: TensorOptions = {"dtype": torch.float32, "device": device}
    numbers_7A, keys_3T = torch.empty(7, places, **integers), torch.empty(3, places * q, **integers)
    flags_3A = torch.empty(3, places, dtype=torch.bool, device=device)
    rows_4A, law_4T = torch.empty(4, places, dtype=torch.int32, device=device), torch.empty(4, places * q, **floats)
    logw_A, tokens_AQ = torch.empty(places, dtype=torch.float64, device=device), torch.empty(places, q, **integers)
    logq_AQ, top_k_T = torch.empty(places, q, **floats), torch.empty(places * q, **integers)
    label_T = torch.empty(places * q, dtype=torch.int32, device=device)
    kernels.lay_out[(programs(places, groups),)](
        plan.slot_A, plan.group_A, plan.particle_A, plan.seed_A, plan.first_G, plan.size_G, plan.kind_G,
        law.temperature_R, law.top_k_R, law.top_p_R, law.min_p_R, law.alpha_R,
        state.end_S, state.pending_S, state.pending_SQ, state.pending_SQ.stride(0), state.ended_S, state.alive_S, state.logw_S,
        logq_SQ, logq_SQ.stride(0), None if drafted is None else drafted.all_WX,
        numbers_7A, flags_3A, logw_A, tokens_AQ, logq_AQ, rows_4A, law_4T, top_k_T, label_T, keys_3T, places, groups, places,
        K=q - (drafted is not None), Q=q, STREAMS=STREAMS_PER_PARTICLE, BLOCK_N=MAX_PARTICLES, BLOCK_Q=triton.next_power_of_2(q),
        LOOKAHEAD=drafted is None, EXACT=plan.has_exact, num_warps=4,
    )  # fmt: skip
    origin_A, count_A, run_A, *next_3A, last_A = numbers_7A
    ended_A, alive_A, open_A = flags_3A
    slot_R, held_R, run_R, group_R = rows_4A
    groups_G = (plan.first_G, plan.size_G, plan.shared_G)
    temperature_T, top_p_T, min_p_T, alpha_T = law_4T
    seed_T, position_T, zero_T = keys_3T
    return VerifyInputs(
        blocks=Blocks(origin_A, tokens_AQ, logq_AQ, count_A, ended_A, alive_A, logw_A, open_A, run_A, *next_3A),
        rows=Rows(
            state.table_SL, slot_R, plan.target_pages_AQ, held_R, held_R, run_R, group_R, *groups_G, q, plan.contexts
        ),
        law_T=LawSpec(temperature_T, top_k_T, top_p_T, min_p_T, alpha_T, law.active),
        label_T=label_T,
        keys=DrawKeys(seed_T, zero_T, zero_T[:, None], position_T, Purpose.TARGET),
        last_A=last_A,
    )


def judge(
    asked: VerifyInputs,
    plan: RoundPlan[Tensor],
    labelled_T: Tensor | None,
    drawn: TargetDraws | None,
    next_AV: Tensor | None,
) -> VerifyOutputs:
    """As `smc.executor.verify.judge`."""
    blocks, (places, q) = asked.blocks, asked.blocks.tokens_AQ.shape
    logp_AQ, drawn_AQ = torch.empty_like(blocks.logq_AQ), torch.empty_like(blocks.tokens_AQ)
    nan_A, nan_AQ = torch.empty_like(blocks.alive_A), torch.empty_like(logp_AQ, dtype=torch.bool)
    given = (labelled_T, *(drawn or (None,) * 3))
    kernels.judge[(triton.cdiv(places, PLACES),)](
        plan.group_A, plan.kind_G, blocks.run_A, *(None if value is None else value.contiguous() for value in given),
        logp_AQ, drawn_AQ, nan_A, nan_AQ, places, Q=q, BLOCK_N=PLACES, BLOCK_Q=triton.next_power_of_2(q),
        LABELLED=labelled_T is not None, DRAWN=drawn is not None, num_warps=1,
    )  # fmt: skip
    return VerifyOutputs(blocks, logp_AQ, drawn_AQ, next_AV, nan_A, nan_AQ)
