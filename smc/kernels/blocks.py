"""What the target runs in a round in one launch, and its verdict in another: `smc.executor.verify`.

What is run is laid out by a program for each group, and some for places of none. Nothing reads the host, and grids
follow from shapes alone: they can be captured in a CUDA graph.

Axes: A places, G groups, S slots, X rows, Q tokens of a block, T = A * Q, K tokens of a row, N places of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from smc.algorithm.expansion import Kind
from smc.kernels.program_ids import own_places
from smc.kernels.variants import one_variant

BEST, NONE = tl.constexpr(int(Kind.BEST)), tl.constexpr(-float("inf"))


@one_variant()
def lay_out(
    slot_A, group_A, particle_A, seed_A, first_G, size_G, kind_G, temperature_A, top_k_A, top_p_A, min_p_A, alpha_A,
    end_S, pending_S, pending_SQ, pending_stride, ended_S, alive_S, logw_S, logq_SQ, logq_stride, rows_WX,
    numbers_7A, flags_3A, logw_A, tokens_AQ, logq_AQ, rows_4A, law_4T, top_k_T, label_T, keys_3T, places, groups, rows,
    K: tl.constexpr, Q: tl.constexpr, STREAMS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr,
    LOOKAHEAD: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    place, exists, _, is_group = own_places(first_G, size_G, groups, places, BLOCK_N)
    group = tl.load(group_A + place, mask=exists, other=0)
    own = tl.load(slot_A + place, mask=exists, other=0)
    origin, slot, lone = place, own, place < 0
    if LOOKAHEAD:
        alive = tl.load(alive_S + slot, mask=exists, other=0) != 0
        ended = tl.load(ended_S + slot, mask=exists, other=1) != 0
        count = tl.load(pending_S + slot, mask=exists, other=1)
        share = tl.zeros_like(place).to(tl.float64)
    else:
        origin = tl.load(rows_WX + 2 * K * rows + place, mask=exists, other=0)
        slot = tl.load(slot_A + origin, mask=exists, other=0)
        share = (
            tl.load(rows_WX + (2 * K + 3) * rows + place, mask=exists, other=0)
            .to(tl.float32, bitcast=True)
            .to(tl.float64)
        )
        alive = (tl.load(alive_S + slot, mask=exists, other=0) != 0) & (share > NONE)
        count = 1 + tl.load(rows_WX + (2 * K + 1) * rows + place, mask=exists, other=0).to(tl.int64)
        ended = tl.load(rows_WX + (2 * K + 2) * rows + place, mask=exists, other=1) > 0
        if EXACT:
            # A draft that proposes nothing, such as one that returns NaN, leaves the seed alone.
            nothing = is_group & (tl.max((exists & alive).to(tl.int32), 0) == 0)
            lone = (
                exists
                & nothing
                & (tl.load(kind_G + group) >= BEST)
                & (tl.load(alive_S + own, mask=exists, other=0) != 0)
            )
            origin, slot, count = tl.where(lone, place, origin), tl.where(lone, own, slot), tl.where(lone, 1, count)
            ended = tl.where(lone, tl.load(ended_S + own, mask=exists, other=1) != 0, ended)
            alive = alive | lone
    held = tl.load(end_S + slot, mask=exists, other=0) - tl.load(pending_S + slot, mask=exists, other=0)
    run = tl.where(alive, count - ended.to(tl.int64), 0)
    tl.store(logw_A + place, tl.load(logw_S + slot, mask=exists, other=0.0) + share, mask=exists)
    tl.store(flags_3A + place, ended, mask=exists)
    tl.store(flags_3A + places + place, alive, mask=exists)
    tl.store(flags_3A + 2 * places + place, alive & (ended == 0), mask=exists)
    out = numbers_7A + place
    tl.store(out, origin.to(tl.int64), mask=exists)
    tl.store(out + places, count, mask=exists)
    tl.store(out + 2 * places, run, mask=exists)
    tl.store(out + 3 * places, held + count, mask=exists)
    tl.store(out + 4 * places, tl.load(particle_A + place, mask=exists, other=0) * STREAMS, mask=exists)
    tl.store(out + 5 * places, (place - tl.load(first_G + group)).to(tl.int64), mask=exists)
    tl.store(out + 6 * places, place * Q + count - 1, mask=exists)
    tl.store(rows_4A + place, slot.to(tl.int32), mask=exists)
    tl.store(rows_4A + places + place, held.to(tl.int32), mask=exists)
    tl.store(rows_4A + 2 * places + place, run.to(tl.int32), mask=exists)
    tl.store(rows_4A + 3 * places + place, group.to(tl.int32), mask=exists)
    q = tl.arange(0, BLOCK_Q)[None, :]
    inside, at = exists[:, None] & (q < Q), place[:, None] * Q + q
    token, logq = _tokens(
        q, inside, place, slot, pending_SQ, pending_stride, logq_SQ, logq_stride, rows_WX, rows, K, LOOKAHEAD
    )
    tl.store(tokens_AQ + at, token, mask=inside)
    tl.store(logq_AQ + at, logq, mask=inside)
    is_labelled = inside & (q < count[:, None] - 1)
    label, _ = _tokens(
        q + 1, is_labelled, place, slot, pending_SQ, pending_stride, logq_SQ, logq_stride, rows_WX, rows, K, LOOKAHEAD
    )
    tl.store(label_T + at, tl.where(is_labelled, label, -1).to(tl.int32), mask=inside)
    _of_tokens(
        at,
        inside,
        q,
        place,
        exists,
        held,
        seed_A,
        temperature_A,
        top_k_A,
        top_p_A,
        min_p_A,
        alpha_A,
        law_4T,
        top_k_T,
        keys_3T,
        places * Q,
    )


@triton.jit
def _tokens(
    q,
    inside,
    place,
    slot,
    pending_SQ,
    pending_stride,
    logq_SQ,
    logq_stride,
    rows_WX,
    rows,
    K: tl.constexpr,
    LOOKAHEAD: tl.constexpr,
):
    """Tokens of blocks and their log q: those that are pending, in lockstep the first of them and then what has been
    drafted."""
    if LOOKAHEAD:
        token = tl.load(pending_SQ + slot[:, None] * pending_stride + q, mask=inside, other=0)
        logq = tl.load(logq_SQ + slot[:, None] * logq_stride + q, mask=inside, other=0.0)
    else:
        token = tl.load(pending_SQ + slot[:, None] * pending_stride + q * 0, mask=inside & (q == 0), other=0)
        logq = tl.load(logq_SQ + slot[:, None] * logq_stride + q * 0, mask=inside & (q == 0), other=0.0)
        is_drafted, drafted = inside & (q > 0), rows_WX + (q - 1) * rows + place[:, None]
        token = tl.where(q > 0, tl.load(drafted, mask=is_drafted, other=0).to(tl.int64), token)
        logq = tl.where(q > 0, tl.load(drafted + K * rows, mask=is_drafted, other=0).to(tl.float32, bitcast=True), logq)
    return token, logq


@triton.jit
def _of_tokens(
    at, inside, q, place, exists, held, seed_A, temperature_A, top_k_A, top_p_A, min_p_A, alpha_A, law_4T, top_k_T, keys_3T, tokens
):  # fmt: skip
    """The law and the random numbers of every token's draw."""
    none = q * 0
    tl.store(law_4T + at, tl.load(temperature_A + place, mask=exists, other=0.0)[:, None] + none, mask=inside)
    tl.store(law_4T + tokens + at, tl.load(top_p_A + place, mask=exists, other=0.0)[:, None] + none, mask=inside)
    tl.store(law_4T + 2 * tokens + at, tl.load(min_p_A + place, mask=exists, other=0.0)[:, None] + none, mask=inside)
    tl.store(law_4T + 3 * tokens + at, tl.load(alpha_A + place, mask=exists, other=0.0)[:, None] + none, mask=inside)
    tl.store(top_k_T + at, tl.load(top_k_A + place, mask=exists, other=0)[:, None] + none, mask=inside)
    tl.store(keys_3T + at, tl.load(seed_A + place, mask=exists, other=0)[:, None] + none, mask=inside)
    tl.store(keys_3T + tokens + at, held[:, None] + 1 + q, mask=inside)
    tl.store(keys_3T + 2 * tokens + at, held[:, None] * 0 + none, mask=inside)


