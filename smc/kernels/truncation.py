"""Parts that kernels over a distribution's logits share: rows divided by their temperature and their sums block by
block; the cuts of truncated distributions (top-k, top-p and min-p, in that order as in `smc.distributions`), found
without sorting; and masks, which remove tokens that may not follow (`smc.executor.masks.apply_mask`).

A truncation keeps a prefix of the descending order, equal entries by column, so a cut is the `order_key` of the last
kept entry and that entry's column. The key is found digit by digit, from the top: a pass sums, block by block, the
count (top-k) or the mass (top-p) of the entries at or above every value of the next digit, and the next pass begins at
the largest value where that is enough. Sums are made in a fixed order: the same bits every time, whatever the dtype of
the logits, from which only the number of passes follows. Kernels read the index of the pass and the processors in use
at run time, so every kernel is compiled once for each dtype.

No compiler fuses multiplications and additions: it would do so in some variants of a kernel only, so that a row's bits
would depend on whether another row is truncated.

A mask reads and writes logits once. A program handles some columns of one row; it also records whether any of them is
allowed, and whether any allowed one is possible. A second launch reads these records and writes again the rows in which
nothing is possible, which are rare.

The host reads nothing, and grids follow from shapes alone, so all launches can be captured in a CUDA graph.

Local axes: P splits of the vocabulary, U passes (one more for where they begin), Y values of a digit."""

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

DIGIT = 4
"""Number of bits of the key that a pass finds."""
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


@one_variant("logits", "stride", "vocab")
def sum_block(
    logits, stride, temperature_R, cut, vocab, max_RP, sum_RP, top_RP, BLOCK: tl.constexpr
):  # fmt: skip
    """Reduce one block of one row: its maximum, the column of that, and its sum of exponentials relative to that."""
    split, row, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    inverse, _ = inverse_temperature(temperature_R, row)
    raw, column = load_block(logits, stride, row, vocab, BLOCK)
    logit = cut_logit(raw, column, row, inverse, cut)
    top, at = tl.max(logit, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(max_RP + row * splits + split, top)
    tl.store(top_RP + row * splits + split, split * BLOCK + at)
    tl.store(sum_RP + row * splits + split, block_sum(tl.exp(logit - finite(top))))


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
) -> Cut:
    """Find the cut of softmax(logits / temperature) by top-k, top-p and min-p, without those that are not active; a
    row's neutral value leaves one out.

    With `share` in (0, 1), dropped entries stay possible: the distribution after the cut is then the mixture of the
    untruncated distribution, with that share, and the truncated one. Only the first `vocab` columns count; the row
    stride is free. A row with NaN has NaN after the cut, too."""
    require_rows(logits_RV, vocab)
    active = distribution.active
    used = UsedTruncations(*(int(bool(active & one)) for one in (Processors.TOP_K, Processors.TOP_P, Processors.MIN_P)))
    block = block or min(4096, triton.next_power_of_2(vocab))
    search = _Search(logits_RV, vocab, distribution.temperature_R, block, warps)
    search.begin(distribution, used)
    if used.top_k:
        search.find(counts=True)
    if used.top_k and used.top_p:
        search.turn(distribution.top_k_R, distribution.top_p_R)
    if used.top_p:
        search.find(counts=False)
    if not used.top_k and not used.top_p:
        search.measure(searched=False)
    return search.end(share, used)


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


class SearchAims(NamedTuple):
    """The aim of each row's search, and where the search begins."""

    top_R: Tensor
    total_R: Tensor
    need_R: Tensor
    floor_R: Tensor
    low_UR: Tensor


class GivenRows(NamedTuple):
    """Rows of logits and their temperatures."""

    logits_RV: Tensor
    stride: int
    temperature_R: Tensor


class Measured(NamedTuple):
    """What a measurement finds in every block of a row."""

    above_RP: Tensor
    """float32 number of entries above the key."""
    mass_RP: Tensor
    """Their mass."""
    equal_RP: Tensor
    """float32 number of entries that equal the key."""


class CutSearch(NamedTuple):
    """The results of searches, and the share of the untruncated distribution."""

    total_R: Tensor
    need_R: Tensor
    bound_R: Tensor
    ties_R: Tensor
    share: float
    log_share: float


