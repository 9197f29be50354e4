"""What a round does at the model that drafts, beside running it: before the first pass, for what is sent, and after the choice. The
reference, in plain torch; `smc.executor.kernel_draft` has what GPUs use. See the package's legend for axes; S rows that offer tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from smc.algorithm.expansion import Kind
from smc.executor import tables
from smc.executor.forward import Rows
from smc.executor.outcome import Choice, Drafted, Lineage
from smc.executor.plan import RoundPlan
from smc.executor.state import SlotState
from smc.executor.tree import Tree
from smc.laws import LawSpec
from smc.philox import STREAMS_PER_PARTICLE
from smc.stops import grow


@dataclass(frozen=True)
class Shape:
    """What a drafter makes of every place."""

    block: int
    """K."""
    by_round: bool
    """Random numbers are keyed by the round, too; else by the position alone."""
    guesses: bool = False
    """Chains begin with a guess (look-ahead)."""


@dataclass(frozen=True)
class Offering:
    """What stays the same of rows that offer tokens, however they are re-parented: one a place at the first step, later F."""

    group_S: Tensor
    """int32."""
    sources: tuple[Tensor, Tensor]
    """First row and how many, int32 [G] each."""
    rows: tuple[Tensor, Tensor]
    """The same of those that continue them."""
    rank_S1: Tensor
    """int64 number of the row in its group."""
    stream_SD: Tensor
    """int64, of independent rows: the numbers of those that continue each."""
    seed_S: Tensor
    round_S: Tensor
    seed_G: Tensor
    round_G: Tensor
    law: LawSpec[Tensor]


@dataclass(frozen=True)
class Begun:
    """The particles, whose pending tokens are to be run."""

    tokens_AP: Tensor
    rows: Rows
    last_A: Tensor
    """int64: which of the A P tokens is the last of each."""
    tree: Tree
    """The particles as rows."""
    first: Offering
    """Of the particles."""
    later: Offering
    """Of the rows that continue them."""


@dataclass(frozen=True)
class Resumed:
    """How sequences go on, by place after the choice."""

    lineage: Lineage[Tensor]
    end_A: Tensor
    """int64 tokens of the sequence."""
    tokens_AW: Tensor
    """int64: the last of them; as many as may be pending."""
    pending_A: Tensor
    """int64: how many of those have not been run."""
    text_A: Tensor
    """int64 state of the stop machine before them."""


Begin = Callable[[SlotState, RoundPlan[Tensor], LawSpec[Tensor], Shape], Begun]
Pack = Callable[[SlotState, RoundPlan[Tensor], Tree], Drafted]
Resume = Callable[[SlotState, RoundPlan[Tensor], Tree, Choice, int], Resumed]


@dataclass(frozen=True)
class Steps:
    """The references, or kernels."""

    begin: Begin
    pack: Pack
    resume: Resume


def begin(state: SlotState, plan: RoundPlan[Tensor], law: LawSpec[Tensor], shape: Shape) -> Begun:
    """Pages of pending tokens are in the block tables from now on."""
    slot_A, pages_AP = plan.slot_A, plan.begin_pages_AP
    queries = pages_AP.shape[1]
    pending_A, ended_A = state.pending_S[slot_A], state.ended_S[slot_A]
    held_A = state.held(slot_A)
    # Past what will be held, whatever is written is written over later.
    state.table_SL[slot_A[:, None], held_A[:, None] + torch.arange(queries, device=state.device)] = pages_AP
    tokens_AP = state.pending_SQ[slot_A, :queries]
    place_A = torch.arange(len(slot_A), device=state.device)
    zero_A = torch.zeros_like(place_A)
    # What is pending has been found not to end the answer.
    text_A = grow(state.stops, state.entry_S[slot_A], state.text_S[slot_A], tokens_AP, pending_A, state.least_S[slot_A] - held_A).text_A
    rows = Rows(
        table_SL=state.table_SL,
        slot_R=slot_A.int(),
        tail_RB=None,
        tail_R=None,
        start_R=held_A.int(),
        count_R=torch.where(ended_A, 0, pending_A).int(),
        group_R=plan.group_A.int(),
        first_G=plan.first_G,
        size_G=plan.size_G,
        shared_G=plan.shared_G,
        queries=queries,
        contexts=plan.contexts,
    )
    tree = Tree(
        root_X=place_A,
        tokens_XK=zero_A[:, None].expand(-1, shape.block),
        logq_XK=zero_A[:, None].expand(-1, shape.block).float(),
        tail_XB=plan.branch_pages_XB[:: plan.branches],
        count_X=zero_A,
        alive_X=state.alive_S[slot_A],
        ended_X=ended_A,
        before_X=text_A,
        text_X=text_A,
        mass_X=state.logw_S[slot_A],
        last_X=zero_A,
        next_X=state.end_S[slot_A],
        run_4X=None,
    )
    offerings = (_offering(plan, law, shape, width) for width in (1, plan.branches))
    return Begun(tokens_AP, rows, place_A * queries + pending_A - 1, tree, *offerings)


def _offering(plan: RoundPlan[Tensor], law: LawSpec[Tensor], shape: Shape, width: int) -> Offering:
    """Of `width` rows a place."""
    place_S, f = plan.place_of_rows(width), plan.branches
    group_S = plan.group_A[place_S]
    rank_S = torch.arange(len(place_S), device=place_S.device) - plan.first_G[group_S] * width
    stream_AF = plan.particle_A[:, None] * STREAMS_PER_PARTICLE + torch.arange(f, device=place_S.device)
    round_S = plan.round_A[place_S]
    return Offering(
        group_S=group_S.int(),
        sources=(plan.first_G * width, plan.size_G * width),
        rows=(plan.first_G * f, plan.size_G * f),
        rank_S1=rank_S[:, None],
        stream_SD=stream_AF.view(len(place_S), -1),
        seed_S=plan.seed_A[place_S],
        round_S=round_S if shape.by_round else torch.zeros_like(round_S),
        seed_G=plan.seed_G,
        round_G=plan.round_G,
        law=law.take(place_S),
    )


def pack(state: SlotState, plan: RoundPlan[Tensor], tree: Tree) -> Drafted:
    """What the target is sent. The share of independent rows: F of each particle, or of one that has ended one alone."""
    slot_X, branches = plan.slot_A[tree.root_X], plan.branches
    share_X = tree.mass_X - state.logw_S[slot_X]
    if Kind.CHAINS in plan.kinds:
        # All are the same until the target has spoken, but for those that continue nothing.
        of_chains_X = torch.where(tree.alive_X, 0.0, -torch.inf)
        share_X = torch.where(plan.places_of(Kind.CHAINS).repeat_interleave(branches), of_chains_X, share_X)
    if Kind.INDEPENDENT in plan.kinds:
        branch_X = torch.arange(len(slot_X), device=slot_X.device) % branches
        alone_X = torch.where(branch_X == 0, 0.0, -torch.inf).double()
        own_X = torch.where(state.ended_S[slot_X], alone_X, -math.log(branches))
        share_X = torch.where(plan.places_of(Kind.INDEPENDENT).repeat_interleave(branches), own_X, share_X)
    return Drafted.of(tree.tokens_XK, tree.logq_XK, tree.root_X, tree.count_X, tree.ended_X, share_X)


def resume(state: SlotState, plan: RoundPlan[Tensor], tree: Tree, choice: Choice, block: int) -> Resumed:
    """Pages follow the choice; what else becomes of the slots is returned: others read them yet."""
    slot_A, row_A = plan.slot_A, choice.row_A
    ancestor_A, taken_A, cut_A = choice.ancestor_A, choice.count_A, choice.cut_A
    source_A = slot_A[ancestor_A]
    end_A, pending_A = state.end_S[source_A], state.pending_S[source_A]
    # One that had ended goes on where its end is taken back.
    open_A = ~state.ended_S[source_A] | (cut_A > 0)
    has_bonus_A = choice.bonus_A >= 0
    tail_AB = tree.tail_XB[row_A]
    path_AW = torch.cat((plan.begin_pages_AP[ancestor_A], tail_AB), 1)
    tables.reroot(state.table_SL, slot_A, source_A, state.base_S[slot_A], end_A, tail_AB, plan.columns)
    # The last token of a whole row has not been run, and one that ends an answer never is.
    whole_A = taken_A == block
    run_A = taken_A - (whole_A | (choice.ended_A & ~has_bonus_A & (taken_A > 0))).long()
    bonus_A = choice.bonus_A.clamp(min=0)
    tokens_A2 = torch.stack((torch.where(whole_A, tree.tokens_XK[row_A, -1], bonus_A), bonus_A), 1)
    left_A = torch.where(choice.ended_A, 1, whole_A.long() + has_bonus_A.long())
    kept_A = torch.where(open_A, (pending_A - cut_A).clamp(min=0) + run_A, 0)
    dropped_A = torch.where(open_A, (cut_A - pending_A).clamp(min=0), 0)
    return Resumed(
        lineage=_lineage(plan, path_AW, pending_A, kept_A, dropped_A),
        end_A=end_A - cut_A + taken_A + has_bonus_A.long(),
        tokens_AW=tokens_A2[:, : state.pending_SQ.shape[1]],
        pending_A=left_A.clamp(min=1),
        text_A=torch.where(whole_A, tree.before_X[row_A], choice.text_A),
    )


def _lineage(plan: RoundPlan[Tensor], path_AW: Tensor, pending_A: Tensor, kept_A: Tensor, dropped_A: Tensor) -> Lineage[Tensor]:
    """A particle's pending tokens, of which there may be fewer than places for them, then its row's."""
    queries = plan.begin_pages_AP.shape[1]
    if queries > 1:
        column_W = torch.arange(path_AW.shape[1], device=path_AW.device)
        skipped_A1 = (queries - pending_A)[:, None]
        shifted_AW = torch.where(column_W < pending_A[:, None], column_W, column_W + skipped_A1)
        path_AW = path_AW.gather(1, shifted_AW.clamp(max=path_AW.shape[1] - 1))
    return Lineage(path_AW, kept_A.int(), dropped_A.int())


REFERENCE = Steps(begin, pack, resume)
