"""A matrix of weights and how it is multiplied: y = x W^T, with W as it is, or in FP8 (e4m3) with a float32 scale for
each output.

FP8: W[n, k] = scale[n] weight[n, k], and each row of activations is rounded likewise, with a scale of its own, so that
what else is multiplied beside it changes nothing. FP8 numbers are multiplied, sums are float32, the scales come last:
so do the reference here, a GPU's library and, but that tensor cores keep some 14 bits of their sums, our kernels
(`smc.kernels.linear`).

Axes: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smc.api.limits import DTYPE_NAMES

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
"""448; what is larger would be NaN."""
DTYPES = dict(zip(DTYPE_NAMES, (torch.float32, torch.bfloat16, torch.float16, FP8), strict=True))
"""The types that models can have. FP8: of the matrices, the head included; the embedding, norms, biases and activations
are bfloat16."""
PIECE = 1 << 24
"""Weights that are worked on at a time, so that what is made of them on the way stays small."""
DIVISOR = 16
"""Of inputs and outputs, which the library's product asks for."""
FP8_CAPABILITY = (8, 9)
"""Of GPUs: the first that know FP8."""


class Rounded(NamedTuple):
    """Activations in FP8."""

    number_TK: Tensor
    """e4m3."""
    scale_T1: Tensor
    """float32."""


class Linear(nn.Linear):
    """`weight` [N, K] of any type; `scale` [N] float32 if and only if that is FP8; perhaps `bias` [N], of the
    activations' type."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias)
        self.register_parameter("scale", None)

    def to_fp8(self) -> None:
        """Make room for FP8 weights instead, without values."""
        outputs, device = self.out_features, self.weight.device
        self.weight = nn.Parameter(torch.empty(self.weight.shape, dtype=FP8, device=device), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(outputs, dtype=torch.float32, device=device), requires_grad=False)

    def hold(self, weight_NK: Tensor) -> None:
        """Take these weights, in FP8."""
        for rows in pieces(*weight_NK.shape):
            self.weight[rows], self.scale[rows] = quantise(weight_NK[rows])

    def forward(self, x_TK: Tensor) -> Tensor:
        if self.scale is None:
            return super().forward(x_TK)
        return self.of_rounded(round_rows(x_TK)).to(x_TK.dtype)

    def of_rounded(self, x: Rounded, out_TN: Tensor | None = None) -> Tensor:
        """The product of activations in FP8, if the matrix is: by the library in bfloat16 where it can do it, else in
        float32."""
        if self.weight.is_cuda and self.in_features % DIVISOR == 0 and self.out_features % DIVISOR == 0:
            scales: dict[str, Any] = {
                "scale_a": x.scale_T1,
                "scale_b": self.scale[None],
                "bias": self.bias,
                "out_dtype": torch.bfloat16,
            }
            there = out_TN if out_TN is not None and out_TN.dtype == torch.bfloat16 else None
            made_TN = torch._scaled_mm(x.number_TK, self.weight.t(), **scales, out=there)
        else:
            made_TN = F.linear(x.number_TK.float(), self.weight.float()) * x.scale_T1 * self.scale
            made_TN = made_TN if self.bias is None else made_TN + self.bias.float()
        return made_TN if out_TN is None or made_TN is out_TN else out_TN.copy_(made_TN)


def quantise(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 numbers [N, K] and float32 scales [N], of which the largest number of each row is `LARGEST`; a row of zeros
    has the scale 0.

    The error is at most a sixteenth of a weight, or of the scale times 2^-10.
    """
    weight_NK = weight_NK.float()
    largest_N = weight_NK.abs().amax(1)
    # Divided by a tensor: by a number, GPUs multiply with its inverse, which may end one bit beside.
    scale_N = largest_N / torch.full_like(largest_N, LARGEST)
    return (weight_NK / torch.where(scale_N > 0, scale_N, 1.0)[:, None]).to(FP8), scale_N


def round_rows(x_TK: Tensor) -> Rounded:
    """Each row with a scale of its own: `quantise`."""
    number_TK, scale_T = quantise(x_TK)
    return Rounded(number_TK, scale_T[:, None])


def pieces(rows: int, columns: int = 1) -> Iterator[slice]:
    """Rows of a matrix, or of a vector, about `PIECE` numbers at a time."""
    step = max(1, PIECE // max(1, columns))
    for begin in range(0, rows, step):
        yield slice(begin, min(rows, begin + step))


def require_fp8(device: torch.device | str) -> None:
    """Raises ValueError if a GPU cannot multiply FP8."""
    device = torch.device(device)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        found, least = (".".join(map(str, one)) for one in (torch.cuda.get_device_capability(device), FP8_CAPABILITY))
        raise ValueError(
            f"dtype=fp8: {torch.cuda.get_device_name(device)} has compute capability {found}; allowed: {least} and later"
        )