class _Search:
    """The buffers of one search, for all rows at once, and its steps in the order in which they are taken."""

    def __init__(self, logits_RV: Tensor, vocab: int, temperature_R: Tensor, block: int, warps: int) -> None:
        rows, splits = len(temperature_R), triton.cdiv(vocab, block)
        bits = 16 if logits_RV.dtype == torch.bfloat16 else 32
        self._given, self._vocab = GivenRows(logits_RV, logits_RV.stride(0), temperature_R), vocab
        self._rows, self._splits, self._block, self._warps, self._passes = rows, splits, block, warps, bits // DIGIT
        self._sizes, room = {"BITS": bits, "SPLITS": triton.next_power_of_2(splits)}, Room(logits_RV.device)
        self._sizes["enable_fp_fusion"] = False
        self._aims = SearchAims(
            top_R=room.floats(rows),
            total_R=room.floats(rows),
            need_R=room.floats(rows),
            floor_R=room.ints(rows),
            low_UR=room.ints(self._passes + 1, rows),
        )
        self._ties_R, self._bound_R = room.floats(rows), room.ints(rows)
        self._cut = Cut(key_R=room.ints(rows), last_R=room.ints(rows), drop_R=room.floats(rows))
        self._found_URPY = room.floats(self._passes, rows, splits, 1 << DIGIT)
        self._measured = Measured(*(room.floats(rows, splits) for _ in Measured._fields))
        self._best_RP = room.ints(rows, splits)

    def begin(self, distribution: DistributionSpec[Tensor], used: UsedTruncations) -> None:
        """Compute every row's maximum and mass, and the aim of the first search."""
        # The memory of later measurements holds the blocks' maxima and sums for now.
        sums = RowSums(self._measured.above_RP, self._measured.mass_RP, self._best_RP)
        options = {"BLOCK": self._block, "num_warps": self._warps, "enable_fp_fusion": False}
        sum_block[(self._splits, self._rows)](*self._given, None, self._vocab, *sums, **options)
        values = (distribution.top_k_R, distribution.top_p_R, distribution.min_p_R)
        _begin[(self._rows,)](
            *self._given, self._vocab, *values, used, sums, self._aims, self._splits, **self._sizes, num_warps=1
        )

    def find(self, *, counts: bool) -> None:
        """Find the largest allowed key at and above which there is enough, and measure there."""
        for index in range(self._passes):
            self._over_blocks(_find, index, int(counts))
        self.measure(searched=True)

    def measure(self, *, searched: bool) -> None:
        """Measure what lies above the key that was found (without a search, the lowest allowed key), and what equals
        it."""
        self._over_blocks(_measure, self._passes if searched else 0, self._cut.key_R, self._measured)

    def turn(self, top_k_R: Tensor, top_p_R: Tensor) -> None:
        """Turn from counts to mass: top-p keeps a share of the mass that top-k has kept."""
        self._over_rows(_turn, top_k_R, top_p_R, self._aims, self._bound_R, self._ties_R)

    def end(self, share: float, used: UsedTruncations) -> Cut:
        log_share = math.log(share) if share else -math.inf
        found = CutSearch(self._aims.total_R, self._aims.need_R, self._bound_R, self._ties_R, share, log_share)
        logits, cut = (self._given.logits_RV, self._given.stride, self._vocab), self._cut
        self._over_rows(_end, *logits, found, cut.last_R, cut.drop_R, used.top_k, used.top_p, BLOCK=self._block)
        return cut

    def _over_blocks(self, kernel: triton.JITFunction, index: int, *arguments: object) -> None:
        state = (self._aims.top_R, self._aims.need_R, self._aims.low_UR, self._found_URPY)
        options = {"DIGIT": DIGIT, "BLOCK": self._block, "num_warps": self._warps, **self._sizes}
        kernel[(self._splits, self._rows)](*self._given, self._vocab, *state, index, *arguments, **options)

    def _over_rows(self, kernel: triton.JITFunction, *arguments: object, **options: object) -> None:
        state = (self._given.temperature_R, self._aims.top_R, self._cut.key_R, self._measured, self._splits)
        kernel[(self._rows,)](*state, *arguments, **options, **self._sizes, num_warps=self._warps)


@triton.jit
def _raw(key, BITS: tl.constexpr):
    """Return the logit of an `order_key`."""
    if BITS == 16:
        key = (key << 16) | tl.where(key < 0, 0xFFFF, 0)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def copy_distribution(to, at, given, index, mask):
    """Copy fields of a `DistributionSpec` from `index` of the given one to `at`."""
    for i in tl.static_range(FIELDS):
        tl.store(to[i] + at, tl.load(given[i] + index, mask=mask, other=0), mask=mask)


