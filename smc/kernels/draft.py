"""The draft stage of a round, apart from running the model: the Triton form of `smc.executor.draft`.

`begin_draft` and `pack_rows` have a program for every few rows; the first row of a batch index also does the work of
that batch index. `observe_draws` has a program for every part of the columns after every root, and a second launch adds
up the parts in their order. `reparent` has a program for every few rows: every row continues a row of the previous step
with one more token. The host reads nothing, and grids follow from shapes alone, so all launches can be captured in a
CUDA graph.

The constant P is the number of pending tokens for which `begin_pages_AQ` has pages.

Local axes: P parts of the columns."""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from smc.algorithm.coupling import RANK_BITS, RANK_FACTOR, RANKED_BELOW, SLACK, Coupling
from smc.algorithm.resampling import Spans
from smc.arrays import PackedFields, Room
from smc.distributions import DistributionSpec
from smc.kernels.candidate_tokens import coupled_score
from smc.kernels.decodings import REJECTION, is_separate
from smc.kernels.launch import Sizes, one_variant
from smc.kernels.stops import DONE, after, after_all
from smc.kernels.truncation import copy_distribution, finite
from smc.philox import STREAMS_PER_PARTICLE, RoundKeys
from smc.round.plan import RoundPlan
from smc.round.tensors import (
    CandidateLayout,
    Continuation,
    DraftedRows,
    DraftInputs,
    LastTokens,
    ObservedDraws,
    RoundSelection,
    RowGroups,
    Rows,
    RowSpans,
    RowTables,
    SlotState,
    TokenTree,
)

