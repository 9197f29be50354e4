"""y = x W^T for the few rows of a decoding step, at the speed at which weights stream from memory.

Weights are of x's type, or FP8 (e4m3) with a float32 scale for each output: these are widened to x's type in registers (by way of fp16 and
fp32, which the machine does in pairs; its own fp16 to bf16 goes one by one), multiplied as such, and the sum is scaled. bf16 holds every
e4m3 number, and every x that there is, where fp16 would end at 65,504. The machine's copy engine (TMA) fetches their tiles: loads of
threads would be of 8 bytes each.

The weight tile is the long side of the tensor cores' product (M = outputs, N = tokens), so 8 tokens cost little more than the
loads. Small matrices are cut along K as well (split-K) to occupy every multiprocessor; the fp32 partials [S, T, N] are summed in
a fixed order by whoever reads them (`smc.kernels.norm`, or `reduce` here), without atomics: the same bits every time.
Nothing reads the host, and grids follow from shapes alone. `pdl`: `smc.kernels.pdl`.

Axes: T tokens, K inputs, N outputs, I inner features, S splits of K.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from smc.kernels.pdl import launch_options

FP8 = torch.float8_e4m3fn

_PROGRAMS = 120
"""Fewest programs that occupy an H200's 132 multiprocessors well enough."""


COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class Tiling:
    """How a product is cut and pipelined."""

    block_n: int
    """Outputs a program; 64 or more for Hopper's matrix instructions."""
    block_k: int
    """Inputs a step; divides K."""
    splits: int
    """Parts of K."""
    warps: int
    stages: int
    """Steps whose loads are in flight or in use."""


