"""Parts that kernels over a distribution's logits share: rows divided by their temperature and their sums block by
block; the cuts of truncated distributions (top-k, top-p and min-p, in that order as in `smc.distributions`), found
without sorting; and masks, which remove tokens that may not follow (`smc.executor.masks.apply_mask`).

A truncation keeps a prefix of the descending order, equal entries by column, so a cut is the `order_key` of the last
kept entry and that entry's column. Few entries decide it. A pass over the logits keeps the largest entry of each part
of a row. The k-th largest of these is at most the k-th largest entry of the row, so a program for each row lists all
possible entries from there on, its candidates, and searches among them: first for the key at which enough entries lie
(top-k), then for that at which enough mass lies (top-p). If they do not decide, or are too many, because the row is
flatter than those of a language model, has more equal entries, or keeps nearly as many as there are parts, the same
program searches the whole row: about a millisecond for 151,936 entries on an H200. Which way a row takes depends on
that row alone. Masses are rounded to integers, which are added exactly: so a row's cut does not depend on the dtype of
the logits, from which only the number of steps follows. Kernels read at run time which truncations are in use, so every
kernel is compiled once for each dtype.

No compiler fuses multiplications and additions: it would do so in some variants of a kernel only, so that a row's bits
would depend on whether another row is truncated.

A mask reads and writes logits once. A program handles some columns of one row; it also records whether any of them is
allowed, and whether any allowed one is possible. A second launch reads these records and writes again the rows in which
nothing is possible, which are rare.

The host reads nothing, and grids follow from shapes alone, so all launches can be captured in a CUDA graph.

Local axes: P splits of the vocabulary, Z parts of a row."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from smc.arrays import Room
from smc.distributions import DistributionSpec, Processors
from smc.kernels.launch import one_variant
from smc.kernels.norm import pair_sum

PART = 64
"""Columns of a part of a row, of which the first pass keeps the largest entry."""
FEW_PARTS = 256
"""Maximum number of parts that have candidates at first where only mass decides; at most a quarter of all. If these
hold too little of it, so many have as fill the lists of most rows."""
FILLED = 0.8
"""Share of its list that a row whose large entries lie anywhere fills then."""
CANDIDATES = 4096
"""Maximum number of candidates of a row, and of entries that are read at a time for them."""
MOST_OF_ROW = 2048
"""Columns that are read at a time where a whole row is searched."""
UNIT = tl.constexpr(2.0**40)
"""The mass of a row's likeliest entry, as an integer."""
ALLOWED, POSSIBLE = tl.constexpr(1), tl.constexpr(2)
"""What a program finds in its columns: one is allowed; one that is allowed is possible."""
FIELDS = tl.constexpr(len(DistributionSpec._fields) - 1)
"""Number of arrays of a `DistributionSpec`."""


class Cut(NamedTuple):
    """The entries of each row that a truncated distribution keeps: those whose `order_key` is above `key`, and those
    that equal it up to column `last`."""

    key_R: Tensor
    """int32 `order_key` at which the kept entries end."""
    last_R: Tensor
    """int32 last kept column of the entries that equal the key; -1: none of them is kept."""
    drop_R: Tensor
    """float32 that is added to the log-probability of all other entries, up to the normaliser; -inf forbids them."""


def require_rows(logits_RV: Tensor, vocab: int) -> None:
    """Check logits. Raises ValueError if no kernel here can read them."""
    if logits_RV.stride(1) != 1 or not 0 < vocab <= logits_RV.shape[1]:
        raise ValueError(
            f"needs rows of contiguous logits and 0 < vocab <= columns; {logits_RV.stride()=}, {logits_RV.shape=}, "
            f"{vocab=}"
        )


@triton.jit
def inverse_temperature(temperature_R, row):
    """Return 1 / temperature (1 if greedy), and whether the row is greedy."""
    temperature = tl.load(temperature_R + row).to(tl.float32)
    return 1.0 / tl.where(temperature == 0, 1.0, temperature), temperature == 0


@triton.jit
def order_key(raw):
    """Return int32 keys in the order of the given logits, equal for equal logits; 16 bits for bfloat16."""
    # Adding 0 turns -0 into 0. The bits of negative numbers are in descending order.
    bits = (raw.to(tl.float32) + 0.0).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if raw.dtype == tl.bfloat16:
        key = key >> 16
    return key


