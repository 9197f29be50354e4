"""The draft stage of a round, except for running the model: rows of K tokens grow for every group, and afterwards the
chosen rows become the particles. This is the torch form; the Triton form is `smc.kernels.draft`. Knows nothing about
the target.

Rows grow step by step: each of a round's X = F A rows continues a row of the step before by one token. An independent
row continues itself. The rows of other groups (`smc.algorithm.expansion`) are reparented, which permutes page numbers
and moves no keys: every row has its own page for each step, named by the plan.

Draft chains are rows that draw their own tokens from one root, for decoding by rejection
(`smc.algorithm.verification`). At the first step every row of such a group continues one of the group's particles, and
from then on itself. In lockstep all its tokens are drawn. In look-ahead its first token is a guess, one of the
likeliest, of the token that the target will accept after the particle's block. The other tokens are drawn, so rows
after a right guess have the same distribution as rows drawn after the target's pass. Random numbers are keyed by seed,
position and chain, not by the round. A position may be drawn again with the same numbers, because chains off the
accepted path have decided nothing for it.

Local axes: P chains (batch indices of groups whose rows are chains), Y = P * F rows of chains."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from smc.algorithm.coupling import Coupling, is_ranked, score_of_exponent
from smc.algorithm.resampling import Spans
from smc.arrays import PackedFields
from smc.distributions import DistributionSpec
from smc.philox import STREAMS_PER_PARTICLE, RoundKeys
from smc.round.plan import RoundPlan
from smc.round.slot_state import SlotState
from smc.round.tensors import (
    CandidateLayout,
    ChainAssignment,
    ChosenTokens,
    Continuation,
    DraftedRows,
    DraftInputs,
    DraftShape,
    LastTokens,
    ObservedDraws,
    RoundSelection,
    Rows,
    TokenTree,
)
from smc.stops import grow
from smc.types import SEPARATE, Decoding


def begin_draft(
    state: SlotState, plan: RoundPlan[Tensor], distribution: DistributionSpec[Tensor], shape: DraftShape
) -> DraftInputs:
    """Return the particles as inputs of the draft, and enter the pages of their pending tokens into the block
    tables."""
    slot_A, pages_AQ = plan.arrays.slot_A, plan.arrays.begin_pages_AQ
    queries = pages_AQ.shape[1]
    pending_A, ended_A = state.pending_S[slot_A], state.ended_S[slot_A]
    held_A = state.held(slot_A)
    # Entries past the pending tokens are overwritten later.
    state.table_SL[slot_A[:, None], held_A[:, None] + torch.arange(queries, device=state.device)] = pages_AQ
    tokens_AQ = state.pending_SQ[slot_A, :queries]
    index_A = plan.index_of_rows(1)
    zero_A = torch.zeros_like(index_A)
    # Pending tokens are known not to end the answer.
    text_A = grow(
        state.stops, state.entry_S[slot_A], state.text_S[slot_A], tokens_AQ, pending_A, state.least_S[slot_A] - held_A
    ).text_A
    rows = Rows(
        table_SL=state.table_SL,
        slot_R=slot_A.int(),
        tail_RB=None,
        tail_R=None,
        start_R=held_A.int(),
        count_R=torch.where(ended_A, 0, pending_A).int(),
        group_R=plan.arrays.group_A.int(),
        first_G=plan.arrays.first_G,
        size_G=plan.arrays.size_G,
        shared_G=plan.arrays.shared_G,
        queries=queries,
        contexts=plan.kind.contexts,
    )
    tree = TokenTree(
        root_X=index_A,
        tokens_XK=zero_A[:, None].expand(-1, shape.block),
        logq_XK=zero_A[:, None].expand(-1, shape.block).float(),
        tail_XB=plan.arrays.branch_pages_XB[:: plan.kind.branches],
        count_X=zero_A,
        alive_X=state.alive_S[slot_A],
        ended_X=ended_A,
        before_X=text_A,
        text_X=text_A,
        mass_X=state.logw_S[slot_A],
        last_X=zero_A,
        next_X=state.end_S[slot_A],
        cut_X=zero_A,
        outcome_X=zero_A,
    )
    first, later = (_candidate_layout(plan, distribution, shape, width) for width in (1, plan.kind.branches))
    return DraftInputs(tokens_AQ, rows, index_A * queries + pending_A - 1, tree, first, later)


def _candidate_layout(
    plan: RoundPlan[Tensor], distribution: DistributionSpec[Tensor], shape: DraftShape, width: int
) -> CandidateLayout:
    """Return the layout of `width` rows for each batch index."""
    index_R, f = plan.index_of_rows(width), plan.kind.branches
    group_R = plan.arrays.group_A[index_R]
    rank_R = torch.arange(len(index_R), device=index_R.device) - plan.arrays.first_G[group_R] * width
    stream_AF = plan.arrays.particle_A[:, None] * STREAMS_PER_PARTICLE + torch.arange(f, device=index_R.device)
    round_R = plan.arrays.round_A[index_R]
    return CandidateLayout(
        group_R=group_R.int(),
        sources=Spans(plan.arrays.first_G * width, plan.arrays.size_G * width),
        rows=Spans(plan.arrays.first_G * f, plan.arrays.size_G * f),
        rank_R1=rank_R[:, None],
        stream_RF=stream_AF.view(len(index_R), -1),
        keys_R=RoundKeys(plan.arrays.seed_A[index_R], round_R if shape.by_round else torch.zeros_like(round_R)),
        keys_G=plan.keys_G,
        distribution=distribution.take(index_R),
    )


def assign_chains(plan: RoundPlan[Tensor], alive_A: Tensor) -> ChainAssignment:
    """Assign the rows of every group to its particles in order, equally many to each. The assignment does not depend on
    what has been drawn."""
    device, index_P, branches = plan.arrays.chain_P.device, plan.arrays.chain_P, plan.kind.branches
    first_G, size_G = plan.arrays.first_G.long(), plan.arrays.size_G.long()
    row_Y = (index_P[:, None] * branches + torch.arange(branches, device=device)).flatten()
    group_Y = plan.arrays.group_A[index_P].repeat_interleave(branches)
    rank_Y, rows_Y = row_Y - first_G[group_Y] * branches, size_G[group_Y] * branches
    # Batch indices with a particle come first. `before_G`: their number before each group.
    order_A, before_A = (~alive_A).long().argsort(stable=True), alive_A.long().cumsum(0)
    before_G = torch.where(first_G > 0, before_A[(first_G - 1).clamp(min=0)], 0)
    until_G = before_A[(first_G + size_G - 1).clamp(0, len(alive_A) - 1)]
    count_Y = (until_G - before_G)[group_Y].clamp(min=1)
    which_Y = rank_Y * count_Y // rows_Y
    begin_Y = -(-which_Y * rows_Y // count_Y)
    source_Y = order_A[(before_G[group_Y] + which_Y).clamp(max=len(alive_A) - 1)]
    # Without a particle in the group, a row continues its own batch index, which holds nothing.
    is_own_Y = plan.arrays.group_A[source_Y] == group_Y
    source_Y = torch.where(is_own_Y & alive_A[source_Y], source_Y, row_Y // branches)
    return ChainAssignment(row_Y, source_Y, (rank_Y - begin_Y) % branches, rank_Y)


def reparent(tree: TokenTree, more: Continuation, plan: RoundPlan[Tensor], state: SlotState, *, step: int) -> TokenTree:
    """Extend the rows by their next token. The first step (0) makes F rows for each batch index. This is the reference:
    `smc.kernels.draft.reparent` does the same in one launch."""
    parent_X, token_X, logq_X, mass_X = _continued(tree, more, plan)
    root_X, ended_X, text_X, count_X, cut_X = (
        values_R[parent_X] for values_R in (tree.root_X, tree.ended_X, tree.text_X, tree.count_X, tree.cut_X)
    )
    slot_X = plan.arrays.slot_A[root_X]
    end_X = state.end_S[slot_X] - cut_X
    room_X = state.limit_S[slot_X] - end_X - count_X
    growth = grow(
        state.stops, state.entry_S[slot_X], text_X, token_X[:, None], room_X, state.least_S[slot_X] - end_X - count_X
    )
    is_now_K = torch.arange(tree.tokens_XK.shape[1], device=state.device) == step
    is_known_B = torch.arange(tree.tail_XB.shape[1], device=state.device) < step
    alive_X, has_ended_X = tree.alive_X[parent_X] & (mass_X > -torch.inf), ended_X | growth.ends_A
    return TokenTree(
        root_X=root_X,
        tokens_XK=torch.where(is_now_K, token_X[:, None], tree.tokens_XK[parent_X]),
        logq_XK=torch.where(is_now_K, logq_X[:, None], tree.logq_XK[parent_X]),
        # Pages of earlier tokens are the parent's; pages of later tokens are this row's own.
        tail_XB=torch.where(is_known_B, tree.tail_XB[parent_X], plan.arrays.branch_pages_XB),
        count_X=count_X + (~ended_X).long(),
        alive_X=alive_X,
        ended_X=has_ended_X,
        before_X=torch.where(ended_X, tree.before_X[parent_X], text_X),
        text_X=torch.where(ended_X, text_X, growth.text_A),
        mass_X=mass_X,
        last_X=token_X,
        next_X=end_X + (step + 1),
        cut_X=cut_X,
        outcome_X=tree.outcome_X[parent_X] if step else torch.arange(len(parent_X), device=state.device),
        run=LastTokens(slot_X.int(), end_X.int(), (end_X + step).int(), (alive_X & ~has_ended_X).int()),
    )


def _continued(tree: TokenTree, more: Continuation, plan: RoundPlan[Tensor]) -> tuple[Tensor, ...]:
    """Return for every row [X]: the row that it continues, its token, its log q and its log mass."""
    parts: list[tuple[Tensor, tuple[Tensor, ...]]] = []
    if more.own is not None:
        token_RF, logq_RF = more.own
        parent_X = torch.arange(len(token_RF), device=token_RF.device).repeat_interleave(token_RF.shape[1])
        # If inner nodes are among the rows, the particle is the first row of each batch index.
        parent_X = parent_X * (len(tree.root_X) // len(token_RF))
        own = (parent_X, token_RF.flatten().long(), logq_RF.flatten(), torch.zeros_like(parent_X, dtype=torch.float64))
        parts.append((plan.arrays.decoding_G >= 0, own))
    if more.chosen is not None:
        parts.append((~plan.is_separate_G, _chosen(tree, more.chosen, plan)))
    if more.chains is not None:
        none_X = torch.zeros_like(more.chains.logq_X, dtype=torch.float64)
        parts.append((plan.arrays.decoding_G == Decoding.REJECTION, (*more.chains, none_X)))
    _, found = parts[0]
    for is_theirs_G, theirs in parts[1:]:
        is_theirs_X = is_theirs_G[plan.arrays.group_A].repeat_interleave(plan.kind.branches)
        found = tuple(torch.where(is_theirs_X, theirs_X, found_X) for theirs_X, found_X in zip(theirs, found))
    return found


def _chosen(tree: TokenTree, more: ChosenTokens, plan: RoundPlan[Tensor]) -> tuple[Tensor, ...]:
    chosen, candidate_tokens = more
    token_X, logq_X = (
        values_RC[chosen.parent_X, chosen.candidate_X]
        for values_RC in (candidate_tokens.token_RC, candidate_tokens.logq_RC)
    )
    logq_X = torch.where(tree.ended_X[chosen.parent_X], 0.0, logq_X)
    # NaN of the draft must be reported in groups where the draft's outputs count.
    is_nan_X = chosen.nan_G[plan.arrays.group_A].repeat_interleave(plan.kind.branches)
    return chosen.parent_X, token_X, torch.where(is_nan_X, torch.nan, logq_X), chosen.mass_X


def pack_rows(state: SlotState, plan: RoundPlan[Tensor], tree: TokenTree) -> PackedFields[DraftedRows]:
    """Pack the rows for the target. An independent row has the share 1 / F of its particle; if the particle has ended,
    its first row has the whole share."""
    slot_X, branches = plan.arrays.slot_A[tree.root_X], plan.kind.branches
    share_X = tree.mass_X - state.logw_S[slot_X]
    if Decoding.REJECTION in plan.kind.decodings:
        # Chains have equal shares until they are verified, except rows that continue nothing.
        of_chains_X = torch.where(tree.alive_X, 0.0, -torch.inf)
        share_X = torch.where(plan.is_decoded_by(Decoding.REJECTION).repeat_interleave(branches), of_chains_X, share_X)
    if plan.kind.has_separate:
        branch_X = torch.arange(len(slot_X), device=slot_X.device) % branches
        alone_X = torch.where(branch_X == 0, 0.0, -torch.inf).double()
        own_X = torch.where(state.ended_S[slot_X], alone_X, -math.log(branches))
        share_X = torch.where(plan.is_decoded_by(*SEPARATE).repeat_interleave(branches), own_X, share_X)
    rows, block = tree.tokens_XK.shape
    drafted = DraftedRows(
        tokens_XK=tree.tokens_XK,
        logq_XK=tree.logq_XK,
        root_X=tree.root_X,
        count_X=tree.count_X,
        ended_X=tree.ended_X,
        cut_X=tree.cut_X,
        share_X=share_X,
    )
    return DraftedRows.memory(rows, block).allocate(state.device).write(drafted)


def observe_draws(
    state: SlotState,
    plan: RoundPlan[Tensor],
    tree: TokenTree,
    selection: RoundSelection[Tensor],
    kept_RV: Tensor,
    coupling: Coupling,
) -> ObservedDraws[Tensor]:
    """Return what the target's draws after the roots of the drafted rows tell about the exponent of coupled drafting,
    and at some positions their rank. A draw is seen only if the block before the root was accepted as a whole, which
    does not depend on the draw. `kept`: log q after the first R roots. Call it
    before `advance`."""
    root_A = selection.particles.ancestor_A
    token_A = torch.where(selection.taken_A > 0, tree.tokens_XK[selection.particles.row_A, 0], selection.bonus_A)
    slot_A, exponent_A = plan.arrays.slot_A[root_A], plan.arrays.exponent_A[root_A]
    kept_AV = kept_RV[root_A.clamp(max=len(kept_RV) - 1)]
    is_drawn_AV = coupling.tokens(kept_AV.shape[1], state.device) == token_A[:, None]
    is_seen_A = (
        selection.particles.alive_A
        & ~state.ended_S[slot_A]
        & (selection.cut_A == 0)
        & (exponent_A > 0)
        & (token_A >= 0)
    )
    is_seen_A = is_seen_A & (root_A < len(kept_RV))
    position_A = state.end_S[slot_A]
    noise_AV = coupling.noise(root_A, position_A, kept_AV.shape[1])
    score_A, information_A = score_of_exponent(kept_AV, exponent_A, noise_AV, is_drawn_AV)
    is_missing_A = ~is_seen_A | ~is_drawn_AV.any(-1) | ~score_A.isfinite()
    score_AV = exponent_A[:, None] * kept_AV + noise_AV
    drawn_A1 = score_AV.masked_fill(~is_drawn_AV, -torch.inf).amax(-1, keepdim=True)
    # A token that the draft cannot draw, or that its head lacks, ranks after all tokens that it can draw.
    is_above_AV = (score_AV > drawn_A1) | (drawn_A1 == -torch.inf)
    rank_A = is_above_AV.sum(-1).float().masked_fill(~is_seen_A | ~is_ranked(position_A), torch.nan)
    return ObservedDraws(
        score_A=score_A.masked_fill(is_missing_A, torch.nan),
        information_A=information_A.masked_fill(is_missing_A, torch.nan),
        rank_A=rank_A,
    )
