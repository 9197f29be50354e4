"""A round's choice of candidates on the device: `smc.algorithm.selection.select` for the systematic scheme, one program a group.

Everything is float64, as there, and equal to it up to rounding. The chosen candidates of a group come out sorted, one for each grid
point, so slots are dealt by binary searches in that list and no counts are stored. A candidate without weight is never chosen.
Nothing reads the host, and the grid follows from shapes alone. It can be captured in a CUDA graph.

Axes: G groups, N particles, F branches a particle, M = N * F candidates, P grid points (one for each slot), U uniforms.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smc.algorithm.selection import EQUAL, Selection


def select(
    candidates_GNF: Tensor, size_G: Tensor, threshold_G: Tensor, uniforms_GU: Tensor, branch_uniforms_GN: Tensor, warps: int = 4
) -> Selection:
    """As `smc.algorithm.selection.select` with every scheme systematic; ancestors and branches are int32. N * F up to 1024."""
    groups, n, branches = candidates_GNF.shape
    block_n, block_f = triton.next_power_of_2(n), triton.next_power_of_2(branches)
    if block_n * block_f > 1024:
        raise ValueError(f"needs N * F <= 1024, each rounded up to a power of two; got N = {n}, F = {branches}")
    candidates_GNF, branch_uniforms_GN = candidates_GNF.contiguous(), branch_uniforms_GN.contiguous()
    slots_2GN = size_G.new_empty((2, groups, n), dtype=torch.int32)
    logw_GN = candidates_GNF.new_empty((groups, n), dtype=torch.float64)
    log_z_G, ess_G = logw_GN.new_empty(groups), logw_GN.new_empty(groups)
    resampled_G, collapsed_G = size_G.new_empty(groups, dtype=torch.bool), size_G.new_empty(groups, dtype=torch.bool)
    _select[(groups,)](
        candidates_GNF, size_G, threshold_G, uniforms_GU, uniforms_GU.stride(0), branch_uniforms_GN,
        *slots_2GN, logw_GN, log_z_G, ess_G, resampled_G, collapsed_G,
        n, branches, BLOCK_N=block_n, BLOCK_F=block_f, KEEP=1 - EQUAL, num_warps=warps,
    )  # fmt: skip
    return Selection(*slots_2GN, logw_GN, log_z_G, ess_G, resampled_G, collapsed_G)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _cumulative(weight, axis: tl.constexpr):
    """Cumulative sum that never falls and stands still exactly where the weight is zero, however the parallel scan rounds."""
    return tl.associative_scan(tl.where(weight > 0, tl.cumsum(weight, axis), 0.0), axis, _larger)


@triton.jit
def _search(sorted_X, value_Y, SIZE: tl.constexpr, INCLUSIVE: tl.constexpr):
    """How many of SIZE (a power of two) sorted entries lie below each value, or with INCLUSIVE not above it."""
    below_Y = tl.zeros_like(value_Y).to(tl.int32)
    for i in tl.static_range(11):
        if SIZE >> i > 0:
            next_Y = below_Y + (SIZE >> i)
            probe_Y = tl.gather(sorted_X, tl.minimum(next_Y, SIZE) - 1, 0)
            passed_Y = (probe_Y <= value_Y) if INCLUSIVE else (probe_Y < value_Y)
            below_Y = tl.where(passed_Y & (next_Y <= SIZE), next_Y, below_Y)
    return below_Y


@triton.jit
def _systematic(weight_M, uniform, size, last, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """The candidate under each of the grid's `size` points, ascending; BLOCK_M for points that do not exist."""
    point_P = tl.arange(0, BLOCK_N)
    cumulative_M = _cumulative(weight_M, 0)
    # A bare constant would be rounded to fp32, which is 1.
    below_one = tl.full((BLOCK_N,), 1 - 2.0**-52, tl.float64)
    at_P = tl.minimum((point_P.to(tl.float64) + uniform) / size.to(tl.float64), below_one) * tl.max(cumulative_M, 0)
    chosen_P = tl.minimum(_search(cumulative_M, at_P, BLOCK_M, True), last)
    return tl.where(point_P < size, chosen_P, BLOCK_M)


