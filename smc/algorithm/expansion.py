"""Which continuations of a population's rows go on, where rows are never the same: the likeliest, or a draw without
replacement.

Every row offers tokens, each with a mass: what it stands for. `best` takes the offers of most mass (exact decoding,
whose masses are log-likelihoods of the draft). `distinct` draws R of them so that offer j is among them with
probability pi_j = min(1, c m_j), by one systematic draw over the offers in the order of their rows, and an offer that
is taken has mass m_j / pi_j from then on, so that every function's weighted sum keeps its expectation (Fearnhead and
Clifford, "On-line inference for hidden Markov models via particle filters", 2003). Knows nothing about models, requests
or pages.

Axes: R source rows, C offers of a row, X rows that go on; H groups, M offers of a group, N places of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from smc.algorithm.resampling import place
from smc.algorithm.weights import effective_sample_size, normalise
from smc.arrays import to_device, to_host
from smc.philox import Purpose, uniforms

OFFERS = 32
"""Likeliest tokens that a row offers one by one; a token drawn from the rest of its law stands for that rest."""
EXPANSION_POSITION = 2 << 20
"""Uniforms of draws without replacement are numbered from here, by the step of the round."""


class Kind(IntEnum):
    """How a group's rows are continued. Data of a round, one for each group. From `BEST` on they are decoded
    exactly."""

    INDEPENDENT = 0
    """Each row draws its own token; the population is resampled: `smc.algorithm.selection`."""
    DISTINCT = 1
    BEST = 2
    CHAINS = 3
    """Each row draws its own tokens from one root, and the target keeps or replaces them: `smc.algorithm.rejection`."""


@dataclass(frozen=True)
class Offers:
    """What rows offer, one after another."""

    token_RC: Tensor
    """int64."""
    logq_RC: Tensor
    """float32 log-probability of the token under the law that it comes from."""
    share_RC: Tensor
    """float32 log of the share of the row's mass that the offer stands for: -inf where there is none, and for all of it
    0."""

    @staticmethod
    def whole(like_R: Tensor) -> Offers:
        """One offer a row, which is the row itself."""
        none_R1 = torch.zeros_like(like_R, dtype=torch.float32)[:, None]
        return Offers(none_R1.long(), none_R1, none_R1)

    def unless(self, ended_R: Tensor) -> Offers:
        """Rows that have ended offer themselves."""
        first_C = torch.arange(self.token_RC.shape[1], device=ended_R.device) == 0
        alone_RC = torch.where(first_C, 0.0, -torch.inf)
        ended_R1 = ended_R[:, None]
        return Offers(
            self.token_RC, self.logq_RC.masked_fill(ended_R1, 0.0), torch.where(ended_R1, alone_RC, self.share_RC)
        )


@dataclass(frozen=True)
class Expansion:
    """The rows that go on, X, group after group, each group's in the order of the rows they come from. A row that is
    not alive repeats the first of its group."""

    parent_X: Tensor
    """int64 index of the source row; 0 in padding."""
    offer_X: Tensor
    """int64: which of its offers."""
    mass_X: Tensor
    """float64 log mass; -inf where not alive."""
    alive_X: Tensor
    ess_G: Tensor
    """float64 effective sample size of the rows that go on."""
    collapsed_G: Tensor
    """bool: no offer of a `DISTINCT` group had any mass; all were given the same."""
    nan_G: Tensor
    """bool: a `DISTINCT` group was offered NaN, which counts as nothing."""


def expand(
    offers: Offers,
    mass_R: Tensor,
    there_R: Tensor,
    sources: tuple[Tensor, Tensor],
    rows: tuple[Tensor, Tensor],
    most_G: Tensor,
    kind_G: Tensor,
    keys: tuple[Tensor, Tensor, int],
    total: int,
    least: float = 0.0,
    ended_R: Tensor | None = None,
    has_rest: bool = False,
) -> Expansion:
    """Continue groups by their masses: those that are decoded exactly as `BEST`; of `INDEPENDENT` ones, rows go on as
    if nothing did.

    `mass_R`: float64 log mass of the source rows; `there_R`: whether there is one. `sources`, `rows`: first and size
    [G] of every group's source rows, and of the places for those that go on, `total` in all; a padding group has size
    0. `most_G`: how many may go on. `keys`: seed [G], round [G] and the number of this step. Source rows that have
    `ended` offer themselves: all they have, as their first offer. `has_rest`: the last offer of a row stands for the
    rest of its law, which is not among the best. Reads the host."""
    offers = offers if ended_R is None else offers.unless(ended_R)
    is_rest_C = torch.arange(offers.share_RC.shape[1], device=mass_R.device) >= offers.share_RC.shape[1] - has_rest
    used_H = ((sources[1] > 0) & (kind_G != Kind.INDEPENDENT)).nonzero()[:, 0]
    device = mass_R.device
    parent_X = torch.zeros(total, dtype=torch.int64, device=device)
    offer_X, mass_X = torch.zeros_like(parent_X), torch.full((total,), -torch.inf, dtype=torch.float64, device=device)
    ess_G = torch.zeros(len(kind_G), dtype=torch.float64, device=device)
    collapsed_G = ess_G > 0
    if not len(used_H):
        return Expansion(parent_X, offer_X, mass_X, parent_X > 0, ess_G, collapsed_G, collapsed_G)
    source_HS, is_source_HS = grid(*(bound[used_H] for bound in sources))
    width = offers.share_RC.shape[1]
    is_there_HS1 = (is_source_HS & there_R[source_HS])[..., None]
    share_HSC = offers.share_RC[source_HS].double().masked_fill(~is_there_HS1, -torch.inf)
    is_best_H = kind_G[used_H] >= Kind.BEST
    share_HSC = share_HSC.masked_fill(is_best_H[:, None, None] & is_rest_C, -torch.inf)
    nan_G = torch.zeros_like(collapsed_G)
    nan_G[used_H] = ~is_best_H & torch.isnan(share_HSC).flatten(1).any(-1)
    offered_HM = (
        (mass_R[source_HS][..., None] + share_HSC)
        .nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        .flatten(1)
    )
    collapsed_H = ~is_best_H & (offered_HM == -torch.inf).all(-1)
    share_HM = share_HSC.nan_to_num(nan=-torch.inf, neginf=-torch.inf).flatten(1)
    offered_HM = torch.where(collapsed_H[:, None] & (share_HM > -torch.inf), 0.0, offered_HM)
    position = np.array([EXPANSION_POSITION + keys[2]])
    uniform_H1 = to_device(
        uniforms(to_host(keys[0][used_H]), to_host(keys[1][used_H]), position, Purpose.SELECTION), device
    )
    log_pi_HM = inclusion(offered_HM, most_G[used_H], is_best_H, least)
    taken_HM = _take(log_pi_HM, most_G[used_H], uniform_H1)
    place_HX, is_place_HX = grid(*(bound[used_H] for bound in rows))
    # The j-th offer that is taken goes to the j-th place.
    rank_HX = torch.arange(place_HX.shape[1], device=device).expand_as(place_HX).contiguous()
    chosen_HX = torch.searchsorted(taken_HM.long().cumsum(-1), rank_HX + 1)
    alive_HX = is_place_HX & (rank_HX < taken_HM.sum(-1, keepdim=True))
    chosen_HX = torch.where(alive_HX, chosen_HX, chosen_HX[:, :1]).clamp(max=taken_HM.shape[1] - 1)
    massed_HX = (offered_HM - log_pi_HM).gather(1, chosen_HX)
    to_X, there_HX = place_HX[is_place_HX], is_place_HX
    parent_X[to_X] = source_HS.gather(1, chosen_HX // width)[there_HX]
    offer_X[to_X] = (chosen_HX % width)[there_HX]
    massed_HX = massed_HX.masked_fill(~alive_HX, -torch.inf)
    mass_X[to_X] = massed_HX[there_HX]
    ess_G[used_H] = effective_sample_size(normalise(massed_HX)[0])
    collapsed_G[used_H] = collapsed_H
    return Expansion(parent_X, offer_X, mass_X, mass_X > -torch.inf, ess_G, collapsed_G, nan_G)


def inclusion(mass_HM: Tensor, most_H: Tensor, best_H: Tensor, least: float = 0.0) -> Tensor:
    """log pi [H, M] of offers with these log masses: min(1, c m), sum pi = `most`, or 1 for all if there are no more
    than that.

    Offers of less than `least` times the mean share of `most` are taken less often than there is room for: min(1, m /
    that). Where `best`: 1 for the `most` of most mass, the first of equals, and 0 for others."""
    sorted_HM, order_HM = mass_HM.sort(dim=-1, descending=True, stable=True)
    rank_M = torch.arange(mass_HM.shape[1], device=mass_HM.device)
    heaviest_HM = (rank_M < most_H[:, None]) & (sorted_HM > -torch.inf)
    best_HM = torch.where(heaviest_HM, 0.0, -torch.inf).double()
    # c is found from the heavy end: k offers are sure as soon as the next one's share of what is left is below 1 / (R -
    # k).
    relative_HM = (sorted_HM - sorted_HM[:, :1]).nan_to_num(nan=-torch.inf).exp()
    tail_HM = relative_HM.flip(-1).cumsum(-1).flip(-1)
    left_HM = (most_H[:, None] - rank_M).clamp(min=0).double()
    is_next_HM = (relative_HM * left_HM <= tail_HM) | (rank_M >= most_H[:, None])
    sure_H1 = is_next_HM.long().argmax(-1, keepdim=True)
    scale_H1 = (left_HM / tail_HM).gather(1, sure_H1)
    share_HM = torch.where(rank_M < sure_H1, 1.0, (relative_HM * scale_H1).nan_to_num(0.0).clamp(max=1.0))
    few_H1 = ((sorted_HM > -torch.inf).sum(-1) <= most_H)[:, None]
    drawn_HM = torch.where(few_H1, torch.where(sorted_HM > -torch.inf, 1.0, 0.0), share_HM)
    if least:
        drawn_HM = torch.minimum(drawn_HM, relative_HM * most_H[:, None] / (least * relative_HM.sum(-1, keepdim=True)))
    drawn_HM = drawn_HM.log()
    sorted_pi_HM = torch.where(best_H[:, None], best_HM, drawn_HM)
    return torch.empty_like(sorted_pi_HM).scatter_(1, order_HM, sorted_pi_HM)


def _take(log_pi_HM: Tensor, most_H: Tensor, uniform_H1: Tensor) -> Tensor:
    """Which offers go on [H, M]: those in whose part of the line from 0 to the sum of pi there is one of the points u,
    u + 1, ..."""
    reach_HM = log_pi_HM.exp().cumsum(-1) - uniform_H1
    passed_HM = torch.cat((torch.floor(-uniform_H1), torch.floor(reach_HM)), 1)
    taken_HM = (passed_HM.diff(dim=1) > 0) | (log_pi_HM == 0)
    # Rounding of the sum must not take one too many.
    return taken_HM & (taken_HM.long().cumsum(-1) <= most_H[:, None])


def keep_roots(
    root_R: Tensor,
    parent_X: Tensor,
    alive_X: Tensor,
    rows: tuple[Tensor, Tensor],
    places: tuple[Tensor, Tensor],
    total: int,
) -> tuple[Tensor, Tensor]:
    """Row that goes on at every place [A], such that no place that is read has to be written; and whether there is one
    [A].

    `root_R`: the place whose past a source row continues; `parent_X`: the source of each row. A place that any row
    continues takes the first of these; further rows take, in order, the places that none continues. There are no more
    rows alive than places. A place without a row repeats its group's first place that has one, or where there is none
    at all the group's first row. `total` places. Reads the host."""
    used_H = ((rows[1] > 0) & (places[1] > 0)).nonzero()[:, 0]
    row_A = torch.zeros(total, dtype=torch.int64, device=parent_X.device)
    alive_A = row_A > 0
    if not len(used_H):
        return row_A, alive_A
    row_HX, is_row_HX = grid(*(bound[used_H] for bound in rows))
    place_HN, is_place_HN = grid(*(bound[used_H] for bound in places))
    own_HX = root_R[parent_X][row_HX] - places[0][used_H].long()[:, None]
    there_HX = is_row_HX & alive_X[row_HX]
    n = place_HN.shape[1]
    counts_HNX = (own_HX[:, None, :] == torch.arange(n, device=own_HX.device)[:, None]) & there_HX[:, None, :]
    _, branch_HN, filled_HN = place(counts_HNX.long(), places[1][used_H])
    filled_HN = filled_HN & is_place_HN
    taken_HN = row_HX.gather(1, branch_HN)
    lead_H1 = filled_HN.long().argmax(-1, keepdim=True)
    taken_HN = torch.where(filled_HN, taken_HN, taken_HN.gather(1, lead_H1))
    to_X = place_HN[is_place_HN]
    row_A[to_X] = taken_HN[is_place_HN]
    alive_A[to_X] = filled_HN[is_place_HN]
    return row_A, alive_A


def grid(first_H: Tensor, size_H: Tensor) -> tuple[Tensor, Tensor]:
    """Index of every group's rows, and whether they exist, [H, N]. Reads the host."""
    n = max(1, int(size_H.max()))
    index_N = torch.arange(n, device=first_H.device)
    exists_HN = index_N < size_H[:, None]
    return torch.where(exists_HN, first_H.long()[:, None] + index_N, 0), exists_HN
