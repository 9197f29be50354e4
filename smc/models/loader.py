"""Weights between a Hugging Face directory and a `Decoder`, in both directions. Knows nothing about tokenizers or serving.

One map (`weight_places`) says where every published tensor lives in our fused parameters; loading, saving and the check
of headers all go through it. Loading streams a piece of a tensor at a time, so memory never holds the model twice; a rank of several
reads its own part of each. Of what it is to hold in FP8 it reads whole rows, so that scales do not depend on how many ranks there are.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from smc.models.compression import Compression
from smc.models.config import ModelConfig, compression_of
from smc.models.decoder import Decoder, empty_decoder
from smc.models.linear import FP8, pieces, quantise
from smc.models.parallel import WHOLE, Axis, Reduce, Shard, Split, local_config
from smc.models.storage import SINGLE_FILE, STORED_DTYPES, STORED_FP8, Files, StoredTensor, first, read_headers


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

    def view(self, parameters: dict[str, Tensor]) -> Tensor:
        rows, *columns = (len(axis.held) for axis in self.axes)
        return parameters[self.parameter].detach()[(slice(self.start, self.start + rows), *map(slice, columns))]

    def put(self, parameters: dict[str, Tensor], rows: slice, weight_NK: Tensor, scale_N: Tensor) -> None:
        """FP8 of some of the rows held, and their scales; `weight_NK` has all columns of the published tensor."""
        scale = parameters[f"{self.parameter.removesuffix('weight')}scale"].detach()
        self.view(parameters)[rows] = weight_NK[:, self.part[1]]
        scale[self.start + rows.start : self.start + rows.stop] = scale_N


def weight_places(config: ModelConfig, shard: Shard = WHOLE) -> dict[str, Place]:
    """Published name -> place, for every weight of the whole model `config`. A tied `lm_head.weight` is not among them."""
    vocab, hidden, split = Axis.whole(config.vocab_size), Axis.whole(config.hidden_size), Split.of(config, shard)
    places = {"model.embed_tokens.weight": Place("embed.weight", 0, (vocab, hidden))}
    for layer in range(config.num_layers):
        places |= _layer_places(config, split, f"model.layers.{layer}.", f"layers.{layer}.")
    places["model.norm.weight"] = Place("norm.weight", 0, (hidden,))
    if not config.tied_embeddings:
        places["lm_head.weight"] = Place("lm_head.weight", 0, (vocab, hidden))
    return places


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
            places[f"{theirs}self_attn.{letter}_norm.weight"] = Place(f"{ours}{letter}_norm.weight", 0, (Axis.whole(config.head_dim),))
    return places


def load_model(
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    shard: Shard = WHOLE,
    reduce: Reduce | None = None,
) -> Decoder:
    """Read a Hugging Face directory, or one rank's shard of it, into a frozen `Decoder` in eval mode.

    Raises ValueError for anything missing, unknown, misshapen, corrupt or not finite, naming the file or the weight. A value
    that is not finite stops only the ranks that hold it.
    """
    if shard.degree > 1 and reduce is None:
        raise ValueError(f"degree={shard.degree} without reduce; ranks that hold a model together need a sum over them")
    config = ModelConfig.from_hf(directory)
    places = weight_places(config, shard)
    stored = check_weights(directory, config)
    model = empty_decoder(local_config(config, shard), reduce, dtype, device)
    parameters = dict(model.named_parameters())
    if shard.degree > 1:
        for weight in parameters.values():
            weight.zero_()  # what no place covers is padding
    with Files(stored) as files:
        published = Published(files, compression_of(directory), torch.device(device))
        for name in sorted(places, key=lambda name: stored[name].file):
            _load(published, name, places[name], parameters)
    model.copy_head()
    return model


@dataclass(frozen=True)
class Published:
    """Weights of a directory as numbers, whatever they are stored as. Parts are slices of the whole tensor."""

    files: Files
    compression: Compression | None
    device: torch.device

    def values(self, name: str, part: tuple[slice, ...]) -> Tensor:
        stored = self.files.part(name, part).to(self.device)
        return self.compression.values(stored, self._scale(name), *part) if stored.dtype == FP8 else stored

    def rows(self, name: str, rows: slice) -> tuple[Tensor, Tensor]:
        """Whole rows in FP8, [N, K], and their scales [N]. Those stored so stay as they are; blocks are rounded anew."""
        tensor = self.files.tensors[name]
        part = (rows, slice(0, tensor.shape[1]))
        if tensor.dtype == STORED_FP8 and not self.compression.blocks:
            return self.files.part(name, part).to(self.device), self.compression.scale_of_rows(self._scale(name), rows)
        return quantise(self.values(name, part))

    def _scale(self, name: str) -> Tensor:
        scale = self.compression.scale_name(name)
        return self.files.part(scale, tuple(slice(0, size) for size in self.files.tensors[scale].shape)).to(self.device)


def _load(published: Published, name: str, place: Place, parameters: dict[str, Tensor]) -> None:
    view, (held, *columns) = place.view(parameters), place.part
    for piece in pieces(*view.shape):
        rows = slice(held.start + piece.start, held.start + piece.stop)
        if view.dtype == FP8:
            weight_NK, scale_N = published.rows(name, rows)
            _require_finite(name, weight_NK.float(), FP8)
            _require_finite(name, scale_N, FP8)
            place.put(parameters, piece, weight_NK, scale_N)
        else:
            view[piece].copy_(published.values(name, (rows, *columns)))
            _require_finite(name, view[piece], view.dtype)


def save_model(model: Decoder, directory: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Write `config.json` and `model.safetensors` with the published names, stored in `dtype` (default: as they are)."""
    if model.reduce is not None:
        raise ValueError("this decoder is one rank's shard (it has a reduce); only a whole model can be saved")
    if model.lm_head.scale is not None:
        raise ValueError("this decoder's weights are FP8, which are not saved; load it as bfloat16")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    dtype = dtype or model.embed.weight.dtype
    parameters = dict(model.named_parameters())
    # Copies, because safetensors refuses tensors that share storage, as slices of a fused matrix do.
    tensors = {name: place.view(parameters).to("cpu", dtype, copy=True) for name, place in weight_places(model.config).items()}
    save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})
    config = model.config.to_hf() | {"dtype": str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def check_weights(directory: str | Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """Compare the safetensors headers with what the model needs; reads no weights.

    Returns exactly the tensors to load, scales of FP8 weights among them. Raises ValueError listing what is missing, unknown, misshapen
    or badly typed.
    """
    places, compression = weight_places(config), compression_of(directory)
    stored = {name: tensor for name, tensor in read_headers(directory).items() if not _ignored(name, config, compression)}
    shapes = {name: (place.shape,) for name, place in places.items()}
    if compression is not None:
        compressed = [name for name in places if name in stored and stored[name].dtype == STORED_FP8 and len(places[name].shape) == 2]
        shapes |= {compression.scale_name(name): compression.scale_shapes(*places[name].shape) for name in compressed}
    problems = []
    if missing := [name for name in shapes if name not in stored]:
        problems.append(f"{len(missing)} weights are missing: {first(missing)}")
    if unknown := [name for name in stored if name not in shapes]:
        problems.append(f"{len(unknown)} weights are unknown to {config.family}: {first(unknown)}")
    for name in (name for name in shapes if name in stored):
        found, allowed = stored[name], shapes[name]
        if found.shape not in allowed:
            problems.append(f"{name} has shape {list(found.shape)}, expected {' or '.join(str(list(shape)) for shape in allowed)}")
        types = [*STORED_DTYPES, *([STORED_FP8] if compression and name in compressed else [])]
        if found.dtype not in types:
            problems.append(f"{name} is stored as {found.dtype}; supported: {', '.join(types)}")
    if problems:
        raise ValueError(f"{directory}: {first(problems, separator='; ')}")
    return stored


def _ignored(name: str, config: ModelConfig, compression: Compression | None) -> bool:
    """Derived from the config (old Llama files store it), the second name of a tied matrix, or scales that are not used."""
    tied = config.tied_embeddings and name.startswith("lm_head.")
    return name.endswith("rotary_emb.inv_freq") or tied or (compression is not None and compression.passes_over(name))


def _require_finite(name: str, values: Tensor, dtype: torch.dtype) -> None:
    """Looks at converted numbers, so that overflow to a narrower type is found too."""
    if not values.numel():  # all that this rank holds of it is padding
        return
    low, high = values.aminmax()  # propagates NaN, and unlike isfinite allocates nothing
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"{name} holds NaN or inf as {str(dtype).removeprefix('torch.')}; every weight must be finite")
