"""Activations in FP8 with a scale for each row: `smc.model.linear.quantise_rows` in one launch.

Nothing reads the host. `pdl`: `smc.kernels.launch`.

Axes: T tokens, K inputs.

The element-wise steps between a layer's matrix products: residual add with RMSNorm, and the gated activation.

Both take a product's result whole or as fp32 split-K partials, which are summed in their order: the same bits every
time. Nothing reads the host, and grids follow from shapes alone. `pdl`: `smc.kernels.launch`.

Axes: T tokens, E features, I inner features, S splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smc.kernels.launch import launch_options
from smc.model import linear
from smc.model.linear import FP8, QuantisedRows

LARGEST = tl.constexpr(linear.FP8_MAX)
"""Of its numbers."""


def round_rows(x_TK: Tensor, pdl: bool = False) -> QuantisedRows:
    """Rows of x may lie apart."""
    tokens, inputs = x_TK.shape
    if x_TK.stride(1) != 1:
        raise ValueError(f"needs rows whose numbers stand side by side, got strides {x_TK.stride()}")
    out, block = room(x_TK), triton.next_power_of_2(inputs)
    warps = max(1, min(16, block // 256))
    _round_rows[(tokens,)](
        x_TK, *out, inputs, x_TK.stride(0), BLOCK=block, PDL=pdl, num_warps=warps, **launch_options(pdl)
    )
    return out


def room(x_TK: Tensor) -> QuantisedRows:
    """For the rounded of as many."""
    return QuantisedRows(x_TK.new_empty(x_TK.shape, dtype=FP8), x_TK.new_empty((len(x_TK), 1), dtype=torch.float32))


@triton.jit
def _round_rows(x, out, scale, inputs, stride_x, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = k < inputs
    x_K = tl.load(x + token * stride_x + k, mask=inside, other=0.0).to(tl.float32)
    store_rounded(x_K, out + token * inputs + k, scale + token, inside)


@triton.jit
def store_rounded(x_K, at_K, scale_at, inside):
    """A row, whose columns outside are zeros, and its scale: NaN where a number is not finite, which neither the
    machine's maximum nor its clamp would pass on."""
    magnitude_K = tl.abs(x_K)
    size = tl.max(tl.where(magnitude_K < float("inf"), magnitude_K, float("inf")), 0) / LARGEST
    # Not above the largest number: dividing by an approximate size may end a little beyond it.
    rounded_K = tl.clamp(x_K / tl.where(size > 0, size, 1.0), -LARGEST, LARGEST)
    tl.store(at_K, rounded_K.to(at_K.dtype.element_ty), mask=inside)
    tl.store(scale_at, tl.where(size < float("inf"), size, float("nan")))


def add_norm(x_TE: Tensor, parts: Tensor | None, weight_E: Tensor, eps: float, pdl: bool = False) -> Tensor:
    """x += sum of parts, in place; returns RMSNorm(x) * weight [T, E] in the weight's type (fp32 arithmetic).

    `parts` is None, one tensor [T, E] or partials [S, T, E]. The norm is that of x as stored, rounded to its type. With
    `pdl` and parts, what was launched just before must not write x."""
    out_TE = torch.empty_like(x_TE, dtype=weight_E.dtype)
    # Where nothing is rounded there are no scales; whatever stands in their place is not touched.
    _launch_add_norm(x_TE, parts, weight_E, eps, (out_TE, weight_E), pdl, ROUNDED=False)
    return out_TE


def add_norm_rounded(
    x_TE: Tensor, parts: Tensor | None, weight_E: Tensor, eps: float, pdl: bool = False
) -> QuantisedRows:
    """The same in FP8, as `smc.kernels.norm.round_rows` rounds what `add_norm` returns."""
    out = room(x_TE)
    _launch_add_norm(x_TE, parts, weight_E, eps, out, pdl, ROUNDED=True)
    return out


