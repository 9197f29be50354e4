"""Slots and block tables follow the selection: the Triton form of `smc.executor.select`.

A program handles one batch index. `remap_draft` and `remap_target` read the slots' former state and rewrite block
tables; `advance` only writes. Work grows with the positions that particles hold, not with the width of a table.
The host reads nothing, and grids follow from shapes alone.

The constant P is the number of tokens that may be pending."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from smc.arrays import Room
from smc.kernels.launch import one_variant
from smc.round.plan import RoundPlan
from smc.round.tensors import DraftedRows, Lineage, NextSequences, RoundSelection, SlotState, TokenTree

CHUNK = 1024
"""Number of positions that are copied at a time."""


def remap_draft(
    state: SlotState, plan: RoundPlan[Tensor], tree: TokenTree, selection: RoundSelection[Tensor], steps: int
) -> tuple[Lineage[Tensor], NextSequences]:
    """See `smc.executor.select.remap_draft`. The same launch makes block tables follow the selection."""
    (batch_size, queries), pages = plan.arrays.begin_pages_AQ.shape, tree.tail_XB.shape[1]
    width, room = min(2, state.pending_SQ.shape[1]), Room(state.device)
    lineage = Lineage(
        path_AB=room.ints(batch_size, queries + pages), kept_A=room.ints(batch_size), dropped_A=room.ints(batch_size)
    )
    out = NextSequences(
        end_A=room.longs(batch_size),
        tokens_AQ=room.longs(batch_size, width),
        pending_A=room.longs(batch_size),
        text_A=room.longs(batch_size),
    )
    _remap_draft[(batch_size,)](
        plan.arrays, state, state.table_SL.stride(0), tree, selection, lineage, out, steps,
        K=tree.tokens_XK.shape[1], P=queries, B=pages, Q=width, BLOCK_Q=triton.next_power_of_2(width),
        BLOCK_B=triton.next_power_of_2(pages) if pages else 0, BLOCK_W=triton.next_power_of_2(queries + pages),
        CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    return lineage, out


def remap_target(
    state: SlotState,
    logq_SQ: Tensor,
    plan: RoundPlan[Tensor],
    drafted: DraftedRows,
    selection: RoundSelection[Tensor],
    lookahead: bool,
) -> NextSequences:
    """See `smc.executor.select.remap_target`. The same launch makes block tables follow the selection."""
    (batch_size, q), block, room = plan.arrays.target_pages_AQ.shape, drafted.block, Room(state.device)
    width = block if lookahead else 1
    out = NextSequences(
        end_A=room.longs(batch_size),
        tokens_AQ=room.longs(batch_size, width),
        pending_A=room.longs(batch_size),
        text_A=selection.text_A,
    )
    _remap_target[(batch_size,)](
        plan.arrays, state, state.table_SL.stride(0), drafted, selection, logq_SQ, logq_SQ.stride(0), out,
        K=block, Q=q, P=width, BLOCK_Q=triton.next_power_of_2(max(q, width)), CHUNK=CHUNK, LOOKAHEAD=lookahead,
        num_warps=4,
    )  # fmt: skip
    return out


def advance(state: SlotState, slot_A: Tensor, selection: RoundSelection[Tensor], next_: NextSequences) -> None:
    """See `smc.executor.select.advance`."""
    batch_size, width = next_.tokens_AQ.shape
    _advance[(batch_size,)](
        state, state.pending_SQ.stride(0), state.dummy, slot_A, selection, next_, *next_.tokens_AQ.stride(),
        P=width, BLOCK_W=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip


def remap_block_table(
    table_SL: Tensor, slot_A: Tensor, source_A: Tensor, base_A: Tensor, end_A: Tensor, tail_AB: Tensor, columns: int
) -> None:
    """See `smc.executor.select.remap_block_table`."""
    (batch_size, width), tail_AB = tail_AB.shape, tail_AB.contiguous()
    _remap_block_table[(batch_size,)](
        table_SL, table_SL.stride(0), slot_A, source_A, base_A, end_A, tail_AB, width,
        TAIL=triton.next_power_of_2(width) if width else 0, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip


@triton.jit
def copy_pages(table, stride, slot, source, base, end, tail_B, width, TAIL: tl.constexpr, CHUNK: tl.constexpr):
    """Copy pages of positions from `base` up to `end` from slot `source` to `slot`, and write the `width` pages of the
    tail after them."""
    to, of = table + slot * stride, table + source * stride
    if slot != source:
        column = tl.arange(0, CHUNK)
        for begin in tl.range(base, end, CHUNK):
            inside = begin + column < end
            tl.store(to + begin + column, tl.load(of + begin + column, mask=inside, other=0), mask=inside)
    if TAIL > 0:
        b = tl.arange(0, TAIL)
        tl.store(to + end + b, tl.load(tail_B + b, mask=b < width, other=0), mask=b < width)


@one_variant()
def _remap_draft(
    plan, slots, table_stride, tree, selection, lineage, out, steps,
    K: tl.constexpr, P: tl.constexpr, B: tl.constexpr, Q: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_W: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the state of one batch index's sequence after the selection. At most Q tokens are pending afterwards."""
    index = tl.program_id(0)
    ancestor, row = tl.load(selection.particles.ancestor_A + index), tl.load(selection.particles.row_A + index)
    taken, cut = tl.load(selection.taken_A + index), tl.load(selection.cut_A + index)
    bonus, ended = tl.load(selection.bonus_A + index), tl.load(selection.ended_A + index) != 0
    slot, source = tl.load(plan.slot_A + index), tl.load(plan.slot_A + ancestor)
    end, pending = tl.load(slots.end_S + source), tl.load(slots.pending_S + source)
    # A particle that had ended continues if its end is taken back.
    is_open, has_bonus = (tl.load(slots.ended_S + source) == 0) | (cut > 0), bonus >= 0
    tail_B, base, kept_end = tree.tail_XB + row * B, tl.load(slots.base_S + slot), end - cut
    copy_pages(slots.table_SL, table_stride, slot, source, base, kept_end, tail_B, B, BLOCK_B, CHUNK)
    # The last token of a complete row has not been run, and a token that ends an answer is never run. The last token of
    # a shorter row has been run; it is run again if no other token is pending.
    is_last = (taken == steps) | ((has_bonus == 0) & (taken > 0))
    run = taken - is_last.to(tl.int64)
    left = tl.where(ended, 1, is_last.to(tl.int64) + has_bonus.to(tl.int64))
    text = tl.where(is_last, tl.load(tree.before_X + row), tl.load(selection.text_A + index))
    tl.store(out.end_A + index, kept_end + taken + has_bonus.to(tl.int64))
    tl.store(out.pending_A + index, tl.maximum(left, 1))
    tl.store(out.text_A + index, text)
    stays = tl.maximum(pending - cut, 0)
    tl.store(lineage.kept_A + index, tl.where(is_open, stays + run, 0).to(tl.int32))
    tl.store(lineage.dropped_A + index, tl.where(is_open, tl.maximum(cut - pending, 0), 0).to(tl.int32))
    q = tl.arange(0, BLOCK_Q)
    last_token = tl.load(tree.tokens_XK + row * K + tl.maximum(taken - 1, 0))
    token = tl.where(is_last & (q == 0), last_token, tl.maximum(bonus, 0))
    tl.store(out.tokens_AQ + index * Q + q, token, mask=q < Q)
    # Pages of the particle's pending tokens that stay, which may be fewer than P, then pages of its row's tokens.
    w = tl.arange(0, BLOCK_W)
    at = tl.minimum(tl.where(w < stays, w, w + P - stays), P + B - 1)
    page = tl.load(plan.begin_pages_AQ + ancestor * P + at, mask=at < P, other=0)
    page = tl.where(at < P, page, tl.load(tail_B + at - P, mask=(at >= P) & (w < P + B), other=0))
    tl.store(lineage.path_AB + index * (P + B) + w, page, mask=w < P + B)


