"""Converts logits to the distribution that a token is drawn from, and draws. Knows nothing about models, requests or
particles.

Biases and penalties have been added to the logits before (`smc.executor.logit_changes`). Both distributions use the
same processors, in this order: temperature, top-k, top-p, min-p, renormalise.
  target distribution    p = processed softmax, zero outside the truncation, which belongs to the target distribution
  proposal distribution  q = (1 - share) * processed + share * softmax(logits / temperature): a defensive mixture
                         (Hesterberg 1995), so that q covers every token that the target may allow and the weights p/q
                         stay bounded
A draft whose head has rows only for some tokens uses such a proposal over these tokens, and adds the others separately:
`smc.executor.sampling`. Every log-probability that leaves this module is that of exactly the distribution that the
token was, or would be, drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntFlag, auto
from operator import attrgetter
from typing import Any, Generic, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from smc.arrays import Room, map_tensors, to_device
from smc.types import Array

_CPU = torch.device("cpu")


class Processors(IntFlag):
    """Steps from logits to a distribution."""

    GREEDY = auto()
    TEMPERATURE = auto()
    TOP_K = auto()
    TOP_P = auto()
    MIN_P = auto()
    ALPHA = auto()
    TRUNCATION = TOP_K | TOP_P | MIN_P


NO_PROCESSORS = Processors(0)
TRUNCATIONS = (NO_PROCESSORS, *Processors.TRUNCATION, Processors.TRUNCATION)
"""Truncations of `DistributionSpec.canonical`: none, one of them, or more."""


class DistributionSpec(NamedTuple, Generic[Array]):
    """How each of R rows turns logits into a distribution. Arrays [R]; a neutral value switches a processor off."""

    temperature_R: Array
    """float32, >= 0; 0 is greedy: all mass on the largest logit."""
    top_k_R: Array
    """int64; 0 = off."""
    top_p_R: Array
    """float32 in (0, 1]; 1 = off."""
    min_p_R: Array
    """float32 in [0, 1); 0 = off."""
    alpha_R: Array
    """float32 > 0; exponent of the distribution that tokens are drawn from; 1 = the distribution itself. Proposals
    ignore it."""
    active: Processors
    """Processors that at least one row uses; the others are skipped."""

    @staticmethod
    def of(**given: ArrayLike) -> DistributionSpec[np.ndarray]:
        """Build from the values of some fields; the other fields are neutral. Notes which processors are in use."""
        rows = len(np.asarray(next(iter(given.values()))))
        neutral = {name: none_R.repeat(rows) for name, none_R in NEUTRAL.items() if name not in given}
        arrays = {name: np.asarray(values_R, NEUTRAL[name].dtype) for name, values_R in given.items()}
        spec: DistributionSpec[np.ndarray] = DistributionSpec(**neutral, **arrays, active=NO_PROCESSORS)
        used = {
            Processors.GREEDY: (spec.temperature_R == 0).any(),
            Processors.TEMPERATURE: ((spec.temperature_R != 1) & (spec.temperature_R != 0)).any(),
            Processors.TOP_K: spec.top_k_R.any(),
            Processors.TOP_P: (spec.top_p_R < 1).any(),
            Processors.MIN_P: spec.min_p_R.any(),
            Processors.ALPHA: (spec.alpha_R != 1).any(),
        }
        return spec._replace(active=Processors(sum(one for one, is_used in used.items() if is_used)))

    @staticmethod
    def of_settings(settings: Sequence[object], temperatures: Sequence[float]) -> DistributionSpec[np.ndarray]:
        """Build from the sampling settings of requests, which have the names of the fields. None: neutral."""
        arrays: dict[str, ArrayLike] = {"temperature_R": temperatures}
        for name, values in zip(SETTINGS, zip(*map(SETTINGS_OF, settings))):
            arrays[name] = [NEUTRAL[name][0] if value is None else value for value in values]
        return DistributionSpec.of(**arrays)

    @staticmethod
    def allocate(room: Room, rows: int, active: Processors) -> DistributionSpec[Tensor]:
        """Return memory for as many rows."""
        memory = map_tensors(lambda none_R: room.longs(rows) if none_R.dtype == np.int64 else room.floats(rows), PLAIN)
        return memory._replace(active=active)

    @staticmethod
    def plain(rows: int) -> DistributionSpec[np.ndarray]:
        """Return the model's own distributions: temperature 1, and no other processor."""
        return PLAIN.take(np.zeros(rows, dtype=np.int64))

    def neutral(self: DistributionSpec[Any], rows_R: Tensor) -> DistributionSpec[Any]:
        """Return the same distributions without temperature and truncation in the given rows, whose logits are
        log-probabilities that already include both."""

        def without(values_R: Tensor, none_R: np.ndarray) -> Tensor:
            return torch.where(rows_R, torch.full_like(values_R, none_R[0].item()), values_R)

        return map_tensors(without, self, PLAIN)._replace(alpha_R=self.alpha_R)

    def canonical(self: DistributionSpec[Any]) -> DistributionSpec[Any]:
        """Return the same distributions, with more processors marked as active than necessary: having few kinds of
        rounds matters more than having few operations."""
        truncation = self.active & Processors.TRUNCATION
        if truncation.bit_count() > 1:
            truncation = Processors.TRUNCATION
        others = (self.active & Processors.ALPHA) | Processors.TEMPERATURE | Processors.GREEDY
        return self._replace(active=truncation | others)

    def to(self: DistributionSpec[Any], device: torch.device) -> DistributionSpec[Any]:
        """Return the same specification on a device."""
        return map_tensors(lambda values_R: to_device(values_R, device), self)

    def take(self: DistributionSpec[Any], rows: np.ndarray | Tensor) -> DistributionSpec[Any]:
        """The specs of the given rows, in that order (repeats allowed)."""
        return map_tensors(lambda values_R: values_R[rows], self)


