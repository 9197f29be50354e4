"""Models with random weights, for measuring speed. Their answers have no meaning."""

from __future__ import annotations

import torch

from smc.model.config import ModelConfig
from smc.model.decoder import Decoder, empty_decoder
from smc.model.linear import FP8, INT4, Linear
from smc.model.parallel import WHOLE, Reduce, Shard, local_config
from smc.model.weight_map import int4_formats, weight_slices

SCALE = 0.02
"""Standard deviation of the weights, small enough that bfloat16 activations stay finite."""

CODES_DEVIATION = 4.6
"""Standard deviation of uniform int4 codes."""


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
    `device`. FP8 weights are the bfloat16 weights of the same seed, quantised; int4 weights are random codes."""
    int4 = int4_formats(weight_slices(config, shard), shard) if dtype == INT4 else None
    model = empty_decoder(local_config(config, shard), reduce, dtype, device, int4)
    generator = torch.Generator(device).manual_seed(seed * 1000 + shard.rank)
    for name, weight in model.named_parameters():
        if name.endswith("scale"):
            if weight.dim() == 2:
                weight.fill_(SCALE / CODES_DEVIATION)
            continue
        if weight.dtype == torch.int32:
            weight.random_(-(1 << 31), 1 << 31, generator=generator)
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
