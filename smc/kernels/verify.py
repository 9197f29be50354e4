"""The verify stage of a round: the layout of the target's pass, and the verification of blocks by its outputs. The
Triton form of `smc.executor.verify` and `smc.algorithm.verification`.

`lay_out_blocks` and `match_samples` have a program for each group and some for batch indices of no group;
`collect_outputs` has a program for every few batch indices. `verify_chains` has a program for each group, which follows
the group's path token after token. A trial reads one number of each of two distributions. Only a rejected token costs
passes over the vocabulary: they write the remainder of the target's distribution to the group's own memory, and the
last draw reads it there. The host reads nothing, and grids follow from shapes alone, so all launches can be captured in
a CUDA graph.

Local axes: P chains. T = A * Q."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smc.algorithm.resampling import Spans
from smc.algorithm.verification import Matches
from smc.api.limits import MAX_PARTICLES
from smc.arrays import Room, contiguous
from smc.distributions import DistributionSpec
from smc.kernels.decodings import is_exact
from smc.kernels.launch import one_variant, own_indices, programs
from smc.kernels.sampling import exponentials
from smc.kernels.truncation import copy_distribution
from smc.philox import STREAMS_PER_PARTICLE, DrawKeys, Purpose
from smc.round.plan import RoundPlan
from smc.round.tensors import (
    Blocks,
    DraftedRows,
    RowGroups,
    Rows,
    RowSpans,
    RowTables,
    SlotState,
    TargetDraws,
    VerifyInputs,
    VerifyOutputs,
)

NONE = tl.constexpr(-float("inf"))
NOTHING = tl.constexpr(-1)
STREAMS = tl.constexpr(STREAMS_PER_PARTICLE)
TRIAL, REMAINDER = tl.constexpr(int(Purpose.TRIAL)), tl.constexpr(int(Purpose.REMAINDER))
INDICES = 16
"""Batch indices of a program of `verify`."""


def lay_out_blocks(
    state: SlotState, logq_SQ: Tensor, plan: RoundPlan[Tensor], drafted: DraftedRows | None
) -> VerifyInputs:
    """See `smc.executor.verify.lay_out_blocks`."""
    arrays, given, room = plan.arrays, plan.target_distribution, Room(state.device)
    (batch_size, q), groups = arrays.target_pages_AQ.shape, len(arrays.first_G)
    tokens, held_R = batch_size * q, room.ints(batch_size)
    blocks = Blocks(
        origin_A=room.longs(batch_size),
        tokens_AQ=room.longs(batch_size, q),
        logq_AQ=room.floats(batch_size, q),
        count_A=room.longs(batch_size),
        ended_A=room.bools(batch_size),
        alive_A=room.bools(batch_size),
        logw_A=room.doubles(batch_size),
        open_A=room.bools(batch_size),
        run_A=room.longs(batch_size),
        position_A=room.longs(batch_size),
        stream_A=room.longs(batch_size),
        rank_A=room.longs(batch_size),
    )
    none_T = room.longs(tokens)
    out = VerifyInputs(
        blocks=blocks,
        rows=Rows(
            RowTables(state.table_SL, room.ints(batch_size), arrays.target_pages_AQ, held_R),
            RowSpans(held_R, room.ints(batch_size)),
            RowGroups(room.ints(batch_size), *arrays.groups, arrays.shared_G),
            queries=q,
            contexts=plan.kind.contexts,
        ),
        distribution_T=DistributionSpec.allocate(room, tokens, given.active),
        label_T=room.ints(tokens),
        keys=DrawKeys(room.longs(tokens), none_T, none_T[:, None], room.longs(tokens), Purpose.TARGET),
        last_A=room.longs(batch_size),
    )
    _lay_out[(programs(batch_size, groups),)](
        arrays, given, state, state.pending_SQ.stride(0), logq_SQ, logq_SQ.stride(0), drafted, out,
        groups, batch_size, K=q if drafted is None else drafted.block, Q=q,
        BLOCK_N=MAX_PARTICLES, BLOCK_Q=triton.next_power_of_2(q), EXACT=plan.kind.has_exact, num_warps=4,
    )  # fmt: skip
    return out


def collect_outputs(
    inputs: VerifyInputs,
    plan: RoundPlan[Tensor],
    labelled_T: Tensor | None,
    drawn: TargetDraws | None,
    next_AV: Tensor | None,
) -> VerifyOutputs:
    """See `smc.executor.verify.collect_outputs`."""
    blocks = inputs.blocks
    (batch_size, q), room = blocks.tokens_AQ.shape, Room(blocks.tokens_AQ.device)
    out = VerifyOutputs(
        blocks=blocks,
        logp_AQ=room.floats(batch_size, q),
        drawn_AQ=room.longs(batch_size, q),
        drawn_logp_AQ=room.floats(batch_size, q),
        next_AV=None,
        nan_A=room.bools(batch_size),
        nan_AQ=room.bools(batch_size, q),
    )
    node_AQ = None if inputs.nodes is None else inputs.nodes.node_AQ
    _verify[(triton.cdiv(batch_size, INDICES),)](
        plan.arrays, contiguous(labelled_T), contiguous(drawn), node_AQ, out, batch_size, Q=q, BLOCK_N=INDICES,
        BLOCK_Q=triton.next_power_of_2(q), num_warps=1
    )  # fmt: skip
    return out._replace(next_AV=next_AV, nodes=inputs.nodes)


def match_samples(tokens_AQ: Tensor, count_A: Tensor, drawn_AQ: Tensor, alive_A: Tensor, groups: Spans) -> Matches:
    """As `smc.algorithm.verification.match_samples`, for groups of up to MAX_PARTICLES batch indices; integers of
    any type."""
    batch_size, tokens = tokens_AQ.shape
    room, count = Room(tokens_AQ.device), len(groups.first_G)
    out = Matches(room.longs(batch_size), room.longs(batch_size))
    given = contiguous((tokens_AQ, count_A, drawn_AQ, alive_A, groups))
    _match_samples[(programs(batch_size, count),)](
        *given, out, tokens, count, batch_size,
        BLOCK_N=MAX_PARTICLES, BLOCK_Q=triton.next_power_of_2(tokens + 1), num_warps=4,
    )  # fmt: skip
    return out


def verify_chains(
    plan: RoundPlan[Tensor], inputs: VerifyInputs, logp_PQV: Tensor, logq_PKV: Tensor, groups: Spans
) -> tuple[Tensor, Tensor]:
    """See `smc.executor.chains.verify_chains`, for groups of up to MAX_PARTICLES chains. Random numbers of `smc.philox`
    are made here: of round 0, for trials from the chain's own stream and for draws from stream 0."""
    (chains, q, vocab), device = logp_PQV.shape, logp_PQV.device
    token_PQ = torch.full((chains, q), -1, dtype=torch.int64, device=device)
    token_logp_PQ = torch.full((chains, q), torch.nan, dtype=torch.float32, device=device)
    # A group uses the memory of its first chain.
    left_PV = torch.empty(chains, vocab, dtype=torch.float64, device=device)
    block = min(4096, triton.next_power_of_2(vocab))
    _verify_chains[(len(groups.first_G),)](
        plan.arrays, contiguous(inputs.blocks), inputs.keys.position_R.contiguous(), logp_PQV.contiguous(),
        logq_PKV.contiguous(), contiguous(groups), left_PV, token_PQ, token_logp_PQ, vocab,
        Q=q, BLOCK_N=MAX_PARTICLES, BLOCK=block, num_warps=8,
        # Without fused multiply-adds the variates equal those of `smc.philox.exponentials` to the last bit before the
        # logarithm.
        enable_fp_fusion=False,
    )  # fmt: skip
    return token_PQ, token_logp_PQ


