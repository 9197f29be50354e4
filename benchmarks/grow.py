"""Writes a padded model (`smc.model.padded`) as a Hugging Face directory that any server can load, with no more than
one padded tensor in memory at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from smc.model.config import ModelConfig
from smc.model.files import INDEX_FILE, SINGLE_FILE, read_json, write_json
from smc.model.linear import SCALE_DTYPES
from smc.model.loader import load_model
from smc.model.padded import PaddedWeights, save_padded_tokenizer
from smc.model.tokenizer import Tokenizer
from smc.model.weight_map import WeightSlice, weight_slices

FILE_BYTES = 4 << 30
"""Maximum size of a safetensors file; a larger tensor gets a file of its own."""
PIECE_BYTES = 1 << 20
"""Number of bytes written at a time. A piece of zeros becomes a hole in the file, which most file systems do not
store."""
SAVED_DTYPES = {dtype: name for name, dtype in SCALE_DTYPES.items()}
"""Types that can be written, and their names in a safetensors header."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Fields of the small model's config.json that are copied."""


def save_padded_model(
    small: str | Path,
    shape: ModelConfig,
    directory: str | Path,
    *,
    dtype: torch.dtype,
    on_bytes: Callable[[int, int], None] | None = None,
) -> ModelConfig:
    """Write the model of directory `small`, padded to `shape`, with its tokenizer. `on_bytes` is called with the bytes
    written and the total.

    Raises ValueError if the shape cannot hold the model or if `directory` is not empty; no file is written then.
    """
    small, directory = Path(small), Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} is there and not an empty directory; give the name of a new one")
    tokenizer = Tokenizer.load(small)
    model = load_model(small)
    if model.config.vocab_size < tokenizer.size:
        raise ValueError(f"{small}: vocab_size={model.config.vocab_size} is below the tokenizer's {tokenizer.size} ids")
    weights = PaddedWeights(model, shape)
    directory.mkdir(parents=True, exist_ok=True)
    _save_weights(weights, directory, dtype, on_bytes or (lambda done, total: None))
    save_padded_tokenizer(small, weights.config, directory)
    raw = read_json(small / "config.json")
    copied = {name: raw[name] for name in TOKEN_IDS if name in raw}
    dtype_name = str(dtype).removeprefix("torch.")
    write_json(directory / "config.json", weights.config.to_hf() | copied | {"dtype": dtype_name})
    return weights.config


def _save_weights(
    weights: PaddedWeights, directory: Path, dtype: torch.dtype, on_bytes: Callable[[int, int], None]
) -> None:
    slices = weight_slices(weights.config)
    sizes = {name: math.prod(where.shape) * dtype.itemsize for name, where in slices.items()}
    groups, total, done = list(_split_into_files(sizes)), sum(sizes.values()), 0
    files = (
        [SINGLE_FILE]
        if len(groups) == 1
        else [f"model-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
    )
    for file, names in zip(files, groups):
        with (directory / file).open("wb") as opened:
            opened.write(_header({name: slices[name] for name in names}, sizes, dtype))
            for name in names:
                weight = torch.zeros(slices[name].shape, dtype=dtype)
                weights.fill(name, weight, slices[name].axes)
                _write_sparse(opened, weight)
                done += sizes[name]
                on_bytes(done, total)
            opened.truncate()  # a hole at the end does not extend the file by itself
    if len(groups) > 1:
        file_of = {name: file for file, names in zip(files, groups) for name in names}
        write_json(directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": file_of})


def _split_into_files(sizes: dict[str, int]) -> Iterator[list[str]]:
    """Yield the names of the tensors of each file."""
    group: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if group and filled + size > FILE_BYTES:
            yield group
            group, filled = [], 0
        group.append(name)
        filled += size
    yield group


def _header(slices: dict[str, WeightSlice], sizes: dict[str, int], dtype: torch.dtype) -> bytes:
    """Return the header of a safetensors file: its length in 8 bytes, then JSON with the type, shape and offsets of
    each tensor."""
    tensors, begin = {}, 0
    for name, where in slices.items():
        end = begin + sizes[name]
        tensors[name] = {"dtype": SAVED_DTYPES[dtype], "shape": where.shape, "data_offsets": (begin, end)}
        begin = end
    text = json.dumps({"__metadata__": {"format": "pt"}} | tensors).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_sparse(file: BinaryIO, weight: Tensor) -> None:
    for piece in weight.flatten().view(torch.uint8).split(PIECE_BYTES):
        if piece.any():
            file.write(piece.numpy())
        else:
            file.seek(len(piece), 1)
