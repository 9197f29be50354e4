"""Attention over short contexts in one launch, as `smc.attention.step`, with sums in the order of
`smc.attention.fixed_order`: rotates queries and keys of new tokens, stores their keys and values, and computes the
attention of every row.

Local axes: Y queries with their heads for one key/value head (query, head). T = R * Q tokens stand row after row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smc.attention.fixed_order import FixedTiling, first_tile, nothing, walk, write_output
from smc.attention.step import rotated, step_arguments
from smc.kernels.launch import launch_options, one_variant
from smc.kernels.norm import sum_parts
from smc.kernels.packed_rows import CacheTensors, HeadNorms, page_at, row_tables
from smc.round.tensors import RowSpans, RowTables


def step_attention_fixed(
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
    tiling: FixedTiling | None = None,
    pdl: bool = False,
) -> None:
    """As `smc.attention.step.step_attention`. `tiling`: by default `FixedTiling.choose`."""
    (_, h, d), j, rows = out_THD.shape, cache.k_BJD.shape[1], len(spans.start_R)
    queries = len(out_THD) // rows
    y = queries * h // j
    tune = tiling or FixedTiling.choose(1, 1, queries, (h, j), d, cache.k_BJD.dtype)
    arguments, constants = step_arguments(qkv, cache, rope, tables, spans, out_THD, norm, path_RB)
    _fixed_step_kernel[(j, rows, triton.cdiv(y, tune.block_x))](
        *arguments, **constants, BLOCK_Y=tune.block_x, BLOCK_P=tune.block_p, UNIT=tune.unit, STAGES=tune.stages,
        WINDOW=window or 0, num_warps=tune.warps, enable_fp_fusion=False, **launch_options(pdl),
    )  # fmt: skip


@one_variant("qkv", "cache", "rope", "tables", "out", "norm", "split_stride")
def _fixed_step_kernel(
    qkv, cache, rope, tables, pages, spans, paths, out, norm, split_stride,
    Q: tl.constexpr, H: tl.constexpr, J: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_Y: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_P: tl.constexpr, UNIT: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the attention of BLOCK_Y queries of a row and key/value head to all positions that the row holds, shared
    or not."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    WIDTH: tl.constexpr = (H + 2 * J) * D
    EACH: tl.constexpr = H // J
    # A single new key needs no block of its own.
    KEYS: tl.constexpr = 1 if Q == 1 and paths is None else BLOCK_Q
    j, r, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    y, i, d = tile * BLOCK_Y + tl.arange(0, BLOCK_Y), tl.arange(0, KEYS), tl.arange(0, D)[None, :]
    start, count = tl.load(spans.start_R + r), tl.load(spans.count_R + r)
    table, tail, tail_start = row_tables(r, tables, pages)
    # The row's new positions begin at `fresh`; others may run those before `start`.
    fresh = start
    if paths is not None:
        fresh = tail_start
    real_Y, new_Q = y // EACH < count, i < tl.where(count > 0, start - fresh + count, 0)
    here_Q = page_at(fresh + i, new_Q, table, tail, tail_start, tables, pages)
    position_Y, position_Q = tl.where(real_Y, start + y // EACH, 0), tl.where(new_Q, fresh + i, 0)
    token_Q = r.to(tl.int64) * Q + i
    if paths is not None:
        token_Q = tl.load(paths.row_RB + r * paths.width + i, mask=new_Q, other=0).to(tl.int64)
    if PDL:
        gdc_wait()
    row = qkv + r.to(tl.int64) * (Q * WIDTH)
    at_Y, at_Q = row + y // EACH * WIDTH + (j * EACH + y % EACH) * D, qkv + token_Q * WIDTH + (H + j) * D
    if norm is not None:
        q_YD = rotated(at_Y, position_Y, rope, d, split_stride, norm.q, norm.eps, real_Y, D, SPLITS, DTYPE)
        k_QD = rotated(at_Q, position_Q, rope, d, split_stride, norm.k, norm.eps, new_Q, D, SPLITS, DTYPE)
    else:
        q_YD = rotated(at_Y, position_Y, rope, d, split_stride, None, 0.0, real_Y, D, SPLITS, DTYPE)
        k_QD = rotated(at_Q, position_Q, rope, d, split_stride, None, 0.0, new_Q, D, SPLITS, DTYPE)
    v_QD = sum_parts((at_Q + J * D)[:, None] + d, split_stride, new_Q[:, None], SPLITS).to(DTYPE)
    # The dummy page keeps its content: a masked position must not read a NaN. All programs that store a position store
    # the same numbers, and each reads its own.
    to_QD, stored = (here_Q.to(tl.int64) * J + j)[:, None] * D + d, (here_Q != 0)[:, None]
    tl.store(cache.k_BJD + to_QD, k_QD, mask=stored)
    tl.store(cache.v_BJD + to_QD, v_QD, mask=stored)
    tl.debug_barrier()
    position_Y = tl.where(real_Y, start + y // EACH, -1)
    part, query = walk(
        q_YD, position_Y, nothing(BLOCK_Y, D), nothing(BLOCK_Y, D),
        first_tile(start + tile * BLOCK_Y // EACH, BLOCK_P, WINDOW), tl.max(position_Y, 0) + 1, 0, cache,
        table, tail, tail_start, tables, pages, j, J, D, BLOCK_P, UNIT, STAGES, WINDOW, True,
    )  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    write_output(out, part, query, real_Y, y, r, j, Q, EACH, J, D)
