"""Selection in a round of SMC speculative decoding with independent particles: resamples a degenerate population and
chooses branches.

Lockstep and look-ahead use the same function with different candidates (weighted by `smc.executor.select`): lockstep
has one per particle, which ends with the bonus token; look-ahead has F, one for each branch of the next block that was
drafted while the target scored this one.

Local axes: P batch indices of the non-empty groups."""

from __future__ import annotations

from typing import Generic, NamedTuple

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
from smc.types import Array

EQUAL = 1e-6
"""Relative tolerance of the ESS threshold. With a threshold of 1, rounding in the weights of identical particles must
not trigger resampling."""
BRANCH_POSITION = 1 << 20
"""Position of the first uniform that chooses a branch. Resampling uses positions from 0, so neither depends on how many
uniforms the other uses."""
PREFIX_POSITION = 3 << 20
"""Position of the uniform that draws a prefix."""


class NextParticles(NamedTuple, Generic[Array]):
    """The particles after a selection, by batch index."""

    ancestor_A: Array
    """int64 batch index whose history this index continues; the index itself if its particle stays, and for empty and
    padding indices."""
    row_A: Array
    """int64 index of the row that it continues with. Every batch index has F rows in look-ahead, one in lockstep."""
    alive_A: Array
    """bool: the batch index holds a particle. One without a particle repeats another of its group and has ended."""
    logw_A: Array
    """float64 log-weights; -inf without a particle."""


class SelectionStatistics(NamedTuple, Generic[Array]):
    """Statistics of a selection, by group; zeros for padding groups."""

    log_z_G: Array
    """float64 increment of the running log Z-hat: 0 if weights were not reset, -inf if the group collapsed."""
    ess_G: Array
    """float64 effective sample size before resampling."""
    resampled_G: Array
    """bool: the group was resampled."""
    collapsed_G: Array
    """bool: every weight was zero (or NaN); the group then continues from a prefix of a block (`surviving_prefix`)."""


class Selection(NamedTuple):
    """A selection among the candidates of all groups."""

    particles: NextParticles[Tensor]
    statistics: SelectionStatistics[Tensor]


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
    used_Z, own = groups.used()
    index_ZN, exists_ZN = grid(*own.spans)
    alive_ZN = exists_ZN & alive_A[index_ZN]
    candidates_ZNF = torch.where(alive_ZN[..., None], candidates_AF[index_ZN].double(), -torch.inf)
    family_ZN = candidates_ZNF.logsumexp(-1)
    weights_ZN, log_sum_Z = normalise(family_ZN)
    ess_Z = effective_sample_size(weights_ZN)
    # NaN makes all normalised weights zero as well.
    collapsed_Z = weights_ZN.sum(-1) == 0
    is_low_Z = ess_Z < threshold_G[used_Z] * own.count_G * (1 - EQUAL)
    resampled_Z = (is_low_Z | (own.next_count_G != own.count_G)) & ~collapsed_Z
    reset_Z = resampled_Z | collapsed_Z
    keys = (scheme_G[used_Z], seed_G[used_Z], round_G[used_Z])
    ancestor_ZN, branch_ZN, held_ZN = _assign(candidates_ZNF, alive_ZN, own, resampled_Z, collapsed_Z, *keys)
    logw_ZN = family_ZN.masked_fill(reset_Z[:, None], 0.0).masked_fill(~held_ZN, -torch.inf)
    log_z_Z = log_mean_weight(log_sum_Z, own.count_G.clamp(min=1)).masked_fill(~reset_Z, 0.0)

    cell_P = exists_ZN.flatten().nonzero()[:, 0]
    index_P = index_ZN.flatten()[cell_P]

    def packed(values_ZN: Tensor, padding_A: Tensor) -> Tensor:
        return padding_A.index_put((index_P,), values_ZN.flatten()[cell_P])

    own_A = torch.arange(len(alive_A), device=alive_A.device)
    by_group = (
        values_Z.new_zeros(len(seed_G)).index_put((used_Z,), values_Z)
        for values_Z in (log_z_Z, ess_Z, resampled_Z, collapsed_Z)
    )
    ancestor_A, branches = packed(own.spans.first_G[:, None] + ancestor_ZN, own_A), candidates_AF.shape[1]
    particles = NextParticles(
        ancestor_A=ancestor_A,
        row_A=ancestor_A * branches + packed(branch_ZN, torch.zeros_like(own_A)),
        alive_A=packed(held_ZN, torch.zeros_like(alive_A)),
        logw_A=packed(logw_ZN, torch.full_like(own_A, -torch.inf, dtype=torch.float64)),
    )
    return Selection(particles, SelectionStatistics(*by_group))


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
    weights_GY, _ = normalise(candidates_GNF.flatten(1))
    counts_GY = offspring(scheme_G, weights_GY, own.next_count_G.long(), n, uniforms_GU)
    ancestor_GN, branch_GN, filled_GN = assign_slots(counts_GY.view(-1, n, branches), own.spans.size_G)
    is_first_GN = alive_GN.cumsum(-1) <= own.next_count_G[:, None]
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
    used_Z, index_ZN, exists_ZN = used_grid(groups)
    weight_ZN = torch.where(exists_ZN, weight_A[index_ZN], -torch.inf).nan_to_num(
        nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf
    )
    top_Z1 = weight_ZN.amax(-1, keepdim=True)
    reach_ZN = (weight_ZN - torch.where(top_Z1 > -torch.inf, top_Z1, 0.0)).exp().cumsum(-1)
    pick_Z1 = (reach_ZN <= uniform_G[used_Z, None] * reach_ZN[:, -1:]).sum(-1, keepdim=True)
    pick_Z1 = torch.where(reach_ZN[:, -1:] > 0, pick_Z1, 0).clamp(max=index_ZN.shape[1] - 1)
    drawn_A[index_ZN[exists_ZN]] = index_ZN.gather(1, pick_Z1).expand_as(index_ZN)[exists_ZN]
    return drawn_A, kept_A[drawn_A]
