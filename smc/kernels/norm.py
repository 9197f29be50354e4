"""The element-wise steps between a layer's matrix products: residual add with RMSNorm, the gated activation, and the
rounding of activations to FP8 with a scale for each row (`smc.model.linear.quantise_rows` in one launch).

The first takes a product's result as a whole or as fp32 split-K partials, which are summed in their order: the same
bits every time. The host reads nothing, and grids follow from shapes alone. `pdl`: `smc.kernels.launch`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smc.kernels.launch import launch_options
from smc.model import linear
from smc.model.linear import FP8, QuantisedRows

LARGEST = tl.constexpr(linear.FP8_MAX)
"""Largest FP8 number."""


def round_rows(x_TI: Tensor, pdl: bool = False) -> QuantisedRows:
    """Round rows of x to FP8, with a scale for each. There may be gaps between rows. Raises ValueError if the numbers
    of a row are not adjacent."""
    tokens, inputs = x_TI.shape
    if x_TI.stride(1) != 1:
        raise ValueError(f"needs rows of contiguous numbers, got strides {x_TI.stride()}")
    out, block = room(x_TI), triton.next_power_of_2(inputs)
    warps = max(1, min(16, block // 256))
    _round_rows[(tokens,)](x_TI, *out, inputs, x_TI.stride(0), BLOCK=block, num_warps=warps, **launch_options(pdl))
    return out


def room(x_TI: Tensor) -> QuantisedRows:
    """Allocate FP8 rows and scales for x."""
    return QuantisedRows(x_TI.new_empty(x_TI.shape, dtype=FP8), x_TI.new_empty((len(x_TI), 1), dtype=torch.float32))


@triton.jit
def _round_rows(x, out, scale, inputs, stride_x, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = k < inputs
    x_I = tl.load(x + token * stride_x + k, mask=inside, other=0.0).to(tl.float32)
    store_rounded(x_I, out + token * inputs + k, scale + token, inside)


@triton.jit
def store_rounded(x_I, at_I, scale_at, inside):
    """Store a rounded row, whose columns outside are zeros, and its scale. The scale is NaN if a number is not finite,
    because the GPU's maximum and clamp would hide that."""
    magnitude_I = tl.abs(x_I)
    size = tl.max(tl.where(magnitude_I < float("inf"), magnitude_I, float("inf")), 0) / LARGEST
    # Clamped to the largest number: dividing by an approximate size may slightly exceed it.
    rounded_I = tl.clamp(x_I / tl.where(size > 0, size, 1.0), -LARGEST, LARGEST)
    tl.store(at_I, rounded_I.to(at_I.dtype.element_ty), mask=inside)
    tl.store(scale_at, tl.where(size < float("inf"), size, float("nan")))


class Residual(NamedTuple):
    """Variations of families that differ from Llama in how parts are added to x."""

    out_weight_E: Tensor | None = None
    """Weights of an RMSNorm of the parts' sum."""
    factor: float = 1.0
    """Factor of what is added to x."""
    norm_offset: float = 0.0
    """Offset that is added to the weights of all norms."""


PLAIN = Residual()


def add_norm(
    x_TE: Tensor,
    parts: Tensor | None,
    weight_E: Tensor | None,
    eps: float,
    pdl: bool = False,
    residual: Residual = PLAIN,
) -> Tensor:
    """Add the sum of `parts` to x, in place. Returns RMSNorm(x) * weight [T, E] in the weight's type (fp32 arithmetic),
    or without a weight a copy of x.

    `parts` is None, one tensor [T, E] or partials [P, T, E]. Their sum is rounded to x's type, as an unsplit product
    is. The norm is that of x as stored, rounded to its type. With `pdl` and parts, the previous launch must not write
    x."""
    out_TE = torch.empty_like(x_TE, dtype=x_TE.dtype if weight_E is None else weight_E.dtype)
    _launch_add_norm(x_TE, parts, weight_E, eps, (out_TE, None), pdl, residual)
    return out_TE


def add_norm_rounded(
    x_TE: Tensor,
    parts: Tensor | None,
    weight_E: Tensor | None,
    eps: float,
    pdl: bool = False,
    residual: Residual = PLAIN,
) -> QuantisedRows:
    """As `add_norm`, in FP8: rounded as by `round_rows`."""
    out = room(x_TE)
    _launch_add_norm(x_TE, parts, weight_E, eps, out, pdl, residual)
    return out


