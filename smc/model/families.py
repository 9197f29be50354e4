"""Model families: one description for each family, with its differences from Llama.

Knows nothing about weights or files. `smc.model.config` reads a directory's numbers, and `smc.model.decoder` computes
what is described here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

LLAMA_NORMS = MappingProxyType({"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"})
"""Norms of a layer: our name -> published name."""
SILU, GELU = "silu", "gelu_pytorch_tanh"


@dataclass(frozen=True)
class ExpertNames:
    """Published names of the experts of a layer."""

    router: str
    gate: str
    up: str
    down: str
    """In `gate`, `up` and `down`, `{}` stands for the index of the expert."""


@dataclass(frozen=True)
class Family:
    """Differences of a family from Llama; the defaults are Llama's."""

    architecture: str
    """Name of the architecture in config.json."""
    qkv_bias: bool = False
    """Query, key and value projections have a bias."""
    qk_norm: bool = False
    """Queries and keys are RMS-normalised before rotation: each head, or with `whole_qk_norm` all heads as one row."""
    whole_qk_norm: bool = False
    norms: Mapping[str, str] = field(default_factory=lambda: LLAMA_NORMS)
    """`attn_norm` and `mlp_norm` are applied to the input of attention and MLP, `attn_out_norm` and `mlp_out_norm` to
    the output, before it is added to the residual."""
    norm_offset: float = 0.0
    """Constant added to the weights of all norms."""
    activation: str = SILU
    activation_field: str = "hidden_act"
    fused: bool = False
    """Query, key and value are stored as one tensor, and so are gate and up."""
    experts: ExpertNames | None = None
    tied_embeddings: bool = False
    """Whether the head is tied if config.json has no `tie_word_embeddings`."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies if config.json has no `rope_theta`."""
    read: Callable[[dict[str, Any]], dict[str, Any]] = lambda raw: {}
    """Returns further fields of `ModelConfig` from the contents of config.json. Raises ValueError for values that are
    not supported."""
    inert: Mapping[str, Any] = field(default_factory=dict)
    """Published fields for which one value only is supported; a missing field counts as this value."""


def require(raw: Mapping[str, Any], name: str, supported: Any) -> None:
    """Raise ValueError if the field has another value than `supported`. A missing field has the supported value."""
    if name in raw and raw[name] != supported and raw[name] is not None:
        raise ValueError(f"{name}={raw[name]!r} is not supported; supported: {supported!r}")


def _window_everywhere(default: int | None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Make a reader for a family in which all layers have a window. `default`: its size if config.json has no
    `sliding_window`."""

    def read(raw: dict[str, Any]) -> dict[str, Any]:
        window = raw.get("sliding_window", default)
        return {"window": window, "window_layers": tuple(range(raw["num_hidden_layers"])) if window else ()}

    return read


def _phi3(raw: dict[str, Any]) -> dict[str, Any]:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    share = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    return {"rotary_dim": int(share * head_dim), **_window_everywhere(None)(raw)}


def _granite(raw: dict[str, Any]) -> dict[str, Any]:
    published = {
        "embedding_multiplier": "embedding_multiplier",
        "residual_multiplier": "residual_multiplier",
        "score_scale": "attention_multiplier",
        "logit_divisor": "logits_scaling",
    }
    return {ours: raw[theirs] for ours, theirs in published.items() if theirs in raw}


def _gemma3(raw: dict[str, Any]) -> dict[str, Any]:
    layers, every = raw["num_hidden_layers"], raw.get("sliding_window_pattern", 6)
    kinds = raw.get("layer_types") or [
        "full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)
    ]
    local = (raw.get("rope_parameters") or {}).get("sliding_attention") or {}
    if (kind := local.get("rope_type", "default")) != "default":
        raise ValueError(f"rope scaling {kind!r} of layers with a window is not supported; supported: 'default'")
    window = raw.get("sliding_window", 4096)
    return {
        "window": window,
        "window_layers": tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention") if window else (),
        "local_rope_theta": float(local.get("rope_theta", raw.get("rope_local_base_freq", 10_000.0))),
        "score_scale": raw.get("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_multiplier": raw["hidden_size"] ** 0.5,
        "logit_cap": raw.get("final_logit_softcapping"),
    }


def _smollm3(raw: dict[str, Any]) -> dict[str, Any]:
    """Read which layers do not rotate. `no_rope_layers` has a flag for each layer: 1 if it rotates queries and keys."""
    layers, every = raw["num_hidden_layers"], raw.get("no_rope_layer_interval", 4)
    flags = raw.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(layers)]
    return {"unrotated_layers": tuple(i for i, rotated in enumerate(flags) if not rotated)}


def _experts(count: str, width: str, normalised: bool | None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Make a reader for a family with experts. `count` and `width`: published names of the number of experts and of
    their inner features. `normalised`: whether the weights of a token's experts add up to 1; None: as `norm_topk_prob`
    of config.json says."""

    def read(raw: dict[str, Any]) -> dict[str, Any]:
        number = raw.get(count) or raw.get("num_experts") or raw["num_local_experts"]
        return {
            "num_experts": number,
            "experts_per_token": raw["num_experts_per_tok"],
            "normalised_experts": bool(raw.get("norm_topk_prob", False)) if normalised is None else normalised,
            "intermediate_size": raw[width],
        }

    return read


FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, inert={"use_sliding_window": False}),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, inert={"use_sliding_window": False}),
    "mistral": Family("MistralForCausalLM", read=_window_everywhere(4096)),
    "phi3": Family("Phi3ForCausalLM", fused=True, read=_phi3),
    "granite": Family("GraniteForCausalLM", read=_granite),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        qk_norm=True,
        whole_qk_norm=True,
        norms={"attn_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"},
    ),
    "smollm3": Family("SmolLM3ForCausalLM", tied_embeddings=True, read=_smollm3, inert={"use_sliding_window": False}),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        qk_norm=True,
        norms={
            "attn_norm": "input_layernorm",
            "attn_out_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_out_norm": "post_feedforward_layernorm",
        },
        norm_offset=1.0,
        activation=GELU,
        activation_field="hidden_activation",
        tied_embeddings=True,
        rope_theta=1_000_000.0,
        read=_gemma3,
        inert={"attn_logit_softcapping": None, "use_bidirectional_attention": False},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        qk_norm=True,
        experts=ExpertNames(
            "mlp.gate", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"
        ),
        read=_experts("num_experts", "moe_intermediate_size", None),
        inert={"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        experts=ExpertNames(
            "block_sparse_moe.gate",
            "block_sparse_moe.experts.{}.w1",
            "block_sparse_moe.experts.{}.w3",
            "block_sparse_moe.experts.{}.w2",
        ),
        read=lambda raw: _window_everywhere(None)(raw) | _experts("num_local_experts", "intermediate_size", True)(raw),
    ),
}
"""Family name, equal to `model_type` in config.json -> description."""
BY_ARCHITECTURE = {family.architecture: name for name, family in FAMILIES.items()}
