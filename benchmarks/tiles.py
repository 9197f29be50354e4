"""A product of two tiles by one program, for `benchmarks.invariance`: which bits do the tensor cores give for tiles of
other sizes?"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def multiply(
    first: Tensor, second: Tensor, rows: int, columns: int, warps: int, block_k: int, widened: bool = False
) -> Tensor:
    """Return the product [rows, columns] in float32 of the leading rows of `first` and `second` [.., K], in steps of
    `block_k`. `widened`: the first operand passes through registers."""
    out = first.new_empty((rows, columns), dtype=torch.float32)
    _multiply[(1,)](
        first, second, out, first.shape[1], ROWS=rows, COLUMNS=columns, BLOCK_K=block_k, WIDENED=widened,
        num_warps=warps, num_stages=2,
    )  # fmt: skip
    return out


@triton.jit
def _multiply(
    first, second, out, inner,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, WIDENED: tl.constexpr,
):  # fmt: skip
    m, n, k = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, BLOCK_K)
    sum_MN = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k0 in tl.range(0, inner, BLOCK_K, num_stages=2):
        first_MK = tl.load(first + m[:, None] * inner + (k0 + k)[None, :])
        second_NK = tl.load(second + n[:, None] * inner + (k0 + k)[None, :])
        if WIDENED:
            # Exact, and computed in registers.
            first_MK = (first_MK.to(tl.float32) * 2.0).to(first_MK.dtype)
        sum_MN = tl.dot(first_MK, tl.trans(second_NK), sum_MN, input_precision="ieee")
    if WIDENED:
        sum_MN *= 0.5
    tl.store(out + m[:, None] * COLUMNS + n[None, :], sum_MN)