def _launch_add_norm(
    x_TE: Tensor,
    parts: Tensor | None,
    weight_E: Tensor,
    eps: float,
    out: tuple[Tensor, Tensor],
    pdl: bool,
    ROUNDED: bool,
) -> None:
    """`out`: numbers and scales."""
    (tokens, features), splits = x_TE.shape, _splits(parts)
    _require(x_TE, weight_E, *([] if parts is None else [parts]))
    block = triton.next_power_of_2(features)
    _add_norm[(tokens,)](
        x_TE, x_TE if parts is None else parts, weight_E, *out, features, eps, SPLITS=splits, ROUNDED=ROUNDED, BLOCK=block, PDL=pdl,
        num_warps=max(1, min(16, block // 128)), **launch_options(pdl)
    )  # fmt: skip


def silu_mul(
    gate_up: Tensor,
    dtype: torch.dtype | None = None,
    out_TI: Tensor | None = None,
    block: int = 1024,
    warps: int = 4,
    pdl: bool = False,
) -> Tensor:
    """silu(gate) * up [T, I]; `gate_up` is [T, 2I] or partials [S, T, 2I], gate first. Type: `dtype`, or that of
    `gate_up`."""
    tokens, inner = gate_up.shape[-2], gate_up.shape[-1] // 2
    out_TI = gate_up.new_empty((tokens, inner), dtype=dtype) if out_TI is None else out_TI
    _require(gate_up, out_TI)
    block = min(block, triton.next_power_of_2(inner))
    # Tokens first: a grid's second axis ends at 65,535.
    grid = (tokens, triton.cdiv(inner, block))
    _silu_mul[grid](
        gate_up, out_TI, inner, SPLITS=_splits(gate_up), BLOCK=block, PDL=pdl, num_warps=warps, **launch_options(pdl)
    )
    return out_TI


def _splits(parts: Tensor | None) -> int:
    """Tensors of [T, E] that make up `parts`."""
    return 0 if parts is None else 1 if parts.dim() == 2 else parts.shape[0]


def _require(*tensors: Tensor) -> None:
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError(f"needs contiguous tensors, got strides {[tensor.stride() for tensor in tensors]}")


@triton.jit
def sum_parts(parts, stride, mask, SPLITS: tl.constexpr):
    """Sum in fp32 of `SPLITS` arrays that lie `stride` apart, first to last."""
    total = tl.load(parts, mask=mask, other=0.0).to(tl.float32)
    for s in tl.static_range(1, SPLITS):
        total += tl.load(parts + s * stride, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _add_norm(
    x, parts, weight, out, scales, features, eps, SPLITS: tl.constexpr, ROUNDED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    feature = tl.arange(0, BLOCK)
    inside = feature < features
    scale = tl.load(weight + feature, mask=inside, other=0.0).to(tl.float32)
    at = tl.program_id(0).to(tl.int64) * features + feature
    # With parts to add, x was there before whatever made them began.
    if PDL and SPLITS == 0:
        gdc_wait()
    hidden = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if SPLITS > 0:
        summed = (hidden + sum_parts(parts + at, tl.num_programs(0).to(tl.int64) * features, inside, SPLITS)).to(
            x.dtype.element_ty
        )
        tl.store(x + at, summed, mask=inside)
        hidden = summed.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(hidden * hidden, 0) / features + eps)
    normed = (hidden * inverse * scale).to(weight.dtype.element_ty)
    if ROUNDED:
        store_rounded(normed.to(tl.float32), out + at, scales + tl.program_id(0), inside)
    else:
        tl.store(out + at, normed, mask=inside)


@triton.jit
def _silu_mul(gate_up, out, inner, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token, feature = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, stride = feature < inner, tl.num_programs(0).to(tl.int64) * 2 * inner
    at = gate_up + token * 2 * inner + feature
    gate, up = sum_parts(at, stride, inside, SPLITS), sum_parts(at + inner, stride, inside, SPLITS)
    tl.store(out + token * inner + feature, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)
