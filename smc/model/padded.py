"""A small model in the shape of a large one: the same function inside matrices of the large size, the rest zeros.

Every token is the small model's, and every byte costs what the large shape's costs. Sizes and the longest context are
the shape's; what else decides the function (family, rotary settings, biases) is the small model's. How it stays the
same:

- Width d -> D: norms divide by the mean over D, so their weights are times sqrt(d / D) and their eps is times d / D.
- Heads: a small head lies in a large head of the right group. Head size h -> H: rotary pair i of h has the frequency of
  pair i H / h of
  H, so features move there; queries are times sqrt(H / h), for the softmax's 1 / sqrt(H). Where queries and keys have
  norms, which share
  the eps of the others, both come in at such a size that this eps is the right one.
- More inner features, heads or layers: what they add to the residual is zero.
- More tokens: one feature of the residual is a constant c in every embedding, and only the last norm lets it through,
  to rows of the head
  that make of it a logit far below all others. Its square comes out of eps, which becomes (eps d - c^2) / D. How far
  depends on the size
  of the residual, so under guidance, where two such logits are weighed against each other, these tokens may come to be
  drawn.

Such a head cannot be tied to the embedding, so with more tokens the grown model is untied, whatever the shape is. A
step reads as many bytes then as of a tied one (of the embedding it reads a row for each token), in memory is the
embedding more.

Knows nothing about files; see `smc.model.padded`. Axes: X indices of any axis.

A grown model (`smc.model.padded`) as a Hugging Face directory that any server can load. Never holds more than one of
its tensors."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import torch
from torch import Tensor

from smc.model.config import ModelConfig, read_json
from smc.model.decoder import Decoder, empty_decoder
from smc.model.linear import FP8, pieces, quantise
from smc.model.loader import load_model
from smc.model.parallel import WHOLE, Axis, Reduce, Shard, local_config
from smc.model.safetensors_files import INDEX_FILE, SINGLE_FILE
from smc.model.tokenizer import Tokenizer
from smc.model.weight_map import Place, weight_places

RAISED = 2.0**4
"""The constant feature behind the last norm, were the root of the residual's mean square 1."""
LOWERED = -(2.0**12)
"""What the head's other rows make of it: their logits are below -256 up to a residual of 256, and below -64 up to one
of 1,024."""

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
"""Of every published tensor, by its name without the layer."""


@dataclass(frozen=True)
class Seats:
    """Where the indices of an axis of the small model lie in the large one's; one may lie in several places."""

    small_X: Tensor
    large_X: Tensor

    @staticmethod
    def first(count: int) -> Seats:
        return Seats(torch.arange(count), torch.arange(count))

    def held(self, axis: Axis) -> Seats:
        """Those of one rank, in its own numbering."""
        is_held_X = (self.large_X >= axis.held.start) & (self.large_X < axis.held.stop)
        return Seats(self.small_X[is_held_X], self.large_X[is_held_X] - axis.held.start)


class PaddedShape:
    """The weights of a small model on their way into a large shape. Raises ValueError if the shape cannot hold them."""

    def __init__(self, small: Decoder, shape: ModelConfig) -> None:
        self.config = grown_config(small.config, shape)
        self._tokens, self._constant = small.config.vocab_size, constant(small.config, shape)
        self._feature = small.config.hidden_size
        self._seats, self._scales = _seats(small.config, self.config), _scales(small.config, self.config)
        parameters = dict(small.named_parameters())
        self._weights = {name: place.view(parameters) for name, place in weight_places(small.config).items()}
        if small.config.tied_embeddings:
            self._weights["lm_head.weight"] = self._weights["model.embed_tokens.weight"]

    def fill(self, name: str, out: Tensor, axes: Sequence[Axis]) -> None:
        """Write what is not zero of a published tensor into `out`, all zero so far, which holds that part of its
        `axes`."""
        kind = re.sub(r"^model\.(layers\.\d+\.)?", "", name)
        if name in self._weights:  # else a layer that the small model does not have
            seats = [self._seats[letter].held(axis) for letter, axis in zip(_AXES[kind], axes)]
            block = self._weights[name][_cross([seat.small_X for seat in seats])].float() * self._scales.get(kind, 1.0)
            out[_cross([seat.large_X.to(out.device) for seat in seats])] = block.to(out.device, out.dtype)
        if self._constant:
            self._fill_constant(kind, out, axes[0].held.start)

    def _fill_constant(self, kind: str, out: Tensor, begin: int) -> None:
        """`out` has all columns of these, and rows from `begin` on."""
        if kind == "embed_tokens.weight":
            out[:, self._feature] = self._constant
        elif kind == "norm.weight":
            out[self._feature] = RAISED / self._constant
        elif kind == "lm_head.weight":
            out[max(0, self._tokens - begin) :, self._feature] = LOWERED