PLAIN: DistributionSpec[np.ndarray] = DistributionSpec(
    temperature_R=np.ones(1, dtype=np.float32),
    top_k_R=np.zeros(1, dtype=np.int64),
    top_p_R=np.ones(1, dtype=np.float32),
    min_p_R=np.zeros(1, dtype=np.float32),
    alpha_R=np.ones(1, dtype=np.float32),
    active=NO_PROCESSORS,
)
"""The neutral value of every field, and its type."""
NEUTRAL: dict[str, np.ndarray] = {name: none_R for name, none_R in PLAIN._asdict().items() if name != "active"}
"""The same by name, without `active`."""
SETTINGS = tuple(name for name in NEUTRAL if name != "temperature_R")
"""Fields that are named like the requests' settings."""
SETTINGS_OF = attrgetter(*(name.removesuffix("_R") for name in SETTINGS))


class Distributions:
    """Applies a DistributionSpec on a device, without the processors that no row uses. A processor that only other rows
    use changes no bit of a row."""

    def __init__(self, spec: DistributionSpec[Any], device: torch.device = _CPU) -> None:
        def column(one: Processors, values_R: Any) -> Tensor | None:
            return to_device(values_R, device)[:, None] if one & spec.active else None

        self.temperature = column(Processors.TEMPERATURE, spec.temperature_R)
        self.greedy = column(Processors.GREEDY, spec.temperature_R == 0)
        self.top_k = column(Processors.TOP_K, spec.top_k_R)
        self.top_p = column(Processors.TOP_P, spec.top_p_R)
        self.min_p = column(Processors.MIN_P, spec.min_p_R)
        self.alpha = column(Processors.ALPHA, spec.alpha_R)
        cuts = (spec.top_k_R > 0) | (spec.top_p_R < 1) | (spec.min_p_R > 0)
        self.cuts = column(Processors.TRUNCATION, cuts)
        """Whether each row is truncated."""

    def target(self, logits_RV: Tensor) -> Tensor:
        """log p [R, V], float32; -inf outside the truncation."""
        log_softmax_RV = self._tempered(logits_RV)
        return self._truncated(log_softmax_RV)

    def proposal(self, logits_RV: Tensor, share: float) -> Tensor:
        """log q [R, V] of the defensive mixture; `share` in [0, 1) is the weight of the untruncated part."""
        log_softmax_RV = self._tempered(logits_RV)
        truncated_RV = self._truncated(log_softmax_RV)
        if self.cuts is None or share == 0:
            return truncated_RV
        mixed_RV = torch.logaddexp(truncated_RV + np.log1p(-share), log_softmax_RV + np.log(share))
        return torch.where(self.cuts, mixed_RV, log_softmax_RV)

    def powered(self, logp_RV: Tensor) -> tuple[Tensor, Tensor | None]:
        """p^alpha normalised, and its log normaliser log Z [R] (None if alpha is 1 for every row: Z = 1)."""
        if self.alpha is None:
            return logp_RV, None
        raised_RV = torch.where(self.alpha == 1, logp_RV, logp_RV * self.alpha)
        log_z_R1 = torch.where(self.alpha == 1, 0.0, log_sum(raised_RV))
        return raised_RV - log_z_R1, log_z_R1.squeeze(-1)

    def _tempered(self, logits_RV: Tensor) -> Tensor:
        if self.temperature is not None:
            logits_RV = logits_RV / torch.where(self.temperature == 0, 1.0, self.temperature)
        log_softmax_RV = torch.log_softmax(logits_RV, dim=-1)
        if self.greedy is None:
            return log_softmax_RV
        # NaN logits must stay visible: keeping the softmax's own NaN preserves them.
        one_hot = torch.full_like(logits_RV, -torch.inf).scatter_(-1, logits_RV.argmax(-1, keepdim=True), 0.0)
        return torch.where(self.greedy, torch.where(log_softmax_RV.isnan(), log_softmax_RV, one_hot), log_softmax_RV)

    def _truncated(self, logp_RV: Tensor) -> Tensor:
        if self.cuts is None:
            return logp_RV
        sorted_RV, order_RV = logp_RV.sort(dim=-1, descending=True, stable=True)
        keep_RV = torch.ones_like(sorted_RV, dtype=torch.bool)
        if self.top_k is not None:
            rank_V = torch.arange(sorted_RV.shape[-1], device=sorted_RV.device)
            keep_RV &= (self.top_k == 0) | (rank_V < self.top_k)
        if self.top_p is not None:
            kept_RV = torch.where(keep_RV, sorted_RV, -torch.inf).softmax(-1)
            # A token is kept while the mass before it is below top_p, so the smallest sufficient set is kept.
            keep_RV &= (kept_RV.cumsum(-1) - kept_RV < self.top_p) | (self.top_p >= 1)
        if self.min_p is not None:
            keep_RV &= sorted_RV >= sorted_RV[..., :1] + self.min_p.log()
        keep_RV[..., 0] = True
        mask_RV = torch.empty_like(keep_RV).scatter_(-1, order_RV, keep_RV)
        kept_RV = torch.where(mask_RV | logp_RV.isnan(), logp_RV, -torch.inf)
        return torch.where(self.cuts, kept_RV - log_sum(kept_RV), logp_RV)


def log_sum(logits_RV: Tensor) -> Tensor:
    """Return the log of each row's sum of exponentials [R, 1]. On a CPU its bits do not depend on the other rows: torch
    divides the sum of a lone row among its threads, so a lone row gets company."""
    rows = len(logits_RV)
    return logits_RV.expand(2 if rows == 1 else rows, -1).logsumexp(-1, keepdim=True)[:rows]


def draw(log_dist_RV: Tensor, exponential_RFV: Tensor) -> Tensor:
    """Draw one token per row of variates, [R, F]: the entry that wins the exponential race E_v / p_v, which is
    equivalent to Gumbel-max."""
    return (exponential_RFV / log_dist_RV.exp().unsqueeze(-2)).argmin(dim=-1)
