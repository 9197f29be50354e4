"""Attention over short contexts in one launch: rotates queries and keys of new tokens, stores their keys and values,
and computes the attention of every row.

For contexts so short that reading the prefix from the L2 cache for every row costs less than another launch (see
`smc.attention.kernels`). For longer contexts `smc.kernels.packed_rows` and `SharedPrefixAttention` do the same in three
launches.

Local axes: Y queries with their heads for one key/value head (query, head), Z any heads of tokens. T = R * Q tokens
stand row after row. EACH = H // J."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smc.attention.kernels import LOG2_E, LOWEST, floor_rows, take_in
from smc.kernels.launch import MULTIPROCESSORS, launch_options, one_variant
from smc.kernels.norm import pair_sum, sum_parts
from smc.kernels.packed_rows import CacheTensors, HeadNorms, page_at, row_tables, table_arguments
from smc.round.tensors import RowSpans, RowTables

LEAST_Y = 16
"""Minimum number of queries of a program: what tensor cores take."""


@dataclass(frozen=True)
class StepTiling:
    """Sizes that change speed only."""

    block_y: int
    """Queries of a program."""
    block_p: int
    """Positions read at a time."""
    warps: int
    stages: int
    """Number of tiles whose loads are in flight or in use."""

    @staticmethod
    def choose(queries: int, y: int, pairs: int, head_dim: int, item_size: int) -> StepTiling:
        """Return the best tiling of those tried on an H200. `pairs`: number of pairs (row, key/value head); `y`:
        queries of each. With few programs each one must be fast; many programs hide each other's waits."""
        few = pairs * triton.cdiv(y, LEAST_Y) <= 2 * MULTIPROCESSORS
        if item_size == 4:
            return StepTiling(16, 32, 2, 1)
        if queries == 1 and head_dim <= 64:
            return StepTiling(16, 64, 4, 4) if few else StepTiling(16, 32, 1, 4)
        if queries == 1:
            return StepTiling(16, 128 if head_dim <= 128 and pairs <= MULTIPROCESSORS else 64, 4, 3)
        if few or y <= LEAST_Y:
            return StepTiling(LEAST_Y, 64, 8 if head_dim > 64 else 4, 3)
        # With the widest heads, 64 queries do not fit into shared memory.
        return StepTiling(32 if y <= 32 or head_dim > 128 else 64, 64, 4, 3)


class RowPaths(NamedTuple):
    """The rows of one token that run each row's own positions."""

    row_RB: Tensor
    width: int


def step_attention(
    qkv: Tensor,
    cache: CacheTensors,
    rope: Tensor,
    tables: RowTables,
    spans: RowSpans,
    out_THD: Tensor,
    norm: HeadNorms | None = None,
    *,
    window: int | None = None,
    path_RB: Tensor | None = None,
    tiling: StepTiling | None = None,
    pdl: bool = False,
) -> None:
    """Compute the attention into contiguous `out_THD`. Tokens past a row's count get zeros and store nothing.

    qkv [T, (H + 2J) * D], or partial sums of it [parts, T, (H + 2J) * D]; rope [positions, D] float32 as made by
    `RopeTable`. `tables` name the pages of the tokens of `spans` and of all tokens before them, none of which may be a
    new token of another row, except with `path`: then Q is 1, and row r's own positions, from its tail's first on, are
    those of rows path_RB[r, 0], path_RB[r, 1], .. up to itself. Indices are int32. `window`: number of positions that a
    token sees, itself included; None: all."""
    (_, h, d), j, rows = out_THD.shape, cache.k_BJD.shape[1], len(spans.start_R)
    queries = len(out_THD) // rows
    y = queries * h // j
    tiling = tiling or StepTiling.choose(queries, y, j * floor_rows(rows), d, cache.k_BJD.element_size())
    arguments, constants = step_arguments(qkv, cache, rope, tables, spans, out_THD, norm, path_RB)
    _step_kernel[(j, rows, triton.cdiv(y, tiling.block_y))](
        *arguments, **constants, BLOCK_Y=tiling.block_y, BLOCK_P=tiling.block_p, STAGES=tiling.stages,
        WINDOW=window or 0, num_warps=tiling.warps, **launch_options(pdl),
    )  # fmt: skip


