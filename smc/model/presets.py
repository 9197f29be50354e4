"""Shapes of published models, by name, and a tokenizer without text, to measure speed without a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from smc.model.config import SIZES, Llama3RopeScaling, ModelConfig
from smc.model.tokenizer import Tokenizer


def _shape(family: str, *sizes: int, tied: bool, **others: Any) -> ModelConfig:
    """Return a shape. `sizes`: vocabulary, width, layers, query heads, key/value heads, features of a head, inner
    features, context: those of `SIZES`."""
    usual = {"rms_eps": 1e-6, "rope_theta": 1_000_000.0, "rope_scaling": None}
    fields: dict[str, Any] = dict(zip(SIZES, sizes, strict=True)) | usual | others
    return ModelConfig(family, tied_embeddings=tied, **fields)


def _llama(*sizes: int, tied: bool, factor: float) -> ModelConfig:
    scaling = Llama3RopeScaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    return _shape("llama", *sizes, tied=tied, rms_eps=1e-5, rope_theta=500_000.0, rope_scaling=scaling)


def _gemma3(*sizes: int) -> ModelConfig:
    _, hidden, layers, *_ = sizes
    return _shape(
        "gemma3_text",
        *sizes,
        tied=True,
        window=512,
        window_layers=tuple(layer for layer in range(layers) if (layer + 1) % 6),
        local_rope_theta=10_000.0,
        score_scale=256**-0.5,
        embedding_multiplier=hidden**0.5,
    )


_QWEN3_30B_EXPERTS: dict[str, Any] = {"num_experts": 128, "experts_per_token": 8, "normalised_experts": True}
PRESETS = {
    "llama-1b": _llama(128_256, 2048, 16, 32, 8, 64, 8192, 131_072, tied=True, factor=32.0),
    "llama-3b": _llama(128_256, 3072, 28, 24, 8, 128, 8192, 131_072, tied=True, factor=32.0),
    "llama-8b": _llama(128_256, 4096, 32, 32, 8, 128, 14_336, 131_072, tied=False, factor=8.0),
    "llama-70b": _llama(128_256, 8192, 80, 64, 8, 128, 28_672, 131_072, tied=False, factor=8.0),
    "qwen2.5-0.5b": _shape("qwen2", 151_936, 896, 24, 14, 2, 64, 4864, 32_768, tied=True),
    "qwen2.5-1.5b": _shape("qwen2", 151_936, 1536, 28, 12, 2, 128, 8960, 32_768, tied=True),
    "qwen2.5-72b": _shape("qwen2", 152_064, 8192, 80, 64, 8, 128, 29_568, 32_768, tied=False),
    "qwen3-0.6b": _shape("qwen3", 151_936, 1024, 28, 16, 8, 128, 3072, 40_960, tied=True),
    "qwen3-8b": _shape("qwen3", 151_936, 4096, 36, 32, 8, 128, 12_288, 40_960, tied=False),
    "qwen3-32b": _shape("qwen3", 151_936, 5120, 64, 64, 8, 128, 25_600, 40_960, tied=False),
    "qwen3-30b-a3b": _shape("qwen3_moe", 151_936, 2048, 48, 32, 4, 128, 768, 40_960, tied=False, **_QWEN3_30B_EXPERTS),
    "gemma3-270m": _gemma3(262_144, 640, 18, 4, 1, 256, 2048, 32_768),
    "gemma3-1b": _gemma3(262_144, 1152, 26, 4, 1, 256, 6912, 32_768),
    "olmo2-1b": _shape("olmo2", 100_352, 2048, 16, 16, 16, 128, 8192, 4096, tied=False, rope_theta=500_000.0),
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