def grown_model(
    small: Decoder,
    shape: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    shard: Shard = WHOLE,
    reduce: Reduce | None = None,
) -> Decoder:
    """`small` in that shape (or one rank's share of it), made where it will live. Raises ValueError if the shape cannot
    hold it."""
    growth = PaddedShape(small, shape)
    model = empty_decoder(local_config(growth.config, shard), reduce, dtype, device)
    parameters = dict(model.named_parameters())
    for weight in parameters.values():
        weight.zero_()
    for name, place in weight_places(growth.config, shard).items():
        view = place.view(parameters)
        if view.dtype == FP8:
            _fill_fp8(growth, name, place, parameters)
        else:
            growth.fill(name, view, place.axes)
    model.copy_head()
    return model


def _fill_fp8(growth: PaddedShape, name: str, place: Place, parameters: Mapping[str, Tensor]) -> None:
    """By whole rows, a piece at a time: see `smc.model.loader`."""
    (rows, columns), device = place.axes, parameters[place.parameter].device
    for piece in pieces(len(rows.held), columns.size):
        held = rows.held[piece]
        whole = torch.zeros(len(held), columns.size, device=device)
        growth.fill(name, whole, (Axis(rows.size, held, len(held)), Axis.whole(columns.size)))
        place.put(parameters, piece, *quantise(whole))


def grown_config(small: ModelConfig, shape: ModelConfig) -> ModelConfig:
    """What a small model is in that shape. Raises ValueError, naming everything that the shape has too little of."""
    if problems := _problems(small, shape):
        raise ValueError(
            f"the shape cannot hold the model: {'; '.join(problems)}. Take a larger shape or a smaller model"
        )
    return replace(
        small,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        max_context=shape.max_context,
        rms_eps=(small.rms_eps * small.hidden_size - constant(small, shape) ** 2) / shape.hidden_size,
        tied_embeddings=small.tied_embeddings and shape.tied_embeddings and small.vocab_size == shape.vocab_size,
    )


def constant(small: ModelConfig, shape: ModelConfig) -> float:
    """The constant feature: a power of two, which every type holds exactly, of half of eps d at most. 0 if there are no
    other tokens."""
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
        "num_kv_heads": small.num_kv_heads * _copies(small, shape),
    }
    why = {
        "hidden_size": ", one more than the model's, for tokens that it does not have" if extra else "",
        "num_kv_heads": f", for {small.num_kv_heads} of {_group(small)} query heads each, where the shape's have {_group(shape)}",
    }
    for field, least in needed.items():
        if getattr(shape, field) < least:
            problems.append(f"{field}={getattr(shape, field)}; allowed: >= {least}{why.get(field, '')}")
    if shape.head_dim % small.head_dim:
        problems.append(f"head_dim={shape.head_dim}; allowed: multiples of the model's {small.head_dim}")
    return problems


def _group(config: ModelConfig) -> int:
    """Query heads of a key/value head."""
    return config.num_heads // config.num_kv_heads


