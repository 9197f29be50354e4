"""Importance weights of particle populations, and resampling schemes: from normalised weights and uniforms to offspring
counts.

Every scheme is unbiased, E[counts] = n * w, and treats groups independently. `assign_slots` then assigns copies to
slots. Sources: Douc, Cappe, Moulines, "Comparison of resampling schemes for particle filtering" (2005); SSP: Gerber,
Chopin, Whiteley, "Negative association, ordering and convergence of resampling methods" (2019), after Srinivasan
(2001)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from smc.api.limits import SCHEME_NAMES
from smc.arrays import map_tensors

Scheme = Callable[[Tensor, Tensor, int, Tensor], Tensor]
"""(weights_GY, draws_G, most, uniforms_GU) -> counts_GY. `most` is the largest number of draws. SSP needs Y uniforms,
systematic resampling 1, the other schemes `most`."""


def block_log_weight(logp_XK: Tensor, logq_XK: Tensor, counts_X: Tensor, alpha_X: Tensor) -> Tensor:
    """Return the log-weight increment [X] of a block, float64: the sum of alpha * log p - log q over its first `counts`
    tokens.

    Later tokens follow EOS, a stop string or the length limit and are ignored, whatever their values."""
    exists_XK = torch.arange(logp_XK.shape[-1], device=logp_XK.device) < counts_X[:, None]
    term_XK = alpha_X[:, None] * logp_XK.double() - logq_XK.double()
    return torch.where(exists_XK, term_XK, 0.0).sum(-1)


def valid(size_G: Tensor, n: int) -> Tensor:
    """Return a mask [G, n] of the entries that are not padding."""
    return torch.arange(n, device=size_G.device) < size_G[:, None]


def grid(first_G: Tensor, size_G: Tensor) -> tuple[Tensor, Tensor]:
    """Return the batch indices of groups with these first indices and sizes [G, N], 0 in padding, and whether each
    entry exists [G, N]. N is the largest size, at least 1. Synchronises with the host."""
    n = max(1, int(size_G.max())) if len(size_G) else 1
    exists_GN = valid(size_G, n)
    index_GN = first_G.long()[:, None] + torch.arange(n, device=exists_GN.device)
    return torch.where(exists_GN, index_GN, 0), exists_GN


class Spans(NamedTuple):
    """The entries of each group in an array with the entries of all groups: integers [G]."""

    first_G: Tensor
    """First entry of the group."""
    size_G: Tensor
    """Number of its entries; 0 for a padding group."""


def used_grid(groups: Spans) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices of the non-empty groups [Z], and their `grid`. Synchronises with the host."""
    used_Z = (groups.size_G > 0).nonzero()[:, 0]
    return used_Z, *grid(*(bound[used_Z] for bound in groups))


def normalise(logw_GN: Tensor) -> tuple[Tensor, Tensor]:
    """Return the normalised weights [G, N] and the log of the sum of weights [G], in float64. If all weights of a group
    are zero: zeros and -inf."""
    logw_GN = logw_GN.double()
    return logw_GN.softmax(-1).nan_to_num(0.0), logw_GN.logsumexp(-1)


def effective_sample_size(weights_GN: Tensor) -> Tensor:
    """Return ESS = 1 / sum w^2 of normalised weights [G], between 1 and N; 0 for an all-zero group."""
    return weights_GN.square().sum(-1).reciprocal().nan_to_num(posinf=0.0)


def log_mean_weight(log_sum_G: Tensor, size_G: Tensor) -> Tensor:
    """Return logsumexp(log w) - log N [G]: the increment of the running log Z-hat at each resampling and at the end."""
    return log_sum_G - size_G.double().log()


