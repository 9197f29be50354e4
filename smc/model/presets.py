"""Shapes of published models, by name, and a tokenizer without text, to measure speed without a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from smc.model.config import Llama3RopeScaling, ModelConfig
from smc.model.tokenizer import Tokenizer


def _llama(hidden: int, layers: int, heads: int, head_dim: int, inner: int, tied: bool, factor: float) -> ModelConfig:
    scaling = Llama3RopeScaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    return ModelConfig(
        "llama",
        128_256,
        hidden,
        layers,
        heads,
        8,
        head_dim,
        inner,
        131_072,
        1e-5,
        500_000.0,
        scaling,
        tied,
        qkv_bias=False,
        qk_norm=False,
    )


def _qwen3(hidden: int, layers: int, heads: int, inner: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        "qwen3",
        151_936,
        hidden,
        layers,
        heads,
        8,
        128,
        inner,
        40_960,
        1e-6,
        1_000_000.0,
        None,
        tied,
        qkv_bias=False,
        qk_norm=True,
    )


def _qwen2(hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, inner: int, vocab: int) -> ModelConfig:
    return ModelConfig(
        "qwen2",
        vocab,
        hidden,
        layers,
        heads,
        kv_heads,
        head_dim,
        inner,
        32_768,
        1e-6,
        1_000_000.0,
        None,
        hidden < 4096,
        qkv_bias=True,
        qk_norm=False,
    )


def _gemma3(hidden: int, layers: int, inner: int) -> ModelConfig:
    return ModelConfig(
        "gemma3_text",
        262_144,
        hidden,
        layers,
        4,
        1,
        256,
        inner,
        32_768,
        1e-6,
        1_000_000.0,
        None,
        tied_embeddings=True,
        qkv_bias=False,
        qk_norm=True,
        window=512,
        window_layers=tuple(layer for layer in range(layers) if (layer + 1) % 6),
        local_rope_theta=10_000.0,
        score_scale=256**-0.5,
        embedding_multiplier=hidden**0.5,
    )


PRESETS = {
    "llama-1b": _llama(2048, 16, 32, 64, 8192, tied=True, factor=32.0),
    "llama-3b": _llama(3072, 28, 24, 128, 8192, tied=True, factor=32.0),
    "llama-8b": _llama(4096, 32, 32, 128, 14_336, tied=False, factor=8.0),
    "llama-70b": _llama(8192, 80, 64, 128, 28_672, tied=False, factor=8.0),
    "qwen2.5-0.5b": _qwen2(896, 24, 14, 2, 64, 4864, 151_936),
    "qwen2.5-1.5b": _qwen2(1536, 28, 12, 2, 128, 8960, 151_936),
    "qwen2.5-72b": _qwen2(8192, 80, 64, 8, 128, 29_568, 152_064),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12_288, tied=False),
    "qwen3-32b": _qwen3(5120, 64, 64, 25_600, tied=False),
    "qwen3-30b-a3b": replace(
        _qwen3(2048, 48, 32, 768, tied=False),
        family="qwen3_moe",
        num_kv_heads=4,
        num_experts=128,
        experts_per_token=8,
        normalised_experts=True,
    ),
    "gemma3-270m": _gemma3(640, 18, 2048),
    "gemma3-1b": _gemma3(1152, 26, 6912),
    "olmo2-1b": ModelConfig(
        "olmo2",
        100_352,
        2048,
        16,
        16,
        16,
        128,
        8192,
        4096,
        1e-6,
        500_000.0,
        None,
        tied_embeddings=False,
        qkv_bias=False,
        qk_norm=True,
    ),
}
"""Shapes of Llama 3.1, Llama 3.2, Qwen 2.5, Qwen 3, Gemma 3 and OLMo 2, from their published `config.json`."""


def preset(name: str) -> ModelConfig:
    """Return the shape of that name. `NAME/LAYERS`, such as `llama-8b/4`, is the shape with this number of layers, as a
    draft cut from the large model has it. Raises ValueError that lists the known names."""
    shape, _, layers = name.partition("/")
    if shape not in PRESETS:
        raise ValueError(f"{name!r} is not a known shape; allowed: {', '.join(PRESETS)}, or one of them with /LAYERS")
    if shape == name:
        return PRESETS[name]
    if not (layers.isascii() and layers.isdigit() and int(layers)):
        raise ValueError(f"{name!r}: layers={layers!r}; allowed: a whole number of at least 1, as in {shape}/4")
    return replace(PRESETS[shape], num_layers=int(layers))


class NoText(Tokenizer):
    """Tokenizer of a model with random weights: every token decodes to the empty string, and none ends a text."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._chat_template = None
        self.eos_ids = ()

    @property
    def size(self) -> int:
        return self._size

    @property
    def special_ids(self) -> tuple[int, ...]:
        return ()

    def bytes_of(self, token_id: int) -> bytes:
        return b""

    def encode(self, text: str, add_special: bool = True, limit: int | None = None) -> list[int]:
        raise ValueError("prompt: a model of random weights has no text; allowed: token_ids")

    def chat(self, *conversation: Any, **options: Any) -> list[int]:
        raise ValueError("prompt: a model of random weights has no chat template; allowed: token_ids")

    def decode(self, ids: Iterable[int]) -> str:
        return ""

    def fingerprint(self) -> str:
        """Return the vocabulary size as text, since it is the only property of this tokenizer."""
        return f"no text, {self.size} ids"