NONE = tl.constexpr(-float("inf"))
STREAMS = tl.constexpr(STREAMS_PER_PARTICLE)
ROWS = 16
"""Rows of a program of `begin_draft` or `pack_rows`."""
TREE_ROWS = 4
"""Rows of a program of `reparent`: a program waits for the longest token among its rows."""
FAN = 64
"""Number of runs into which one step of the search for a token's column divides the columns."""
UNSEEN, SEEN, RANKED = (tl.constexpr(kind) for kind in range(3))
_SLACK, _FAN = tl.constexpr(SLACK), tl.constexpr(FAN)
_FACTOR, _BELOW = tl.constexpr(RANK_FACTOR), tl.constexpr(RANKED_BELOW)
_HALF, _MOST = tl.constexpr(RANK_BITS // 2), tl.constexpr((1 << RANK_BITS) - 1)


def begin_draft(
    state: SlotState, plan: RoundPlan[Tensor], distribution: DistributionSpec[Tensor], block: int, by_round: bool
) -> DraftInputs:
    """See `smc.executor.draft.begin_draft`."""
    arrays, branches, room = plan.arrays, plan.kind.branches, Room(state.device)
    (batch_size, queries), groups, rows = arrays.begin_pages_AQ.shape, len(arrays.first_G), len(arrays.branch_pages_XB)
    none_A, zero_A, text_A = room.longs(batch_size), room.floats(batch_size), room.longs(batch_size)
    stream_X, spans = room.longs(rows), Spans(room.ints(groups), room.ints(groups))
    tree = TokenTree(
        root_X=room.longs(batch_size),
        tokens_XK=none_A[:, None].expand(-1, block),
        logq_XK=zero_A[:, None].expand(-1, block),
        tail_XB=arrays.branch_pages_XB[::branches],
        count_X=none_A,
        alive_X=room.bools(batch_size),
        ended_X=room.bools(batch_size),
        before_X=text_A,
        text_X=text_A,
        mass_X=room.doubles(batch_size),
        last_X=none_A,
        next_X=room.longs(batch_size),
        cut_X=none_A,
        outcome_X=none_A,
    )
    later = CandidateLayout(
        group_R=room.ints(rows),
        sources=spans,
        rows=spans,
        rank_R1=room.longs(rows, 1),
        stream_RF=stream_X[:, None],
        keys_R=RoundKeys(room.longs(rows), room.longs(rows)),
        keys_G=RoundKeys(room.longs(groups), room.longs(groups)),
        distribution=DistributionSpec.allocate(room, rows, distribution.active),
    )
    group_R = room.ints(batch_size)
    out = DraftInputs(
        tokens_AQ=room.longs(batch_size, queries),
        rows=Rows(
            RowTables(state.table_SL, room.ints(batch_size)),
            RowSpans(room.ints(batch_size), room.ints(batch_size)),
            RowGroups(group_R, *arrays.groups, arrays.shared_G),
            queries=queries,
            contexts=plan.kind.contexts,
        ),
        last_A=room.longs(batch_size),
        tree=tree,
        first=CandidateLayout(
            group_R=group_R,
            sources=arrays.groups,
            rows=spans,
            rank_R1=room.longs(batch_size, 1),
            stream_RF=stream_X.view(batch_size, branches),
            keys_R=RoundKeys(arrays.seed_A, arrays.round_A if by_round else none_A),
            keys_G=later.keys_G,
            distribution=distribution,
        ),
        later=later,
    )
    _begin[(triton.cdiv(max(rows, groups), ROWS),)](
        arrays, distribution, state, state.table_SL.stride(0), state.pending_SQ.stride(0), zero_A, out,
        Sizes(batch_size, groups, rows),
        F=branches, P=queries, BY_ROUND=by_round, BLOCK=ROWS, BLOCK_P=triton.next_power_of_2(queries),
        num_warps=1,
    )  # fmt: skip
    return out


def pack_rows(state: SlotState, plan: RoundPlan[Tensor], tree: TokenTree) -> PackedFields[DraftedRows]:
    """See `smc.executor.draft.pack_rows`."""
    (rows, block), branches = tree.tokens_XK.shape, plan.kind.branches
    message = DraftedRows.memory(rows, block).allocate(state.device)
    _pack[(triton.cdiv(rows, ROWS),)](
        plan.arrays, state, tree, message.fields, rows,
        F=branches, K=block, BLOCK=ROWS, BLOCK_K=triton.next_power_of_2(block), LOG_F=math.log(branches),
        HAS_SEPARATE=plan.kind.has_separate, num_warps=1,
    )  # fmt: skip
    return message


def reparent(
    tree: TokenTree, more: Continuation, plan: RoundPlan[Tensor], state: SlotState, *, step: int
) -> tuple[TokenTree, LastTokens]:
    """See `smc.executor.draft.reparent`."""
    rows, pages = plan.arrays.branch_pages_XB.shape
    tokens, room = tree.tokens_XK.shape[1], Room(state.device)
    out, run = TokenTree.allocate(room, rows, tokens, pages), LastTokens(*(room.ints(rows) for _ in LastTokens._fields))
    strides = TreeStrides(tree.tokens_XK.stride(0), tree.logq_XK.stride(0), tree.tail_XB.stride(0))
    own, chosen = more.own, more.chosen
    _reparent[(triton.cdiv(rows, TREE_ROWS),)](
        tree, strides, chosen, own, more.chains, plan.arrays, state, out, run, TreeSizes(rows, step, tokens, pages),
        BLOCK=TREE_ROWS, BLOCK_K=triton.next_power_of_2(tokens), BLOCK_B=triton.next_power_of_2(max(1, pages)),
        BRANCHES=plan.kind.branches, WIDTH=0 if chosen is None else chosen.candidates.token_RC.shape[1],
        DRAWS=0 if own is None else own.token_RF.shape[1],
        SOURCES=1 if own is None else len(tree.root_X) // len(own.token_RF), num_warps=1,
    )  # fmt: skip
    return out, run


class TreeStrides(NamedTuple):
    """Row strides of a `TokenTree`."""

    tokens: int
    logq: int
    tail: int


class TreeSizes(NamedTuple):
    """Sizes of one step of a tree."""

    rows: int
    step: int
    tokens: int
    pages: int


@one_variant()
def _begin(
    plan, distribution, slots, table_stride, pending_stride, zero_A, out, sizes,
    F: tl.constexpr, P: tl.constexpr, BY_ROUND: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    batch_size, groups, rows = sizes.batch_size, sizes.groups, sizes.rows
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, index = x < rows, x // F
    group = tl.load(plan.group_A + index, mask=inside, other=0)
    first = tl.load(plan.first_G + group, mask=inside, other=0)
    _begin_rows(x, inside, index, group, first, plan, distribution, out.later, F, BY_ROUND)
    is_group = x < groups
    first_of = tl.load(plan.first_G + x, mask=is_group, other=0)
    at = tl.minimum(first_of, batch_size - 1)
    tl.store(out.later.rows.first_G + x, first_of * F, mask=is_group)
    tl.store(out.later.rows.size_G + x, tl.load(plan.size_G + x, mask=is_group, other=0) * F, mask=is_group)
    tl.store(out.later.keys_G.seed + x, tl.load(plan.seed_A + at, mask=is_group, other=0), mask=is_group)
    tl.store(out.later.keys_G.round + x, tl.load(plan.round_A + at, mask=is_group, other=0), mask=is_group)
    own = inside & (x % F == 0)
    slot = tl.load(plan.slot_A + index, mask=own, other=0)
    end, pending = tl.load(slots.end_S + slot, mask=own, other=1), tl.load(slots.pending_S + slot, mask=own, other=1)
    ended, held = tl.load(slots.ended_S + slot, mask=own, other=1) != 0, end - pending
    text = tl.load(slots.text_S + slot, mask=own, other=0).to(tl.int32)
    # The pending tokens are known not to end the answer.
    text, _ = after_all(
        text, slots.pending_SQ + slot * pending_stride, 1, tl.load(slots.entry_S + slot, mask=own, other=0), own,
        pending, tl.load(slots.least_S + slot, mask=own, other=0) - held, slots.stops, P,
    )  # fmt: skip
    zero, wide = index * 0, index.to(tl.int64)
    tl.store(out.last_A + index, wide * P + pending - 1, mask=own)
    tl.store(out.first.rank_R1 + index, index - first, mask=own)
    # The same zeros are the count, the last token, the cut and the outcome of every particle, and its tokens.
    tl.store(out.tree.count_X + index, zero.to(tl.int64), mask=own)
    tl.store(zero_A + index, zero.to(tl.float32), mask=own)
    tl.store(out.tree.root_X + index, wide, mask=own)
    tl.store(out.tree.text_X + index, text.to(tl.int64), mask=own)
    tl.store(out.tree.next_X + index, end, mask=own)
    tl.store(out.tree.alive_X + index, tl.load(slots.alive_S + slot, mask=own, other=0) != 0, mask=own)
    tl.store(out.tree.ended_X + index, ended, mask=own)
    tl.store(out.tree.mass_X + index, tl.load(slots.logw_S + slot, mask=own, other=0.0), mask=own)
    tl.store(out.rows.tables.slot_R + index, slot.to(tl.int32), mask=own)
    tl.store(out.rows.spans.start_R + index, held.to(tl.int32), mask=own)
    tl.store(out.rows.spans.count_R + index, tl.where(ended, 0, pending).to(tl.int32), mask=own)
    tl.store(out.rows.groups.group_R + index, group.to(tl.int32), mask=own)
    p = tl.arange(0, BLOCK_P)[None, :]
    exists, to = own[:, None] & (p < P), index[:, None] * P + p
    token = tl.load(slots.pending_SQ + slot[:, None] * pending_stride + p, mask=exists, other=0)
    tl.store(out.tokens_AQ + to, token, mask=exists)
    # Entries past the pages of pending tokens are overwritten later.
    page = tl.load(plan.begin_pages_AQ + to, mask=exists, other=0)
    tl.store(slots.table_SL + slot[:, None] * table_stride + held[:, None] + p, page, mask=exists)


@triton.jit
def _begin_rows(x, inside, index, group, first, plan, given, out, F: tl.constexpr, BY_ROUND: tl.constexpr):
    """Write what a row needs for its draws: its number, its random numbers and its token distribution."""
    rounds = tl.load(plan.round_A + index, mask=inside, other=0)
    stream = tl.load(plan.particle_A + index, mask=inside, other=0) * STREAMS + x % F
    tl.store(out.stream_RF + x, stream, mask=inside)
    tl.store(out.rank_R1 + x, (x - first * F).to(tl.int64), mask=inside)
    tl.store(out.keys_R.seed + x, tl.load(plan.seed_A + index, mask=inside, other=0), mask=inside)
    tl.store(out.keys_R.round + x, rounds if BY_ROUND else rounds * 0, mask=inside)
    tl.store(out.group_R + x, group.to(tl.int32), mask=inside)
    copy_distribution(out.distribution, x, given, index, inside)


@one_variant()
def _pack(
    plan, slots, tree, out, rows,
    F: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, LOG_F: tl.constexpr,
    HAS_SEPARATE: tl.constexpr,
):  # fmt: skip
    x, k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)[:, None]
    inside = x < rows
    root = tl.load(tree.root_X + x, mask=inside, other=0)
    slot = tl.load(plan.slot_A + root, mask=inside, other=0)
    share = tl.load(tree.mass_X + x, mask=inside, other=0.0) - tl.load(slots.logw_S + slot, mask=inside, other=0.0)
    decoding = tl.load(plan.decoding_G + tl.load(plan.group_A + x // F, mask=inside, other=0), mask=inside, other=0)
    # Draft chains all have the same share until the target has verified them, except rows that continue no particle.
    exists = tl.load(tree.alive_X + x, mask=inside, other=0) != 0
    share = tl.where(decoding == REJECTION, tl.where(exists, 0.0, NONE), share)
    if HAS_SEPARATE:
        has_ended = tl.load(slots.ended_S + slot, mask=inside, other=1) != 0
        own = tl.where(has_ended, tl.where(x % F == 0, 0.0, NONE), tl.full((), -LOG_F, tl.float64))
        share = tl.where(is_separate(decoding), own, share)
    given, at = (k < K) & inside[None, :], x[None, :] * K + k
    tl.store(out.tokens_XK + at, tl.load(tree.tokens_XK + at, mask=given, other=0).to(tl.int32), mask=given)
    tl.store(out.logq_XK + at, tl.load(tree.logq_XK + at, mask=given, other=0.0), mask=given)
    tl.store(out.root_X + x, root.to(tl.int32), mask=inside)
    tl.store(out.count_X + x, tl.load(tree.count_X + x, mask=inside, other=0).to(tl.int32), mask=inside)
    tl.store(out.ended_X + x, tl.load(tree.ended_X + x, mask=inside, other=0) != 0, mask=inside)
    tl.store(out.cut_X + x, tl.load(tree.cut_X + x, mask=inside, other=0).to(tl.int32), mask=inside)
    tl.store(out.share_X + x, share.to(tl.float32), mask=inside)


@one_variant()
def _reparent(
    before, strides, chosen, own, chains, plan, slots, out, run, sizes,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr, BRANCHES: tl.constexpr, WIDTH: tl.constexpr,
    DRAWS: tl.constexpr, SOURCES: tl.constexpr,
):  # fmt: skip
    """Write every row with its next token. SOURCES: number of source rows for each row that draws its own tokens; the
    first of them is the one that draws."""
    rows, step = sizes.rows, sizes.step
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = x < rows
    group = tl.load(plan.group_A + x // BRANCHES, mask=inside, other=0)
    parent, mass = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.float64)
    token, logq = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.float32)
    is_tree = inside
    if own is not None:
        parent = (x // DRAWS * SOURCES).to(tl.int64)
        token = tl.load(own.token_RF + x, mask=inside, other=0).to(tl.int64)
        logq = tl.load(own.logq_RF + x, mask=inside, other=0.0)
        is_tree = inside & (is_separate(tl.load(plan.decoding_G + group, mask=inside, other=0)) == 0)
    if chosen is not None:
        parent = tl.where(is_tree, tl.load(chosen.expansion.parent_X + x, mask=is_tree, other=0), parent)
        mass = tl.where(is_tree, tl.load(chosen.expansion.mass_X + x, mask=is_tree, other=0.0), mass)
        at = parent * WIDTH + tl.load(chosen.expansion.candidate_X + x, mask=is_tree, other=0)
        token = tl.where(is_tree, tl.load(chosen.candidates.token_RC + at, mask=is_tree, other=0), token)
        was_over = tl.load(before.ended_X + parent, mask=is_tree, other=0) != 0
        tree_logq = tl.where(was_over, 0.0, tl.load(chosen.candidates.logq_RC + at, mask=is_tree, other=0.0))
        is_nan = tl.load(chosen.expansion.nan_G + group, mask=is_tree, other=0) != 0
        tree_logq = tl.where(is_nan, float("nan"), tree_logq)
        logq = tl.where(is_tree, tree_logq, logq)
    if chains is not None:
        is_chain = inside & (tl.load(plan.decoding_G + group, mask=inside, other=0) == REJECTION)
        parent = tl.where(is_chain, tl.load(chains.parent_X + x, mask=is_chain, other=0), parent)
        token = tl.where(is_chain, tl.load(chains.token_X + x, mask=is_chain, other=0), token)
        logq = tl.where(is_chain, tl.load(chains.logq_X + x, mask=is_chain, other=0.0), logq)
        mass = tl.where(is_chain, 0.0, mass)
    root = tl.load(before.root_X + parent, mask=inside, other=0)
    ended = tl.load(before.ended_X + parent, mask=inside, other=1) != 0
    text = tl.load(before.text_X + parent, mask=inside, other=0)
    count = tl.load(before.count_X + parent, mask=inside, other=0)
    slot = tl.load(plan.slot_A + root, mask=inside, other=0)
    cut = tl.load(before.cut_X + parent, mask=inside, other=0)
    end = tl.load(slots.end_S + slot, mask=inside, other=0) - cut
    entry = tl.load(slots.entry_S + slot, mask=inside, other=0)
    # As `grow` for one token.
    room = tl.load(slots.limit_S + slot, mask=inside, other=0) - end - count
    going = inside & (room > 0)
    early = tl.load(slots.least_S + slot, mask=inside, other=0) - end - count > 0
    state = after(text.to(tl.int32), token, entry, going, early, slots.stops)
    has_ended = ended | (going.to(tl.int64) >= room) | (state == DONE)
    alive = (tl.load(before.alive_X + parent, mask=inside, other=0) != 0) & (mass > NONE)
    text_before = tl.load(before.before_X + parent, mask=inside, other=0)
    tl.store(out.root_X + x, root, mask=inside)
    tl.store(out.count_X + x, count + tl.where(ended, 0, 1), mask=inside)
    tl.store(out.alive_X + x, alive, mask=inside)
    tl.store(out.ended_X + x, has_ended, mask=inside)
    tl.store(out.before_X + x, tl.where(ended, text_before, text), mask=inside)
    tl.store(out.text_X + x, tl.where(ended, text, state.to(tl.int64)), mask=inside)
    tl.store(out.mass_X + x, mass, mask=inside)
    tl.store(out.last_X + x, token, mask=inside)
    tl.store(out.next_X + x, end + step + 1, mask=inside)
    tl.store(out.cut_X + x, cut, mask=inside)
    outcome = tl.load(before.outcome_X + parent, mask=inside, other=0)
    tl.store(out.outcome_X + x, tl.where(step == 0, x.to(tl.int64), outcome), mask=inside)
    tl.store(run.slot_X + x, slot.to(tl.int32), mask=inside)
    tl.store(run.tail_X + x, end.to(tl.int32), mask=inside)
    tl.store(run.start_X + x, (end + step).to(tl.int32), mask=inside)
    tl.store(run.count_X + x, (alive & ~has_ended).to(tl.int32), mask=inside)
    _reparent_tokens(x, inside, parent, token, logq, before, strides, plan, out, sizes, BLOCK_K, BLOCK_B)


@triton.jit
def _reparent_tokens(
    x, inside, parent, token, logq, before, strides, plan, out, sizes, BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr
):
    """Write rows' tokens with their log q, and their pages: pages of earlier tokens are the parent's."""
    step, tokens, pages = sizes.step, sizes.tokens, sizes.pages
    k, b = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_B)[None, :]
    of, to, is_old = parent[:, None], x[:, None].to(tl.int64), inside[:, None] & (k < step)
    token_XK = tl.load(before.tokens_XK + of * strides.tokens + k, mask=is_old, other=0)
    logq_XK = tl.load(before.logq_XK + of * strides.logq + k, mask=is_old, other=0.0)
    is_token = inside[:, None] & (k < tokens)
    tl.store(out.tokens_XK + to * tokens + k, tl.where(k == step, token[:, None], token_XK), mask=is_token)
    tl.store(out.logq_XK + to * tokens + k, tl.where(k == step, logq[:, None], logq_XK), mask=is_token)
    is_page = inside[:, None] & (b < pages)
    known_XB = tl.load(before.tail_XB + of * strides.tail + b, mask=is_page & (b < step), other=0)
    own_XB = tl.load(plan.branch_pages_XB + to * pages + b, mask=is_page & (b >= step), other=0)
    tl.store(out.tail_XB + to * pages + b, tl.where(b < step, known_XB, own_XB), mask=is_page)


def observe_draws(
    state: SlotState,
    plan: RoundPlan[Tensor],
    tree: TokenTree,
    selection: RoundSelection[Tensor],
    kept_RV: Tensor,
    coupling: Coupling,
    block: int | None = None,
    warps: int = 8,
) -> ObservedDraws[Tensor]:
    """See `smc.executor.draft.observe_draws`."""
    batch_size, columns, room = plan.kind.batch_size, kept_RV.shape[1], Room(kept_RV.device)
    block = block or min(4096, triton.next_power_of_2(columns))
    splits = triton.cdiv(columns, block)
    seen = SeenDraws(room.ints(batch_size), room.floats(batch_size), room.floats(batch_size))
    parts = ObservedParts(*(room.floats(batch_size, splits) for _ in ObservedParts._fields))
    out = ObservedDraws(room.floats(batch_size), room.floats(batch_size), room.floats(batch_size))
    _observe[(splits, batch_size)](
        plan.arrays, state, tree.tokens_XK, tree.tokens_XK.stride(0), selection, kept_RV, len(kept_RV), columns,
        coupling, seen, parts, BLOCK=block, LEVELS=_levels(columns),
        # The score of the drawn token is computed once alone and once beside others, and must have the same bits.
        enable_fp_fusion=False, num_warps=warps,
    )  # fmt: skip
    _finish_observation[(batch_size,)](
        seen, parts, out, columns, splits, SPLITS=triton.next_power_of_2(splits), enable_fp_fusion=False, num_warps=1
    )
    return out


class SeenDraws(NamedTuple):
    """The target's draw after the root of each batch index."""

    kind_A: Tensor
    """int32: UNSEEN, SEEN, or RANKED: seen at a position where ranks are computed."""
    logq_A: Tensor
    """float32 log q of the drawn token; -inf if the draft cannot draw it."""
    score_A: Tensor
    """float32 score of the drawn token; -inf as above."""


class ObservedParts(NamedTuple):
    """float32 sums over each part of the columns after a root."""

    top_AP: Tensor
    """The largest score."""
    total_AP: Tensor
    """Sum of exp(score) relative to it."""
    first_AP: Tensor
    """Sum of log q with these weights."""
    second_AP: Tensor
    """Sum of the square of log q with these weights."""
    above_AP: Tensor
    """Number of columns with a higher score than the drawn token."""


def _levels(columns: int) -> int:
    """Return the number of steps of a search among columns."""
    return next(i for i in range(1, 5) if columns <= FAN**i)


@triton.jit
def _hash(position):
    """Hash positions as `smc.algorithm.coupling.is_ranked` does."""
    hashed = (position.to(tl.int64) * _FACTOR) & _MOST
    return ((hashed ^ (hashed >> _HALF)) * _FACTOR) & _MOST


@triton.jit
def _column_of(token, ids_M, columns, FAN: tl.constexpr, LEVELS: tl.constexpr):
    """Return the column of a token; -1 if it has none."""
    if ids_M is None:
        return tl.where(token < columns, token, -1).to(tl.int32)
    else:
        # Each step divides what remains of the ascending tokens into FAN runs.
        column, f = tl.full((), 0, tl.int32), tl.arange(0, FAN)
        for level in tl.static_range(LEVELS):
            begin_F = column + f * FAN ** (LEVELS - 1 - level)
            is_upto_F = (begin_F < columns) & (tl.load(ids_M + begin_F, mask=begin_F < columns, other=0) <= token)
            column += tl.maximum(tl.sum(is_upto_F.to(tl.int32), 0) - 1, 0) * FAN ** (LEVELS - 1 - level)
        return tl.where(tl.load(ids_M + column) == token, column, -1)


@one_variant("kept_RV")
def _observe(
    plan, slots, tokens_XK, stride, selection, kept_RV, kept, columns, coupling, seen, parts,
    BLOCK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Sum one part of the columns after the root of one batch index, if the target's draw there is seen."""
    split, index, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    root, row = tl.load(selection.particles.ancestor_A + index), tl.load(selection.particles.row_A + index)
    taken, cut, bonus = (
        tl.load(selection.taken_A + index),
        tl.load(selection.cut_A + index),
        tl.load(selection.bonus_A + index),
    )
    is_alive = tl.load(selection.particles.alive_A + index) != 0
    slot, exponent = tl.load(plan.slot_A + root), tl.load(coupling.exponent_A + root)
    token = tl.where(taken > 0, tl.load(tokens_XK + row * stride).to(tl.int64), bonus)
    is_seen = is_alive & (tl.load(slots.ended_S + slot) == 0) & (cut == 0) & (token >= 0) & (root < kept)
    if is_seen & (exponent > 0):
        position, kept_V = tl.load(slots.end_S + slot), kept_RV + root * columns
        drawn, zero_1 = _column_of(token, coupling.ids_M, columns, _FAN, LEVELS), tl.zeros((1,), tl.int32)
        drawn_1 = drawn + zero_1
        drawn_logq_1 = tl.load(kept_V + drawn_1, mask=drawn_1 >= 0, other=-float("inf"))
        drawn_score_1 = coupled_score(drawn_logq_1, drawn_1, drawn_1 >= 0, root, position, coupling)
        drawn_score = tl.max(drawn_score_1, 0)
        column_V = split * BLOCK + tl.arange(0, BLOCK)
        inside_V = column_V < columns
        logq_V = tl.load(kept_V + column_V, mask=inside_V, other=-float("inf"))
        score_V = coupled_score(logq_V, column_V, inside_V, root, position, coupling)
        top = tl.max(score_V, 0)
        weight_V = tl.exp(score_V - finite(top))
        value_V = tl.where(weight_V > 0, logq_V, 0.0)
        is_above_V = inside_V & (score_V > drawn_score) & (column_V != drawn)
        at = index * splits + split
        tl.store(parts.top_AP + at, top)
        tl.store(parts.total_AP + at, tl.sum(weight_V, 0))
        tl.store(parts.first_AP + at, tl.sum(weight_V * value_V, 0))
        tl.store(parts.second_AP + at, tl.sum(weight_V * value_V * value_V, 0))
        tl.store(parts.above_AP + at, tl.sum(is_above_V.to(tl.int32), 0).to(tl.float32))
        if split == 0:
            tl.store(seen.kind_A + index, tl.where(_hash(position) < _BELOW, RANKED, SEEN))
            tl.store(seen.logq_A + index + zero_1, drawn_logq_1)
            tl.store(seen.score_A + index, drawn_score)
    elif split == 0:
        tl.store(seen.kind_A + index, UNSEEN)


@one_variant()
def _finish_observation(seen, parts, out, columns, splits, SPLITS: tl.constexpr):
    """Add up the parts of one batch index."""
    index, split = tl.program_id(0), tl.arange(0, SPLITS)
    kind, nan = tl.load(seen.kind_A + index), float("nan")
    if kind == UNSEEN:
        tl.store(out.score_A + index, nan)
        tl.store(out.information_A + index, nan)
        tl.store(out.rank_A + index, nan)
        return
    is_part = split < splits
    at = index * splits + split
    top_P = tl.load(parts.top_AP + at, mask=is_part, other=-float("inf"))
    total_P = tl.load(parts.total_AP + at, mask=is_part, other=0.0)
    first_P = tl.load(parts.first_AP + at, mask=is_part, other=0.0)
    second_P = tl.load(parts.second_AP + at, mask=is_part, other=0.0)
    above_P = tl.load(parts.above_AP + at, mask=is_part, other=0.0)
    drawn_logq, drawn_score = tl.load(seen.logq_A + index), tl.load(seen.score_A + index)
    top = tl.max(top_P, 0)
    scale_P = tl.exp(top_P - finite(top))
    total = tl.sum(total_P * scale_P, 0)
    first, second = tl.sum(first_P * scale_P, 0), tl.sum(second_P * scale_P, 0)
    mean = first / total
    win = tl.exp(drawn_score - top) / total
    weight = win / (win + _SLACK)
    can_draw = drawn_logq > -float("inf")
    tl.store(out.score_A + index, tl.where(can_draw, weight * (drawn_logq - mean), nan))
    information = 0.5 * weight * tl.maximum(second / total - mean * mean, 0.0)
    tl.store(out.information_A + index, tl.where(can_draw, information, nan))
    # A token that the draft cannot draw, or that its head lacks, ranks after all columns.
    rank = tl.where(drawn_score > -float("inf"), tl.sum(above_P, 0), columns * 1.0)
    tl.store(out.rank_A + index, tl.where(kind == RANKED, rank, nan))
