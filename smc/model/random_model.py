"""Models with random weights, for measuring speed. Their answers have no meaning."""

from __future__ import annotations

import torch

from smc.model.config import ModelConfig
from smc.model.decoder import Decoder, empty_decoder
from smc.model.linear import FP8, Linear
from smc.model.parallel import WHOLE, Reduce, Shard, local_config

SCALE = 0.02
"""Standard deviation of the weights, small enough that bfloat16 activations stay finite."""


def random_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    shard: Shard = WHOLE,
    reduce: Reduce | None = None,
) -> Decoder:
    """A decoder, or one rank's shard of it, with normally distributed weights and norm weights of 1, created on
    `device`. FP8 weights are the bfloat16 weights of the same seed, quantised."""
    model = empty_decoder(local_config(config, shard), reduce, dtype, device)
    generator = torch.Generator(device).manual_seed(seed * 1000 + shard.rank)
    for name, weight in model.named_parameters():
        if name.endswith("scale"):
            continue
        if weight.dtype == FP8:
            whole = torch.empty(weight.shape, dtype=torch.bfloat16, device=device)
            linear = model.get_submodule(name.removesuffix(".weight"))
            assert isinstance(linear, Linear)
            linear.quantise_from(whole.normal_(0.0, SCALE, generator=generator))
        elif weight.dim() == 1 and name.endswith("weight"):
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, SCALE, generator=generator)
    model.copy_head()
    return model
