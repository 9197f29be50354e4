"""Coupled drafting: the draft predicts the target's draws with the random numbers that the target will use.

The target draws the token at a position as argmax_v(log p_v + g_v). The Gumbel noise g is a function of the request's
seed and the position, so the draft knows it. As the draft sees it, token v wins with probability

    softmax_v(gamma log q_v + g_v)

where q is the draft's distribution and gamma an exponent: a draft that is less certain than its target has gamma > 1.
With draft = target and gamma = 1 the most probable token is always the target's. At temperature 0 there is no noise,
and q is taken at temperature 1. The choice of drafted tokens decides the speed of exact decoding and nothing else.

The exponent is fitted to the target's draws: it maximises the mean of log(w + SLACK), where w is the probability to win
that the draft gave to the token drawn. Without SLACK this would be the likelihood. That is decided by the few draws
that the draft considers almost impossible, which no tree would have held, and asks for an exponent at which trees hold
fewer tokens.

Axes: R rows, V vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LEAST_EXPONENT, MOST_EXPONENT = 0.5, 8.0
SLACK = 0.1
"""Probability below which a token is seldom in a tree, so that it hardly matters how far below."""
RANK_FACTOR, RANK_BITS, RANKED_BELOW = 0x45D9F3B, 32, 1 << 30
"""The ranks of draws are looked for at a quarter of the positions, since that reads the draft's distribution once more:
those whose hash of so many bits is below the bound. Which they are has nothing to do with the lengths of rounds."""
FIRST_EXPONENT = 1.25
"""Before any draw has been seen; a start above 1 costs less than one below the best."""
FIRST_GREEDY_EXPONENT = 2.0
"""The same at temperature 0."""


def is_ranked(position_R: Tensor) -> Tensor:
    """bool [R]: the ranks of draws at these positions are looked for."""
    most = (1 << RANK_BITS) - 1
    hash_R = position_R.long() * RANK_FACTOR & most
    hash_R = (hash_R ^ (hash_R >> (RANK_BITS // 2))) * RANK_FACTOR & most
    return hash_R < RANKED_BELOW


def coupled_logp(logq_RV: Tensor, exponent_R: Tensor, noise_RV: Tensor) -> Tensor:
    """Log-probability [R, V] that each token wins the target's race, as the draft sees it. `exponent`: 0 leaves a row
    as it is."""
    coupled_RV = torch.log_softmax(exponent_R[:, None] * logq_RV + noise_RV, dim=-1)
    # 0 * -inf is NaN: such rows are not coupled.
    return torch.where(exponent_R[:, None] > 0, coupled_RV, logq_RV)


def score_of_exponent(
    logq_RV: Tensor, exponent_R: Tensor, noise_RV: Tensor, is_drawn_RV: Tensor
) -> tuple[Tensor, Tensor]:
    """What the target's draws say of the exponent: the derivative, with respect to it, of log(w + SLACK), w being the
    probability that the draft gave the drawn token to win, and about minus the second derivative; float32 [R] each.
    `is_drawn`: marks the drawn token of each row."""
    win_RV = torch.softmax(exponent_R[:, None] * logq_RV + noise_RV, dim=-1)
    value_RV = torch.where(win_RV > 0, logq_RV, 0.0)
    mean_R1 = (win_RV * value_RV).sum(-1, keepdim=True)
    variance_R = (win_RV * (value_RV - mean_R1) ** 2).sum(-1)
    drawn_R, win_R = (torch.where(is_drawn_RV, values_RV, 0.0).sum(-1) for values_RV in (logq_RV, win_RV))
    weight_R = win_R / (win_R + SLACK)
    return weight_R * (drawn_R - mean_R1[:, 0]), 0.5 * weight_R * variance_R


class DrawObservation(NamedTuple):
    """What one draw of the target says of the exponent: see `score_of_exponent`."""

    score: float
    """NaN: no draw was seen."""
    information: float
    exponent: float
    """At which these were taken."""

    @property
    def is_seen(self) -> bool:
        return math.isfinite(self.score) and math.isfinite(self.information)


@dataclass
class ExponentFit:
    """The exponent, followed draw by draw: Newton's method on its logarithm."""

    memory: float
    """Weight that the information of earlier draws keeps after each draw."""
    log_exponent: float = math.log(FIRST_EXPONENT)
    information: float = 4.0
    """About log_exponent; before the first draw that of the prior."""

    @property
    def exponent(self) -> float:
        return math.exp(self.log_exponent)

    def observe(self, draw: DrawObservation) -> None:
        """Follow one draw of the target."""
        if not draw.is_seen:
            return
        self.information = self.memory * self.information + draw.exponent**2 * draw.information
        # One draw that was very improbable may not move it far.
        step = max(-0.25, min(0.25, draw.exponent * draw.score / max(self.information, 1e-6)))
        low, high = math.log(LEAST_EXPONENT), math.log(MOST_EXPONENT)
        self.log_exponent = max(low, min(high, self.log_exponent + step))
