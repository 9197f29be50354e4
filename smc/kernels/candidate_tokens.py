"""Candidate tokens of rows of logits: the likeliest tokens of every row one by one, and a token drawn from the rest of
its distribution, which represents that rest.

Nothing is sorted. The C largest entries of a row lie in the C of its parts whose largest entries are largest, so a
search proceeds from long parts to parts of a few columns and finally to columns. Each step has few parts, and comparing
all with all gives their ranks. The draw from the rest is the exponential race of `smc.kernels.sampling` without the
entries already found. There are four launches: two passes over the logits, each with a program for every block of a
row, and after each pass one with a program for every row. The host reads nothing, and grids follow from shapes alone,
so all launches can be captured in a CUDA graph.

Local axes: P splits of the vocabulary, Y parts of a row at one step of the search, Z parts of a split."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from smc.algorithm.coupling import Coupling
from smc.algorithm.expansion import CANDIDATES_PER_ROW, CandidateTokens
from smc.arrays import Room, contiguous
from smc.kernels.launch import one_variant
from smc.kernels.sampling import exponentials
from smc.kernels.truncation import (
    PART,
    Cut,
    block_sum,
    combine,
    cut_logit,
    finite,
    inverse_temperature,
    load_block,
    order_key,
    require_rows,
    store_largest,
)
from smc.philox import DrawKeys, Purpose

TARGET = tl.constexpr(int(Purpose.TARGET))
FAN = 8
"""Number of parts into which the next step of the search divides a part."""
FEW, MOST_STEPS = 256, 3
"""Maximum number of parts with which a search begins, unless that would take more than MOST_STEPS further steps."""


def propose_candidates(
    logits_RV: Tensor,
    vocab: int,
    temperature_R: Tensor,
    keys: DrawKeys,
    cut: Cut | None = None,
    has_rest: bool = True,
    coupling: Coupling | None = None,
    kept_RV: Tensor | None = None,
    block: int | None = None,
    warps: int = 4,
) -> CandidateTokens:
    """Return candidate tokens of rows from softmax(logits / temperature) after `cut`: their min(CANDIDATES_PER_ROW,
    vocab) likeliest tokens in descending order, the first column first among equal logits. With `has_rest`, the token
    drawn from the rest follows, with the random numbers of the first of the row's `keys`.

    Only the first `vocab` columns count; the row stride is free. Temperature 0 is greedy. A row with NaN gives NaN.
    `coupling`, `kept_RV`: see `smc.executor.sampling.Sampling.propose_candidates`."""
    require_rows(logits_RV, vocab)
    rows, most, steps = len(temperature_R), min(CANDIDATES_PER_ROW, vocab), _steps(vocab)
    block = block or min(4096, triton.next_power_of_2(vocab))
    splits, length, width, room = triton.cdiv(vocab, block), FAN**steps, most + has_rest, Room(logits_RV.device)
    assert block >= PART or length < PART
    sums = BlockSums(room.floats(rows, splits), room.floats(rows, splits))
    parts = PartKeys(room.ints(rows, splits * (block // PART)), splits * (block // PART))
    summary = RowSearch(room.ints(rows), room.ints(rows), room.floats(rows), room.floats(rows))
    found = CandidateTokens(room.longs(rows, width), room.floats(rows, width), room.floats(rows, width))
    distribution = (logits_RV, logits_RV.stride(0), temperature_R, cut)
    seed_R, round_R, stream_R, position_R, purpose = contiguous(keys._replace(stream_RF=keys.stream_RF[:, 0]))
    blocks, by_row = {"BLOCK": block, "num_warps": warps}, {"SPLITS": triton.next_power_of_2(splits)}
    # Without fused multiply-adds the variates equal those of `smc.philox.exponentials` to the last bit before the
    # logarithm, and a row's candidates do not depend on whether another row has a cut or is coupled.
    blocks["enable_fp_fusion"] = by_row["enable_fp_fusion"] = False
    scores_RV, coupled, kept = None, None, None
    if coupling is not None:
        scores_RV, coupled = room.floats(rows, vocab), CoupledRows(position_R, rows // len(coupling.exponent_A))
        kept = None if kept_RV is None else KeptLogits(kept_RV, kept_RV.stride(0), len(kept_RV))
    _survey[(splits, rows)](
        *distribution, vocab, sums, parts, coupling, coupled, scores_RV, kept,
        PART=PART if length >= PART else 0, **blocks,
    )  # fmt: skip
    if scores_RV is not None:
        # From here on scores are read instead of logits.
        distribution = (scores_RV, scores_RV.stride(0), temperature_R, None)
    blocks["SCORES"] = by_row["SCORES"] = coupling is not None
    search = {
        "STEPS": steps,
        "COUNT": triton.next_power_of_2(max(CANDIDATES_PER_ROW, triton.cdiv(vocab, length))),
        "MOST": CANDIDATES_PER_ROW,
        "FAN": FAN,
    }
    longest = max(search["COUNT"], CANDIDATES_PER_ROW * FAN)
    lists = SearchLists(room.longs(rows, longest), room.longs(rows, CANDIDATES_PER_ROW), longest)
    _find[(rows,)](
        *distribution, vocab, sums, parts, lists, summary, found,
        SearchSizes(splits, most, width), PART=PART, **search, **by_row, num_warps=8,
    )  # fmt: skip
    if not has_rest:
        return found
    max_RP, sum_RP = room.floats(rows, splits), room.floats(rows, splits)
    won_RP, token_RP = room.floats(rows, splits), room.ints(rows, splits)
    race = (max_RP, sum_RP, won_RP, token_RP)
    _race_rest[(splits, rows)](
        *distribution, vocab, seed_R, round_R, stream_R, position_R, int(purpose), summary, *race, **blocks,
    )  # fmt: skip
    _finish_rest[(rows,)](*distribution, *race, summary, found, splits, most, **by_row, num_warps=1)
    return found


def _steps(vocab: int) -> int:
    """Return the number of steps of a search down to single columns, after its first step."""
    return next((i for i in range(MOST_STEPS) if vocab <= FEW * FAN**i), MOST_STEPS)


class BlockSums(NamedTuple):
    """What the first pass finds in every block of a row."""

    top_RP: Tensor
    """float32 maximum."""
    total_RP: Tensor
    """float32 sum of exponentials relative to the maximum."""


class PartKeys(NamedTuple):
    """The `order_key` of the largest entry of each part, with which the search begins."""

    largest_RZ: Tensor
    width: int


class CoupledRows(NamedTuple):
    """Rows of coupled drafting: `each` adjacent ones belong to a batch index."""

    position_R: Tensor
    each: int


class KeptLogits(NamedTuple):
    """Where the logits after the cut are written, for the first `rows`."""

    logits_RV: Tensor
    stride: int
    rows: int


@one_variant("logits", "stride", "vocab", "parts", "scores_RV", "kept")
def _survey(
    logits, stride, temperature_R, cut, vocab, sums, parts, coupling, coupled, scores_RV, kept,
    PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce one block of one row to its maximum, its sum of exponentials relative to that, and the `order_key` of each
    part's largest entry. With `coupling`, do so for the scores that `smc.algorithm.coupling` computes from the logits;
    write these scores to `scores_RV`, and the logits after the cut to `kept`."""
    split, row, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    inverse, _ = inverse_temperature(temperature_R, row)
    # A thread stores four scores at once. If it loaded eight logits, the compiler would compute all scores twice: in
    # the threads that loaded the logits, and in those that store the scores.
    raw, column = load_block(logits, stride, row, vocab, BLOCK, RUN=4 if scores_RV is not None else 0)
    logit = cut_logit(raw, column, row, inverse, cut)
    # Triton 3.6 cannot compare a tuple that has a None in it, as `coupling` without a head, with None.
    if scores_RV is not None:
        inside = column < vocab
        if kept is not None:
            at = kept.logits_RV + row.to(tl.int64) * kept.stride + column
            tl.store(at, logit, mask=inside & (row < kept.rows))
        raw = coupled_score(logit, column, inside, row // coupled.each, tl.load(coupled.position_R + row), coupling)
        tl.store(scores_RV + row.to(tl.int64) * vocab + column, raw, mask=inside)
        logit = raw
    top = tl.max(logit, 0)
    tl.store(sums.top_RP + row * splits + split, top)
    tl.store(sums.total_RP + row * splits + split, block_sum(tl.exp(logit - finite(top))))
    if PART > 0:
        store_largest(raw, parts.largest_RZ, PART)


@triton.jit
def coupled_score(logit_V, column_V, inside_V, index, position, coupling):
    """Return gamma log q + g for the given columns of a row of batch index `index`, or the logits of a row that is not
    coupled."""
    exponent, is_noisy = tl.load(coupling.exponent_A + index), tl.load(coupling.temperature_A + index) > 0
    token_V = column_V
    if coupling.ids_M is not None:
        token_V = tl.load(coupling.ids_M + column_V, mask=inside_V, other=0)
    zero_1 = tl.zeros((1,), tl.uint32)
    w0_1, w1_1, _, _ = tl.philox(
        tl.load(coupling.seed_A + index), position.to(tl.uint32) + zero_1, zero_1, zero_1, TARGET
    )
    noise_V = tl.where(is_noisy, -tl.log(exponentials(w0_1, w1_1, token_V)), 0.0)
    return tl.where(exponent > 0, exponent * logit_V + noise_V, logit_V)


@triton.jit
def _largest(logits_V, vocab, largest_Z, parts, part_Y, PART: tl.constexpr, LENGTH: tl.constexpr):
    """Return the `order_key` of the largest entry of every given part of LENGTH columns; past the end, the smallest
    key."""
    UNIT: tl.constexpr = PART if LENGTH >= PART else 1
    count = parts if LENGTH >= PART else vocab
    if LENGTH == UNIT:
        at, inside = part_Y, part_Y < count
    else:
        at = part_Y[:, None] * (LENGTH // UNIT) + tl.arange(0, LENGTH // UNIT)[None, :]
        inside = at < count
    if LENGTH >= PART:
        key = tl.load(largest_Z + at, mask=inside, other=-0x80000000)
    else:
        key = tl.where(inside, order_key(tl.load(logits_V + at, mask=inside, other=0.0)), -0x80000000)
    return key if LENGTH == UNIT else tl.max(key, 1)


@triton.jit
def _keep_first(key_Y, part_Y, list_Y, best_C, SIZE: tl.constexpr, MOST: tl.constexpr):
    """Write the parts with the MOST largest keys, packed with their keys, in descending order; the first part comes
    first among equal keys."""
    packed_Y = (key_Y.to(tl.int64) << 32) | (part_Y ^ 0x7FFFFFFF).to(tl.int64)
    # Every thread reads the whole list and counts in its own registers, so no sum crosses threads.
    tl.store(list_Y + tl.arange(0, SIZE), packed_Y)
    tl.debug_barrier()
    larger_Y = tl.zeros((SIZE,), tl.int32)
    for begin in range(0, SIZE, MOST):
        other_C = tl.load(list_Y + begin + tl.arange(0, MOST))
        larger_Y += tl.sum((other_C[:, None] > packed_Y[None, :]).to(tl.int32), 0)
    tl.store(best_C + larger_Y, packed_Y, mask=larger_Y < MOST)
    tl.debug_barrier()


@triton.jit
def _part_of(packed_Y):
    return (packed_Y & 0x7FFFFFFF).to(tl.int32) ^ 0x7FFFFFFF


class RowSearch(NamedTuple):
    """The search's results for each row: key and column of the last token found, and the normaliser."""

    bound_key_R: Tensor
    bound_column_R: Tensor
    top_R: Tensor
    log_sum_R: Tensor


class SearchLists(NamedTuple):
    """Memory of a search: the parts of one step, and those that it keeps, packed with their keys."""

    list_RY: Tensor
    best_RC: Tensor
    width: int
    """Room of `list` for a row."""


class SearchSizes(NamedTuple):
    """Sizes of a search."""

    splits: int
    most: int
    width: int


@one_variant("logits", "stride", "vocab", "parts", "lists")
def _find(
    logits, stride, temperature_R, cut, vocab, sums, parts, lists, summary, found, sizes,
    STEPS: tl.constexpr, COUNT: tl.constexpr, MOST: tl.constexpr, FAN: tl.constexpr, PART: tl.constexpr,
    SPLITS: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    """Search one row: its likeliest tokens, the last one's key and column, and the distribution's normaliser."""
    row, splits, most, width = tl.program_id(0), sizes.splits, sizes.most, sizes.width
    logits_V, largest_Z = logits + row.to(tl.int64) * stride, parts.largest_RZ + row * parts.width
    list_Y, best_C = lists.list_RY + row * lists.width, lists.best_RC + row * MOST
    part_Y = tl.arange(0, COUNT)
    key_Y = _largest(logits_V, vocab, largest_Z, parts.width, part_Y, PART, FAN**STEPS)
    _keep_first(key_Y, part_Y, list_Y, best_C, COUNT, MOST)
    for step in tl.static_range(STEPS):
        x = tl.arange(0, MOST * FAN)
        part_Y = _part_of(tl.load(best_C + x // FAN)) * FAN + x % FAN
        key_Y = _largest(logits_V, vocab, largest_Z, parts.width, part_Y, PART, FAN ** (STEPS - 1 - step))
        _keep_first(key_Y, part_Y, list_Y, best_C, MOST * FAN, MOST)
    packed_C = tl.load(best_C + tl.arange(0, MOST))
    column_C, key_C = _part_of(packed_C), (packed_C >> 32).to(tl.int32)
    is_last_C = tl.arange(0, MOST) == most - 1
    tl.store(summary.bound_key_R + row, tl.sum(tl.where(is_last_C, key_C, 0), 0))
    tl.store(summary.bound_column_R + row, tl.sum(tl.where(is_last_C, column_C, 0), 0))
    # If the row has a NaN, any column may result.
    column_C, rank_C, out = tl.minimum(column_C, vocab - 1), tl.arange(0, MOST), row.to(tl.int64) * width
    inverse, greedy = inverse_temperature(temperature_R, row)
    if SCORES:
        inverse = 1.0
    logit_C = cut_logit(tl.load(logits_V + column_C), column_C, row, inverse, cut)
    _, top, total = combine(sums.top_RP, sums.total_RP, row, splits, SPLITS)
    log_sum = tl.log(total)
    lse = top + log_sum
    # lse - lse is 0, or NaN if the row has no distribution.
    logq_C = tl.where(greedy, tl.where(rank_C == 0, 0.0, -float("inf")), (logit_C - top) - log_sum) + (lse - lse)
    tl.store(found.token_RC + out + rank_C, column_C.to(tl.int64), mask=rank_C < most)
    tl.store(found.logq_RC + out + rank_C, logq_C, mask=rank_C < most)
    tl.store(found.share_RC + out + rank_C, logq_C, mask=rank_C < most)
    tl.store(summary.top_R + row, top)
    tl.store(summary.log_sum_R + row, log_sum)


@one_variant("logits", "stride", "vocab")
def _race_rest(
    logits, stride, temperature_R, cut, vocab, seed_R, round_R, stream_R, position_R, purpose,
    summary, max_RP, sum_RP, won_RP, token_RP,
    BLOCK: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    """Race within one block of one row, without the row's likeliest tokens: as `_race` of `smc.kernels.sampling` for
    one draw."""
    split, row, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    inverse, greedy = inverse_temperature(temperature_R, row)
    if SCORES:
        inverse = 1.0
    raw, column = load_block(logits, stride, row, vocab, BLOCK)
    logit = cut_logit(raw, column, row, inverse, cut)
    key, bound = order_key(raw), tl.load(summary.bound_key_R + row)
    is_found = (key > bound) | ((key == bound) & (column <= tl.load(summary.bound_column_R + row)))
    logit = tl.where(is_found, -float("inf"), tl.where(greedy, -float("inf"), logit))
    top = tl.max(logit, 0)
    safe = finite(top)
    out = row * splits + split
    tl.store(max_RP + out, top)
    tl.store(sum_RP + out, block_sum(tl.exp(logit - safe)))
    stream_1 = tl.load(stream_R + row + tl.arange(0, 1)).to(tl.uint32)
    position, rounds = tl.load(position_R + row).to(tl.uint32), tl.load(round_R + row).to(tl.uint32)
    w0_1, w1_1, _, _ = tl.philox(tl.load(seed_R + row), position, stream_1, rounds, purpose)
    won = exponentials(w0_1, w1_1, column) * tl.exp(safe - logit)
    best, at = tl.min(won, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(won_RP + out, best)
    tl.store(token_RP + out, split * BLOCK + at)


@one_variant()
def _finish_rest(
    logits, stride, temperature_R, cut, max_RP, sum_RP, won_RP, token_RP, summary, found, splits, most,
    SPLITS: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    """Write one row's token drawn from the rest, and the share of the rest."""
    row, split = tl.program_id(0), tl.arange(0, SPLITS)
    inverse, greedy = inverse_temperature(temperature_R, row)
    if SCORES:
        inverse = 1.0
    max_P, rest_top, rest = combine(max_RP, sum_RP, row, splits, SPLITS)
    top, log_sum = tl.load(summary.top_R + row), tl.load(summary.log_sum_R + row)
    won_P = tl.load(won_RP + row * splits + split, mask=split < splits, other=float("inf")) * tl.exp(rest_top - max_P)
    _, at = tl.min(won_P, 0, return_indices=True, return_indices_tie_break_left=True)
    lse = top + log_sum
    # If the row has a NaN, any winner may result, even one past the end.
    token = tl.where(lse == lse, tl.load(token_RP + row * splits + tl.minimum(at, splits - 1)), 0)
    raw = tl.load(logits + row.to(tl.int64) * stride + token)
    logit = cut_logit(raw, token, row, inverse, cut)
    out = row.to(tl.int64) * (most + 1)
    of_best = tl.where(token == tl.load(found.token_RC + out), 0.0, -float("inf"))
    tl.store(found.token_RC + out + most, token.to(tl.int64))
    tl.store(found.logq_RC + out + most, tl.where(greedy, of_best, (logit - top) - log_sum) + (lse - lse))
    tl.store(found.share_RC + out + most, (rest_top - top) + (tl.log(rest) - log_sum) + (lse - lse))
