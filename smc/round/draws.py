"""Keys of random draws, and how drafted rows are coupled to the target's draws."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from smc.algorithm.coupling import coupled_logp
from smc.arrays import to_device
from smc.philox import Purpose, exponentials, words


class DrawKeys(NamedTuple):
    """Keys of the random numbers of each draw; int64. See smc/philox.py."""

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


class Coupling(NamedTuple):
    """How rows that are drafted for exact decoding are coupled to the target's draws (`smc.algorithm.coupling`), by
    batch index. All batch indices have equally many rows, one batch index after another."""

    exponent_A: Tensor
    """float32 exponent; 0: the rows of the batch index are not coupled."""
    temperature_A: Tensor
    """float32 temperature of the target; at 0 there is no noise."""
    seed_A: Tensor
    """int64 seed of the request."""
    ids_M: Tensor | None = None
    """int64 token of each column; None: column v is token v."""

    def apply(self, logq_RV: Tensor, position_R: Tensor) -> Tensor:
        """Apply `smc.algorithm.coupling.coupled_logp`. `position`: that of the token to be drawn."""
        index_R = torch.arange(len(self.exponent_A), device=logq_RV.device).repeat_interleave(
            len(logq_RV) // len(self.exponent_A)
        )
        noise_RV = self.noise(index_R, position_R, logq_RV.shape[1])
        return coupled_logp(logq_RV, self.exponent_A[index_R], noise_RV)

    def noise(self, index_R: Tensor, position_R: Tensor, columns: int) -> Tensor:
        """Return the target's Gumbel noise [R, columns] at each row's position. `index`: batch index of each row."""
        zero_R = torch.zeros_like(position_R)
        keys = DrawKeys(self.seed_A[index_R], zero_R, zero_R[:, None], position_R, Purpose.TARGET)
        word0_R, word1_R = (to_device(word[:, 0], position_R.device) for word in keys.words()[:2])
        noise_RV = -exponentials(word0_R, word1_R, columns, self.ids_M).log()
        return torch.where(self.temperature_A[index_R, None] > 0, noise_RV, 0.0)

    def tokens(self, columns: int, device: torch.device) -> Tensor:
        """Return the token of each column, int64."""
        return torch.arange(columns, device=device) if self.ids_M is None else self.ids_M