@one_variant()
def _begin(
    logits, stride, temperature_R, vocab, top_k_R, top_p_R, min_p_R, used, sums, aims, splits,
    BITS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Set the aim and the beginning of one row's first search. The last search stops at the floor that min-p sets."""
    row = tl.program_id(0)
    inverse, _ = inverse_temperature(temperature_R, row)
    max_P, top, total = combine(sums.top_RP, sums.total_RP, row, splits, SPLITS)
    lowest = tl.full((), -(1 << (BITS - 1)), tl.int32)
    floor = lowest
    if used.min_p != 0:
        min_p = tl.load(min_p_R + row)
        key = order_key((top + tl.log(min_p)) / inverse)
        if BITS == 16:
            # The first bfloat16 that is not smaller: in keys of positive numbers its lower bits are zeros, of negative
            # numbers ones.
            key = tl.where(key < 0, key, key + 0xFFFF) >> 16
        # If the row has a NaN, any column may result, even one past the end.
        column = tl.minimum(best_column(max_P, sums.best_RP, row, splits), vocab - 1)
        best = tl.load(logits + row.to(tl.int64) * stride + column)
        floor = tl.where(min_p > 0, tl.minimum(key, order_key(best)), floor)
    need = total
    if used.top_k != 0:
        top_k = tl.load(top_k_R + row)
        need = tl.where(top_k > 0, tl.minimum(top_k, vocab), vocab).to(tl.float32)
    elif used.top_p != 0:
        need = _required(total, tl.load(top_p_R + row))
    tl.store(aims.top_R + row, top)
    tl.store(aims.total_R + row, total)
    tl.store(aims.need_R + row, need)
    tl.store(aims.floor_R + row, floor)
    tl.store(aims.low_UR + row, tl.where((used.top_k != 0) & (used.top_p != 0), lowest, floor))


@triton.jit
def _required(mass, top_p):
    """Return the mass that the entries kept by top-p must hold; more than there is if top-p is not used."""
    # A share too small for float32 arrives as 0, and a required mass of 0 would be reached without any entry.
    return tl.where(top_p < 1, tl.maximum(top_p, 1e-30) * mass, float("inf"))


@triton.jit
def _interval(
    low_UR, found_URPY, need_R, row, rows, splits, index, DIGIT: tl.constexpr, BITS: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """Return the least key that a pass still has to tell from others: that of the previous pass, raised by the digit
    that the previous pass found."""
    low = tl.load(low_UR + index * rows + row)
    if index > 0:
        split, value = tl.arange(0, SPLITS)[:, None], tl.arange(0, 1 << DIGIT)[None, :]
        at = (((index - 1) * rows + row) * splits + split) << DIGIT
        found_Y = tl.sum(tl.load(found_URPY + at + value, mask=(split < splits) & (value > 0), other=0.0), 0)
        is_enough_Y = (found_Y >= tl.load(need_R + row)) & (tl.arange(0, 1 << DIGIT) > 0)
        low += tl.sum(is_enough_Y.to(tl.int32), 0) << (BITS - DIGIT * index)
    return low


@triton.jit
def store_digit_sums(out, value, weight, DIGIT: tl.constexpr):
    """Store the sums of the weights of a block at and above every value of a digit but 0."""
    for v in tl.static_range(1, 1 << DIGIT):
        tl.store(out + v, block_sum(tl.where(value >= v, weight, 0.0)))


@one_variant("logits", "stride", "vocab", "found_URPY")
def _find(
    logits, stride, temperature_R, vocab, top_R, need_R, low_UR, found_URPY, index, counts,
    DIGIT: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Sum one block of one row: count or mass at and above every value but 0 of this pass's digit."""
    split, row, splits, rows = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    # Loads that are issued before a branch are in flight meanwhile.
    raw, column = load_block(logits, stride, row, vocab, BLOCK)
    inverse, _ = inverse_temperature(temperature_R, row)
    top = tl.load(top_R + row)
    low = _interval(low_UR, found_URPY, need_R, row, rows, splits, index, DIGIT, BITS, SPLITS)
    if split == 0:
        tl.store(low_UR + (index + 1) * rows + row, low)
    key = order_key(raw)
    if counts != 0:
        weight = (column < vocab).to(tl.float32)
    else:
        weight = tl.exp(raw.to(tl.float32) * inverse - top)
    weight = tl.where(key >= low, weight, 0.0)
    # Unsigned, a difference of 32 bits does not overflow.
    value = (key.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)) >> (BITS - DIGIT * (index + 1))
    out = found_URPY + (((index * rows + row) * splits + split) << DIGIT)
    store_digit_sums(out, value, weight, DIGIT)


@one_variant("logits", "stride", "vocab", "found_URPY", "measured")
def _measure(
    logits, stride, temperature_R, vocab, top_R, need_R, low_UR, found_URPY, index, key_R, measured,
    DIGIT: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Measure one block of one row: count and mass above the key, and the number of entries that equal it."""
    split, row, splits, rows = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    raw, column = load_block(logits, stride, row, vocab, BLOCK)
    least = _interval(low_UR, found_URPY, need_R, row, rows, splits, index, DIGIT, BITS, SPLITS)
    if split == 0:
        tl.store(key_R + row, least)
    inverse, _ = inverse_temperature(temperature_R, row)
    key, mass = order_key(raw), tl.exp(raw.to(tl.float32) * inverse - tl.load(top_R + row))
    exists, out = column < vocab, row * splits + split
    tl.store(measured.above_RP + out, tl.sum(((key > least) & exists).to(tl.int32), 0).to(tl.float32))
    tl.store(measured.mass_RP + out, block_sum(tl.where(key > least, mass, 0.0)))
    tl.store(measured.equal_RP + out, tl.sum(((key == least) & exists).to(tl.int32), 0).to(tl.float32))


@triton.jit
def _measured(temperature_R, top_R, key_R, measured, row, splits, BITS: tl.constexpr, SPLITS: tl.constexpr):
    """Return for one row: its key, count and mass above it, the number of entries in every block that equal it, and the
    mass of one of those."""
    split, key = tl.arange(0, SPLITS), tl.load(key_R + row)
    at, inside = row * splits + split, split < splits
    above = tl.sum(tl.load(measured.above_RP + at, mask=inside, other=0.0), 0)
    mass = tl.sum(tl.load(measured.mass_RP + at, mask=inside, other=0.0), 0)
    equal_P = tl.load(measured.equal_RP + at, mask=inside, other=0.0)
    inverse, _ = inverse_temperature(temperature_R, row)
    each = tl.where(tl.sum(equal_P, 0) > 0, tl.exp(_raw(key, BITS) * inverse - tl.load(top_R + row)), 0.0)
    return key, above, mass, equal_P, each


@one_variant()
def _turn(
    temperature_R, top_R, key_R, measured, splits, top_k_R, top_p_R, aims, bound_R, ties_R,
    BITS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Record for one row where top-k ends, and aim at a share of the mass up to there; without top-k at a share of all
    mass, as if no row had it."""
    row = tl.program_id(0)
    key, above, mass, _, each = _measured(temperature_R, top_R, key_R, measured, row, splits, BITS, SPLITS)
    ties = tl.load(aims.need_R + row) - above
    tl.store(bound_R + row, key)
    tl.store(ties_R + row, ties)
    has_top_k, floor = tl.load(top_k_R + row) > 0, tl.load(aims.floor_R + row)
    kept = tl.where(has_top_k, mass + ties * each, tl.load(aims.total_R + row))
    tl.store(aims.need_R + row, _required(kept, tl.load(top_p_R + row)))
    tl.store(aims.low_UR + row, tl.where(has_top_k, tl.maximum(key, floor), floor))


@one_variant("logits", "stride", "vocab", "measured")
def _end(
    temperature_R, top_R, key_R, measured, splits, logits, stride, vocab, found, last_R, drop_R, counts, weighs,
    BLOCK: tl.constexpr, BITS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Finish one row: how many of the entries that equal the key are kept, the column of the last of them, and what is
    added to the dropped entries."""
    row = tl.program_id(0)
    key, above, mass, equal_P, each = _measured(temperature_R, top_R, key_R, measured, row, splits, BITS, SPLITS)
    equal = tl.sum(equal_P, 0)
    ties = equal
    if weighs != 0:
        ties = tl.ceil((tl.load(found.need_R + row) - mass) / each)
        ties = tl.where(ties >= 1, ties, 1.0)
        if counts != 0:
            ties = tl.where(key == tl.load(found.bound_R + row), tl.minimum(ties, tl.load(found.ties_R + row)), ties)
    elif counts != 0:
        ties = tl.load(found.need_R + row) - above
    ties = tl.minimum(ties, equal)
    tl.store(last_R + row, _column_of(logits + row.to(tl.int64) * stride, vocab, key, ties, equal_P, BLOCK, SPLITS))
    kept = tl.minimum((mass + ties * each) / tl.load(found.total_R + row), 1.0)
    tl.store(drop_R + row, found.log_share - tl.log((1.0 - found.share) / kept + found.share))


@triton.jit
def _column_of(logits_V, vocab, key, number, equal_P, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """Return the column at which the given number of a row's entries that equal `key` is reached; -1 if none is."""
    split = tl.sum((tl.cumsum(equal_P, 0) < number).to(tl.int32), 0)
    before = tl.sum(tl.where(tl.arange(0, SPLITS) < split, equal_P, 0.0), 0)
    column = split * BLOCK + tl.arange(0, BLOCK)
    is_equal = (order_key(tl.load(logits_V + column, mask=column < vocab, other=0.0)) == key) & (column < vocab)
    rank = tl.cumsum(is_equal.to(tl.int32), 0)
    return tl.max(tl.where(is_equal & (rank == (number - before).to(tl.int32)), column, -1), 0)


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