def step_arguments(
    qkv: Tensor,
    cache: CacheTensors,
    rope: Tensor,
    tables: RowTables,
    spans: RowSpans,
    out_THD: Tensor,
    norm: HeadNorms | None,
    path_RB: Tensor | None,
) -> tuple[tuple[Any, ...], dict[str, int]]:
    """Check the arguments of `step_attention`. Returns them, and the constants that follow from their shapes, as both
    kernels take them."""
    (tokens, h, d), j, rows = out_THD.shape, cache.k_BJD.shape[1], len(spans.start_R)
    queries = tokens // rows
    assert qkv.shape[-2:] == (tokens, (h + 2 * j) * d) and tokens == rows * queries
    assert rope.shape[1] == d and all(each.is_contiguous() for each in (qkv, rope, *cache, out_THD))
    assert path_RB is None or (queries == 1 and path_RB.is_contiguous() and tables.tail_R is not None)
    paths = None if path_RB is None else RowPaths(path_RB, path_RB.shape[1])
    new = queries if paths is None else paths.width
    arguments = (qkv, cache, rope, *table_arguments(tables), spans, paths, out_THD, norm, qkv.shape[-1] * tokens)
    splits, block = len(qkv) if qkv.dim() == 3 else 1, max(LEAST_Y, triton.next_power_of_2(new))
    return arguments, {"Q": queries, "H": h, "J": j, "D": d, "SPLITS": splits, "BLOCK_Q": block}