@triton.jit
def cut_logit(raw, column, row, inverse, cut):
    """Return logits of one row over its temperature, after its cut, a `Cut` or None."""
    logit = raw.to(tl.float32) * inverse
    if cut is not None:
        key, least = order_key(raw), tl.load(cut.key_R + row)
        is_kept = (key > least) | ((key == least) & (column <= tl.load(cut.last_R + row)))
        logit = tl.where(is_kept, logit, logit + tl.load(cut.drop_R + row))
    return logit


@triton.jit
def load_block(logits, stride, row, vocab, BLOCK: tl.constexpr, RUN: tl.constexpr = 0):
    """Load one block of a row as it is stored, -inf past the vocabulary. Returns it with the entries' columns. `RUN`:
    most adjacent entries that a thread takes at once; 0: 16 bytes."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if RUN > 0:
        column = tl.max_contiguous(column, [RUN])
    return tl.load(logits + row.to(tl.int64) * stride + column, mask=column < vocab, other=-float("inf")), column


@triton.jit
def block_sum(x_V):
    """Return the sum of a block in one order, whatever the type that its logits are stored in: the threads hold them in
    runs that depend on it."""
    return tl.sum(pair_sum(tl.reshape(x_V, (1, x_V.shape[0]))), 0)


@triton.jit
def finite(top):
    """Return a maximum that can be subtracted: 0 instead of -inf, so that no difference of infinities arises."""
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit
def store_largest(raw, largest_RZ, PART: tl.constexpr):
    """Store the `order_key` of the largest entry of every part of this program's block of a row."""
    PARTS: tl.constexpr = raw.shape[0] // PART
    first = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * PARTS
    tl.store(largest_RZ + first + tl.arange(0, PARTS), tl.max(tl.reshape(order_key(raw), (PARTS, PART)), 1))


