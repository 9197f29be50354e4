"""Draws and log-probabilities of fixed shape. The reference, in plain torch; `smc.executor.triton_ops` has what GPUs
use.

`HeadSampling` is for proposals of a draft whose head has rows for M tokens of V: the single place where its columns
become tokens.

    q = (1 - share) * q_M  on the M tokens of the head, q_M being the proposal of `smc.distributions` over these alone,
    q = share / (V - M)    on every other token.

So q covers every token that the target may draw, and each token's log q is of exactly this distribution: what is drawn,
and how weights count it, stay properly weighted. An independent row draws from q. A row of a tree proposes candidates
with its likeliest columns one by one; the token that stands for the rest is drawn from all the rest of q, which the
tokens without a row are part of. Trees of exact decoding consist of likely tokens, so they have tokens of the head
alone. Besides the variates of the distribution itself, drawn with two of a key's four words, there is one uniform for
which part of q a token comes from and one for which of the tokens without a row it is: the other two words.

Axes: R rows, D draws a row, V columns of the logits, of which the first `vocab` count, C candidate tokens, M columns, U
tokens without a row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smc.algorithm.coupling import coupled_logp
from smc.algorithm.expansion import CANDIDATES_PER_ROW, CandidateTokens
from smc.arrays import to_device
from smc.distributions import Distributions, DistributionSpec, draw
from smc.model.draft_vocab import DraftVocab
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


@dataclass(frozen=True)
class Coupling:
    """How rows that are drafted for exact decoding are coupled to the target's draws (`smc.algorithm.coupling`), by
    batch index; each has as many rows as any other, one after another."""

    exponent_A: Tensor
    """float32; 0: its rows are not coupled."""
    temperature_A: Tensor
    """float32 of the target; at 0 there is no noise."""
    seed_A: Tensor
    """int64 of the request."""
    ids_M: Tensor | None = None
    """int64 token of each column; None: columns are tokens."""

    def apply(self, logq_RV: Tensor, position_R: Tensor) -> Tensor:
        """See `smc.algorithm.coupling.coupled_logp`; `position`: of the token that is drawn."""
        index_R = torch.arange(len(self.exponent_A), device=logq_RV.device).repeat_interleave(
            len(logq_RV) // len(self.exponent_A)
        )
        noise_RV = self.noise(index_R, position_R, logq_RV.shape[1])
        return coupled_logp(logq_RV, self.exponent_A[index_R], noise_RV)

    def noise(self, index_R: Tensor, position_R: Tensor, columns: int) -> Tensor:
        """The target's Gumbel noise [R, columns] at a position of rows that belong to these batch indices."""
        zero_R = torch.zeros_like(position_R)
        keys = DrawKeys(self.seed_A[index_R], zero_R, zero_R[:, None], position_R, Purpose.TARGET)
        word0_R, word1_R = (to_device(word[:, 0], position_R.device) for word in keys.words()[:2])
        noise_RV = -exponentials(word0_R, word1_R, columns, self.ids_M).log()
        return torch.where(self.temperature_A[index_R, None] > 0, noise_RV, 0.0)

    def tokens(self, columns: int, device: torch.device) -> Tensor:
        """int64 token of each column."""
        return torch.arange(columns, device=device) if self.ids_M is None else self.ids_M


