"""Matrix products y = x W^T in which the sums of a token have one order, whatever the number of tokens beside it: the
same bits alone, in a tree, in a batch and in a prompt.

The inputs are cut into as many parts as few tokens need to occupy the GPU (`splits_of`: by the shape and type of the
weight alone). The products of a part are added by one instruction of the tensor cores, input after input, and the parts
one after another. Few tokens use the kernels of `smc.kernels.linear`, in which each program computes one part, and the
reader of the partial sums adds them. With many tokens there are enough programs without parts (`choose_many`): `_many`
computes all parts of a tile one after another and adds them itself, which gives the same sum. The sum is rounded only
as a whole.

The weight is always the first operand, 64 outputs of an instruction; the tokens are its second operand, whose number
the instructions take from 8 to 256 (`python -m benchmarks.invariance --parts instructions` shows that this changes no
bit). No compiler fuses the multiplications by scales with the additions of parts.

The host reads nothing, and grids follow from shapes alone. `pdl`: `smc.kernels.launch`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from smc.kernels.launch import MULTIPROCESSORS, launch_options, one_variant
from smc.kernels.linear import APART, choose, gate_up_silu, linear, room_of_product, store_tile, with_bias
from smc.kernels.norm import gated as gated_product
from smc.model.linear import QuantisedRows

FEW_TOKENS, FEW_FP8_TOKENS = 64, 512
"""Up to these numbers of tokens, the products of `smc.kernels.linear` are used."""
MIDDLING_TOKENS = 512
"""Up to this number of tokens, loading a weight in 16 bits takes about as long as multiplying by it, or longer."""
LONG_PART = 1024
"""Least inputs of a part whose sum waits in memory for the next part."""
ROOM = 200 * 1024
"""Bytes of shared memory for loads in flight of a program that has a multiprocessor to itself."""


@dataclass(frozen=True)
class ManyTiling:
    """Sizes of `_many` that change speed only."""

    block_t: int
    """Tokens of a program."""
    block_n: int
    """Rows of the weight of a program; half of them of the gate, if the product is gated."""
    block_k: int
    """Inputs of a step."""
    grid_splits: int
    """1: a program adds up all parts; otherwise the number of parts, each of a program of its own."""
    spills: bool
    """The sum of the parts so far waits in memory, which leaves the registers to a larger tile."""
    warps: int
    stages: int


def splits_of(outputs: int, inputs: int, gated: bool = False, fp8: bool = False) -> int:
    """Return the number of parts of the inputs of a product: the best for one token."""
    return choose(1, outputs, inputs, gated, fp8).splits


def choose_many(tokens: int, outputs: int, inputs: int, splits: int, gated: bool, fp8: bool) -> ManyTiling:
    """Return the tiling of `_many` for [tokens, inputs] x [outputs, inputs]^T."""
    if tokens <= MIDDLING_TOKENS and not gated and not fp8:
        return _choose_middling(tokens, outputs, inputs, splits)
    # Sums of parts that wait in memory pay if a part reads much more than it writes.
    spills = splits > 1 and tokens > 1024 and inputs // splits >= LONG_PART
    block_t = min(256 if splits == 1 or spills else 128, max(16, triton.next_power_of_2(tokens)))
    block_n = 128
    block_k = next(size for size in ((128, 64, 32) if fp8 else (64, 32, 16)) if inputs // splits % size == 0)
    rows = block_n // 2 if gated else block_n
    tiles = triton.cdiv(outputs, rows) * triton.cdiv(tokens, block_t)
    stage_bytes = (1 if fp8 else 2) * block_k * (block_n + block_t)
    return ManyTiling(
        block_t,
        block_n,
        block_k,
        grid_splits=1 if tiles >= MULTIPROCESSORS else splits,
        spills=spills and tiles >= MULTIPROCESSORS,
        warps=8 if block_t * block_n > 8192 else 4,
        stages=max(2, min(5, ROOM // stage_bytes)),
    )


def _choose_middling(tokens: int, outputs: int, inputs: int, splits: int) -> ManyTiling:
    """Return the tiling of `_many` for so few tokens that the weight's bytes take about as long as the arithmetic:
    small programs, several on each multiprocessor, of which some load while others multiply."""
    block_t, block_n = 64, 128
    block_k = next(size for size in (64, 32, 16) if inputs // splits % size == 0)
    tiles = triton.cdiv(outputs, block_n) * triton.cdiv(tokens, block_t)
    grid_splits = 1 if 2 * tiles >= 3 * MULTIPROCESSORS else splits
    # A multiprocessor has room for three programs of three stages, for two of four.
    stages = 4 if tiles * grid_splits <= 2 * MULTIPROCESSORS else 3
    return ManyTiling(block_t, block_n, block_k, grid_splits, spills=False, warps=4, stages=stages)


def linear_fixed(
    x: Tensor | QuantisedRows,
    weight_OI: Tensor,
    splits: int | None = None,
    bias_O: Tensor | None = None,
    dtype: torch.dtype | None = None,
    pdl: bool = False,
    scale_O: Tensor | None = None,
) -> Tensor:
    """As `smc.kernels.linear.linear`, for any number of tokens: partials [P, T, O] in float32, or the result [T, O] in
    `dtype`. Their sum, rounded to `dtype`, does not depend on the other tokens. Without `splits`, `splits_of` says how
    the inputs are cut."""
    x_TI, fp8 = (x.value_TI if isinstance(x, QuantisedRows) else x), isinstance(x, QuantisedRows)
    (tokens, inputs), outputs = x_TI.shape, len(weight_OI)
    splits = splits or splits_of(outputs, inputs, fp8=fp8)
    if tokens <= (FEW_FP8_TOKENS if fp8 else FEW_TOKENS):
        block_k = choose(tokens, outputs, inputs, fp8=fp8).block_k
        while inputs // splits % block_k:
            block_k //= 2
        return linear(x, weight_OI, splits, bias_O, dtype, pdl, scale_O, block_k=block_k)
    tiling = choose_many(tokens, outputs, inputs, splits, False, fp8)
    out = room_of_product(x, outputs, 1 if tiling.grid_splits == 1 else splits, dtype)
    _launch(x, (weight_OI, scale_O, bias_O), out, outputs, splits, tiling, pdl, GATED=False, GELU=False)
    return out


def gate_up_fixed(
    x: Tensor | QuantisedRows,
    weight: Tensor,
    pdl: bool = False,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    gelu: bool = False,
) -> Tensor:
    """As `smc.kernels.linear.gate_up_silu`, for any number of tokens; a token's result does not depend on the
    others."""
    x_TI, fp8 = (x.value_TI if isinstance(x, QuantisedRows) else x), isinstance(x, QuantisedRows)
    tokens, inputs = x_TI.shape
    if tokens <= (FEW_FP8_TOKENS if fp8 else FEW_TOKENS):
        return gate_up_silu(x, weight, pdl, scale, dtype, gelu)
    inner = weight.shape[0] // 2
    out_TI = room_of_product(x, inner, 1, dtype)
    tiling = choose_many(tokens, inner, inputs, 1, True, fp8)
    _launch(x, (weight, scale, None), out_TI, inner, 1, tiling, pdl, GATED=True, GELU=gelu)
    return out_TI


def _launch(
    x: Tensor | QuantisedRows,
    matrix: tuple[Tensor, Tensor | None, Tensor | None],
    out: Tensor,
    outputs: int,
    splits: int,
    tiling: ManyTiling,
    pdl: bool,
    **flags: bool,
) -> None:
    """`matrix`: weight, scale, bias."""
    weight, scale, bias = matrix
    x_TI, x_scale_T1 = x if isinstance(x, QuantisedRows) else (x, None)
    (tokens, inputs), rows = x_TI.shape, tiling.block_n // 2 if flags["GATED"] else tiling.block_n
    assert weight.is_contiguous() and x_TI.stride(1) == 1, "the copy engine reads rows of adjacent numbers"
    tiles = TensorDescriptor.from_tensor(weight, [rows, tiling.block_k])
    x_tiles = TensorDescriptor.from_tensor(x_TI, [tiling.block_t, tiling.block_k])
    grid = (triton.cdiv(tokens, tiling.block_t), triton.cdiv(outputs, rows), tiling.grid_splits)
    waiting = None
    if tiling.spills:
        waiting = out.new_empty(grid[0] * grid[1] * rows * tiling.block_t, dtype=torch.float32)
    _many[grid](
        x_tiles, tiles, x_scale_T1, scale, bias, out, waiting, tokens, outputs,
        PARTS=splits // tiling.grid_splits, STEPS=inputs // splits // tiling.block_k, BLOCK_T=tiling.block_t,
        ROWS=rows, BLOCK_K=tiling.block_k, STAGES=tiling.stages, num_warps=tiling.warps, enable_fp_fusion=False,
        **flags, **launch_options(pdl),
    )  # fmt: skip


@one_variant("x_tiles", "tiles", "x_scale", "scale", "bias", "out", "waiting", "outputs")
def _many(
    x_tiles, tiles, x_scale, scale, bias, out, waiting, tokens, outputs,
    PARTS: tl.constexpr, STEPS: tl.constexpr, BLOCK_T: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one tile of outputs, ROWS for BLOCK_T tokens: PARTS parts of the inputs one after another. The copy
    engine fetches x through `x_tiles` and the weight through `tiles`, as in `smc.kernels.linear`. `waiting`: room for
    the sum of the parts so far; None: registers hold it."""
    t0, tile, split = tl.program_id(0) * BLOCK_T, tl.program_id(1), tl.program_id(2)
    first = tile * ROWS
    if PDL:
        gdc_wait()
    tiles_at = (x_tiles, tiles, x_scale, scale, bias, t0, first, tokens, outputs)
    total_OT, up_OT = tl.zeros((ROWS, BLOCK_T), tl.float32), tl.zeros((ROWS, BLOCK_T), tl.float32)
    if PARTS == 1:
        total_OT, up_OT = _part(tiles_at, split, STEPS, BLOCK_T, ROWS, BLOCK_K, STAGES, GATED)
    elif waiting is None:
        for part in tl.range(0, PARTS, num_stages=1):
            sum_OT, _ = _part(tiles_at, part, STEPS, BLOCK_T, ROWS, BLOCK_K, STAGES, False)
            total_OT += sum_OT
    else:
        program = tile.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        at_OT = tl.arange(0, ROWS)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        at_OT += waiting + program * (ROWS * BLOCK_T)
        for part in tl.static_range(PARTS):
            total_OT, _ = _part(tiles_at, part, STEPS, BLOCK_T, ROWS, BLOCK_K, STAGES, False)
            # Every thread reads what it has stored.
            if part > 0:
                total_OT += tl.load(at_OT)
            if part < PARTS - 1:
                tl.store(at_OT, total_OT)
    if PDL:
        gdc_launch_dependents()
    if GATED:
        store_tile(
            gated_product(total_OT, up_OT, out.dtype.element_ty, GELU), None, out, t0, tokens, outputs, ROWS, BLOCK_T
        )
    else:
        store_tile(total_OT, None, out, t0, tokens, outputs, ROWS, BLOCK_T)


