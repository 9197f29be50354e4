"""One round of SMC-SD after scoring: weigh candidates, resample if the population degenerated, pick branches.

Lockstep and look-ahead are the same function. What differs is the candidates: lockstep offers one per particle, ended by
the bonus token; look-ahead offers F, one for each branch of the next block that was drafted while the target scored this one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from smc.algorithm.resampling import offspring, place
from smc.algorithm.weights import effective_sample_size, log_mean_weight, normalise, valid

EQUAL = 1e-6
"""Relative distance from its threshold up to which an ESS counts as not below it: at a threshold of 1, rounding in the weights of
identical particles must not decide whether they are resampled."""


@dataclass(frozen=True)
class Selection:
    """What becomes of each slot, and what the round did to the population."""

    ancestor_GN: Tensor
    """int64: the particle whose past the slot continues; its own index if it survived in place."""
    branch_GN: Tensor
    """int64: which of the ancestor's candidates it continues with."""
    logw_GN: Tensor
    """float64 log-weights after the round; padding keeps -inf."""
    log_z_G: Tensor
    """float64 increment of the running log Z-hat: 0 unless the group resampled, -inf if it collapsed."""
    ess_G: Tensor
    """float64 effective sample size before resampling."""
    resampled_G: Tensor
    collapsed_G: Tensor
    """bool: every weight was zero; weights were set equal and decoding goes on."""


def lockstep_candidates(logw_GN: Tensor, block_GN: Tensor, bonus_log_z_GN: Tensor) -> Tensor:
    """Candidate log-weights [G, N, 1] of a lockstep round (design section 2, steps 3 and 4).

    `block_GN` is the block's increment (`weights.block_log_weight`); `bonus_log_z_GN` the log normaliser of the law the bonus
    was drawn from: 0 at alpha = 1, and 0 for a particle that ended inside the block.
    """
    return (logw_GN + block_GN + bonus_log_z_GN)[..., None]


def lookahead_candidates(logw_GN: Tensor, block_GN: Tensor, next_GNF: Tensor, open_GN: Tensor) -> Tensor:
    """Candidate log-weights [G, N, F] of a look-ahead round (design section 3).

    `next_GNF` is alpha * log p - log q of the first token of every branch. A particle that ended (`open` false) has one
    candidate, itself, with its whole weight.
    """
    branches = next_GNF.shape[-1]
    alone_F = torch.where(torch.arange(branches, device=next_GNF.device) == 0, 0.0, -math.inf).double()
    return (logw_GN + block_GN)[..., None] + torch.where(open_GN[..., None], next_GNF - math.log(branches), alone_F)


def select(
    candidates_GNF: Tensor, size_G: Tensor, threshold_G: Tensor, schemes: list[str], uniforms_GU: Tensor, branch_uniforms_GN: Tensor
) -> Selection:
    """Choose every slot's candidate. E[weight of candidate] is preserved, so Z-hat stays unbiased for any F >= 1.

    A group whose family ESS is below threshold * N draws N of its N * F candidates by its scheme and sets weights to 0;
    any other keeps one branch of each particle, drawn by its share, and lets the particle carry the whole family's weight.
    """
    _, n, branches = candidates_GNF.shape
    mask_GN = valid(size_G, n)
    candidates_GNF = torch.where(mask_GN[..., None], candidates_GNF.double(), -torch.inf)
    family_GN = candidates_GNF.logsumexp(-1)
    weights_GN, log_sum_G = normalise(family_GN)
    ess_G = effective_sample_size(weights_GN)
    collapsed_G = log_sum_G == -torch.inf
    resampled_G = (ess_G < threshold_G * size_G * (1 - EQUAL)) & ~collapsed_G
    # All groups are resampled, and those that need not be keep what they have: no shape depends on a weight.
    weights_GM, _ = normalise(candidates_GNF.flatten(1))
    counts_GM = offspring(schemes, weights_GM, size_G, n, uniforms_GU)
    ancestor_GN, branch_GN = place(counts_GM.view(-1, n, branches), size_G)
    ancestor_GN = torch.where(resampled_G[:, None], ancestor_GN, torch.arange(n, device=family_GN.device))
    branch_GN = torch.where(resampled_G[:, None], branch_GN, own_branch(candidates_GNF, branch_uniforms_GN))
    reset_G = resampled_G | collapsed_G
    logw_GN = family_GN.masked_fill(reset_G[:, None], 0.0).masked_fill(~mask_GN, -torch.inf)
    log_z_G = log_mean_weight(log_sum_G, size_G).masked_fill(~reset_G, 0.0)
    return Selection(ancestor_GN, branch_GN, logw_GN, log_z_G, ess_G, resampled_G, collapsed_G)


def own_branch(candidates_GNF: Tensor, uniforms_GN: Tensor) -> Tensor:
    """One branch per particle [G, N], drawn by its share of the family's weight; branch 0 where all weights are zero."""
    if candidates_GNF.shape[-1] == 1:
        return torch.zeros_like(uniforms_GN, dtype=torch.int64)
    # Where all weights are zero the shares are NaN, no comparison holds, and branch 0 it is.
    cumulative_GNF = candidates_GNF.softmax(-1).cumsum(-1)
    point_GN1 = uniforms_GN[..., None] * cumulative_GNF[..., -1:]
    return (cumulative_GNF <= point_GN1).sum(-1).clamp(max=candidates_GNF.shape[-1] - 1)


def final_draw(logw_N: Tensor, uniform: float) -> int:
    """The answer's particle: one draw from softmax(log w), not the argmax. Equal weights if all are zero."""
    weights_N, log_sum = normalise(logw_N[None])
    if log_sum.item() == -torch.inf:
        weights_N = torch.full_like(weights_N, 1 / weights_N.shape[-1])
    cumulative_N = weights_N[0].cumsum(-1)
    # The last sum, not another one that rounds differently: no point may lie past the last particle that has any weight.
    return int((cumulative_N <= uniform * cumulative_N[-1]).sum())


def committed_length(tokens_GNL: Tensor, common_G: Tensor, size_G: Tensor) -> Tensor:
    """How many of the first `common` tokens [G] all particles of a group agree on, from the first on: int64 [G].

    Tokens on which all particles agree can no longer change: every future particle is a copy of one of these.
    """
    agree_GNL = tokens_GNL == tokens_GNL[:, :1]
    if (size_G != tokens_GNL.shape[1]).any():
        agree_GNL |= ~valid(size_G, tokens_GNL.shape[1])[..., None]
    agree_GL = agree_GNL.all(1) & valid(common_G, tokens_GNL.shape[2])
    return agree_GL.long().cumprod(-1).sum(-1)
