"""The end of the select stage, in one launch: the next state of every batch index, and the report for the host. The
Triton form of `smc.executor.select.apply_selection`.

A program has the batch indices of one group, or batch indices of no group. The host reads nothing, and the grid follows
from shapes alone, so the launch can be captured in a CUDA graph."""

from __future__ import annotations

import triton
import triton.language as tl

from smc.algorithm.expansion import SelectedTrees
from smc.algorithm.selection import PREFIX_POSITION, Selection, SelectionStatistics
from smc.api.limits import MAX_PARTICLES
from smc.arrays import Room, contiguous
from smc.kernels.decodings import is_exact, is_separate
from smc.kernels.launch import one_variant, own_indices, programs
from smc.kernels.select import draw_uniforms
from smc.kernels.stops import DONE, after, after_all
from smc.round.tensors import AppliedSelection, Lineage, RoundResult, RoundSelection, ScoredRows, ScoreInputs

NONE = tl.constexpr(-float("inf"))
PREFIX = tl.constexpr(PREFIX_POSITION)


def apply_selection(
    inputs: ScoreInputs, scored: ScoredRows, own: Selection | None, trees: SelectedTrees | None
) -> AppliedSelection:
    """See `smc.executor.select.apply_selection`."""
    plan, drafted, state, room = inputs.plan.arrays, inputs.drafted, inputs.state, Room(inputs.state.device)
    verified = contiguous(inputs.verified.alone)
    (batch_size, q), groups = verified.blocks.tokens_AQ.shape, len(plan.first_G)
    (rows, block), scored = drafted.tokens_XK.shape, contiguous(scored)
    # In look-ahead the next block, of which this one may have had fewer tokens.
    grown = block if inputs.lookahead else q
    memory, selection = RoundSelection.memory(batch_size).allocate(state.device)
    result = RoundResult(
        selection=selection,
        grown_AQ=room.longs(batch_size, grown),
        logq_AQ=room.floats(batch_size, grown),
        logp_AQ=room.floats(batch_size, q),
        first_logp_A=room.floats(batch_size),
        raw_logp_AQ=room.floats(batch_size, 0),
        statistics=SelectionStatistics(
            log_z_G=room.doubles(groups),
            ess_G=room.doubles(groups),
            resampled_G=room.bools(groups),
            collapsed_G=room.bools(groups),
        ),
        draft_nan_G=scored.draft_nan_G,
        target_nan_G=scored.target_nan_G,
        hit_G=room.bools(groups),
        lineage=Lineage(
            path_AB=room.ints(batch_size, q), kept_A=room.ints(batch_size), dropped_A=room.ints(batch_size)
        ),
    )
    _apply_selection[(programs(batch_size, groups),)](
        plan, state, verified, drafted, contiguous(inputs.target), scored, contiguous(inputs.matched),
        contiguous(own), contiguous(trees), result, groups, batch_size,
        F=rows // batch_size, K=block, Q=q, C=scored.source.candidates.token_RC.shape[1], BLOCK_N=MAX_PARTICLES,
        BLOCK_Q=triton.next_power_of_2(max(q, grown)), LOOKAHEAD=inputs.lookahead, num_warps=4,
    )  # fmt: skip
    return AppliedSelection(memory, result)


