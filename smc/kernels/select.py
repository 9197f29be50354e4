"""The select stage of a round: the candidates and their weights, and for groups of independent particles the selection
among them. The Triton form of `smc.executor.select.score_rows`, and of `smc.algorithm.selection.select`.

`score_rows` takes one launch: the first programs handle some rows each. Those after them handle a group each:
they compute what the selection needs to know about the group, and whether it has NaN. `select` has a program for each
group. Weights are float64, as in the references, and equal to these up to rounding. The chosen candidates of a group
are sorted, so slots are assigned by binary searches in that list. A candidate without weight is never chosen.
Resampling schemes are data: one launch runs all of them. The host reads nothing, and grids follow from shapes alone, so
both can be captured in a CUDA graph.

Local axes: P draws of a group, U sorted values, Y = N * F candidates of a group, Z values that are looked up in U."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from smc.algorithm.expansion import CandidateTokens, SourceRows
from smc.algorithm.resampling import Bounds, Spans
from smc.algorithm.selection import BRANCH_POSITION, EQUAL, NextParticles, Selection, SelectionStatistics
from smc.api.limits import MAX_PARTICLES, SCHEME_NAMES
from smc.arrays import Room, contiguous
from smc.kernels.decodings import DISTINCT, is_exact, is_separate
from smc.kernels.launch import Sizes, one_variant, own_indices, programs
from smc.kernels.truncation import finite
from smc.philox import Purpose, RoundKeys
from smc.round.tensors import ScoredRows, ScoreInputs

NONE = tl.constexpr(-float("inf"))
SYSTEMATIC, STRATIFIED, RESIDUAL, _, SSP = (tl.constexpr(index) for index in range(len(SCHEME_NAMES)))
PURPOSE = tl.constexpr(int(Purpose.SELECTION))
FIRST_BRANCH = tl.constexpr(BRANCH_POSITION)
KEEP = tl.constexpr(1 - EQUAL)
ROWS = 32
"""Rows of a program of `score_rows`."""


class SelectScratch(NamedTuple):
    """Memory of the scheme that processes candidates one by one."""

    expected_Y: Tensor
    uniform_Y: Tensor
    more_Y: Tensor


def score_rows(inputs: ScoreInputs) -> ScoredRows:
    """See `smc.executor.select.score_rows`."""
    plan, drafted, target = inputs.plan.arrays, inputs.drafted, contiguous(inputs.target)
    room = Room(inputs.state.device)
    verified = contiguous(inputs.verified.alone)
    (batch_size, q), groups = verified.blocks.tokens_AQ.shape, len(plan.first_G)
    (rows, block), given = drafted.tokens_XK.shape, target.candidate_tokens
    width = 1 if given is None else given.share_RC.shape[1]
    share_XC = room.floats(rows, width)
    out = ScoredRows(
        root_X=room.longs(rows),
        source=SourceRows(
            # Without candidate tokens a row is its own candidate.
            candidates=CandidateTokens(room.longs(rows, 1), share_XC, share_XC)
            if given is None
            else CandidateTokens(given.token_RC, given.logq_RC, share_XC),
            mass_R=room.doubles(rows),
            there_R=room.bools(rows),
            groups=Spans(room.ints(groups), room.ints(groups)),
        ),
        alive_A=room.bools(batch_size),
        target_nan_G=room.bools(groups),
        draft_nan_G=room.bools(groups),
        own_size_G=room.ints(groups),
        keys_G=RoundKeys(room.longs(groups), room.longs(groups)),
    )
    _score_rows[(triton.cdiv(rows, ROWS) + groups,)](
        plan, inputs.state.alive_S, verified, drafted, target, contiguous(inputs.matched), out,
        Sizes(batch_size, groups, rows),
        F=rows // batch_size, K=block, Q=q, C=width, BLOCK_X=ROWS, BLOCK_Q=triton.next_power_of_2(max(q, block)),
        BLOCK_C=triton.next_power_of_2(width), LOOKAHEAD=inputs.lookahead,
        # The reference rounds a product before it subtracts.
        enable_fp_fusion=False, num_warps=4,
    )  # fmt: skip
    return out


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
    """As `smc.algorithm.selection.select`, for groups of up to MAX_PARTICLES batch indices."""
    (batch_size, branches), count, room = candidates_AF.shape, len(seed_G), Room(candidates_AF.device)
    out = Selection(
        NextParticles(
            ancestor_A=room.longs(batch_size),
            row_A=room.longs(batch_size),
            alive_A=room.bools(batch_size),
            logw_A=room.doubles(batch_size),
        ),
        SelectionStatistics(
            log_z_G=room.doubles(count),
            ess_G=room.doubles(count),
            resampled_G=room.bools(count),
            collapsed_G=room.bools(count),
        ),
    )
    _select[(programs(batch_size, count),)](
        candidates_AF.contiguous(), alive_A.contiguous(), groups, threshold_G, scheme_G, seed_G, round_G, out,
        SelectScratch(*(room.doubles(batch_size * branches) for _ in SelectScratch._fields)), branches, count,
        batch_size,
        BLOCK_N=MAX_PARTICLES, BLOCK_F=triton.next_power_of_2(branches),
        # The reference rounds a product before it subtracts.
        enable_fp_fusion=False, num_warps=warps,
    )  # fmt: skip
    return out


@one_variant()
def _score_rows(
    plan, alive_S, verified, drafted, target, matched, out, sizes,
    F: tl.constexpr, K: tl.constexpr, Q: tl.constexpr, C: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_C: tl.constexpr, LOOKAHEAD: tl.constexpr,
):  # fmt: skip
    program, row_programs, rows = tl.program_id(0), tl.cdiv(sizes.rows, BLOCK_X), sizes.rows
    if program >= row_programs:
        _score_group(
            program - row_programs, plan, verified, drafted, target, matched, out, sizes, F, K, Q, BLOCK_X, BLOCK_Q,
            LOOKAHEAD
        )  # fmt: skip
        return
    blocks = verified.blocks
    x = program * BLOCK_X + tl.arange(0, BLOCK_X)
    inside, index = x < rows, x // F
    is_own = inside & (x % F == 0)
    slot = tl.load(plan.slot_A + index, mask=is_own, other=0)
    tl.store(out.alive_A + index, tl.load(alive_S + slot, mask=is_own, other=0) != 0, mask=is_own)
    decoding = tl.load(plan.decoding_G + tl.load(plan.group_A + index, mask=inside, other=0))
    if LOOKAHEAD:
        root = tl.load(drafted.root_X + x, mask=inside, other=0)
        block = root
    else:
        root = tl.load(blocks.origin_A + x, mask=inside, other=0).to(tl.int32)
        block = x
    share = tl.load(drafted.share_X + x, mask=inside, other=0.0).to(tl.float64)
    is_open = tl.load(blocks.open_A + block, mask=inside, other=0) != 0
    exists = tl.load(blocks.alive_A + block, mask=inside, other=0) != 0
    alpha = tl.load(plan.alpha_A + block, mask=inside, other=1.0)
    mass = tl.load(blocks.logw_A + block, mask=inside, other=0.0)
    mass += _block_weight(blocks, verified.logp_AQ, block, inside, alpha, Q, BLOCK_Q)
    token = tl.load(drafted.tokens_XK + x * K, mask=inside, other=0)
    if LOOKAHEAD:
        logq = tl.load(drafted.logq_XK + x * K, mask=inside, other=0.0).to(tl.float64)
        logp = tl.zeros_like(logq)
        if target.logp_X is not None:
            logp = tl.load(target.logp_X + x, mask=inside, other=0.0).to(tl.float64)
        mass = mass + tl.where(is_open, alpha * logp - logq, 0.0) + share
        exists = exists & (share > NONE)
    elif target.log_z_A is not None:
        mass += tl.where(is_open, tl.load(target.log_z_A + x, mask=inside, other=0.0).to(tl.float64), 0.0)
    if matched is not None:
        cut = tl.load(drafted.cut_X + x, mask=inside, other=0)
        agrees = _agrees(
            matched, blocks, verified.drawn_AQ, index, root, cut, token, is_open, inside, Q, BLOCK_Q, LOOKAHEAD
        )
        exists = exists & (agrees | (is_exact(decoding) == 0))
        mass = tl.where(is_exact(decoding), tl.where(share == share, share, 0.0), mass)
    tl.store(out.root_X + x, root.to(tl.int64), mask=inside)
    tl.store(out.source.mass_R + x, tl.where(mass == mass, mass, NONE), mask=inside)
    tl.store(out.source.there_R + x, exists, mask=inside)
    c = tl.arange(0, BLOCK_C)
    if target.candidate_tokens is not None:
        # A row that takes no token is its own candidate.
        at, is_share = x[:, None] * C + c[None, :], inside[:, None] & (c < C)[None, :]
        takes = is_open & (is_exact(decoding) == 0)
        candidate_share = tl.load(target.candidate_tokens.share_RC + at, mask=is_share, other=NONE)
        candidate_share = tl.where(takes[:, None], candidate_share, tl.where(c == 0, 0.0, NONE)[None, :])
        tl.store(out.source.candidates.share_RC + at, candidate_share, mask=is_share)
    else:
        tl.store(out.source.candidates.share_RC + x, tl.zeros_like(share).to(tl.float32), mask=inside)
        tl.store(out.source.candidates.token_RC + x, tl.zeros_like(x).to(tl.int64), mask=inside)


@triton.jit
def _block_weight(blocks, logp_AQ, block, inside, alpha, Q: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Return `smc.algorithm.resampling.block_log_weight` of blocks. Their first token is not counted again."""
    q = tl.arange(0, BLOCK_Q)
    count = tl.load(blocks.count_A + block, mask=inside, other=0).to(tl.int32)
    exists = inside[:, None] & (q[None, :] < count[:, None] - 1)
    at = block[:, None] * Q + q[None, :]
    logp = tl.load(logp_AQ + at, mask=exists, other=0.0).to(tl.float64)
    logq = tl.load(blocks.logq_AQ + at + 1, mask=exists, other=0.0).to(tl.float64)
    return tl.sum(tl.where(exists, alpha[:, None] * logp - logq, 0.0), 1)


