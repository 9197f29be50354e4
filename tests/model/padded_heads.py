"""Directories of models whose heads GPUs must pad, and a stand-in for a GPU that loads them on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from smc.model.config import ModelConfig
from smc.model.loader import save_with_config
from tests.model.tiny import random_decoder, write_json

PHI3 = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "hidden_act": "silu",
    "vocab_size": 300,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 24,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(12)],
    "long_factor": [1.0 + 0.7 * i for i in range(12)],
}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GRANITE = {
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "attention_multiplier": 0.03,
    "residual_multiplier": 0.3,
}
MODELS: dict[str, dict[str, Any]] = {
    "phi3": {},
    "phi3 with heads of 12": {"head_dim": 12},
    "phi3 with a window": {"sliding_window": 7},
    "phi3 with partial rotation": {"partial_rotary_factor": 0.75},
    "phi3 with LongRoPE": {"original_max_position_embeddings": 32, "rope_scaling": LONGROPE},
    "qwen2, which has biases": QWEN2,
    "granite, which has a factor of scores": GRANITE,
    "llama with scaled rotation": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_scaling": LLAMA3,
    },
    "smollm3, which does not rotate in some layers": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "no_rope_layers": [1, 0],
    },
}
"""What each model has instead of `PHI3`."""


def save_model_of(raw: dict[str, Any], directory: Path, seed: int = 0, scale: float = 1.0) -> Path:
    """Save a model with random weights of the shape that `raw`, the contents of its config.json, describes. `scale`: a
    factor of its head."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", raw)
    model = random_decoder(ModelConfig.from_hf(directory), seed)
    model.lm_head.weight.mul_(scale)
    save_with_config(model, directory, raw, torch.float32)
    return directory


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold models as a GPU does, whatever their device is."""
    on_device: Callable[[ModelConfig, object], ModelConfig] = ModelConfig.on_device
    monkeypatch.setattr(ModelConfig, "on_device", lambda config, _device: on_device(config, "cuda"))
