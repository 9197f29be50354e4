"""A small model padded to the shape of a large one: the same function, with the rest of each matrix zero.

The padded model gives the small model's tokens at the large model's cost, so speed can be measured without the large
checkpoint. Sizes and the maximum context come from the shape; the family, rotary settings and biases come from the
small model. The following keeps the function unchanged:

- Width d -> D: RMS norms divide by the mean over D, so norm weights are scaled by sqrt(d / D) and eps by d / D.
- Heads: each small head is written into a large head of the matching key/value group. With head size h -> H, rotary
  pair i of h has the frequency of pair i H / h of H, so features move to that pair. Queries are scaled by sqrt(H / h)
  to cancel the softmax's 1 / sqrt(H). Query and key norms share eps with the other norms, so their inputs are scaled
  until that eps has the same effect.
- Additional inner features, heads and layers add zero to the residual.
- Additional tokens: every embedding gets one feature with the constant value c. Only the final norm passes it on, to
  the additional rows of the head, which turn it into a logit far below all others. c^2 is subtracted from eps, which
  becomes (eps d - c^2) / D. The size of the logit depends on the residual, so guidance, which weighs two such logits
  against each other, may still draw an additional token.

A head with additional tokens cannot be tied to the embedding. The padded model is then untied, even if the shape is
tied. A decoding step still reads as many bytes as that of a tied model, because it reads only one embedding row for
each token; memory holds one more matrix.

`smcserve grow` (`benchmarks/grow.py`) writes a padded model as a directory.

Local axes: Y indices of any axis.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from smc.model.config import SIZES, ModelConfig
from smc.model.decoder import Decoder, empty_decoder
from smc.model.files import read_json, write_json
from smc.model.linear import FP8, INT4, pieces, quantise
from smc.model.parallel import WHOLE, Axis, Reduce, Shard, local_config
from smc.model.tokenizer import COPIED_TOKENIZER_FILES, Tokenizer
from smc.model.weight_map import WeightSlice, weight_slices

CONSTANT_AFTER_NORM = 2.0**4
"""Value of the constant feature after the final norm, if the residual has a root mean square of 1."""
PADDING_HEAD_WEIGHT = -(2.0**12)
"""Weight of the constant feature in the head's additional rows. Their logits are below -256 for a residual of up to
256, and below -64 for one of up to 1,024."""

_AXES = {
    "embed_tokens.weight": ("vocab", "hidden"),
    "input_layernorm.weight": ("hidden",),
    "self_attn.q_proj.weight": ("query", "hidden"),
    "self_attn.k_proj.weight": ("key", "hidden"),
    "self_attn.v_proj.weight": ("key", "hidden"),
    "self_attn.q_proj.bias": ("query",),
    "self_attn.k_proj.bias": ("key",),
    "self_attn.v_proj.bias": ("key",),
    "self_attn.q_norm.weight": ("head",),
    "self_attn.k_norm.weight": ("head",),
    "self_attn.o_proj.weight": ("hidden", "query"),
    "post_attention_layernorm.weight": ("hidden",),
    "mlp.gate_proj.weight": ("inner", "hidden"),
    "mlp.up_proj.weight": ("inner", "hidden"),
    "mlp.down_proj.weight": ("hidden", "inner"),
    "norm.weight": ("hidden",),
    "lm_head.weight": ("vocab", "hidden"),
}
"""Axes of every published tensor, by its name without the layer prefix."""


@dataclass(frozen=True)
class AxisMap:
    """Index pairs of one axis: `small_Y` of the small model is written to `large_Y` of the padded one. An index of the
    small model may occur several times."""

    small_Y: Tensor
    large_Y: Tensor

    @staticmethod
    def identity(count: int) -> AxisMap:
        return AxisMap(torch.arange(count), torch.arange(count))

    def restrict(self, axis: Axis) -> AxisMap:
        """Return the pairs in the one span of `axis`, with `large_Y` counted from the span's first index."""
        is_held_Y = (self.large_Y >= axis.held.start) & (self.large_Y < axis.held.stop)
        return AxisMap(self.small_Y[is_held_Y], self.large_Y[is_held_Y] - axis.held.start)


