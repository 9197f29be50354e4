"""Runs a `Decoder` over one whole sequence with dense causal attention. Knows nothing about caches."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from smc.model.decoder import Decoder, RopeTable, hidden_states


def attend(layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_THD, k_TJD, v_TJD))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).squeeze(0).transpose(0, 1)


def dense_logits(model: Decoder, tokens_T: Tensor) -> Tensor:
    """Return the logits [T, V] after every token."""
    device = tokens_T.device
    rope_LD = RopeTable(model.config, len(tokens_T), device).table
    return model.logits(hidden_states(model, rope_LD, tokens_T[None])[0])
