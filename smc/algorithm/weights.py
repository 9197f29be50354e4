"""Importance weights of particle populations: update, normalisation, effective sample size and evidence. See the
package's legend for axes."""

from __future__ import annotations

import torch
from torch import Tensor


def block_log_weight(logp_XK: Tensor, logq_XK: Tensor, counts_X: Tensor, alpha_X: Tensor) -> Tensor:
    """Log-weight increment [X] of a block, float64: the sum of alpha * log p - log q over its first `counts` tokens.

    Later tokens follow EOS, a stop string or the length limit and are ignored, whatever their values.
    """
    exists_XK = torch.arange(logp_XK.shape[-1], device=logp_XK.device) < counts_X[:, None]
    term_XK = alpha_X[:, None] * logp_XK.double() - logq_XK.double()
    return torch.where(exists_XK, term_XK, 0.0).sum(-1)


def valid(size_G: Tensor, n: int) -> Tensor:
    """Mask [G, n] of the entries that are not padding."""
    return torch.arange(n, device=size_G.device) < size_G[:, None]


def normalise(logw_GN: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised weights [G, N] and the log of the sum of weights [G], in float64. If all weights of a group are zero:
    zeros and -inf."""
    logw_GN = logw_GN.double()
    return logw_GN.softmax(-1).nan_to_num(0.0), logw_GN.logsumexp(-1)


def effective_sample_size(weights_GN: Tensor) -> Tensor:
    """ESS = 1 / sum w^2 of normalised weights [G], between 1 and N; 0 for an all-zero group."""
    return weights_GN.square().sum(-1).reciprocal().nan_to_num(posinf=0.0)


def log_mean_weight(log_sum_G: Tensor, size_G: Tensor) -> Tensor:
    """logsumexp(log w) - log N [G]: the increment of the running log Z-hat at each resampling and at the end."""
    return log_sum_G - size_G.double().log()
