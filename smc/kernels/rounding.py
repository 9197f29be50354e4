"""Activations in FP8 with a scale for each row: `smc.model.linear.round_rows` in one launch.

Nothing reads the host. `pdl`: `smc.kernels.pdl`.

Axes: T tokens, K inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smc.kernels.pdl import launch_options
from smc.model import linear
from smc.model.linear import FP8, Rounded

LARGEST = tl.constexpr(linear.LARGEST)
"""Of its numbers."""


def round_rows(x_TK: Tensor, pdl: bool = False) -> Rounded:
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


def room(x_TK: Tensor) -> Rounded:
    """For the rounded of as many."""
    return Rounded(x_TK.new_empty(x_TK.shape, dtype=FP8), x_TK.new_empty((len(x_TK), 1), dtype=torch.float32))


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
    """A row, whose places outside are zeros, and its scale: NaN where a number is not finite, which neither the
    machine's maximum nor its clamp would pass on."""
    magnitude_K = tl.abs(x_K)
    size = tl.max(tl.where(magnitude_K < float("inf"), magnitude_K, float("inf")), 0) / LARGEST
    # Not above the largest number: dividing by an approximate size may end a little beyond it.
    rounded_K = tl.clamp(x_K / tl.where(size > 0, size, 1.0), -LARGEST, LARGEST)
    tl.store(at_K, rounded_K.to(at_K.dtype.element_ty), mask=inside)
    tl.store(scale_at, tl.where(size < float("inf"), size, float("nan")))
