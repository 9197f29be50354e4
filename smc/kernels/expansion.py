"""Expansion of populations on the device, as `smc.algorithm.expansion`: chooses the continuations to keep, with one
program for each group.

Masses are float64, as there. Nothing is sorted: the mass above which candidates are certain, or are kept, is found by
bisection between two of their masses, and each probe is a pass over the group's candidates. The line on which the
systematic draw puts its points is measured in whole numbers of 2**-52, so that sums do not depend on their order and no
point falls on a candidate without mass. The host reads nothing, and grids follow from shapes alone, so all launches can
be captured in a CUDA graph.

Local axes: U candidates of a group, Y some of its candidates or rows at a time."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from smc.algorithm.expansion import EXPANSION_POSITION, Expansion, SourceRows
from smc.algorithm.expansion import LEAD as MOST_MASS
from smc.algorithm.resampling import Spans
from smc.api.limits import MAX_PARTICLES
from smc.arrays import Room, contiguous
from smc.kernels.decodings import is_exact, is_separate
from smc.kernels.launch import one_variant, own_indices, programs
from smc.kernels.select import draw_uniforms
from smc.philox import RoundKeys

CHUNKS = (256, 512, 1024, 2048)
"""Number of candidates that a program handles at a time: all of them, unless there are more than the last size."""
LEAD = tl.constexpr(MOST_MASS)


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
    chunk: int | None = None,
    warps: int = 8,
) -> Expansion:
    """As `smc.algorithm.expansion.expand`. If a group keeps nothing, its rows repeat the first candidate of its first
    source row."""
    (count, width), groups_count = source.candidates.share_RC.shape, len(decoding_G)
    source, room = contiguous(source), Room(source.mass_R.device)
    groups = contiguous(ExpandGroups(rows, most_G, decoding_G, keys_G))
    log_mass_U, relative_U = room.doubles(count * width), room.doubles(count * width)
    out = Expansion(
        parent_X=room.longs(total),
        candidate_X=room.longs(total),
        mass_X=room.doubles(total),
        alive_X=room.bools(total),
        ess_G=room.doubles(groups_count),
        collapsed_G=room.bools(groups_count),
        nan_G=room.bools(groups_count),
    )
    # One more program, for the rows that belong to no group.
    _expand[(groups_count + 1,)](
        source, groups, out, log_mass_U, relative_U, EXPANSION_POSITION + step, width,
        width - 1 if has_rest else -1, total,
        LEAST=least, CHUNK=chunk or next(size for size in CHUNKS if size >= count * width or size == CHUNKS[-1]),
        # The reference rounds a product before it adds it.
        enable_fp_fusion=False, num_warps=warps,
    )  # fmt: skip
    return out


class ExpandGroups(NamedTuple):
    """What `expand` knows about groups."""

    rows: Spans
    most_G: Tensor
    decoding_G: Tensor
    keys_G: RoundKeys


def assign_rows(
    root_R: Tensor,
    parent_X: Tensor,
    alive_X: Tensor,
    rows: Spans,
    indices: Spans,
    total: int,
) -> tuple[Tensor, Tensor]:
    """As `smc.algorithm.expansion.assign_rows`, for groups of up to MAX_PARTICLES batch indices."""
    room, count = Room(root_R.device), len(rows.first_G)
    row_A, alive_A = room.longs(total), room.bools(total)
    given = contiguous((root_R, parent_X, alive_X, rows, indices))
    _assign_rows[(programs(total, count),)](*given, row_A, alive_A, count, total, BLOCK_N=MAX_PARTICLES, num_warps=8)
    return row_A, alive_A


@triton.jit
def _joined(count, low, high, other_count, other_low, other_high):
    """Combine two sets: number of members, minimum and maximum."""
    return count + other_count, tl.minimum(low, other_low), tl.maximum(high, other_high)


@triton.jit
def _parted(largest, upto, least, above, other_largest, other_upto, other_least, other_above):
    """Combine the results of `_part` for two sets."""
    return tl.maximum(largest, other_largest), upto + other_upto, tl.minimum(least, other_least), above + other_above


@triton.jit
def _spread(
    share_U, mass_R, there_R, ended_R, log_mass_U, count, width, rest, is_best,
    CHUNK: tl.constexpr, IS_COLLAPSED: tl.constexpr,
):  # fmt: skip
    """Write a group's log masses; for a group that has collapsed, 0 for each candidate that has a share. Returns the
    number of candidates with mass, the smallest and the largest log mass, the index of the first candidate with mass,
    and the number of NaN shares."""
    valid, lowest, top = 0, tl.full((), float("inf"), tl.float64), tl.full((), -float("inf"), tl.float64)
    nan, lead = 0, count
    for begin in range(0, count, CHUNK):
        m_Y = begin + tl.arange(0, CHUNK)
        inside_Y, source_Y = m_Y < count, m_Y // width
        there_Y = tl.load(there_R + source_Y, mask=inside_Y, other=0) != 0
        share_Y = tl.load(share_U + m_Y, mask=there_Y, other=-float("inf")).to(tl.float64)
        if ended_R is not None:
            has_ended_Y = tl.load(ended_R + source_Y, mask=there_Y, other=0) != 0
            share_Y = tl.where(has_ended_Y, tl.where(m_Y % width == 0, 0.0, -float("inf")), share_Y)
        share_Y = tl.where(is_best & (m_Y % width == rest), -float("inf"), share_Y)
        nan += tl.sum((share_Y != share_Y).to(tl.int32), 0)
        if IS_COLLAPSED:
            log_mass_Y = tl.where(share_Y > -float("inf"), tl.zeros_like(share_Y), -float("inf"))
        else:
            log_mass_Y = tl.load(mass_R + source_Y, mask=there_Y, other=-float("inf")).to(tl.float64) + share_Y
            log_mass_Y = tl.where(log_mass_Y == log_mass_Y, log_mass_Y, -float("inf"))
        tl.store(log_mass_U + m_Y, log_mass_Y, mask=inside_Y)
        has_mass_Y = log_mass_Y > -float("inf")
        lead = tl.minimum(lead, tl.min(tl.where(has_mass_Y, m_Y, count), 0))
        here, here_lowest, here_top = tl.reduce(
            (has_mass_Y.to(tl.int32), tl.where(has_mass_Y, log_mass_Y, float("inf")), log_mass_Y), 0, _joined
        )
        valid, lowest, top = _joined(valid, lowest, top, here, here_lowest, here_top)
    tl.debug_barrier()
    return valid, lowest, top, lead, nan


@triton.jit
def _scale(log_mass_U, relative_U, count, top, CHUNK: tl.constexpr):
    """Write masses relative to the largest one. Returns their sum."""
    total = tl.zeros((), tl.float64)
    for begin in range(0, count, CHUNK):
        m_Y = begin + tl.arange(0, CHUNK)
        power_Y = tl.exp(tl.load(log_mass_U + m_Y, mask=m_Y < count, other=-float("inf")) - top)
        relative_Y = tl.where(power_Y == power_Y, power_Y, 0.0)
        tl.store(relative_U + m_Y, relative_Y, mask=m_Y < count)
        total += tl.sum(relative_Y, 0)
    tl.debug_barrier()
    return total


@triton.jit
def _part(log_mass_U, relative_U, count, probe, CHUNK: tl.constexpr):
    """Return, of the candidates up to a log mass, the largest log mass and the sum of relative masses; of those above
    it, the smallest log mass and their number."""
    above, upto = 0, tl.zeros((), tl.float64)
    largest, least = tl.full((), -float("inf"), tl.float64), tl.full((), float("inf"), tl.float64)
    for begin in range(0, count, CHUNK):
        m_Y = begin + tl.arange(0, CHUNK)
        log_mass_Y = tl.load(log_mass_U + m_Y, mask=m_Y < count, other=-float("inf"))
        relative_Y = tl.load(relative_U + m_Y, mask=m_Y < count, other=0.0)
        is_upto_Y = log_mass_Y <= probe
        below_Y, above_Y = tl.where(is_upto_Y, log_mass_Y, -float("inf")), tl.where(is_upto_Y, float("inf"), log_mass_Y)
        given_Y, is_above_Y = tl.where(is_upto_Y, relative_Y, 0.0), (log_mass_Y > probe).to(tl.int32)
        here_largest, here_upto, here_least, here_above = tl.reduce((below_Y, given_Y, above_Y, is_above_Y), 0, _parted)
        largest, upto, least, above = _parted(
            largest, upto, least, above, here_largest, here_upto, here_least, here_above
        )
    return largest, upto, least, above


@triton.jit
def find_bound(log_mass_U, relative_U, count, lowest, top, most, is_best, CHUNK: tl.constexpr):
    """Return what decides among more candidates than may be kept: a log mass above which all are certain, how many of
    those that equal it are certain, and the factor that turns the others' relative mass into their probability.

    With `is_best`, the log mass is the `most`-th largest. Otherwise c is chosen so that probabilities sum to `most`,
    and the log mass is the largest that c does not make certain: m (most - k) <= the sum of all but the k masses above
    m."""
    high, over = tl.full((), float("inf"), tl.float64), 0
    low, under, tail = tl.full((), -float("inf"), tl.float64), 0, tl.full((), 1, tl.float64)
    following = lowest
    while following < high:
        # Infinities have no middle.
        middle = (following + tl.minimum(tl.minimum(high, top), tl.full((), 1e308, tl.float64))) * 0.5
        probe = tl.where((middle > following) & (middle < high), middle, following)
        mass, upto, least, above = _part(log_mass_U, relative_U, count, probe, CHUNK)
        left = tl.maximum(most - above, 0).to(tl.float64)
        is_low = tl.where(is_best, above >= most, tl.exp(mass - top) * left <= upto)
        low, under, tail = tl.where(is_low, mass, low), tl.where(is_low, above, under), tl.where(is_low, upto, tail)
        following = tl.where(is_low, least, following)
        high, over = tl.where(is_low, high, mass), tl.where(is_low, over, above)
    factor = tl.where(is_best, 0.0, tl.maximum(most - under, 0).to(tl.float64) / tail)
    return tl.where(is_best, high, low), tl.where(is_best, most - over, 0), factor


@triton.jit
def _draw(
    log_mass_U, relative_U, count, total, bound, ties, factor, most, size, is_best, uniform, source_first, width,
    lead, lead_mass, out, row_first, CHUNK: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Write the chosen candidates to the group's rows in order. Returns their number and the index of the first."""
    # The points lie at u, u + 1, ..., all rounded up to a whole number of 2**-52.
    reach = -(((uniform * 2.0**53).to(tl.int64) + 1) >> 1)
    taken, equal, first = 0, 0, count
    for begin in range(0, count, CHUNK):
        m_Y = begin + tl.arange(0, CHUNK)
        log_mass_Y = tl.load(log_mass_U + m_Y, mask=m_Y < count, other=-float("inf"))
        relative_Y = tl.load(relative_U + m_Y, mask=m_Y < count, other=0.0)
        is_equal_Y = (log_mass_Y == bound) & (log_mass_Y > -float("inf"))
        is_sure_Y = (log_mass_Y > bound) | (is_equal_Y & (equal + tl.cumsum(is_equal_Y.to(tl.int32), 0) <= ties))
        # Zero mass times an infinite factor is NaN, and a GPU's minimum of NaN and 1 is 1.
        chance_Y = tl.where(is_sure_Y, 1.0, tl.where(relative_Y > 0, tl.minimum(relative_Y * factor, 1.0), 0.0))
        if LEAST > 0:
            limit_Y = relative_Y * most.to(tl.float64) / (tl.full((), LEAST, tl.float64) * total)
            chance_Y = tl.where(is_best, chance_Y, tl.where(limit_Y < chance_Y, limit_Y, chance_Y))
        length_Y = (chance_Y * 2.0**52 + 0.5).to(tl.int64)
        reach_Y = reach + tl.cumsum(length_Y, 0)
        is_taken_Y = ((reach_Y >> 52) > ((reach_Y - length_Y) >> 52)) | (chance_Y == 1)
        rank_Y = taken + tl.cumsum(is_taken_Y.to(tl.int32), 0) - 1
        # Rounding of the sum must not choose one candidate too many.
        goes_Y = is_taken_Y & (rank_Y < most) & (rank_Y < size)
        mass_Y = tl.where(m_Y == lead, lead_mass, log_mass_Y) - tl.log(tl.where(goes_Y, chance_Y, 1.0))
        x_Y = row_first + rank_Y
        tl.store(out.parent_X + x_Y, (source_first + m_Y // width).to(tl.int64), mask=goes_Y)
        tl.store(out.candidate_X + x_Y, (m_Y % width).to(tl.int64), mask=goes_Y)
        tl.store(out.mass_X + x_Y, mass_Y, mask=goes_Y)
        tl.store(out.alive_X + x_Y, mass_Y > -float("inf"), mask=goes_Y)
        first = tl.minimum(first, tl.min(tl.where(goes_Y, m_Y, count), 0))
        reach, equal = reach + tl.sum(length_Y, 0), equal + tl.sum(is_equal_Y.to(tl.int32), 0)
        taken += tl.sum(is_taken_Y.to(tl.int32), 0)
    tl.debug_barrier()
    return tl.minimum(tl.minimum(taken, most), size), first


@triton.jit
def _finish(out, row_first, went, size, first_parent, first_candidate, CHUNK: tl.constexpr):
    """Let the group's rows beyond the chosen ones repeat the first. Returns the effective sample size."""
    top = tl.full((), -float("inf"), tl.float64)
    for begin in range(0, size, CHUNK):
        n_Y = begin + tl.arange(0, CHUNK)
        x_Y = row_first + n_Y
        tl.store(out.parent_X + x_Y, first_parent + n_Y * 0, mask=(n_Y >= went) & (n_Y < size))
        tl.store(out.candidate_X + x_Y, first_candidate + n_Y * 0, mask=(n_Y >= went) & (n_Y < size))
        top = tl.maximum(top, tl.max(tl.load(out.mass_X + x_Y, mask=n_Y < went, other=-float("inf")), 0))
    total, squares = tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    for begin in range(0, went, CHUNK):
        n_Y = begin + tl.arange(0, CHUNK)
        power_Y = tl.exp(tl.load(out.mass_X + row_first + n_Y, mask=n_Y < went, other=-float("inf")) - top)
        total += tl.sum(power_Y, 0)
        squares += tl.sum(power_Y * power_Y, 0)
    return tl.where(squares > 0, total * total / squares, 0.0)


@triton.jit
def _clear(out, first, size, CHUNK: tl.constexpr):
    """Mark `size` rows as not kept."""
    for begin in range(0, size, CHUNK):
        n_Y = begin + tl.arange(0, CHUNK)
        x_Y, inside_Y, nothing_Y = first + n_Y, n_Y < size, tl.zeros((CHUNK,), tl.int64)
        tl.store(out.parent_X + x_Y, nothing_Y, mask=inside_Y)
        tl.store(out.candidate_X + x_Y, nothing_Y, mask=inside_Y)
        tl.store(out.mass_X + x_Y, nothing_Y.to(tl.float64) - float("inf"), mask=inside_Y)
        tl.store(out.alive_X + x_Y, nothing_Y != 0, mask=inside_Y)
    tl.debug_barrier()


@one_variant()
def _expand(
    source, groups, out, log_mass_U, relative_U, position, width, rest, total, CHUNK: tl.constexpr, LEAST: tl.constexpr
):  # fmt: skip
    group, count_G = tl.program_id(0), tl.num_programs(0) - 1
    if group == count_G:
        end = 0
        for begin in range(0, count_G, CHUNK):
            g_Y = begin + tl.arange(0, CHUNK)
            size_Y = tl.load(groups.rows.size_G + g_Y, mask=g_Y < count_G, other=0).to(tl.int32)
            end_Y = tl.load(groups.rows.first_G + g_Y, mask=size_Y > 0, other=0).to(tl.int32) + size_Y
            end = tl.maximum(end, tl.max(end_Y, 0))
        _clear(out, end, total - end, CHUNK)
        return
    sources, decoding = tl.load(source.groups.size_G + group).to(tl.int32), tl.load(groups.decoding_G + group)
    source_first = tl.load(source.groups.first_G + group).to(tl.int64)
    row_first = tl.load(groups.rows.first_G + group).to(tl.int64)
    size, most = tl.load(groups.rows.size_G + group).to(tl.int32), tl.load(groups.most_G + group).to(tl.int32)
    is_best = is_exact(decoding)
    _clear(out, row_first, size, CHUNK)
    if (sources == 0) | is_separate(decoding):
        tl.store(out.ess_G + group, 0.0)
        tl.store(out.collapsed_G + group, False)
        tl.store(out.nan_G + group, False)
        return
    count, at = sources * width, source_first * width
    share_U, mass_R, there_R = (
        source.candidates.share_RC + at,
        source.mass_R + source_first,
        source.there_R + source_first,
    )
    log_mass_U, relative_U, ended_R = log_mass_U + at, relative_U + at, None
    if source.ended_R is not None:
        ended_R = source.ended_R + source_first
    valid, lowest, top, lead, nan = _spread(
        share_U, mass_R, there_R, ended_R, log_mass_U, count, width, rest, is_best, CHUNK, False
    )
    collapsed = (is_exact(decoding) == 0) & (valid == 0)
    if collapsed:
        valid, lowest, top, lead, nan = _spread(
            share_U, mass_R, there_R, ended_R, log_mass_U, count, width, rest, is_best, CHUNK, True
        )
    total = _scale(log_mass_U, relative_U, count, top, CHUNK)
    bound, ties, factor = tl.full((), -float("inf"), tl.float64), 0, tl.zeros((), tl.float64)
    lead_mass = tl.load(log_mass_U + lead, mask=lead < count, other=0.0)
    tl.debug_barrier()
    if is_best & (lead < count):
        # The first candidate is always kept.
        tl.store(log_mass_U + lead, tl.full((), LEAD, tl.float64))
        tl.debug_barrier()
    if valid > most:
        bound, ties, factor = find_bound(log_mass_U, relative_U, count, lowest, top, most, is_best, CHUNK)
    seed, rounds = tl.load(groups.keys_G.seed + group), tl.load(groups.keys_G.round + group)
    uniform = tl.sum(draw_uniforms(seed, position + tl.arange(0, 1), rounds), 0)
    went, first = _draw(
        log_mass_U, relative_U, count, total, bound, ties, factor, most, size, is_best, uniform, source_first, width,
        lead, lead_mass, out, row_first, CHUNK, LEAST,
    )  # fmt: skip
    first = tl.where(went > 0, first, 0)
    ess = _finish(out, row_first, went, size, source_first + first // width, (first % width).to(tl.int64), CHUNK)
    tl.store(out.ess_G + group, ess)
    tl.store(out.collapsed_G + group, collapsed)
    tl.store(out.nan_G + group, (is_exact(decoding) == 0) & (nan > 0))


@one_variant()
def _assign_rows(
    root_R, parent_X, alive_X, rows_of, indices, row_A, alive_A, groups, batch_size, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Assign rows to batch indices in two passes over the group's rows, BLOCK_N at a time: count the rows that continue
    each batch index, then place those beyond the first of a batch index."""
    index_N, exists_N, group, is_group = own_indices(indices.first_G, indices.size_G, groups, batch_size, BLOCK_N)
    rows, size = tl.load(rows_of.size_G + group).to(tl.int32), tl.load(indices.size_G + group).to(tl.int32)
    row_first, first = tl.load(rows_of.first_G + group).to(tl.int64), tl.load(indices.first_G + group).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    rows = tl.where(is_group & (size > 0), rows, 0)
    count_N, own_N = tl.zeros((BLOCK_N,), tl.int32), tl.zeros((BLOCK_N,), tl.int32) + rows
    for begin in range(0, rows, BLOCK_N):
        is_of_YN, i = _continues(root_R, parent_X + row_first, alive_X + row_first, begin, rows, first, BLOCK_N)
        count_N += tl.sum(is_of_YN.to(tl.int32), 0)
        own_N = tl.minimum(own_N, tl.min(tl.where(is_of_YN, i[:, None], rows), 0))
    further_N, free_N = tl.maximum(count_N - 1, 0), (count_N == 0) & (n < size)
    rank_N, passed_N = tl.cumsum(free_N.to(tl.int32), 0), tl.cumsum(further_N, 0)
    filled_N = (n < size) & ((count_N > 0) | (rank_N <= tl.sum(further_N, 0)))
    seen_N, filler_N = passed_N - further_N, tl.zeros((BLOCK_N,), tl.int32)
    for begin in range(0, rows, BLOCK_N):
        is_of_YN, i = _continues(root_R, parent_X + row_first, alive_X + row_first, begin, rows, first, BLOCK_N)
        is_further_YN = (is_of_YN & (i[:, None] != own_N[None, :])).to(tl.int32)
        # Further rows are numbered from 1, batch index after batch index, and the r-th of them takes the r-th free
        # batch index.
        number_Y = tl.sum((seen_N[None, :] + tl.cumsum(is_further_YN, 0)) * is_further_YN, 1)
        takes_YN = free_N[None, :] & (rank_N[None, :] == number_Y[:, None])
        filler_N += tl.sum(tl.where(takes_YN, i[:, None], 0), 0)
        seen_N += tl.sum(is_further_YN, 0)
    taken_N = tl.where(count_N > 0, own_N, filler_N)
    lead = tl.min(tl.where(filled_N, n, BLOCK_N), 0)
    taken_N = tl.where(filled_N, taken_N, tl.sum(tl.where(n == lead, taken_N, 0), 0))
    has_rows = rows > 0
    tl.store(row_A + index_N, tl.where(has_rows, row_first + taken_N, 0), mask=exists_N)
    tl.store(alive_A + index_N, filled_N & has_rows, mask=exists_N)


@triton.jit
def _continues(root_R, parent_X, alive_X, begin, rows, first, BLOCK_N: tl.constexpr):
    """Return whether each row from `begin` on is alive and continues each of a group's batch indices; and the rows'
    numbers."""
    i = begin + tl.arange(0, BLOCK_N)
    is_alive_Y = tl.load(alive_X + i, mask=i < rows, other=0) != 0
    parent_Y = tl.load(parent_X + i, mask=is_alive_Y, other=0)
    index_Y = tl.where(is_alive_Y, (tl.load(root_R + parent_Y, mask=is_alive_Y, other=0) - first).to(tl.int32), -1)
    return index_Y[:, None] == tl.arange(0, BLOCK_N)[None, :], i
