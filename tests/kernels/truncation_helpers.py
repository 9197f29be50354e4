"""A torch function that returns the entries that a cut keeps."""

from __future__ import annotations

import torch

from smc.kernels.truncation import Cut


def kept(logits_RV: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Return the kept entries as bool [R, V], on the logits' device."""
    bits_RV = (logits_RV.float() + 0.0).view(torch.int32)
    key_RV = bits_RV ^ ((bits_RV >> 31) & 0x7FFFFFFF)
    if logits_RV.dtype == torch.bfloat16:
        key_RV = key_RV >> 16
    key_R1, column_V = cut.key_R[:, None], torch.arange(logits_RV.shape[1], device=logits_RV.device)
    return (key_RV > key_R1) | ((key_RV == key_R1) & (column_V <= cut.last_R[:, None]))
