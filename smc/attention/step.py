"""A decoding step's attention in one launch: queries and keys rotated, the new key and value stored, and every row's one query attended.

For contexts so short that reading the prefix from the L2 cache for every row costs less than another launch (see `smc.attention.kernels`);
what `smc.kernels.store` and `SharedPrefixAttention` do in two launches or three.

Axes: R rows of one token each, J key/value heads, H query heads, N = H // J, D head dimension, P pages, S parts of a split product,
Y query heads of one key/value head.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smc.attention.kernels import take_in
from smc.kernels.norm import sum_parts
from smc.kernels.pdl import launch_options
from smc.kernels.rows import Tables, page_at, row_tables
from smc.kernels.variants import one_variant


@dataclass(frozen=True)
class Tiling:
    """Sizes that change speed only."""

    block_p: int
    """Positions read at a time."""
    warps: int
    stages: int
    """Tiles whose loads are in flight or in use."""

    @staticmethod
    def choose(programs: int, head_dim: int, item_size: int) -> Tiling:
        """The best of those tried on an H200: with few programs each must hurry, with many they hide each other's waits."""
        if item_size == 4:
            return Tiling(32, 2, 1)
        if head_dim > 64:
            return Tiling(128 if head_dim <= 128 and programs <= 132 else 64, 4, 3)
        return Tiling(64, 4, 4) if programs <= 2 * 132 else Tiling(32, 1, 4)


