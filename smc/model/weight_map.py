"""Where every published tensor lives in our fused parameters: one map, which loading, saving, growing and the check of
headers go through.

Knows nothing about values, and imports no torch: whether a directory can be served is said before that is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from smc.model.config import ModelConfig, compression_of
from smc.model.parallel import WHOLE, Axis, Shard, Split
from smc.model.quantisation import Compression
from smc.model.safetensors_files import STORED_DTYPES, STORED_FP8, StoredTensor, first, read_headers

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Where this rank's part of a published tensor lives: in one of our parameters, from row `start`."""

    parameter: str
    start: int
    axes: tuple[Axis, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the published tensor, whole."""
        return tuple(axis.size for axis in self.axes)

    @property
    def part(self) -> tuple[slice, ...]:
        """What to read of the published tensor."""
        return tuple(slice(axis.held.start, axis.held.stop) for axis in self.axes)

    def view(self, parameters: Mapping[str, Tensor]) -> Tensor:
        rows, *columns = (len(axis.held) for axis in self.axes)
        return parameters[self.parameter].detach()[(slice(self.start, self.start + rows), *map(slice, columns))]

    def put(self, parameters: Mapping[str, Tensor], rows: slice, weight_NK: Tensor, scale_N: Tensor) -> None:
        """FP8 of some of the rows held, and their scales; `weight_NK` has all columns of the published tensor."""
        scale = parameters[f"{self.parameter.removesuffix('weight')}scale"].detach()
        self.view(parameters)[rows] = weight_NK[:, self.part[1]]
        scale[self.start + rows.start : self.start + rows.stop] = scale_N


def weight_places(config: ModelConfig, shard: Shard = WHOLE) -> dict[str, Place]:
    """Published name -> place, for every weight of the whole model `config`. A tied `lm_head.weight` is not among
    them."""
    vocab, hidden, split = Axis.whole(config.vocab_size), Axis.whole(config.hidden_size), Split.of(config, shard)
    places = {"model.embed_tokens.weight": Place("embed.weight", 0, (vocab, hidden))}
    for layer in range(config.num_layers):
        places |= _layer_places(config, split, f"model.layers.{layer}.", f"layers.{layer}.")
    places["model.norm.weight"] = Place("norm.weight", 0, (hidden,))
    if not config.tied_embeddings:
        places["lm_head.weight"] = Place("lm_head.weight", 0, (vocab, hidden))
    return places


def count_parameters(config: ModelConfig) -> int:
    """Number of weights; a tied matrix counts once."""
    return sum(math.prod(place.shape) for place in weight_places(config).values())


def _layer_places(config: ModelConfig, split: Split, theirs: str, ours: str) -> dict[str, Place]:
    hidden, query, key, inner = Axis.whole(config.hidden_size), split.query, split.key, split.inner
    places = {
        f"{theirs}input_layernorm.weight": Place(f"{ours}attn_norm.weight", 0, (hidden,)),
        f"{theirs}self_attn.o_proj.weight": Place(f"{ours}o.weight", 0, (hidden, query)),
        f"{theirs}post_attention_layernorm.weight": Place(f"{ours}mlp_norm.weight", 0, (hidden,)),
        f"{theirs}mlp.gate_proj.weight": Place(f"{ours}gate_up.weight", 0, (inner, hidden)),
        f"{theirs}mlp.up_proj.weight": Place(f"{ours}gate_up.weight", inner.room, (inner, hidden)),
        f"{theirs}mlp.down_proj.weight": Place(f"{ours}down.weight", 0, (hidden, inner)),
    }
    for letter, start, rows in (("q", 0, query), ("k", query.room, key), ("v", query.room + key.room, key)):
        places[f"{theirs}self_attn.{letter}_proj.weight"] = Place(f"{ours}qkv.weight", start, (rows, hidden))
        if config.qkv_bias:
            places[f"{theirs}self_attn.{letter}_proj.bias"] = Place(f"{ours}qkv.bias", start, (rows,))
    if config.qk_norm:
        for letter in "qk":
            places[f"{theirs}self_attn.{letter}_norm.weight"] = Place(
                f"{ours}{letter}_norm.weight", 0, (Axis.whole(config.head_dim),)
            )
    return places


def check_weights(directory: str | Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """Compare the safetensors headers with what the model needs; reads no weights.

    Returns exactly the tensors to load, scales of FP8 weights among them. Raises ValueError listing what is missing,
    unknown, misshapen or badly typed."""
    places, compression = weight_places(config), compression_of(directory)
    stored = {
        name: tensor for name, tensor in read_headers(directory).items() if not _ignored(name, config, compression)
    }
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {name: (place.shape,) for name, place in places.items()}
    if compression is not None:
        compressed = [
            name
            for name in places
            if name in stored and stored[name].dtype == STORED_FP8 and len(places[name].shape) == 2
        ]
        shapes |= {compression.scale_name(name): compression.scale_shapes(*places[name].shape) for name in compressed}
    problems = []
    if missing := [name for name in shapes if name not in stored]:
        problems.append(f"{len(missing)} weights are missing: {first(missing)}")
    if unknown := [name for name in stored if name not in shapes]:
        problems.append(f"{len(unknown)} weights are unknown to {config.family}: {first(unknown)}")
    for name in (name for name in shapes if name in stored):
        found, allowed = stored[name], shapes[name]
        if found.shape not in allowed:
            problems.append(
                f"{name} has shape {list(found.shape)}, expected {' or '.join(str(list(shape)) for shape in allowed)}"
            )
        types = [*STORED_DTYPES, *([STORED_FP8] if compression and name in compressed else [])]
        if found.dtype not in types:
            problems.append(f"{name} is stored as {found.dtype}; supported: {', '.join(types)}")
    if problems:
        raise ValueError(f"{directory}: {first(problems, separator='; ')}")
    return stored


def _ignored(name: str, config: ModelConfig, compression: Compression | None) -> bool:
    """Derived from the config (old Llama files store it), the second name of a tied matrix, or scales that are not
    used."""
    tied = config.tied_embeddings and name.startswith("lm_head.")
    return name.endswith("rotary_emb.inv_freq") or tied or (compression is not None and compression.passes_over(name))
