"""Sampling from logits, with fixed shapes: draws and log-probabilities. This is the reference in plain torch; GPUs use
`smc.executor.triton_sampling`.

`HeadSampling` is for the proposals of a draft whose head has rows for M tokens of V. No other code turns the head's
columns into tokens.

    q = (1 - share) * q_M  on the M tokens of the head, q_M being the proposal of `smc.distributions` over these alone,
    q = share / (V - M)    on every other token.

So q covers every token that the target may draw, and each token's log q is that of exactly this distribution, which
keeps SMC properly weighted. An independent row draws from q. A row of a tree proposes its likeliest columns as
candidates; the candidate that stands for the rest is drawn from all the rest of q, including the tokens outside the
head. Trees of exact decoding consist of likely tokens, so they have tokens of the head only. A draw from the head's
distribution uses two of a key's four words. The other two give one uniform that decides which part of q a token comes
from, and one that decides which token outside the head it is.

Local axes: U tokens outside of the head, Y unconditional rows. V columns of logits, of which the first `vocab`
count."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smc.algorithm.coupling import Coupling
from smc.algorithm.expansion import CANDIDATES_PER_ROW, CandidateTokens
from smc.arrays import to_device
from smc.distributions import Distributions, DistributionSpec, draw, log_sum
from smc.model.draft_vocab import DraftVocab
from smc.philox import DrawKeys, exponentials


class Sampling:
    """Sampling over a vocabulary of `vocab` tokens."""

    ids_M: Tensor | None = None
    """int64 token of each column; None: column v is token v."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    @property
    def columns(self) -> int:
        """Number of columns of the logits that are tokens."""
        return self.vocab

    def propose(
        self, logits_RV: Tensor, distribution: DistributionSpec[Any], mixture: float, keys: DrawKeys
    ) -> tuple[Tensor, Tensor]:
        """Draw tokens (of any integer type) from the proposal. Returns them and their log q, [R, F] each."""
        logq_RV = Distributions(distribution, logits_RV.device).proposal(self._logits(logits_RV), mixture)
        token_RF = self._race(logq_RV, keys)
        return token_RF, logq_RV.gather(-1, token_RF)

    def propose_by(
        self, logits_RV: Tensor, distribution: DistributionSpec[Any], keys: DrawKeys, dist_RV: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draw one token a row from the proposal without a mixture. Returns the tokens (of any integer type) [R] and
        their log q [R], and writes the log-distribution that they were drawn from to `dist` [R, V]. The keys are for
        one draw a row."""
        self.write_distribution(logits_RV, distribution, dist_RV)
        token_R1 = self._race(dist_RV, keys)
        return token_R1[:, 0], dist_RV.gather(-1, token_R1)[:, 0]

    def write_distribution(self, logits_RV: Tensor, distribution: DistributionSpec[Any], dist_RV: Tensor) -> None:
        """Write the whole log-distribution to `dist`, float32 [R, V]."""
        dist_RV.copy_(Distributions(distribution, logits_RV.device).target(self._logits(logits_RV)))

    def log_mass(self, logp_RV: Tensor) -> Tensor:
        """Return the log of the sum of probabilities [R], given their logs in float32."""
        return log_sum(logp_RV)[:, 0]

    def likeliest(self, logits_RV: Tensor, count: int) -> Tensor:
        """Return the `count` likeliest tokens of every row, int64 [R, count]; they are repeated if the vocabulary has
        fewer."""
        token_RC = self._logits(logits_RV).topk(min(count, self.vocab), dim=-1).indices
        return token_RC[:, torch.arange(count, device=token_RC.device) % token_RC.shape[1]]

    def propose_candidates(
        self,
        logits_RV: Tensor,
        distribution: DistributionSpec[Any],
        mixture: float,
        keys: DrawKeys,
        has_rest: bool = True,
        coupling: Coupling | None = None,
        kept_RV: Tensor | None = None,
    ) -> CandidateTokens:
        """Return candidate tokens of rows from the proposal. With `has_rest`, the last candidate stands for the rest of
        the distribution; the keys are for its draw, one a row. With `coupling`, the log q of coupled rows is that of
        winning the target's draw. `kept`: buffer for the log-proposal of the first R rows, up to a constant for each
        row."""
        logq_RV = Distributions(distribution, logits_RV.device).proposal(self._logits(logits_RV), mixture)
        if kept_RV is not None:
            kept_RV[: len(logq_RV)] = logq_RV[: len(kept_RV)]
        if coupling is not None:
            logq_RV = coupling.apply(logq_RV, keys.position_R)
        return self._candidate_tokens(logq_RV, keys, has_rest)

    def propose_bonus(
        self, logits_RV: Tensor, distribution: DistributionSpec[Any], keys: DrawKeys
    ) -> tuple[CandidateTokens, Tensor, Tensor]:
        """Return candidate tokens of rows from the powered target distribution, their log p [R, C], and log Z [R] of
        the power as in `own_draws`."""
        logp_RV, powered_RV, log_z_R = self._powered(logits_RV, distribution)
        candidate_tokens = self._candidate_tokens(powered_RV, keys)
        return candidate_tokens, logp_RV.gather(-1, candidate_tokens.token_RC), log_z_R

    def score(
        self, logits_RV: Tensor, distribution: DistributionSpec[Any], token_X: Tensor, row_X: Tensor | None = None
    ) -> Tensor:
        """Return log p [X] of a token (of any integer type) after each row under the target distribution. `row_X`: the
        rows, which may repeat; None: all rows in order. A token of -1 (none) scores 0."""
        logp_RV = Distributions(distribution, logits_RV.device).target(self._logits(logits_RV))
        logp_XV = logp_RV if row_X is None else logp_RV[row_X]
        logp_X = logp_XV.gather(-1, token_X.long().clamp(min=0)[:, None])[:, 0]
        return torch.where(token_X >= 0, logp_X, 0.0)

    def raw_score(self, logits_RV: Tensor, token_X: Tensor, row_X: Tensor | None = None) -> Tensor:
        """As `score`, under the softmax of the logits themselves."""
        plain = DistributionSpec.plain(len(logits_RV)).to(logits_RV.device)
        return self.score(logits_RV, plain, token_X, row_X)

    def own_draws(
        self, logits_RV: Tensor, distribution: DistributionSpec[Any], keys: DrawKeys
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw tokens [R, F] (of any integer type) from the powered target distribution. Returns them, their log p
        [R, F], and log Z [R] of the power, which is NaN if the logits have NaN."""
        logp_RV, powered_RV, log_z_R = self._powered(logits_RV, distribution)
        token_RF = self._race(powered_RV, keys)
        return token_RF, logp_RV.gather(-1, token_RF), log_z_R

    def guide(self, own_TV: Tensor, unconditional_YV: Tensor, of_T: Tensor, scale_T: Tensor) -> Tensor:
        """Return guided logits [T, V], float32: l_u + s (l_c - l_u), where l_c are a row's own logits and l_u those of
        its unconditional row, the `of`-th. At scale 1 they are the row's own, whatever the unconditional row's are."""
        own_TV, unconditional_TV, scale_T1 = own_TV.float(), unconditional_YV[of_T].float(), scale_T[:, None]
        return torch.where(scale_T1 == 1, own_TV, unconditional_TV + scale_T1 * (own_TV - unconditional_TV))

    def _powered(self, logits_RV: Tensor, distribution: DistributionSpec[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the target distribution and its power, [R, V] each, and log Z [R] as in `own_draws`."""
        distributions = Distributions(distribution, logits_RV.device)
        logp_RV = distributions.target(self._logits(logits_RV))
        powered_RV, log_z_R = distributions.powered(logp_RV)
        # The likeliest token's log-probability is finite in any distribution, so it is NaN only if the logits have NaN.
        nan_R = powered_RV.amax(-1) * 0.0
        return logp_RV, powered_RV, nan_R if log_z_R is None else log_z_R + nan_R

    def _candidate_tokens(self, log_dist_RV: Tensor, keys: DrawKeys, has_rest: bool = True) -> CandidateTokens:
        logq_RC, token_RC = log_dist_RV.topk(min(CANDIDATES_PER_ROW, self.vocab), dim=-1)
        if not has_rest:
            return CandidateTokens(token_RC, logq_RC, logq_RC)
        rest_RV = log_dist_RV.scatter(-1, token_RC, -torch.inf)
        rest_R1 = log_sum(rest_RV)
        token_R1 = self._race(torch.where(rest_R1 > -torch.inf, rest_RV - rest_R1, rest_RV), keys)
        own_R1 = log_dist_RV.gather(-1, token_R1)
        return CandidateTokens(
            torch.cat((token_RC, token_R1), 1), torch.cat((logq_RC, own_R1), 1), torch.cat((logq_RC, rest_R1), 1)
        )

    def _logits(self, logits_RV: Tensor) -> Tensor:
        return logits_RV[:, : self.vocab].float()

    def _race(self, log_dist_RV: Tensor, keys: DrawKeys) -> Tensor:
        word0, word1 = (to_device(word, log_dist_RV.device) for word in keys.words()[:2])
        return draw(log_dist_RV, exponentials(word0, word1, self.vocab))


class HeadSampling:
    """`Sampling` from the logits [R, M] of a partial head, with tokens of the whole vocabulary."""

    def __init__(self, columns: Sampling, vocab: DraftVocab, device: torch.device) -> None:
        """`columns`: the sampling over the M columns."""
        self._columns = columns
        others_U = np.setdiff1d(np.arange(vocab.vocab), vocab.ids_M, assume_unique=True)
        self.ids_M, self.others_U = (torch.from_numpy(ids).to(device) for ids in (vocab.ids_M, others_U))
        self.chance = round(vocab.share * 2**32)
        """The share times 2^32, rounded, so that log q belongs to exactly the distribution that is drawn from."""
        share = self.chance / 2**32
        self.log_inside, self.log_share, self.log_each = (
            math.log1p(-share),
            math.log(share),
            math.log(share / len(others_U)),
        )

    @property
    def columns(self) -> int:
        """As `Sampling.columns`."""
        return len(self.ids_M)

    def propose(
        self, logits_RM: Tensor, distribution: DistributionSpec[Tensor], mixture: float, keys: DrawKeys
    ) -> tuple[Tensor, Tensor]:
        """As `Sampling.propose`."""
        return self._spread(*self._columns.propose(logits_RM, distribution, mixture, keys), keys)

    def propose_by(
        self, logits_RM: Tensor, distribution: DistributionSpec[Tensor], keys: DrawKeys, dist_RV: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `Sampling.propose_by`."""
        logq_RM = torch.empty(len(logits_RM), len(self.ids_M), device=logits_RM.device)
        column_R, logq_R = self._columns.propose_by(logits_RM, distribution, keys, logq_RM)
        token_R1, logq_R1 = self._spread(column_R[:, None], logq_R[:, None], keys)
        # If the head's part has a NaN, the whole distribution is NaN, so that the rest of it is not used as a
        # distribution.
        each_R1 = torch.where(logq_RM.isnan().any(-1, keepdim=True), torch.nan, self.log_each)
        dist_RV.copy_(each_R1.expand_as(dist_RV)).index_copy_(1, self.ids_M, logq_RM + self.log_inside)
        return token_R1[:, 0], logq_R1[:, 0]

    def likeliest(self, logits_RM: Tensor, count: int) -> Tensor:
        """As `Sampling.likeliest`."""
        return self.ids_M[self._columns.likeliest(logits_RM, count)]

    def propose_candidates(
        self,
        logits_RM: Tensor,
        distribution: DistributionSpec[Tensor],
        mixture: float,
        keys: DrawKeys,
        has_rest: bool = True,
        coupling: Coupling | None = None,
        kept_RV: Tensor | None = None,
    ) -> CandidateTokens:
        """As `Sampling.propose_candidates`; `kept` has the head's columns."""
        candidate_tokens = self._columns.propose_candidates(
            logits_RM, distribution, mixture, keys, has_rest, coupling, kept_RV
        )
        return self._spread_rest(candidate_tokens, keys, has_rest)

    def _spread(self, column_RF: Tensor, logq_RF: Tensor, keys: DrawKeys) -> tuple[Tensor, Tensor]:
        coin_RF, other_RF = self._others(keys, column_RF.device)
        is_other_RF = coin_RF < self.chance
        # NaN of the draft must show in log q, whichever part is drawn from.
        logq_RF = torch.where(is_other_RF, logq_RF * 0.0 + self.log_each, logq_RF + self.log_inside)
        return torch.where(is_other_RF, other_RF, self.ids_M[column_RF.long()]), logq_RF

    def _spread_rest(self, candidate_tokens: CandidateTokens, keys: DrawKeys, has_rest: bool) -> CandidateTokens:
        token_RC, logq_RC, share_RC = (
            self.ids_M[candidate_tokens.token_RC],
            candidate_tokens.logq_RC + self.log_inside,
            candidate_tokens.share_RC + self.log_inside,
        )
        if not has_rest:
            return CandidateTokens(token_RC, logq_RC, share_RC)
        coin_R1, other_R1 = self._others(keys, token_RC.device)
        rest_R1 = torch.logaddexp(share_RC[:, -1:], torch.full_like(share_RC[:, -1:], self.log_share))
        is_other_R1 = (coin_R1 >> 8).float() * 2.0**-24 < (self.log_share - rest_R1).exp()
        is_rest_C = torch.arange(token_RC.shape[1], device=token_RC.device) == token_RC.shape[1] - 1
        is_other_RC = is_rest_C & is_other_R1
        each_R1 = logq_RC[:, :1] * 0.0 + self.log_each
        return CandidateTokens(
            torch.where(is_other_RC, other_R1, token_RC),
            torch.where(is_other_RC, each_R1, logq_RC),
            torch.where(is_rest_C, rest_R1, share_RC),
        )

    def _others(self, keys: DrawKeys, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return integers below 2^32, and tokens outside the head, int64 [R, F] each."""
        coin_RF, which_RF = (to_device(word, device) for word in keys.words()[2:])
        return coin_RF, self.others_U[(which_RF * len(self.others_U)) >> 32]