def step_attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    rope: Tensor,
    tables: Tables,
    start_R: Tensor,
    count_R: Tensor,
    out_RHD: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    *,
    tiling: Tiling | None = None,
    pdl: bool = False,
) -> None:
    """Attend, into `out_RHD` contiguous; zeros for rows without a token, which leave no trace.

    qkv [R, (H + 2J) * D], or partial sums of it [S, R, (H + 2J) * D]; keys, values [P + 1, J, D]; rope [positions, D] float32 as of
    `RopeTable`. Row r's token, if count_R is 1, is at position start_R and on the page that `tables` name, and so are the tokens before it.
    Indices int32; q_norm, k_norm [D] or neither.
    """
    (_, h, d), j = out_RHD.shape, keys.shape[1]
    assert qkv.shape[-1] == (h + 2 * j) * d and qkv.is_contiguous() and rope.shape[1] == d and rope.is_contiguous()
    assert keys.is_contiguous() and values.is_contiguous() and out_RHD.is_contiguous()
    rows, (*index, tail) = qkv.shape[-2], tables.arguments()
    tiling = tiling or Tiling.choose(j * rows, d, keys.element_size())
    _step_kernel[(j, rows)](
        qkv, keys, values, rope, *index, start_R, count_R, out_RHD, q_norm, k_norm, eps, qkv.shape[-1] * rows,
        H=h, J=j, N=h // j, D=d, SCALE=d**-0.5 * 1.4426950408889634, TAIL=tail, NORM=q_norm is not None,
        SPLITS=len(qkv) if qkv.dim() == 3 else 1, BLOCK_Y=max(16, triton.next_power_of_2(h // j)),
        BLOCK_P=tiling.block_p, STAGES=tiling.stages, PDL=pdl, num_warps=tiling.warps, **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _rotated(
    row, head, d, split_stride, norm, eps, cos, sin, mask,
    D: tl.constexpr, NORM: tl.constexpr, SPLITS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Heads [Y, D] of a token, normalised and rotated; arithmetic in float32, rounded as a product that was never split would be, and once
    more at the end."""
    # The other half of a head's dimensions: (x, y) -> (x cos - y sin, y cos + x sin).
    other = (d + D // 2) % D
    x_YD = sum_parts(row + head * D + d, split_stride, mask, SPLITS).to(DTYPE).to(tl.float32)
    y_YD = sum_parts(row + head * D + other, split_stride, mask, SPLITS).to(DTYPE).to(tl.float32)
    if NORM:
        scale_Y = tl.rsqrt(tl.sum(x_YD * x_YD, 1) / D + eps)[:, None]
        x_YD *= scale_Y * tl.load(norm + d).to(tl.float32)
        y_YD *= scale_Y * tl.load(norm + other).to(tl.float32)
    return (x_YD * cos + y_YD * tl.where(d < D // 2, -sin, sin)).to(DTYPE)


@one_variant("qkv", "keys", "values", "rope", "table_SL", "table_stride", "width", "out", "q_norm", "k_norm", "split_stride")
def _step_kernel(
    qkv, keys, values, rope, table_SL, table_stride, width, slot_R, tail_RB, tail_stride, tail_width, tail_R, start_R, count_R, out,
    q_norm, k_norm, eps, split_stride,
    H: tl.constexpr, J: tl.constexpr, N: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, TAIL: tl.constexpr, NORM: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row and key/value head."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    j, r = tl.program_id(0), tl.program_id(1)
    y, d, p = tl.arange(0, BLOCK_Y)[:, None], tl.arange(0, D)[None, :], tl.arange(0, BLOCK_P)
    exists = tl.load(count_R + r) > 0
    position = tl.where(exists, tl.load(start_R + r), 0)
    table, tail, tail_start = row_tables(r, table_SL, table_stride, slot_R, tail_RB, tail_stride, tail_R, TAIL)
    page = page_at(p, p < position, table, width, tail, tail_width, tail_start, TAIL)
    angle = rope + position.to(tl.int64) * D + d % (D // 2)
    cos, sin = tl.load(angle), tl.load(angle + D // 2)
    here = page_at(position, exists, table, width, tail, tail_width, tail_start, TAIL)
    if PDL:
        gdc_wait()
    row, real = qkv + r.to(tl.int64) * ((H + 2 * J) * D), y < N
    q_YD = _rotated(row, j * N + y, d, split_stride, q_norm, eps, cos, sin, real, D, NORM, SPLITS, DTYPE)
    # The new key and value are those of one head, in a block of one.
    one = tl.zeros([1, 1], tl.int32)
    k_1D = _rotated(row, H + j + one, d, split_stride, k_norm, eps, cos, sin, one == 0, D, NORM, SPLITS, DTYPE)
    v_1D = sum_parts(row + (H + J + j) * D + d, split_stride, d < D, SPLITS).to(DTYPE)
    at = (here.to(tl.int64) * J + j) * D + d
    # The dummy page stays as it is: a masked position must not read a NaN.
    tl.store(keys + at, k_1D, mask=(d < D) & (here != 0))
    tl.store(values + at, v_1D, mask=(d < D) & (here != 0))
    m_Y = tl.sum(q_YD.to(tl.float32) * k_1D.to(tl.float32), 1) * SCALE
    l_Y = tl.full([BLOCK_Y], 1.0, tl.float32)
    acc_YD = tl.zeros([BLOCK_Y, D], tl.float32) + v_1D.to(tl.float32)
    for p0 in tl.range(0, position, BLOCK_P, num_stages=STAGES):
        at_PD = (page.to(tl.int64) * J + j)[:, None] * D + d
        k_PD, v_PD = tl.load(keys + at_PD), tl.load(values + at_PD)
        next_p = p0 + BLOCK_P + p
        page = page_at(next_p, next_p < position, table, width, tail, tail_width, tail_start, TAIL)
        m_Y, l_Y, acc_YD = take_in(q_YD, k_PD, v_PD, (p0 + p < position)[None, :], m_Y, l_Y, acc_YD, SCALE)
    if PDL:
        gdc_launch_dependents()
    out_YD = tl.where(exists, acc_YD / l_Y[:, None], 0.0)
    tl.store(out + (r.to(tl.int64) * H + j * N + y) * D + d, out_YD.to(DTYPE), mask=real & (d < D))
