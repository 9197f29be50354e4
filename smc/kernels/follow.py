"""Slots follow a choice: pages and what the next block is in one launch, `smc.executor.verify.follow`, and what else is
kept of sequences in another, `smc.executor.state.write_advance`. A program a place. The first reads what slots were,
the second only writes.

Axes: A places, S slots, L positions, X rows, Q tokens of a block, K tokens of a row, W tokens that are pending from now
on."""

from __future__ import annotations

import triton.language as tl

from smc.kernels.tables import move
from smc.kernels.variants import one_variant


@one_variant()
def follow(
    slot_A, choice_9A, pages_AQ, rows_WX, table_SL, table_stride, base_S, end_S, pending_S, logq_SQ, logq_stride,
    new_end_A, tokens_AW, count_A, places, rows,
    K: tl.constexpr, Q: tl.constexpr, W: tl.constexpr, BLOCK_Q: tl.constexpr, CHUNK: tl.constexpr, LOOKAHEAD: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    of = choice_9A + place
    ancestor, row, count = tl.load(of), tl.load(of + places), tl.load(of + 2 * places)
    cut, bonus = tl.load(of + 3 * places), tl.load(of + 4 * places)
    slot, source = tl.load(slot_A + place), tl.load(slot_A + ancestor)
    end, pending = tl.load(end_S + source), tl.load(pending_S + source)
    block = ancestor if LOOKAHEAD else row
    move(
        table_SL,
        table_stride,
        slot,
        source,
        tl.load(base_S + slot),
        end - pending,
        pages_AQ + block * Q,
        Q,
        BLOCK_Q,
        CHUNK,
    )
    has_bonus = bonus >= 0
    tl.store(new_end_A + place, end - cut + count + has_bonus.to(tl.int64))
    q = tl.arange(0, BLOCK_Q)
    if LOOKAHEAD:
        token = tl.load(rows_WX + q * rows + row, mask=q < W, other=0).to(tl.int64)
        logq = tl.load(rows_WX + (K + q) * rows + row, mask=q < W, other=0).to(tl.float32, bitcast=True)
        # Of a particle that had ended, its last token remains; nothing of it is run or scored again.
        count = tl.maximum(tl.where(has_bonus, 1, count), 1)
    else:
        token, logq, count = q.to(tl.int64) * 0, q.to(tl.float32) * 0, count * 0 + 1
    tl.store(tokens_AW + place * W + q, tl.where(has_bonus, bonus, token), mask=q < W)
    tl.store(logq_SQ + slot * logq_stride + q, logq, mask=q < W)
    tl.store(count_A + place, count)


@one_variant()
def advance(
    slot_A, choice_9A, end_A, tokens_AW, stride_a, stride_w, pending_A, text_A,
    end_S, pending_SQ, pending_stride, pending_S, text_S, ended_S, alive_S, logw_S, dummy, places,
    W: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    place, w = tl.program_id(0), tl.arange(0, BLOCK_W)
    slot, of = tl.load(slot_A + place), choice_9A + place
    token = tl.load(tokens_AW + place * stride_a + w * stride_w, mask=w < W, other=0)
    tl.store(pending_SQ + slot * pending_stride + w, token, mask=w < W)
    tl.store(text_S + slot, tl.load(text_A + place))
    alive, ended = tl.load(of + 5 * places) > 0, tl.load(of + 6 * places) > 0
    # Padding writes to the dummy slot like any other; it must stay ended, and short.
    is_dummy = slot >= dummy
    tl.store(end_S + slot, tl.where(is_dummy, 1, tl.load(end_A + place)))
    tl.store(pending_S + slot, tl.where(is_dummy, 1, tl.load(pending_A + place)))
    tl.store(ended_S + slot, ended | is_dummy)
    tl.store(alive_S + slot, alive & (is_dummy == 0))
    tl.store(logw_S + slot, tl.where(is_dummy, 0.0, tl.load(of + 8 * places).to(tl.float64, bitcast=True)))
