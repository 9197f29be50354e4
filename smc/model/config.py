"""Model configuration, read from a Hugging Face `config.json`, and sampling defaults, read from
`generation_config.json`. Knows nothing about weights or tokenizers.

Unsupported settings are rejected here by name, before any weight is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from smc.api.sampling_params import SamplingParams
from smc.model.families import BY_ARCHITECTURE, FAMILIES, Family, require
from smc.model.files import read_json
from smc.model.quantisation import Int4Quantisation, Quantisation, quantisation_of

SIZES = {
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
GPU_HEAD_DIMS = (16, 32, 64, 128, 256)
"""Numbers of features of a head that the kernels of a GPU take."""
SAVED_FAMILIES = ("llama", "qwen2", "qwen3")
"""Families that `ModelConfig.to_hf` can write, for the demo's training, `smc.distill` and `smc.model.padded`."""
_CONTEXTS = ("max_position_embeddings", "original_max_position_embeddings")
"""Fields that Phi-3 has beside `rope_scaling`, not in it."""
GENERATION_CONFIGS = ("auto", "ignore")
"""Defaults of sampling settings that a request leaves out: those of the checkpoint (`auto`), or those of
`SamplingParams` (`ignore`)."""
FILE = "generation_config.json"
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Settings that are taken from `FILE`, as vLLM does. `do_sample` is not: a client that wants greedy decoding sets
temperature 0."""


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Rescaling of the rotary frequencies in Llama 3.1 and later: long wavelengths are stretched by `factor`, short
    ones are kept, and those between are interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class LinearRopeScaling:
    """All rotary frequencies are divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class DynamicRopeScaling:
    """Dynamic scaling, where the rotary base grows with the length of a text beyond `max_position_embeddings`. Texts
    are limited to that length, because keys in a cache cannot be rotated again, so the scaling has no effect."""

    factor: float


@dataclass(frozen=True)
class YarnRopeScaling:
    """Rescaling of the rotary frequencies by YaRN (Peng et al. 2023): pairs that rotate more than `beta_fast` times
    within the original context are kept, those with fewer than `beta_slow` rotations are stretched by `factor`, and
    those between are interpolated. Queries and keys are multiplied by `attention_factor`."""

    factor: float
    original_context: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool
    """Whether the bounds between these three ranges are rounded to whole pairs."""


