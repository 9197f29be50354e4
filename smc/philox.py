"""Counter-based randomness: the same key gives the same number on any device, in any batch, in any order.

Every random number of a request is a function of (request seed, round, stream, position, purpose); a stream is whatever
the caller numbers, such as a particle's branch. Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", SC 2011) turns the key into 128 bits. Uniforms are read off those bits. A categorical draw needs one variate per
vocabulary entry: its 128 bits seed a cheap integer hash over the entries, six times less work than Philox per entry.

The arithmetic uses only operators that NumPy and torch share, so both run the same lines. Axes: X any shape, V vocabulary.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Array = TypeVar("Array", np.ndarray, Tensor)

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


class Purpose(IntEnum):
    """What a number is for: the last word of the counter, so that no two uses share a number."""

    PROPOSAL = 1
    TARGET = 2
    RESAMPLE = 3
    BRANCH = 4
    FINAL = 5


def philox4x32(counter: tuple[Array, Array, Array, Array], key: tuple[Array, Array]) -> tuple[Array, Array, Array, Array]:
    """Four 32-bit words for every counter and key. All are int64 arrays [X] holding values in [0, 2**32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # A 32 x 32 bit product fits 64 bits; read as signed it may be negative, and the mask after the shift repairs that.
        p0, p1 = c0 * _MULTIPLIER[0], c2 * _MULTIPLIER[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def words(seed: Array, rounds: Array, stream: Array, position: Array, purpose: Array) -> tuple[Array, Array, Array, Array]:
    """The 128 bits of one key, as four words. int64 arrays that broadcast; `seed` uses all 64 bits, the others 32."""
    counter = (position, stream, rounds, purpose + position * 0)
    return philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))


def uniforms(seed: np.ndarray, rounds: np.ndarray, count: int, purpose: Purpose) -> np.ndarray:
    """`count` float64 uniforms in [0, 1) for each seed and round: [X] and [X] -> [X, count]. One word pair per number."""
    position = np.arange((count + 1) // 2, dtype=np.int64)
    w0, w1, w2, w3 = words(seed[:, None], rounds[:, None], np.int64(0), position, np.int64(purpose))
    pairs = np.stack((_unit(w0, w1), _unit(w2, w3)), axis=-1)
    return pairs.reshape(len(seed), -1)[:, :count]


def _unit(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    return ((high << 21) | (low >> 11)) * 2.0**-53


def exponentials(w0_X: Tensor, w1_X: Tensor, size: int) -> Tensor:
    """Standard exponential variates [X, size], float32, from two words per row.

    The index is hashed to 31 bits with one word entering before and one between two multiply-xorshift rounds. Small values
    keep full relative precision, because the smallest of a hundred thousand decides the draw.
    """
    entry_V = torch.arange(size, dtype=torch.int32, device=w0_X.device) * _signed(_WEYL[0])
    x = w0_X.to(torch.int32)[..., None] + entry_V
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x21F0AAAD
    x = x ^ w1_X.to(torch.int32)[..., None]
    x = (x ^ ((x >> 15) & 0x1FFFF)) * 0x735A2D97
    x = (x ^ ((x >> 15) & 0x1FFFF)) & 0x7FFFFFFF
    # Just short of 2**-31: as a float32 the largest x is 2**31, and log1p(-1) is infinite, as bad as an entry of probability 0.
    return -torch.log1p((x.float() + 0.5) * -(2.0**-31 - 2.0**-55))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
