"""Reads the files of a Hugging Face directory: JSON, which it also writes, safetensors headers and tensors, and
fingerprints of weights. Knows nothing about models.

A fingerprint is a hash of samples of a file. Replicas compare the fingerprints of whole models, and metrics report them
to show a rollout. Fingerprints of single tensors show which tensors two models share."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
STORED_DTYPES = {"F32": 4, "F16": 2, "BF16": 2}
"""Supported unquantised storage types and their bytes per element."""
STORED_FP8 = "F8_E4M3"
"""Supported quantised storage type. It has 1 byte per element and needs scales."""
STORED_BYTES = STORED_DTYPES | {STORED_FP8: 1, "I32": 4, "I64": 8}
"""Bytes per element of all supported types."""
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of the pointer file that Git LFS puts in place of a large file."""
HEAD_BYTES = 1 << 20
"""Number of bytes hashed from the start of each file, where safetensors files have their header."""
SAMPLES, SAMPLE_BYTES = 64, 16 << 10
"""Number and size in bytes of the samples of each file or tensor, at equal distances."""
MOST_NAMED = 5
"""Maximum number of tensors, files or problems that an error lists."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a model directory. Raises ValueError that names the file."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; a Hugging Face model directory is needed")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a JSON {type(raw).__name__}; an object is needed")
    return raw


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor's entry in a safetensors header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class TensorReader:
    """Reads tensors onto a device. Each file is opened on first use and closed on exit."""

    def __init__(self, tensors: dict[str, StoredTensor], device: torch.device) -> None:
        self.tensors, self.device = tensors, device
        self._opened: dict[Path, safe_open] = {}
        self._stack = ExitStack()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def part(self, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        """Read a tensor, or a part of it, in its stored type. Raises ValueError if it cannot be read."""
        file, whole = self.tensors[name].file, tuple(slice(0, size) for size in self.tensors[name].shape)
        if file not in self._opened:
            self._opened[file] = self._stack.enter_context(open_file(file, "pt"))
        try:
            return self._opened[file].get_slice(name)[part or whole].to(self.device)
        except SafetensorError as error:
            raise ValueError(f"{file}: {name} cannot be read: {error}") from error


def read_headers(directory: str | Path) -> dict[str, StoredTensor]:
    """Read the entries of all tensors of the model, by name, from the file headers."""
    tensors = {}
    for file in _weight_files(Path(directory)):
        with open_file(file, "numpy") as opened:  # "numpy": reading headers does not need torch
            for name in opened.keys():  # noqa: SIM118  (not a dict)
                header = opened.get_slice(name)
                tensors[name] = StoredTensor(file, tuple(header.get_shape()), header.get_dtype())
    return tensors


def stored_bytes(tensors: dict[str, StoredTensor]) -> int:
    return sum(math.prod(tensor.shape) * STORED_BYTES[tensor.dtype] for tensor in tensors.values())


def _weight_files(directory: Path) -> list[Path]:
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    index = directory / INDEX_FILE
    if not index.is_file():
        raise ValueError(
            f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}; {_describe_weights_found(directory)}"
        )
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise ValueError(f"{index} has no weight_map")
    files = [directory / name for name in sorted(set(shard_of.values()))]
    if absent := [file.name for file in files if not file.is_file()]:
        raise ValueError(
            f"{directory}: {len(absent)} of {len(files)} shards named by {INDEX_FILE} are missing: {abbreviate(absent)}"
        )
    return files


def _describe_weights_found(directory: Path) -> str:
    found = sorted(
        path.name
        for pattern in ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
        for path in directory.glob(pattern)
    )
    if not found:
        return "no weights were found"
    if all(name.endswith(".gguf") for name in found):
        return f"found {abbreviate(found)}; GGUF files are not supported, take the model's safetensors files instead"
    return (
        f"found {abbreviate(found)}; only safetensors files of these names are supported, "
        f".bin and other formats are not"
    )


@contextmanager
def open_file(file: Path, framework: str) -> Iterator[safe_open]:
    """Open a safetensors file. Raises ValueError if it cannot be read."""
    try:
        with safe_open(file, framework=framework) as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        if _is_lfs_pointer(file):
            raise ValueError(
                f"{file} is a Git LFS pointer, not the weights; run `git lfs pull` in {file.parent}"
            ) from error
        raise ValueError(f"{file} is not a readable safetensors file: {error}") from error


def _is_lfs_pointer(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return False


def abbreviate(items: Sequence[str], separator: str = ", ") -> str:
    """Join the first `MOST_NAMED` items into a text that also gives the number of items left out."""
    more = f"{separator}and {len(items) - MOST_NAMED} more" if len(items) > MOST_NAMED else ""
    return separator.join(items[:MOST_NAMED]) + more


def tensor_fingerprint(tensor: StoredTensor, name: str) -> str:
    """Return a hash of a stored tensor's type, shape and samples. Raises ValueError if the file cannot be read."""
    digest = hashlib.sha256(f"{tensor.dtype} {tensor.shape}".encode())
    try:
        with tensor.file.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            begin, end = json.loads(file.read(header))[name]["data_offsets"]
            for piece in range(SAMPLES + 1):
                file.seek(8 + header + begin + max(0, end - begin - SAMPLE_BYTES) * piece // SAMPLES)
                digest.update(file.read(min(SAMPLE_BYTES, end - begin)))
    except OSError as error:
        raise ValueError(f"{tensor.file}: {name} cannot be read: {error}") from error
    return digest.hexdigest()


def fingerprint(directory: Path) -> str:
    """Return 16 hexadecimal digits: a hash of the names, sizes, first bytes and samples of config.json and all weight
    files.

    Weights that differ only between two samples have the same fingerprint. Raises OSError if a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in sorted([directory / "config.json", *directory.glob("*.safetensors")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(HEAD_BYTES))
            for piece in range(1, SAMPLES + 1):
                file.seek(max(0, size - SAMPLE_BYTES) * piece // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