@triton.jit
def _part(
    tiles_at, part, STEPS: tl.constexpr, BLOCK_T: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Return the scaled sums of one part of the inputs, [ROWS, BLOCK_T], and those of up. The first part adds the
    bias, as if the parts had programs of their own."""
    x_tiles, tiles, x_scale, scale, bias, t0, first, tokens, outputs = tiles_at
    t, n = t0 + tl.arange(0, BLOCK_T), tl.minimum(first + tl.arange(0, ROWS), outputs - 1)
    sum_OT, up_OT = tl.zeros((ROWS, BLOCK_T), tl.float32), tl.zeros((ROWS, BLOCK_T), tl.float32)
    start = part * (STEPS * BLOCK_K)
    KIND: tl.constexpr = APART if scale is None else None
    for step in tl.range(0, STEPS, num_stages=STAGES):
        at = start + step * BLOCK_K
        x_IT = tl.trans(x_tiles.load([t0, at]))
        sum_OT = tl.dot(tiles.load([first, at]), x_IT, sum_OT, max_num_imprecise_acc=KIND)
        if GATED:
            up_OT = tl.dot(tiles.load([outputs + first, at]), x_IT, up_OT, max_num_imprecise_acc=KIND)
    if scale is not None:
        x_scale_1T = tl.load(x_scale + t, mask=t < tokens, other=0.0)[None, :]
        sum_OT *= tl.load(scale + n)[:, None] * x_scale_1T
        if GATED:
            up_OT *= tl.load(scale + outputs + n)[:, None] * x_scale_1T
    return with_bias(sum_OT, bias, n, part == 0), up_OT