@triton.jit
def _agrees(
    matched, blocks, drawn_AQ, index, root, cut, token, is_open, inside,
    Q: tl.constexpr, BLOCK_Q: tl.constexpr, LOOKAHEAD: tl.constexpr,
):  # fmt: skip
    """Return, for groups of exact decoding, whether a row begins where a block ceases to match, with the target's own
    draw; in lockstep, whether it is the block that matches longest. Several chains may match, with the same tokens."""
    best = tl.load(matched.best_A + index, mask=inside, other=0).to(tl.int32)
    if LOOKAHEAD:
        right = tl.load(matched.right_A + index, mask=inside, other=1).to(tl.int32)
        is_alive = tl.load(blocks.alive_A + root, mask=inside, other=0) != 0
        ends = tl.load(blocks.count_A + root, mask=inside, other=0).to(tl.int32) - cut
        matches = (right == ends) & is_alive
        q = tl.arange(0, BLOCK_Q)[None, :]
        compares = inside[:, None] & (q < right[:, None])
        of_root = tl.load(blocks.tokens_AQ + root[:, None] * Q + q, mask=compares, other=0)
        of_best = tl.load(blocks.tokens_AQ + best[:, None] * Q + q, mask=compares, other=0)
        matches = matches & (tl.max((of_root != of_best).to(tl.int32), 1) == 0)
        drawn = tl.load(drawn_AQ + best * Q + right - 1, mask=inside, other=-1)
        return matches & (token == drawn) & (is_open | (cut > 0))
    else:
        return index == best


