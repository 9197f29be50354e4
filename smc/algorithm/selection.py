"""Selection in a round of SMC speculative decoding with independent particles: resamples a degenerate population and
chooses branches.

Lockstep and look-ahead use the same function with different candidates (weighted by `smc.executor.select`): lockstep
has one per particle, which ends with the bonus token; look-ahead has F, one for each branch of the next block that was
drafted while the target scored this one.

Axes in addition to the package's: H non-empty groups, X batch indices of those groups, Q tokens of a block, N batch
indices of a group."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from smc.algorithm.resampling import (
    Bounds,
    Spans,
    assign_slots,
    effective_sample_size,
    grid,
    log_mean_weight,
    normalise,
    offspring,
    used_grid,
)
from smc.api.limits import SCHEME_NAMES
from smc.arrays import to_device, to_host
from smc.philox import Purpose, uniforms

EQUAL = 1e-6
"""Relative tolerance of the ESS threshold. With a threshold of 1, rounding in the weights of identical particles must
not trigger resampling."""
BRANCH_POSITION = 1 << 20
"""Position of the first uniform that chooses a branch. Resampling uses positions from 0, so neither depends on how many
uniforms the other uses."""
PREFIX_POSITION = 3 << 20
"""Position of the uniform that draws a prefix."""


class Selection(NamedTuple):
    """The continuation at each batch index, and statistics of each group (zeros for padding groups)."""

    ancestor_A: Tensor
    """int64: batch index whose history this index continues; the index itself if its particle stays, and for empty and
    padding indices."""
    branch_A: Tensor
    """int64: index of the ancestor's candidate."""
    logw_A: Tensor
    """float64 log-weights after the round; -inf without a particle."""
    alive_A: Tensor
    """bool: there is a particle at the index after the round."""
    log_z_G: Tensor
    """float64 increment of the running log Z-hat: 0 if weights were not reset, -inf if the group collapsed."""
    ess_G: Tensor
    """float64 effective sample size before resampling."""
    resampled_G: Tensor
    """bool: the group was resampled."""
    collapsed_G: Tensor
    """bool: every weight was zero (or NaN); the group then continues from a prefix of a block (`surviving_prefix`)."""


def select(
    candidates_AF: Tensor,
    alive_A: Tensor,
    groups: Bounds,
    threshold_G: Tensor,
    scheme_G: Tensor,
    seed_G: Tensor,
    round_G: Tensor,
) -> Selection:
    """Choose the candidate at every batch index. Expected weights are preserved, so Z-hat stays unbiased for any F >=
    1.

    A particle's family consists of all its branches; `candidates_AF` are their log-weights. A group is resampled if the
    ESS of its family weights is below threshold * count, or if its number of particles changes: `draws` candidates are
    drawn by its scheme (an index into `SCHEME_NAMES`) and get log-weight 0. Otherwise each particle keeps one branch,
    drawn in proportion to the branch's weight, with the weight of the whole family. Uniforms are keyed by (seed,
    round), int64. Candidates at indices without a particle (`alive` false) are ignored. A group without any weight
    keeps its first `draws` particles. Synchronises with the host."""
    used_H, own = groups.used()
    index_HN, exists_HN = grid(own.first_G, own.size_G)
    alive_HN = exists_HN & alive_A[index_HN]
    candidates_HNF = torch.where(alive_HN[..., None], candidates_AF[index_HN].double(), -torch.inf)
    family_HN = candidates_HNF.logsumexp(-1)
    weights_HN, log_sum_H = normalise(family_HN)
    ess_H = effective_sample_size(weights_HN)
    # NaN makes all normalised weights zero as well.
    collapsed_H = weights_HN.sum(-1) == 0
    is_low_H = ess_H < threshold_G[used_H] * own.count_G * (1 - EQUAL)
    resampled_H = (is_low_H | (own.draws_G != own.count_G)) & ~collapsed_H
    reset_H = resampled_H | collapsed_H
    keys = (scheme_G[used_H], seed_G[used_H], round_G[used_H])
    ancestor_HN, branch_HN, held_HN = _assign(candidates_HNF, alive_HN, own, resampled_H, collapsed_H, *keys)
    logw_HN = family_HN.masked_fill(reset_H[:, None], 0.0).masked_fill(~held_HN, -torch.inf)
    log_z_H = log_mean_weight(log_sum_H, own.count_G.clamp(min=1)).masked_fill(~reset_H, 0.0)

    cell_X = exists_HN.flatten().nonzero()[:, 0]
    index_X = index_HN.flatten()[cell_X]

    def packed(values_HN: Tensor, padding_A: Tensor) -> Tensor:
        return padding_A.index_put((index_X,), values_HN.flatten()[cell_X])

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


