"""Matrix products y = x W^T for the few rows of a decoding step, at the speed at which weights stream from memory, and
their division into programs (by shapes alone).

Weights have x's type, or they are FP8 (e4m3) with a float32 scale for each output; then x is FP8, too, with a scale for
each token (`smc.kernels.norm`), and the sums are scaled. The GPU's copy engine (TMA) writes tiles of both to where
tensor cores read them, so that no thread holds any. If there are more tokens than a program takes, they are divided as
well, among adjacent programs.

The weight tile is the long side of the tensor cores' product (M = outputs, N = tokens), so 8 tokens cost little more
than the loads. Small matrices are also cut along I (split-K) to occupy every multiprocessor. The kernel that reads the
fp32 partials [P, T, O] sums them in a fixed order (`smc.kernels.norm`, or `reduce` here), without atomics: the same
bits every time. The host reads nothing, and grids follow from shapes alone. `pdl`: `smc.kernels.launch`.

Local axes: P splits of the inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from smc.kernels.launch import MULTIPROCESSORS, launch_options, one_variant
from smc.kernels.norm import gated as gated_product
from smc.kernels.norm import sum_parts
from smc.model.linear import QuantisedRows

MOST_TOKENS = 128
"""Maximum number of tokens of a program, in FP8."""
PROGRAMS = 120
"""Minimum number of programs that occupies all multiprocessors well enough."""
_ROOM, _MODEST_ROOM, SHARED_ROOM = 216 * 1024, 128 * 1024, 110 * 1024
"""Bytes of shared memory for loads in flight: of a program that has a multiprocessor to itself, of one that leaves some
to the next kernel, and of one of two programs on a multiprocessor."""
APART = tl.constexpr(1)
"""Value of `max_num_imprecise_acc` with which the compiler keeps a product of 16-bit numbers apart from an addition
after it. Otherwise it makes one instruction of both where a part has a single step, which begins with the bias, and so
rounds otherwise than parts of several steps. Only FP8 products have imprecise sums, which scales keep apart."""
FP8_CAPABILITIES = (9, 10)
"""Major compute capabilities of GPUs for whose tensor cores and shared memory FP8 products are tiled."""


@dataclass(frozen=True)
class ProductTiling:
    """Tiling and pipelining of a product."""

    block_n: int
    """Outputs of a program; 64 or more for Hopper's matrix instructions, 128 for a gated product in FP8."""
    block_k: int
    """Inputs of a step; divides K. FP8: 32 or more."""
    splits: int
    """Number of parts of K."""
    warps: int
    stages: int
    """Number of steps whose loads are in flight or in use."""


