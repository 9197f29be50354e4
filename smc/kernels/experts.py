"""Experts for few tokens: chooses the experts of each token and computes both products of all experts, reading each
expert's weights once.

A program computes some outputs of one expert. It multiplies their weights with all tokens of its block, and stores the
results of the tokens that chose the expert; nothing is sorted, and experts that no token chose are not read. The
results of a token's choices are partial sums [P, T, E] in float32, which the next kernel adds in their order
(`smc.kernels.norm`): the same bits every time. Weights in a narrower type than the activations', int4 among them
(`smc.kernels.int4`), are widened in registers. The host reads nothing. `pdl`: `smc.kernels.launch`.

Local axes: P chosen experts of a token, Y pairs of a token and an expert, Z experts."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smc.kernels.fixed_order import linear_fixed
from smc.kernels.int4 import choose_int4, sums_of_groups, token_block, widened
from smc.kernels.launch import launch_options, one_variant
from smc.kernels.linear import rows_of_tile
from smc.kernels.norm import gated
from smc.model.decoder import Choice, Experts
from smc.model.linear import Linear

MOST_TOKENS = 64
"""Maximum number of tokens of a program; for more tokens, further programs read the weights again."""


def experts(module: Experts, x_TE: Tensor, pdl: bool = False) -> Tensor:
    """Return the experts' result as partial sums [P, T, E] in float32."""
    return chosen_experts(module, x_TE, choose(module.router(x_TE), module.chosen, module.normalised, pdl), None, pdl)


def experts_fixed(module: Experts, x_TE: Tensor, pdl: bool = False) -> Tensor:
    """As `experts`, for any number of tokens. A token's result does not depend on the others, because all products add
    up input after input, and a router's product has one part (`smc.kernels.fixed_order`)."""
    logits_TZ = linear_fixed(x_TE, module.router.weight, splits=1, pdl=pdl)
    choice = choose(logits_TZ, module.chosen, module.normalised, pdl)
    blocks = None if len(x_TE) <= MOST_TOKENS else sort_by_expert(choice.expert_TP, module.count)
    return chosen_experts(module, x_TE, choice, blocks, pdl, fixed=True)


class ExpertBlocks(NamedTuple):
    """Pairs of a token and an expert, sorted by expert, in blocks of up to `MOST_TOKENS` pairs of one expert. There is
    room for the most blocks that there may be."""

    order_Y: Tensor
    """Pairs, expert after expert."""
    expert_W: Tensor
    first_W: Tensor
    """First pair of each block."""
    end_W: Tensor
    """End of the pairs of the block's expert; 0 for a block that does not exist."""