def _launch_add_norm(
    x_TE: Tensor,
    parts: Tensor | None,
    weight_E: Tensor | None,
    eps: float,
    out: tuple[Tensor, Tensor | None],
    pdl: bool,
    residual: Residual,
) -> None:
    """`out`: numbers, and scales unless numbers are not rounded."""
    tokens, features = x_TE.shape
    _require(x_TE, *(one for one in (weight_E, residual.out_weight_E, parts) if one is not None))
    block = triton.next_power_of_2(features)
    _add_norm[(tokens,)](
        x_TE, parts, weight_E, residual.out_weight_E, *out, features, eps, float(residual.norm_offset),
        float(residual.factor), SPLITS=0 if parts is None else _splits(parts), BLOCK=block,
        num_warps=max(1, min(16, block // 128)), enable_fp_fusion=False, **launch_options(pdl),
    )  # fmt: skip


def silu_mul(gate_up: Tensor, gelu: bool = False) -> Tensor:
    """Return silu(gate) * up [T, I], with `gelu` GELU instead of silu; `gate_up` is [T, 2I], gate first."""
    tokens, inner = len(gate_up), gate_up.shape[1] // 2
    out_TI = gate_up.new_empty(tokens, inner)
    _require(gate_up)
    block = min(1024, triton.next_power_of_2(inner))
    # Tokens come first, because a grid's second axis ends at 65,535.
    _silu_mul[(tokens, triton.cdiv(inner, block))](
        gate_up, out_TI, inner, GELU=gelu, BLOCK=block, num_warps=4, enable_fp_fusion=False
    )
    return out_TI


def _splits(parts: Tensor) -> int:
    """Return the number of tensors [T, E] in `parts`."""
    return 1 if parts.dim() == 2 else len(parts)


def _require(*tensors: Tensor) -> None:
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError(f"needs contiguous tensors, got strides {[tensor.stride() for tensor in tensors]}")


def whole_norm(
    qkv: Tensor,
    widths: tuple[int, int],
    weights: tuple[Tensor, Tensor],
    squares_T4: Tensor,
    whole_widths: tuple[int, int],
    eps: float,
    out_TO: Tensor,
) -> None:
    """Apply RMSNorm to all queries of a token as one row, and to all its keys. Writes [T, O] to `out_TO`, values
    unchanged.

    `qkv`: a product [T, O] or partials of it; its first `widths` columns are queries and keys. squares_T4: results of
    `square_sums`, summed over all ranks, for rows as wide as `whole_widths`."""
    tokens, outputs = qkv.shape[-2:]
    block = triton.next_power_of_2(outputs)
    _whole_norm[(tokens,)](
        qkv, *weights, squares_T4, out_TO, outputs, *widths, *(float(width) for width in whole_widths), eps,
        SPLITS=_splits(qkv), BLOCK=block, num_warps=max(1, min(16, block // 256)), enable_fp_fusion=False,
    )  # fmt: skip


def square_sums(qkv: Tensor, widths: tuple[int, int], dtype: torch.dtype, out_T4: Tensor | None = None) -> Tensor:
    """Return the sums of squares of each token's queries and keys, float32 [T, 4]; the last two columns are 0. The
    product is rounded to `dtype` first."""
    tokens, outputs = qkv.shape[-2:]
    out_T4 = qkv.new_empty((tokens, 4), dtype=torch.float32) if out_T4 is None else out_T4
    block = triton.next_power_of_2(outputs)
    like = qkv.new_empty(0, dtype=dtype)
    # A square would be fused with the addition of another that the same thread holds, which depends on the type of qkv.
    _square_sums[(tokens,)](
        qkv, like, out_T4, outputs, *widths, SPLITS=_splits(qkv), BLOCK=block, num_warps=max(1, min(16, block // 256)),
        enable_fp_fusion=False,
    )  # fmt: skip
    return out_T4


@triton.jit
def _square_sums(qkv, like, out, outputs, queries, keys, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    t, n = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = n < queries + keys
    x = sum_parts(qkv + t * outputs + n, tl.num_programs(0).to(tl.int64) * outputs, inside, SPLITS)
    x = x.to(like.dtype.element_ty).to(tl.float32)
    column = tl.arange(0, 4)
    # In one order, whether the product comes as a whole or in parts, which threads hold in other runs.
    query = tl.sum(pair_sum(tl.reshape(tl.where(n < queries, x * x, 0.0), (1, BLOCK))), 0)
    key = tl.sum(pair_sum(tl.reshape(tl.where(n < queries, 0.0, x * x), (1, BLOCK))), 0)
    tl.store(out + t * 4 + column, tl.where(column == 0, query, tl.where(column == 1, key, 0.0)))


@triton.jit
def _whole_norm(
    qkv, q_weight, k_weight, squares, out, outputs, queries, keys, query_width, key_width, eps,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t, n = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside, is_query, is_key = n < outputs, n < queries, (n >= queries) & (n < queries + keys)
    x = sum_parts(qkv + t * outputs + n, tl.num_programs(0).to(tl.int64) * outputs, inside, SPLITS)
    x = x.to(out.dtype.element_ty).to(tl.float32)
    q_scale = tl.load(q_weight + n, mask=is_query, other=0.0).to(tl.float32)
    k_scale = tl.load(k_weight + n - queries, mask=is_key, other=0.0).to(tl.float32)
    q_scale *= tl.rsqrt(tl.load(squares + t * 4) / query_width + eps)
    k_scale *= tl.rsqrt(tl.load(squares + t * 4 + 1) / key_width + eps)
    x = tl.where(is_query, x * q_scale, tl.where(is_key, x * k_scale, x))
    tl.store(out + t * outputs + n, x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def sum_parts(parts, stride, mask, SPLITS: tl.constexpr):
    """Return the float32 sum of `SPLITS` arrays that lie `stride` apart, added first to last."""
    total = tl.load(parts, mask=mask, other=0.0).to(tl.float32)
    for s in tl.static_range(1, SPLITS):
        total += tl.load(parts + s * stride, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def pair_sum(x_RL):
    """Return the sum of each row of a power of two of columns: halves are added until one number is left. The order of
    additions does not depend on which threads hold the numbers."""
    R: tl.constexpr = x_RL.shape[0]
    if x_RL.shape[1] == 1:
        return tl.reshape(x_RL, (R,))
    else:
        return pair_sum(tl.sum(tl.reshape(x_RL, (R, 2, x_RL.shape[1] // 2)), 1))


@triton.jit
def _add_norm(
    x, parts, weight, out_weight, out, scales, features, eps, norm_offset, factor,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    feature = tl.arange(0, BLOCK)
    inside = feature < features
    if weight is not None:
        scale = tl.load(weight + feature, mask=inside, other=0.0).to(tl.float32) + norm_offset
    if out_weight is not None:
        out_scale = tl.load(out_weight + feature, mask=inside, other=0.0).to(tl.float32) + norm_offset
    at = tl.program_id(0).to(tl.int64) * features + feature
    # With parts to add, x was written before the kernel that computed them began.
    if PDL and parts is None:
        gdc_wait()
    hidden = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if parts is not None:
        added = sum_parts(parts + at, tl.num_programs(0).to(tl.int64) * features, inside, SPLITS)
        # Rounded as an unsplit product would be.
        added = added.to(x.dtype.element_ty).to(tl.float32)
        if out_weight is not None:
            added *= 1.0 / tl.sqrt(tl.sum(added * added, 0) / features + eps) * out_scale
            added = added.to(x.dtype.element_ty).to(tl.float32)
        summed = (hidden + added * factor).to(x.dtype.element_ty)
        tl.store(x + at, summed, mask=inside)
        hidden = summed.to(tl.float32)
    if weight is not None:
        inverse = 1.0 / tl.sqrt(tl.sum(hidden * hidden, 0) / features + eps)
        normed = (hidden * inverse * scale).to(weight.dtype.element_ty)
    else:
        normed = hidden.to(x.dtype.element_ty)
    if scales is not None:
        store_rounded(normed.to(tl.float32), out + at, scales + tl.program_id(0), inside)
    else:
        tl.store(out + at, normed, mask=inside)


@triton.jit
def gated(gate, up, KIND: tl.constexpr, GELU: tl.constexpr):
    """Return silu(gate) * up, or the tanh form of GELU instead of silu: 1 + tanh(u) is 2 sigmoid(2 u). Both are rounded
    to type KIND first, as results of a product are."""
    gate, up = gate.to(KIND).to(tl.float32), up.to(KIND).to(tl.float32)
    if GELU:
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _silu_mul(gate_up, out, inner, GELU: tl.constexpr, BLOCK: tl.constexpr):
    token, feature = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = feature < inner, gate_up + token * 2 * inner + feature
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + inner, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out + token * inner + feature, gated(gate, up, out.dtype.element_ty, GELU).to(out.dtype.element_ty), mask=inside
    )
