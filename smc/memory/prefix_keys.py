"""Keys of blocks of tokens, by which sequences with the same beginning are found. Knows nothing about pages or
requests. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

KEY_BYTES = 16
BLOCK = 16
"""Tokens of a block."""
Tokens = np.ndarray | Sequence[int]


def block_keys(tokens: Tokens, salt: str = "", block: int = BLOCK) -> list[bytes]:
    """Return the keys of the whole blocks of `tokens`, in order. A key covers the salt and all tokens up to the end of
    its block: two sequences have a key in common only if both are equal so far."""
    whole = len(tokens) // block * block
    text = memoryview(np.asarray(tokens[:whole], dtype=np.int64).tobytes())
    # `person` keeps salts apart from blocks, so that no salt can be constructed that continues another caller's text.
    key = blake2b(salt.encode(), digest_size=KEY_BYTES, person=b"salt").digest()
    keys, size = [], 8 * block
    for start in range(0, len(text), size):
        key = blake2b(key + text[start : start + size], digest_size=KEY_BYTES).digest()
        keys.append(key)
    return keys
