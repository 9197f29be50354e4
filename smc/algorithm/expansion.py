"""Expansion of populations with distinct rows: chooses the continuations to keep, by probability or by sampling without
replacement.

Every row has candidate tokens, each with a mass. Exact decoding keeps the candidates of largest mass, which is their
log-probability under the draft (`smc.algorithm.coupling`), and always the most probable continuation of the first row.
SMC with distinct particles samples as many candidates as there may be rows, such that candidate j is chosen with
probability pi_j = min(1, c m_j), by one systematic draw over the candidates in the order of their rows. A chosen
candidate gets the mass m_j / pi_j, which keeps the expectation of the weighted sum of every function (Fearnhead and
Clifford, "On-line inference for hidden Markov models via particle filters", 2003). Knows nothing about models, requests
or pages.

Axes: R source rows, C candidates of a row, X rows kept, G groups, H non-empty groups, M candidates of a group, N rows
or batch indices of a group, A batch indices."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from smc.algorithm.resampling import Spans, assign_slots, effective_sample_size, grid, normalise
from smc.arrays import is_one_of, to_device, to_host
from smc.philox import Purpose, uniforms
from smc.types import EXACT, SEPARATE

CANDIDATES_PER_ROW = 32
"""Number of most likely tokens that become candidates of a row. One more token, drawn from the rest of the
distribution, represents that rest."""
LEAD = 1e300
"""Log mass, above every other, of the candidates that are always kept."""
LEAD_GAIN = 1e9
"""Gain of the nodes of the first row of every step of a draft tree, above the gains of every other path. So every tree
holds the row that a tree of a single row would have (`smc.executor.draft_tree`)."""
EXPANSION_POSITION = 2 << 20
"""Position of the first uniform for sampling without replacement; the index of the step is added."""


class CandidateTokens(NamedTuple):
    """Candidate tokens of each row."""

    token_RC: Tensor
    """Token ids, int64."""
    logq_RC: Tensor
    """float32 log-probability of the token under the distribution that it was taken from."""
    share_RC: Tensor
    """float32 log of the candidate's share of the row's mass: 0 for the whole mass, -inf for no candidate."""

    @staticmethod
    def whole(like_R: Tensor) -> CandidateTokens:
        """Return one candidate per row, which stands for the row itself."""
        zero_R1 = torch.zeros_like(like_R, dtype=torch.float32)[:, None]
        return CandidateTokens(zero_R1.long(), zero_R1, zero_R1)

    def mask_ended(self, ended_R: Tensor) -> CandidateTokens:
        """Return the candidates, but for each row that has ended only one, which stands for the row itself."""
        first_C = torch.arange(self.token_RC.shape[1], device=ended_R.device) == 0
        only_RC = torch.where(first_C, 0.0, -torch.inf)
        ended_R1 = ended_R[:, None]
        return CandidateTokens(
            self.token_RC, self.logq_RC.masked_fill(ended_R1, 0.0), torch.where(ended_R1, only_RC, self.share_RC)
        )


class Expansion(NamedTuple):
    """The rows that are kept, group after group, in the order of their source rows. A row that is not alive repeats the
    first row of its group."""

    parent_X: Tensor
    """int64 index of the source row; 0 in padding."""
    candidate_X: Tensor
    """int64 index of the source row's candidate."""
    mass_X: Tensor
    """float64 log mass; -inf if not alive."""
    alive_X: Tensor
    """bool: the row has mass."""
    ess_G: Tensor
    """float64 effective sample size of the kept rows."""
    collapsed_G: Tensor
    """bool: no candidate of a `DISTINCT` group had any mass, so all were given equal mass."""
    nan_G: Tensor
    """bool: a candidate of a `DISTINCT` group had mass NaN, which counts as no mass."""


