"""Tiny models of every family, made and saved by transformers with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:  # its import takes longer than most tests, in every process that collects tests
    import transformers

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "head_dim": 16,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOW = 7
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [1.0 + 0.7 * i for i in range(6)],
    "partial_rotary_factor": 0.75,
}
HF_CONFIGS = {
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", {"sliding_window": WINDOW}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "phi3-window": ("Phi3Config", {"sliding_window": WINDOW}),
    "phi3-longrope": (
        "Phi3Config",
        {"sliding_window": None, "original_max_position_embeddings": 64, "rope_parameters": LONGROPE},
    ),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.03,
            "logits_scaling": 4.0,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2Config", {}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 1, 1, 0]}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "llama-dynamic": ("LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}}),
    "qwen2-yarn": ("Qwen2Config", {"rope_parameters": YARN}),
}


def hf_model(name: str, **changes: object) -> transformers.PreTrainedModel:
    """Return a model with random weights, norms and biases included: the initial ones and zeros of transformers would
    hide a weight that is not used."""
    kind, more = HF_CONFIGS[name]
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**SHAPE | more | changes)).eval()
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    ones = 0.0 if name.startswith("gemma") else 1.0
    for parameter, weight in model.named_parameters():
        weight.normal_(ones if "norm" in parameter else 0.0, 0.2, generator=generator)
    return model


def save_hf(name: str, directory: Path, **changes: object) -> transformers.PreTrainedModel:
    model = hf_model(name, **changes)
    model.save_pretrained(directory)
    return model
