"""What kernels over a law's logits share: rows over their temperature, their sums block by block, and what a truncation
keeps of them.

Axes: R rows, V columns, S splits of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from smc.kernels.variants import one_variant


@dataclass(frozen=True)
class Cut:
    """What a truncated law keeps of each row: entries whose `order_key` is above `key`, and those that equal it up to
    column `last`."""

    key_R: Tensor
    """int32."""
    last_R: Tensor
    """int32; -1 where none that equal it are kept."""
    drop_R: Tensor
    """float32: what all other entries have added to their log-probability, up to the normaliser; -inf forbids them."""


def cut_arguments(cut: Cut | None, unused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a kernel that knows cuts is given; any tensor, `unused`, where there is none."""
    return (unused, unused, unused) if cut is None else (cut.key_R, cut.last_R, cut.drop_R)


def require_rows(logits_RV: Tensor, vocab: int) -> None:
    """Raises ValueError for logits that no kernel here can read."""
    if logits_RV.stride(1) != 1 or not 0 < vocab <= logits_RV.shape[1]:
        raise ValueError(
            f"needs rows of contiguous logits and 0 < vocab <= columns; {logits_RV.stride()=}, {logits_RV.shape=}, {vocab=}"
        )


@triton.jit
def inverse_temperature(temperature_R, row):
    """1 / temperature (1 where greedy), and whether greedy."""
    temperature = tl.load(temperature_R + row).to(tl.float32)
    return 1.0 / tl.where(temperature == 0, 1.0, temperature), temperature == 0


@triton.jit
def order_key(raw):
    """Integers, int32, in the order of the given logits, equal for equal ones; 16 bits for bfloat16."""
    # Adding 0 makes one zero of two. Negative numbers descend by their bits.
    bits = (raw.to(tl.float32) + 0.0).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if raw.dtype == tl.bfloat16:
        key = key >> 16
    return key


@triton.jit
def cut_logit(raw, column, row, inverse, key_R, last_R, drop_R, CUT: tl.constexpr):
    """Logits of one row over its temperature, after its cut."""
    logit = raw.to(tl.float32) * inverse
    if CUT:
        key, least = order_key(raw), tl.load(key_R + row)
        is_kept = (key > least) | ((key == least) & (column <= tl.load(last_R + row)))
        logit = tl.where(is_kept, logit, logit + tl.load(drop_R + row))
    return logit


@triton.jit
def load_block(logits, stride, row, vocab, BLOCK: tl.constexpr):
    """One block of a row as it is stored, -inf past the vocabulary; with the entries' columns."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return tl.load(logits + row.to(tl.int64) * stride + column, mask=column < vocab, other=-float("inf")), column


@triton.jit
def finite(top):
    """A maximum to subtract: 0 where all is -inf, so that no difference of infinities arises."""
    return tl.where(top == -float("inf"), 0.0, top)


@one_variant("logits", "stride", "vocab")
def sum_block(
    logits, stride, temperature_R, key_R, last_R, drop_R, vocab, max_RS, sum_RS, top_RS, CUT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One block of one row: its maximum, where that is, and its sum of exponentials from there."""
    split, row, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    inverse, _ = inverse_temperature(temperature_R, row)
    raw, column = load_block(logits, stride, row, vocab, BLOCK)
    logit = cut_logit(raw, column, row, inverse, key_R, last_R, drop_R, CUT)
    top, at = tl.max(logit, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(max_RS + row * splits + split, top)
    tl.store(top_RS + row * splits + split, split * BLOCK + at)
    tl.store(sum_RS + row * splits + split, tl.sum(tl.exp(logit - finite(top)), 0))


@triton.jit
def combine(max_RS, sum_RS, row, splits, BLOCK: tl.constexpr):
    """A row's maxima [BLOCK], their largest (0 if none is finite), and the row's sum of exponentials from there."""
    split = tl.arange(0, BLOCK)
    max_S = tl.load(max_RS + row * splits + split, mask=split < splits, other=-float("inf"))
    sum_S = tl.load(sum_RS + row * splits + split, mask=split < splits, other=0.0)
    top = finite(tl.max(max_S, 0))
    return max_S, top, tl.sum(sum_S * tl.exp(max_S - top), 0)


@triton.jit
def best_column(max_S, top_RS, row, splits):
    """The first column that holds the row's maximum."""
    _, at = tl.max(max_S, 0, return_indices=True, return_indices_tie_break_left=True)
    return tl.load(top_RS + row * splits + tl.minimum(at, splits - 1))