@one_variant("logits", "stride", "vocab", "largest_RZ")
def sum_block(
    logits, stride, temperature_R, cut, vocab, max_RP, sum_RP, top_RP, largest_RZ,
    BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Reduce one block of one row: its maximum, the column of that, and its sum of exponentials relative to that. Given
    `largest_RZ`, also the `order_key` of the largest entry of every part."""
    split, row, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    inverse, _ = inverse_temperature(temperature_R, row)
    raw, column = load_block(logits, stride, row, vocab, BLOCK)
    logit = cut_logit(raw, column, row, inverse, cut)
    top, at = tl.max(logit, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(max_RP + row * splits + split, top)
    tl.store(top_RP + row * splits + split, split * BLOCK + at)
    tl.store(sum_RP + row * splits + split, block_sum(tl.exp(logit - finite(top))))
    if largest_RZ is not None:
        store_largest(raw, largest_RZ, PART)


@triton.jit
def combine(max_RP, sum_RP, row, splits, BLOCK: tl.constexpr):
    """Return a row's maxima [BLOCK], their largest (0 if none is finite), and the row's sum of exponentials relative to
    that."""
    split = tl.arange(0, BLOCK)
    max_P = tl.load(max_RP + row * splits + split, mask=split < splits, other=-float("inf"))
    sum_P = tl.load(sum_RP + row * splits + split, mask=split < splits, other=0.0)
    top = finite(tl.max(max_P, 0))
    return max_P, top, tl.sum(sum_P * tl.exp(max_P - top), 0)


@triton.jit
def best_column(max_P, top_RP, row, splits):
    """Return the first column that holds the row's maximum."""
    _, at = tl.max(max_P, 0, return_indices=True, return_indices_tie_break_left=True)
    return tl.load(top_RP + row * splits + tl.minimum(at, splits - 1))


def truncate(
    logits_RV: Tensor,
    vocab: int,
    distribution: DistributionSpec[Tensor],
    share: float = 0.0,
    block: int | None = None,
    warps: int = 4,
    most: int = CANDIDATES,
) -> Cut:
    """Find the cut of softmax(logits / temperature) by top-k, top-p and min-p, without those that are not active; a
    row's neutral value leaves one out.

    With `share` in (0, 1), dropped entries stay possible: the distribution after the cut is then the mixture of the
    untruncated distribution, with that share, and the truncated one. Only the first `vocab` columns count; the row
    stride is free. A row with NaN has NaN after the cut, too. `most`, a power of two: maximum number of candidates of a
    row."""
    require_rows(logits_RV, vocab)
    active = distribution.active
    used = UsedTruncations(*(int(bool(active & one)) for one in (Processors.TOP_K, Processors.TOP_P, Processors.MIN_P)))
    block, most = block or min(4096, triton.next_power_of_2(vocab)), min(most, triton.next_power_of_2(vocab))
    rows, splits, part = len(distribution.temperature_R), triton.cdiv(vocab, block), min(PART, block)
    parts, room = splits * (block // part), Room(logits_RV.device)
    given, unfused = (logits_RV, logits_RV.stride(0), distribution.temperature_R), {"enable_fp_fusion": False}
    sums = RowSums(room.floats(rows, splits), room.floats(rows, splits), room.ints(rows, splits))
    largest_RZ = room.ints(rows, parts)
    sum_block[(splits, rows)](
        *given, None, vocab, *sums, largest_RZ, BLOCK=block, PART=part, num_warps=warps, **unfused
    )
    lists = CandidateLists(largest_RZ, room.ints(rows, parts), room.ints(rows, most), room.ints(rows, most))
    cut = Cut(key_R=room.ints(rows), last_R=room.ints(rows), drop_R=room.floats(rows))
    few, many = (parts, parts) if vocab <= most else _numbers_of_parts(triton.cdiv(vocab, part), most)
    sizes = CutSizes(splits, parts, few, many, share, math.log(share) if share else -math.inf)
    values = (distribution.top_k_R, distribution.top_p_R, distribution.min_p_R)
    _find_cut[(rows,)](
        *given, vocab, values, used, sums, lists, cut, sizes,
        BITS=16 if logits_RV.dtype == torch.bfloat16 else 32, BLOCK=min(block, MOST_OF_ROW),
        SPLITS=triton.next_power_of_2(splits), PART=part, PARTS=triton.next_power_of_2(parts),
        STEP=min(triton.next_power_of_2(parts), max(1, most // part)), MOST=most, num_warps=8, **unfused,
    )  # fmt: skip
    return cut


def _numbers_of_parts(parts: int, most: int) -> tuple[int, int]:
    """Return how many parts of a row have candidates at first where only mass decides, and then."""
    filled = math.ceil(parts * -math.expm1(-FILLED * most / parts))
    few = min(FEW_PARTS, triton.cdiv(parts, 4))
    return few, max(few, min(filled, parts - triton.cdiv(parts, 16)))


class UsedTruncations(NamedTuple):
    """Which truncations the distribution of some row has: 1, otherwise 0. The values of others are not read."""

    top_k: int
    top_p: int
    min_p: int


class RowSums(NamedTuple):
    """What `sum_block` finds in every block of a row."""

    top_RP: Tensor
    """float32 maximum."""
    total_RP: Tensor
    """float32 sum of exponentials relative to the maximum."""
    best_RP: Tensor
    """int32 column of the maximum."""


class CandidateLists(NamedTuple):
    """The `order_key` of the largest entry of each part, and memory for a row's lists; int32."""

    largest_RZ: Tensor
    part_RZ: Tensor
    """The parts that have candidates."""
    key_RC: Tensor
    column_RC: Tensor


class CutSizes(NamedTuple):
    """Sizes of the search, and the share of the untruncated distribution."""

    splits: int
    parts: int
    few: int
    """Number of parts that have candidates at first where only mass decides."""
    many: int
    """The same, if those hold too little mass."""
    share: float
    log_share: float


@triton.jit
def copy_distribution(to, at, given, index, mask):
    """Copy fields of a `DistributionSpec` from `index` of the given one to `at`."""
    for i in tl.static_range(FIELDS):
        tl.store(to[i] + at, tl.load(given[i] + index, mask=mask, other=0), mask=mask)


@one_variant("logits", "stride", "vocab", "lists")
def _find_cut(
    logits, stride, temperature_R, vocab, values, used, sums, lists, cut, sizes,
    BITS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    STEP: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Find the cut of one row."""
    row = tl.program_id(0)
    logits_V, lowest = logits + row.to(tl.int64) * stride, tl.full((), -(1 << (BITS - 1)), tl.int32)
    inverse, _ = inverse_temperature(temperature_R, row)
    max_P, top, total = combine(sums.top_RP, sums.total_RP, row, sizes.splits, SPLITS)
    number, top_p, min_p = tl.full((), 0, tl.int32), tl.full((), 1, tl.float32), tl.full((), 0, tl.float32)
    if used.top_k != 0:
        number = tl.minimum(tl.load(values[0] + row), vocab).to(tl.int32)
    if used.top_p != 0:
        top_p = tl.load(values[1] + row)
    if used.min_p != 0:
        min_p = tl.load(values[2] + row)
    # If the row has a NaN, any column may result, even one past the end.
    best = tl.load(logits_V + tl.minimum(best_column(max_P, sums.best_RP, row, sizes.splits), vocab - 1))
    floor = tl.where(min_p > 0, _floor(top, min_p, inverse, best, BITS), lowest)
    given, whole = (logits_V, vocab, inverse, top), (total * UNIT).to(tl.int64)
    # Impossible entries, which masks make, are no candidates: below `least` there is nothing else.
    least = (order_key(tl.full((), -float("inf"), tl.float32)) >> (32 - BITS)) + 1
    is_cut, need = (number > 0) | (top_p < 1) | (min_p > 0), _required(whole, top_p)
    begin, count = lowest, 0
    if is_cut:
        if (number > 0) | (top_p < 1):
            wanted = tl.where(number > 0, number, sizes.few)
            begin = _begin_of_parts(lists, row, sizes.parts, wanted, lowest, PARTS, BITS)
        begin = tl.maximum(tl.where(number > 0, begin, tl.maximum(begin, floor)), least)
        count = _list_candidates(logits_V, vocab, begin, lists, row, sizes.parts, PART, PARTS, STEP, MOST)
    candidates = _load_candidates(lists, row, count, inverse, top, MOST, BITS)
    has_all = (begin <= least) | ((number == 0) & (begin == floor))
    has_mass = (number > 0) | has_all | (tl.sum(candidates[2], 0) >= need)
    if is_cut & (has_mass == 0) & (count <= MOST):
        begin = _begin_of_parts(lists, row, sizes.parts, sizes.many, lowest, PARTS, BITS)
        begin = tl.maximum(tl.maximum(begin, floor), least)
        count = _list_candidates(logits_V, vocab, begin, lists, row, sizes.parts, PART, PARTS, STEP, MOST)
        candidates = _load_candidates(lists, row, count, inverse, top, MOST, BITS)
        has_mass = (begin <= least) | (begin == floor) | (tl.sum(candidates[2], 0) >= need)
    if not is_cut:
        key, last, kept = lowest, tl.full((), -1, tl.int32), whole
    elif has_mass & (count <= MOST):
        key, last, kept = _decide(given, candidates, begin, floor, tl.minimum(number, count), top_p, whole, BITS, BLOCK)
    else:
        key, last, kept = _decide(given, None, lowest, floor, number, top_p, whole, BITS, BLOCK)
    tl.store(cut.key_R + row, key)
    tl.store(cut.last_R + row, last)
    share = tl.minimum(kept.to(tl.float32) / UNIT / total, 1.0)
    tl.store(cut.drop_R + row, sizes.log_share - tl.log((1.0 - sizes.share) / share + sizes.share))


@triton.jit
def _floor(top, min_p, inverse, best, BITS: tl.constexpr):
    """Return the key at which min-p ends, given the row's largest logit."""
    key = order_key((top + tl.log(min_p)) / inverse)
    if BITS == 16:
        # The first bfloat16 that is not smaller: in keys of positive numbers its lower bits are zeros, of negative
        # numbers ones.
        key = tl.where(key < 0, key, key + 0xFFFF) >> 16
    return tl.minimum(key, order_key(best))


@triton.jit
def _mass(logit, inverse, top):
    """Return the mass of entries, rounded down to an integer."""
    return (tl.exp(logit * inverse - top) * UNIT).to(tl.int64)


@triton.jit
def _required(mass, top_p):
    """Return the mass that the entries kept by top-p must hold; at least 1, which no row has without an entry."""
    return tl.maximum((mass.to(tl.float32) * top_p).to(tl.int64), 1)


@triton.jit
def _begin_of_parts(lists, row, parts, number, lowest, PARTS: tl.constexpr, BITS: tl.constexpr):
    """Return the key from which on so many parts have entries; the lowest key if there are no more parts than that."""
    z = tl.arange(0, PARTS)
    largest_Z = tl.load(lists.largest_RZ + row * parts + z, mask=z < parts, other=-0x80000000)
    begin = _key_at(largest_Z, (z < parts).to(tl.int64), lowest, tl.full((), 0, tl.int64) + number, BITS)
    return tl.where(number < parts, begin, lowest)


@triton.jit
def _load_candidates(lists, row, count, inverse, top, MOST: tl.constexpr, BITS: tl.constexpr):
    """Return keys, columns and masses of the candidates, and 1 for those that exist, otherwise 0."""
    c = tl.arange(0, MOST)
    key_C = tl.load(lists.key_RC + row * MOST + c, mask=c < count, other=0)
    column_C = tl.load(lists.column_RC + row * MOST + c, mask=c < count, other=0)
    exists_C = (c < count).to(tl.int64)
    return key_C, column_C, tl.where(c < count, _mass(_raw(key_C, BITS), inverse, top), 0), exists_C


@triton.jit
def _list_candidates(
    logits_V, vocab, begin, lists, row, parts,
    PART: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Write keys and columns of a row's entries from the key `begin` on, in the order of their columns; at most MOST.
    Returns the number of all of them."""
    z, list_Z = tl.arange(0, PARTS), lists.part_RZ + row * parts
    is_in_Z = tl.load(lists.largest_RZ + row * parts + z, mask=z < parts, other=-0x80000000) >= begin
    is_in_Z = is_in_Z & (z < parts)
    tl.store(list_Z + tl.cumsum(is_in_Z.to(tl.int32), 0) - 1, z, mask=is_in_Z)
    tl.debug_barrier()
    chosen, count = tl.sum(is_in_Z.to(tl.int32), 0), 0
    for first in range(0, chosen, STEP):
        x = tl.arange(0, STEP * PART)
        at = first + x // PART
        column = tl.load(list_Z + at, mask=at < chosen, other=0) * PART + x % PART
        inside = (at < chosen) & (column < vocab)
        key = order_key(tl.load(logits_V + column, mask=inside, other=-float("inf")))
        is_in = inside & (key >= begin)
        to = count + tl.cumsum(is_in.to(tl.int32), 0) - 1
        tl.store(lists.key_RC + row * MOST + to, key, mask=is_in & (to < MOST))
        tl.store(lists.column_RC + row * MOST + to, column, mask=is_in & (to < MOST))
        count += tl.sum(is_in.to(tl.int32), 0)
    tl.debug_barrier()
    return count


@triton.jit
def _decide(given, candidates, begin, floor, number, top_p, whole, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the key at which the kept entries end, the last kept column of the entries that equal it, and the kept
    mass: of the candidates, or without them of the whole row. `number`: of entries that top-k keeps; 0: all."""
    bound, ties_of_bound, kept, low = begin, whole * 0, whole, tl.maximum(begin, floor)
    if number > 0:
        bound = _find_key(given, candidates, begin, number.to(tl.int64), True, BITS, BLOCK)
        above, mass, _, each = _measure(given, candidates, bound, BITS, BLOCK)
        ties_of_bound = number - above
        kept, low = mass + ties_of_bound * each, tl.maximum(bound, floor)
    key, need = low, _required(kept, top_p)
    if top_p < 1:
        key = _find_key(given, candidates, low, need, False, BITS, BLOCK)
    _, mass, ties, each = _measure(given, candidates, key, BITS, BLOCK)
    if top_p < 1:
        some = tl.maximum(each, 1)
        ties = tl.minimum(ties, tl.maximum((need - mass + some - 1) // some, 1))
    if (number > 0) & (key == bound):
        ties = tl.minimum(ties, ties_of_bound)
    return key, _column_of(given, candidates, key, ties, BLOCK), mass + ties * each


@triton.jit
def _raw(key, BITS: tl.constexpr):
    """Return the logit of an `order_key`."""
    if BITS == 16:
        key = (key << 16) | tl.where(key < 0, 0xFFFF, 0)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _key_at(key_X, weight_X, low, need, BITS: tl.constexpr):
    """Return the largest key from `low` on at and above which the entries have the needed weight, bit by bit; `low` if
    there is none."""
    # Unsigned, a difference of 32 bits does not overflow.
    distance_X, found = key_X.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True), tl.full((), 0, tl.uint32)
    weight_X, bit = tl.where(key_X >= low, weight_X, 0), tl.full((), 1 << (BITS - 1), tl.uint32)
    for _ in range(BITS):
        is_enough = tl.sum(tl.where(distance_X >= found + bit, weight_X, 0), 0) >= need
        found, bit = tl.where(is_enough, found + bit, found), bit >> 1
    return low + found.to(tl.int32, bitcast=True)


@triton.jit
def _load_entries(given, first, BLOCK: tl.constexpr):
    """Return keys, masses and columns of a part of a row, and 1 for those that exist, otherwise 0."""
    logits_V, vocab, inverse, top = given
    column = first + tl.arange(0, BLOCK)
    raw = tl.load(logits_V + column, mask=column < vocab, other=-float("inf"))
    return order_key(raw), _mass(raw.to(tl.float32), inverse, top), column, (column < vocab).to(tl.int64)


@triton.jit
def _find_key(given, candidates, low, need, COUNTS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """As `_key_at`, with counts or masses as weights. A whole row is read once for two bits."""
    if candidates is not None:
        return _key_at(candidates[0], candidates[3] if COUNTS else candidates[2], low, need, BITS)
    else:
        found, unit = tl.full((), 0, tl.uint32), tl.full((), 1 << (BITS - 2), tl.uint32)
        for _ in range(BITS // 2):
            one_V = tl.zeros((BLOCK,), tl.int64)
            two_V, three_V = one_V, one_V
            for first in range(0, given[1], BLOCK):
                key, mass, _column, exists = _load_entries(given, first, BLOCK)
                weight = tl.where(key >= low, exists if COUNTS else mass * exists, 0)
                distance = key.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)
                one_V += tl.where(distance >= found + unit, weight, 0)
                two_V += tl.where(distance >= found + 2 * unit, weight, 0)
                three_V += tl.where(distance >= found + 3 * unit, weight, 0)
            enough = (tl.sum(one_V, 0) >= need).to(tl.uint32) + (tl.sum(two_V, 0) >= need).to(tl.uint32)
            found, unit = found + (enough + (tl.sum(three_V, 0) >= need).to(tl.uint32)) * unit, unit >> 2
        return low + found.to(tl.int32, bitcast=True)


@triton.jit
def _measure(given, candidates, key, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Return count and mass of the entries above the key, how many equal it, and the mass of one of those."""
    if candidates is not None:
        key_C, _, mass_C, exists_C = candidates
        above, equal = tl.sum(tl.where(key_C > key, exists_C, 0), 0), tl.sum(tl.where(key_C == key, exists_C, 0), 0)
        mass = tl.sum(tl.where(key_C > key, mass_C, 0), 0)
    else:
        above_V = tl.zeros((BLOCK,), tl.int64)
        mass_V, equal_V = above_V, above_V
        for first in range(0, given[1], BLOCK):
            key_V, each_V, _column, exists_V = _load_entries(given, first, BLOCK)
            above_V += tl.where(key_V > key, exists_V, 0)
            equal_V += tl.where(key_V == key, exists_V, 0)
            mass_V += tl.where(key_V > key, each_V * exists_V, 0)
        above, mass, equal = tl.sum(above_V, 0), tl.sum(mass_V, 0), tl.sum(equal_V, 0)
    return above, mass, equal, tl.where(equal > 0, _mass(_raw(key, BITS), given[2], given[3]), 0)


@triton.jit
def _column_of(given, candidates, key, number, BLOCK: tl.constexpr):
    """Return the column at which the given number of entries that equal the key is reached; -1 if none is."""
    if candidates is not None:
        key_C, column_C, _, exists_C = candidates
        is_equal = (key_C == key) & (exists_C > 0)
        rank = tl.cumsum(is_equal.to(tl.int32), 0)
        return tl.max(tl.where(is_equal & (rank == number), column_C, -1), 0)
    else:
        last, before = tl.full((), -1, tl.int32), 0
        for first in range(0, given[1], BLOCK):
            key_V, _mass_V, column, exists = _load_entries(given, first, BLOCK)
            is_equal = (key_V == key) & (exists > 0)
            rank = before + tl.cumsum(is_equal.to(tl.int32), 0)
            last = tl.maximum(last, tl.max(tl.where(is_equal & (rank == number), column, -1), 0))
            before += tl.sum(is_equal.to(tl.int32), 0)
        return last


def apply_mask(
    logits_RV: Tensor,
    mask_RW: Tensor,
    columns: int,
    ids_M: Tensor | None = None,
    *,
    fails: bool = True,
    block: int | None = None,
    warps: int = 4,
) -> Tensor:
    """See `smc.executor.masks.apply_mask`. Returns float32 [R, V]. `mask_RW`: int32, a bit for each token; `ids_M`:
    tokens of the columns, unless these are all tokens in their order. Columns from `columns` on stay unchanged."""
    require_rows(logits_RV, columns)
    rows, width = logits_RV.shape
    block = block or min(2048, triton.next_power_of_2(width))
    splits = triton.cdiv(width, block)
    out_RV = logits_RV.new_empty((rows, width), dtype=torch.float32)
    found_RP = logits_RV.new_empty((rows, splits), dtype=torch.int32)
    given = (logits_RV, logits_RV.stride(0), mask_RW, mask_RW.stride(0), ids_M, out_RV, width, columns, found_RP)
    options = {"BLOCK": block, "num_warps": warps}
    _mask[(splits, rows)](*given, **options)
    _mask_impossible[(splits, rows)](*given, splits, SPLITS=triton.next_power_of_2(splits), FAILS=fails, **options)
    return out_RV


@triton.jit
def _allowed(mask_RW, words, ids_M, row, column_V, own_V):
    """Return whether columns belong to tokens that may follow."""
    token_V = column_V
    if ids_M is not None:
        token_V = tl.load(ids_M + column_V, mask=own_V, other=0).to(tl.int32)
    word_V = tl.load(mask_RW + row * words + token_V // 32, mask=own_V, other=0)
    return own_V & (((word_V >> (token_V % 32)) & 1) != 0)


@one_variant("logits", "stride", "mask_RW", "ids_M", "out_RV", "width")
def _mask(logits, stride, mask_RW, words, ids_M, out_RV, width, columns, found_RP, BLOCK: tl.constexpr):
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column_V = split * BLOCK + tl.arange(0, BLOCK)
    exists_V, own_V = column_V < width, column_V < columns
    logit_V = tl.load(logits + row * stride + column_V, mask=exists_V, other=0.0).to(tl.float32)
    allowed_V = _allowed(mask_RW, words, ids_M, row, column_V, own_V)
    kept_V = tl.where(own_V & (allowed_V == 0), float("-inf"), logit_V)
    tl.store(out_RV + row * width + column_V, kept_V, mask=exists_V)
    # NaN counts as possible.
    possible_V = allowed_V & (logit_V != float("-inf"))
    found = tl.max(tl.where(possible_V, POSSIBLE, tl.where(allowed_V, ALLOWED, 0)), 0)
    tl.store(found_RP + row * tl.num_programs(0) + split, found)


@one_variant("logits", "stride", "mask_RW", "ids_M", "out_RV", "width")
def _mask_impossible(
    logits, stride, mask_RW, words, ids_M, out_RV, width, columns, found_RP, splits,
    SPLITS: tl.constexpr, FAILS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    s = tl.arange(0, SPLITS)
    found = tl.max(tl.load(found_RP + row * splits + s, mask=s < splits, other=0), 0)
    if found < POSSIBLE:
        column_V = split * BLOCK + tl.arange(0, BLOCK)
        own_V = column_V < columns
        allowed_V = _allowed(mask_RW, words, ids_M, row, column_V, own_V)
        if FAILS:
            none_V = tl.full([BLOCK], float("nan"), tl.float32)
        else:
            none_V = tl.load(logits + row * stride + column_V, mask=own_V, other=0.0).to(tl.float32)
        alike_V = tl.where(allowed_V, 0.0, float("-inf"))
        tl.store(out_RV + row * width + column_V, tl.where(found < ALLOWED, none_V, alike_V), mask=own_V)
