"""Proposals of a draft whose head has rows for M tokens of V: the single place where its columns become tokens.

    q = (1 - share) * q_M  on the M tokens of the head, q_M being the proposal of `smc.laws` over these alone,
    q = share / (V - M)    on every other token.

So q covers every token that the target may draw, and each token's log q is of exactly this law: what is drawn, and how weights count it,
stay properly weighted. An independent row draws from q. A row that offers does so with its likeliest columns one by one; the token that
stands for the rest is drawn from all the rest of q, which the tokens without a row are part of. Of exact decoding the tree is of what is
likely itself, so it has tokens of the head alone.

Besides the variates of the law itself, drawn with two of a key's four words, there is one uniform for which part of q a token comes from
and one for which of the tokens without a row it is: the other two words. `HeadSampling` is the reference, in plain torch;
`smc.executor.kernels` has what GPUs use.

Axes: R rows, D draws a row, C offers, M columns, U tokens without a row.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from smc.algorithm.expansion import Offers
from smc.arrays import to_device
from smc.executor.sampling import DrawKeys, Sampling
from smc.laws import LawSpec
from smc.model.draft_vocab import DraftVocab


class HeadSampling:
    """`Sampling.propose` and `Sampling.offer` of logits [R, M], over the whole vocabulary."""

    def __init__(self, columns: Sampling, vocab: DraftVocab, device: torch.device) -> None:
        """`columns`: over M."""
        self._columns = columns
        others_U = np.setdiff1d(np.arange(vocab.vocab), vocab.ids_M, assume_unique=True)
        self.ids_M, self.others_U = (torch.from_numpy(ids).to(device) for ids in (vocab.ids_M, others_U))
        self.chance = round(vocab.share * 2**32)
        """Of 2^32: the share, in whole numbers so that the law is exactly what is drawn from."""
        share = self.chance / 2**32
        self.log_inside, self.log_share, self.log_each = math.log1p(-share), math.log(share), math.log(share / len(others_U))

    def propose(self, logits_RM: Tensor, law: LawSpec[Tensor], mixture: float, keys: DrawKeys) -> tuple[Tensor, Tensor]:
        """As `Sampling.propose`."""
        return self._spread(*self._columns.propose(logits_RM, law, mixture, keys), keys)

    def propose_by(self, logits_RM: Tensor, law: LawSpec[Tensor], keys: DrawKeys, law_RV: Tensor) -> tuple[Tensor, Tensor]:
        """As `Sampling.propose_by`."""
        logq_RM = torch.empty(len(logits_RM), len(self.ids_M), device=logits_RM.device)
        column_R, logq_R = self._columns.propose_by(logits_RM, law, keys, logq_RM)
        token_R1, logq_R1 = self._spread(column_R[:, None], logq_R[:, None], keys)
        # A law that is NaN anywhere is NaN: nobody may take the rest of it for a law.
        each_R1 = torch.where(logq_RM.isnan().any(-1, keepdim=True), torch.nan, self.log_each)
        law_RV.copy_(each_R1.expand_as(law_RV)).index_copy_(1, self.ids_M, logq_RM + self.log_inside)
        return token_R1[:, 0], logq_R1[:, 0]

    def likeliest(self, logits_RM: Tensor, count: int) -> Tensor:
        """As `Sampling.likeliest`."""
        return self.ids_M[self._columns.likeliest(logits_RM, count)]

    def offer(self, logits_RM: Tensor, law: LawSpec[Tensor], mixture: float, keys: DrawKeys, has_rest: bool = True) -> Offers:
        """As `Sampling.offer`."""
        return self._spread_rest(self._columns.offer(logits_RM, law, mixture, keys, has_rest), keys, has_rest)

    def _spread(self, column_RD: Tensor, logq_RD: Tensor, keys: DrawKeys) -> tuple[Tensor, Tensor]:
        coin_RD, other_RD = self._others(keys, column_RD.device)
        is_other_RD = coin_RD < self.chance
        # NaN of the draft must be seen, whatever is drawn.
        logq_RD = torch.where(is_other_RD, logq_RD * 0.0 + self.log_each, logq_RD + self.log_inside)
        return torch.where(is_other_RD, other_RD, self.ids_M[column_RD.long()]), logq_RD

    def _spread_rest(self, offers: Offers, keys: DrawKeys, has_rest: bool) -> Offers:
        token_RC, logq_RC, share_RC = self.ids_M[offers.token_RC], offers.logq_RC + self.log_inside, offers.share_RC + self.log_inside
        if not has_rest:
            return Offers(token_RC, logq_RC, share_RC)
        coin_R1, other_R1 = self._others(keys, token_RC.device)
        rest_R1 = torch.logaddexp(share_RC[:, -1:], torch.full_like(share_RC[:, -1:], self.log_share))
        is_other_R1 = (coin_R1 >> 8).float() * 2.0**-24 < (self.log_share - rest_R1).exp()
        is_rest_C = torch.arange(token_RC.shape[1], device=token_RC.device) == token_RC.shape[1] - 1
        is_other_RC = is_rest_C & is_other_R1
        each_R1 = logq_RC[:, :1] * 0.0 + self.log_each
        return Offers(
            torch.where(is_other_RC, other_R1, token_RC),
            torch.where(is_other_RC, each_R1, logq_RC),
            torch.where(is_rest_C, rest_R1, share_RC),
        )

    def _others(self, keys: DrawKeys, device: torch.device) -> tuple[Tensor, Tensor]:
        """Whole numbers below 2^32, and tokens without a row, int64 [R, D] each."""
        coin_RD, which_RD = (to_device(word, device) for word in keys.words()[2:])
        return coin_RD, self.others_U[(which_RD * len(self.others_U)) >> 32]
