"""Draws and log-probabilities of fixed shape. The reference, in plain torch; `smc.runtime.kernels` has what GPUs use.

Axes: R rows, D draws a row, V columns of the logits, of which the first `vocab` count.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from smc.arrays import to_device
from smc.laws import Laws, LawSpec, draw
from smc.philox import Purpose, exponentials, words


@dataclass(frozen=True)
class DrawKeys:
    """Which random numbers each draw uses; int64. See smc/philox.py."""

    seed_R: Tensor
    round_R: Tensor
    stream_RD: Tensor
    position_R: Tensor
    purpose: Purpose


class Sampling:
    """Over a vocabulary of `vocab` tokens."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def propose(self, logits_RV: Tensor, law: LawSpec, mixture: float, keys: DrawKeys) -> tuple[Tensor, Tensor]:
        """Tokens (of any integer type) from the proposal and their log q, [R, D] each."""
        logq_RV = Laws(law, logits_RV.device).proposal(self._logits(logits_RV), mixture)
        token_RD = self._race(logq_RV, keys)
        return token_RD, logq_RV.gather(-1, token_RD)

    def score(self, logits_RV: Tensor, law: LawSpec, token_RD: Tensor) -> Tensor:
        """log p of the tokens under the target law, [R, D]."""
        return Laws(law, logits_RV.device).target(self._logits(logits_RV)).gather(-1, token_RD)

    def bonus(self, logits_RV: Tensor, law: LawSpec, keys: DrawKeys) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [R, D] from the powered target law, their log p [R, D], and log Z [R] of the power; NaN in the logits shows in log Z."""
        laws = Laws(law, logits_RV.device)
        logp_RV = laws.target(self._logits(logits_RV))
        powered_RV, log_z_R = laws.powered(logp_RV)
        token_RD = self._race(powered_RV, keys)
        # The likeliest token's log-probability is finite for any law, so it carries NaN logits and nothing else.
        nan_R = powered_RV.amax(-1) * 0.0
        return token_RD, logp_RV.gather(-1, token_RD), nan_R if log_z_R is None else log_z_R + nan_R

    def _logits(self, logits_RV: Tensor) -> Tensor:
        return logits_RV[:, : self.vocab].float()

    def _race(self, log_law_RV: Tensor, keys: DrawKeys) -> Tensor:
        columns = (keys.seed_R[:, None], keys.round_R[:, None], keys.stream_RD, keys.position_R[:, None])
        word0, word1, _, _ = words(*(column.cpu().numpy() for column in columns), keys.purpose)
        noise = (to_device(word, log_law_RV.device) for word in (word0, word1))
        return draw(log_law_RV, exponentials(*noise, self.vocab))