@one_variant()
def judge(
    group_A, kind_G, run_A, labelled_T, drawn_T, drawn_logp_T, log_z_T, logp_AQ, drawn_AQ, nan_A, nan_AQ, places,
    Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr, LABELLED: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """`labelled_T` where LABELLED; `drawn_T`, their log p and log Z where DRAWN."""
    place, q = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_Q)[None, :]
    exists = place < places
    inside, at = exists[:, None] & (q < Q), place[:, None] * Q + q
    logp, token = at.to(tl.float32) * 0, at.to(tl.int64) * 0
    is_nan = inside & (q < 0)
    if LABELLED:
        logp = tl.load(labelled_T + at, mask=inside, other=0.0)
    tl.store(nan_A + place, tl.max((logp != logp).to(tl.int32), 1) > 0, mask=exists)
    if DRAWN:
        is_run = inside & (q < tl.load(run_A + place, mask=exists, other=0)[:, None])
        is_exact = tl.load(kind_G + tl.load(group_A + place, mask=exists, other=0), mask=exists, other=0) >= BEST
        token = tl.load(drawn_T + at, mask=inside, other=0).to(tl.int64)
        logp = tl.where(is_exact[:, None], tl.load(drawn_logp_T + at, mask=is_run, other=0.0), logp)
        log_z = tl.load(log_z_T + at, mask=is_run, other=0.0)
        is_nan = log_z != log_z
    tl.store(logp_AQ + at, logp, mask=inside)
    tl.store(drawn_AQ + at, token, mask=inside)
    tl.store(nan_AQ + at, is_nan, mask=inside)