class PaddedWeights:
    """The published tensors of a small model, padded to a large shape. Raises ValueError if the shape cannot hold
    it."""

    def __init__(self, small: Decoder, shape: ModelConfig) -> None:
        self.config = padded_config(small.config, shape)
        self._small_vocab, self._constant = small.config.vocab_size, constant_feature(small.config, shape)
        self._feature = small.config.hidden_size
        self._axis_maps, self._scales = _axis_maps(small.config, self.config), _scales(small.config, self.config)
        parameters = dict(small.named_parameters())
        self._weights = {name: where.view(parameters) for name, where in weight_slices(small.config).items()}
        if small.config.tied_embeddings:
            self._weights["lm_head.weight"] = self._weights["model.embed_tokens.weight"]

    def fill(self, name: str, out: Tensor, axes: Sequence[Axis]) -> None:
        """Write the non-zero values of a published tensor into `out`, which must be zero. `out` holds the part of the
        tensor that `axes` give."""
        kind = re.sub(r"^model\.(layers\.\d+\.)?", "", name)
        if name in self._weights:  # a layer that the small model lacks stays zero
            maps = [self._axis_maps[letter].restrict(axis) for letter, axis in zip(_AXES[kind], axes)]
            block = self._weights[name][_rectangle([one.small_Y for one in maps])].float() * self._scales.get(kind, 1.0)
            out[_rectangle([one.large_Y.to(out.device) for one in maps])] = block.to(out.device, out.dtype)
        if self._constant:
            self._fill_constant(kind, out, axes[0].held.start)

    def _fill_constant(self, kind: str, out: Tensor, first_row: int) -> None:
        """Write the constant feature. `out` has all columns of the tensor, and rows from `first_row` on."""
        if kind == "embed_tokens.weight":
            out[:, self._feature] = self._constant
        elif kind == "norm.weight":
            out[self._feature] = CONSTANT_AFTER_NORM / self._constant
        elif kind == "lm_head.weight":
            out[max(0, self._small_vocab - first_row) :, self._feature] = PADDING_HEAD_WEIGHT


def padded_model(
    small: Decoder,
    shape: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    shard: Shard = WHOLE,
    reduce: Reduce | None = None,
) -> Decoder:
    """Create `small` padded to `shape`, or one rank's shard of it, on `device`. Raises ValueError if the shape cannot
    hold it."""
    if dtype == INT4:
        raise ValueError("dtype=int4 is not supported for padded models (load=grown); take fp8 or bfloat16")
    weights = PaddedWeights(small, shape)
    model = empty_decoder(local_config(weights.config, shard), reduce, dtype, device)
    parameters = dict(model.named_parameters())
    for weight in parameters.values():
        weight.zero_()
    for name, where in weight_slices(weights.config, shard).items():
        if parameters[where.parameter].dtype == FP8:
            for band in where.bands():
                _fill_fp8(weights, name, band, parameters)
        else:
            for block in where.blocks():
                weights.fill(name, block.view(parameters), block.axes)
    model.copy_head()
    return model


def _fill_fp8(weights: PaddedWeights, name: str, where: WeightSlice, parameters: Mapping[str, Tensor]) -> None:
    """Quantise whole rows, a few at a time, so that scales do not depend on the number of ranks."""
    (rows, columns), device = where.axes, parameters[where.parameter].device
    for piece in pieces(len(rows.held), columns.size):
        held = rows.held[piece]
        whole = torch.zeros(len(held), columns.size, device=device)
        weights.fill(name, whole, (Axis.part(rows.size, held), Axis.whole(columns.size)))
        where.write_fp8(parameters, piece, *quantise(whole))


def padded_config(small: ModelConfig, shape: ModelConfig) -> ModelConfig:
    """Return the configuration of the padded model. Raises ValueError that names every size of the shape that is too
    small."""
    if problems := _problems(small, shape):
        raise ValueError(
            f"the shape cannot hold the model: {'; '.join(problems)}. Take a larger shape or a smaller model"
        )
    return replace(
        small,
        **{field: getattr(shape, field) for field in SIZES},
        rms_eps=(small.rms_eps * small.hidden_size - constant_feature(small, shape) ** 2) / shape.hidden_size,
        tied_embeddings=small.tied_embeddings and shape.tied_embeddings and small.vocab_size == shape.vocab_size,
    )


def constant_feature(small: ModelConfig, shape: ModelConfig) -> float:
    """Return the value c of the constant feature; 0 if the shape has no additional tokens. A power of two, which every
    dtype holds exactly, with c^2 at most eps d / 2."""
    if shape.vocab_size == small.vocab_size:
        return 0.0
    return 2.0 ** math.floor(math.log2(small.rms_eps * small.hidden_size / 2) / 2)


def _problems(small: ModelConfig, shape: ModelConfig) -> list[str]:
    problems = []
    if not small.rms_eps > 0:
        problems.append(f"rms_norm_eps={small.rms_eps!r} of the model; allowed: above 0")
    extra = 1 if shape.vocab_size > small.vocab_size else 0
    needed = {
        "vocab_size": small.vocab_size,
        "hidden_size": small.hidden_size + extra,
        "num_layers": small.num_layers,
        "intermediate_size": small.intermediate_size,
        "num_kv_heads": small.num_kv_heads * _kv_copies(small, shape),
    }
    why = {
        "hidden_size": ", one more than the model's, for tokens that it does not have" if extra else "",
        "num_kv_heads": (
            f", for {small.num_kv_heads} of {_queries_per_key(small)} query heads each, "
            f"where the shape's have {_queries_per_key(shape)}"
        ),
    }
    for field, least in needed.items():
        if getattr(shape, field) < least:
            problems.append(f"{field}={getattr(shape, field)}; allowed: >= {least}{why.get(field, '')}")
    if shape.head_dim % small.head_dim:
        problems.append(f"head_dim={shape.head_dim}; allowed: multiples of the model's {small.head_dim}")
    return problems