@triton.jit
def _place(chosen_P, size, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr):
    """`smc.algorithm.resampling.place` from the sorted list of chosen candidates: the one that each slot continues with."""
    slot_N = tl.arange(0, BLOCK_N)
    family_P = chosen_P // BLOCK_F
    before_P = tl.gather(family_P, tl.maximum(slot_N - 1, 0), 0)
    copy_P = (slot_N > 0) & (slot_N < size) & (family_P == before_P)
    copies_P = tl.cumsum(copy_P.to(tl.int32), 0)
    first_N = tl.minimum(_search(family_P, slot_N, BLOCK_N, False), BLOCK_N - 1)
    free_N = (tl.gather(family_P, first_N, 0) != slot_N) & (slot_N < size)
    rank_N = tl.cumsum(free_N.to(tl.int32), 0)
    # The r-th free slot takes the r-th further copy: the first point up to which there are r.
    filler_N = tl.minimum(_search(copies_P, rank_N, BLOCK_N, False), BLOCK_N - 1)
    taken_N = tl.gather(chosen_P, tl.where(free_N, filler_N, first_N), 0)
    return tl.where(slot_N < size, taken_N, slot_N * BLOCK_F)


@triton.jit
def _own_branch(power_NF, uniform_N, branches):
    """`smc.algorithm.selection.own_branch`: one branch of each particle by its share of the family's weight."""
    total_N = tl.sum(power_NF, 1)
    cumulative_NF = _cumulative(power_NF / total_N[:, None], 1)
    point_N = uniform_N * tl.max(cumulative_NF, 1)
    passed_N = tl.sum((cumulative_NF <= point_N[:, None]).to(tl.int32), 1)
    return tl.where(total_N > 0, tl.minimum(passed_N, branches - 1), 0)


@triton.jit
def _select(
    candidates_GNF, size_G, threshold_G, uniforms_GU, stride_u, branch_uniforms_GN,
    ancestor_GN, branch_GN, logw_GN, log_z_G, ess_G, resampled_G, collapsed_G,
    particles, branches, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    n, f = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_F)
    size = tl.load(size_G + group).to(tl.int32)
    member_N, slot = n < size, group * particles + n
    inside_NF = member_N[:, None] & (f < branches)[None, :]
    candidates_NF = tl.load(candidates_GNF + slot[:, None] * branches + f[None, :], mask=inside_NF, other=-float("inf")).to(tl.float64)
    highest_N = tl.max(candidates_NF, 1)
    base_N = tl.where(highest_N == -float("inf"), 0.0, highest_N)
    power_NF = tl.exp(candidates_NF - base_N[:, None])
    family_N = base_N + tl.log(tl.sum(power_NF, 1))
    highest = tl.max(family_N, 0)
    base = tl.where(highest == -float("inf"), 0.0, highest)
    total = tl.sum(tl.exp(family_N - base), 0)
    weight_N = tl.exp(family_N - base) / total
    # No weight at all, or NaN: zeros, as in `weights.normalise`.
    weight_N = tl.where(weight_N == weight_N, weight_N, 0.0)
    squares = tl.sum(weight_N * weight_N, 0)
    ess = tl.where(squares > 0, 1.0 / squares, 0.0)
    collapsed = total == 0
    resampled = (ess < tl.load(threshold_G + group).to(tl.float64) * size.to(tl.float64) * KEEP) & (total != 0)

    power_M = tl.reshape(tl.exp(candidates_NF - tl.max(base_N, 0)), (BLOCK_N * BLOCK_F,))
    weight_M = power_M / tl.sum(power_M, 0)
    weight_M = tl.where(weight_M == weight_M, weight_M, 0.0)
    last = (particles - 1) * BLOCK_F + branches - 1
    chosen_P = _systematic(weight_M, tl.load(uniforms_GU + group * stride_u), size, last, BLOCK_N, BLOCK_N * BLOCK_F)
    taken_N = _place(chosen_P, size, BLOCK_N, BLOCK_F)
    uniform_N = tl.load(branch_uniforms_GN + slot, mask=n < particles, other=0.0)
    own_N = _own_branch(power_NF, uniform_N, branches)

    reset = resampled | collapsed
    tl.store(ancestor_GN + slot, tl.where(resampled, taken_N // BLOCK_F, n), mask=n < particles)
    tl.store(branch_GN + slot, tl.where(resampled, taken_N % BLOCK_F, own_N), mask=n < particles)
    logw_N = tl.where(member_N, tl.where(reset, 0.0, family_N), -float("inf"))
    tl.store(logw_GN + slot, logw_N, mask=n < particles)
    tl.store(log_z_G + group, tl.where(reset, base + tl.log(total) - tl.log(size.to(tl.float64)), 0.0))
    tl.store(ess_G + group, ess)
    tl.store(resampled_G + group, resampled)
    tl.store(collapsed_G + group, collapsed)
