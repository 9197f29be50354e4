"""Sampling on a GPU: the Triton form of `smc.executor.sampling`.

Local axes: U tokens outside of the head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smc.algorithm.coupling import Coupling
from smc.algorithm.expansion import CandidateTokens
from smc.arrays import map_tensors, to_device, to_host
from smc.distributions import DistributionSpec, Processors
from smc.executor.sampling import HeadSampling, Sampling
from smc.kernels.candidate_tokens import propose_candidates
from smc.kernels.sampling import DrawnTokens, draw, guide, log_mass, score, spread, spread_rest, write_distribution
from smc.kernels.truncation import Cut, truncate
from smc.philox import DrawKeys


class TritonSampling(Sampling):
    """Sampling by kernels, which do not write the array of a distribution, except for chains."""

    def propose(
        self, logits_RV: Tensor, distribution: DistributionSpec[Tensor], mixture: float, keys: DrawKeys
    ) -> tuple[Tensor, Tensor]:
        drawn = self._draw(logits_RV, distribution.temperature_R, keys, self._cut(logits_RV, distribution, mixture))
        return drawn.token_RF, drawn.logq_RF

    def propose_by(
        self, logits_RV: Tensor, distribution: DistributionSpec[Tensor], keys: DrawKeys, dist_RV: Tensor
    ) -> tuple[Tensor, Tensor]:
        drawn = self._draw(logits_RV, distribution.temperature_R, keys, self._cut(logits_RV, distribution))
        self.write_distribution(logits_RV, distribution, dist_RV)
        return drawn.token_RF[:, 0], drawn.logq_RF[:, 0]

    def write_distribution(self, logits_RV: Tensor, distribution: DistributionSpec[Tensor], dist_RV: Tensor) -> None:
        write_distribution(logits_RV, dist_RV, distribution.temperature_R, self._cut(logits_RV, distribution))

    log_mass = staticmethod(log_mass)

    def propose_candidates(
        self,
        logits_RV: Tensor,
        distribution: DistributionSpec[Tensor],
        mixture: float,
        keys: DrawKeys,
        has_rest: bool = True,
        coupling: Coupling | None = None,
        kept_RV: Tensor | None = None,
    ) -> CandidateTokens:
        cut = self._cut(logits_RV, distribution, mixture)
        return self._propose_candidates(logits_RV, distribution.temperature_R, keys, cut, has_rest, coupling, kept_RV)

    def propose_bonus(
        self, logits_RV: Tensor, distribution: DistributionSpec[Tensor], keys: DrawKeys
    ) -> tuple[CandidateTokens, Tensor, Tensor]:
        cut = self._cut(logits_RV, distribution)
        if not distribution.active & Processors.ALPHA:
            candidate_tokens = self._propose_candidates(logits_RV, distribution.temperature_R, keys, cut)
            return candidate_tokens, candidate_tokens.logq_RC, candidate_tokens.logq_RC[:, 0] * 0.0
        # As in `own_draws`. The likeliest token's log-probability is finite in any distribution.
        candidate_tokens = self._propose_candidates(
            logits_RV, distribution.temperature_R / distribution.alpha_R, keys, cut
        )
        logp_RC = self._unpowered(logits_RV, distribution, candidate_tokens.token_RC, cut, candidate_tokens.logq_RC)
        log_z_R = torch.where(
            distribution.alpha_R == 1, 0.0, distribution.alpha_R * logp_RC[:, 0] - candidate_tokens.logq_RC[:, 0]
        )
        return candidate_tokens, logp_RC, log_z_R + candidate_tokens.logq_RC[:, 0] * 0.0

    def score(
        self, logits_RV: Tensor, distribution: DistributionSpec[Tensor], token_X: Tensor, row_X: Tensor | None = None
    ) -> Tensor:
        cut = self._cut(logits_RV, distribution)
        return score(logits_RV, self.vocab, distribution.temperature_R, token_X.int(), cut=cut, row_X=row_X)[0]

    def own_draws(
        self, logits_RV: Tensor, distribution: DistributionSpec[Tensor], keys: DrawKeys
    ) -> tuple[Tensor, Tensor, Tensor]:
        cut = self._cut(logits_RV, distribution)
        if not distribution.active & Processors.ALPHA:
            drawn = self._draw(logits_RV, distribution.temperature_R, keys, cut)
            return drawn.token_RF, drawn.logq_RF, drawn.lse_R * 0.0
        # p^alpha is p at the temperature divided by alpha, and its normaliser follows from any of its tokens.
        drawn = self._draw(logits_RV, distribution.temperature_R / distribution.alpha_R, keys, cut)
        token_RF, powered_RF = drawn.token_RF, drawn.logq_RF
        logp_RF = self._unpowered(logits_RV, distribution, token_RF, cut, powered_RF)
        log_z_R = torch.where(distribution.alpha_R == 1, 0.0, distribution.alpha_R * logp_RF[:, 0] - powered_RF[:, 0])
        return token_RF, logp_RF, log_z_R + drawn.lse_R * 0.0

    guide = staticmethod(guide)

    def _cut(self, logits_RV: Tensor, distribution: DistributionSpec[Tensor], share: float = 0.0) -> Cut | None:
        if not distribution.active & Processors.TRUNCATION:
            return None
        return truncate(logits_RV, self.vocab, distribution, share)

    def _unpowered(
        self,
        logits_RV: Tensor,
        distribution: DistributionSpec[Tensor],
        token_RF: Tensor,
        cut: Cut | None,
        powered_RF: Tensor,
    ) -> Tensor:
        """Return log p [R, F] of tokens, given their log-probabilities under p^alpha. Where alpha is 1, these are log
        p: its bits must not depend on other rows, and `score` adds up larger blocks of a row."""
        none_R = torch.full_like(token_RF[:, 0], -1)
        _, logp_RF = score(logits_RV, self.vocab, distribution.temperature_R, none_R, token_RF, cut)
        assert logp_RF is not None, "asked for"
        return torch.where(distribution.alpha_R[:, None] == 1, powered_RF, logp_RF)

    def _propose_candidates(
        self,
        logits_RV: Tensor,
        temperature_R: Tensor,
        keys: DrawKeys,
        cut: Cut | None,
        has_rest: bool = True,
        coupling: Coupling | None = None,
        kept_RV: Tensor | None = None,
    ) -> CandidateTokens:
        return propose_candidates(logits_RV, self.vocab, temperature_R, keys, cut, has_rest, coupling, kept_RV)

    def _draw(self, logits_RV: Tensor, temperature_R: Tensor, keys: DrawKeys, cut: Cut | None) -> DrawnTokens:
        return draw(logits_RV, self.vocab, temperature_R, keys, cut)


class PromptSampling(TritonSampling):
    """Sampling after prompts: the bits are those of a round. Keys and distributions may be on the host. A row may have
    any number of draws, so each one has a launch of its own: a kernel is compiled for every number."""

    def own_draws(
        self, logits_RV: Tensor, distribution: DistributionSpec[Any], keys: DrawKeys
    ) -> tuple[Tensor, Tensor, Tensor]:
        return super().own_draws(logits_RV, distribution.to(logits_RV.device), _on(logits_RV.device, keys))

    def propose_bonus(
        self, logits_RV: Tensor, distribution: DistributionSpec[Any], keys: DrawKeys
    ) -> tuple[CandidateTokens, Tensor, Tensor]:
        return super().propose_bonus(logits_RV, distribution.to(logits_RV.device), _on(logits_RV.device, keys))

    def write_distribution(self, logits_RV: Tensor, distribution: DistributionSpec[Any], dist_RV: Tensor) -> None:
        super().write_distribution(logits_RV, distribution.to(logits_RV.device), dist_RV)

    def _draw(self, logits_RV: Tensor, temperature_R: Tensor, keys: DrawKeys, cut: Cut | None) -> DrawnTokens:
        made = [
            super(PromptSampling, self)._draw(logits_RV, temperature_R, keys._replace(stream_RF=stream_R1), cut)
            for stream_R1 in keys.stream_RF.split(1, 1)
        ]
        token_RF, logq_RF = (
            torch.cat(parts, 1) for parts in zip(*((one.token_RF, one.logq_RF) for one in made), strict=True)
        )
        return DrawnTokens(token_RF, logq_RF, made[0].lse_R)


def _on(device: torch.device, keys: DrawKeys) -> DrawKeys:
    """Return keys on a device, without waiting for it."""
    return map_tensors(lambda values: to_device(to_host(values), device) if values.is_cpu else values, keys)


class TritonHeadSampling(HeadSampling):
    """Turns columns into tokens in one launch."""

    def _spread(self, column_RF: Tensor, logq_RF: Tensor, keys: DrawKeys) -> tuple[Tensor, Tensor]:
        return spread(column_RF, logq_RF, keys, self.ids_M, self.others_U, self.chance, self.log_inside, self.log_each)

    def _spread_rest(self, candidate_tokens: CandidateTokens, keys: DrawKeys, has_rest: bool) -> CandidateTokens:
        logs = (self.log_inside, self.log_share, self.log_each)
        return spread_rest(candidate_tokens, keys, self.ids_M, self.others_U, *logs, has_rest)
