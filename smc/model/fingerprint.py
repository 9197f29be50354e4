"""Fingerprint of model weights from samples of the files. Replicas compare fingerprints, and metrics report them to
show a rollout."""

from __future__ import annotations

import hashlib
from pathlib import Path

HEAD_BYTES = 1 << 20
"""Bytes hashed from the start of each file, where safetensors files have their header."""
SAMPLES, SAMPLE_BYTES = 64, 16 << 10
"""Number and size of the samples of each file, at equal distances."""


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
