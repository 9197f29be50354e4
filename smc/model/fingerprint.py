"""Fingerprints of model weights from samples of the files. Replicas compare those of whole models, and metrics report
them to show a rollout; those of tensors say what two models share."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from smc.model.safetensors_files import StoredTensor

HEAD_BYTES = 1 << 20
"""Bytes hashed from the start of each file, where safetensors files have their header."""
SAMPLES, SAMPLE_BYTES = 64, 16 << 10
"""Number and size of the samples of each file, at equal distances."""


def tensor_fingerprint(tensor: StoredTensor, name: str) -> str:
    """Of a tensor in a file: a hash of its type, shape and samples. Raises ValueError if it cannot be read."""
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
    """16 hexadecimal digits: a hash of the names, sizes, first bytes and samples of config.json and all weight files.

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
