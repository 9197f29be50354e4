"""What a round does at the model that drafts beside running it, in three launches: `smc.executor.draft`.

The first two have a program for every few rows, of which the first row of a place does what there is to do for the
place; the last has a program a place. Nothing reads the host, and grids follow from shapes alone: they can be captured
in a CUDA graph.

Axes: A places, G groups, S slots, X rows (F of each place), P pending tokens, K tokens of a row, B pages of a row, W
pages of a path."""

from __future__ import annotations

import triton
import triton.language as tl

from smc.algorithm.expansion import Kind
from smc.kernels.stops import after_all
from smc.kernels.tables import move
from smc.kernels.variants import one_variant

INDEPENDENT, CHAINS = tl.constexpr(int(Kind.INDEPENDENT)), tl.constexpr(int(Kind.CHAINS))
NONE = tl.constexpr(-float("inf"))


@one_variant()
def begin(
    slot_A, group_A, particle_A, seed_A, round_A, first_G, size_G, temperature_A, top_k_A, top_p_A, min_p_A, alpha_A, pages_AP,
    table_SL, table_stride, end_S, pending_S, pending_SQ, pending_stride, ended_S, alive_S, text_S, entry_S, least_S, logw_S,
    is_stop_EV, vocab, has_strings_E, next_EXB, data_B, offset_V, spelled,
    numbers_6A, rows_4A, flags_2A, floats_A, mass_A, tokens_AP, numbers_5X, group_X, law_4X, bounds_2G, keys_2G,
    places, groups, rows,
    F: tl.constexpr, P: tl.constexpr, STREAMS: tl.constexpr, BY_ROUND: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
    STRINGS: tl.constexpr, DONE: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, place = x < rows, x // F
    group = tl.load(group_A + place, mask=inside, other=0)
    first = tl.load(first_G + group, mask=inside, other=0)
    _begin_rows(
        x, inside, place, group, first, particle_A, seed_A, round_A, temperature_A, top_k_A, top_p_A, min_p_A, alpha_A,
        numbers_5X, group_X, law_4X, rows, F, STREAMS, BY_ROUND,
    )  # fmt: skip
    is_group = x < groups
    first_of = tl.load(first_G + x, mask=is_group, other=0)
    at = tl.minimum(first_of, places - 1)
    tl.store(bounds_2G + x, first_of * F, mask=is_group)
    tl.store(bounds_2G + groups + x, tl.load(size_G + x, mask=is_group, other=0) * F, mask=is_group)
    tl.store(keys_2G + x, tl.load(seed_A + at, mask=is_group, other=0), mask=is_group)
    tl.store(keys_2G + groups + x, tl.load(round_A + at, mask=is_group, other=0), mask=is_group)
    own = inside & (x % F == 0)
    slot = tl.load(slot_A + place, mask=own, other=0)
    end, pending = tl.load(end_S + slot, mask=own, other=1), tl.load(pending_S + slot, mask=own, other=1)
    ended, held = tl.load(ended_S + slot, mask=own, other=1) != 0, end - pending
    # What is pending has been found not to end the answer.
    text, _ = after_all(
        tl.load(text_S + slot, mask=own, other=0).to(tl.int32), pending_SQ + slot * pending_stride, 1,
        tl.load(entry_S + slot, mask=own, other=0), own, pending, tl.load(least_S + slot, mask=own, other=0) - held,
        is_stop_EV, vocab, has_strings_E, next_EXB, data_B, offset_V, spelled, P, STRINGS, DONE, STATES,
    )  # fmt: skip
    zero, wide = place * 0, place.to(tl.int64)
    tl.store(numbers_6A + place, wide, mask=own)
    tl.store(numbers_6A + places + place, zero.to(tl.int64), mask=own)
    tl.store(numbers_6A + 2 * places + place, text.to(tl.int64), mask=own)
    tl.store(numbers_6A + 3 * places + place, end, mask=own)
    tl.store(numbers_6A + 4 * places + place, wide * P + pending - 1, mask=own)
    tl.store(numbers_6A + 5 * places + place, place - first, mask=own)
    tl.store(rows_4A + place, slot.to(tl.int32), mask=own)
    tl.store(rows_4A + places + place, held.to(tl.int32), mask=own)
    tl.store(rows_4A + 2 * places + place, tl.where(ended, 0, pending).to(tl.int32), mask=own)
    tl.store(rows_4A + 3 * places + place, group.to(tl.int32), mask=own)
    tl.store(flags_2A + place, tl.load(alive_S + slot, mask=own, other=0) != 0, mask=own)
    tl.store(flags_2A + places + place, ended, mask=own)
    tl.store(floats_A + place, zero.to(tl.float32), mask=own)
    tl.store(mass_A + place, tl.load(logw_S + slot, mask=own, other=0.0), mask=own)
    p = tl.arange(0, BLOCK_P)[None, :]
    theirs, to = own[:, None] & (p < P), place[:, None] * P + p
    tl.store(
        tokens_AP + to, tl.load(pending_SQ + slot[:, None] * pending_stride + p, mask=theirs, other=0), mask=theirs
    )
    # Past what will be held, whatever is written is written over later.
    tl.store(
        table_SL + slot[:, None] * table_stride + held[:, None] + p,
        tl.load(pages_AP + to, mask=theirs, other=0),
        mask=theirs,
    )


@triton.jit
def _begin_rows(
    x, inside, place, group, first, particle_A, seed_A, round_A, temperature_A, top_k_A, top_p_A, min_p_A, alpha_A,
    numbers_5X, group_X, law_4X, rows, F: tl.constexpr, STREAMS: tl.constexpr, BY_ROUND: tl.constexpr,
):  # fmt: skip
    """What every row draws and offers by: its number, its random numbers and its law."""
    rounds = tl.load(round_A + place, mask=inside, other=0)
    stream = tl.load(particle_A + place, mask=inside, other=0) * STREAMS + x % F
    tl.store(numbers_5X + x, stream, mask=inside)
    tl.store(numbers_5X + rows + x, (x - first * F).to(tl.int64), mask=inside)
    tl.store(numbers_5X + 2 * rows + x, tl.load(seed_A + place, mask=inside, other=0), mask=inside)
    tl.store(numbers_5X + 3 * rows + x, rounds if BY_ROUND else rounds * 0, mask=inside)
    tl.store(numbers_5X + 4 * rows + x, tl.load(top_k_A + place, mask=inside, other=0), mask=inside)
    tl.store(group_X + x, group.to(tl.int32), mask=inside)
    tl.store(law_4X + x, tl.load(temperature_A + place, mask=inside, other=0.0), mask=inside)
    tl.store(law_4X + rows + x, tl.load(top_p_A + place, mask=inside, other=0.0), mask=inside)
    tl.store(law_4X + 2 * rows + x, tl.load(min_p_A + place, mask=inside, other=0.0), mask=inside)
    tl.store(law_4X + 3 * rows + x, tl.load(alpha_A + place, mask=inside, other=0.0), mask=inside)


@one_variant()
def pack(
    slot_A, group_A, kind_G, ended_S, logw_S, root_X, tokens_XK, logq_XK, count_X, alive_X, ended_X, mass_X, rows_WX, rows,
    F: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, LOG_F: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    x, k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)[:, None]
    inside = x < rows
    root = tl.load(root_X + x, mask=inside, other=0)
    slot = tl.load(slot_A + root, mask=inside, other=0)
    share = tl.load(mass_X + x, mask=inside, other=0.0) - tl.load(logw_S + slot, mask=inside, other=0.0)
    kind = tl.load(kind_G + tl.load(group_A + x // F, mask=inside, other=0), mask=inside, other=0)
    # Chains are all the same until the target has spoken, but for those that continue nothing.
    is_there = tl.load(alive_X + x, mask=inside, other=0) != 0
    share = tl.where(kind == CHAINS, tl.where(is_there, 0.0, NONE), share)
    if OWN:
        has_ended = tl.load(ended_S + slot, mask=inside, other=1) != 0
        own = tl.where(has_ended, tl.where(x % F == 0, 0.0, NONE), tl.full((), -LOG_F, tl.float64))
        share = tl.where(kind == INDEPENDENT, own, share)
    given, of, to = (k < K) & inside[None, :], x[None, :] * K + k, k * rows + x[None, :]
    tl.store(rows_WX + to, tl.load(tokens_XK + of, mask=given, other=0).to(tl.int32), mask=given)
    tl.store(
        rows_WX + K * rows + to, tl.load(logq_XK + of, mask=given, other=0.0).to(tl.int32, bitcast=True), mask=given
    )
    out = rows_WX + 2 * K * rows + x
    tl.store(out, root.to(tl.int32), mask=inside)
    tl.store(out + rows, tl.load(count_X + x, mask=inside, other=0).to(tl.int32), mask=inside)
    tl.store(out + 2 * rows, (tl.load(ended_X + x, mask=inside, other=0) != 0).to(tl.int32), mask=inside)
    tl.store(out + 3 * rows, share.to(tl.float32).to(tl.int32, bitcast=True), mask=inside)


@one_variant()
def resume(
    slot_A, choice_9A, begin_pages_AP, tokens_XK, tail_XB, before_X, table_SL, table_stride, base_S, end_S, pending_S, ended_S,
    numbers_3A, tokens_AW, path_AW, counts_2A, places,
    K: tl.constexpr, P: tl.constexpr, B: tl.constexpr, Q: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_W: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Q tokens may be pending."""
    place = tl.program_id(0)
    of = choice_9A + place
    ancestor, row, taken = tl.load(of), tl.load(of + places), tl.load(of + 2 * places)
    cut, bonus, ended = tl.load(of + 3 * places), tl.load(of + 4 * places), tl.load(of + 6 * places) > 0
    slot, source = tl.load(slot_A + place), tl.load(slot_A + ancestor)
    end, pending = tl.load(end_S + source), tl.load(pending_S + source)
    # One that had ended goes on where its end is taken back.
    is_open, has_bonus = (tl.load(ended_S + source) == 0) | (cut > 0), bonus >= 0
    tail_B = tail_XB + row * B
    move(table_SL, table_stride, slot, source, tl.load(base_S + slot), end, tail_B, B, BLOCK_B, CHUNK)
    # The last token of a whole row has not been run, and one that ends an answer never is.
    whole = taken == K
    run = taken - (whole | (ended & (has_bonus == 0) & (taken > 0))).to(tl.int64)
    left = tl.where(ended, 1, whole.to(tl.int64) + has_bonus.to(tl.int64))
    tl.store(numbers_3A + place, end - cut + taken + has_bonus.to(tl.int64))
    tl.store(numbers_3A + places + place, tl.maximum(left, 1))
    tl.store(numbers_3A + 2 * places + place, tl.where(whole, tl.load(before_X + row), tl.load(of + 7 * places)))
    tl.store(counts_2A + place, tl.where(is_open, tl.maximum(pending - cut, 0) + run, 0).to(tl.int32))
    tl.store(counts_2A + places + place, tl.where(is_open, tl.maximum(cut - pending, 0), 0).to(tl.int32))
    q = tl.arange(0, BLOCK_Q)
    said = tl.maximum(bonus, 0)
    token = tl.where(whole & (q == 0), tl.load(tokens_XK + row * K + K - 1), said)
    tl.store(tokens_AW + place * Q + q, token, mask=q < Q)
    # A particle's pending tokens, of which there may be fewer than places for them, then its row's.
    w = tl.arange(0, BLOCK_W)
    at = tl.minimum(tl.where(w < pending, w, w + P - pending), P + B - 1)
    page = tl.load(begin_pages_AP + ancestor * P + at, mask=at < P, other=0)
    page = tl.where(at < P, page, tl.load(tail_B + at - P, mask=(at >= P) & (w < P + B), other=0))
    tl.store(path_AW + place * (P + B) + w, page, mask=w < P + B)
