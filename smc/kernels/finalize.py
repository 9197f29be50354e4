"""The finalize stage of a round, in one launch: the next state of every batch index, and the report for the host. The
Triton form of `smc.executor.finalize`.

A program has the batch indices of one group, or batch indices of no group. The host reads nothing, and the grid follows
from shapes alone, so the launch can be captured in a CUDA graph.

Axes: A batch indices, G groups, X rows (F of each batch index), Q tokens of a block, K tokens of a row, C candidate
tokens of a batch index, N batch indices of a program."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from smc.algorithm.expansion import PopulationKind, SelectedTrees
from smc.algorithm.selection import PREFIX_POSITION, Selection
from smc.algorithm.verification import Matches
from smc.api.limits import MAX_PARTICLES
from smc.kernels.launch import one_variant, own_indices, programs
from smc.kernels.round_tensors import (
    DONE,
    BlockTensors,
    PlanTensors,
    Room,
    Sizes,
    SlotTensors,
    StopTensors,
    after,
    after_all,
    row_tokens,
)
from smc.kernels.select import draw_uniforms
from smc.kernels.verify import VerifyTensors

INDEPENDENT, BEST = tl.constexpr(int(PopulationKind.INDEPENDENT)), tl.constexpr(int(PopulationKind.BEST))
NONE = tl.constexpr(-float("inf"))
PREFIX = tl.constexpr(PREFIX_POSITION)


class CandidateOutputs(NamedTuple):
    """The target's outputs for candidates; None: not computed. See `smc.executor.select.TargetOutputs`."""

    root_X: Tensor
    token_XC: Tensor
    logp_X: Tensor | None
    bonus_A: Tensor | None
    token_logp_AC: Tensor | None
    """Log p of each candidate token."""


class FinalizeOutputs(NamedTuple):
    """Outputs of `finalize`. Below a packed tensor is what each entry of its first axis holds."""

    choice_9A: Tensor
    flags_2A: Tensor
    """Alive, ended."""
    grown_AQ: Tensor
    count_A: Tensor
    logq_AQ: Tensor
    logp_AQ: Tensor
    first_logp_A: Tensor
    values_2G: Tensor
    """Log Z, effective sample size."""
    flags_3G: Tensor
    """Resampled, collapsed, hit."""
    path_AQ: Tensor
    run_2A: Tensor
    """Numbers of pages kept and dropped."""


def finalize(
    plan: PlanTensors,
    blocks: BlockTensors,
    verified: VerifyTensors,
    rows_WX: Tensor,
    slots: SlotTensors,
    tables: StopTensors,
    candidates: CandidateOutputs,
    matched: Matches | None,
    own: Selection | None,
    trees: SelectedTrees | None,
    lookahead: bool,
) -> FinalizeOutputs:
    """See `smc.executor.finalize.finalize`."""
    (batch_size, q), groups, rows = blocks.tokens_AQ.shape, len(plan.first_G), rows_WX.shape[1]
    room = Room(plan.slot_A.device)
    out = FinalizeOutputs(
        choice_9A=room.longs(9, batch_size),
        flags_2A=room.bools(2, batch_size),
        grown_AQ=room.longs(batch_size, q),
        count_A=room.longs(batch_size),
        logq_AQ=room.floats(batch_size, q),
        logp_AQ=room.floats(batch_size, q),
        first_logp_A=room.floats(batch_size),
        values_2G=room.doubles(2, groups),
        flags_3G=room.bools(3, groups),
        path_AQ=room.ints(batch_size, q),
        run_2A=room.ints(2, batch_size),
    )
    _finalize[(programs(batch_size, groups),)](
        plan, slots, tables, blocks, verified, rows_WX, candidates, matched, own, trees, out,
        Sizes(batch_size, groups, rows),
        F=rows // batch_size, K=row_tokens(rows_WX), Q=q, C=candidates.token_XC.shape[1], BLOCK_N=MAX_PARTICLES,
        BLOCK_Q=triton.next_power_of_2(q), LOOKAHEAD=lookahead, num_warps=4,
    )  # fmt: skip
    return out


