"""A round's choice of candidates on the device: `smc.algorithm.selection.select`, one program a group.

Everything is float64, as there, and equal to it up to rounding. The chosen candidates of a group are sorted, so slots
are dealt by binary searches in that list. A candidate without weight is never chosen. Schemes are data: one launch does
them all. Nothing reads the host, and the grid follows from shapes alone. It can be captured in a CUDA graph.

Axes: A places of a batch, G groups, N particles, F branches a particle, M = N * F candidates, P draws of a group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smc.algorithm.bounds import Bounds
from smc.algorithm.selection import BRANCH_POSITION, EQUAL, Selection
from smc.api.limits import MAX_PARTICLES, SCHEME_NAMES
from smc.kernels.program_ids import own_places, programs
from smc.kernels.variants import one_variant
from smc.philox import Purpose

SYSTEMATIC, STRATIFIED, RESIDUAL, _, SSP = (tl.constexpr(index) for index in range(len(SCHEME_NAMES)))
PURPOSE = tl.constexpr(int(Purpose.SELECTION))
FIRST_BRANCH = tl.constexpr(BRANCH_POSITION)
KEEP = tl.constexpr(1 - EQUAL)


def select(
    candidates_AF: Tensor,
    alive_A: Tensor,
    groups: Bounds,
    threshold_G: Tensor,
    scheme_G: Tensor,
    seed_G: Tensor,
    round_G: Tensor,
    warps: int = 8,
) -> Selection:
    """As `smc.algorithm.selection.select`, for groups of up to MAX_PARTICLES places."""
    (places, branches), count = candidates_AF.shape, len(seed_G)
    ancestor_A, branch_A = torch.empty(2, places, dtype=torch.int64, device=candidates_AF.device)
    logw_A, held_A = torch.empty_like(ancestor_A, dtype=torch.float64), torch.empty_like(alive_A)
    log_z_G, ess_G = logw_A.new_empty((2, count))
    resampled_G, collapsed_G = held_A.new_empty((2, count))
    scratch_3M = logw_A.new_empty((3, places * branches))
    _select[(programs(places, count),)](
        candidates_AF.contiguous(), alive_A.contiguous(), groups.first_G, groups.size_G, groups.count_G, groups.draws_G,
        threshold_G, scheme_G, seed_G, round_G,
        ancestor_A, branch_A, logw_A, held_A, log_z_G, ess_G, resampled_G, collapsed_G, *scratch_3M,
        branches, count, places, BLOCK_N=MAX_PARTICLES, BLOCK_F=triton.next_power_of_2(branches),
        # The reference rounds a product before it subtracts from it.
        enable_fp_fusion=False, num_warps=warps,
    )  # fmt: skip
    return Selection(ancestor_A, branch_A, logw_A, held_A, log_z_G, ess_G, resampled_G, collapsed_G)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _cumulative(weight, axis: tl.constexpr):
    """Cumulative sum that never falls and stands still exactly where the weight is zero, however the parallel scan
    rounds."""
    return tl.associative_scan(tl.where(weight > 0, tl.cumsum(weight, axis), 0.0), axis, _larger)


@triton.jit
def _search(sorted_X, value_Y, SIZE: tl.constexpr, INCLUSIVE: tl.constexpr):
    """How many of SIZE (a power of two) sorted entries lie below each value, or with INCLUSIVE not above it."""
    below_Y = tl.zeros_like(value_Y).to(tl.int32)
    for i in tl.static_range(12):
        if SIZE >> i > 0:
            next_Y = below_Y + (SIZE >> i)
            probe_Y = tl.gather(sorted_X, tl.minimum(next_Y, SIZE) - 1, 0)
            passed_Y = (probe_Y <= value_Y) if INCLUSIVE else (probe_Y < value_Y)
            below_Y = tl.where(passed_Y & (next_Y <= SIZE), next_Y, below_Y)
    return below_Y


@triton.jit
def _sort(value_X, SIZE: tl.constexpr, MOST: tl.constexpr):
    """SIZE numbers up to MOST, ascending. Few enough to compare all with all."""
    reached_X = tl.sum((value_X[None, :] <= value_X[:, None]).to(tl.int32), 1)
    is_reached_XY = reached_X[:, None] > tl.arange(0, SIZE)[None, :]
    return tl.min(tl.where(is_reached_XY, value_X[:, None], MOST), 0)


@triton.jit
def _uniform(seed, position_X, rounds):
    """`smc.philox.uniforms` of one seed and round at the given positions."""
    high, low, _, _ = tl.philox(seed, position_X.to(tl.uint32), 0, rounds.to(tl.uint32), PURPOSE)
    return ((high.to(tl.int64) << 21) | (low.to(tl.int64) >> 11)).to(tl.float64) * 2.0**-53


@triton.jit
def _shares(log_NF, highest):
    """Weights over their sum, in terms of logarithms of which `highest` is the largest; zeros where all are or where
    there is NaN."""
    power_NF = tl.exp(log_NF - tl.where(highest == -float("inf"), 0.0, highest))
    share_NF = power_NF / tl.sum(power_NF)
    return tl.where(share_NF == share_NF, share_NF, 0.0)


@triton.jit
def _weigh(candidates_NF):
    """Of each particle its largest candidate and its family's log-weight; of all the log of their sum, and the sum of
    their squared shares: 0 where there is no weight, or NaN."""
    # What is subtracted must be the largest of what is there: 0 in its place would round all weights far below it to
    # zero.
    highest_N = tl.max(candidates_NF, 1)
    base_N = tl.where(highest_N == -float("inf"), 0.0, highest_N)
    family_N = base_N + tl.log(tl.sum(tl.exp(candidates_NF - base_N[:, None]), 1))
    highest = tl.max(family_N, 0)
    base = tl.where(highest == -float("inf"), 0.0, highest)
    log_sum = base + tl.log(tl.sum(tl.exp(family_N - base), 0))
    share_N = _shares(family_N, highest)
    return highest_N, family_N, log_sum, tl.sum(share_N * share_N, 0)


@triton.jit
def _srinivasan(expected_NF, uniform_NF, at_NF, inside_NF, draws, begin, end, expected_M, uniform_M, more_M):
    """`smc.algorithm.resampling.ssp`: what each candidate gets beyond the whole part of its expectation.

    Sequential by nature: one candidate after another in memory, from `begin` to `end`; at_NF says where each is.
    """
    tl.store(expected_M + at_NF, expected_NF, mask=inside_NF)
    tl.store(uniform_M + at_NF, uniform_NF, mask=inside_NF)
    tl.store(more_M + at_NF, tl.zeros_like(expected_NF), mask=inside_NF)
    tl.debug_barrier()
    left = draws.to(tl.float64) - tl.sum(tl.floor(expected_NF))
    open_at = begin
    open_part = tl.load(expected_M + begin)
    open_part -= tl.floor(open_part)
    for m in range(begin + 1, end):
        part = tl.load(expected_M + m)
        part -= tl.floor(part)
        uniform = tl.load(uniform_M + m)
        total = open_part + part
        is_whole = total >= 1
        new_is_open = tl.where(is_whole, uniform * (2 - total) >= 1 - open_part, uniform * total < part)
        tl.store(more_M + tl.where(new_is_open, open_at, m), total * 0 + 1, mask=is_whole)
        left -= is_whole.to(tl.float64)
        open_at = tl.where(new_is_open, m, open_at)
        open_part = tl.where(is_whole, total - 1, total)
    tl.store(more_M + open_at, left)
    tl.debug_barrier()
    return tl.load(more_M + at_NF, mask=inside_NF, other=0.0)


@triton.jit
def _draw(weight_NF, sure_NF, is_rest, scheme, draws, last, seed, rounds, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """The chosen candidates, ascending: `sure` copies of each, and for other draws those under the scheme's points;
    then BLOCK_M.

    Where `is_rest`, points fall on what the sure copies leave of the expectation.
    """
    p = tl.arange(0, BLOCK_N)
    sure_M = tl.reshape(sure_NF.to(tl.int32), (BLOCK_M,))
    left = draws - tl.sum(sure_M, 0)
    fall_NF = tl.where(is_rest, weight_NF * draws.to(tl.float64) - sure_NF, weight_NF)
    cumulative_M = _cumulative(tl.reshape(fall_NF, (BLOCK_M,)), 0)
    uniform_P = _uniform(seed, p, rounds)
    shift_P = tl.where(scheme == SYSTEMATIC, tl.sum(tl.where(p == 0, uniform_P, 0.0), 0), uniform_P)
    is_even = (scheme == SYSTEMATIC) | (scheme == STRATIFIED)
    point_P = tl.where(is_even, (p.to(tl.float64) + shift_P) / draws.to(tl.float64), uniform_P)
    # A bare constant would be rounded to fp32, which is 1.
    below_one_P = tl.full((BLOCK_N,), 1 - 2.0**-52, tl.float64)
    point_P = tl.minimum(point_P, below_one_P) * tl.max(cumulative_M, 0)
    drawn_P = tl.minimum(_search(cumulative_M, point_P, BLOCK_M, True), last)
    copied_P = tl.minimum(_search(tl.cumsum(sure_M, 0), p - left, BLOCK_M, True), last)
    chosen_P = tl.where(p < left, drawn_P, copied_P)
    return _sort(tl.where(p < draws, chosen_P, BLOCK_M), BLOCK_N, BLOCK_M)


@triton.jit
def _place(chosen_P, size, draws, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr):
    """`smc.algorithm.resampling.place` from the sorted list of chosen candidates: the one that each slot continues
    with, if any."""
    slot_N = tl.arange(0, BLOCK_N)
    family_P = chosen_P // BLOCK_F
    before_P = tl.gather(family_P, tl.maximum(slot_N - 1, 0), 0)
    copy_P = (slot_N > 0) & (slot_N < draws) & (family_P == before_P)
    copies_P = tl.cumsum(copy_P.to(tl.int32), 0)
    first_N = tl.minimum(_search(family_P, slot_N, BLOCK_N, False), BLOCK_N - 1)
    survives_N = tl.gather(family_P, first_N, 0) == slot_N
    free_N = (slot_N < size) & (survives_N == 0)
    rank_N = tl.cumsum(free_N.to(tl.int32), 0)
    # The r-th free slot takes the r-th further copy: the first point up to which there are r.
    filler_N = tl.minimum(_search(copies_P, rank_N, BLOCK_N, False), BLOCK_N - 1)
    taken_N = tl.gather(chosen_P, tl.where(free_N, filler_N, first_N), 0)
    held_N = survives_N | (free_N & (rank_N <= tl.max(copies_P, 0)))
    return tl.where(held_N, taken_N, slot_N * BLOCK_F), held_N


@triton.jit
def _own_branch(candidates_NF, highest_N, uniform_N, branches):
    """`smc.algorithm.selection.own_branch`: one branch of each particle by its share of the family's weight."""
    power_NF = tl.exp(candidates_NF - tl.where(highest_N == -float("inf"), 0.0, highest_N)[:, None])
    total_N = tl.sum(power_NF, 1)
    cumulative_NF = _cumulative(power_NF / total_N[:, None], 1)
    point_N = uniform_N * tl.max(cumulative_NF, 1)
    passed_N = tl.sum((cumulative_NF <= point_N[:, None]).to(tl.int32), 1)
    return tl.where(total_N > 0, tl.minimum(passed_N, branches - 1), 0)


