"""Expansion of populations with distinct rows: chooses the continuations to keep, by probability or by sampling without
replacement.

Every row has candidate tokens, each with a mass. Exact decoding keeps the candidates of largest mass, here the
log-probability that they win the target's draws by the draft's estimate (`smc.algorithm.coupling`), and always the most
probable continuation of the first row. SMC with distinct particles samples as many candidates as there may be rows,
such that candidate j is chosen with probability pi_j = min(1, c m_j), by one systematic draw over the candidates in the
order of their rows. A chosen candidate gets the mass m_j / pi_j, which keeps the expectation of the weighted sum of
every function (Fearnhead and Clifford, "On-line inference for hidden Markov models via particle filters", 2003). Knows
nothing about models, requests or pages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from smc.algorithm.resampling import Spans, assign_slots, effective_sample_size, grid, normalise
from smc.arrays import is_one_of, to_device, to_host
from smc.philox import Purpose, RoundKeys, uniforms
from smc.types import EXACT, SEPARATE

CANDIDATES_PER_ROW = 32
"""Number of most likely tokens that become candidates of a row. One more token, drawn from the rest of the
distribution, represents that rest."""
LEAD = 1e300
"""Log mass, above every other, of the candidates that are always kept."""
LEAD_GAIN = 1e9
"""Gain of the nodes of the first row of every step of a draft tree, above the gains of every other path. So every tree
holds the row that a tree of a single row would have (`smc.executor.draft`)."""
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


class SourceRows(NamedTuple):
    """Rows with the candidates for their next token, group after group."""

    candidates: CandidateTokens
    mass_R: Tensor
    """float64 log mass."""
    there_R: Tensor
    """bool: the row exists."""
    groups: Spans
    """The rows of each group; a padding group has size 0."""
    ended_R: Tensor | None = None
    """bool: the row has one candidate, which stands for the row itself. None: no row has ended."""


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
    source: SourceRows,
    rows: Spans,
    most_G: Tensor,
    decoding_G: Tensor,
    keys_G: RoundKeys,
    step: int,
    total: int,
    least: float = 0.0,
    has_rest: bool = False,
) -> Expansion:
    """Choose the candidates that each group keeps; groups whose rows are separate keep none here.

    `rows`: every group's kept rows, `total` in all. `most_G`: maximum number of rows kept. `step`: number of this step,
    part of the keys of random numbers. `least`: see `inclusion`. `has_rest`: the last candidate of a row represents the
    rest of its distribution, which exact decoding ignores. Synchronises with the host."""
    candidates, mass_R, there_R, sources, ended_R = source
    candidates = candidates if ended_R is None else candidates.mask_ended(ended_R)
    is_rest_C = (
        torch.arange(candidates.share_RC.shape[1], device=mass_R.device) >= candidates.share_RC.shape[1] - has_rest
    )
    used_Z = ((sources.size_G > 0) & ~is_one_of(decoding_G, SEPARATE)).nonzero()[:, 0]
    device = mass_R.device
    parent_X = torch.zeros(total, dtype=torch.int64, device=device)
    candidate_X, mass_X = (
        torch.zeros_like(parent_X),
        torch.full((total,), -torch.inf, dtype=torch.float64, device=device),
    )
    ess_G = torch.zeros(len(decoding_G), dtype=torch.float64, device=device)
    collapsed_G = ess_G > 0
    if not len(used_Z):
        return Expansion(parent_X, candidate_X, mass_X, parent_X > 0, ess_G, collapsed_G, collapsed_G)
    source_ZR, is_source_ZR = grid(*(bound[used_Z] for bound in sources))
    width = candidates.share_RC.shape[1]
    is_there_ZR1 = (is_source_ZR & there_R[source_ZR])[..., None]
    share_ZRC = candidates.share_RC[source_ZR].double().masked_fill(~is_there_ZR1, -torch.inf)
    is_best_Z = is_one_of(decoding_G[used_Z], EXACT)
    share_ZRC = share_ZRC.masked_fill(is_best_Z[:, None, None] & is_rest_C, -torch.inf)
    nan_G = torch.zeros_like(collapsed_G)
    nan_G[used_Z] = ~is_best_Z & torch.isnan(share_ZRC).flatten(1).any(-1)
    mass_ZY = (
        (mass_R[source_ZR][..., None] + share_ZRC)
        .nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        .flatten(1)
    )
    collapsed_Z = ~is_best_Z & (mass_ZY == -torch.inf).all(-1)
    share_ZY = share_ZRC.nan_to_num(nan=-torch.inf, neginf=-torch.inf).flatten(1)
    mass_ZY = torch.where(collapsed_Z[:, None] & (share_ZY > -torch.inf), 0.0, mass_ZY)
    position = np.array([EXPANSION_POSITION + step])
    uniform_Z1 = to_device(
        uniforms(to_host(keys_G.seed[used_Z]), to_host(keys_G.round[used_Z]), position, Purpose.SELECTION), device
    )
    log_pi_ZY = inclusion(_lead_first(mass_ZY, is_best_Z), most_G[used_Z], is_best_Z, least)
    taken_ZY = _take(log_pi_ZY, most_G[used_Z], uniform_Z1)
    index_ZX, exists_ZX = grid(*(bound[used_Z] for bound in rows))
    # The j-th chosen candidate becomes the j-th row of its group.
    rank_ZX = torch.arange(index_ZX.shape[1], device=device).expand_as(index_ZX).contiguous()
    chosen_ZX = torch.searchsorted(taken_ZY.long().cumsum(-1), rank_ZX + 1)
    alive_ZX = exists_ZX & (rank_ZX < taken_ZY.sum(-1, keepdim=True))
    chosen_ZX = torch.where(alive_ZX, chosen_ZX, chosen_ZX[:, :1]).clamp(max=taken_ZY.shape[1] - 1)
    chosen_mass_ZX = (mass_ZY - log_pi_ZY).gather(1, chosen_ZX)
    to_X, there_ZX = index_ZX[exists_ZX], exists_ZX
    parent_X[to_X] = source_ZR.gather(1, chosen_ZX // width)[there_ZX]
    candidate_X[to_X] = (chosen_ZX % width)[there_ZX]
    chosen_mass_ZX = chosen_mass_ZX.masked_fill(~alive_ZX, -torch.inf)
    mass_X[to_X] = chosen_mass_ZX[there_ZX]
    ess_G[used_Z] = effective_sample_size(normalise(chosen_mass_ZX)[0])
    collapsed_G[used_Z] = collapsed_Z
    return Expansion(parent_X, candidate_X, mass_X, mass_X > -torch.inf, ess_G, collapsed_G, nan_G)


def _lead_first(mass_ZY: Tensor, best_Z: Tensor) -> Tensor:
    """Return the masses by which candidates are ranked. With `best`, the first candidate that has mass is always kept:
    it is the most probable continuation of the first row, which in turn is the first candidate of the step before. So
    the draft chain that a tree of a single row would be is part of every tree, whatever the number of rows."""
    has_mass_ZY = mass_ZY > -torch.inf
    lead_Z1 = has_mass_ZY.long().argmax(-1, keepdim=True)
    is_lead_ZY = torch.zeros_like(has_mass_ZY).scatter(1, lead_Z1, best_Z[:, None]) & has_mass_ZY
    return mass_ZY.masked_fill(is_lead_ZY, LEAD)


def inclusion(mass_ZY: Tensor, most_Z: Tensor, best_Z: Tensor, least: float = 0.0) -> Tensor:
    """Return log pi [Z, Y] for candidates with these log masses: pi = min(1, c m) with sum `most`, or 1 for all if
    there are at most `most` candidates.

    `least` limits pi to m / (least * mean), where the mean is the total mass over `most`, so candidates of very small
    mass are chosen less often and fewer than `most` may be chosen. With `best`: 1 for the `most` candidates of largest
    mass, the first among equals, and 0 for the others."""
    sorted_ZY, order_ZY = mass_ZY.sort(dim=-1, descending=True, stable=True)
    rank_Y = torch.arange(mass_ZY.shape[1], device=mass_ZY.device)
    heaviest_ZY = (rank_Y < most_Z[:, None]) & (sorted_ZY > -torch.inf)
    best_ZY = torch.where(heaviest_ZY, 0.0, -torch.inf).double()
    # c is found from the largest masses: the first k candidates are certain as soon as the next one's share of the
    # remaining mass is at most 1 / (most - k).
    relative_ZY = (sorted_ZY - sorted_ZY[:, :1]).nan_to_num(nan=-torch.inf).exp()
    tail_ZY = relative_ZY.flip(-1).cumsum(-1).flip(-1)
    left_ZY = (most_Z[:, None] - rank_Y).clamp(min=0).double()
    is_next_ZY = (relative_ZY * left_ZY <= tail_ZY) | (rank_Y >= most_Z[:, None])
    sure_Z1 = is_next_ZY.long().argmax(-1, keepdim=True)
    scale_Z1 = (left_ZY / tail_ZY).gather(1, sure_Z1)
    share_ZY = torch.where(rank_Y < sure_Z1, 1.0, (relative_ZY * scale_Z1).nan_to_num(0.0).clamp(max=1.0))
    few_Z1 = ((sorted_ZY > -torch.inf).sum(-1) <= most_Z)[:, None]
    drawn_ZY = torch.where(few_Z1, torch.where(sorted_ZY > -torch.inf, 1.0, 0.0), share_ZY)
    if least:
        drawn_ZY = torch.minimum(drawn_ZY, relative_ZY * most_Z[:, None] / (least * relative_ZY.sum(-1, keepdim=True)))
    drawn_ZY = drawn_ZY.log()
    sorted_pi_ZY = torch.where(best_Z[:, None], best_ZY, drawn_ZY)
    return torch.empty_like(sorted_pi_ZY).scatter_(1, order_ZY, sorted_pi_ZY)


def _take(log_pi_ZY: Tensor, most_Z: Tensor, uniform_Z1: Tensor) -> Tensor:
    """Choose candidates by a systematic draw; returns bool [Z, Y]. Each candidate has an interval of length pi on the
    line from 0 to the sum of pi, and is chosen if the interval contains one of the points u, u + 1, ..."""
    reach_ZY = log_pi_ZY.exp().cumsum(-1) - uniform_Z1
    passed_ZY = torch.cat((torch.floor(-uniform_Z1), torch.floor(reach_ZY)), 1)
    taken_ZY = (passed_ZY.diff(dim=1) > 0) | (log_pi_ZY == 0)
    # Rounding of the sum must not choose one candidate too many.
    return taken_ZY & (taken_ZY.long().cumsum(-1) <= most_Z[:, None])


class SelectedTrees(NamedTuple):
    """The selection for distinct populations and for groups that are decoded exactly."""

    chosen: Expansion
    selected_A: Tensor
    """int64 index of the chosen row that continues at each batch index."""
    alive_A: Tensor
    """bool: a row continues at the batch index."""


def assign_rows(
    root_R: Tensor,
    parent_X: Tensor,
    alive_X: Tensor,
    rows: Spans,
    indices: Spans,
    total: int,
) -> tuple[Tensor, Tensor]:
    """Assign selected rows to batch indices such that no index is both copied from and overwritten. Returns the row at
    every batch index [A], and whether there is one [A].

    `root_R`: batch index whose history a source row continues; `parent_X`: source of each row; `rows`, `indices`: every
    group's rows and batch indices; `total`: number of batch indices. The first row that
    continues an index stays at it; further rows take, in order, the indices that no row continues. There are at most as
    many alive rows as indices. An index without a row repeats the first index of its group that has one, or, if there
    is none, the group's first row. Synchronises with the host."""
    used_Z = ((rows.size_G > 0) & (indices.size_G > 0)).nonzero()[:, 0]
    row_A = torch.zeros(total, dtype=torch.int64, device=parent_X.device)
    alive_A = row_A > 0
    if not len(used_Z):
        return row_A, alive_A
    row_ZX, is_row_ZX = grid(*(bound[used_Z] for bound in rows))
    index_ZN, exists_ZN = grid(*(bound[used_Z] for bound in indices))
    own_ZX = root_R[parent_X][row_ZX] - indices.first_G[used_Z].long()[:, None]
    there_ZX = is_row_ZX & alive_X[row_ZX]
    n = index_ZN.shape[1]
    counts_ZNX = (own_ZX[:, None, :] == torch.arange(n, device=own_ZX.device)[:, None]) & there_ZX[:, None, :]
    _, branch_ZN, filled_ZN = assign_slots(counts_ZNX.long(), indices.size_G[used_Z])
    filled_ZN = filled_ZN & exists_ZN
    taken_ZN = row_ZX.gather(1, branch_ZN)
    lead_Z1 = filled_ZN.long().argmax(-1, keepdim=True)
    taken_ZN = torch.where(filled_ZN, taken_ZN, taken_ZN.gather(1, lead_Z1))
    to_X = index_ZN[exists_ZN]
    row_A[to_X] = taken_ZN[exists_ZN]
    alive_A[to_X] = filled_ZN[exists_ZN]
    return row_A, alive_A
