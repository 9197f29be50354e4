"""What a round does at the model that drafts beside running it, as kernels: same interfaces as the references in
`smc.executor.draft`. See the package's legend for axes."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from smc.algorithm.expansion import Kind
from smc.executor.draft import CandidateLayout, DraftInputs, DraftOps, DraftShape, ResumedSequences, TokenTree
from smc.executor.forward import Rows
from smc.executor.messages import DraftedRows, Lineage, RoundChoice
from smc.executor.plan import RoundPlan
from smc.executor.state import SlotState
from smc.kernels import draft as kernels
from smc.kernels.stops import table_arguments
from smc.kernels.tables import CHUNK
from smc.laws import LawSpec
from smc.philox import STREAMS_PER_PARTICLE
from smc.stops import DONE, MAX_STATES
from smc.types import TensorOptions

ROWS = 16
"""Rows of a program."""


def begin(state: SlotState, plan: RoundPlan[Tensor], law: LawSpec[Tensor], shape: DraftShape) -> DraftInputs:
    """As `smc.executor.draft.begin`."""
    (places, queries), groups, device, tables = plan.begin_pages_AP.shape, len(plan.first_G), state.device, state.stops
    rows, block = places * plan.branches, shape.block
    integers: TensorOptions = {"dtype": torch.int64, "device": device}
    floats: TensorOptions = {"dtype": torch.float32, "device": device}
    whole: TensorOptions = {"dtype": torch.int32, "device": device}
    numbers_6A, rows_4A = torch.empty(6, places, **integers), torch.empty(4, places, **whole)
    flags_2A = torch.empty(2, places, dtype=torch.bool, device=device)
    zero_A, mass_A = torch.empty(places, **floats), torch.empty(places, dtype=torch.float64, device=device)
    tokens_AP, numbers_5X = torch.empty(places, queries, **integers), torch.empty(5, rows, **integers)
    group_X, law_4X = torch.empty(rows, **whole), torch.empty(4, rows, **floats)
    bounds_2G, keys_2G = torch.empty(2, groups, **whole), torch.empty(2, groups, **integers)
    kernels.begin[(triton.cdiv(max(rows, groups), ROWS),)](
        plan.slot_A, plan.group_A, plan.particle_A, plan.seed_A, plan.round_A, plan.first_G, plan.size_G,
        law.temperature_R, law.top_k_R, law.top_p_R, law.min_p_R, law.alpha_R, plan.begin_pages_AP,
        state.table_SL, state.table_SL.stride(0), state.end_S, state.pending_S, state.pending_SQ, state.pending_SQ.stride(0),
        state.ended_S, state.alive_S, state.text_S, state.entry_S, state.least_S, state.logw_S, *table_arguments(tables),
        numbers_6A, rows_4A, flags_2A, zero_A, mass_A, tokens_AP, numbers_5X, group_X, law_4X, bounds_2G, keys_2G,
        places, groups, rows,
        F=plan.branches, P=queries, STREAMS=STREAMS_PER_PARTICLE, BY_ROUND=shape.by_round, BLOCK=ROWS,
        BLOCK_P=triton.next_power_of_2(queries), STRINGS=tables.next_EXB is not None, DONE=DONE, STATES=MAX_STATES, num_warps=1,
    )  # fmt: skip
    place_A, none_A, text_A, end_A, last_A, rank_A = numbers_6A
    (slot_R, held_R, run_R, group_R), (alive_A, ended_A) = rows_4A, flags_2A
    stream_X, rank_X, seed_X, round_X, top_k_X = numbers_5X
    temperature_X, top_p_X, min_p_X, alpha_X = law_4X
    bounds = (plan.first_G, plan.size_G, plan.shared_G)
    run = Rows(state.table_SL, slot_R, None, None, held_R, run_R, group_R, *bounds, queries, plan.contexts)
    tree = TokenTree(
        root_X=place_A,
        tokens_XK=none_A[:, None].expand(-1, block),
        logq_XK=zero_A[:, None].expand(-1, block),
        tail_XB=plan.branch_pages_XB[:: plan.branches],
        count_X=none_A,
        alive_X=alive_A,
        ended_X=ended_A,
        before_X=text_A,
        text_X=text_A,
        mass_X=mass_A,
        last_X=none_A,
        next_X=end_A,
        run_4X=None,
    )
    later, (seed_G, round_G) = (bounds_2G[0], bounds_2G[1]), keys_2G
    rounds_A = plan.round_A if shape.by_round else none_A
    streams = stream_X.view(places, plan.branches)
    return DraftInputs(
        tokens_AP, run, last_A, tree,
        CandidateLayout(group_R, (plan.first_G, plan.size_G), later, rank_A[:, None], streams, plan.seed_A, rounds_A, seed_G, round_G, law),
        CandidateLayout(
            group_X, later, later, rank_X[:, None], stream_X[:, None], seed_X, round_X, seed_G, round_G,
            LawSpec(temperature_X, top_k_X, top_p_X, min_p_X, alpha_X, law.active),
        ),
    )  # fmt: skip


def pack(state: SlotState, plan: RoundPlan[Tensor], tree: TokenTree) -> DraftedRows:
    """As `smc.executor.draft.pack`."""
    rows, block = tree.tokens_XK.shape
    all_WX = torch.empty(DraftedRows.width(block), rows, dtype=torch.int32, device=state.device)
    kernels.pack[(triton.cdiv(rows, ROWS),)](
        plan.slot_A, plan.group_A, plan.kind_G, state.ended_S, state.logw_S,
        tree.root_X, tree.tokens_XK, tree.logq_XK, tree.count_X, tree.alive_X, tree.ended_X, tree.mass_X, all_WX, rows,
        F=plan.branches, K=block, BLOCK=ROWS, BLOCK_K=triton.next_power_of_2(block), LOG_F=math.log(plan.branches),
        OWN=Kind.INDEPENDENT in plan.kinds, num_warps=1,
    )  # fmt: skip
    return DraftedRows(all_WX)


def resume(
    state: SlotState, plan: RoundPlan[Tensor], tree: TokenTree, choice: RoundChoice, block: int
) -> ResumedSequences:
    """As `smc.executor.draft.resume`."""
    (places, queries), pages, device = plan.begin_pages_AP.shape, tree.tail_XB.shape[1], state.device
    width = min(2, state.pending_SQ.shape[1])
    integers: TensorOptions = {"dtype": torch.int64, "device": device}
    whole: TensorOptions = {"dtype": torch.int32, "device": device}
    numbers_3A, counts_2A = torch.empty(3, places, **integers), torch.empty(2, places, **whole)
    tokens_AW, path_AW = torch.empty(places, width, **integers), torch.empty(places, queries + pages, **whole)
    kernels.resume[(places,)](
        plan.slot_A, choice.all_9A, plan.begin_pages_AP, tree.tokens_XK, tree.tail_XB, tree.before_X,
        state.table_SL, state.table_SL.stride(0), state.base_S, state.end_S, state.pending_S, state.ended_S,
        numbers_3A, tokens_AW, path_AW, counts_2A, places,
        K=block, P=queries, B=pages, Q=width, BLOCK_Q=triton.next_power_of_2(width),
        BLOCK_B=triton.next_power_of_2(pages) if pages else 0, BLOCK_W=triton.next_power_of_2(queries + pages), CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    end_A, pending_A, text_A = numbers_3A
    return ResumedSequences(Lineage(path_AW, *counts_2A), end_A, tokens_AW, pending_A, text_A)


STEPS = DraftOps(begin, pack, resume)