@dataclass(frozen=True)
class LongRopeScaling:
    """Every rotary frequency is divided by a factor of its own (LongRoPE, Ding et al. 2024): one of `long_factor` if
    the context is longer than `original_context`, otherwise one of `short_factor`. Queries and keys are multiplied by
    `attention_factor`."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_context: int
    attention_factor: float

    def factors(self, context: int) -> tuple[float, ...]:
        return self.long_factor if context > self.original_context else self.short_factor


RopeScaling = Llama3RopeScaling | LinearRopeScaling | DynamicRopeScaling | YarnRopeScaling | LongRopeScaling


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only transformer. `from_hf` maps the published field names to these."""

    family: str
    """A key of `smc.model.families.FAMILIES`."""
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
    rope_scaling: RopeScaling | None
    tied_embeddings: bool
    window: int | None = None
    """Number of positions that a token sees in layers with a window, itself included."""
    window_layers: tuple[int, ...] = ()
    rotary_dim: int | None = None
    """Number of leading features of a head that are rotated; None: all."""
    local_rope_theta: float | None = None
    """Base of the rotary frequencies of layers with a window, which are not scaled; None: these layers rotate like the
    others."""
    unrotated_layers: tuple[int, ...] = ()
    """Layers whose queries and keys are not rotated."""
    score_scale: float | None = None
    """Factor of attention scores; None: head_dim ** -0.5."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Factor of the outputs of attention and MLP before they are added to the residual."""
    logit_divisor: float = 1.0
    logit_cap: float | None = None
    """Maximum absolute value of logits, approached smoothly (by tanh); None: unlimited."""
    num_experts: int = 0
    """Number of experts of a layer, each with `intermediate_size` inner features; 0: a plain MLP."""
    experts_per_token: int = 0
    normalised_experts: bool = False
    """Whether the weights of a token's experts add up to 1."""
    unpadded_head_dim: int | None = None
    """Number of features of a head in the files, if heads are padded to `head_dim` (`on_device`); None: `head_dim`."""
    whole_heads: tuple[int, int] | None = None
    """In the configuration of a shard, the numbers of query heads of the whole model and of key/value heads on all
    ranks, copies included; None for a model on a single rank."""

    def __post_init__(self) -> None:
        for field in SIZES:
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{SIZES[field]}={value!r} is not a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} is not a multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if self.experts_per_token > self.num_experts or (self.num_experts and self.experts_per_token < 1):
            raise ValueError(
                f"num_experts_per_tok={self.experts_per_token}; allowed with {self.num_experts} experts: "
                f"1 to {self.num_experts}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embedding needs an even one")
        rotated = self.rotated
        if rotated % 2 or not 0 < rotated <= self.head_dim:
            raise ValueError(f"{rotated} of {self.head_dim} features of a head are rotated; allowed: an even number")
        if isinstance(self.rope_scaling, LongRopeScaling):
            for name in ("short_factor", "long_factor"):
                if (count := len(getattr(self.rope_scaling, name))) != rotated // 2:
                    raise ValueError(
                        f"{name} has {count} numbers; needed: {rotated // 2}, one for two rotated features"
                    )

    @property
    def traits(self) -> Family:
        return FAMILIES[self.family]

    @property
    def rotated(self) -> int:
        """Number of leading features of a head that are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def stored_head_dim(self) -> int:
        """Number of features of a head in the files."""
        return self.head_dim if self.unpadded_head_dim is None else self.unpadded_head_dim

    def on_device(self, device: object) -> ModelConfig:
        """Return the shape in which a device (a name or a torch.device) holds the model.

        Kernels of a GPU take heads of `GPU_HEAD_DIMS` only. Other heads are padded to the next of these sizes with
        features that are zero and not rotated; the factor of scores stays that of the files' heads. Sums are equal
        but for rounding. Raises ValueError for heads that cannot be padded."""
        if str(device).partition(":")[0] != "cuda" or self.head_dim in GPU_HEAD_DIMS:
            return self
        allowed = f"allowed on a GPU: {', '.join(map(str, GPU_HEAD_DIMS))}"
        if self.head_dim > GPU_HEAD_DIMS[-1]:
            raise ValueError(f"head_dim={self.head_dim}; {allowed}, and smaller ones, which are padded to these")
        if self.traits.qk_norm:  # its mean would be over the features of padding, too
            raise ValueError(
                f"head_dim={self.head_dim} of {self.family}, which normalises queries and keys; {allowed} (others are "
                "padded in families without such norms only)"
            )
        return replace(
            self,
            head_dim=next(size for size in GPU_HEAD_DIMS if size > self.head_dim),
            unpadded_head_dim=self.head_dim,
            rotary_dim=self.rotated,
            score_scale=self.head_dim**-0.5 if self.score_scale is None else self.score_scale,
        )

    def window_of(self, layer: int) -> int | None:
        """Number of positions that a token sees in this layer, itself included; None: all."""
        return self.window if layer in self.window_layers else None

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
        """Return the contents of a `config.json`, with the field names of transformers 4, which transformers 5 reads as
        well. Raises ValueError for a family that is not in `SAVED_FAMILIES`."""
        assert self.unpadded_head_dim is None, "files have heads without padding"
        family = self.traits
        if self.family not in SAVED_FAMILIES:
            raise ValueError(f"models of the family {self.family} are not saved; saved: {', '.join(SAVED_FAMILIES)}")
        return {
            "architectures": [family.architecture],
            "model_type": self.family,
            **{published: getattr(self, field) for field, published in SIZES.items()},
            "rms_norm_eps": self.rms_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": _rope_to_hf(self.rope_scaling),
            "tie_word_embeddings": self.tied_embeddings,
            "attention_bias": family.qkv_bias,
            "hidden_act": "silu",
        }


def read_quantisation(directory: str | Path) -> Quantisation | None:
    """Read the quantisation of a directory's weights; None if they are not quantised. Raises ValueError if it is not
    supported."""
    path = Path(directory) / "config.json"
    try:
        return quantisation_of(read_json(path).get("quantization_config"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def default_dtype(directory: str | Path, device: str) -> str:
    """Return the name of the dtype that a directory's model is loaded in by default: float32 on a CPU; on a GPU int4 if
    the weights are stored in an int4 format that our kernels support, otherwise bfloat16. Unsupported formats do not
    raise an error here."""
    if device == "cpu":
        return "float32"
    try:
        quantisation = read_quantisation(directory)
    except ValueError:
        return "bfloat16"
    is_int4 = isinstance(quantisation, Int4Quantisation) and not quantisation.act_order
    return "int4" if is_int4 else "bfloat16"


def _from_dict(raw: dict[str, Any]) -> ModelConfig:
    found = (raw.get("architectures") or [raw.get("model_type")])[0]
    if found not in BY_ARCHITECTURE:
        raise ValueError(f"architecture {found!r} is not supported; supported: {', '.join(BY_ARCHITECTURE)}")
    name = BY_ARCHITECTURE[found]
    family = FAMILIES[name]
    require(raw, family.activation_field, family.activation)
    require(raw, "mlp_bias", False)
    require(raw, "attention_bias", family.qkv_bias)
    for field, value in family.inert.items():
        require(raw, field, value)
    quantisation_of(raw.get("quantization_config"))  # raises ValueError if not supported
    num_heads = raw["num_attention_heads"]
    theta, scaling = _rope(raw, family)
    max_context = raw["max_position_embeddings"]
    if isinstance(scaling, YarnRopeScaling):
        max_context = max(max_context, int(scaling.factor * scaling.original_context))
    sizes = raw | {
        "num_key_value_heads": raw.get("num_key_value_heads") or num_heads,
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // num_heads,
        "max_position_embeddings": max_context,
    }
    fields = {
        **{field: sizes[published] for field, published in SIZES.items()},
        "rms_eps": raw["rms_norm_eps"],
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tied_embeddings": bool(raw.get("tie_word_embeddings", family.tied_embeddings)),
        **family.read(raw),
    }
    window = fields.get("window")
    if window is not None and window >= max_context:  # no text is longer than the window
        fields |= {"window": None, "window_layers": ()}
    return ModelConfig(family=name, **fields)


def _rope(raw: dict[str, Any], family: Family) -> tuple[float, RopeScaling | None]:
    """Read `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5)."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope = dict(rope.get("full_attention") or rope)  # Gemma 3 has one for each kind of layer
    rope = {name: raw[name] for name in _CONTEXTS if raw.get(name)} | rope
    theta = float(rope.get("rope_theta", raw.get("rope_theta", family.rope_theta)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_SCALINGS:
        raise ValueError(f"rope scaling {kind!r} is not supported; supported: {', '.join(map(repr, _ROPE_SCALINGS))}")
    return theta, _ROPE_SCALINGS[kind](rope)


def _yarn(rope: dict[str, Any]) -> YarnRopeScaling:
    factor, scale, scale_all = rope["factor"], rope.get("mscale"), rope.get("mscale_all_dim")
    attention = rope.get("attention_factor")
    if attention is None:
        attention = (
            _yarn_scale(factor, scale) / _yarn_scale(factor, scale_all)
            if scale and scale_all
            else _yarn_scale(factor, 1.0)
        )
    return YarnRopeScaling(
        factor=factor,
        original_context=rope["original_max_position_embeddings"],
        beta_fast=rope.get("beta_fast") or 32,
        beta_slow=rope.get("beta_slow") or 1,
        attention_factor=attention,
        truncate=rope.get("truncate", True),
    )


def _yarn_scale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(rope: dict[str, Any]) -> LongRopeScaling:
    longest, original = (rope[name] for name in _CONTEXTS)
    factor, attention = longest / original, rope.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRopeScaling(tuple(rope["short_factor"]), tuple(rope["long_factor"]), original, attention)


_ROPE_SCALINGS: dict[str, Callable[[dict[str, Any]], RopeScaling | None]] = {
    "default": lambda rope: None,
    "llama3": lambda rope: Llama3RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_context=rope["original_max_position_embeddings"],
    ),
    "linear": lambda rope: LinearRopeScaling(rope["factor"]),
    "dynamic": lambda rope: DynamicRopeScaling(rope["factor"]),
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}


def _rope_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Return the contents of `rope_scaling` in config.json."""
    if scaling is None:
        return None
    kind = {
        Llama3RopeScaling: "llama3",
        LinearRopeScaling: "linear",
        DynamicRopeScaling: "dynamic",
        YarnRopeScaling: "yarn",
        LongRopeScaling: "longrope",
    }
    numbers = asdict(scaling)
    if "original_context" in numbers:
        numbers["original_max_position_embeddings"] = numbers.pop("original_context")
    return {"rope_type": kind[type(scaling)], **numbers}


def sampling_defaults(directory: Path) -> dict[str, Any]:
    """Read the sampling settings in the checkpoint's `FILE`, by their name in `SamplingParams`; empty without this
    file. Raises ValueError that names the file for a value that is not allowed."""
    file = directory / FILE
    found = read_json(file) if file.is_file() else {}
    defaults = {name: found[name] for name in SAMPLING if found.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except ValueError as error:
        raise ValueError(f"{file}: {error}. Mend the file, or give --generation-config ignore") from error
    return defaults