@triton.jit
def _score_group(
    group, plan, verified, drafted, target, matched, out, sizes,
    F: tl.constexpr, K: tl.constexpr, Q: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Q: tl.constexpr,
    LOOKAHEAD: tl.constexpr,
):  # fmt: skip
    """Write the bounds and random numbers of a group, and whether it has NaN."""
    blocks = verified.blocks
    first, size = tl.load(plan.first_G + group).to(tl.int32), tl.load(plan.size_G + group).to(tl.int32)
    decoding, lead = tl.load(plan.decoding_G + group), tl.minimum(first, sizes.batch_size - 1)
    tl.store(out.own_size_G + group, tl.where(is_separate(decoding), size, 0))
    tl.store(out.source.groups.first_G + group, first * F)
    tl.store(out.source.groups.size_G + group, size * F)
    tl.store(out.keys_G.seed + group, tl.load(plan.seed_A + lead))
    tl.store(out.keys_G.round + group, tl.load(plan.round_A + lead))
    target_nan, draft_nan = 0, 0
    q = tl.arange(0, BLOCK_Q)
    for begin in range(0, size, BLOCK_X):
        index = begin + tl.arange(0, BLOCK_X)
        inside, index = index < size, first + index
        count = tl.load(blocks.count_A + index, mask=inside, other=0)
        exists = inside[:, None] & (q[None, :] < count[:, None]) & (q < Q)[None, :]
        logq = tl.load(blocks.logq_AQ + index[:, None] * Q + q[None, :], mask=exists, other=0.0)
        nan = tl.load(verified.nan_A + index, mask=inside, other=0).to(tl.int32)
        draft_nan = tl.maximum(draft_nan, tl.max(tl.max((logq != logq).to(tl.int32), 1), 0))
        target_nan = tl.maximum(target_nan, tl.max(nan, 0))
        if not LOOKAHEAD and target.log_z_A is not None:
            log_z = tl.load(target.log_z_A + index, mask=inside, other=0.0)
            is_open = tl.load(blocks.open_A + index, mask=inside, other=0) != 0
            target_nan = tl.maximum(target_nan, tl.max((is_open & (log_z != log_z)).to(tl.int32), 0))
    for begin in range(0, size * F, BLOCK_X):
        x = begin + tl.arange(0, BLOCK_X)
        inside, x = x < size * F, first * F + x
        if LOOKAHEAD:
            root = tl.load(drafted.root_X + x, mask=inside, other=0)
            is_open = inside & (tl.load(blocks.open_A + root, mask=inside, other=0) != 0)
            logq = tl.load(drafted.logq_XK + x * K, mask=is_open, other=0.0)
            draft_nan = tl.maximum(draft_nan, tl.max((logq != logq).to(tl.int32), 0))
            if target.logp_X is not None:
                logp = tl.load(target.logp_X + x, mask=is_open, other=0.0)
                target_nan = tl.maximum(target_nan, tl.max((logp != logp).to(tl.int32), 0))
        # Rows of NaN have been replaced by others, whose log q the draft has set to NaN.
        is_token = (decoding == DISTINCT) & inside[None, :] & (q < K)[:, None]
        logq_QX = tl.load(drafted.logq_XK + x[None, :] * K + q[:, None], mask=is_token, other=0.0)
        draft_nan = tl.maximum(draft_nan, tl.max(tl.max((logq_QX != logq_QX).to(tl.int32), 0), 0))
    if matched is not None:
        # In exact decoding NaN of the draft does not matter, and NaN of the target only after tokens that match.
        is_best = is_exact(decoding) & (size > 0)
        best, right = tl.load(matched.best_A + lead).to(tl.int32), tl.load(matched.right_A + lead)
        is_read = is_best & (q < right) & (q < Q)
        nan_Q = tl.load(verified.nan_AQ + best * Q + q, mask=is_read, other=0).to(tl.int32)
        target_nan = tl.where(is_best, tl.max(nan_Q, 0), target_nan)
        draft_nan = tl.where(is_best, 0, draft_nan)
    tl.store(out.target_nan_G + group, target_nan != 0)
    tl.store(out.draft_nan_G + group, draft_nan != 0)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _cumulative(weight, axis: tl.constexpr):
    """Return a cumulative sum that never falls and is constant exactly where the weight is zero, however the parallel
    scan rounds."""
    return tl.associative_scan(tl.where(weight > 0, tl.cumsum(weight, axis), 0.0), axis, _larger)