@one_variant()
def _apply_selection(
    plan, slots, verified, drafted, target, scored, matched, own, trees, out, groups, batch_size,
    F: tl.constexpr, K: tl.constexpr, Q: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr,
    LOOKAHEAD: tl.constexpr,
):  # fmt: skip
    blocks = verified.blocks
    index, exists, group, is_group = own_indices(plan.first_G, plan.size_G, groups, batch_size, BLOCK_N)
    decoding = tl.load(plan.decoding_G + tl.load(plan.group_A + index, mask=exists, other=0), mask=exists, other=0)
    row, ancestor, alive = tl.zeros_like(index), tl.zeros_like(index), tl.zeros_like(index) != 0
    bonus, logw, misses = tl.full((BLOCK_N,), -1, tl.int64), tl.full((BLOCK_N,), NONE, tl.float64), alive
    logp, block = tl.full((BLOCK_N,), float("nan"), tl.float32), index
    if own is not None:
        mine = exists & is_separate(decoding) if trees is not None else exists
        row, ancestor, alive, logw, bonus, logp = _of_own(
            mine, index, own.particles, target, scored.root_X, blocks.open_A, LOOKAHEAD
        )
        block = ancestor
    if trees is not None:
        theirs = exists & (is_separate(decoding) == 0) if own is not None else exists
        tree_row, tree_ancestor, tree_alive, tree_logw, tree_bonus, tree_logp = _of_trees(
            theirs, index, trees, target, scored, blocks.open_A, C, LOOKAHEAD
        )
        tree_block = tree_ancestor if LOOKAHEAD else tree_row
        row, block = tl.where(theirs, tree_row, row), tl.where(theirs, tree_block, block)
        ancestor, alive = tl.where(theirs, tree_ancestor, ancestor), tl.where(theirs, tree_alive, alive)
        bonus, logp = tl.where(theirs, tree_bonus, bonus), tl.where(theirs, tree_logp, logp)
        logw = tl.where(theirs, tree_logw, logw)
    right = tl.full((BLOCK_N,), 2**30, tl.int32)
    if matched is not None:
        exact, any_alive = exists & is_exact(decoding), tl.max((exists & alive).to(tl.int32), 0) > 0
        best = tl.load(matched.best_A + index, mask=exact, other=0).to(tl.int32)
        right = tl.load(matched.right_A + index, mask=exact, other=2**30).to(tl.int32)
        misses = exact & is_group & (any_alive == 0)
        best_ended = tl.load(blocks.ended_A + best, mask=exact, other=0) != 0
        ended = best_ended & (right == tl.load(blocks.count_A + best, mask=exact, other=0))
        ancestor = tl.where(misses, tl.load(blocks.origin_A + best, mask=misses, other=0).to(tl.int32), ancestor)
        draws = (misses if LOOKAHEAD else exact) & (ended == 0)
        drawn = tl.load(verified.drawn_AQ + best * Q + right - 1, mask=draws, other=-1).to(tl.int64)
        # Nothing follows a block that has ended.
        drawn_logp = tl.load(verified.logp_AQ + best * Q + right - 1, mask=exact & (ended == 0), other=float("nan"))
        bonus, logp = tl.where(exact, drawn, bonus), tl.where(exact, drawn_logp, logp)
        block, alive = tl.where(misses if LOOKAHEAD else exact, best, block), tl.where(misses, index == ancestor, alive)
        logw = tl.where(misses, tl.where(index == ancestor, 0.0, NONE), logw)
        if not LOOKAHEAD:
            row = tl.where(misses, best, row)
    if is_group & _has_collapsed(group, plan, own, trees):
        first, group_decoding = tl.load(plan.first_G + group).to(tl.int32), tl.load(plan.decoding_G + group)
        block, right = _surviving_prefix(index, exists, group, first, plan, verified, Q, BLOCK_Q)
        origin = tl.load(blocks.origin_A + block).to(tl.int32)
        is_over = (tl.load(blocks.ended_A + block) != 0) & (right == tl.load(blocks.count_A + block))
        is_copy = index - first < tl.load(plan.next_count_G + group)
        alive = exists & tl.where(is_separate(group_decoding), is_copy, index == origin)
        follows, at = exists & (is_over == 0), block * Q + right - 1
        bonus = tl.load(verified.drawn_AQ + at, mask=follows, other=-1).to(tl.int64)
        logp = tl.load(verified.drawn_logp_AQ + at, mask=follows, other=float("nan"))
        ancestor, logw, misses = origin, tl.where(alive, tl.zeros_like(logw), NONE), exists
        if not LOOKAHEAD:
            row = block
    count = tl.load(blocks.count_A + block, mask=exists, other=1).to(tl.int32)
    kept = tl.minimum(right, count)
    slot = tl.load(plan.slot_A + ancestor, mask=exists, other=0)
    entry = tl.load(slots.entry_S + slot, mask=exists, other=0)
    text = tl.load(slots.text_S + slot, mask=exists, other=0).to(tl.int32)
    end = tl.load(slots.end_S + slot, mask=exists, other=0)
    pending = tl.load(slots.pending_S + slot, mask=exists, other=0)
    early = tl.load(slots.least_S + slot, mask=exists, other=0) - (end - pending)
    text, _ = after_all(text, blocks.tokens_AQ + block * Q, 1, entry, exists, kept, early, slots.stops, Q)
    room = tl.load(slots.limit_S + slot, mask=exists, other=0) - (end - pending) - kept
    has_bonus, going = bonus >= 0, exists & (bonus >= 0) & (room > 0)
    last = after(text, bonus, entry, going, kept < early, slots.stops)
    ended = (tl.load(blocks.ended_A + block, mask=exists, other=1) != 0) & (kept == count)
    taken = kept - 1
    if LOOKAHEAD:
        goes_on = exists & (misses == 0) & (ended == 0)
        taken = tl.load(drafted.count_X + row, mask=goes_on, other=0)
        ended = ended | (tl.load(drafted.ended_X + row, mask=goes_on, other=0) != 0)
    ended = tl.where(has_bonus, (room <= 1) | (last == DONE), ended) | (alive == 0)
    cut = count - kept if LOOKAHEAD else tl.zeros_like(count)
    run = tl.minimum(tl.load(blocks.run_A + block, mask=exists, other=0).to(tl.int32), kept)
    next_, selection = out.selection.particles, out.selection
    tl.store(next_.ancestor_A + index, ancestor.to(tl.int64), mask=exists)
    tl.store(next_.row_A + index, row.to(tl.int64), mask=exists)
    tl.store(next_.alive_A + index, alive, mask=exists)
    tl.store(next_.logw_A + index, logw, mask=exists)
    tl.store(selection.taken_A + index, taken.to(tl.int64), mask=exists)
    tl.store(selection.cut_A + index, cut.to(tl.int64), mask=exists)
    tl.store(selection.bonus_A + index, bonus, mask=exists)
    tl.store(selection.ended_A + index, ended, mask=exists)
    tl.store(selection.text_A + index, text.to(tl.int64), mask=exists)
    tl.store(out.first_logp_A + index, logp, mask=exists)
    tl.store(out.lineage.kept_A + index, run, mask=exists)
    tl.store(out.lineage.dropped_A + index, tl.zeros_like(run), mask=exists)
    _write_tokens(index, exists, row, block, kept, bonus, plan, verified, drafted, out, K, Q, BLOCK_Q, LOOKAHEAD)
    if is_group:
        group_decoding, any_bonus = (
            tl.load(plan.decoding_G + group),
            tl.max((exists & has_bonus & alive).to(tl.int32), 0) > 0,
        )
        tl.store(out.hit_G + group, is_exact(group_decoding) & (any_bonus == 0))
        _write_group(group, group_decoding, own, trees, out)


