"""Takes tokens that may not follow out of logits: `smc.executor.masks.apply_mask`.

Logits are read and written once. A program has some columns of one row; it also says whether any of them is allowed,
and whether any that is allowed is possible. A second launch reads what the programs found, and writes again the rows in
which nothing is possible, which are rare. Nothing reads the host, and grids follow from shapes alone: both launches can
be captured in a CUDA graph.

Axes: R rows, V columns, W words of 32 tokens, M columns of a draft's head, S splits of the columns, B columns of a
program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smc.kernels.launch import one_variant
from smc.kernels.truncation import require_rows

ALLOWED, POSSIBLE = tl.constexpr(1), tl.constexpr(2)
"""What a program says of its columns: one of them is allowed; one that is allowed is possible."""


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
    """float32 [R, V]. `mask`: int32, a bit for each token; `ids`: tokens of the columns, where they are not all tokens
    in their order. Columns from `columns` on stay as they are."""
    require_rows(logits_RV, columns)
    rows, width = logits_RV.shape
    block = block or min(2048, triton.next_power_of_2(width))
    splits = triton.cdiv(width, block)
    out_RV = logits_RV.new_empty((rows, width), dtype=torch.float32)
    found_RS = logits_RV.new_empty((rows, splits), dtype=torch.int32)
    ids = mask_RW if ids_M is None else ids_M
    given = (logits_RV, logits_RV.stride(0), mask_RW, mask_RW.stride(0), ids, out_RV, width, columns, found_RS)
    options = {"HEAD": ids_M is not None, "BLOCK": block, "num_warps": warps}
    _mask[(splits, rows)](*given, **options)
    _mask_impossible[(splits, rows)](*given, splits, SPLITS=triton.next_power_of_2(splits), FAILS=fails, **options)
    return out_RV


@triton.jit
def _allowed(mask_RW, words, ids_M, row, column_B, own_B, HEAD: tl.constexpr):
    """Whether columns are of tokens that may follow."""
    token_B = column_B
    if HEAD:
        token_B = tl.load(ids_M + column_B, mask=own_B, other=0).to(tl.int32)
    word_B = tl.load(mask_RW + row * words + token_B // 32, mask=own_B, other=0)
    return own_B & (((word_B >> (token_B % 32)) & 1) != 0)


@one_variant("logits", "stride", "mask_RW", "ids_M", "out_RV", "width")
def _mask(
    logits, stride, mask_RW, words, ids_M, out_RV, width, columns, found_RS, HEAD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column_B = split * BLOCK + tl.arange(0, BLOCK)
    exists_B, own_B = column_B < width, column_B < columns
    logit_B = tl.load(logits + row * stride + column_B, mask=exists_B, other=0.0).to(tl.float32)
    allowed_B = _allowed(mask_RW, words, ids_M, row, column_B, own_B, HEAD)
    kept_B = tl.where(own_B & (allowed_B == 0), float("-inf"), logit_B)
    tl.store(out_RV + row * width + column_B, kept_B, mask=exists_B)
    # NaN is possible.
    possible_B = allowed_B & (logit_B != float("-inf"))
    found = tl.max(tl.where(possible_B, POSSIBLE, tl.where(allowed_B, ALLOWED, 0)), 0)
    tl.store(found_RS + row * tl.num_programs(0) + split, found)


@one_variant("logits", "stride", "mask_RW", "ids_M", "out_RV", "width")
def _mask_impossible(
    logits, stride, mask_RW, words, ids_M, out_RV, width, columns, found_RS, splits,
    SPLITS: tl.constexpr, FAILS: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    s = tl.arange(0, SPLITS)
    found = tl.max(tl.load(found_RS + row * splits + s, mask=s < splits, other=0), 0)
    if found < POSSIBLE:
        column_B = split * BLOCK + tl.arange(0, BLOCK)
        own_B = column_B < columns
        allowed_B = _allowed(mask_RW, words, ids_M, row, column_B, own_B, HEAD)
        if FAILS:
            none_B = tl.full([BLOCK], float("nan"), tl.float32)
        else:
            none_B = tl.load(logits + row * stride + column_B, mask=own_B, other=0.0).to(tl.float32)
        alike_B = tl.where(allowed_B, 0.0, float("-inf"))
        tl.store(out_RV + row * width + column_B, tl.where(found < ALLOWED, none_B, alike_B), mask=own_B)
