"""Counter-based random numbers: the same key gives the same number on any device, in any batch and in any order.

Every random number of a request is a function of (request seed, round, stream, position, purpose). A stream is a number
chosen by the caller, such as that of a particle's branch. Philox4x32-10 (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011) maps the key to 128 bits, from which uniforms are computed. A categorical draw needs one
variate per vocabulary entry: its 128 bits seed an integer hash over the entries, with a sixth of the work of Philox per
entry.

The words are computed on the host with NumPy and sent as a few bytes per draw. Only the hash over the vocabulary runs
on the device with the logits."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_ROUND = np.arange(10, dtype=np.uint64)
_MULTIPLIER = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)
_GOLDEN = 0x9E3779B9 - (1 << 32)
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


STREAMS_PER_PARTICLE = 64
"""The stream of a particle's branch is particle * 64 + branch."""


class Purpose(IntEnum):
    """Use of a random number: the last word of the counter, so that no two uses share a number."""

    PROPOSAL = 1
    TARGET = 2
    SELECTION = 3
    FINAL = 4
    TRIAL = 5
    """Decides whether a drafted token is accepted (rejection sampling)."""
    REMAINDER = 6
    """Draws the token that replaces a rejected one (rejection sampling)."""


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Four 32-bit words [4, R] for every counter [4, R] and key [2, R]; all uint64 arrays holding values below
    2**32."""
    even, odd = counter[0::2], counter[1::2]
    pair = (2,) + (1,) * (counter.ndim - 1)
    multiplier = _MULTIPLIER.reshape(pair)
    schedule = (key + _ROUND.reshape(-1, *[1] * key.ndim) * _WEYL.reshape(pair)) & _LOW
    for round_key in schedule:
        product = (even * multiplier)[::-1]
        even, odd = (product >> _SHIFT) ^ odd ^ round_key, product & _LOW
    return np.stack((even[0], odd[0], even[1], odd[1]))


def words(seed: np.ndarray, rounds: np.ndarray, stream: np.ndarray, position: np.ndarray, purpose: int) -> np.ndarray:
    """The 128 bits of every key as four words [4, R], int64. The arguments are int64 arrays that broadcast; `seed` has
    64 bits, the others 32."""
    shape = np.broadcast_shapes(seed.shape, rounds.shape, stream.shape, position.shape)
    counter = np.empty((4, *shape), dtype=np.uint64)
    counter[0], counter[1], counter[2], counter[3] = position, stream, rounds, purpose
    seed = seed.astype(np.uint64).reshape((1,) * (len(shape) - seed.ndim) + seed.shape)
    return philox4x32(counter, np.stack((seed & _LOW, seed >> _SHIFT))).astype(np.int64)


class RoundKeys(NamedTuple):
    """What keys the random numbers of rows or groups in a round, besides position and purpose; int64."""

    seed: Tensor
    """Seed of the request."""
    round: Tensor
    """Number of the round; 0 where draws do not depend on it."""


class DrawKeys(NamedTuple):
    """Keys of the random numbers of each draw; int64."""

    seed_R: Tensor
    round_R: Tensor
    stream_RF: Tensor
    position_R: Tensor
    purpose: Purpose

    def words(self) -> np.ndarray:
        """Return four 32-bit words for every draw, int64 [4, R, F], on the host."""
        columns = (self.seed_R[:, None], self.round_R[:, None], self.stream_RF, self.position_R[:, None])
        seed, rounds, stream, position = (column.cpu().numpy() for column in columns)
        return words(seed, rounds, stream, position, self.purpose)


def uniforms(seed_R: np.ndarray, round_R: np.ndarray, position_L: np.ndarray, purpose: int) -> np.ndarray:
    """One float64 uniform in [0, 1) for each seed and round at each position, [R, L]."""
    high, low, _, _ = words(seed_R[:, None], round_R[:, None], np.zeros(1, np.int64), position_L, purpose)
    return ((high << 21) | (low >> 11)) * 2.0**-53


def exponentials(w0_R: Tensor, w1_R: Tensor, size: int, ids_V: Tensor | None = None) -> Tensor:
    """Standard exponential variates [X, size], float32, from two words per row: of the first `size` entries, or of the
    entries `ids_V`.

    The index is hashed to 31 bits by two multiply-xorshift rounds; one word is mixed in before the first and one
    between the two. Small values keep full relative precision, because the minimum over the vocabulary decides the
    draw."""
    # In place: for a large vocabulary a new tensor costs more than what is computed in it.
    entry_V = torch.arange(size, dtype=torch.int32, device=w0_R.device) if ids_V is None else ids_V.to(torch.int32)
    x = w0_R.to(torch.int32)[..., None] + entry_V * _GOLDEN
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x21F0AAAD
    x ^= w1_R.to(torch.int32)[..., None]
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0x735A2D97
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x &= 0x7FFFFFFF
    # The scale is slightly below 2**-31: the largest x round to 2**31, and an infinite variate would tie with tokens of
    # probability zero.
    return x.float().add_(0.5).mul_(-(2.0**-31 - 2.0**-55)).log1p_().neg_()