@one_variant()
def _finalize(
    plan, slots, tables, blocks, verified, rows_WX, candidates, matched, own, trees, out, sizes,
    F: tl.constexpr, K: tl.constexpr, Q: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr,
    LOOKAHEAD: tl.constexpr,
):  # fmt: skip
    batch_size, groups, rows = sizes.batch_size, sizes.groups, sizes.rows
    index, exists, group, is_group = own_indices(plan.first_G, plan.size_G, groups, batch_size, BLOCK_N)
    kind = tl.load(plan.kind_G + tl.load(plan.group_A + index, mask=exists, other=0), mask=exists, other=0)
    row, ancestor, alive = tl.zeros_like(index), tl.zeros_like(index), tl.zeros_like(index) != 0
    bonus, logw, misses = tl.full((BLOCK_N,), -1, tl.int64), tl.full((BLOCK_N,), NONE, tl.float64), alive
    logp, block = tl.full((BLOCK_N,), float("nan"), tl.float32), index
    if own is not None:
        mine = exists & (kind == INDEPENDENT) if trees is not None else exists
        row, ancestor, alive, logw, bonus, logp = _of_own(mine, index, own, candidates, blocks.open_A, F, LOOKAHEAD)
        block = ancestor
    if trees is not None:
        theirs = exists & (kind != INDEPENDENT) if own is not None else exists
        tree_row, tree_ancestor, tree_alive, tree_logw, tree_bonus, tree_logp = _of_trees(
            theirs, index, trees, candidates, blocks.open_A, C, LOOKAHEAD
        )
        tree_block = tree_ancestor if LOOKAHEAD else tree_row
        row, block = tl.where(theirs, tree_row, row), tl.where(theirs, tree_block, block)
        ancestor, alive = tl.where(theirs, tree_ancestor, ancestor), tl.where(theirs, tree_alive, alive)
        bonus, logp = tl.where(theirs, tree_bonus, bonus), tl.where(theirs, tree_logp, logp)
        logw = tl.where(theirs, tree_logw, logw)
    right = tl.full((BLOCK_N,), 2**30, tl.int32)
    if matched is not None:
        exact, any_alive = exists & (kind >= BEST), tl.max((exists & alive).to(tl.int32), 0) > 0
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
        first, group_kind = tl.load(plan.first_G + group).to(tl.int32), tl.load(plan.kind_G + group)
        block, right = _surviving_prefix(index, exists, group, first, plan, blocks, verified, Q, BLOCK_Q)
        origin = tl.load(blocks.origin_A + block).to(tl.int32)
        is_over = (tl.load(blocks.ended_A + block) != 0) & (right == tl.load(blocks.count_A + block))
        is_copy = index - first < tl.load(plan.draws_G + group)
        alive = exists & tl.where(group_kind == INDEPENDENT, is_copy, index == origin)
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
    text, _ = after_all(text, blocks.tokens_AQ + block * Q, 1, entry, exists, kept, early, tables, Q)
    room = tl.load(slots.limit_S + slot, mask=exists, other=0) - (end - pending) - kept
    has_bonus, going = bonus >= 0, exists & (bonus >= 0) & (room > 0)
    last = after(text, bonus, entry, going, kept < early, tables)
    ended = (tl.load(blocks.ended_A + block, mask=exists, other=1) != 0) & (kept == count)
    grown = kept - 1
    if LOOKAHEAD:
        goes_on = exists & (misses == 0) & (ended == 0)
        grown = tl.load(rows_WX + (2 * K + 1) * rows + row, mask=goes_on, other=0)
        ended = ended | (tl.load(rows_WX + (2 * K + 2) * rows + row, mask=goes_on, other=0) > 0)
    ended = tl.where(has_bonus, (room <= 1) | (last == DONE), ended) | (alive == 0)
    cut = count - kept if LOOKAHEAD else tl.zeros_like(count)
    run = tl.minimum(tl.load(blocks.run_A + block, mask=exists, other=0).to(tl.int32), kept)
    to = out.choice_9A + index
    tl.store(to, ancestor.to(tl.int64), mask=exists)
    tl.store(to + batch_size, row.to(tl.int64), mask=exists)
    tl.store(to + 2 * batch_size, grown.to(tl.int64), mask=exists)
    tl.store(to + 3 * batch_size, cut.to(tl.int64), mask=exists)
    tl.store(to + 4 * batch_size, bonus, mask=exists)
    tl.store(to + 5 * batch_size, alive.to(tl.int64), mask=exists)
    tl.store(to + 6 * batch_size, ended.to(tl.int64), mask=exists)
    tl.store(to + 7 * batch_size, text.to(tl.int64), mask=exists)
    tl.store(to + 8 * batch_size, logw.to(tl.int64, bitcast=True), mask=exists)
    tl.store(out.flags_2A + index, alive, mask=exists)
    tl.store(out.flags_2A + batch_size + index, ended, mask=exists)
    tl.store(out.count_A + index, (grown + has_bonus.to(tl.int32)).to(tl.int64), mask=exists)
    tl.store(out.first_logp_A + index, logp, mask=exists)
    tl.store(out.run_2A + index, run, mask=exists)
    tl.store(out.run_2A + batch_size + index, tl.zeros_like(run), mask=exists)
    _write_tokens(
        index, exists, row, block, kept, bonus, plan, blocks, verified, rows_WX, out, rows, K, Q, BLOCK_Q, LOOKAHEAD
    )
    if is_group:
        group_kind, any_bonus = tl.load(plan.kind_G + group), tl.max((exists & has_bonus & alive).to(tl.int32), 0) > 0
        tl.store(out.flags_3G + 2 * groups + group, (group_kind >= BEST) & (any_bonus == 0))
        _write_group(group, groups, group_kind, own, trees, out)


