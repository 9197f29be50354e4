"""Drafting again after a miss, in look-ahead, before a round's blocks are verified (`DraftStage.redraft`).

A miss leaves a group one particle, whose block is the token that the target drew. Its pass would bring one token. So
the draft first grows a tree from that token: R steps over as many rows as the group has batch indices, which become the
group's particles, as if the outcome had been among the rows ahead. Then the target verifies their blocks, while the
draft grows rows ahead from their nodes. A group that begins or resumes has such a block, too. The rows are those of a
round of look-ahead whose first step is known. They roll back the particle's last token (`cut`), which is their own
first one, so every operation on rows ahead serves them.

The models decide this alone, by what the last selection left, so the host need not have read it. Other groups keep
their particles: for the time of these steps their batch indices point to the dummy slot, as those of padding do.
Without any such group the steps change nothing. They are then left out where the device's runner can tell
(`smc.executor.graph_runner.StageRunner.run_if`)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from smc.algorithm.expansion import CandidateTokens
from smc.algorithm.selection import NextParticles
from smc.arrays import PackedFields
from smc.round.plan import RoundPlan
from smc.round.tensors import (
    DraftedRows,
    DraftInputs,
    DraftStep,
    InnerNodes,
    LastTokens,
    Lineage,
    RedraftReport,
    RoundSelection,
    SlotState,
    TokenTree,
)
from smc.types import Decoding


class RedraftStart(NamedTuple):
    """What a round drafts again, before it does so."""

    root_A: Tensor
    """int64 batch index of the group's only particle if the group drafts again; otherwise the own batch index."""
    slot_A: Tensor
    """int64 slot; the dummy slot in groups that do not draft again."""
    any_1: Tensor
    """bool [1]: some group drafts again."""
    message: PackedFields[DraftedRows]
    """Message to the target: one row for each batch index, with the count 0 in groups that keep their blocks."""
    lineage: Lineage[Tensor]


def begin_redraft(state: SlotState, nodes: InnerNodes, plan: RoundPlan[Tensor]) -> RedraftStart:
    """Find the groups that draft again: those with one particle, open, and with a block of one token."""
    assert plan.redraft_pages_AB is not None, "a round that drafts again"
    arrays, device = plan.arrays, state.device
    slot_A, group_A, index_A = arrays.slot_A, arrays.group_A, plan.index_of_rows(1)
    alive_A = state.alive_S[slot_A] & plan.is_decoded_by(Decoding.WALK)
    count_G = torch.zeros_like(arrays.first_G, dtype=torch.int64).index_add(0, group_A, alive_A.long())
    is_short_A = alive_A & ~state.ended_S[slot_A] & (nodes.count_S[slot_A] <= 1) & (count_G[group_A] == 1)
    root_G = torch.full_like(count_G, -1).scatter_reduce(0, group_A, torch.where(is_short_A, index_A, -1), "amax")
    root_A, (batch_size, pages) = root_G[group_A], plan.redraft_pages_AB.shape
    again_A = root_A >= 0
    message = DraftedRows.memory(batch_size, nodes.block).allocate(device)
    message.memory.zero_()
    zero_A = torch.zeros(batch_size, dtype=torch.int32, device=device)
    path_AB = torch.zeros(batch_size, arrays.begin_pages_AQ.shape[1] + pages, dtype=torch.int32, device=device)
    return RedraftStart(
        root_A=torch.where(again_A, root_A, index_A),
        slot_A=torch.where(again_A, slot_A, state.dummy),
        any_1=again_A.any()[None],
        message=message,
        lineage=Lineage(path_AB, zero_A, zero_A.clone()),
    )


def plan_again(plan: RoundPlan[Tensor], start: RedraftStart) -> RoundPlan[Tensor]:
    """Return the plan of the steps that draft again."""
    assert plan.redraft_pages_AB is not None, "a round that drafts again"
    arrays = plan.arrays._replace(slot_A=start.slot_A, branch_pages_XB=plan.redraft_pages_AB)
    steps, decodings = plan.kind.redrafted + 1, frozenset({Decoding.WALK})
    return replace(plan, arrays=arrays, kind=replace(plan.kind, steps=steps, branches=1, decodings=decodings))


def known_step(
    state: SlotState, plan: RoundPlan[Tensor], inputs: DraftInputs, root_A: Tensor
) -> tuple[DraftStep, LastTokens]:
    """Return the first step, which is known: the first row of each group is its particle's last token. Also returns the
    pass over these tokens."""
    arrays, particles, index_A = plan.arrays, inputs.tree, plan.index_of_rows(1)
    slot_A, one_A = arrays.slot_A[root_A], torch.ones_like(root_A)
    is_first_A = index_A == arrays.first_G[arrays.group_A]
    alive_A, token_A, start_A = state.alive_S[slot_A] & is_first_A, state.pending_SQ[slot_A, 0], state.end_S[slot_A] - 1
    tokens_AK = torch.zeros(particles.tokens_XK.shape, dtype=torch.int64, device=state.device)
    tokens_AK[:, 0] = token_A
    tree = TokenTree(
        root_X=root_A,
        tokens_XK=tokens_AK,
        logq_XK=torch.zeros_like(tokens_AK, dtype=torch.float32),
        tail_XB=arrays.branch_pages_XB,
        count_X=one_A,
        alive_X=alive_A,
        ended_X=state.ended_S[slot_A],
        before_X=state.text_S[slot_A],
        text_X=particles.text_X[root_A],
        mass_X=torch.where(alive_A, state.logw_S[slot_A], -torch.inf),
        last_X=token_A,
        next_X=start_A + 1,
        cut_X=one_A,
        outcome_X=index_A,
    )
    last = LastTokens(slot_A.int(), start_A.int(), start_A.int(), alive_A.int())
    return DraftStep(tree, index_A, CandidateTokens.whole(tree.mass_X)), last


def selected_again(state: SlotState, plan: RoundPlan[Tensor], rows: DraftedRows) -> RoundSelection[Tensor]:
    """Return the selection of all rows, each at its own batch index. `plan`: with the slots of groups that draft again;
    `rows`: one for each batch index."""
    root_A, count_A, index_A = rows.root_X.long(), rows.count_X.long(), plan.index_of_rows(1)
    alive_A = (rows.share_X > -torch.inf) & (count_A > 0)
    return RoundSelection(
        particles=NextParticles(root_A, index_A, alive_A, torch.where(alive_A, rows.share_X.double(), -torch.inf)),
        taken_A=count_A,
        cut_A=rows.cut_X.long(),
        bonus_A=torch.full_like(index_A, -1),
        ended_A=rows.ended_X | ~alive_A,
        text_A=state.text_S[plan.arrays.slot_A[root_A]],
    )


def with_slots_of(state: SlotState, plan: RoundPlan[Tensor], rows: DraftedRows) -> RoundPlan[Tensor]:
    """Return the plan in which only groups that have drafted again have slots."""
    slot_A = torch.where(rows.count_X > 0, plan.arrays.slot_A, state.dummy)
    return replace(plan, arrays=plan.arrays._replace(slot_A=slot_A))


def report_of(start: RedraftStart) -> RedraftReport[Tensor]:
    rows = start.message.fields
    return RedraftReport(rows.root_X, rows.tokens_XK, rows.count_X, rows.ended_X, rows.share_X, start.lineage)
