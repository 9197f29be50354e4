"""Models with random weights, for measuring: their answers mean nothing."""

from __future__ import annotations

import torch

from smc.model.config import ModelConfig
from smc.model.decoder import Decoder, empty_decoder
from smc.model.linear import FP8, Linear
from smc.model.parallel import WHOLE, Reduce, Shard, local_config

SCALE = 0.02
"""Standard deviation of the weights; small enough for activations to stay finite in bf16."""


def random_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    shard: Shard = WHOLE,
    reduce: Reduce | None = None,
) -> Decoder:
    """A decoder (or one rank's share of it) with normal weights and norms of one, made where it will live. In FP8 its
    weights are those of the one in bfloat16, rounded."""
    model = empty_decoder(local_config(config, shard), reduce, dtype, device)
    generator = torch.Generator(device).manual_seed(seed * 1000 + shard.rank)
    for name, weight in model.named_parameters():
        if name.endswith("scale"):
            continue
        if weight.dtype == FP8:
            whole = torch.empty(weight.shape, dtype=torch.bfloat16, device=device)
            linear = model.get_submodule(name.removesuffix(".weight"))
            assert isinstance(linear, Linear)
            linear.hold(whole.normal_(0.0, SCALE, generator=generator))
        elif weight.dim() == 1 and name.endswith("weight"):
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, SCALE, generator=generator)
    model.copy_head()
    return model
