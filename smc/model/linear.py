"""Linear layers, y = x W^T, with W unquantised, in FP8 (e4m3) with a float32 scale for each output, or in int4.

FP8: W[n, k] = scale[n] weight[n, k]. Each row of activations is quantised with a scale of its own, so a row's result
does not depend on the other rows of the batch. FP8 numbers are multiplied, their products are summed in float32, and
the scales are applied last. The reference here, the GPU library and our kernels (`smc.kernels.linear`) all compute
this; tensor cores keep only about 14 bits of their partial sums.

int4: W[n, k] = scale[g, n] (code[n, k] - zero[g, n]), g the group of input k; activations stay as they are. The
reference here widens the weights to the activations' dtype, a few rows at a time; our kernel (`smc.kernels.int4`) sums
over the codes of a group first and multiplies the sum by the group's scale.

In memory, an int32 word holds eight codes of 0 to 15. Words are stored as [P, O, W]: in each group the words of all
outputs side by side, like scales and zero points [P, O], because a kernel reads one group of many outputs at a time. In
a group, the 8 W inputs of an output form eight runs of W; input i of run j is input j W + i of the group. Words come in
pairs. Pair p holds inputs 2p and 2p + 1 of every run: word 2p those of runs 0 to 3, word 2p + 1 those of runs 4 to 7.
The code of run j begins at bit 4 (j mod 4) for input 2p, and 16 bits higher for input 2p + 1. A shift and the mask
0x000F000F thus give two neighbouring inputs in the two halves of a register, as tensor cores take them. For example, a
group of 16 inputs with codes 0 to 15 is stored as the words 0x75316420, 0xFDB9ECA8.

Local axes: P groups of inputs with a common scale, Y pairs of the words of a group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smc.api.limits import DTYPE_NAMES
from smc.model.quantisation import PER_WORD, SYMMETRIC_ZERO, Codes, Int4Format

SCALE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of scales, by the name of the storage type."""
LARGEST_CODE = 15
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
"""448, the largest FP8 number. Larger values would become NaN."""
INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # torch's stubs lack it
DTYPES = dict(zip(DTYPE_NAMES, (torch.float32, torch.bfloat16, torch.float16, FP8, INT4), strict=True))
"""Dtypes that a model can be loaded in, by name. With FP8, the matrices and the head are FP8; the embedding, norms,
biases and activations are bfloat16. With int4, the layers' matrices are int4; everything else is bfloat16."""
PIECE = 1 << 24
"""Number of weights converted at a time, which bounds the memory of intermediate tensors."""
DIVISOR = 16
"""`torch._scaled_mm` needs inputs and outputs that are multiples of this."""
FP8_CAPABILITY = (8, 9)
"""First compute capability with FP8 products."""


