"""Runs a `Decoder` on whole sequences with dense causal attention, without a KV cache: for training and measurements.

Axes: B rows, S token positions, T = B * S, E hidden size, H query heads, J key/value heads, D head dimension."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from smc.model.decoder import Decoder


def hidden_states(model: Decoder, rope_SD: Tensor, tokens_BS: Tensor) -> Tensor:
    """Hidden states [B, S, E] with dense causal attention. Row s of `rope_SD` is position s of the rotary table."""
    rows, width = tokens_BS.shape

    def attend(layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (rows, width)).transpose(1, 2) for x in (q_THD, k_TJD, v_TJD))
        window = model.config.window_of(layer)
        if window is None or window >= width:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            seen_SS = torch.ones(width, width, dtype=torch.bool, device=q.device).tril().triu(1 - window)
            out = F.scaled_dot_product_attention(q, k, v, seen_SS, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    rope = torch.cat([rope_SD[..., :width, :]] * rows, dim=-2)
    return model(tokens_BS.flatten(), rope, attend).unflatten(0, (rows, width))
