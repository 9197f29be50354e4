"""One round of SMC-SD after scoring, of independent particles: resample if the population degenerated, pick branches.

Lockstep and look-ahead are the same function. What differs is the candidates (`smc.executor.select` weighs them):
lockstep offers one per particle, ended by the bonus token; look-ahead offers F, one for each branch of the next block
that was drafted while the target scored this one.

Axes beside the package's: A places of a packed batch, H groups that have any, X their places.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from smc.algorithm.bounds import Bounds
from smc.algorithm.resampling import offspring, place
from smc.algorithm.weights import effective_sample_size, log_mean_weight, normalise
from smc.api.limits import SCHEME_NAMES
from smc.arrays import to_device, to_host
from smc.philox import Purpose, uniforms

EQUAL = 1e-6
"""Relative distance from its threshold up to which an ESS counts as not below it: at a threshold of 1, rounding in the
weights of identical particles must not decide whether they are resampled."""
BRANCH_POSITION = 1 << 20
"""Uniforms that pick branches are numbered from here, those that resample from 0: neither depends on how many there
are."""


@dataclass(frozen=True)
class Selection:
    """What becomes of each place, and what the round did to the population. Padding groups: zeros."""

    ancestor_A: Tensor
    """int64: the place whose past this one continues; its own index if it survived in place, holds nothing, or is
    padding."""
    branch_A: Tensor
    """int64: which of the ancestor's candidates it continues with."""
    logw_A: Tensor
    """float64 log-weights after the round; -inf where there is no particle."""
    alive_A: Tensor
    """bool: the place holds a particle after the round."""
    log_z_G: Tensor
    """float64 increment of the running log Z-hat: 0 unless weights were reset, -inf if the group collapsed."""
    ess_G: Tensor
    """float64 effective sample size before resampling."""
    resampled_G: Tensor
    collapsed_G: Tensor
    """bool: every weight was zero (or NaN); weights were set equal and decoding goes on."""


def select(
    candidates_AF: Tensor,
    alive_A: Tensor,
    groups: Bounds,
    threshold_G: Tensor,
    scheme_G: Tensor,
    seed_G: Tensor,
    round_G: Tensor,
) -> Selection:
    """Choose every place's candidate. E[weight of candidate] is preserved, so Z-hat stays unbiased for any F >= 1.

    A group whose family ESS is below threshold * count, or that is to have another number of particles, draws `draws`
    of its candidates by its scheme (an index into `SCHEME_NAMES`) and sets weights to 0; any other keeps one branch of
    each particle, drawn by its share, and lets the particle carry the whole family's weight. Uniforms are those of
    (seed, round), int64. What a place without a particle (`alive` false) offers counts for nothing. A group without
    weight keeps its first `draws` particles. Reads the host."""
    used_H, own = groups.used()
    place_HN, exists_HN = own.grid()
    alive_HN = exists_HN & alive_A[place_HN]
    candidates_HNF = torch.where(alive_HN[..., None], candidates_AF[place_HN].double(), -torch.inf)
    family_HN = candidates_HNF.logsumexp(-1)
    weights_HN, log_sum_H = normalise(family_HN)
    ess_H = effective_sample_size(weights_HN)
    # Where there is NaN, all weights come as zeros, too.
    collapsed_H = weights_HN.sum(-1) == 0
    is_low_H = ess_H < threshold_G[used_H] * own.count_G * (1 - EQUAL)
    resampled_H = (is_low_H | (own.draws_G != own.count_G)) & ~collapsed_H
    reset_H = resampled_H | collapsed_H
    keys = (scheme_G[used_H], seed_G[used_H], round_G[used_H])
    ancestor_HN, branch_HN, held_HN = _deal(candidates_HNF, alive_HN, own, resampled_H, collapsed_H, *keys)
    logw_HN = family_HN.masked_fill(reset_H[:, None], 0.0).masked_fill(~held_HN, -torch.inf)
    log_z_H = log_mean_weight(log_sum_H, own.count_G.clamp(min=1)).masked_fill(~reset_H, 0.0)

    cell_X = exists_HN.flatten().nonzero()[:, 0]
    place_X = place_HN.flatten()[cell_X]

    def packed(values_HN: Tensor, padding_A: Tensor) -> Tensor:
        return padding_A.index_put((place_X,), values_HN.flatten()[cell_X])

    own_A = torch.arange(len(alive_A), device=alive_A.device)
    by_group = (
        values_H.new_zeros(len(seed_G)).index_put((used_H,), values_H)
        for values_H in (log_z_H, ess_H, resampled_H, collapsed_H)
    )
    return Selection(
        packed(own.first_G[:, None] + ancestor_HN, own_A),
        packed(branch_HN, torch.zeros_like(own_A)),
        packed(logw_HN, torch.full_like(own_A, -torch.inf, dtype=torch.float64)),
        packed(held_HN, torch.zeros_like(alive_A)),
        *by_group,
    )