@one_variant()
def _lay_out(
    plan, distribution, slots, pending_stride, logq_SQ, logq_stride, drafted, out, groups, batch_size,
    K: tl.constexpr, Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    index, exists, _, is_group = own_indices(plan.first_G, plan.size_G, groups, batch_size, BLOCK_N)
    group = tl.load(plan.group_A + index, mask=exists, other=0)
    own = tl.load(plan.slot_A + index, mask=exists, other=0)
    origin, slot, lone = index, own, index < 0
    if drafted is None:
        alive = tl.load(slots.alive_S + slot, mask=exists, other=0) != 0
        ended = tl.load(slots.ended_S + slot, mask=exists, other=1) != 0
        count = tl.load(slots.pending_S + slot, mask=exists, other=1)
        share = tl.zeros_like(index).to(tl.float64)
    else:
        origin = tl.load(drafted.root_X + index, mask=exists, other=0)
        slot = tl.load(plan.slot_A + origin, mask=exists, other=0)
        share = tl.load(drafted.share_X + index, mask=exists, other=0.0).to(tl.float64)
        alive = (tl.load(slots.alive_S + slot, mask=exists, other=0) != 0) & (share > NONE)
        count = 1 + tl.load(drafted.count_X + index, mask=exists, other=0).to(tl.int64)
        ended = tl.load(drafted.ended_X + index, mask=exists, other=1) != 0
        if EXACT:
            # A draft that proposes nothing, such as one that returns NaN, leaves only the seed.
            nothing = is_group & (tl.max((exists & alive).to(tl.int32), 0) == 0)
            own_draws = is_exact(tl.load(plan.decoding_G + group))
            lone = exists & nothing & own_draws & (tl.load(slots.alive_S + own, mask=exists, other=0) != 0)
            origin, slot, count = tl.where(lone, index, origin), tl.where(lone, own, slot), tl.where(lone, 1, count)
            ended = tl.where(lone, tl.load(slots.ended_S + own, mask=exists, other=1) != 0, ended)
            alive = alive | lone
    held = tl.load(slots.end_S + slot, mask=exists, other=0) - tl.load(slots.pending_S + slot, mask=exists, other=0)
    run = tl.where(alive, count - ended.to(tl.int64), 0)
    logw = tl.load(slots.logw_S + slot, mask=exists, other=0.0) + share
    stream = tl.load(plan.particle_A + index, mask=exists, other=0) * STREAMS
    blocks, of_rows = out.blocks, out.rows
    tl.store(blocks.origin_A + index, origin.to(tl.int64), mask=exists)
    tl.store(blocks.count_A + index, count, mask=exists)
    tl.store(blocks.ended_A + index, ended, mask=exists)
    tl.store(blocks.alive_A + index, alive, mask=exists)
    tl.store(blocks.logw_A + index, logw, mask=exists)
    tl.store(blocks.open_A + index, alive & (ended == 0), mask=exists)
    tl.store(blocks.run_A + index, run, mask=exists)
    tl.store(blocks.position_A + index, held + count, mask=exists)
    tl.store(blocks.stream_A + index, stream, mask=exists)
    tl.store(blocks.rank_A + index, (index - tl.load(plan.first_G + group)).to(tl.int64), mask=exists)
    tl.store(out.last_A + index, index * Q + count - 1, mask=exists)
    tl.store(of_rows.tables.slot_R + index, slot.to(tl.int32), mask=exists)
    tl.store(of_rows.spans.start_R + index, held.to(tl.int32), mask=exists)
    tl.store(of_rows.spans.count_R + index, run.to(tl.int32), mask=exists)
    tl.store(of_rows.groups.group_R + index, group.to(tl.int32), mask=exists)
    q = tl.arange(0, BLOCK_Q)[None, :]
    inside, at = exists[:, None] & (q < Q), index[:, None] * Q + q
    token, logq = _block_tokens(
        q, inside, index, slot, slots.pending_SQ, pending_stride, logq_SQ, logq_stride, drafted, K
    )
    tl.store(blocks.tokens_AQ + at, token, mask=inside)
    tl.store(blocks.logq_AQ + at, logq, mask=inside)
    is_labelled = inside & (q < count[:, None] - 1)
    label, _ = _block_tokens(
        q + 1, is_labelled, index, slot, slots.pending_SQ, pending_stride, logq_SQ, logq_stride, drafted, K
    )
    tl.store(out.label_T + at, tl.where(is_labelled, label, -1).to(tl.int32), mask=inside)
    _draw_settings(at, inside, q, index, exists, held, plan.seed_A, distribution, out.distribution_T, out.keys)


@triton.jit
def _block_tokens(q, inside, index, slot, pending_SQ, pending_stride, logq_SQ, logq_stride, drafted, K: tl.constexpr):
    """Return tokens of blocks and their log q: in look-ahead the pending tokens; in lockstep the first pending token,
    then the tokens that have just been drafted."""
    if drafted is None:
        token = tl.load(pending_SQ + slot[:, None] * pending_stride + q, mask=inside, other=0)
        logq = tl.load(logq_SQ + slot[:, None] * logq_stride + q, mask=inside, other=0.0)
    else:
        token = tl.load(pending_SQ + slot[:, None] * pending_stride + q * 0, mask=inside & (q == 0), other=0)
        logq = tl.load(logq_SQ + slot[:, None] * logq_stride + q * 0, mask=inside & (q == 0), other=0.0)
        is_drafted, at = inside & (q > 0), index[:, None] * K + q - 1
        token = tl.where(q > 0, tl.load(drafted.tokens_XK + at, mask=is_drafted, other=0).to(tl.int64), token)
        logq = tl.where(q > 0, tl.load(drafted.logq_XK + at, mask=is_drafted, other=0.0), logq)
    return token, logq


@triton.jit
def _draw_settings(at, inside, q, index, exists, held, seed_A, distribution, out, keys):
    """Write the token distribution and the random numbers of every token's draw."""
    none = q * 0
    copy_distribution(out, at, distribution, index[:, None] + none, inside)
    tl.store(keys.seed_R + at, tl.load(seed_A + index, mask=exists, other=0)[:, None] + none, mask=inside)
    tl.store(keys.round_R + at, held[:, None] * 0 + none, mask=inside)
    tl.store(keys.position_R + at, held[:, None] + 1 + q, mask=inside)


@one_variant()
def _verify(
    plan, labelled_T, drawn, node_AQ, out, batch_size, Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr
):  # fmt: skip
    index, q = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_Q)[None, :]
    exists = index < batch_size
    inside, at = exists[:, None] & (q < Q), index[:, None] * Q + q
    logp, token = at.to(tl.float32) * 0, at.to(tl.int64) * 0
    is_nan, drawn_logp = inside & (q < 0), at.to(tl.float32) * 0
    if labelled_T is not None:
        logp = tl.load(labelled_T + at, mask=inside, other=0.0)
    tl.store(out.nan_A + index, tl.max((logp != logp).to(tl.int32), 1) > 0, mask=exists)
    if drawn is not None:
        is_run = inside & (q < tl.load(out.blocks.run_A + index, mask=exists, other=0)[:, None])
        group = tl.load(plan.group_A + index, mask=exists, other=0)
        own_draws = is_exact(tl.load(plan.decoding_G + group, mask=exists, other=0))
        of = at
        if node_AQ is not None:
            of = tl.load(node_AQ + at, mask=inside, other=0)
        token = tl.load(drawn.token_T1 + of, mask=inside, other=0).to(tl.int64)
        drawn_logp = tl.load(drawn.logp_T1 + of, mask=inside, other=0.0)
        logp = tl.where(own_draws[:, None], tl.where(is_run, drawn_logp, 0.0), logp)
        log_z = tl.load(drawn.log_z_T + of, mask=is_run, other=0.0)
        is_nan = log_z != log_z
    tl.store(out.logp_AQ + at, logp, mask=inside)
    tl.store(out.drawn_AQ + at, token, mask=inside)
    tl.store(out.drawn_logp_AQ + at, drawn_logp, mask=inside)
    tl.store(out.nan_AQ + at, is_nan, mask=inside)