@triton.jit
def _search(sorted_U, value_Z, SIZE: tl.constexpr, INCLUSIVE: tl.constexpr):
    """Count how many of SIZE (a power of two) sorted entries are below each value, or with INCLUSIVE not above it."""
    below_Z = tl.zeros_like(value_Z).to(tl.int32)
    for i in tl.static_range(12):
        if SIZE >> i > 0:
            next_Z = below_Z + (SIZE >> i)
            probe_Z = tl.gather(sorted_U, tl.minimum(next_Z, SIZE) - 1, 0)
            passed_Z = (probe_Z <= value_Z) if INCLUSIVE else (probe_Z < value_Z)
            below_Z = tl.where(passed_Z & (next_Z <= SIZE), next_Z, below_Z)
    return below_Z


@triton.jit
def _sort(value_U, SIZE: tl.constexpr, MOST: tl.constexpr):
    """Sort SIZE numbers up to MOST, ascending. They are few enough to compare all with all."""
    reached_U = tl.sum((value_U[None, :] <= value_U[:, None]).to(tl.int32), 1)
    is_reached_UZ = reached_U[:, None] > tl.arange(0, SIZE)[None, :]
    return tl.min(tl.where(is_reached_UZ, value_U[:, None], MOST), 0)


@triton.jit
def draw_uniforms(seed, position_X, rounds):
    """Return `smc.philox.uniforms` of one seed and round at the given positions."""
    high, low, _, _ = tl.philox(seed, position_X.to(tl.uint32), 0, rounds.to(tl.uint32), PURPOSE)
    return ((high.to(tl.int64) << 21) | (low.to(tl.int64) >> 11)).to(tl.float64) * 2.0**-53