@triton.jit
def _has_collapsed(group, plan, own, trees):
    """Return whether the group has particles, but none with weight."""
    decoding, collapsed = tl.load(plan.decoding_G + group), group < 0
    if own is not None:
        collapsed = collapsed | (is_separate(decoding) & (tl.load(own.statistics.collapsed_G + group) != 0))
    if trees is not None:
        collapsed = collapsed | (
            (is_separate(decoding) == 0) & (is_exact(decoding) == 0) & (tl.load(trees.chosen.collapsed_G + group) != 0)
        )
    return collapsed


@triton.jit
def _surviving_prefix(index, exists, group, first, plan, verified, Q: tl.constexpr, BLOCK_Q: tl.constexpr):
    """As `smc.algorithm.selection.surviving_prefix` for one group: return, for all its batch indices, the block that
    was drawn and how many of its tokens are kept."""
    blocks, q = verified.blocks, tl.arange(0, BLOCK_Q)[None, :]
    at = index[:, None] * Q + q
    has_next = exists[:, None] & (q < tl.load(blocks.count_A + index, mask=exists, other=1)[:, None] - 1)
    alpha = tl.load(plan.alpha_A + index, mask=exists, other=1.0)[:, None]
    logp = tl.load(verified.logp_AQ + at, mask=has_next, other=0.0).to(tl.float64)
    logq = tl.load(blocks.logq_AQ + at + 1, mask=has_next, other=0.0).to(tl.float64)
    step = tl.where(has_next, alpha * logp - logq, 0.0)
    is_dead = has_next & ((step > NONE) == 0)
    survives = tl.cumsum(is_dead.to(tl.int32), 1) == 0
    kept = 1 + tl.sum((survives & has_next).to(tl.int32), 1)
    is_block = exists & (tl.load(blocks.alive_A + index, mask=exists, other=0) != 0)
    weight = tl.load(blocks.logw_A + index, mask=is_block, other=NONE) + tl.sum(tl.where(survives, step, 0.0), 1)
    weight = tl.where(weight == weight, weight, NONE)
    top = tl.max(weight, 0)
    power = tl.where(weight > NONE, tl.exp(weight - tl.where(top > NONE, top, 0.0)), 0.0)
    total, seed = tl.sum(power, 0), tl.load(plan.seed_A + first)
    position = tl.full((1,), PREFIX, tl.int32)
    uniform = tl.sum(draw_uniforms(seed, position, tl.load(plan.round_A + first)), 0)
    pick = tl.sum((exists & (tl.cumsum(power, 0) <= uniform * total)).to(tl.int32), 0)
    size = tl.load(plan.size_G + group).to(tl.int32)
    pick = tl.where(total > 0, tl.minimum(pick, size - 1), 0)
    return index * 0 + first + pick, index * 0 + tl.sum(tl.where(index == first + pick, kept, 0), 0)