def sort_by_expert(expert_TP: Tensor, count: int) -> ExpertBlocks:
    """Sort the chosen experts of tokens without waiting for the device."""
    expert_Y = expert_TP.flatten().long()
    size_Z = torch.zeros(count, dtype=torch.int64, device=expert_Y.device)
    size_Z = size_Z.scatter_add(0, expert_Y, torch.ones_like(expert_Y))
    end_Z, blocks_Z = size_Z.cumsum(0), (size_Z + MOST_TOKENS - 1) // MOST_TOKENS
    after_Z = blocks_Z.cumsum(0)
    block_W = torch.arange(len(expert_Y) // MOST_TOKENS + count, device=expert_Y.device)
    exists_W = block_W < after_Z[-1]
    expert_W = torch.searchsorted(after_Z, block_W, right=True).clamp(max=count - 1)
    first_W = (end_Z - size_Z)[expert_W] + (block_W - (after_Z - blocks_Z)[expert_W]) * MOST_TOKENS
    order_Y = expert_Y.argsort(stable=True)
    end_W = torch.where(exists_W, end_Z[expert_W], 0)
    return ExpertBlocks(order_Y.int(), expert_W.int(), first_W.int(), end_W.int())


def chosen_experts(
    module: Experts, x_TE: Tensor, choice: Choice, blocks: ExpertBlocks | None, pdl: bool = False, fixed: bool = False
) -> Tensor:
    """Return the outputs of the chosen experts [P, T, E]. `fixed`: as in `smc.kernels.int4`; other weights always have
    one order of sums."""
    tokens, features = x_TE.shape
    inner_YI = x_TE.new_empty(tokens * module.chosen, module.inner)
    parts_PTE = x_TE.new_empty(module.chosen, tokens, features, dtype=torch.float32)
    _product(x_TE, module, module.gate_up, choice, blocks, inner_YI, pdl, fixed, UP=True)
    _product(inner_YI, module, module.down, choice, blocks, parts_PTE, pdl, fixed, UP=False)
    return parts_PTE


def choose(logits_TZ: Tensor, chosen: int, normalised: bool, pdl: bool = False) -> Choice:
    """Choose the likeliest experts of each token, as `Experts.choose` does."""
    tokens, count = logits_TZ.shape
    choice = Choice(
        logits_TZ.new_empty((tokens, chosen), dtype=torch.int32),
        logits_TZ.new_empty((tokens, chosen), dtype=torch.float32),
    )
    _choose[(tokens,)](
        logits_TZ, *choice, count, P=chosen, NORMALISED=normalised, BLOCK=triton.next_power_of_2(count), num_warps=1,
        enable_fp_fusion=False, **launch_options(pdl),
    )  # fmt: skip
    return choice


def grouped(x_TE: Tensor, module: Experts) -> Tensor:
    """Return the result of `module` for a prompt, as `Experts.grouped` does, with int4 weights widened in one
    launch."""
    return module.grouped(x_TE, module.choose(x_TE), _all_widened)


def _all_widened(matrix: Linear, dtype: torch.dtype) -> Tensor:
    rows = slice(0, matrix.out_features)
    return widened(matrix, rows, dtype) if matrix.group else matrix.values(rows, dtype)


def _product(
    x: Tensor,
    module: Experts,
    matrix: Linear,
    choice: Choice,
    blocks: ExpertBlocks | None,
    out: Tensor,
    pdl: bool,
    fixed: bool,
    UP: bool,
) -> None:
    expert_TP, weight_TP = choice
    tokens, chosen = expert_TP.shape
    outputs, inputs = (module.inner if UP else matrix.out_features // module.count), matrix.in_features
    wide = x.element_size() == 4
    if matrix.group:
        few = min(tokens, MOST_TOKENS)
        zeros = matrix.zero is not None
        tiling = choose_int4(few, outputs, inputs, matrix.group, zeros=zeros, gated=True, fixed=fixed)
        block_t = token_block(few, matrix.group, fixed=fixed)
        rows = tiling.block_n // 2 if UP else tiling.block_n
        grid = (module.count, triton.cdiv(outputs, rows), triton.cdiv(tokens, block_t))
        grid = grid if blocks is None else (len(blocks.expert_W), grid[1], 1)
        _experts_int4[grid](
            x, matrix.weight, matrix.scale, matrix.zero, expert_TP, weight_TP, blocks, out,
            tokens, outputs, inputs, matrix.out_features, STEPS=inputs // matrix.group,
            P=chosen, UP=UP, BLOCK_T=block_t, BLOCK_N=tiling.block_n, GROUP=matrix.group,
            STAGES=2 if wide else tiling.stages, num_warps=tiling.warps, enable_fp_fusion=False,
            **launch_options(pdl),
        )  # fmt: skip
        return
    block_t = max(16, min(MOST_TOKENS, triton.next_power_of_2(tokens)))
    block_n, block_k = (32 if wide else 64), min(32 if wide else 128, max(16, triton.next_power_of_2(inputs)))
    grid = (module.count, triton.cdiv(outputs, block_n), triton.cdiv(tokens, block_t))
    grid = grid if blocks is None else (len(blocks.expert_W), grid[1], 1)
    _experts[grid](
        x, matrix.weight, matrix.scale, expert_TP, weight_TP, blocks, out, tokens, outputs, inputs,
        P=chosen, UP=UP, BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=2 if wide else 3,
        num_warps=4, enable_fp_fusion=False, **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _choose(
    logits, expert, weight, count, P: tl.constexpr, NORMALISED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    t, x = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    logits_Z = tl.load(logits + t * count + x, mask=x < count, other=-float("inf")).to(tl.float32)
    share_Z = tl.exp(logits_Z - tl.max(logits_Z, 0))
    share_Z = tl.where(x < count, share_Z / tl.sum(share_Z, 0), -1.0)
    left_Z, total = share_Z, 0.0
    for _ in tl.static_range(P):
        best = tl.argmax(left_Z, 0)
        total += tl.max(left_Z, 0)
        left_Z = tl.where(x == best, -1.0, left_Z)
    if not NORMALISED:
        total = 1.0
    for c in tl.static_range(P):
        best = tl.argmax(share_Z, 0)
        tl.store(expert + t * P + c, best)
        tl.store(weight + t * P + c, tl.max(share_Z, 0) / total)
        share_Z = tl.where(x == best, -1.0, share_Z)


@one_variant("x", "weights", "scales", "out", "outputs", "inputs")
def _experts(
    x, weights, scales, expert, weight, blocks, out, tokens, outputs, inputs,
    P: tl.constexpr, UP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute outputs of one expert. UP: silu(gate) * up of tokens [T, inputs], to row t * P + c of `out`. Otherwise
    the product of rows t * P + c of x, weighted, to `out` [P, T, outputs]."""
    tile = tl.program_id(1)
    n, k = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    if PDL:
        gdc_wait()
    own, t, column_T, hit_T = _own_tokens(expert, blocks, tokens, P, BLOCK_T)
    if tl.max(hit_T, 0) == 0:
        return
    # Past the end the last row is used; its results are not stored.
    row = own.to(tl.int64) * (outputs * 2 if UP else outputs) + tl.minimum(n, outputs - 1)
    at_T = t.to(tl.int64) if UP else t.to(tl.int64) * P + column_T
    sum_OT, up_OT = tl.zeros((BLOCK_N, BLOCK_T), tl.float32), tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for k0 in tl.range(0, inputs, BLOCK_K, num_stages=STAGES):
        inside = k0 + k < inputs
        x_TI = tl.load(
            x + at_T[:, None] * inputs + (k0 + k)[None, :], mask=(hit_T > 0)[:, None] & inside[None, :], other=0.0
        )
        at_OI = weights + row[:, None] * inputs + (k0 + k)[None, :]
        weight_OI = tl.load(at_OI, mask=inside[None, :], other=0.0).to(x.dtype.element_ty)
        sum_OT = tl.dot(weight_OI, tl.trans(x_TI), sum_OT, input_precision="ieee")
        if UP:
            up_OI = tl.load(at_OI + outputs * inputs, mask=inside[None, :], other=0.0).to(x.dtype.element_ty)
            up_OT = tl.dot(up_OI, tl.trans(x_TI), up_OT, input_precision="ieee")
    if PDL:
        gdc_launch_dependents()
    if scales is not None:
        sum_OT *= tl.load(scales + row)[:, None]
        if UP:
            up_OT *= tl.load(scales + row + outputs)[:, None]
    if UP:
        sum_OT = gated(sum_OT, up_OT, out.dtype.element_ty, False)
    _store(sum_OT, weight, out, t, n, column_T, hit_T, tokens, outputs, P, UP)


@one_variant("x", "weights", "scales", "zeros", "out", "outputs", "inputs", "all_outputs")
def _experts_int4(
    x, weights, scales, zeros, expert, weight, blocks, out, tokens, outputs, inputs, all_outputs, STEPS,
    P: tl.constexpr, UP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `_experts`, for weights in int4. UP: a tile has rows of gate and as many of up."""
    tile = tl.program_id(1)
    HALF: tl.constexpr = BLOCK_N // 2
    if PDL:
        gdc_wait()
    own, t, column_T, hit_T = _own_tokens(expert, blocks, tokens, P, BLOCK_T)
    if tl.max(hit_T, 0) == 0:
        return
    row_O = own.to(tl.int64) * (outputs * 2 if UP else outputs) + rows_of_tile(tile, outputs, BLOCK_N, UP)
    at_T = t.to(tl.int64) if UP else t.to(tl.int64) * P + column_T
    sum_OT = sums_of_groups(
        weights, scales, zeros, row_O, all_outputs, x + at_T * inputs, hit_T > 0, STEPS, STAGES, BLOCK_T, BLOCK_N, GROUP
    )
    if PDL:
        gdc_launch_dependents()
    if UP:
        gate_OT, up_OT = tl.split(tl.permute(tl.reshape(sum_OT, (2, HALF, BLOCK_T)), (1, 2, 0)))
        n = tile * HALF + tl.arange(0, HALF)
        act_OT = gated(gate_OT, up_OT, out.dtype.element_ty, False)
        _store(act_OT, weight, out, t, n, column_T, hit_T, tokens, outputs, P, UP)
    else:
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        _store(sum_OT, weight, out, t, n, column_T, hit_T, tokens, outputs, P, UP)


@triton.jit
def _own_tokens(expert, blocks, tokens, P: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return this program's expert, its tokens, which of a token's choices the expert is, and 1 if it is one of
    them: of a block of tokens, or of one of `blocks`, all of whose tokens have chosen the expert."""
    column_T, hit_T = tl.zeros([BLOCK_T], tl.int32), tl.zeros([BLOCK_T], tl.int32)
    own, t = tl.program_id(0), tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    if blocks is not None:
        w = own
        y = tl.load(blocks.first_W + w) + tl.arange(0, BLOCK_T)
        hit_T = (y < tl.load(blocks.end_W + w)).to(tl.int32)
        pair = tl.load(blocks.order_Y + y, mask=hit_T > 0, other=0)
        own, t, column_T = tl.load(blocks.expert_W + w), pair // P, pair % P
    else:
        for c in tl.static_range(P):
            is_own_T = tl.load(expert + t * P + c, mask=t < tokens, other=-1) == own
            column_T, hit_T = tl.where(is_own_T, c, column_T), tl.where(is_own_T, 1, hit_T)
    return own, t, column_T, hit_T


@triton.jit
def _store(sum_OT, weight, out, t, n, column_T, hit_T, tokens, outputs, P: tl.constexpr, UP: tl.constexpr):
    """Store outputs of one expert for the tokens that chose it."""
    if UP:
        out_at = (t.to(tl.int64) * P + column_T) * outputs
    else:
        out_at = (column_T.to(tl.int64) * tokens + t) * outputs
        sum_OT = sum_OT * tl.load(weight + t * P + column_T, mask=hit_T > 0, other=0.0)[None, :]
    stored = (n < outputs)[:, None] & (hit_T > 0)[None, :]
    tl.store(out + out_at[None, :] + n[:, None], sum_OT.to(out.dtype.element_ty), mask=stored)
