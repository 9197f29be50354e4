"""From logits to the law a token is drawn from, and the draw. Knows nothing about models, requests or particles.

Two laws share the same processors, in this order: temperature, top-k, top-p, min-p, renormalise.
  target law    p = processed softmax, zero outside the truncation (design: truncation belongs to the target law)
  proposal law  q = (1 - share) * processed + share * softmax(logits / temperature): a defensive mixture (Hesterberg 1995),
                so that q covers every token the target may allow and weights p/q stay bounded.
Every log-probability that leaves this module is of exactly the law the token was or would be drawn from.

Axes: R rows, V vocabulary, D draws a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class LawSpec:
    """How each of R rows turns logits into a law. Arrays [R]; a neutral value switches a processor off."""

    temperature_R: np.ndarray
    """float32, >= 0; 0 is greedy: all mass on the largest logit."""
    top_k_R: np.ndarray
    """int64; 0 = off."""
    top_p_R: np.ndarray
    """float32 in (0, 1]; 1 = off."""
    min_p_R: np.ndarray
    """float32 in [0, 1); 0 = off."""
    alpha_R: np.ndarray
    """float32 > 0; exponent of the law that draws are made from; 1 = the law itself. Proposals ignore it."""

    def take(self, rows: np.ndarray) -> LawSpec:
        """The specs of the given rows, in that order (repeats allowed)."""
        return LawSpec(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


class Laws:
    """A LawSpec on a device, with the processors that no row uses left out."""

    def __init__(self, spec: LawSpec, device: torch.device | str = "cpu") -> None:
        self.greedy = _column(spec.temperature_R == 0, device) if (spec.temperature_R == 0).any() else None
        scale_R = np.where(spec.temperature_R == 0, 1, 1 / np.maximum(spec.temperature_R, 1e-10)).astype(np.float32)
        self.inverse_temperature = _column(scale_R, device) if (scale_R != 1).any() else None
        self.top_k = _column(spec.top_k_R, device) if spec.top_k_R.any() else None
        self.top_p = _column(spec.top_p_R, device) if (spec.top_p_R < 1).any() else None
        self.min_p = _column(spec.min_p_R, device) if spec.min_p_R.any() else None
        self.alpha = _column(spec.alpha_R, device) if (spec.alpha_R != 1).any() else None

    def target(self, logits_RV: Tensor) -> Tensor:
        """log p [R, V], float32; -inf outside the truncation."""
        log_softmax_RV = self._tempered(logits_RV)
        return self._truncated(log_softmax_RV)

    def proposal(self, logits_RV: Tensor, share: float) -> Tensor:
        """log q [R, V] of the defensive mixture; `share` in [0, 1) is the untruncated part's."""
        log_softmax_RV = self._tempered(logits_RV)
        truncated_RV = self._truncated(log_softmax_RV)
        if truncated_RV is log_softmax_RV or share == 0:
            return truncated_RV
        return torch.logaddexp(truncated_RV + np.log1p(-share), log_softmax_RV + np.log(share))

    def powered(self, logp_RV: Tensor) -> tuple[Tensor, Tensor | None]:
        """p^alpha normalised, and its log normaliser log Z [R] (None where alpha is 1 for every row: Z = 1)."""
        if self.alpha is None:
            return logp_RV, None
        raised_RV = torch.where(self.alpha == 1, logp_RV, logp_RV * self.alpha)
        log_z_R1 = torch.where(self.alpha == 1, 0.0, raised_RV.logsumexp(-1, keepdim=True))
        return raised_RV - log_z_R1, log_z_R1.squeeze(-1)

    def _tempered(self, logits_RV: Tensor) -> Tensor:
        if self.inverse_temperature is not None:
            logits_RV = logits_RV * self.inverse_temperature
        log_softmax_RV = torch.log_softmax(logits_RV, dim=-1)
        if self.greedy is None:
            return log_softmax_RV
        # NaN logits must stay visible: adding the softmax's own NaN keeps them.
        one_hot = torch.full_like(logits_RV, -torch.inf).scatter_(-1, logits_RV.argmax(-1, keepdim=True), 0.0)
        return torch.where(self.greedy, torch.where(log_softmax_RV.isnan(), log_softmax_RV, one_hot), log_softmax_RV)

    def _truncated(self, logp_RV: Tensor) -> Tensor:
        if self.top_k is None and self.top_p is None and self.min_p is None:
            return logp_RV
        sorted_RV, order_RV = logp_RV.sort(dim=-1, descending=True, stable=True)
        keep_RV = torch.ones_like(sorted_RV, dtype=torch.bool)
        if self.top_k is not None:
            rank_V = torch.arange(sorted_RV.shape[-1], device=sorted_RV.device)
            keep_RV &= (self.top_k == 0) | (rank_V < self.top_k)
        if self.top_p is not None:
            kept_RV = torch.where(keep_RV, sorted_RV, -torch.inf).softmax(-1)
            # A token stays while the mass before it is short of top_p, so the smallest sufficient set is kept.
            keep_RV &= (kept_RV.cumsum(-1) - kept_RV < self.top_p) | (self.top_p >= 1)
        if self.min_p is not None:
            keep_RV &= sorted_RV >= sorted_RV[..., :1] + self.min_p.log()
        keep_RV[..., 0] = True
        mask_RV = torch.empty_like(keep_RV).scatter_(-1, order_RV, keep_RV)
        kept_RV = torch.where(mask_RV | logp_RV.isnan(), logp_RV, -torch.inf)
        return kept_RV - kept_RV.logsumexp(-1, keepdim=True)


def draw(log_law_RV: Tensor, exponential_RDV: Tensor) -> Tensor:
    """One token per variate row, [R, D]: the entry that wins the exponential race E_v / law_v (Gumbel-max in other words)."""
    return (exponential_RDV / log_law_RV.exp().unsqueeze(-2)).argmin(dim=-1)


def _column(values_R: np.ndarray, device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values_R)).to(device)[:, None]
