"""Decoder-only transformer over a flat list of tokens. Knows nothing about KV pages, requests or particles.

Attention is a callable passed to `forward`. It stores the new keys and values and returns the attention output, so the
same module is used for serving (paged KV cache) and for training (dense causal attention).

With tensor parallelism (`smc.model.parallel`), each rank runs a decoder with its shard of heads and inner features over
the same tokens. The all-reduce is passed in as well; all ranks compute the same hidden states.

Axes: T tokens, E hidden size, H query heads, J key/value heads, D head dimension, V vocabulary, X chosen tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smc.model.config import Llama3RopeScaling, ModelConfig
from smc.model.linear import FP8, Linear, require_fp8
from smc.model.parallel import Reduce

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_THD, k_TJD, v_TJD) -> out_THD. q and k are already rotated."""


class Decoder(nn.Module):
    """Decoder-only transformer with fused query/key/value and gate/up matrices.

    `config` is the shape of this rank's shard. `reduce` sums over ranks; None for a model on a single rank."""

    def __init__(self, config: ModelConfig, reduce: Reduce | None = None) -> None:
        super().__init__()
        self.config = config
        self.reduce = reduce
        # An explicit weight skips the random initialisation, which is slow to set up on the meta device.
        self.embed = nn.Embedding(
            config.vocab_size, config.hidden_size, _weight=torch.empty(config.vocab_size, config.hidden_size)
        )
        # torch does not type the elements of a ModuleList.
        self.layers = cast("Sequence[Layer]", nn.ModuleList(Layer(config, i, reduce) for i in range(config.num_layers)))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tied_embeddings:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens_T: Tensor, rope_T2D: Tensor, attend: Attend) -> Tensor:
        """Run all layers. `rope_T2D` is `RopeTable.at(positions)`. Returns the hidden states after the final norm [T,
        E]."""
        hidden_TE = self.embed(tokens_T)
        for layer in self.layers:
            hidden_TE = layer(hidden_TE, rope_T2D, attend)
        return self.norm(hidden_TE)

    def logits(self, hidden_XE: Tensor) -> Tensor:
        """Next-token logits [X, V] in float32 for the chosen hidden states."""
        return self.lm_head(hidden_XE).float()

    def copy_head(self) -> None:
        """Quantise the embedding into the head, if the head is tied and in FP8. Call after the embedding is loaded."""
        if self.config.tied_embeddings and self.lm_head.scale is not None:
            self.lm_head.quantise_from(self.embed.weight)


def empty_decoder(
    config: ModelConfig, reduce: Reduce | None, dtype: torch.dtype, device: torch.device | str
) -> Decoder:
    """A frozen decoder in eval mode with uninitialised weights. `dtype` is one of `smc.model.linear.DTYPES`.

    In FP8 a tied head gets a matrix of its own, with half the embedding's bytes: a step reads all of the head but only
    a few rows of the embedding. Raises ValueError if the device does not support the type."""
    tied = config.tied_embeddings and dtype != FP8
    with torch.device("meta"):
        model = Decoder(config, reduce).to(torch.bfloat16 if dtype == FP8 else dtype)
    if dtype == FP8:
        require_fp8(device)
        for module in model.modules():
            if isinstance(module, Linear):
                module.to_fp8()
    if tied:
        model.lm_head.register_parameter("weight", None)  # otherwise `_apply` would create two matrices
    # `to_empty` on `meta` tensors makes torch import its symbolic-shape library, which takes as long as importing
    # torch.
    model._apply(lambda weight: torch.empty(weight.shape, dtype=weight.dtype, device=device))
    if tied:
        model.lm_head.weight = model.embed.weight
    return model.requires_grad_(False).eval()


class Layer(nn.Module):
    """One transformer layer: attention, then a gated MLP, each on the normalised residual."""

    def __init__(self, config: ModelConfig, index: int, reduce: Reduce | None) -> None:
        super().__init__()
        self.index = index
        self.reduce = reduce
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.attn_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_eps)
        self.qkv = Linear(config.hidden_size, q_size + 2 * kv_size, bias=config.qkv_bias)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_eps) if config.qk_norm else None
        self.o = Linear(q_size, config.hidden_size)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_eps)
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size)
        self.down = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_TE: Tensor, rope_T2D: Tensor, attend: Attend) -> Tensor:
        qkv = self.qkv(self.attn_norm(hidden_TE)).unflatten(-1, (-1, self.head_dim))
        q_THD, k_TJD, v_TJD = qkv.split(self.heads, dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TJD = self.q_norm(q_THD), self.k_norm(k_TJD)
        out_THD = attend(self.index, rotate(q_THD, rope_T2D), rotate(k_TJD, rope_T2D), v_TJD)
        hidden_TE = hidden_TE + self._sum(self.o(out_THD.flatten(-2)))
        gate, up = self.gate_up(self.mlp_norm(hidden_TE)).chunk(2, dim=-1)
        return hidden_TE + self._sum(self.down(F.silu(gate) * up))

    @property
    def head_norms(self) -> tuple[Tensor | None, Tensor | None]:
        """Weights of the query and key norms; (None, None) for a model without them."""
        return (None, None) if self.q_norm is None or self.k_norm is None else (self.q_norm.weight, self.k_norm.weight)

    def _sum(self, part_TE: Tensor) -> Tensor:
        return part_TE if self.reduce is None else self.reduce(part_TE)


def rotate(x_THD: Tensor, rope_T2D: Tensor) -> Tensor:
    """Rotary embedding with the half-split layout: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)."""
    cos, sin = rope_T2D.to(x_THD.dtype).unsqueeze(-2).chunk(2, dim=-1)
    x1, x2 = x_THD.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


class RopeTable:
    """Rotary table [max_positions, D]: for each position D/2 cosines, then D/2 sines, in float32."""

    def __init__(self, config: ModelConfig, max_positions: int, device: torch.device | str = "cpu") -> None:
        inv_freq = config.rope_theta ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
        if config.rope_scaling is not None:
            inv_freq = _llama3_frequencies(inv_freq, config.rope_scaling)
        angle = torch.arange(max_positions, dtype=torch.float64)[:, None] * inv_freq
        self.table = torch.cat((angle.cos(), angle.sin()), dim=-1).float().to(device)

    def at(self, positions_T: Tensor) -> Tensor:
        return self.table[positions_T]


def _llama3_frequencies(inv_freq: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    wavelength = 2 * math.pi / inv_freq
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((scaling.original_context / wavelength - low) / (high - low)).clamp(0, 1)
    return inv_freq * (kept + (1 - kept) / scaling.factor)