def pack(code_OI: Tensor, groups: int) -> Tensor:
    """Pack codes of 0 to 15 [O, I] into int32 words [P, O, W]."""
    # In int64, because the last code of a word occupies the sign bit of an int32.
    code_PO24Y2 = code_OI.long().unflatten(1, (groups, 2, PER_WORD // 2, -1, 2)).transpose(0, 1)
    word_PO2Y = (code_PO24Y2 << _shifts(code_OI.device)[:, None, :]).sum((3, 5))
    word_POW = word_PO2Y.transpose(2, 3).flatten(2)
    return torch.where(word_POW >= 1 << 31, word_POW - (1 << 32), word_POW).int()


def unpack(word_POW: Tensor) -> Tensor:
    """Unpack words into codes, int32 [O, I]."""
    word_PO2Y = word_POW.unflatten(2, (-1, 2)).transpose(2, 3)
    code_PO24Y2 = (word_PO2Y[:, :, :, None, :, None] >> _shifts(word_POW.device)[:, None, :]) & LARGEST_CODE
    return code_PO24Y2.transpose(0, 1).flatten(1)


def _shifts(device: torch.device) -> Tensor:
    """First bit of each code in its word, int32 [J, E]."""
    run_4, input_2 = (torch.arange(count, dtype=torch.int32, device=device) for count in (PER_WORD // 2, 2))
    return 4 * run_4[:, None] + 16 * input_2


def dequantise(word_POW: Tensor, scale_PO: Tensor, zero_PO: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weights [O, I] in `dtype`. Without `zero_PO`, all zero points are `SYMMETRIC_ZERO`."""
    code_OPI = unpack(word_POW).unflatten(1, (len(scale_PO), -1))
    centred_OPI = code_OPI - (SYMMETRIC_ZERO if zero_PO is None else zero_PO.t().int()[..., None])
    return (centred_OPI.float() * scale_PO.t().float()[..., None]).flatten(1).to(dtype)


def quantise_int4(weight_OI: Tensor, group: int) -> Codes:
    """Quantise to symmetric codes: each weight is rounded to the nearest multiple of its group's scale. The scale is
    the smallest with which all weights of the group lie between -8 and 7 times the scale.

    The error is at most half a scale."""
    weight_OPI = weight_OI.float().unflatten(1, (-1, group))
    low_OP, high_OP = weight_OPI.aminmax(dim=2)
    scale_OP = torch.maximum(low_OP.neg() / 8, high_OP / 7)
    # Codes are computed with the scales as they are stored, in bfloat16.
    scale_OP = scale_OP.bfloat16().float()
    steps_OPI = weight_OPI / torch.where(scale_OP > 0, scale_OP, 1.0)[..., None]
    code_OI = (steps_OPI.round().clamp(-8, 7) + SYMMETRIC_ZERO).int().flatten(1)
    return Codes(code_OI, scale_OP, torch.full_like(scale_OP, SYMMETRIC_ZERO).int())


class QuantisedRows(NamedTuple):
    """Activations quantised to FP8, with one scale per row."""

    value_TI: Tensor
    """FP8 numbers (e4m3)."""
    scale_T1: Tensor
    """Scale of each row, float32."""


class Linear(nn.Linear):
    """A linear layer: `weight` [O, I] of any dtype, `scale` [O] in float32 (FP8 weights only), and an optional `bias`
    [O] of the activations' dtype. In int4 `weight` holds words [P, O, W], and `scale` and an optional `zero` are [P,
    O]."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias)
        self.register_parameter("scale", None)
        self.register_parameter("zero", None)
        self.group = 0
        """Number of inputs of a group in int4; 0 for other dtypes."""

    @property
    def is_fp8(self) -> bool:
        return self.scale is not None and not self.group

    def to_fp8(self) -> None:
        """Replace the weight by an uninitialised FP8 weight and scale."""
        outputs, device = self.out_features, self.weight.device
        self.weight = nn.Parameter(torch.empty(self.weight.shape, dtype=FP8, device=device), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(outputs, dtype=torch.float32, device=device), requires_grad=False)

    def to_int4(self, held: Int4Format) -> None:
        """Replace the weight by an uninitialised int4 weight with its scales and, if the format has them, zero
        points."""
        device, groups = self.weight.device, self.in_features // held.group

        def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.group = held.group
        self.weight = parameter(groups, self.out_features, held.group // PER_WORD, dtype=torch.int32)
        self.scale = parameter(groups, self.out_features, dtype=SCALE_DTYPES[held.scale_dtype])
        self.zero = parameter(groups, self.out_features, dtype=torch.int32) if held.zeros else None

    def permute_outputs(self, order_O: Tensor) -> None:
        """Reorder the outputs in place: output i becomes the former output `order_O[i]`."""
        for part in (self.weight, self.bias):
            if part is not None:
                bits = part.view(torch.uint8) if part.dtype == FP8 else part
                bits.copy_(bits.index_select(int(part is self.weight and self.group > 0), order_O))
        for scale in (self.scale, self.zero):
            if scale is not None:
                scale.copy_(scale[..., order_O])

    def quantise_from(self, weight_OI: Tensor) -> None:
        """Quantise `weight_OI` into this layer's FP8 weight and scale."""
        for rows in pieces(*weight_OI.shape):
            self.weight[rows], self.scale[rows] = quantise(weight_OI[rows])

    def values(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Return some rows of the weight as numbers of `dtype`."""
        if self.scale is None:
            return self.weight[rows].to(dtype)
        if self.group:
            zero_PO = None if self.zero is None else self.zero[:, rows]
            return dequantise(self.weight[:, rows], self.scale[:, rows], zero_PO, dtype)
        return (self.weight[rows].float() * self.scale[rows, None]).to(dtype)

    def forward(self, x_TI: Tensor) -> Tensor:
        if self.scale is None:
            return super().forward(x_TI)
        if self.group:
            return self._multiply_int4(x_TI)
        return self.multiply_quantised(quantise_rows(x_TI)).to(x_TI.dtype)

    def _multiply_int4(self, x_TI: Tensor) -> Tensor:
        parts = [F.linear(x_TI, self.values(rows, x_TI.dtype)) for rows in pieces(self.out_features, self.in_features)]
        y_TO = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return y_TO if self.bias is None else y_TO + self.bias

    def multiply_quantised(self, x: QuantisedRows, out_TO: Tensor | None = None) -> Tensor:
        """Multiply FP8 activations with this FP8 weight: in bfloat16 by the GPU library if it supports the shape,
        otherwise in float32. The result is written to `out_TO` if given."""
        if self.weight.is_cuda and self.in_features % DIVISOR == 0 and self.out_features % DIVISOR == 0:
            scales: dict[str, Any] = {
                "scale_a": x.scale_T1,
                "scale_b": self.scale[None],
                "bias": self.bias,
                "out_dtype": torch.bfloat16,
            }
            direct_TO = out_TO if out_TO is not None and out_TO.dtype == torch.bfloat16 else None
            y_TO = torch._scaled_mm(x.value_TI, self.weight.t(), **scales, out=direct_TO)
        else:
            y_TO = F.linear(x.value_TI.float(), self.weight.float()) * x.scale_T1 * self.scale
            y_TO = y_TO if self.bias is None else y_TO + self.bias.float()
        return y_TO if out_TO is None or y_TO is out_TO else out_TO.copy_(y_TO)


def quantise(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return FP8 numbers [O, I] and float32 scales [O]. The number with the largest absolute value in each row becomes
    +-`FP8_MAX`; a row of zeros gets scale 0.

    The error is at most a sixteenth of the weight or 2^-10 times the scale, whichever is larger.
    """
    weight_OI = weight_OI.float()
    largest_O = weight_OI.abs().amax(1)
    # A tensor, not a number: dividing by a number, GPUs multiply by its inverse, which may differ in the last bit.
    scale_O = largest_O / torch.full_like(largest_O, FP8_MAX)
    return (weight_OI / torch.where(scale_O > 0, scale_O, 1.0)[:, None]).to(FP8), scale_O


def quantise_rows(x_TI: Tensor) -> QuantisedRows:
    """Quantise activations with one scale per row, as `quantise` does."""
    value_TI, scale_T = quantise(x_TI)
    return QuantisedRows(value_TI, scale_T[:, None])


def pieces(rows: int, columns: int = 1) -> Iterator[slice]:
    """Yield row slices of a matrix or vector, each with about `PIECE` numbers."""
    step = max(1, PIECE // max(1, columns))
    for begin in range(0, rows, step):
        yield slice(begin, min(rows, begin + step))


def require_fp8(device: torch.device | str) -> None:
    """Raise ValueError if the device is a GPU without FP8 products."""
    device = torch.device(device)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        found, least = (".".join(map(str, one)) for one in (torch.cuda.get_device_capability(device), FP8_CAPABILITY))
        raise ValueError(
            f"dtype=fp8: {torch.cuda.get_device_name(device)} has compute capability {found}; "
            f"allowed: {least} and later"
        )