@triton.jit
def _has_collapsed(group, plan, own, trees):
    """Return whether the group has particles, but none with weight."""
    kind, collapsed = tl.load(plan.kind_G + group), group < 0
    if own is not None:
        collapsed = collapsed | ((kind == INDEPENDENT) & (tl.load(own.collapsed_G + group) != 0))
    if trees is not None:
        collapsed = collapsed | (
            (kind != INDEPENDENT) & (kind < BEST) & (tl.load(trees.chosen.collapsed_G + group) != 0)
        )
    return collapsed


@triton.jit
def _surviving_prefix(index, exists, group, first, plan, blocks, verified, Q: tl.constexpr, BLOCK_Q: tl.constexpr):
    """As `smc.algorithm.selection.surviving_prefix` for one group: return, for all its batch indices, the block that
    was drawn and how many of its tokens are kept."""
    q, at = tl.arange(0, BLOCK_Q)[None, :], index[:, None] * Q + tl.arange(0, BLOCK_Q)[None, :]
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
def _of_own(exists, index, own, candidates, open_A, F: tl.constexpr, LOOKAHEAD: tl.constexpr):
    """Return for independent particles: row, ancestor, whether alive, log-weight, the target's token after the block,
    and its log p."""
    ancestor = tl.load(own.ancestor_A + index, mask=exists, other=0).to(tl.int32)
    row = ancestor * F + tl.load(own.branch_A + index, mask=exists, other=0).to(tl.int32)
    alive = tl.load(own.alive_A + index, mask=exists, other=0) != 0
    logw = tl.load(own.logw_A + index, mask=exists, other=NONE)
    bonus = index.to(tl.int64) * 0 - 1
    if LOOKAHEAD:
        is_open = tl.load(open_A + tl.load(candidates.root_X + row, mask=exists, other=0), mask=exists, other=0) != 0
    else:
        is_open = tl.load(open_A + row, mask=exists, other=0) != 0
        bonus = tl.load(candidates.bonus_A + row, mask=exists & is_open, other=-1).to(tl.int64)
    logp = tl.load(candidates.logp_X + row, mask=exists & is_open, other=float("nan"))
    return row, ancestor, alive, logw, bonus, logp