class Bounds(NamedTuple):
    """The groups of a packed batch, one after another: int32 tensors [G] on the batch's device. Batch indices outside
    all groups are padding."""

    spans: Spans
    """The batch indices of each group; a padding group has none."""
    count_G: Tensor
    """Number of particles before selection, over which the mean weight is taken. At most the size."""
    next_count_G: Tensor
    """Number of particles after selection. At most the size."""

    def used(self) -> tuple[Tensor, Bounds]:
        """Return the indices of the non-empty groups [Z], and their bounds. Synchronises with the host."""
        index_Z = (self.spans.size_G > 0).nonzero()[:, 0]
        return index_Z, map_tensors(lambda bound_G: bound_G[index_Z], self)


def systematic(weights_GY: Tensor, draws_G: Tensor, most: int, uniforms_GU: Tensor) -> Tensor:
    """Count n evenly spaced points over the cumulative weights, shifted by one uniform."""
    grid_GN = torch.arange(most, device=weights_GY.device) + uniforms_GU[:, :1]
    return _count(weights_GY, grid_GN / draws_G[:, None], draws_G)


def stratified(weights_GY: Tensor, draws_G: Tensor, most: int, uniforms_GU: Tensor) -> Tensor:
    """Count n points, one drawn uniformly in each of n equal strata."""
    grid_GN = torch.arange(most, device=weights_GY.device) + uniforms_GU[:, :most]
    return _count(weights_GY, grid_GN / draws_G[:, None], draws_G)


def multinomial(weights_GY: Tensor, draws_G: Tensor, most: int, uniforms_GU: Tensor) -> Tensor:
    """Count n independent draws."""
    return _count(weights_GY, uniforms_GU[:, :most], draws_G)


def residual(weights_GY: Tensor, draws_G: Tensor, most: int, uniforms_GU: Tensor) -> Tensor:
    """Give floor(n w) certain copies; the rest are independent draws from the residual weights."""
    expected_GY = weights_GY * draws_G[:, None]
    sure_GY = expected_GY.floor()
    left_G = draws_G - sure_GY.sum(-1).long()
    rest_GY = expected_GY - sure_GY
    rest_GY = rest_GY / rest_GY.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return sure_GY.long() + multinomial(rest_GY, left_G, most, uniforms_GU)


def ssp(weights_GY: Tensor, draws_G: Tensor, _most: int, uniforms_GU: Tensor) -> Tensor:
    """Apply the Srinivasan sampling process: fractional parts are combined in pairs, and one of each pair becomes an
    integer. Inherently sequential."""
    expected = (weights_GY * draws_G[:, None]).tolist()
    uniforms = uniforms_GU.tolist()
    counts = [_ssp_one(row, int(n), u) for row, n, u in zip(expected, draws_G.tolist(), uniforms)]
    return torch.tensor(counts, dtype=torch.int64, device=weights_GY.device)


def _ssp_one(expected_Y: list[float], draws: int, uniforms_U: list[float]) -> list[int]:
    counts = [int(x) for x in expected_Y]
    open_index, open_part = 0, expected_Y[0] - counts[0]
    for m in range(1, len(expected_Y)):
        part, u = expected_Y[m] - counts[m], uniforms_U[m]
        total = open_part + part
        if total < 1:  # one takes the whole total and stays open; the other is rounded down
            new_is_open, open_part = u * total < part, total
        else:  # one is rounded up; the other keeps the remainder and stays open
            # At a total of exactly 1, both branches give the same result for the same u. Equal weights often add up to
            # 1, and rounding must not decide.
            new_is_open, open_part = u * (2 - total) >= 1 - open_part, total - 1
            counts[open_index if new_is_open else m] += 1
        if new_is_open:
            open_index = m
    # The parts add up to an integer, so only rounding decides whether the last open entry is already complete.
    counts[open_index] += draws - sum(counts)
    return counts


SCHEMES: dict[str, Scheme] = {
    "systematic": systematic,
    "stratified": stratified,
    "residual": residual,
    "multinomial": multinomial,
    "ssp": ssp,
}
assert tuple(SCHEMES) == SCHEME_NAMES


