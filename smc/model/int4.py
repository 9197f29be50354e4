"""int4 matrices in memory, W[n, k] = scale[g, n] (code[n, k] - zero[g, n]), g the group of input k: packing, unpacking
and rounding. Knows nothing about files or layers.

An int32 word holds eight codes of 0 to 15. Words are stored as [G, N, W]: the words of all outputs side by side in each
group, like scales and zero points [G, N], because a kernel reads one group of many outputs at a time.

In a group, the 8 W inputs of an output form eight runs of W; input i of run j is input j W + i of the group. Words come
in pairs: pair p holds inputs 2p and 2p + 1 of every run, word 2p those of runs 0 to 3, word 2p + 1 those of runs 4 to
7. The code of run j begins at bit 4 (j mod 4) for input 2p, and 16 bits higher for input 2p + 1. A shift and the mask
0x000F000F thus give two neighbouring inputs in the two halves of a register, as tensor cores take them. Codes 0 to 15
of a group of 16 inputs are the words 0x75316420, 0xFDB9ECA8.

Axes: N outputs, K inputs, G groups, W words of a group, I inputs of a group; in a group H runs 0 to 3 or 4 to 7, J run
of these, P pair of words, E first or second input of a pair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smc.model.quantisation import PER_WORD, SYMMETRIC_ZERO, Codes

SCALE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of scales, by the name of the storage type."""
LARGEST_CODE = 15


def pack(code_NK: Tensor, groups: int) -> Tensor:
    """Words int32 [G, N, W] of codes."""
    # In int64, because the last code takes the sign's bit of an int32.
    code_GNHJPE = code_NK.long().unflatten(1, (groups, 2, PER_WORD // 2, -1, 2)).transpose(0, 1)
    word_GNHP = (code_GNHJPE << _shifts(code_NK.device)[:, None, :]).sum((3, 5))
    word_GNW = word_GNHP.transpose(2, 3).flatten(2)
    return torch.where(word_GNW >= 1 << 31, word_GNW - (1 << 32), word_GNW).int()


def unpack(word_GNW: Tensor) -> Tensor:
    """Codes int32 [N, K] of words."""
    word_GNHP = word_GNW.unflatten(2, (-1, 2)).transpose(2, 3)
    code_GNHJPE = (word_GNHP[:, :, :, None, :, None] >> _shifts(word_GNW.device)[:, None, :]) & LARGEST_CODE
    return code_GNHJPE.transpose(0, 1).flatten(1)


def _shifts(device: torch.device) -> Tensor:
    """Where a code begins in its word, int32 [J, E]."""
    run_J, input_E = (torch.arange(count, dtype=torch.int32, device=device) for count in (PER_WORD // 2, 2))
    return 4 * run_J[:, None] + 16 * input_E


def dequantise(word_GNW: Tensor, scale_GN: Tensor, zero_GN: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Weights [N, K] of a type."""
    code_NGI = unpack(word_GNW).unflatten(1, (len(scale_GN), -1))
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