def _copies(small: ModelConfig, large: ModelConfig) -> int:
    """Key/value heads of the large shape that hold the same small one, because each has room for some of its query
    heads only."""
    return -(-_group(small) // _group(large))


def _seats(small: ModelConfig, large: ModelConfig) -> dict[str, Seats]:
    copies, group, room = _copies(small, large), _group(small), _group(large)
    features, query = torch.arange(small.head_dim), torch.arange(small.num_heads)
    half = small.head_dim // 2
    head = features % half * (large.head_dim // small.head_dim) + features // half * (large.head_dim // 2)
    key = torch.arange(small.num_kv_heads * copies)
    large_query = (query // group * copies + query % group // room) * room + query % group % room

    def heads(small_X: Tensor, large_X: Tensor) -> Seats:
        return Seats(
            (small_X[:, None] * small.head_dim + features).flatten(),
            (large_X[:, None] * large.head_dim + head).flatten(),
        )

    return {
        "vocab": Seats.first(small.vocab_size),
        "hidden": Seats.first(small.hidden_size),
        "inner": Seats.first(small.intermediate_size),
        "head": Seats(features, head),
        "query": heads(query, large_query),
        "key": heads(key // copies, key),
    }


def _scales(small: ModelConfig, large: ModelConfig) -> dict[str, float]:
    """Factors of weights, by the names of `_AXES`; those that are not here stay as they are."""
    norm, heads = math.sqrt(small.hidden_size / large.hidden_size), math.sqrt(large.head_dim / small.head_dim)
    scales = dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight"), norm)
    if small.qk_norm:
        # These norms undo the size of what comes in, but for eps. The query's weight takes both sqrt(h / H) and the
        # softmax's sqrt(H / h).
        query = key = heads * math.sqrt(large.rms_eps / small.rms_eps)
        scales["self_attn.k_norm.weight"] = 1 / heads
    else:
        query, key = heads, 1.0
    for kind in ("weight", "bias"):
        scales |= {f"self_attn.q_proj.{kind}": query, f"self_attn.k_proj.{kind}": key}
    return scales


def _cross(indices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Selects the rectangle of these indices, one tensor an axis."""
    return tuple(
        index.view([-1 if place == axis else 1 for place in range(len(indices))]) for axis, index in enumerate(indices)
    )


FILE_BYTES = 4 << 30
"""Of the largest file, unless a single tensor is larger."""
PIECE_BYTES = 1 << 20
"""Of a file; pieces of zeros are left out of it as holes, which take no room on most disks and read as zeros."""
STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
COPIED = (
    "generation_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
"""Of a tokenizer's files, those that stay as they are."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def save_grown(
    small: str | Path,
    shape: ModelConfig,
    directory: str | Path,
    *,
    dtype: torch.dtype,
    on_bytes: Callable[[int, int], None] | None = None,
) -> ModelConfig:
    """Write the model of `small` in that shape, with its tokenizer. `on_bytes` is told how many of how many are done.

    Raises ValueError if the shape cannot hold it, or if `directory` holds anything; nothing is written then.
    """
    small, directory = Path(small), Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} is there and not an empty directory; give the name of a new one")
    tokenizer = Tokenizer.load(small)
    model = load_model(small)
    if model.config.vocab_size < tokenizer.size:
        raise ValueError(f"{small}: vocab_size={model.config.vocab_size} is below the tokenizer's {tokenizer.size} ids")
    growth = PaddedShape(model, shape)
    directory.mkdir(parents=True, exist_ok=True)
    _save_weights(growth, directory, dtype, on_bytes or (lambda done, whole: None))
    save_tokenizer(small, growth.config, directory)
    raw = read_json(small / "config.json")
    config = growth.config.to_hf() | {name: raw[name] for name in TOKEN_IDS if name in raw} | {"dtype": _name(dtype)}
    _write_json(directory / "config.json", config)
    return growth.config


def save_tokenizer(small: Path, config: ModelConfig, directory: Path) -> None:
    """The tokenizer of `small` for the grown `config`.

    Ids that the small model does not have get names that no text is encoded to, so that laws are over the whole
    vocabulary, as they would be for a model of this shape. Not so if the small model itself has ids without a token, or
    if its tokens are not of a BPE."""
    for name in COPIED:
        if (small / name).is_file():
            shutil.copy(small / name, directory / name)
    settings = small / "tokenizer_config.json"
    if settings.is_file():
        _write_json(directory / settings.name, read_json(settings) | {"model_max_length": config.max_context})
    raw, size = read_json(small / "tokenizer.json"), Tokenizer.load(small).size
    if raw["model"].get("type") == "BPE" and size == ModelConfig.from_hf(small).vocab_size:
        vocabulary = raw["model"]["vocab"]
        # Added tokens as well: one that is not here would be given the number behind the last.
        vocabulary |= {token["content"]: token["id"] for token in raw["added_tokens"]}
        vocabulary |= {f"<|unused {token_id}|>": token_id for token_id in range(size, config.vocab_size)}
    _write_json(directory / "tokenizer.json", raw)


def grown_tokenizer(small: Path, config: ModelConfig) -> Tokenizer:
    """What `save_tokenizer` would write."""
    with TemporaryDirectory() as directory:
        save_tokenizer(small, config, Path(directory))
        return Tokenizer.load(directory)


def _save_weights(
    growth: PaddedShape, directory: Path, dtype: torch.dtype, on_bytes: Callable[[int, int], None]
) -> None:
    places = weight_places(growth.config)
    sizes = {name: math.prod(place.shape) * dtype.itemsize for name, place in places.items()}
    groups, whole, done = list(_groups(sizes)), sum(sizes.values()), 0
    files = (
        [SINGLE_FILE]
        if len(groups) == 1
        else [f"model-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
    )
    for file, names in zip(files, groups):
        with (directory / file).open("wb") as opened:
            opened.write(_header({name: places[name] for name in names}, sizes, dtype))
            for name in names:
                weight = torch.zeros(places[name].shape, dtype=dtype)
                growth.fill(name, weight, places[name].axes)
                _write(opened, weight)
                done += sizes[name]
                on_bytes(done, whole)
            opened.truncate()  # to where it is, behind a hole perhaps
    if len(groups) > 1:
        file_of = {name: file for file, names in zip(files, groups) for name in names}
        _write_json(directory / INDEX_FILE, {"metadata": {"total_size": whole}, "weight_map": file_of})


def _groups(sizes: dict[str, int]) -> Iterator[list[str]]:
    """Names of tensors that go into one file."""
    group: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if group and filled + size > FILE_BYTES:
            yield group
            group, filled = [], 0
        group.append(name)
        filled += size
    yield group


def _header(places: dict[str, Place], sizes: dict[str, int], dtype: torch.dtype) -> bytes:
    """Of a safetensors file: its length in 8 bytes, then names, types, shapes and where each tensor begins and ends."""
    tensors, begin = {}, 0
    for name, place in places.items():
        tensors[name] = {"dtype": STORED[dtype], "shape": place.shape, "data_offsets": (begin, begin + sizes[name])}
        begin += sizes[name]
    text = json.dumps({"__metadata__": {"format": "pt"}} | tensors).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(file: BinaryIO, weight: Tensor) -> None:
    for piece in weight.flatten().view(torch.uint8).split(PIECE_BYTES):
        if piece.any():
            file.write(piece.numpy())
        else:
            file.seek(len(piece), 1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
