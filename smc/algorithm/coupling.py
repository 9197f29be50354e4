"""Coupled drafting: the draft predicts the target's draws with the random numbers that the target will use.

The target draws the token at a position as argmax_v(log p_v + g_v). The Gumbel noise g is a function of the request's
seed and the position, so the draft knows it. By the draft's estimate, token v wins with probability

    softmax_v(gamma log q_v + g_v)

where q is the draft's distribution and gamma an exponent: a draft that is less certain than its target has gamma > 1.
With draft = target and gamma = 1 the most probable token is always the target's. At temperature 0 there is no noise,
and q is taken at temperature 1. The choice of drafted tokens decides the speed of exact decoding and nothing else.

The exponent is fitted to the target's draws: it maximises the mean of log(w + SLACK), where w is the probability of
winning that the draft gave to the drawn token. Without SLACK this would be the likelihood, which is dominated by the
few draws that the draft considers almost impossible. No tree would have held those draws, and fitting the exponent to
them makes trees hold fewer tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from smc.arrays import to_device
from smc.philox import DrawKeys, Purpose, exponentials

LEAST_EXPONENT, MOST_EXPONENT = 0.5, 8.0
SLACK = 0.1
"""A token whose probability is far below this is seldom in a tree, so it hardly matters how far below it is."""
RANK_FACTOR, RANK_BITS, RANKED_BELOW = 0x45D9F3B, 32, 1 << 30
"""Ranks of draws are computed only at a quarter of the positions, because that reads the draft's distribution once
more: at positions whose hash of RANK_BITS bits is below RANKED_BELOW. So the choice of positions is independent of the
lengths of rounds."""
FIRST_EXPONENT = 1.25
"""Exponent before any draw has been seen. Starting too high costs less than starting too low."""
FIRST_GREEDY_EXPONENT = 2.0
"""Exponent at temperature 0 before any draw has been seen."""


def is_ranked(position_R: Tensor) -> Tensor:
    """Return bool [R]: the ranks of draws at these positions are computed."""
    most = (1 << RANK_BITS) - 1
    hash_R = position_R.long() * RANK_FACTOR & most
    hash_R = (hash_R ^ (hash_R >> (RANK_BITS // 2))) * RANK_FACTOR & most
    return hash_R < RANKED_BELOW


def coupled_logp(logq_RV: Tensor, exponent_R: Tensor, noise_RV: Tensor) -> Tensor:
    """Return the log-probability [R, V] that each token wins the target's draw, by the draft's estimate. Rows with
    `exponent` 0 are returned as they are."""
    coupled_RV = torch.log_softmax(exponent_R[:, None] * logq_RV + noise_RV, dim=-1)
    # 0 * -inf is NaN: such rows are not coupled.
    return torch.where(exponent_R[:, None] > 0, coupled_RV, logq_RV)


class Coupling(NamedTuple):
    """How rows that are drafted for exact decoding are coupled to the target's draws, by
    batch index. All batch indices have equally many rows, one batch index after another."""

    exponent_A: Tensor
    """float32 exponent; 0: the rows of the batch index are not coupled."""
    temperature_A: Tensor
    """float32 temperature of the target; at 0 there is no noise."""
    seed_A: Tensor
    """int64 seed of the request."""
    ids_M: Tensor | None = None
    """int64 token of each column, ascending; None: column v is token v."""

    def apply(self, logq_RV: Tensor, position_R: Tensor) -> Tensor:
        """Apply `coupled_logp`. `position`: that of the token to be drawn."""
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


def score_of_exponent(
    logq_RV: Tensor, exponent_R: Tensor, noise_RV: Tensor, is_drawn_RV: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the score and the information of the target's draws about the exponent, float32 [R] each. The score is the
    derivative, with respect to the exponent, of log(w + SLACK), where w is the probability of winning that the draft
    gave to the drawn token. The information is approximately minus the second derivative. `is_drawn`: marks the drawn
    token of each row."""
    win_RV = torch.softmax(exponent_R[:, None] * logq_RV + noise_RV, dim=-1)
    value_RV = torch.where(win_RV > 0, logq_RV, 0.0)
    mean_R1 = (win_RV * value_RV).sum(-1, keepdim=True)
    variance_R = (win_RV * (value_RV - mean_R1) ** 2).sum(-1)
    drawn_R, win_R = (torch.where(is_drawn_RV, values_RV, 0.0).sum(-1) for values_RV in (logq_RV, win_RV))
    weight_R = win_R / (win_R + SLACK)
    return weight_R * (drawn_R - mean_R1[:, 0]), 0.5 * weight_R * variance_R


class DrawObservation(NamedTuple):
    """Score and information of one draw of the target about the exponent: see `score_of_exponent`."""

    score: float
    """NaN: no draw was seen."""
    information: float
    exponent: float
    """Exponent at which both were computed."""

    @property
    def is_seen(self) -> bool:
        return math.isfinite(self.score) and math.isfinite(self.information)


@dataclass
class ExponentFit:
    """The exponent, updated after every draw by Newton's method on its logarithm."""

    memory: float
    """Weight that the information of earlier draws keeps after each draw."""
    log_exponent: float = math.log(FIRST_EXPONENT)
    information: float = 4.0
    """Information about log_exponent; before the first draw that of the prior."""

    @property
    def exponent(self) -> float:
        return math.exp(self.log_exponent)

    def observe(self, draw: DrawObservation) -> None:
        """Update the exponent by one draw of the target."""
        if not draw.is_seen:
            return
        self.information = self.memory * self.information + draw.exponent**2 * draw.information
        # One very improbable draw must not move it far.
        step = max(-0.25, min(0.25, draw.exponent * draw.score / max(self.information, 1e-6)))
        low, high = math.log(LEAST_EXPONENT), math.log(MOST_EXPONENT)
        self.log_exponent = max(low, min(high, self.log_exponent + step))