@triton.jit
def rotated(
    at_Z, position_Z, rope, d, split_stride, norm, eps, mask_Z,
    D: tl.constexpr, SPLITS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Load heads [Z, D] at `at_Z`, normalise and rotate them for their tokens' positions. Arithmetic is float32. Inputs
    are rounded as an unsplit product would be, and results are rounded once more."""
    # The other half of a head's dimensions: (x, y) -> (x cos - y sin, y cos + x sin).
    other, mask = (d + D // 2) % D, mask_Z[:, None]
    angle = rope + position_Z.to(tl.int64)[:, None] * D + d % (D // 2)
    cos, sin = tl.load(angle), tl.load(angle + D // 2)
    x_ZD = sum_parts(at_Z[:, None] + d, split_stride, mask, SPLITS).to(DTYPE).to(tl.float32)
    y_ZD = sum_parts(at_Z[:, None] + other, split_stride, mask, SPLITS).to(DTYPE).to(tl.float32)
    if norm is not None:
        scale_Z = tl.rsqrt(pair_sum(x_ZD * x_ZD) / D + eps)[:, None]
        x_ZD *= scale_Z * tl.load(norm + d).to(tl.float32)
        y_ZD *= scale_Z * tl.load(norm + other).to(tl.float32)
    return (x_ZD * cos + y_ZD * tl.where(d < D // 2, -sin, sin)).to(DTYPE)


@one_variant("qkv", "cache", "rope", "tables", "out", "norm", "split_stride")
def _step_kernel(
    qkv, cache, rope, tables, pages, spans, paths, out, norm, split_stride,
    Q: tl.constexpr, H: tl.constexpr, J: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_Y: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Compute the attention of BLOCK_Y queries of a row and key/value head to all positions that the row holds, shared
    or not."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    WIDTH: tl.constexpr = (H + 2 * J) * D
    EACH: tl.constexpr = H // J
    SCALE: tl.constexpr = D**-0.5 * LOG2_E
    # One new key is compared by elementwise products, several by tensor cores.
    ALONE: tl.constexpr = Q == 1 and paths is None
    KEYS: tl.constexpr = 1 if ALONE else BLOCK_Q
    j, r, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    y, i = tile * BLOCK_Y + tl.arange(0, BLOCK_Y), tl.arange(0, KEYS)
    p, d = tl.arange(0, BLOCK_P), tl.arange(0, D)[None, :]
    start, count = tl.load(spans.start_R + r), tl.load(spans.count_R + r)
    table, tail, tail_start = row_tables(r, tables, pages)
    # The row's new positions begin at `fresh`; the program stores those from `start` on, which the row runs itself.
    fresh = start
    if paths is not None:
        fresh = tail_start
    held, query_Y = tl.where(count > 0, fresh, 0), y // EACH
    real_Y, new_Q = query_Y < count, i < tl.where(count > 0, start - fresh + count, 0)
    begin = 0
    if WINDOW:
        # Positions that the program's first query does not see are seen by none of its queries.
        begin = tl.maximum(0, start + tile * BLOCK_Y // EACH - (WINDOW - 1)) // BLOCK_P * BLOCK_P
    page = page_at(begin + p, begin + p < held, table, tail, tail_start, tables, pages)
    here_Q = page_at(fresh + i, new_Q & (fresh + i >= start), table, tail, tail_start, tables, pages)
    position_Y, position_Q = tl.where(real_Y, start + query_Y, 0), tl.where(new_Q, fresh + i, 0)
    token_Q = r.to(tl.int64) * Q + i
    if paths is not None:
        token_Q = tl.load(paths.row_RB + r * paths.width + i, mask=new_Q, other=0).to(tl.int64)
    if PDL:
        gdc_wait()
    row = qkv + r.to(tl.int64) * (Q * WIDTH)
    at_Y, at_Q = row + query_Y * WIDTH + (j * EACH + y % EACH) * D, qkv + token_Q * WIDTH + (H + j) * D
    if norm is not None:
        q_YD = rotated(at_Y, position_Y, rope, d, split_stride, norm.q, norm.eps, real_Y, D, SPLITS, DTYPE)
        k_QD = rotated(at_Q, position_Q, rope, d, split_stride, norm.k, norm.eps, new_Q, D, SPLITS, DTYPE)
    else:
        q_YD = rotated(at_Y, position_Y, rope, d, split_stride, None, 0.0, real_Y, D, SPLITS, DTYPE)
        k_QD = rotated(at_Q, position_Q, rope, d, split_stride, None, 0.0, new_Q, D, SPLITS, DTYPE)
    v_QD = sum_parts((at_Q + J * D)[:, None] + d, split_stride, new_Q[:, None], SPLITS).to(DTYPE)
    # The dummy page keeps its content: a masked position must not read a NaN.
    to_QD, stored = (here_Q.to(tl.int64) * J + j)[:, None] * D + d, (here_Q != 0)[:, None] & (tile == 0)
    tl.store(cache.k_BJD + to_QD, k_QD, mask=stored)
    tl.store(cache.v_BJD + to_QD, v_QD, mask=stored)
    if ALONE:
        m_Y = tl.sum(q_YD.to(tl.float32) * k_QD.to(tl.float32), 1) * SCALE
        l_Y = tl.full([BLOCK_Y], 1.0, tl.float32)
        acc_YD = tl.zeros([BLOCK_Y, D], tl.float32) + v_QD.to(tl.float32)
    else:
        m_Y, l_Y = tl.full([BLOCK_Y], LOWEST, tl.float32), tl.zeros([BLOCK_Y], tl.float32)
        last_Y = start - fresh + query_Y
        acc_YD, visible_YQ = tl.zeros([BLOCK_Y, D], tl.float32), (i[None, :] <= last_Y[:, None]) & real_Y[:, None]
        if WINDOW:
            visible_YQ &= i[None, :] > last_Y[:, None] - WINDOW
        m_Y, l_Y, acc_YD = take_in(q_YD, k_QD, v_QD, visible_YQ, True, m_Y, l_Y, acc_YD, SCALE)
    for p0 in tl.range(begin, held, BLOCK_P, num_stages=STAGES):
        at_LD = (page.to(tl.int64) * J + j)[:, None] * D + d
        k_LD, v_LD = tl.load(cache.k_BJD + at_LD), tl.load(cache.v_BJD + at_LD)
        # Pages are loaded one tile ahead: otherwise the pipeline would spend its depth on this load before it could
        # start the loads of keys and values.
        next_p = p0 + BLOCK_P + p
        page = page_at(next_p, next_p < held, table, tail, tail_start, tables, pages)
        visible_YL = (p0 + p < held)[None, :]
        if WINDOW:
            visible_YL &= (p0 + p)[None, :] > position_Y[:, None] - WINDOW
        m_Y, l_Y, acc_YD = take_in(q_YD, k_LD, v_LD, visible_YL, True, m_Y, l_Y, acc_YD, SCALE)
    if PDL:
        gdc_launch_dependents()
    out_YD = tl.where(real_Y[:, None], acc_YD / tl.where(real_Y, l_Y, 1.0)[:, None], 0.0)
    out_Y = (r.to(tl.int64) * Q + query_Y) * H + j * EACH + y % EACH
    tl.store(out + out_Y[:, None] * D + d, out_YD.to(DTYPE), mask=(y < Q * EACH)[:, None])