class Sampling:
    """Over a vocabulary of `vocab` tokens."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    @property
    def columns(self) -> int:
        """Columns of the logits that are tokens."""
        return self.vocab

    def propose(
        self, logits_RV: Tensor, distribution: DistributionSpec[Any], mixture: float, keys: DrawKeys
    ) -> tuple[Tensor, Tensor]:
        """Tokens (of any integer type) from the proposal and their log q, [R, D] each."""
        logq_RV = Distributions(distribution, logits_RV.device).proposal(self._logits(logits_RV), mixture)
        token_RD = self._race(logq_RV, keys)
        return token_RD, logq_RV.gather(-1, token_RD)

    def propose_by(
        self, logits_RV: Tensor, distribution: DistributionSpec[Any], keys: DrawKeys, dist_RV: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A token (of any integer type) from the proposal without a mixture [R], and its log q [R]; keys for one draw a
        row. The log-distribution that it was drawn from is written to `distribution` [R, V]."""
        self.write_distribution(logits_RV, distribution, dist_RV)
        token_R1 = self._race(dist_RV, keys)
        return token_R1[:, 0], dist_RV.gather(-1, token_R1)[:, 0]

    def write_distribution(self, logits_RV: Tensor, distribution: DistributionSpec[Any], dist_RV: Tensor) -> None:
        """Write the whole log-distribution to `distribution`, float32 [R, V]."""
        dist_RV.copy_(Distributions(distribution, logits_RV.device).target(self._logits(logits_RV)))

    def likeliest(self, logits_RV: Tensor, count: int) -> Tensor:
        """So many tokens of every row, int64 [R, count]; repeated where there are fewer."""
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
        kept_BV: Tensor | None = None,
    ) -> CandidateTokens:
        """Candidate tokens of rows from the proposal; keys for one draw a row, of the token that stands for the rest:
        last, if at all. With `coupling`, the log q of rows that are coupled is that of winning the target's draw. `kept`: where
        the log-proposal of the first B rows is written, up to a constant for each row."""
        logq_RV = Distributions(distribution, logits_RV.device).proposal(self._logits(logits_RV), mixture)
        if kept_BV is not None:
            kept_BV[: len(logq_RV)] = logq_RV[: len(kept_BV)]
        if coupling is not None:
            logq_RV = coupling.apply(logq_RV, keys.position_R)
        return self._candidate_tokens(logq_RV, keys, has_rest)

    def coupling(self, exponent_A: Tensor, temperature_A: Tensor, seed_A: Tensor) -> Coupling:
        """How rows whose logits these columns are of are coupled."""
        return Coupling(exponent_A, temperature_A, seed_A)

    def propose_bonus(
        self, logits_RV: Tensor, distribution: DistributionSpec[Any], keys: DrawKeys
    ) -> tuple[CandidateTokens, Tensor, Tensor]:
        """Candidate tokens of rows from the powered target distribution, log p [R, C] of the tokens, and log Z [R] of
        the power, as `bonus`."""
        distributions = Distributions(distribution, logits_RV.device)
        logp_RV = distributions.target(self._logits(logits_RV))
        powered_RV, log_z_R = distributions.powered(logp_RV)
        candidate_tokens = self._candidate_tokens(powered_RV, keys)
        nan_R = powered_RV.amax(-1) * 0.0
        return (
            candidate_tokens,
            logp_RV.gather(-1, candidate_tokens.token_RC),
            nan_R if log_z_R is None else log_z_R + nan_R,
        )

    def score(
        self, logits_RV: Tensor, distribution: DistributionSpec[Any], token_RD: Tensor, row_X: Tensor | None = None
    ) -> Tensor:
        """log p of tokens (of any integer type) under the target distribution, [R, D]; with `row_X` those of rows that
        repeat, [X, D]. A token of -1 (none) scores 0."""
        logp_RV = Distributions(distribution, logits_RV.device).target(self._logits(logits_RV))
        logp_RD = (logp_RV if row_X is None else logp_RV[row_X]).gather(-1, token_RD.long().clamp(min=0))
        return torch.where(token_RD >= 0, logp_RD, 0.0)

    def bonus(
        self, logits_RV: Tensor, distribution: DistributionSpec[Any], keys: DrawKeys
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [R, D] (of any integer type) from the powered target distribution, their log p [R, D], and log Z [R]
        of the power; NaN in the logits shows in log Z."""
        distributions = Distributions(distribution, logits_RV.device)
        logp_RV = distributions.target(self._logits(logits_RV))
        powered_RV, log_z_R = distributions.powered(logp_RV)
        token_RD = self._race(powered_RV, keys)
        # The likeliest token's log-probability is finite for any distribution, so it carries NaN logits and nothing
        # else.
        nan_R = powered_RV.amax(-1) * 0.0
        return token_RD, logp_RV.gather(-1, token_RD), nan_R if log_z_R is None else log_z_R + nan_R

    def guide(self, own_TV: Tensor, unconditional_XV: Tensor, of_T: Tensor, scale_T: Tensor) -> Tensor:
        """Guided logits [T, V], float32: l_u + s (l_c - l_u), l_c a row's own and l_u those of its unconditional row,
        the `of`-th. At scale 1 the row's own, whatever the unconditional row's are."""
        own_TV, unconditional_TV, scale_T1 = own_TV.float(), unconditional_XV[of_T].float(), scale_T[:, None]
        return torch.where(scale_T1 == 1, own_TV, unconditional_TV + scale_T1 * (own_TV - unconditional_TV))

    def _candidate_tokens(self, log_dist_RV: Tensor, keys: DrawKeys, has_rest: bool = True) -> CandidateTokens:
        logq_RC, token_RC = log_dist_RV.topk(min(CANDIDATES_PER_ROW, self.vocab), dim=-1)
        if not has_rest:
            return CandidateTokens(token_RC, logq_RC, logq_RC)
        rest_RV = log_dist_RV.scatter(-1, token_RC, -torch.inf)
        rest_R1 = rest_RV.logsumexp(-1, keepdim=True)
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
    """`Sampling.propose` and `Sampling.propose_candidates` of logits [R, M], over the whole vocabulary."""

    def __init__(self, columns: Sampling, vocab: DraftVocab, device: torch.device) -> None:
        """`columns`: over M."""
        self._columns = columns
        others_U = np.setdiff1d(np.arange(vocab.vocab), vocab.ids_M, assume_unique=True)
        self.ids_M, self.others_U = (torch.from_numpy(ids).to(device) for ids in (vocab.ids_M, others_U))
        self.chance = round(vocab.share * 2**32)
        """Of 2^32: the share, in whole numbers so that the distribution is exactly what is drawn from."""
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
        # A distribution that is NaN anywhere is NaN: the rest of it must not be used as a distribution.
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
        kept_BV: Tensor | None = None,
    ) -> CandidateTokens:
        """As `Sampling.propose_candidates`; columns of the head are kept."""
        candidate_tokens = self._columns.propose_candidates(
            logits_RM, distribution, mixture, keys, has_rest, coupling, kept_BV
        )
        return self._spread_rest(candidate_tokens, keys, has_rest)

    def coupling(self, exponent_A: Tensor, temperature_A: Tensor, seed_A: Tensor) -> Coupling:
        """As `Sampling.coupling`."""
        return Coupling(exponent_A, temperature_A, seed_A, self.ids_M)

    def _spread(self, column_RD: Tensor, logq_RD: Tensor, keys: DrawKeys) -> tuple[Tensor, Tensor]:
        coin_RD, other_RD = self._others(keys, column_RD.device)
        is_other_RD = coin_RD < self.chance
        # NaN of the draft must be seen, whatever is drawn.
        logq_RD = torch.where(is_other_RD, logq_RD * 0.0 + self.log_each, logq_RD + self.log_inside)
        return torch.where(is_other_RD, other_RD, self.ids_M[column_RD.long()]), logq_RD

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
        """Whole numbers below 2^32, and tokens without a row, int64 [R, D] each."""
        coin_RD, which_RD = (to_device(word, device) for word in keys.words()[2:])
        return coin_RD, self.others_U[(which_RD * len(self.others_U)) >> 32]
