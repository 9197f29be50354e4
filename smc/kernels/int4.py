"""Matrix products with int4 weights (`smc.model.linear`): for few tokens in one kernel, for many by widening the
weights for the library's product.

For few tokens, a program computes some outputs. Each step reads one group of inputs: it loads the words, which are
adjacent in memory, widens the codes less their zero points to x's type, which is exact, and multiplies them with x in
one product. It multiplies the sums by the group's scale and adds them up in float32. Instructions for bfloat16 widen
two neighbouring inputs at a time. That needs both words of a pair in one thread, which
`tests/kernels/compile_rounds.py` checks. Splits are as in `smc.kernels.linear`. The host reads nothing, and grids
follow from shapes. `pdl`: `smc.kernels.launch`.

Local axes: Y pairs of words."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smc.kernels.launch import launch_options, one_variant
from smc.kernels.linear import SHARED_ROOM, ProductTiling, choose_splits, rows_of_tile, store_sums, with_bias
from smc.model import quantisation
from smc.model.linear import Linear

MOST_TOKENS = 128
"""Maximum number of tokens of `linear_int4`: for more, widening all weights is faster."""
MOST_BLOCK = 64
"""Maximum number of tokens of a program. More tokens are divided among several programs, each of which widens the
weights again."""
SYMMETRIC_ZERO = tl.constexpr(quantisation.SYMMETRIC_ZERO)
PACKS = tl.constexpr(not triton.knobs.runtime.interpret)


def _packed_codes() -> str:
    """Return instructions that turn a pair of words ($8, $9) and the negative of their zero point, as two bfloat16 less
    128 in $10, into eight registers of two neighbouring codes each, less the zero point. The bits of a code become the
    last bits of the mantissa of 128 (0x4300). The addition is an instruction that compute capability 8.0 has, too."""
    lines = [".reg .b32 code, one;", "mov.b32 one, 0x3F803F80;"]
    for code in range(8):
        word, shift = f"${8 + code // 4}", 4 * (code % 4)
        if shift:
            lines.append(f"shr.u32 code, {word}, {shift};")
        lines.append(f"lop3.b32 code, {'code' if shift else word}, 0x000F000F, 0x43004300, 0xEA;")
        lines.append(f"fma.rn.bf16x2 ${code}, code, one, $10;")
    return "{\n" + "\n".join(lines) + "\n}"


PACKED_CODES = tl.constexpr(_packed_codes())
FIXED_PROGRAMS = 256
"""Number of programs for which the inputs are divided if their sums have one order."""
_WIDENED = 1 << 26
"""Number of weights that are widened at a time."""


def choose_int4(
    tokens: int, outputs: int, inputs: int, group: int, *, zeros: bool, gated: bool = False, fixed: bool = False
) -> ProductTiling:
    """Return the tiling for [tokens, inputs] x [outputs, inputs]^T: the fewest splits that make enough programs to keep
    memory busy. It is the best of those tried on an H200 (`python -m benchmarks.int4 products`). `fixed`: as
    `token_block`."""
    block_t = token_block(tokens, group, fixed=fixed)
    block_n, warps, programs = (64, 2, 768) if block_t == 8 else (128, 4, 320) if block_t == 16 else (128, 8, 256)
    # With the larger blocks, these products were faster with 4 warps; products without zero points were not.
    if warps == 8 and (gated if group < 128 else zeros):
        warps = 4
    tiles = triton.cdiv(tokens, block_t) * triton.cdiv(outputs, block_n)
    splits = 1 if gated else choose_splits(tiles, inputs // group, programs)
    # In flight: words, x, scales and zero points. Widened weights that do not stay in registers need shared memory,
    # too.
    stage_bytes = group * (block_n // 2 + 2 * block_t) + 4 * block_n
    stages = min(3, (SHARED_ROOM - 2 * group * block_n) // stage_bytes)
    return ProductTiling(block_n, group, splits, warps, stages=max(2, stages))


def token_block(tokens: int, group: int, *, fixed: bool = False) -> int:
    """Return the tokens of a program, padded. Words of smaller groups stay in registers only if tensor cores take 16
    tokens. `fixed`: the sums of a token have one order, whatever the number of tokens. For 8 tokens the compiler takes
    other instructions, and gives them the widened inputs in another order."""
    return min(MOST_BLOCK, max(8 if group >= 128 and not fixed else 16, triton.next_power_of_2(tokens)))


def linear_int4(
    x_TI: Tensor,
    matrix: Linear,
    splits: int | None = None,
    dtype: torch.dtype | None = None,
    pdl: bool = False,
    **tunables: int,
) -> Tensor:
    """Return x W^T (+ bias): partials [P, T, O] in float32, or with one split the result [T, O] in `dtype` (default:
    that of x). `splits` and `tunables` (fields of `ProductTiling`, without `block_k`) override `choose_int4`. Raises
    ValueError for more than `MOST_TOKENS` tokens, and for splits that do not divide the groups."""
    tokens, outputs, groups = len(x_TI), matrix.out_features, matrix.in_features // matrix.group
    tiling = replace(
        choose_int4(tokens, outputs, matrix.in_features, matrix.group, zeros=matrix.zero is not None), **tunables
    )
    splits = splits or tiling.splits
    if groups % splits:
        raise ValueError(f"splits must divide the {groups} groups of K={matrix.in_features}; got {splits}")
    shape = (tokens, outputs) if splits == 1 else (splits, tokens, outputs)
    out = x_TI.new_empty(shape, dtype=(dtype or x_TI.dtype) if splits == 1 else torch.float32)
    _require_few(x_TI)
    block_t = token_block(tokens, matrix.group)
    _launch(x_TI, matrix, out, outputs, Parts(splits, 1), tiling, block_t, pdl, GATED=False, GELU=False)
    return out


def linear_int4_fixed(
    x_TI: Tensor, matrix: Linear, splits: int | None = None, dtype: torch.dtype | None = None, pdl: bool = False
) -> Tensor:
    """As `linear_int4`, for any number of tokens: the sum of the partials of a token, rounded to `dtype`, does not
    depend on the others (`smc.kernels.fixed_order`)."""
    tokens, outputs, inputs = len(x_TI), matrix.out_features, matrix.in_features
    splits = splits or fixed_splits(outputs, inputs, matrix.group)
    tiling = choose_int4(tokens, outputs, inputs, matrix.group, zeros=matrix.zero is not None, fixed=True)
    block_t = token_block(tokens, matrix.group, fixed=True)
    tiles = triton.cdiv(tokens, block_t) * triton.cdiv(outputs, tiling.block_n)
    grid_splits = 1 if tiles >= FIXED_PROGRAMS else splits
    shape = (tokens, outputs) if grid_splits == 1 else (splits, tokens, outputs)
    out = x_TI.new_empty(shape, dtype=(dtype or x_TI.dtype) if grid_splits == 1 else torch.float32)
    parts = Parts(grid_splits, splits // grid_splits)
    _launch(x_TI, matrix, out, outputs, parts, tiling, block_t, pdl, GATED=False, GELU=False)
    return out


def fixed_splits(outputs: int, inputs: int, group: int) -> int:
    """Return the number of parts of the inputs, whatever the number of tokens."""
    return choose_splits(triton.cdiv(outputs, 128), inputs // group, FIXED_PROGRAMS)


def gate_up_int4(
    x_TI: Tensor,
    matrix: Linear,
    gelu: bool = False,
    dtype: torch.dtype | None = None,
    pdl: bool = False,
    fixed: bool = False,
    **tunables: int,
) -> Tensor:
    """Return silu(x G^T) * (x U^T) [T, I], with `gelu` GELU instead of silu, in `dtype` as above, for any number of
    tokens; `matrix` holds G, then U. `fixed`: a token's result does not depend on the others.

    A program computes matching rows of both."""
    tokens, inner, group = len(x_TI), matrix.out_features // 2, matrix.group
    out_TI = x_TI.new_empty((tokens, inner), dtype=dtype or x_TI.dtype)
    zeros = matrix.zero is not None
    chosen = choose_int4(tokens, inner, matrix.in_features, group, zeros=zeros, gated=True, fixed=fixed)
    tiling, block_t = replace(chosen, **tunables), token_block(tokens, group, fixed=fixed)
    _launch(x_TI, matrix, out_TI, inner, Parts(1, 1), tiling, block_t, pdl, GATED=True, GELU=gelu)
    return out_TI


def multiply_widened(x_TI: Tensor, matrix: Linear, out_TO: Tensor | None = None) -> Tensor:
    """Return x W^T (+ bias) [T, O] for many tokens: the weights are widened to x's type, some rows at a time, for the
    library's product."""
    if out_TO is None:
        out_TO = x_TI.new_empty(len(x_TI), matrix.out_features)
    step = max(1, _WIDENED // matrix.in_features)
    for begin in range(0, matrix.out_features, step):
        rows = slice(begin, min(matrix.out_features, begin + step))
        torch.mm(x_TI, widened(matrix, rows, x_TI.dtype).t(), out=out_TO[:, rows])
    return out_TO if matrix.bias is None else out_TO.add_(matrix.bias)


def widened(matrix: Linear, rows: slice, dtype: torch.dtype) -> Tensor:
    """Return some of the weight's rows [O, I] in a dtype, as `Linear.values` does, in one launch."""
    outputs, group, groups = rows.stop - rows.start, matrix.group, matrix.in_features // matrix.group
    out_OI = matrix.weight.new_empty((outputs, matrix.in_features), dtype=dtype)
    _widened[(triton.cdiv(outputs, 64), groups)](
        matrix.weight, matrix.scale, matrix.zero, out_OI, rows.start, outputs, matrix.in_features, matrix.out_features,
        BLOCK_N=64, GROUP=group, num_warps=4,
    )  # fmt: skip
    return out_OI


class Parts(NamedTuple):
    """How the inputs of a product are divided."""

    programs: int
    """Number of programs among which they are divided."""
    each: int
    """Number of parts that each of these adds up."""


def _launch(
    x_TI: Tensor,
    matrix: Linear,
    out: Tensor,
    outputs: int,
    parts: Parts,
    tiling: ProductTiling,
    block_t: int,
    pdl: bool,
    **flags: bool,
) -> None:
    tokens, inputs = x_TI.shape
    if inputs != matrix.in_features or x_TI.stride(1) != 1:
        raise ValueError(
            f"needs x [T, {matrix.in_features}] of tokens with contiguous numbers; got {x_TI.shape=}, {x_TI.stride()=}"
        )
    rows = tiling.block_n // 2 if flags["GATED"] else tiling.block_n
    # Programs of the same weights are neighbours, so that the second may find the weights in the L2 cache.
    _int4[(triton.cdiv(tokens, block_t), triton.cdiv(outputs, rows), parts.programs)](
        x_TI, matrix.weight, matrix.scale, matrix.zero, matrix.bias, out, tokens, outputs, x_TI.stride(0),
        STEPS=inputs // matrix.group // (parts.programs * parts.each), PARTS=parts.each, STAGES=tiling.stages,
        BLOCK_T=block_t, BLOCK_N=tiling.block_n, GROUP=matrix.group, num_warps=tiling.warps, enable_fp_fusion=False,
        **flags, **launch_options(pdl),
    )  # fmt: skip


def _require_few(x_TI: Tensor) -> None:
    if len(x_TI) > MOST_TOKENS:
        raise ValueError(f"needs x of at most {MOST_TOKENS} tokens; got {x_TI.shape=}")


@triton.jit
def widen(word_OW, zero_O, kind: tl.constexpr):
    """Return the codes of words [O, W], less their zero point, as [O, 8 W] numbers of type `kind`, in which both are
    exact."""
    OUTPUTS: tl.constexpr = word_OW.shape[0]
    W: tl.constexpr = word_OW.shape[1]
    # On a GPU a pair of words is widened at a time; from here to the tensor cores, two of their codes share a register.
    # A conversion from integers takes four times as long.
    if PACKS and kind == tl.bfloat16:
        negative_OW = tl.broadcast_to(((zero_O | 0xC300) * 0x10001)[:, None], word_OW.shape)
        code = tl.inline_asm_elementwise(
            PACKED_CODES, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r", [word_OW, negative_OW],
            dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        first_OY, second_OY = tl.split(tl.reshape(word_OW, (OUTPUTS, W // 2, 2)))
        code = (
            _code(first_OY, zero_O, 0, kind), _code(first_OY, zero_O, 4, kind),
            _code(first_OY, zero_O, 8, kind), _code(first_OY, zero_O, 12, kind),
            _code(second_OY, zero_O, 0, kind), _code(second_OY, zero_O, 4, kind),
            _code(second_OY, zero_O, 8, kind), _code(second_OY, zero_O, 12, kind),
        )  # fmt: skip
    even = tl.join(tl.join(code[0], code[4]), tl.join(code[2], code[6]))
    odd = tl.join(tl.join(code[1], code[5]), tl.join(code[3], code[7]))
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 4, 1)), (OUTPUTS, 8 * W))


@triton.jit
def _code(word_OY, zero_O, shift: tl.constexpr, kind: tl.constexpr):
    """Return the codes at a bit and 16 bits higher, less the zero point [O, 2 Y]."""
    pair_OY2 = tl.join((word_OY >> shift) & 15, (word_OY >> (shift + 16)) & 15)
    return (tl.reshape(pair_OY2, (word_OY.shape[0], 2 * word_OY.shape[1])) - zero_O[:, None]).to(kind)


@triton.jit
def sums_of_groups(
    words, scales, zeros, at_O, outputs, x_T, has_x_T,
    STEPS, STAGES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return products [O, T] over STEPS groups. `at_O`: index of each output's words, scale and zero point in the first
    of them; those of the next group are `outputs` further on. `x_T`: addresses of rows of x, at that group's first
    input."""
    kind: tl.constexpr = x_T.dtype.element_ty
    word_at = words_at(words, at_O, GROUP)
    x_at = x_T[:, None] + tl.arange(0, GROUP)[None, :]
    scale_at = scales + at_O
    if zeros is not None:
        zero_at = zeros + at_O
    # The compiler prefetches words, zero points and x some steps ahead, but not numbers of two bytes, so scales are
    # fetched one step ahead here. If they were fetched two steps ahead, it would prefetch nothing. Zero points have
    # four bytes so that they are prefetched.
    scale_O = tl.load(scale_at)
    sum_OT = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        word_OW = tl.load(word_at, eviction_policy="evict_first")
        x_TI = tl.load(x_at, mask=has_x_T[:, None], other=0.0, eviction_policy="evict_last")
        if zeros is not None:
            zero_O = tl.load(zero_at)
            zero_at += outputs
        else:
            zero_O = tl.full((BLOCK_N,), SYMMETRIC_ZERO, tl.int32)
        next_scale_O = tl.load(scale_at + tl.minimum(step + 1, STEPS - 1) * outputs)
        part_OT = tl.dot(widen(word_OW, zero_O, kind), tl.trans(x_TI), input_precision="ieee")
        sum_OT += part_OT * scale_O.to(tl.float32)[:, None]
        scale_O = next_scale_O
        word_at += outputs * (GROUP // 8)
        x_at += GROUP
    return sum_OT


@triton.jit
def words_at(words, at_O, GROUP: tl.constexpr):
    """Return the addresses [O, W] of the words of an output and a group each."""
    return words + at_O.to(tl.int64)[:, None] * (GROUP // 8) + tl.arange(0, GROUP // 8)[None, :]


@one_variant("x", "weight", "scale", "zero", "bias", "out", "outputs", "stride_x")
def _int4(
    x, weight, scale, zero, bias, out, tokens, outputs, stride_x,
    STEPS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one tile of outputs of some tokens, over PARTS parts of K one after another."""
    t0, tile, split = tl.program_id(0) * BLOCK_T, tl.program_id(1), tl.program_id(2)
    t, n = t0 + tl.arange(0, BLOCK_T), rows_of_tile(tile, outputs, BLOCK_N, GATED)
    rows = outputs * 2 if GATED else outputs
    x_T = x + t.to(tl.int64) * stride_x
    if PDL:
        gdc_wait()
    total_OT = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for part in tl.range(0, PARTS, num_stages=1):
        first = (split + part) * STEPS
        sum_OT = sums_of_groups(
            weight, scale, zero, first * rows + n, rows, x_T + first * GROUP, t < tokens,
            STEPS, STAGES, BLOCK_T, BLOCK_N, GROUP,
        )  # fmt: skip
        if PARTS == 1:
            total_OT = sum_OT
        else:
            total_OT += with_bias(sum_OT, bias, n, part == 0)
    if PDL:
        gdc_launch_dependents()
    if PARTS == 1:
        store_sums(total_OT, bias, out, t0, tokens, outputs, BLOCK_N, BLOCK_T, GATED, GELU)
    else:
        store_sums(total_OT, None, out, t0, tokens, outputs, BLOCK_N, BLOCK_T, GATED, GELU)


@one_variant("weight", "scale", "zero", "out", "inputs", "all_outputs")
def _widened(weight, scale, zero, out, start, outputs, inputs, all_outputs, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Widen one group of some rows, from row `start` on."""
    n, group = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1)
    at_O = group * all_outputs + start + tl.minimum(n, outputs - 1)
    word_OW = tl.load(words_at(weight, at_O, GROUP))
    if zero is not None:
        zero_O = tl.load(zero + at_O)
    else:
        zero_O = tl.full((BLOCK_N,), SYMMETRIC_ZERO, tl.int32)
    value_OI = widen(word_OW, zero_O, tl.float32) * tl.load(scale + at_O).to(tl.float32)[:, None]
    out_at = out + n[:, None].to(tl.int64) * inputs + (group * GROUP + tl.arange(0, GROUP))[None, :]
    tl.store(out_at, value_OI.to(out.dtype.element_ty), mask=(n < outputs)[:, None])