@triton.jit
def _resample(
    candidates_NF, highest, at_NF, inside_NF, size, draws, scheme, seed, rounds, begin, branches, expected_M, uniform_M, more_M,
    BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """What every slot continues with after `draws` draws by the scheme, and whether it has a particle."""
    weight_NF = _shares(candidates_NF, highest)
    expected_NF = weight_NF * draws.to(tl.float64)
    sure_NF = tl.where((scheme == RESIDUAL) | (scheme == SSP), tl.floor(expected_NF), 0.0)
    if scheme == SSP:
        uniform_NF = _uniform(seed, at_NF - begin, rounds)
        end = begin + size * branches
        sure_NF += _srinivasan(
            expected_NF, uniform_NF, at_NF, inside_NF, draws, begin, end, expected_M, uniform_M, more_M
        )
    last = (size - 1) * BLOCK_F + branches - 1
    chosen_P = _draw(
        weight_NF, sure_NF, scheme == RESIDUAL, scheme, draws, last, seed, rounds, BLOCK_N, BLOCK_N * BLOCK_F
    )
    return _place(chosen_P, size, draws, BLOCK_N, BLOCK_F)


@one_variant()
def _select(
    candidates_AF, alive_A, first_G, size_G, count_G, draws_G, threshold_G, scheme_G, seed_G, round_G,
    ancestor_A, branch_A, logw_A, held_A, log_z_G, ess_G, resampled_G, collapsed_G, expected_M, uniform_M, more_M,
    branches, groups, places, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    if group >= groups:
        place_N, exists_N, _, _ = own_places(first_G, size_G, groups, places, BLOCK_N)
        tl.store(ancestor_A + place_N, place_N.to(tl.int64), mask=exists_N)
        tl.store(branch_A + place_N, place_N.to(tl.int64) * 0, mask=exists_N)
        tl.store(logw_A + place_N, tl.full((BLOCK_N,), -float("inf"), tl.float64), mask=exists_N)
        tl.store(held_A + place_N, place_N < 0, mask=exists_N)
        return
    first, size = tl.load(first_G + group), tl.load(size_G + group)
    if size == 0:
        tl.store(log_z_G + group, 0.0)
        tl.store(ess_G + group, 0.0)
        tl.store(resampled_G + group, False)
        tl.store(collapsed_G + group, False)
        return
    count, draws = tl.load(count_G + group), tl.load(draws_G + group)
    seed, rounds = tl.load(seed_G + group), tl.load(round_G + group)
    n, f = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_F)
    exists_N, place_N = n < size, first + n
    alive_N = tl.load(alive_A + place_N, mask=exists_N, other=0) != 0
    inside_NF = exists_N[:, None] & (f < branches)[None, :]
    at_NF = place_N[:, None] * branches + f[None, :]
    offered_NF = inside_NF & alive_N[:, None]
    candidates_NF = tl.load(candidates_AF + at_NF, mask=offered_NF, other=-float("inf")).to(tl.float64)
    highest_N, family_N, log_sum, squares = _weigh(candidates_NF)
    has_weight = squares > 0
    ess = tl.where(has_weight, 1.0 / squares, 0.0)
    is_low = ess < tl.load(threshold_G + group).to(tl.float64) * count.to(tl.float64) * KEEP
    resampled = (is_low | (draws != count)) & has_weight
    if resampled:
        taken_N, held_N = _resample(
            candidates_NF, tl.max(highest_N, 0), at_NF, inside_NF, size, draws, tl.load(scheme_G + group), seed, rounds,
            first * branches, branches, expected_M, uniform_M, more_M, BLOCK_N, BLOCK_F,
        )  # fmt: skip
    else:
        uniform_N = _uniform(seed, n + FIRST_BRANCH, rounds)
        taken_N = n * BLOCK_F + _own_branch(candidates_NF, highest_N, uniform_N, branches)
        held_N = alive_N & (tl.cumsum(alive_N.to(tl.int32), 0) <= tl.where(has_weight, BLOCK_N, draws))
    reset = resampled | (squares == 0)
    tl.store(ancestor_A + place_N, (first + taken_N // BLOCK_F).to(tl.int64), mask=exists_N)
    tl.store(branch_A + place_N, (taken_N % BLOCK_F).to(tl.int64), mask=exists_N)
    tl.store(logw_A + place_N, tl.where(held_N, tl.where(reset, 0.0, family_N), -float("inf")), mask=exists_N)
    tl.store(held_A + place_N, held_N, mask=exists_N)
    log_mean = log_sum - tl.log(tl.maximum(count, 1).to(tl.float64))
    tl.store(log_z_G + group, tl.where(reset, log_mean, 0.0))
    tl.store(ess_G + group, ess)
    tl.store(resampled_G + group, resampled)
    tl.store(collapsed_G + group, squares == 0)