@one_variant()
def _match_samples(
    tokens_AQ, count_A, drawn_AQ, alive_A, groups, out, tokens, count, batch_size,
    BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    q = tl.arange(0, BLOCK_Q)
    index_N, exists_N, _, is_group = own_indices(groups.first_G, groups.size_G, count, batch_size, BLOCK_N)
    count_N = tl.load(count_A + index_N, mask=exists_N, other=0)
    at_NQ = index_N[:, None] * tokens + q[None, :]
    # The first token is right; a later one is right if it exists and the target drew it after the previous token.
    asks_NQ = exists_N[:, None] & (q > 0)[None, :] & (q < tokens)[None, :] & (q[None, :] < count_N[:, None])
    token_NQ = tl.load(tokens_AQ + at_NQ, mask=asks_NQ, other=0)
    agrees_NQ = (q == 0)[None, :] | (asks_NQ & (token_NQ == tl.load(drawn_AQ + at_NQ - 1, mask=asks_NQ, other=-1)))
    right_N = tl.min(tl.where(agrees_NQ, BLOCK_Q, q[None, :]), 1)
    right_N = tl.where(tl.load(alive_A + index_N, mask=exists_N, other=0) != 0, right_N, 0)
    right, best = tl.max(tl.where(exists_N, right_N, -1), 0, return_indices=True, return_indices_tie_break_left=True)
    first = tl.min(index_N, 0)
    tl.store(out.best_A + index_N, tl.where(is_group, first + best, index_N).to(tl.int64), mask=exists_N)
    tl.store(
        out.right_A + index_N, tl.where(is_group, tl.maximum(right, 1), 1) + index_N.to(tl.int64) * 0, mask=exists_N
    )


@one_variant("logp_PQV", "logq_PKV", "left_PV", "vocab")
def _verify_chains(
    plan, blocks, position_T, logp_PQV, logq_PKV, groups, left_PV, token_PQ, token_logp_PQ, vocab,
    Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group, n = tl.program_id(0), tl.arange(0, BLOCK_N)
    first, size = tl.load(groups.first_G + group).to(tl.int64), tl.load(groups.size_G + group).to(tl.int32)
    exists = n < size
    index = tl.load(plan.chain_P + first + n, mask=exists, other=0)
    count = tl.load(blocks.count_A + index, mask=exists, other=0)
    on_path = exists & (tl.load(blocks.alive_A + index, mask=exists, other=0) != 0)
    left_V = left_PV + first * vocab
    for j in range(Q):
        lead = tl.min(tl.where(on_path, n, BLOCK_N), 0)
        if lead < BLOCK_N:
            logp_V = logp_PQV + ((first + lead) * Q + j) * vocab
            asks = on_path & (count > j + 1)
            token = tl.load(blocks.tokens_AQ + index * Q + j + 1, mask=asks & (j + 1 < Q), other=NOTHING)
            accepted = _accept(
                plan, blocks, position_T, logq_PKV, logp_V, left_V, first, size, asks & (token >= 0), token, vocab, j,
                Q, BLOCK_N, BLOCK
            )  # fmt: skip
            to = (first + n) * Q + j
            tl.store(token_PQ + to, accepted + to * 0, mask=on_path)
            tl.store(token_logp_PQ + to, tl.load(logp_V + accepted) + to.to(tl.float32) * 0, mask=on_path)
            on_path = asks & (token == accepted)


@triton.jit
def _accept(
    plan, blocks, position_T, logq_PKV, logp_V, left_V, first, size, asks, token, vocab, j,
    Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the group's next token after token j: the first proposed token that is accepted, or a draw from the
    remainder."""
    n, kept, is_left = tl.arange(0, BLOCK_N), tl.full((), -1, tl.int64), tl.full((), 0, tl.int32)
    for m in range(size):
        is_tried = (tl.max((asks & (n == m)).to(tl.int32), 0) > 0) & (kept < 0)
        if is_tried:
            chosen = tl.sum(tl.where(n == m, token, 0), 0)
            logq_V = logq_PKV + ((first + m) * (Q - 1) + j) * vocab
            w0, w1 = _words(plan, blocks, position_T, first + m, j, TRIAL, Q, True)
            # The 53 highest bits of the two words.
            uniform = (w0.to(tl.float64) * 2097152.0 + (w1 >> 11).to(tl.float64)) * (2.0**-53)
            left = tl.load(left_V + chosen, mask=is_left > 0, other=0.0)
            left = tl.where(is_left > 0, left, tl.exp(tl.load(logp_V + chosen).to(tl.float64)))
            if uniform * tl.exp(tl.load(logq_V + chosen).to(tl.float64)) < left:
                kept = chosen
            else:
                is_left = _subtract(logp_V, logq_V, left_V, is_left, vocab, BLOCK)
    if kept < 0:
        w0, w1 = _words(plan, blocks, position_T, first, j, REMAINDER, Q, False)
        kept = _draw_remainder(logp_V, left_V, is_left, w0, w1, vocab, BLOCK)
    return kept


@triton.jit
def _words(plan, blocks, position_T, chain, j, PURPOSE: tl.constexpr, Q: tl.constexpr, OWN: tl.constexpr):
    """Return random words for token j: of the chain's own stream, or of stream 0."""
    index = tl.load(plan.chain_P + chain)
    position = tl.load(position_T + index * Q + j).to(tl.uint32)
    stream = tl.load(blocks.rank_A + index).to(tl.uint32) if OWN else position * 0
    w0, w1, _, _ = tl.philox(tl.load(plan.seed_A + index), position, stream, position * 0, PURPOSE)
    return w0, w1


@triton.jit
def _remainder(logp_V, left_V, is_left, column, vocab):
    """Return a block of the remainder of the target's distribution: all of the distribution, until something has been
    subtracted."""
    inside = column < vocab
    whole = tl.exp(tl.load(logp_V + column, mask=inside & (is_left == 0), other=-float("inf")).to(tl.float64))
    return tl.where(is_left > 0, tl.load(left_V + column, mask=inside & (is_left > 0), other=0.0), whole)


@triton.jit
def _subtract(logp_V, logq_V, left_V, is_left, vocab, BLOCK: tl.constexpr):
    """Write max(0, remainder - q), normalised, to `left_V`, unless rounding leaves nothing of it. Returns whether
    `left_V` now holds the remainder."""
    total = tl.full((), 0.0, tl.float64)
    for begin in range(0, vocab, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        q_V = tl.exp(tl.load(logq_V + column, mask=column < vocab, other=-float("inf")).to(tl.float64))
        rest = _remainder(logp_V, left_V, is_left, column, vocab) - q_V
        total += tl.sum(tl.where(rest > 0, rest, 0.0), 0)
    if total > 0:
        for begin in range(0, vocab, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            q_V = tl.exp(tl.load(logq_V + column, mask=column < vocab, other=-float("inf")).to(tl.float64))
            rest = _remainder(logp_V, left_V, is_left, column, vocab) - q_V
            tl.store(left_V + column, tl.where(rest > 0, rest, 0.0) / total, mask=column < vocab)
        # Other threads of this program read it next.
        tl.debug_barrier()
    return tl.where(total > 0, 1, is_left)


@triton.jit
def _draw_remainder(logp_V, left_V, is_left, w0, w1, vocab, BLOCK: tl.constexpr):
    """Return the token that wins the exponential race; 0 if there is no distribution."""
    best, token = tl.full((), float("inf"), tl.float64), tl.full((), 0, tl.int64)
    for begin in range(0, vocab, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        left = _remainder(logp_V, left_V, is_left, column, vocab)
        key = tl.where(left > 0, exponentials(w0, w1, column).to(tl.float64) / left, float("inf"))
        least, at = tl.min(key, 0, return_indices=True, return_indices_tie_break_left=True)
        token = tl.where(least < best, (begin + at).to(tl.int64), token)
        best = tl.minimum(least, best)
    return token
