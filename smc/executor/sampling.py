"""Draws and log-probabilities of fixed shape. The reference, in plain torch; `smc.executor.kernels` has what GPUs use.

Axes: R rows, D draws a row, V columns of the logits, of which the first `vocab` count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smc.algorithm.expansion import OFFERS, Offers
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

    def words(self) -> np.ndarray:
        """Four of 32 bits for every draw, int64 [4, R, D], on the host."""
        columns = (self.seed_R[:, None], self.round_R[:, None], self.stream_RD, self.position_R[:, None])
        seed, rounds, stream, position = (column.cpu().numpy() for column in columns)
        return words(seed, rounds, stream, position, self.purpose)


class Sampling:
    """Over a vocabulary of `vocab` tokens."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def propose(self, logits_RV: Tensor, law: LawSpec[Any], mixture: float, keys: DrawKeys) -> tuple[Tensor, Tensor]:
        """Tokens (of any integer type) from the proposal and their log q, [R, D] each."""
        logq_RV = Laws(law, logits_RV.device).proposal(self._logits(logits_RV), mixture)
        token_RD = self._race(logq_RV, keys)
        return token_RD, logq_RV.gather(-1, token_RD)

    def propose_by(self, logits_RV: Tensor, law: LawSpec[Any], keys: DrawKeys, law_RV: Tensor) -> tuple[Tensor, Tensor]:
        """A token (of any integer type) from the proposal without a mixture [R], and its log q [R]; keys for one draw a row. The log-law
        that it was drawn from is written to `law` [R, V]."""
        self.write_law(logits_RV, law, law_RV)
        token_R1 = self._race(law_RV, keys)
        return token_R1[:, 0], law_RV.gather(-1, token_R1)[:, 0]

    def write_law(self, logits_RV: Tensor, law: LawSpec[Any], law_RV: Tensor) -> None:
        """Write the whole log-law to `law`, float32 [R, V]."""
        law_RV.copy_(Laws(law, logits_RV.device).target(self._logits(logits_RV)))

    def likeliest(self, logits_RV: Tensor, count: int) -> Tensor:
        """So many tokens of every row, int64 [R, count]; repeated where there are fewer."""
        token_RC = self._logits(logits_RV).topk(min(count, self.vocab), dim=-1).indices
        return token_RC[:, torch.arange(count, device=token_RC.device) % token_RC.shape[1]]

    def offer(self, logits_RV: Tensor, law: LawSpec[Any], mixture: float, keys: DrawKeys, has_rest: bool = True) -> Offers:
        """What rows offer from the proposal; keys for one draw a row, of the token that stands for the rest: last, if at all."""
        return self._offers(Laws(law, logits_RV.device).proposal(self._logits(logits_RV), mixture), keys, has_rest)

    def bonus_offer(self, logits_RV: Tensor, law: LawSpec[Any], keys: DrawKeys) -> tuple[Offers, Tensor, Tensor]:
        """What rows offer from the powered target law, log p [R, C] of the tokens, and log Z [R] of the power, as `bonus`."""
        laws = Laws(law, logits_RV.device)
        logp_RV = laws.target(self._logits(logits_RV))
        powered_RV, log_z_R = laws.powered(logp_RV)
        offers = self._offers(powered_RV, keys)
        nan_R = powered_RV.amax(-1) * 0.0
        return offers, logp_RV.gather(-1, offers.token_RC), nan_R if log_z_R is None else log_z_R + nan_R

    def score(self, logits_RV: Tensor, law: LawSpec[Any], token_RD: Tensor, row_X: Tensor | None = None) -> Tensor:
        """log p of tokens (of any integer type) under the target law, [R, D]; with `row_X` those of rows that repeat, [X, D]. A token of
        -1 (none) scores 0."""
        logp_RV = Laws(law, logits_RV.device).target(self._logits(logits_RV))
        logp_RD = (logp_RV if row_X is None else logp_RV[row_X]).gather(-1, token_RD.long().clamp(min=0))
        return torch.where(token_RD >= 0, logp_RD, 0.0)

    def bonus(self, logits_RV: Tensor, law: LawSpec[Any], keys: DrawKeys) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [R, D] (of any integer type) from the powered target law, their log p [R, D], and log Z [R] of the power; NaN in the
        logits shows in log Z."""
        laws = Laws(law, logits_RV.device)
        logp_RV = laws.target(self._logits(logits_RV))
        powered_RV, log_z_R = laws.powered(logp_RV)
        token_RD = self._race(powered_RV, keys)
        # The likeliest token's log-probability is finite for any law, so it carries NaN logits and nothing else.
        nan_R = powered_RV.amax(-1) * 0.0
        return token_RD, logp_RV.gather(-1, token_RD), nan_R if log_z_R is None else log_z_R + nan_R

    def guide(self, own_TV: Tensor, companion_XV: Tensor, of_T: Tensor, scale_T: Tensor) -> Tensor:
        """Guided logits [T, V], float32: l_u + s (l_c - l_u), l_c a row's own and l_u its companion's, the `of`-th. At scale 1 the row's
        own, whatever its companion's are."""
        own_TV, companion_TV, scale_T1 = own_TV.float(), companion_XV[of_T].float(), scale_T[:, None]
        return torch.where(scale_T1 == 1, own_TV, companion_TV + scale_T1 * (own_TV - companion_TV))

    def _offers(self, log_law_RV: Tensor, keys: DrawKeys, has_rest: bool = True) -> Offers:
        logq_RC, token_RC = log_law_RV.topk(min(OFFERS, self.vocab), dim=-1)
        if not has_rest:
            return Offers(token_RC, logq_RC, logq_RC)
        rest_RV = log_law_RV.scatter(-1, token_RC, -torch.inf)
        rest_R1 = rest_RV.logsumexp(-1, keepdim=True)
        token_R1 = self._race(torch.where(rest_R1 > -torch.inf, rest_RV - rest_R1, rest_RV), keys)
        own_R1 = log_law_RV.gather(-1, token_R1)
        return Offers(torch.cat((token_RC, token_R1), 1), torch.cat((logq_RC, own_R1), 1), torch.cat((logq_RC, rest_R1), 1))

    def _logits(self, logits_RV: Tensor) -> Tensor:
        return logits_RV[:, : self.vocab].float()

    def _race(self, log_law_RV: Tensor, keys: DrawKeys) -> Tensor:
        word0, word1 = (to_device(word, log_law_RV.device) for word in keys.words()[:2])
        return draw(log_law_RV, exponentials(word0, word1, self.vocab))