def choose(tokens: int, outputs: int, inputs: int, gated: bool = False, fp8: bool = False) -> ProductTiling:
    """Return the tiling for [tokens, inputs] x [outputs, inputs]^T: the fewest splits that make enough equal
    programs."""
    if fp8:
        return _choose_fp8(tokens, outputs, inputs, gated)
    # The best of those tried on an H200 (`python -m benchmarks.kernels products`), here and in `_choose_fp8`.
    wide = outputs >= 64 * 1024 or (gated and outputs >= 24 * 1024)
    block_n = 128 if (wide and tokens <= 64) or 64 < tokens <= 256 else 64
    block_k = next(size for size in (128, 64, 32, 16) if inputs % size == 0 and size * block_n <= 8192)
    splits = 1 if gated else choose_splits(triton.cdiv(outputs, block_n), inputs // block_k, PROGRAMS)
    stage_bytes = 2 * block_k * (block_n + token_block_of(tokens, fp8))
    # Two programs share a multiprocessor.
    return ProductTiling(
        block_n, block_k, splits, 8 if tokens > 64 else 4, stages=max(2, min(6, SHARED_ROOM // stage_bytes))
    )


def _choose_fp8(tokens: int, outputs: int, inputs: int, gated: bool) -> ProductTiling:
    token_block = token_block_of(tokens, fp8=True)
    # The largest matrices have enough outputs for all programs that the GPU needs. With other matrices, programs of few
    # tokens wait more than they load, and partial sums of few tokens are read quickly; with 96 tokens, programs of few
    # outputs are better if they then need no partial sums.
    wide, many, most = gated or outputs >= 64 * 1024, token_block > 64, token_block == MOST_TOKENS
    if wide:
        block_n = 256 if most or (many and triton.cdiv(outputs, 256) >= PROGRAMS) else 128
    else:
        block_n = 128 if most or (many and triton.cdiv(outputs, 64) < PROGRAMS) else 64
    tiles = triton.cdiv(outputs, block_n) * triton.cdiv(tokens, token_block)
    one_each = tiles <= MULTIPROCESSORS
    if many:
        largest = 256 if block_n == 64 and one_each else 128
    else:
        largest = 128 if wide and token_block > (32 if one_each else 16) else 256
    block_k = next((size for size in (256, 128, 64) if inputs % size == 0 and size <= largest), 32)
    steps, enough = inputs // block_k, PROGRAMS if many else 192 if token_block == 64 else 96
    splits = 1 if wide else choose_splits(tiles, steps, enough)
    alone = tiles * splits <= MULTIPROCESSORS or block_n == 256
    room = (_ROOM if many else _MODEST_ROOM) if alone else SHARED_ROOM
    stages = min(room // (block_k * (block_n + token_block)), max(2, steps // splits), 6)
    return ProductTiling(block_n, block_k, splits, 8 if token_block * block_n > 16384 else 4, stages=max(2, stages))


def choose_splits(tiles: int, steps: int, programs: int) -> int:
    possible = [splits for splits in range(1, 17) if steps % splits == 0]
    return next((splits for splits in possible if tiles * splits >= programs), possible[-1])


def token_blocks_of(tokens: int, fp8: bool) -> tuple[int, int]:
    """Return the tokens of a program, padded, as powers of two that are multiplied one after the other; the second may
    be 0. In FP8 they are half of the power of two that holds all tokens, and a quarter of it, if these suffice."""
    block = max(16, triton.next_power_of_2(tokens))
    if not fp8:
        return block, 0
    if 64 <= block <= MOST_TOKENS and 4 * tokens <= 3 * block:
        return block // 2, block // 4
    return min(MOST_TOKENS, block), 0


def token_block_of(tokens: int, fp8: bool) -> int:
    """Return the tokens of a program, padded."""
    return sum(token_blocks_of(tokens, fp8))


def multiplies_fp8(device: torch.device) -> bool:
    """Return whether the tilings of FP8 suit a device: GPUs with as much shared memory as Hopper's, whose matrix
    instructions read it, and the interpreter."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in FP8_CAPABILITIES


def linear(
    x: Tensor | QuantisedRows,
    weight_OI: Tensor,
    splits: int | None = None,
    bias_O: Tensor | None = None,
    dtype: torch.dtype | None = None,
    pdl: bool = False,
    scale_O: Tensor | None = None,
    **tunables: int,
) -> Tensor:
    """Return x W^T (+ bias): partials [P, T, O] in float32, or with one split the result [T, O] in `dtype` (default:
    that of x [T, I], or bfloat16).

    An FP8 weight needs its scale, and x is `QuantisedRows`. `splits` and `tunables` (fields of `ProductTiling`)
    override `choose`."""
    x_TI = _numbers(x)
    tiling = _tiling(x_TI, weight_OI, splits, tunables, gated=False)
    outputs = len(weight_OI)
    out = room_of_product(x, outputs, tiling.splits, dtype)
    _launch(x, (weight_OI, scale_O, bias_O), out, outputs, tiling, pdl, GATED=False, GELU=False)
    return out


def gate_up_silu(
    x: Tensor | QuantisedRows,
    weight: Tensor,
    pdl: bool = False,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    gelu: bool = False,
    **tunables: int,
) -> Tensor:
    """Return silu(x G^T) * (x U^T) [T, I], with `gelu` GELU instead of silu, in `dtype` as above; `weight` [2I, I]
    holds G, then U. An FP8 weight needs its `scale` [2I], and x is `QuantisedRows`.

    A program computes matching rows of both."""
    x_TI = _numbers(x)
    tiling = _tiling(x_TI, weight, 1, tunables, gated=True)
    inner = weight.shape[0] // 2
    out_TI = room_of_product(x, inner, 1, dtype)
    _launch(x, (weight, scale, None), out_TI, inner, tiling, pdl, GATED=True, GELU=gelu)
    return out_TI


def _numbers(x: Tensor | QuantisedRows) -> Tensor:
    return x.value_TI if isinstance(x, QuantisedRows) else x


def room_of_product(x: Tensor | QuantisedRows, outputs: int, splits: int, dtype: torch.dtype | None) -> Tensor:
    """Allocate a product's result [T, O], by default in x's type or, for FP8, in bfloat16; with several splits partial
    sums [splits, T, O] in float32."""
    x_TI = _numbers(x)
    if splits > 1:
        return x_TI.new_empty((splits, len(x_TI), outputs), dtype=torch.float32)
    default = torch.bfloat16 if isinstance(x, QuantisedRows) else x.dtype
    return x_TI.new_empty((len(x_TI), outputs), dtype=dtype or default)


def reduce(parts_PTO: Tensor, out_TO: Tensor, pdl: bool = False) -> Tensor:
    """Write the sum of partials in their order to `out_TO`, and return it."""
    size, block = out_TO.numel(), 512
    _reduce[(triton.cdiv(size, block),)](
        parts_PTO, out_TO, size, SPLITS=len(parts_PTO), BLOCK=block, num_warps=2, **launch_options(pdl)
    )
    return out_TO


def _tiling(
    x_TI: Tensor, weight_OI: Tensor, splits: int | None, tunables: dict[str, int], gated: bool
) -> ProductTiling:
    (tokens, inputs), outputs = x_TI.shape, weight_OI.shape[0]
    fits = weight_OI.shape[1] == inputs and weight_OI.dtype == x_TI.dtype
    if not (fits and weight_OI.is_contiguous() and x_TI.stride(1) == 1):
        raise ValueError(
            f"needs x [T, I] and a contiguous weight [O, I] of one type; got {x_TI.shape=}, {x_TI.dtype=}, "
            f"{weight_OI.shape=}, {weight_OI.stride()=}, {weight_OI.dtype=}"
        )
    fp8 = weight_OI.element_size() == 1
    tiling = replace(choose(tokens, outputs, inputs, gated, fp8), **tunables)
    if splits is not None:
        tiling = replace(tiling, splits=splits)
    if inputs % (tiling.block_k * tiling.splits) or (gated and tiling.splits != 1):
        raise ValueError(f"block_k * splits must divide K={inputs}, and a gated product has one split; got {tiling}")
    return tiling


def _launch(
    x: Tensor | QuantisedRows,
    matrix: tuple[Tensor, Tensor | None, Tensor | None],
    out: Tensor,
    outputs: int,
    tiling: ProductTiling,
    pdl: bool,
    **flags: bool,
) -> None:
    """`matrix`: weight, scale, bias."""
    x_TI, (weight, scale, bias) = _numbers(x), matrix
    (tokens, inputs), rows = x_TI.shape, tiling.block_n // 2 if flags["GATED"] else tiling.block_n
    block_t, more_t = token_blocks_of(tokens, isinstance(x, QuantisedRows))
    options = {
        "STEPS": inputs // tiling.block_k // tiling.splits, "STAGES": tiling.stages, "BLOCK_T": block_t,
        "BLOCK_N": tiling.block_n, "BLOCK_K": tiling.block_k, "num_warps": tiling.warps, "num_stages": tiling.stages,
        # So that `smc.kernels.fixed_order`, which adds a bias and a scaled sum elsewhere, gives the same bits.
        "enable_fp_fusion": False,
    } | flags | launch_options(pdl)  # fmt: skip
    # Programs of the same weights start one after another, so that one of them reads the weights from memory.
    grid = (triton.cdiv(tokens, block_t + more_t), triton.cdiv(outputs, rows), tiling.splits)
    if isinstance(x, QuantisedRows):
        tiles = TensorDescriptor.from_tensor(weight, [rows, tiling.block_k])
        x_tiles, more_tiles = (
            TensorDescriptor.from_tensor(x_TI, [block or block_t, tiling.block_k]) for block in (block_t, more_t)
        )
        scales = (x.scale_T1, scale)
        _rounded[grid](x_tiles, more_tiles, tiles, *scales, bias, out, tokens, outputs, MORE_T=more_t, **options)
    else:
        _linear[grid](x_TI, weight, bias, out, tokens, outputs, inputs, x_TI.stride(0), **options)


@triton.jit
def rows_of_tile(tile, outputs, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Return the rows of the weight that a tile covers. Gated: half a tile of gate rows and the same half of up rows,
    `outputs` apart. Past the end it is the last row, whose results are not stored."""
    row = tl.arange(0, BLOCK_N)
    HALF: tl.constexpr = BLOCK_N // 2
    if GATED:
        return tl.minimum(tile * HALF + row % HALF, outputs - 1) + tl.where(row < HALF, 0, outputs)
    return tl.minimum(tile * BLOCK_N + row, outputs - 1)


@one_variant("x", "weight", "bias", "out", "outputs", "inputs", "stride_x")
def _linear(
    x, weight, bias, out, tokens, outputs, inputs, stride_x, STEPS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one tile of outputs over one part of the inputs, for a weight of x's type."""
    tile, split = tl.program_id(1), tl.program_id(2)
    t, k = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    n, start = rows_of_tile(tile, outputs, BLOCK_N, GATED), split * (STEPS * BLOCK_K)
    if PDL:
        gdc_wait()
    weight_at = weight + n[:, None].to(tl.int64) * inputs + (start + k)[None, :]
    x_at = x + t[:, None] * stride_x + (start + k)[None, :]
    sum_OT = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for _ in tl.range(0, STEPS, num_stages=STAGES):
        weight_OI = tl.load(weight_at, eviction_policy="evict_first")
        x_TI = tl.load(x_at, mask=(t < tokens)[:, None], other=0.0, eviction_policy="evict_last")
        sum_OT = tl.dot(weight_OI, tl.trans(x_TI), sum_OT, max_num_imprecise_acc=APART)
        weight_at += BLOCK_K
        x_at += BLOCK_K
    if PDL:
        gdc_launch_dependents()
    store_sums(sum_OT, bias, out, 0, tokens, outputs, BLOCK_N, BLOCK_T, GATED, GELU)


@one_variant("x_tiles", "more_tiles", "tiles", "x_scale", "scale", "bias", "out", "outputs")
def _rounded(
    x_tiles, more_tiles, tiles, x_scale, scale, bias, out, tokens, outputs, STEPS: tl.constexpr,
    BLOCK_T: tl.constexpr, MORE_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `_linear` for FP8, for BLOCK_T tokens and MORE_T after them. The copy engine fetches x through `x_tiles` and
    `more_tiles`, and the weight through `tiles`. Past their ends it reads zeros; past the end of the gate it reads the
    first rows of up, whose results are not stored."""
    t0, tile, split = tl.program_id(0) * (BLOCK_T + MORE_T), tl.program_id(1), tl.program_id(2)
    ROWS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    first, start = tile * ROWS, split * (STEPS * BLOCK_K)
    n = tl.minimum(first + tl.arange(0, ROWS), outputs - 1)
    scale_O, up_scale_O = tl.load(scale + n), tl.load(scale + outputs + n) if GATED else 0.0
    if PDL:
        gdc_wait()
    sum_OT, up_OT = tl.zeros((ROWS, BLOCK_T), tl.float32), tl.zeros((ROWS, BLOCK_T), tl.float32)
    if MORE_T:
        more_OT, more_up_OT = tl.zeros((ROWS, MORE_T), tl.float32), tl.zeros((ROWS, MORE_T), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        at = start + step * BLOCK_K
        x_IT, weight_OI = tl.trans(x_tiles.load([t0, at])), tiles.load([first, at])
        sum_OT = tl.dot(weight_OI, x_IT, sum_OT)
        if MORE_T:
            more_IT = tl.trans(more_tiles.load([t0 + BLOCK_T, at]))
            more_OT = tl.dot(weight_OI, more_IT, more_OT)
        if GATED:
            up_OI = tiles.load([outputs + first, at])
            up_OT = tl.dot(up_OI, x_IT, up_OT)
            if MORE_T:
                more_up_OT = tl.dot(up_OI, more_IT, more_up_OT)
    if PDL:
        gdc_launch_dependents()
    _store_scaled(
        sum_OT, up_OT, scale_O, up_scale_O, x_scale, bias, out, t0, tokens, outputs, ROWS, BLOCK_T, GATED, GELU
    )
    if MORE_T:
        t0 += BLOCK_T
        _store_scaled(
            more_OT, more_up_OT, scale_O, up_scale_O, x_scale, bias, out, t0, tokens, outputs,
            ROWS, MORE_T, GATED, GELU,
        )  # fmt: skip


@triton.jit
def _store_scaled(
    sum_OT, up_OT, scale_O, up_scale_O, x_scale, bias, out, t0, tokens, outputs,
    ROWS: tl.constexpr, BLOCK_T: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """Store the sums of an FP8 product times the scales of both sides; gated, the two sums combined."""
    t = t0 + tl.arange(0, BLOCK_T)
    x_scale_1T = tl.load(x_scale + t, mask=t < tokens, other=0.0)[None, :]
    sum_OT *= scale_O[:, None] * x_scale_1T
    if GATED:
        up_OT *= up_scale_O[:, None] * x_scale_1T
        store_tile(
            gated_product(sum_OT, up_OT, out.dtype.element_ty, GELU), None, out, t0, tokens, outputs, ROWS, BLOCK_T
        )
    else:
        store_tile(sum_OT, bias, out, t0, tokens, outputs, ROWS, BLOCK_T)


@triton.jit
def store_sums(
    sum_OT, bias, out, t0, tokens, outputs,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """Store a tile's sums for tokens from t0 on. Gated: the tile has gate rows and then as many up rows, which combine
    to half as many outputs."""
    HALF: tl.constexpr = BLOCK_N // 2
    if GATED:
        gate_OT, up_OT = tl.split(tl.permute(tl.reshape(sum_OT, (2, HALF, BLOCK_T)), (1, 2, 0)))
        store_tile(
            gated_product(gate_OT, up_OT, out.dtype.element_ty, GELU), None, out, t0, tokens, outputs, HALF, BLOCK_T
        )
    else:
        store_tile(sum_OT, bias, out, t0, tokens, outputs, BLOCK_N, BLOCK_T)


@triton.jit
def store_tile(out_OT, bias, out, t0, tokens, outputs, ROWS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Store a tile of this program's outputs for tokens from t0 on; the first split adds the bias, unless it is
    None."""
    t, n = t0 + tl.arange(0, BLOCK_T), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    if bias is not None:
        shift_O = tl.load(bias + n, mask=(n < outputs) & (split == 0), other=0.0).to(tl.float32)
        out_OT += shift_O[:, None]
    out_at = out + (split * tokens + t)[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(out_at, tl.trans(out_OT).to(out.dtype.element_ty), mask=(t < tokens)[:, None] & (n < outputs)[None, :])


@triton.jit
def with_bias(sum_OT, bias, n, adds):
    """Return the sums of outputs `n`, plus the bias if `adds` and unless it is None: as `store_tile` adds it to the
    first part."""
    if bias is not None:
        shift_O = tl.load(bias + n, mask=(n >= 0) & adds, other=0.0).to(tl.float32)
        sum_OT += shift_O[:, None]
    return sum_OT


@triton.jit
def _reduce(parts, out, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = sum_parts(parts + at, size, at < size, SPLITS)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)