@triton.jit
def _of_own(exists, index, particles, target, root_X, open_A, LOOKAHEAD: tl.constexpr):
    """Return for independent particles: row, ancestor, whether alive, log-weight, the target's token after the block,
    and its log p."""
    ancestor = tl.load(particles.ancestor_A + index, mask=exists, other=0).to(tl.int32)
    row = tl.load(particles.row_A + index, mask=exists, other=0).to(tl.int32)
    alive = tl.load(particles.alive_A + index, mask=exists, other=0) != 0
    logw = tl.load(particles.logw_A + index, mask=exists, other=NONE)
    bonus = index.to(tl.int64) * 0 - 1
    if LOOKAHEAD:
        is_open = tl.load(open_A + tl.load(root_X + row, mask=exists, other=0), mask=exists, other=0) != 0
    else:
        is_open = tl.load(open_A + row, mask=exists, other=0) != 0
        bonus = tl.load(target.bonus_A + row, mask=exists & is_open, other=-1).to(tl.int64)
    logp = tl.load(target.logp_X + row, mask=exists & is_open, other=float("nan"))
    return row, ancestor, alive, logw, bonus, logp


@triton.jit
def _of_trees(exists, index, trees, target, scored, open_A, C: tl.constexpr, LOOKAHEAD: tl.constexpr):
    """Return the same as `_of_own` for distinct particles and exact decoding, with the candidate token that was
    chosen."""
    pick = tl.load(trees.selected_A + index, mask=exists, other=0)
    alive = tl.load(trees.alive_A + index, mask=exists, other=0) != 0
    row = tl.load(trees.chosen.parent_X + pick, mask=exists, other=0).to(tl.int32)
    ancestor = tl.load(scored.root_X + row, mask=exists, other=0).to(tl.int32)
    logw = tl.load(trees.chosen.mass_X + pick, mask=exists & alive, other=NONE)
    bonus, logp = index.to(tl.int64) * 0 - 1, index.to(tl.float32) * 0 + float("nan")
    is_open = exists & (tl.load(open_A + (ancestor if LOOKAHEAD else row), mask=exists, other=0) != 0)
    if target.candidate_logp_AC is not None:
        at = row * C + tl.load(trees.chosen.candidate_X + pick, mask=exists, other=0).to(tl.int32)
        bonus = tl.load(scored.source.candidates.token_RC + at, mask=is_open, other=-1).to(tl.int64)
        logp = tl.load(target.candidate_logp_AC + at, mask=is_open, other=float("nan"))
    elif LOOKAHEAD and target.logp_X is not None:
        logp = tl.load(target.logp_X + row, mask=is_open, other=float("nan"))
    return row, ancestor, alive, logw, bonus, logp


