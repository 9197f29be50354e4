"""Matrices in int4 as we hold them, W[n, k] = scale[g, n] (code[n, k] - zero[g, n]), g = k // group: packing, unpacking
and rounding. Knows nothing about files or layers.

Eight codes of 0 to 15 share an int32, the first in its lowest bits: words [N, K/8]. Those of consecutive words are of
consecutive inputs: of a group of I inputs, word w holds those of inputs w, w + I/8, w + 2 I/8 and so on. A kernel takes
the same code of all words of a group at a time. Scales
and zero points [G, N] are transposed, so that a kernel reads those of many outputs side by side.

Axes: N outputs, K inputs, W words, G groups, I inputs of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smc.model.quantisation import PER_WORD, SYMMETRIC_ZERO, Codes

SCALE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of scales, by the name of the storage type."""
LARGEST_CODE = 15


def pack(code_NK: Tensor, groups: int) -> Tensor:
    """Words int32 [N, K/8] of codes."""
    shift_81 = 4 * torch.arange(PER_WORD, device=code_NK.device)[:, None]
    # In int64, because the last code takes the sign's bit of an int32.
    word_NGW = (code_NK.long().unflatten(1, (groups, PER_WORD, -1)) << shift_81).sum(2)
    return torch.where(word_NGW >= 1 << 31, word_NGW - (1 << 32), word_NGW).flatten(1).int()


def unpack(word_NW: Tensor, groups: int) -> Tensor:
    """Codes int32 [N, K] of words."""
    shift_81 = 4 * torch.arange(PER_WORD, dtype=torch.int32, device=word_NW.device)[:, None]
    word_NG1W = word_NW.unflatten(1, (groups, 1, -1))
    return ((word_NG1W >> shift_81) & LARGEST_CODE).flatten(1)


def dequantise(word_NW: Tensor, scale_GN: Tensor, zero_GN: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Weights [N, K] of a type."""
    code_NGI = unpack(word_NW, len(scale_GN)).unflatten(1, (len(scale_GN), -1))
    centred_NGI = code_NGI - (SYMMETRIC_ZERO if zero_GN is None else zero_GN.t().int()[..., None])
    return (centred_NGI.float() * scale_GN.t().float()[..., None]).flatten(1).to(dtype)


def quantise_int4(weight_NK: Tensor, group: int) -> Codes:
    """Symmetric codes: each weight is rounded to the nearest multiple of its group's scale, with which the lowest weight is
    at least -8 of them and the highest at most 7.

    The error is at most half a scale, but one scale at the end that is cut off."""
    weight_NGI = weight_NK.float().unflatten(1, (-1, group))
    low_NG, high_NG = weight_NGI.aminmax(dim=2)
    scale_NG = torch.maximum(low_NG.neg() / 8, high_NG / 7)
    # What is stored is bfloat16, and codes are those of what is stored.
    scale_NG = scale_NG.bfloat16().float()
    steps_NGI = weight_NGI / torch.where(scale_NG > 0, scale_NG, 1.0)[..., None]
    code_NK = (steps_NGI.round().clamp(-8, 7) + SYMMETRIC_ZERO).int().flatten(1)
    return Codes(code_NK, scale_NG, torch.full_like(scale_NG, SYMMETRIC_ZERO).int())