def _assign(
    candidates_GNF: Tensor,
    alive_GN: Tensor,
    own: Bounds,
    resampled_G: Tensor,
    collapsed_G: Tensor,
    scheme_G: Tensor,
    seed_G: Tensor,
    round_G: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the continuation of every slot of a grid: (ancestor [G, N], branch [G, N], whether it has a particle
    [G, N])."""
    _, n, branches = candidates_GNF.shape
    schemes = {SCHEME_NAMES[scheme] for scheme in scheme_G.tolist()}
    count = n * branches if "ssp" in schemes else n if schemes - {"systematic"} else 1
    positions = np.concatenate((np.arange(count), BRANCH_POSITION + np.arange(n)))
    drawn_GU = uniforms(to_host(seed_G), to_host(round_G), positions, Purpose.SELECTION)
    uniforms_GU, branch_uniforms_GN = to_device(drawn_GU, seed_G.device).tensor_split([count], dim=1)
    # All groups are resampled; groups without `resampled` then keep their particles.
    weights_GM, _ = normalise(candidates_GNF.flatten(1))
    counts_GM = offspring(scheme_G, weights_GM, own.draws_G.long(), n, uniforms_GU)
    ancestor_GN, branch_GN, filled_GN = assign_slots(counts_GM.view(-1, n, branches), own.size_G)
    is_first_GN = alive_GN.cumsum(-1) <= own.draws_G[:, None]
    kept_GN = alive_GN & (is_first_GN | ~collapsed_G[:, None])
    resampled_G1 = resampled_G[:, None]
    return (
        torch.where(resampled_G1, ancestor_GN, torch.arange(n, device=ancestor_GN.device)),
        torch.where(resampled_G1, branch_GN, draw_branch(candidates_GNF, branch_uniforms_GN)),
        torch.where(resampled_G1, filled_GN, kept_GN),
    )


def draw_branch(candidates_GNF: Tensor, uniforms_GN: Tensor) -> Tensor:
    """Draw one branch per particle [G, N] in proportion to its weight; branch 0 if all weights are zero."""
    if candidates_GNF.shape[-1] == 1:
        return torch.zeros_like(uniforms_GN, dtype=torch.int64)
    # If all weights are zero the shares are NaN, every comparison is false, and branch 0 is chosen.
    cumulative_GNF = candidates_GNF.softmax(-1).cumsum(-1)
    point_GN1 = uniforms_GN[..., None] * cumulative_GNF[..., -1:]
    return (cumulative_GNF <= point_GN1).sum(-1).clamp(max=candidates_GNF.shape[-1] - 1)


def final_weights(logw_N: Tensor) -> Tensor:
    """Return softmax(log w) [N], float64: the probability of each particle to be the answer. Equal if all weights are
    zero."""
    weights_N, log_sum = normalise(logw_N[None])
    if log_sum.item() == -torch.inf:
        weights_N = torch.full_like(weights_N, 1 / weights_N.shape[-1])
    return weights_N[0]


def final_draw(logw_N: Tensor, uniform: float) -> int:
    """Draw the particle that becomes the answer, in proportion to its weight. Returns its index."""
    cumulative_N = final_weights(logw_N).cumsum(-1)
    # Scaled by the last cumulative sum itself: a sum that rounds differently could put the point past the last particle
    # with weight.
    return int((cumulative_N <= uniform * cumulative_N[-1]).sum())


def surviving_prefix(
    step_AQ: Tensor, count_A: Tensor, logw_A: Tensor, groups: Spans, uniform_G: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw, for each group, the prefix of a block from which a group without weight continues. Returns for every batch
    index the drawn block of its group [A] and how many of the block's tokens are kept, including its first [A].

    `step_AQ`: log-weight increment of the token after each token, -inf where the target cannot write it; the tokens of
    a block are `count`. `logw_A`: log-weight of the block's first token, -inf where there is no block. If no block of a
    group has weight, the first is taken. Synchronises with the host."""
    exists_AQ = torch.arange(step_AQ.shape[1], device=step_AQ.device) < count_A[:, None] - 1
    step_AQ = torch.where(exists_AQ, step_AQ.double(), 0.0)
    survives_AQ = (step_AQ > -torch.inf).long().cumprod(-1) > 0
    kept_A = 1 + (survives_AQ & exists_AQ).sum(-1)
    weight_A = logw_A.double() + torch.where(survives_AQ, step_AQ, 0.0).sum(-1)
    drawn_A = torch.arange(len(count_A), device=step_AQ.device)
    used_H, index_HN, exists_HN = used_grid(groups)
    weight_HN = torch.where(exists_HN, weight_A[index_HN], -torch.inf).nan_to_num(
        nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf
    )
    top_H1 = weight_HN.amax(-1, keepdim=True)
    reach_HN = (weight_HN - torch.where(top_H1 > -torch.inf, top_H1, 0.0)).exp().cumsum(-1)
    pick_H1 = (reach_HN <= uniform_G[used_H, None] * reach_HN[:, -1:]).sum(-1, keepdim=True)
    pick_H1 = torch.where(reach_HN[:, -1:] > 0, pick_H1, 0).clamp(max=index_HN.shape[1] - 1)
    drawn_A[index_HN[exists_HN]] = index_HN.gather(1, pick_H1).expand_as(index_HN)[exists_HN]
    return drawn_A, kept_A[drawn_A]