@triton.jit
def _write_tokens(
    index, exists, row, block, kept, bonus, plan, verified, drafted, out,
    K: tl.constexpr, Q: tl.constexpr, BLOCK_Q: tl.constexpr, LOOKAHEAD: tl.constexpr,
):  # fmt: skip
    """Write the new tokens, their log q, log p of the block's tokens that are kept, and the pages of tokens that the
    target ran."""
    q = tl.arange(0, BLOCK_Q)[None, :]
    inside, to, of = exists[:, None] & (q < Q), index[:, None] * Q + q, block[:, None] * Q + q
    last, to_grown, is_grown = tl.maximum(bonus, 0)[:, None], to, inside
    if LOOKAHEAD:
        to_grown, is_grown = index[:, None] * K + q, exists[:, None] & (q < K)
        grows = is_grown & (bonus < 0)[:, None]
        token = tl.load(drafted.tokens_XK + row[:, None] * K + q, mask=grows, other=0).to(tl.int64)
        token = tl.where(grows, token, last)
        logq = tl.load(drafted.logq_XK + row[:, None] * K + q, mask=is_grown, other=0.0)
    else:
        # Token q + 1 of the block; the last column wraps around to the first token.
        token = tl.load(verified.blocks.tokens_AQ + block[:, None] * Q + (q + 1) % Q, mask=inside, other=0).to(tl.int64)
        token = tl.where(q == kept[:, None] - 1, last, token)
        logq = to.to(tl.float32) * 0
    logp = tl.load(verified.logp_AQ + of, mask=inside & (q < kept[:, None] - 1), other=float("nan"))
    tl.store(out.grown_AQ + to_grown, token, mask=is_grown)
    tl.store(out.logq_AQ + to_grown, logq, mask=is_grown)
    tl.store(out.logp_AQ + to, logp, mask=inside)
    tl.store(out.lineage.path_AB + to, tl.load(plan.target_pages_AQ + of, mask=inside, other=0), mask=inside)


@triton.jit
def _write_group(group, decoding, own, trees, out):
    """Write the statistics of one group's population."""
    log_z, ess = tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    resampled, collapsed = False, False
    if own is not None:
        log_z, ess = tl.load(own.statistics.log_z_G + group), tl.load(own.statistics.ess_G + group)
        resampled = tl.load(own.statistics.resampled_G + group) != 0
        collapsed = tl.load(own.statistics.collapsed_G + group) != 0
    if trees is not None:
        is_tree = (is_separate(decoding) == 0) if own is not None else (decoding == decoding)
        tree_collapsed = tl.load(trees.chosen.collapsed_G + group) != 0
        ess = tl.where(is_tree, tl.load(trees.chosen.ess_G + group), ess)
        log_z = tl.where(is_tree, tl.where(tree_collapsed, NONE, tl.zeros((), tl.float64)), log_z)
        resampled, collapsed = resampled & (is_tree == 0), tl.where(is_tree, tree_collapsed, collapsed)
    tl.store(out.statistics.log_z_G + group, log_z)
    tl.store(out.statistics.ess_G + group, ess)
    tl.store(out.statistics.resampled_G + group, resampled)
    tl.store(out.statistics.collapsed_G + group, collapsed)
