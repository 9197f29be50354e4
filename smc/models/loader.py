"""Weights between a Hugging Face directory and a `Decoder`, in both directions. Knows nothing about tokenizers or serving.

One map (`weight_places`) says where every published tensor lives in our fused parameters; loading, saving and the check
of headers all go through it. Loading streams one tensor at a time, so memory never holds the model twice; a rank of several
reads its own part of each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from smc.models.config import ModelConfig, read_json
from smc.models.decoder import Decoder
from smc.models.parallel import WHOLE, Axis, Reduce, Shard, Split, local_config

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
STORED_DTYPES = {"F32": 4, "F16": 2, "BF16": 2}
"""Supported storage types and their bytes per element."""


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


@dataclass(frozen=True)
class StoredTensor:
    """What a safetensors header says about one tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


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
    model = _allocate(local_config(config, shard), reduce, dtype, device)
    parameters = dict(model.named_parameters())
    if shard.degree > 1:
        for weight in parameters.values():
            weight.zero_()  # what no place covers is padding
    for file in sorted({tensor.file for tensor in stored.values()}):
        with _open(file) as opened:
            for name in (name for name, tensor in stored.items() if tensor.file == file):
                view = places[name].view(parameters)
                view.copy_(opened.get_slice(name)[places[name].part])
                _require_finite(name, view)
    return model


def save_model(model: Decoder, directory: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Write `config.json` and `model.safetensors` with the published names, stored in `dtype` (default: as they are)."""
    if model.reduce is not None:
        raise ValueError("this decoder is one rank's shard (it has a reduce); only a whole model can be saved")
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

    Returns exactly the tensors to load. Raises ValueError listing what is missing, unknown, misshapen or badly typed.
    """
    places = weight_places(config)
    stored = {name: tensor for name, tensor in read_headers(directory).items() if not _ignored(name, config)}
    problems = []
    if missing := [name for name in places if name not in stored]:
        problems.append(f"{len(missing)} weights are missing: {_first(missing)}")
    if unknown := [name for name in stored if name not in places]:
        problems.append(f"{len(unknown)} weights are unknown to {config.family}: {_first(unknown)}")
    for name in (name for name in places if name in stored):
        found, expected = stored[name], places[name].shape
        if found.shape != expected:
            problems.append(f"{name} has shape {list(found.shape)}, expected {list(expected)}")
        if found.dtype not in STORED_DTYPES:
            problems.append(f"{name} is stored as {found.dtype}; supported: {', '.join(STORED_DTYPES)}")
    if problems:
        raise ValueError(f"{directory}: {_first(problems, separator='; ')}")
    return stored


def read_headers(directory: str | Path) -> dict[str, StoredTensor]:
    """Every tensor of every safetensors file of the model, from the headers alone."""
    tensors = {}
    for file in _weight_files(Path(directory)):
        with _open(file) as opened:
            for name in opened.keys():  # noqa: SIM118  (not a dict)
                header = opened.get_slice(name)
                tensors[name] = StoredTensor(file, tuple(header.get_shape()), header.get_dtype())
    return tensors


def stored_bytes(tensors: dict[str, StoredTensor]) -> int:
    return sum(math.prod(tensor.shape) * STORED_DTYPES[tensor.dtype] for tensor in tensors.values())


def _weight_files(directory: Path) -> list[Path]:
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    index = directory / INDEX_FILE
    if not index.is_file():
        raise ValueError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}; {_what_is_there(directory)}")
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise ValueError(f"{index} has no weight_map")
    files = [directory / name for name in sorted(set(shard_of.values()))]
    if absent := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"{directory}: {len(absent)} of {len(files)} shards named by {INDEX_FILE} are missing: {_first(absent)}")
    return files


def _what_is_there(directory: Path) -> str:
    found = sorted(path.name for pattern in ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf") for path in directory.glob(pattern))
    if not found:
        return "no weights were found"
    return f"found {_first(found)}; only safetensors files of these names are supported, .bin and other formats are not"


@contextmanager
def _open(file: Path) -> Iterator[safe_open]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a readable safetensors file: {error}") from error


def _allocate(config: ModelConfig, reduce: Reduce | None, dtype: torch.dtype, device: torch.device | str) -> Decoder:
    with torch.device("meta"):
        model = Decoder(config, reduce).to(dtype)
    if config.tied_embeddings:
        model.lm_head.weight = None  # else each of the two names would get a matrix of its own
    # Not `to_empty`: of tensors on `meta`, torch imports a library of symbols for it, which takes as long as torch itself.
    model._apply(lambda weight: torch.empty(weight.shape, dtype=weight.dtype, device=device))
    if config.tied_embeddings:
        model.lm_head.weight = model.embed.weight
    return model.requires_grad_(False).eval()


def _ignored(name: str, config: ModelConfig) -> bool:
    """Derived from the config (old Llama files store it), or the second name of a tied matrix."""
    return name.endswith("rotary_emb.inv_freq") or (config.tied_embeddings and name == "lm_head.weight")


def _require_finite(name: str, weight: Tensor) -> None:
    """Looks at the converted weight, so that overflow to a narrower type is found too."""
    if not weight.numel():  # all that this rank holds of it is padding
        return
    low, high = weight.aminmax()  # propagates NaN, and unlike isfinite allocates nothing
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"{name} holds NaN or inf as {str(weight.dtype).removeprefix('torch.')}; every weight must be finite")


def _first(items: Sequence[str], count: int = 5, separator: str = ", ") -> str:
    more = f"{separator}and {len(items) - count} more" if len(items) > count else ""
    return separator.join(items[:count]) + more