def choose(tokens: int, outputs: int, inputs: int, gated: bool = False, fp8: bool = False) -> Tiling:
    """Tiling for [tokens, inputs] x [outputs, inputs]^T: the fewest splits that make enough equal programs."""
    # Of those tried on an H200 (`python -m tests.gpu.bench_products`). FP8: a step of twice as many inputs, and more programs, since they
    # wait more than they load (8B shape, down for 48 tokens: 64 tiles in 4 parts 22.6 us, 32 in 4 27.8).
    wide = outputs >= 64 * 1024 or (gated and (outputs >= 24 * 1024 or (fp8 and 32 < tokens <= 64)))
    # Beyond 128 tokens widened weights of more outputs do not fit the registers beside the sums.
    block_n = 128 if (wide and tokens <= 64) or 64 < tokens <= (128 if fp8 else 256) else 64
    warps = 8 if tokens > 64 else 4
    programs = _PROGRAMS * (2 if tokens <= 16 else 1.5) if fp8 and tokens <= 64 else _PROGRAMS
    largest = 16384 if fp8 and tokens <= 64 else 8192
    sizes = (256, 128, 64, 32, 16) if fp8 and gated and tokens <= 32 else (128, 64, 32, 16)
    block_k = next(size for size in sizes if inputs % size == 0 and size * block_n <= largest)
    tiles, steps = triton.cdiv(outputs, block_n), inputs // block_k
    possible = [splits for splits in range(1, 17) if steps % splits == 0]
    splits = 1 if gated else next((splits for splits in possible if tiles * splits >= programs), possible[-1])
    stage_bytes = block_k * (block_n * (1 if fp8 else 2) + 2 * _token_block(tokens))
    # Two programs share a multiprocessor's 227 KiB.
    return Tiling(block_n, block_k, splits, warps, stages=max(2, min(6, 110 * 1024 // stage_bytes)))


def linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    splits: int | None = None,
    bias_N: Tensor | None = None,
    dtype: torch.dtype | None = None,
    pdl: bool = False,
    scale_N: Tensor | None = None,
    **tunables: int,
) -> Tensor:
    """x W^T (+ bias): partials [S, T, N] in float32, or with one split the result [T, N] in `dtype` (default: that of x).

    `scale_N` comes with an FP8 weight. `splits` and `tunables` (fields of `Tiling`) override `choose`.
    """
    tiling = _tiling(x_TK, weight_NK, splits, tunables, gated=False)
    tokens, outputs = len(x_TK), len(weight_NK)
    whole = tiling.splits == 1
    out = x_TK.new_empty(
        (tokens, outputs) if whole else (tiling.splits, tokens, outputs), dtype=(dtype or x_TK.dtype) if whole else torch.float32
    )
    grid = (triton.cdiv(outputs, tiling.block_n), tiling.splits)
    _launch(grid, x_TK, (weight_NK, scale_N, bias_N), out, outputs, tiling, GATED=False, PDL=pdl)
    return out


def gate_up_silu(x_TK: Tensor, weight: Tensor, pdl: bool = False, scale: Tensor | None = None, **tunables: int) -> Tensor:
    """silu(x G^T) * (x U^T) [T, I] in x's type; `weight` [2I, K] holds G, then U, and `scale` [2I] comes with an FP8 one.

    A program computes matching rows of both."""
    tiling = _tiling(x_TK, weight, 1, tunables, gated=True)
    inner = weight.shape[0] // 2
    out_TI = x_TK.new_empty((x_TK.shape[0], inner))
    grid = (triton.cdiv(inner, tiling.block_n // 2), 1)
    _launch(grid, x_TK, (weight, scale, None), out_TI, inner, tiling, GATED=True, PDL=pdl)
    return out_TI


def reduce(
    parts_STN: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    block: int = 512,
    warps: int = 2,
    pdl: bool = False,
    out_TN: Tensor | None = None,
) -> Tensor:
    """Sum of partials in their order, [T, N]."""
    splits, tokens, outputs = parts_STN.shape
    out_TN = parts_STN.new_empty((tokens, outputs), dtype=dtype) if out_TN is None else out_TN
    size = tokens * outputs
    _reduce[(triton.cdiv(size, block),)](
        parts_STN, out_TN, size, SPLITS=splits, BLOCK=block, PDL=pdl, num_warps=warps, **launch_options(pdl)
    )
    return out_TN


def _token_block(tokens: int) -> int:
    return max(16, triton.next_power_of_2(tokens))


def _tiling(x_TK: Tensor, weight_NK: Tensor, splits: int | None, tunables: dict[str, int], gated: bool) -> Tiling:
    (tokens, inputs), outputs = x_TK.shape, weight_NK.shape[0]
    fp8 = weight_NK.dtype == FP8
    tiling = replace(choose(tokens, outputs, inputs, gated, fp8), **tunables, **({} if splits is None else {"splits": splits}))
    if weight_NK.shape[1] != inputs or not weight_NK.is_contiguous() or x_TK.stride(1) != 1:
        raise ValueError(f"needs x [T, K] and a contiguous weight [N, K]; got {x_TK.shape=}, {weight_NK.shape=}, {weight_NK.stride()=}")
    if inputs % (tiling.block_k * tiling.splits) or (gated and tiling.splits != 1):
        raise ValueError(f"block_k * splits must divide K={inputs}, and a gated product has one split; got {tiling}")
    return tiling


def _launch(
    grid: tuple, x_TK: Tensor, matrix: tuple[Tensor, Tensor | None, Tensor | None], out: Tensor, outputs: int, tiling: Tiling, **flags: bool
) -> None:
    """`matrix`: weight, scale, bias."""
    (tokens, inputs), (weight, scale, bias) = x_TK.shape, matrix
    flags |= {"HAS_BIAS": bias is not None}
    bias = weight if bias is None else bias
    sizes = {"BLOCK_T": _token_block(tokens), "BLOCK_N": tiling.block_n, "BLOCK_K": tiling.block_k}
    options = {"num_warps": tiling.warps, "num_stages": tiling.stages, **launch_options(flags["PDL"])}
    steps = {"STEPS": inputs // tiling.block_k // tiling.splits, "STAGES": tiling.stages}
    if scale is None:
        _linear[grid](x_TK, weight, bias, out, tokens, outputs, inputs, x_TK.stride(0), **steps, **sizes, **flags, **options)
        return
    parts = 2 if flags["GATED"] else 1
    tiles = TensorDescriptor.from_tensor(weight.view(parts, -1, inputs), [parts, tiling.block_n // parts, tiling.block_k])
    x_tiles = TensorDescriptor.from_tensor(x_TK, [sizes["BLOCK_T"], tiling.block_k])
    _widened[grid](x_tiles, tiles, weight, scale, bias, out, tokens, outputs, inputs, **steps, **sizes, **flags, **options)


@triton.jit
def _rows(tile, outputs, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Rows of the weight that a tile has. Gated: half a tile of gate rows and the same half of up rows, `outputs` apart. Past the end it is
    the last one; what comes of that is not stored."""
    row = tl.arange(0, BLOCK_N)
    HALF: tl.constexpr = BLOCK_N // 2
    if GATED:
        return tl.minimum(tile * HALF + row % HALF, outputs - 1) + tl.where(row < HALF, 0, outputs)
    return tl.minimum(tile * BLOCK_N + row, outputs - 1)


@triton.jit
def _linear(
    x, weight, bias, out, tokens, outputs, inputs, stride_x, STEPS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of outputs over one part of K, of a weight of x's type."""
    tile, split = tl.program_id(0), tl.program_id(1)
    t, k = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    n, start = _rows(tile, outputs, BLOCK_N, GATED), split * (STEPS * BLOCK_K)
    if PDL:
        gdc_wait()
    weight_at = weight + n[:, None].to(tl.int64) * inputs + (start + k)[None, :]
    x_at = x + t[:, None] * stride_x + (start + k)[None, :]
    sum_NT = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for _ in tl.range(0, STEPS, num_stages=STAGES):
        weight_NK = tl.load(weight_at, eviction_policy="evict_first")
        x_TK = tl.load(x_at, mask=(t < tokens)[:, None], other=0.0, eviction_policy="evict_last")
        sum_NT = tl.dot(weight_NK, tl.trans(x_TK), sum_NT)
        weight_at += BLOCK_K
        x_at += BLOCK_K
    if PDL:
        gdc_launch_dependents()
    _finish(sum_NT, bias, out, tokens, outputs, BLOCK_T, BLOCK_N, HAS_BIAS, GATED)


@triton.jit
def _widened(
    x_tiles, tiles, weight, scale, bias, out, tokens, outputs, inputs, STEPS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same of an FP8 weight. `tiles` [1 or 2, N or I, K] and `x_tiles` are what the machine's copy engine fetches the weight and x by;
    past their ends it finds zeros."""
    tile, split = tl.program_id(0), tl.program_id(1)
    n, start = _rows(tile, outputs, BLOCK_N, GATED), split * (STEPS * BLOCK_K)
    ROWS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    if PDL:
        gdc_wait()
    sum_NT = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        weight_NK = tl.reshape(tiles.load([0, tile * ROWS, start + step * BLOCK_K]), (BLOCK_N, BLOCK_K))
        x_TK = x_tiles.load([0, start + step * BLOCK_K])
        weight_NK = weight_NK.to(tl.float16).to(tl.float32).to(x_TK.dtype)
        sum_NT = tl.dot(weight_NK, tl.trans(x_TK), sum_NT)
        if COMPILED:
            # A use of the sums, so that the product ends here: else the next weights are widened into registers that it still reads.
            sum_NT = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [sum_NT], dtype=tl.float32, is_pure=True, pack=1)
    sum_NT *= tl.load(scale + n)[:, None]
    if PDL:
        gdc_launch_dependents()
    _finish(sum_NT, bias, out, tokens, outputs, BLOCK_T, BLOCK_N, HAS_BIAS, GATED)


@triton.jit
def _finish(
    sum_NT, bias, out, tokens, outputs,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Store the sums of a tile: with the bias, or gated."""
    tile, split, t = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK_T)
    HALF: tl.constexpr = BLOCK_N // 2
    if GATED:
        gate_NT, up_NT = tl.split(tl.permute(tl.reshape(sum_NT, (2, HALF, BLOCK_T)), (1, 2, 0)))
        out_NT = gate_NT * tl.sigmoid(gate_NT) * up_NT
        n = tile * HALF + tl.arange(0, HALF)
    else:
        out_NT = sum_NT
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        if HAS_BIAS:
            shift_N = tl.load(bias + n, mask=(n < outputs) & (split == 0), other=0.0).to(tl.float32)
            out_NT += shift_N[:, None]
    out_at = out + (split * tokens + t)[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(out_at, tl.trans(out_NT).to(out.dtype.element_ty), mask=(t < tokens)[:, None] & (n < outputs)[None, :])


@triton.jit
def _reduce(parts, out, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts + at, mask=at < size, other=0.0)
    for s in tl.static_range(1, SPLITS):
        total += tl.load(parts + s * size + at, mask=at < size, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)