def offspring(scheme_G: Tensor, weights_GY: Tensor, draws_G: Tensor, most: int, uniforms_GU: Tensor) -> Tensor:
    """Return offspring counts [G, Y] by each group's scheme, an index into `SCHEME_NAMES`. Each group's weights must
    sum to one."""
    named = [SCHEME_NAMES[scheme] for scheme in scheme_G.tolist()]
    if len(set(named)) == 1:
        return SCHEMES[named[0]](weights_GY, draws_G, most, uniforms_GU)
    counts_GY = torch.zeros_like(weights_GY, dtype=torch.int64)
    for name in set(named):
        rows = torch.tensor([g for g, scheme in enumerate(named) if scheme == name], device=weights_GY.device)
        counts_GY[rows] = SCHEMES[name](weights_GY[rows], draws_G[rows], most, uniforms_GU[rows])
    return counts_GY


def assign_slots(counts_GNF: Tensor, size_G: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Assign every chosen candidate to a slot. Returns (ancestor [G, N], branch [G, N], whether the slot is filled
    [G, N]).

    A particle with a chosen candidate keeps its slot with the first of them; further copies fill, in order, the slots
    of particles without one. Padding and empty slots have themselves as ancestor and branch 0."""
    groups, n, branches = counts_GNF.shape
    own_GN = torch.arange(n, device=counts_GNF.device).expand(groups, n)
    free_GN = (counts_GNF.sum(-1) == 0) & valid(size_G, n)
    running_GY = counts_GNF.flatten(1).cumsum(-1)
    # The j-th copy belongs to the candidate at which the running count exceeds j.
    index_GN = torch.searchsorted(running_GY, own_GN.contiguous(), right=True)
    index_GN = index_GN.clamp(max=n * branches - 1)
    family_GN, chosen_GN = index_GN // branches, index_GN % branches
    drawn_GN = own_GN < running_GY[:, -1:]
    first_GN = drawn_GN.clone()
    first_GN[:, 1:] &= family_GN[:, 1:] != family_GN[:, :-1]
    further_GN = drawn_GN & ~first_GN
    # Both lists are in order, and there are enough free slots for the further copies. Unused entries go to an extra
    # column.
    free_rank_GN = free_GN.cumsum(-1) - 1
    slot_of_rank = _scatter(torch.where(free_GN, free_rank_GN, n), own_GN, n)
    rank_GN = (further_GN.cumsum(-1) - 1).clamp(min=0)
    target_GN = torch.where(first_GN, family_GN, torch.where(further_GN, slot_of_rank.gather(1, rank_GN), n))
    filled_GN = free_GN & (free_rank_GN < further_GN.sum(-1, keepdim=True))
    ancestor_GN = torch.where(filled_GN, _scatter(target_GN, family_GN, n), own_GN)
    return ancestor_GN, _scatter(target_GN, chosen_GN, n), filled_GN | (~free_GN & valid(size_G, n))


def _scatter(index_GN: Tensor, values_GN: Tensor, n: int) -> Tensor:
    """Scatter values to their indices [G, n]. Index n is dropped; entries without a value are 0."""
    out_GN = torch.zeros(len(index_GN), n + 1, dtype=values_GN.dtype, device=values_GN.device)
    return out_GN.scatter(1, index_GN, values_GN)[:, :n]


def _count(weights_GY: Tensor, points_GN: Tensor, draws_G: Tensor) -> Tensor:
    """Count, for each weight, the points that fall into its part of the unit interval, among each group's first `draws`
    points in [0, 1)."""
    cumulative_GY = weights_GY.cumsum(-1)
    # Points below 1, scaled by the total, stay below it: none falls past the last entry with weight.
    points_GN = points_GN.clamp(max=1 - 2.0**-52) * cumulative_GY[:, -1:]
    index_GN = torch.searchsorted(cumulative_GY, points_GN, right=True).clamp(max=weights_GY.shape[-1] - 1)
    drawn_GN = valid(draws_G, points_GN.shape[-1]).long()
    return torch.zeros_like(weights_GY, dtype=torch.int64).scatter_add_(1, index_GN, drawn_GN)