@triton.jit
def _of_trees(exists, index, trees, candidates, open_A, C: tl.constexpr, LOOKAHEAD: tl.constexpr):
    """Return the same as `_of_own` for distinct particles and exact decoding, with the candidate token that was
    chosen."""
    pick = tl.load(trees.pick_A + index, mask=exists, other=0)
    alive = tl.load(trees.alive_A + index, mask=exists, other=0) != 0
    row = tl.load(trees.chosen.parent_X + pick, mask=exists, other=0).to(tl.int32)
    ancestor = tl.load(candidates.root_X + row, mask=exists, other=0).to(tl.int32)
    logw = tl.load(trees.chosen.mass_X + pick, mask=exists & alive, other=NONE)
    bonus, logp = index.to(tl.int64) * 0 - 1, index.to(tl.float32) * 0 + float("nan")
    is_open = exists & (tl.load(open_A + (ancestor if LOOKAHEAD else row), mask=exists, other=0) != 0)
    if candidates.token_logp_AC is not None:
        at = row * C + tl.load(trees.chosen.candidate_X + pick, mask=exists, other=0).to(tl.int32)
        bonus = tl.load(candidates.token_XC + at, mask=is_open, other=-1).to(tl.int64)
        logp = tl.load(candidates.token_logp_AC + at, mask=is_open, other=float("nan"))
    elif LOOKAHEAD and candidates.logp_X is not None:
        logp = tl.load(candidates.logp_X + row, mask=is_open, other=float("nan"))
    return row, ancestor, alive, logw, bonus, logp


@triton.jit
def _write_tokens(
    index, exists, row, block, kept, bonus, plan, blocks, verified, rows_WX, out, rows,
    K: tl.constexpr, Q: tl.constexpr, BLOCK_Q: tl.constexpr, LOOKAHEAD: tl.constexpr,
):  # fmt: skip
    """Write the new tokens, their log q, log p of the block's tokens that are kept, and the pages of tokens that the
    target ran."""
    q = tl.arange(0, BLOCK_Q)[None, :]
    inside, to, of = exists[:, None] & (q < Q), index[:, None] * Q + q, block[:, None] * Q + q
    last = tl.maximum(bonus, 0)[:, None]
    if LOOKAHEAD:
        grows = inside & (bonus < 0)[:, None]
        token = tl.load(rows_WX + q * rows + row[:, None], mask=grows, other=0).to(tl.int64)
        token = tl.where(grows, token, last)
        logq = tl.load(rows_WX + (K + q) * rows + row[:, None], mask=inside, other=0).to(tl.float32, bitcast=True)
    else:
        # Token q + 1 of the block; the last column wraps around to the first token.
        token = tl.load(blocks.tokens_AQ + block[:, None] * Q + (q + 1) % Q, mask=inside, other=0).to(tl.int64)
        token = tl.where(q == kept[:, None] - 1, last, token)
        logq = to.to(tl.float32) * 0
    logp = tl.load(verified.logp_AQ + of, mask=inside & (q < kept[:, None] - 1), other=float("nan"))
    tl.store(out.grown_AQ + to, token, mask=inside)
    tl.store(out.logq_AQ + to, logq, mask=inside)
    tl.store(out.logp_AQ + to, logp, mask=inside)
    tl.store(out.path_AQ + to, tl.load(plan.target_pages_AQ + of, mask=inside, other=0), mask=inside)


@triton.jit
def _write_group(group, groups, kind, own, trees, out):
    """Write the statistics of one group's population."""
    log_z, ess = tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    resampled, collapsed = False, False
    if own is not None:
        log_z, ess = tl.load(own.log_z_G + group), tl.load(own.ess_G + group)
        resampled, collapsed = tl.load(own.resampled_G + group) != 0, tl.load(own.collapsed_G + group) != 0
    if trees is not None:
        is_tree = (kind != INDEPENDENT) if own is not None else (kind == kind)
        tree_collapsed = tl.load(trees.chosen.collapsed_G + group) != 0
        ess = tl.where(is_tree, tl.load(trees.chosen.ess_G + group), ess)
        log_z = tl.where(is_tree, tl.where(tree_collapsed, NONE, tl.zeros((), tl.float64)), log_z)
        resampled, collapsed = resampled & (is_tree == 0), tl.where(is_tree, tree_collapsed, collapsed)
    tl.store(out.values_2G + group, log_z)
    tl.store(out.values_2G + groups + group, ess)
    tl.store(out.flags_3G + group, resampled)
    tl.store(out.flags_3G + groups + group, collapsed)