def expand(
    candidates: CandidateTokens,
    mass_R: Tensor,
    there_R: Tensor,
    sources: Spans,
    rows: Spans,
    most_G: Tensor,
    decoding_G: Tensor,
    keys: tuple[Tensor, Tensor, int],
    total: int,
    least: float = 0.0,
    ended_R: Tensor | None = None,
    has_rest: bool = False,
) -> Expansion:
    """Choose the candidates that each group keeps; groups whose rows are separate keep none here.

    `mass_R`: float64 log mass of the source rows; `there_R`: whether the source row exists. `sources`, `rows`: every
    group's source rows and kept rows, with `total` kept rows; a padding group has size 0.
    `most_G`: maximum number of rows kept. `keys`: seed [G], round [G] and the number of this step. `least`: see
    `inclusion`. Source rows that have `ended` have one candidate, which stands for the row itself. `has_rest`: the last
    candidate of a row represents the rest of its distribution, which exact decoding ignores. Synchronises with the
    host."""
    candidates = candidates if ended_R is None else candidates.mask_ended(ended_R)
    is_rest_C = (
        torch.arange(candidates.share_RC.shape[1], device=mass_R.device) >= candidates.share_RC.shape[1] - has_rest
    )
    used_H = ((sources.size_G > 0) & ~is_one_of(decoding_G, SEPARATE)).nonzero()[:, 0]
    device = mass_R.device
    parent_X = torch.zeros(total, dtype=torch.int64, device=device)
    candidate_X, mass_X = (
        torch.zeros_like(parent_X),
        torch.full((total,), -torch.inf, dtype=torch.float64, device=device),
    )
    ess_G = torch.zeros(len(decoding_G), dtype=torch.float64, device=device)
    collapsed_G = ess_G > 0
    if not len(used_H):
        return Expansion(parent_X, candidate_X, mass_X, parent_X > 0, ess_G, collapsed_G, collapsed_G)
    source_HS, is_source_HS = grid(*(bound[used_H] for bound in sources))
    width = candidates.share_RC.shape[1]
    is_there_HS1 = (is_source_HS & there_R[source_HS])[..., None]
    share_HSC = candidates.share_RC[source_HS].double().masked_fill(~is_there_HS1, -torch.inf)
    is_best_H = is_one_of(decoding_G[used_H], EXACT)
    share_HSC = share_HSC.masked_fill(is_best_H[:, None, None] & is_rest_C, -torch.inf)
    nan_G = torch.zeros_like(collapsed_G)
    nan_G[used_H] = ~is_best_H & torch.isnan(share_HSC).flatten(1).any(-1)
    mass_HM = (
        (mass_R[source_HS][..., None] + share_HSC)
        .nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        .flatten(1)
    )
    collapsed_H = ~is_best_H & (mass_HM == -torch.inf).all(-1)
    share_HM = share_HSC.nan_to_num(nan=-torch.inf, neginf=-torch.inf).flatten(1)
    mass_HM = torch.where(collapsed_H[:, None] & (share_HM > -torch.inf), 0.0, mass_HM)
    position = np.array([EXPANSION_POSITION + keys[2]])
    uniform_H1 = to_device(
        uniforms(to_host(keys[0][used_H]), to_host(keys[1][used_H]), position, Purpose.SELECTION), device
    )
    log_pi_HM = inclusion(_lead_first(mass_HM, is_best_H), most_G[used_H], is_best_H, least)
    taken_HM = _take(log_pi_HM, most_G[used_H], uniform_H1)
    index_HX, exists_HX = grid(*(bound[used_H] for bound in rows))
    # The j-th chosen candidate becomes the j-th row of its group.
    rank_HX = torch.arange(index_HX.shape[1], device=device).expand_as(index_HX).contiguous()
    chosen_HX = torch.searchsorted(taken_HM.long().cumsum(-1), rank_HX + 1)
    alive_HX = exists_HX & (rank_HX < taken_HM.sum(-1, keepdim=True))
    chosen_HX = torch.where(alive_HX, chosen_HX, chosen_HX[:, :1]).clamp(max=taken_HM.shape[1] - 1)
    chosen_mass_HX = (mass_HM - log_pi_HM).gather(1, chosen_HX)
    to_X, there_HX = index_HX[exists_HX], exists_HX
    parent_X[to_X] = source_HS.gather(1, chosen_HX // width)[there_HX]
    candidate_X[to_X] = (chosen_HX % width)[there_HX]
    chosen_mass_HX = chosen_mass_HX.masked_fill(~alive_HX, -torch.inf)
    mass_X[to_X] = chosen_mass_HX[there_HX]
    ess_G[used_H] = effective_sample_size(normalise(chosen_mass_HX)[0])
    collapsed_G[used_H] = collapsed_H
    return Expansion(parent_X, candidate_X, mass_X, mass_X > -torch.inf, ess_G, collapsed_G, nan_G)


def _lead_first(mass_HM: Tensor, best_H: Tensor) -> Tensor:
    """Return the masses by which candidates are ranked. With `best`, the first candidate that has mass is always kept:
    it is the most probable continuation of the first row, which in turn is the first candidate of the step before. So
    the draft chain that a tree of a single row would be is part of every tree, whatever the number of rows."""
    has_mass_HM = mass_HM > -torch.inf
    lead_H1 = has_mass_HM.long().argmax(-1, keepdim=True)
    is_lead_HM = torch.zeros_like(has_mass_HM).scatter(1, lead_H1, best_H[:, None]) & has_mass_HM
    return mass_HM.masked_fill(is_lead_HM, LEAD)


def inclusion(mass_HM: Tensor, most_H: Tensor, best_H: Tensor, least: float = 0.0) -> Tensor:
    """Return log pi [H, M] for candidates with these log masses: pi = min(1, c m) with sum `most`, or 1 for all if
    there are at most `most` candidates.

    `least` limits pi to m / (least * mean), where the mean is the total mass over `most`, so candidates of very small
    mass are chosen less often and fewer than `most` may be chosen. With `best`: 1 for the `most` candidates of largest
    mass, the first among equals, and 0 for the others."""
    sorted_HM, order_HM = mass_HM.sort(dim=-1, descending=True, stable=True)
    rank_M = torch.arange(mass_HM.shape[1], device=mass_HM.device)
    heaviest_HM = (rank_M < most_H[:, None]) & (sorted_HM > -torch.inf)
    best_HM = torch.where(heaviest_HM, 0.0, -torch.inf).double()
    # c is found from the largest masses: the first k candidates are certain as soon as the next one's share of the
    # remaining mass is at most 1 / (most - k).
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
    """Choose candidates by a systematic draw; returns bool [H, M]. Each candidate has an interval of length pi on the
    line from 0 to the sum of pi, and is chosen if the interval contains one of the points u, u + 1, ..."""
    reach_HM = log_pi_HM.exp().cumsum(-1) - uniform_H1
    passed_HM = torch.cat((torch.floor(-uniform_H1), torch.floor(reach_HM)), 1)
    taken_HM = (passed_HM.diff(dim=1) > 0) | (log_pi_HM == 0)
    # Rounding of the sum must not choose one candidate too many.
    return taken_HM & (taken_HM.long().cumsum(-1) <= most_H[:, None])


class SelectedTrees(NamedTuple):
    """The choice for distinct populations and for groups that are decoded exactly."""

    chosen: Expansion
    selected_A: Tensor
    """int64 index of the chosen row that continues at each batch index."""
    alive_A: Tensor
    """bool: a row continues at the batch index."""


def keep_roots(
    root_R: Tensor,
    parent_X: Tensor,
    alive_X: Tensor,
    rows: Spans,
    indices: Spans,
    total: int,
) -> tuple[Tensor, Tensor]:
    """Assign kept rows to batch indices such that no index is both copied from and overwritten. Returns the row at
    every batch index [A], and whether there is one [A].

    `root_R`: batch index whose history a source row continues; `parent_X`: source of each row; `rows`, `indices`: every
    group's rows and batch indices; `total`: number of batch indices. The first row that
    continues an index stays at it; further rows take, in order, the indices that no row continues. There are at most as
    many alive rows as indices. An index without a row repeats the first index of its group that has one, or, if there
    is none, the group's first row. Synchronises with the host."""
    used_H = ((rows.size_G > 0) & (indices.size_G > 0)).nonzero()[:, 0]
    row_A = torch.zeros(total, dtype=torch.int64, device=parent_X.device)
    alive_A = row_A > 0
    if not len(used_H):
        return row_A, alive_A
    row_HX, is_row_HX = grid(*(bound[used_H] for bound in rows))
    index_HN, exists_HN = grid(*(bound[used_H] for bound in indices))
    own_HX = root_R[parent_X][row_HX] - indices.first_G[used_H].long()[:, None]
    there_HX = is_row_HX & alive_X[row_HX]
    n = index_HN.shape[1]
    counts_HNX = (own_HX[:, None, :] == torch.arange(n, device=own_HX.device)[:, None]) & there_HX[:, None, :]
    _, branch_HN, filled_HN = assign_slots(counts_HNX.long(), indices.size_G[used_H])
    filled_HN = filled_HN & exists_HN
    taken_HN = row_HX.gather(1, branch_HN)
    lead_H1 = filled_HN.long().argmax(-1, keepdim=True)
    taken_HN = torch.where(filled_HN, taken_HN, taken_HN.gather(1, lead_H1))
    to_X = index_HN[exists_HN]
    row_A[to_X] = taken_HN[exists_HN]
    alive_A[to_X] = filled_HN[exists_HN]
    return row_A, alive_A