def _deal(
    candidates_GNF: Tensor,
    alive_GN: Tensor,
    own: Bounds,
    resampled_G: Tensor,
    collapsed_G: Tensor,
    scheme_G: Tensor,
    seed_G: Tensor,
    round_G: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """What every slot of a grid continues with: (ancestor [G, N], branch [G, N], whether it has a particle [G, N])."""
    _, n, branches = candidates_GNF.shape
    schemes = {SCHEME_NAMES[scheme] for scheme in scheme_G.tolist()}
    count = n * branches if "ssp" in schemes else n if schemes - {"systematic"} else 1
    positions = np.concatenate((np.arange(count), BRANCH_POSITION + np.arange(n)))
    drawn_GU = uniforms(to_host(seed_G), to_host(round_G), positions, Purpose.SELECTION)
    uniforms_GU, branch_uniforms_GN = to_device(drawn_GU, seed_G.device).tensor_split([count], dim=1)
    # All groups are resampled, and those that need not be keep what they have.
    weights_GM, _ = normalise(candidates_GNF.flatten(1))
    counts_GM = offspring(scheme_G, weights_GM, own.draws_G.long(), n, uniforms_GU)
    ancestor_GN, branch_GN, filled_GN = place(counts_GM.view(-1, n, branches), own.size_G)
    is_first_GN = alive_GN.cumsum(-1) <= own.draws_G[:, None]
    kept_GN = alive_GN & (is_first_GN | ~collapsed_G[:, None])
    resampled_G1 = resampled_G[:, None]
    return (
        torch.where(resampled_G1, ancestor_GN, torch.arange(n, device=ancestor_GN.device)),
        torch.where(resampled_G1, branch_GN, own_branch(candidates_GNF, branch_uniforms_GN)),
        torch.where(resampled_G1, filled_GN, kept_GN),
    )


def own_branch(candidates_GNF: Tensor, uniforms_GN: Tensor) -> Tensor:
    """One branch per particle [G, N], drawn by its share of the family's weight; branch 0 where all weights are
    zero."""
    if candidates_GNF.shape[-1] == 1:
        return torch.zeros_like(uniforms_GN, dtype=torch.int64)
    # Where all weights are zero the shares are NaN, no comparison holds, and branch 0 it is.
    cumulative_GNF = candidates_GNF.softmax(-1).cumsum(-1)
    point_GN1 = uniforms_GN[..., None] * cumulative_GNF[..., -1:]
    return (cumulative_GNF <= point_GN1).sum(-1).clamp(max=candidates_GNF.shape[-1] - 1)


def final_weights(logw_N: Tensor) -> Tensor:
    """softmax(log w) [N], float64: with which probability each particle is the answer. Equal if all weights are
    zero."""
    weights_N, log_sum = normalise(logw_N[None])
    if log_sum.item() == -torch.inf:
        weights_N = torch.full_like(weights_N, 1 / weights_N.shape[-1])
    return weights_N[0]


def final_draw(logw_N: Tensor, uniform: float) -> int:
    """The answer's particle: one draw by weight, not the likeliest."""
    cumulative_N = final_weights(logw_N).cumsum(-1)
    # The last sum, not another one that rounds differently: no point may lie past the last particle that has any
    # weight.
    return int((cumulative_N <= uniform * cumulative_N[-1]).sum())