@one_variant()
def _remap_target(
    plan, slots, table_stride, drafted, selection, logq_SQ, logq_stride, out,
    K: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, BLOCK_Q: tl.constexpr, CHUNK: tl.constexpr,
    LOOKAHEAD: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    ancestor, row = tl.load(selection.particles.ancestor_A + index), tl.load(selection.particles.row_A + index)
    taken, cut, bonus = (
        tl.load(selection.taken_A + index),
        tl.load(selection.cut_A + index),
        tl.load(selection.bonus_A + index),
    )
    slot, source = tl.load(plan.slot_A + index), tl.load(plan.slot_A + ancestor)
    end, pending = tl.load(slots.end_S + source), tl.load(slots.pending_S + source)
    block = ancestor if LOOKAHEAD else row
    base, tail_Q = tl.load(slots.base_S + slot), plan.target_pages_AQ + block * Q
    copy_pages(slots.table_SL, table_stride, slot, source, base, end - pending, tail_Q, Q, BLOCK_Q, CHUNK)
    has_bonus = bonus >= 0
    tl.store(out.end_A + index, end - cut + taken + has_bonus.to(tl.int64))
    q = tl.arange(0, BLOCK_Q)
    if LOOKAHEAD:
        token = tl.load(drafted.tokens_XK + row * K + q, mask=q < P, other=0).to(tl.int64)
        logq = tl.load(drafted.logq_XK + row * K + q, mask=q < P, other=0.0)
        # If the particle had ended, its last token remains, and nothing of it is run or scored again.
        count = tl.maximum(tl.where(has_bonus, 1, taken), 1)
    else:
        token, logq, count = q.to(tl.int64) * 0, q.to(tl.float32) * 0, taken * 0 + 1
    tl.store(out.tokens_AQ + index * P + q, tl.where(has_bonus, bonus, token), mask=q < P)
    tl.store(logq_SQ + slot * logq_stride + q, logq, mask=q < P)
    tl.store(out.pending_A + index, count)


@one_variant()
def _advance(
    slots, pending_stride, dummy, slot_A, selection, next_, stride_a, stride_w, P: tl.constexpr,
    BLOCK_W: tl.constexpr
):  # fmt: skip
    index, w = tl.program_id(0), tl.arange(0, BLOCK_W)
    slot = tl.load(slot_A + index)
    token = tl.load(next_.tokens_AQ + index * stride_a + w * stride_w, mask=w < P, other=0)
    tl.store(slots.pending_SQ + slot * pending_stride + w, token, mask=w < P)
    tl.store(slots.text_S + slot, tl.load(next_.text_A + index))
    alive, ended = tl.load(selection.particles.alive_A + index) != 0, tl.load(selection.ended_A + index) != 0
    logw = tl.load(selection.particles.logw_A + index)
    # Padding writes to the dummy slot like other rows; the dummy slot must stay ended, and short.
    is_dummy = slot >= dummy
    tl.store(slots.end_S + slot, tl.where(is_dummy, 1, tl.load(next_.end_A + index)))
    tl.store(slots.pending_S + slot, tl.where(is_dummy, 1, tl.load(next_.pending_A + index)))
    tl.store(slots.ended_S + slot, ended | is_dummy)
    tl.store(slots.alive_S + slot, alive & (is_dummy == 0))
    tl.store(slots.logw_S + slot, tl.where(is_dummy, 0.0, logw))


@one_variant()
def _remap_block_table(
    table_SL, table_stride, slot_A, source_A, base_A, end_A, tail_AB, width, TAIL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    slot, source = tl.load(slot_A + index), tl.load(source_A + index)
    base, end = tl.load(base_A + index), tl.load(end_A + index)
    copy_pages(table_SL, table_stride, slot, source, base, end, tail_AB + index * width, width, TAIL, CHUNK)