def _queries_per_key(config: ModelConfig) -> int:
    """Query heads of one key/value head."""
    return config.num_heads // config.num_kv_heads


def _kv_copies(small: ModelConfig, large: ModelConfig) -> int:
    """Number of copies of each key/value head of the small model. More than one if a group of the large shape has fewer
    query heads than a group of the small model."""
    return -(-_queries_per_key(small) // _queries_per_key(large))


def _axis_maps(small: ModelConfig, large: ModelConfig) -> dict[str, AxisMap]:
    copies, group, large_group = _kv_copies(small, large), _queries_per_key(small), _queries_per_key(large)
    features, query = torch.arange(small.head_dim), torch.arange(small.num_heads)
    half = small.head_dim // 2
    head = features % half * (large.head_dim // small.head_dim) + features // half * (large.head_dim // 2)
    key = torch.arange(small.num_kv_heads * copies)
    large_key = query // group * copies + query % group // large_group
    large_query = large_key * large_group + query % group % large_group

    def heads(small_Y: Tensor, large_Y: Tensor) -> AxisMap:
        return AxisMap(
            (small_Y[:, None] * small.head_dim + features).flatten(),
            (large_Y[:, None] * large.head_dim + head).flatten(),
        )

    return {
        "vocab": AxisMap.identity(small.vocab_size),
        "hidden": AxisMap.identity(small.hidden_size),
        "inner": AxisMap.identity(small.intermediate_size),
        "head": AxisMap(features, head),
        "query": heads(query, large_query),
        "key": heads(key // copies, key),
    }


def _scales(small: ModelConfig, large: ModelConfig) -> dict[str, float]:
    """Factors of the weights, by the names of `_AXES`. Weights without an entry are not scaled."""
    norm, heads = math.sqrt(small.hidden_size / large.hidden_size), math.sqrt(large.head_dim / small.head_dim)
    scales = dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight"), norm)
    if small.traits.qk_norm:
        # These norms cancel the scale of their inputs, except for eps. The weight of the query norm would take both
        # sqrt(h / H) and the softmax's sqrt(H / h), whose product is 1.
        query = key = heads * math.sqrt(large.rms_eps / small.rms_eps)
        scales["self_attn.k_norm.weight"] = 1 / heads
    else:
        query, key = heads, 1.0
    for kind in ("weight", "bias"):
        scales |= {f"self_attn.q_proj.{kind}": query, f"self_attn.k_proj.{kind}": key}
    return scales


def _rectangle(indices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return an index of the sub-tensor at `indices`, which are one tensor for each axis."""
    return tuple(
        index.view([-1 if other == axis else 1 for other in range(len(indices))]) for axis, index in enumerate(indices)
    )


def save_padded_tokenizer(small: Path, config: ModelConfig, directory: Path) -> None:
    """Write the tokenizer of directory `small` for the padded `config`.

    Additional ids get names that no text is encoded to, so that token distributions cover the whole vocabulary, as for
    any model of this shape. No names are added if the small model itself has ids without a token, or if its tokenizer
    is not BPE."""
    for name in COPIED_TOKENIZER_FILES:
        if (small / name).is_file():
            shutil.copy(small / name, directory / name)
    settings = small / "tokenizer_config.json"
    if settings.is_file():
        write_json(directory / settings.name, read_json(settings) | {"model_max_length": config.max_context})
    raw, size = read_json(small / "tokenizer.json"), Tokenizer.load(small).size
    if raw["model"].get("type") == "BPE" and size == ModelConfig.from_hf(small).vocab_size:
        vocabulary = raw["model"]["vocab"]
        # The library would renumber an added token that is missing here, behind the last id.
        vocabulary |= {token["content"]: token["id"] for token in raw["added_tokens"]}
        vocabulary |= {f"<|unused {token_id}|>": token_id for token_id in range(size, config.vocab_size)}
    write_json(directory / "tokenizer.json", raw)


def padded_tokenizer(small: Path, config: ModelConfig) -> Tokenizer:
    """Return the tokenizer that `save_padded_tokenizer` writes."""
    with TemporaryDirectory() as directory:
        save_padded_tokenizer(small, config, Path(directory))
        return Tokenizer.load(directory)
