"""Model configuration, read from a Hugging Face `config.json`. Knows nothing about weights or tokenizers.

Unsupported settings are rejected here by name, before any weight is read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smc.model.quantisation import QuantisationConfig

SUPPORTED_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Rescaling of the rotary frequencies in Llama 3.1 and later: long wavelengths are stretched by `factor`, short
    ones are kept, and those between are interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only transformer. `from_hf` maps the published field names to these."""

    family: str
    """`llama`, `qwen2` or `qwen3`."""
    vocab_size: int
    """Rows of the embedding. May exceed the tokenizer's vocabulary by padding rows."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_context: int
    """Maximum sequence length, in tokens."""
    rms_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    tied_embeddings: bool
    qkv_bias: bool
    """Whether query, key and value projections have a bias (Qwen 2.5)."""
    qk_norm: bool
    """Whether query and key heads are RMS-normalised before rotation (Qwen 3)."""

    def __post_init__(self) -> None:
        for field in _SIZES:
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{_SIZES[field]}={value!r} is not a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} is not a multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embedding needs an even one")

    @staticmethod
    def from_hf(directory: str | Path) -> ModelConfig:
        """Read `directory/config.json`. Raises ValueError with the value found and the values supported."""
        path = Path(directory) / "config.json"
        raw = read_json(path)
        try:
            return _from_dict(raw)
        except (ValueError, KeyError, TypeError) as error:
            what = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path}: {what}") from error

    def to_hf(self) -> dict[str, Any]:
        """Contents of a `config.json`, with the field names of transformers 4, which transformers 5 reads as well."""
        scaling = self.rope_scaling
        architecture = next(name for name, family in SUPPORTED_ARCHITECTURES.items() if family == self.family)
        return {
            "architectures": [architecture],
            "model_type": self.family,
            **{published: getattr(self, field) for field, published in _SIZES.items()},
            "rms_norm_eps": self.rms_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None
            if scaling is None
            else {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_context,
            },
            "tie_word_embeddings": self.tied_embeddings,
            "attention_bias": self.qkv_bias,
            "hidden_act": "silu",
        }


_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "max_context": "max_position_embeddings",
}
"""Field name -> published name, for every field that must be a positive integer."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a model directory. Raises ValueError that names the file."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; a Hugging Face model directory is needed")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a JSON {type(raw).__name__}; an object is needed")
    return raw


def read_quantisation_config(directory: str | Path) -> QuantisationConfig | None:
    """The directory's FP8 quantisation; None if its weights are not quantised. Raises ValueError if it is not
    supported."""
    path = Path(directory) / "config.json"
    try:
        return QuantisationConfig.from_hf(read_json(path).get("quantization_config"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _from_dict(raw: dict[str, Any]) -> ModelConfig:
    found = raw.get("architectures") or [raw.get("model_type")]
    if found[0] not in SUPPORTED_ARCHITECTURES:
        raise ValueError(f"architecture {found[0]!r} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}")
    family = SUPPORTED_ARCHITECTURES[found[0]]
    _require_supported(raw, "hidden_act", "silu")
    _require_supported(raw, "mlp_bias", False)
    _require_supported(raw, "attention_bias", family == "qwen2")
    _require_supported(raw, "use_sliding_window", False)
    QuantisationConfig.from_hf(raw.get("quantization_config"))  # raises ValueError if not supported
    num_heads = raw["num_attention_heads"]
    theta, scaling = _rope(raw)
    return ModelConfig(
        family=family,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // num_heads,
        intermediate_size=raw["intermediate_size"],
        max_context=raw["max_position_embeddings"],
        rms_eps=raw["rms_norm_eps"],
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )


def _require_supported(raw: dict[str, Any], field: str, supported: Any) -> None:
    """Raise ValueError if the field has another value than `supported`. A missing field has the supported value."""
    if field in raw and raw[field] != supported and raw[field] is not None:
        raise ValueError(f"{field}={raw[field]!r} is not supported; supported: {supported!r}")


def _rope(raw: dict[str, Any]) -> tuple[float, Llama3RopeScaling | None]:
    """Read `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5)."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"rope scaling {kind!r} is not supported; supported: 'default', 'llama3'")
    return theta, Llama3RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_context=rope["original_max_position_embeddings"],
    )
