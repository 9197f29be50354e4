"""Models of published shapes with random weights: speed does not depend on what the weights are, so no checkpoint is needed to measure it.

Their answers mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from smc.models.config import Llama3RopeScaling, ModelConfig
from smc.models.decoder import Decoder, empty_decoder
from smc.models.linear import FP8
from smc.models.parallel import WHOLE, Reduce, Shard, local_config

SCALE = 0.02
"""Standard deviation of the weights; small enough for activations to stay finite in bf16."""


def _llama(hidden: int, layers: int, heads: int, head_dim: int, inner: int, tied: bool, factor: float) -> ModelConfig:
    scaling = Llama3RopeScaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    return ModelConfig(
        "llama", 128_256, hidden, layers, heads, 8, head_dim, inner, 131_072, 1e-5, 500_000.0, scaling, tied, qkv_bias=False, qk_norm=False
    )


def _qwen3(hidden: int, layers: int, heads: int, inner: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        "qwen3", 151_936, hidden, layers, heads, 8, 128, inner, 40_960, 1e-6, 1_000_000.0, None, tied, qkv_bias=False, qk_norm=True
    )


PRESETS = {
    "llama-1b": _llama(2048, 16, 32, 64, 8192, tied=True, factor=32.0),
    "llama-3b": _llama(3072, 28, 24, 128, 8192, tied=True, factor=32.0),
    "llama-8b": _llama(4096, 32, 32, 128, 14_336, tied=False, factor=8.0),
    "llama-70b": _llama(8192, 80, 64, 128, 28_672, tied=False, factor=8.0),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12_288, tied=False),
    "qwen3-32b": _qwen3(5120, 64, 64, 25_600, tied=False),
}
"""Llama 3.1 and 3.2, Qwen 3: as in their published `config.json`."""


def preset(name: str) -> ModelConfig:
    """Raises ValueError with the names there are."""
    if name not in PRESETS:
        raise ValueError(f"{name!r} is no known shape; allowed: {', '.join(PRESETS)}")
    return PRESETS[name]


def count_parameters(config: ModelConfig) -> int:
    """Number of weights; a tied matrix counts once."""
    with torch.device("meta"):
        return sum(weight.numel() for weight in Decoder(config).parameters())


def random_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    shard: Shard = WHOLE,
    reduce: Reduce | None = None,
) -> Decoder:
    """A decoder (or one rank's share of it) with normal weights and norms of one, made where it will live. In FP8 its weights are those of
    the one in bfloat16, rounded."""
    model = empty_decoder(local_config(config, shard), reduce, dtype, device)
    generator = torch.Generator(device).manual_seed(seed * 1000 + shard.rank)
    for name, weight in model.named_parameters():
        if name.endswith("scale"):
            continue
        if weight.dtype == FP8:
            whole = torch.empty(weight.shape, dtype=torch.bfloat16, device=device)
            model.get_submodule(name.removesuffix(".weight")).hold(whole.normal_(0.0, SCALE, generator=generator))
        elif weight.dim() == 1 and name.endswith("weight"):
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, SCALE, generator=generator)
    model.copy_head()
    return model


class NoText:
    """Stands in for a tokenizer where text has no meaning: every id is silent, and none ends an answer."""

    eos_ids: tuple[int, ...] = ()
    special_ids: tuple[int, ...] = ()
    has_chat_template = False

    def __init__(self, size: int) -> None:
        self.size = size

    def bytes_of(self, _token_id: int) -> bytes:
        return b""

    def encode(self, _text: str, add_special: bool = True) -> list[int]:
        raise ValueError("prompt: a model of random weights has no text; allowed: token_ids")

    def chat(self, _messages: Sequence[dict[str, Any]]) -> list[int]:
        raise ValueError("prompt: a model of random weights has no chat template; allowed: token_ids")

    def decode(self, _ids: Iterable[int]) -> str:
        return ""

    def fingerprint(self) -> str:
        """Of its vocabulary."""
        return f"no text, {self.size} ids"