@triton.jit
def _shares(log_NF, highest):
    """Return weights over their sum, from logarithms whose largest is `highest`; zeros if all weights are zero or one
    is NaN."""
    power_NF = tl.exp(log_NF - finite(highest))
    share_NF = power_NF / tl.sum(power_NF)
    return tl.where(share_NF == share_NF, share_NF, 0.0)


@triton.jit
def _family_weights(candidates_NF):
    """Return each particle's largest candidate and its family's log-weight; then the log of the sum of all weights, and
    the sum of the families' squared shares: 0 if there is no weight, or NaN."""
    # The value subtracted must be the largest that occurs: subtracting 0 would round all weights far below it to zero.
    highest_N = tl.max(candidates_NF, 1)
    base_N = finite(highest_N)
    family_N = base_N + tl.log(tl.sum(tl.exp(candidates_NF - base_N[:, None]), 1))
    highest = tl.max(family_N, 0)
    base = finite(highest)
    log_sum = base + tl.log(tl.sum(tl.exp(family_N - base), 0))
    share_N = _shares(family_N, highest)
    return highest_N, family_N, log_sum, tl.sum(share_N * share_N, 0)


@triton.jit
def _srinivasan(expected_NF, uniform_NF, at_NF, inside_NF, draws, begin, end, scratch):
    """Compute `smc.algorithm.resampling.ssp`: what each candidate gets beyond the whole part of its expectation.

    The algorithm is sequential: it takes one candidate after another in memory, from `begin` to `end`; at_NF is each
    candidate's index."""
    tl.store(scratch.expected_Y + at_NF, expected_NF, mask=inside_NF)
    tl.store(scratch.uniform_Y + at_NF, uniform_NF, mask=inside_NF)
    tl.store(scratch.more_Y + at_NF, tl.zeros_like(expected_NF), mask=inside_NF)
    tl.debug_barrier()
    left = draws.to(tl.float64) - tl.sum(tl.floor(expected_NF))
    open_at = begin
    open_part = tl.load(scratch.expected_Y + begin)
    open_part -= tl.floor(open_part)
    for m in range(begin + 1, end):
        part = tl.load(scratch.expected_Y + m)
        part -= tl.floor(part)
        uniform = tl.load(scratch.uniform_Y + m)
        total = open_part + part
        is_whole = total >= 1
        new_is_open = tl.where(is_whole, uniform * (2 - total) >= 1 - open_part, uniform * total < part)
        tl.store(scratch.more_Y + tl.where(new_is_open, open_at, m), total * 0 + 1, mask=is_whole)
        left -= is_whole.to(tl.float64)
        open_at = tl.where(new_is_open, m, open_at)
        open_part = tl.where(is_whole, total - 1, total)
    tl.store(scratch.more_Y + open_at, left)
    tl.debug_barrier()
    return tl.load(scratch.more_Y + at_NF, mask=inside_NF, other=0.0)


