"""Activations in FP8 with a scale for each row, for the library's product of many rows: `smc.models.linear.round_rows` in one launch.

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

FP8 = torch.float8_e4m3fn
LARGEST = tl.constexpr(448.0)
"""Of its numbers."""


def round_rows(x_TK: Tensor, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """e4m3 [T, K] and float32 scales [T, 1]; rows of x may lie apart."""
    tokens, inputs = x_TK.shape
    if x_TK.stride(1) != 1:
        raise ValueError(f"needs rows whose numbers stand side by side, got strides {x_TK.stride()}")
    out_TK, scale_T1 = x_TK.new_empty((tokens, inputs), dtype=FP8), x_TK.new_empty((tokens, 1), dtype=torch.float32)
    block = triton.next_power_of_2(inputs)
    warps = max(1, min(16, block // 1024))
    _round_rows[(tokens,)](
        x_TK, out_TK, scale_T1, inputs, x_TK.stride(0), BLOCK=block, PDL=pdl, num_warps=warps, **launch_options(pdl)
    )  # fmt: skip
    return out_TK, scale_T1


@triton.jit
def _round_rows(x, out, scale, inputs, stride_x, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = k < inputs
    x_K = tl.load(x + token * stride_x + k, mask=inside, other=0.0).to(tl.float32)
    size = tl.max(tl.abs(x_K), 0) / LARGEST
    # Not above the largest number: dividing by an approximate size may end a little beyond it.
    rounded_K = tl.clamp(x_K / tl.where(size > 0, size, 1.0), -LARGEST, LARGEST)
    tl.store(out + token * inputs + k, rounded_K.to(out.dtype.element_ty), mask=inside)
    tl.store(scale + token, size)
