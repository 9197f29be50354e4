"""A grown model (`smc.model.padded`) as a Hugging Face directory that any server can load. Never holds more than one of its tensors."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import torch
from torch import Tensor

from smc.model.config import ModelConfig, read_json
from smc.model.loader import load_model
from smc.model.padded import Growth
from smc.model.safetensors_files import INDEX_FILE, SINGLE_FILE
from smc.model.tokenizer import Tokenizer
from smc.model.weight_map import Place, weight_places

FILE_BYTES = 4 << 30
"""Of the largest file, unless a single tensor is larger."""
PIECE_BYTES = 1 << 20
"""Of a file; pieces of zeros are left out of it as holes, which take no room on most disks and read as zeros."""
STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
COPIED = ("generation_config.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt")
"""Of a tokenizer's files, those that stay as they are."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def save_grown(
    small: str | Path, shape: ModelConfig, directory: str | Path, *, dtype: torch.dtype, on_bytes: Callable[[int, int], None] | None = None
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
    growth = Growth(model, shape)
    directory.mkdir(parents=True, exist_ok=True)
    _save_weights(growth, directory, dtype, on_bytes or (lambda done, whole: None))
    save_tokenizer(small, growth.config, directory)
    raw = read_json(small / "config.json")
    config = growth.config.to_hf() | {name: raw[name] for name in TOKEN_IDS if name in raw} | {"dtype": _name(dtype)}
    _write_json(directory / "config.json", config)
    return growth.config


def save_tokenizer(small: Path, config: ModelConfig, directory: Path) -> None:
    """The tokenizer of `small` for the grown `config`.

    Ids that the small model does not have get names that no text is encoded to, so that laws are over the whole vocabulary, as they
    would be for a model of this shape. Not so if the small model itself has ids without a token, or if its tokens are not of a BPE.
    """
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


def _save_weights(growth: Growth, directory: Path, dtype: torch.dtype, on_bytes: Callable[[int, int], None]) -> None:
    places = weight_places(growth.config)
    sizes = {name: math.prod(place.shape) * dtype.itemsize for name, place in places.items()}
    groups, whole, done = list(_groups(sizes)), sum(sizes.values()), 0
    files = [SINGLE_FILE] if len(groups) == 1 else [f"model-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
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