@triton.jit
def _draw(weight_NF, sure_NF, is_rest, scheme, draws, last, seed, rounds, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the chosen candidates, ascending: `sure` copies of each, and for the other draws those under the scheme's
    points; then BLOCK_M as padding.

    With `is_rest`, points fall on what the sure copies leave of the expectation."""
    p = tl.arange(0, BLOCK_N)
    sure_Y = tl.reshape(sure_NF.to(tl.int32), (BLOCK_M,))
    left = draws - tl.sum(sure_Y, 0)
    fall_NF = tl.where(is_rest, weight_NF * draws.to(tl.float64) - sure_NF, weight_NF)
    cumulative_Y = _cumulative(tl.reshape(fall_NF, (BLOCK_M,)), 0)
    uniform_P = draw_uniforms(seed, p, rounds)
    shift_P = tl.where(scheme == SYSTEMATIC, tl.sum(tl.where(p == 0, uniform_P, 0.0), 0), uniform_P)
    is_even = (scheme == SYSTEMATIC) | (scheme == STRATIFIED)
    point_P = tl.where(is_even, (p.to(tl.float64) + shift_P) / draws.to(tl.float64), uniform_P)
    # A bare constant would be rounded to float32, where it is 1.
    below_one_P = tl.full((BLOCK_N,), 1 - 2.0**-52, tl.float64)
    point_P = tl.minimum(point_P, below_one_P) * tl.max(cumulative_Y, 0)
    drawn_P = tl.minimum(_search(cumulative_Y, point_P, BLOCK_M, True), last)
    copied_P = tl.minimum(_search(tl.cumsum(sure_Y, 0), p - left, BLOCK_M, True), last)
    chosen_P = tl.where(p < left, drawn_P, copied_P)
    return _sort(tl.where(p < draws, chosen_P, BLOCK_M), BLOCK_N, BLOCK_M)


@triton.jit
def _assign_slots(chosen_P, size, draws, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr):
    """As `smc.algorithm.resampling.assign_slots`, from the sorted list of chosen candidates. Returns the candidate with
    which each slot continues, and whether it has one."""
    slot_N = tl.arange(0, BLOCK_N)
    family_P = chosen_P // BLOCK_F
    before_P = tl.gather(family_P, tl.maximum(slot_N - 1, 0), 0)
    copy_P = (slot_N > 0) & (slot_N < draws) & (family_P == before_P)
    copies_P = tl.cumsum(copy_P.to(tl.int32), 0)
    first_N = tl.minimum(_search(family_P, slot_N, BLOCK_N, False), BLOCK_N - 1)
    survives_N = tl.gather(family_P, first_N, 0) == slot_N
    free_N = (slot_N < size) & (survives_N == 0)
    rank_N = tl.cumsum(free_N.to(tl.int32), 0)
    # The r-th free slot takes the r-th further copy, at the first point up to which there are r copies.
    filler_N = tl.minimum(_search(copies_P, rank_N, BLOCK_N, False), BLOCK_N - 1)
    taken_N = tl.gather(chosen_P, tl.where(free_N, filler_N, first_N), 0)
    held_N = survives_N | (free_N & (rank_N <= tl.max(copies_P, 0)))
    return tl.where(held_N, taken_N, slot_N * BLOCK_F), held_N


@triton.jit
def _own_branch(candidates_NF, highest_N, uniform_N, branches):
    """As `smc.algorithm.selection.draw_branch`: return one branch of each particle, drawn by its share of the family's
    weight."""
    power_NF = tl.exp(candidates_NF - finite(highest_N)[:, None])
    total_N = tl.sum(power_NF, 1)
    cumulative_NF = _cumulative(power_NF / total_N[:, None], 1)
    point_N = uniform_N * tl.max(cumulative_NF, 1)
    passed_N = tl.sum((cumulative_NF <= point_N[:, None]).to(tl.int32), 1)
    return tl.where(total_N > 0, tl.minimum(passed_N, branches - 1), 0)


@triton.jit
def _resample(
    candidates_NF, highest, at_NF, inside_NF, size, draws, scheme, seed, rounds, begin, branches, scratch,
    BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Return what every slot continues with after `draws` draws by the scheme, and whether it has a particle."""
    weight_NF = _shares(candidates_NF, highest)
    expected_NF = weight_NF * draws.to(tl.float64)
    sure_NF = tl.where((scheme == RESIDUAL) | (scheme == SSP), tl.floor(expected_NF), 0.0)
    if scheme == SSP:
        uniform_NF = draw_uniforms(seed, at_NF - begin, rounds)
        end = begin + size * branches
        sure_NF += _srinivasan(expected_NF, uniform_NF, at_NF, inside_NF, draws, begin, end, scratch)
    last = (size - 1) * BLOCK_F + branches - 1
    chosen_P = _draw(
        weight_NF, sure_NF, scheme == RESIDUAL, scheme, draws, last, seed, rounds, BLOCK_N, BLOCK_N * BLOCK_F
    )
    return _assign_slots(chosen_P, size, draws, BLOCK_N, BLOCK_F)


@one_variant()
def _select(
    candidates_AF, alive_A, groups, threshold_G, scheme_G, seed_G, round_G, out, scratch, branches, count, batch_size,
    BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    group, next_, statistics = tl.program_id(0), out.particles, out.statistics
    if group >= count:
        index_N, exists_N, _, _ = own_indices(groups.spans.first_G, groups.spans.size_G, count, batch_size, BLOCK_N)
        tl.store(next_.ancestor_A + index_N, index_N.to(tl.int64), mask=exists_N)
        tl.store(next_.row_A + index_N, index_N.to(tl.int64) * branches, mask=exists_N)
        tl.store(next_.logw_A + index_N, tl.full((BLOCK_N,), -float("inf"), tl.float64), mask=exists_N)
        tl.store(next_.alive_A + index_N, index_N < 0, mask=exists_N)
        return
    first, size = tl.load(groups.spans.first_G + group), tl.load(groups.spans.size_G + group)
    if size == 0:
        tl.store(statistics.log_z_G + group, 0.0)
        tl.store(statistics.ess_G + group, 0.0)
        tl.store(statistics.resampled_G + group, False)
        tl.store(statistics.collapsed_G + group, False)
        return
    particles, draws = tl.load(groups.count_G + group), tl.load(groups.next_count_G + group)
    seed, rounds = tl.load(seed_G + group), tl.load(round_G + group)
    n, f = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_F)
    exists_N, index_N = n < size, first + n
    alive_N = tl.load(alive_A + index_N, mask=exists_N, other=0) != 0
    inside_NF = exists_N[:, None] & (f < branches)[None, :]
    at_NF = index_N[:, None] * branches + f[None, :]
    valid_NF = inside_NF & alive_N[:, None]
    candidates_NF = tl.load(candidates_AF + at_NF, mask=valid_NF, other=-float("inf")).to(tl.float64)
    highest_N, family_N, log_sum, squares = _family_weights(candidates_NF)
    has_weight = squares > 0
    ess = tl.where(has_weight, 1.0 / squares, 0.0)
    is_low = ess < tl.load(threshold_G + group).to(tl.float64) * particles.to(tl.float64) * KEEP
    resampled = (is_low | (draws != particles)) & has_weight
    if resampled:
        taken_N, held_N = _resample(
            candidates_NF, tl.max(highest_N, 0), at_NF, inside_NF, size, draws, tl.load(scheme_G + group),
            seed, rounds, first * branches, branches, scratch, BLOCK_N, BLOCK_F,
        )  # fmt: skip
    else:
        uniform_N = draw_uniforms(seed, n + FIRST_BRANCH, rounds)
        taken_N = n * BLOCK_F + _own_branch(candidates_NF, highest_N, uniform_N, branches)
        held_N = alive_N & (tl.cumsum(alive_N.to(tl.int32), 0) <= tl.where(has_weight, BLOCK_N, draws))
    reset = resampled | (squares == 0)
    ancestor_N = (first + taken_N // BLOCK_F).to(tl.int64)
    tl.store(next_.ancestor_A + index_N, ancestor_N, mask=exists_N)
    tl.store(next_.row_A + index_N, ancestor_N * branches + taken_N % BLOCK_F, mask=exists_N)
    tl.store(next_.logw_A + index_N, tl.where(held_N, tl.where(reset, 0.0, family_N), -float("inf")), mask=exists_N)
    tl.store(next_.alive_A + index_N, held_N, mask=exists_N)
    log_mean = log_sum - tl.log(tl.maximum(particles, 1).to(tl.float64))
    tl.store(statistics.log_z_G + group, tl.where(reset, log_mean, 0.0))
    tl.store(statistics.ess_G + group, ess)
    tl.store(statistics.resampled_G + group, resampled)
    tl.store(statistics.collapsed_G + group, squares == 0)
