"""Which rows of a draft tree are verified: the Triton form of `smc.executor.tree_rows`. `_choose_rows` has a program for
every group, or where groups may have many nodes one launch for each of its phases, of which all but the first have
several programs a group; `_take_rows` has a program for every few rows.

See `smc.executor.tree_rows` for axes; I and J nodes at a time."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from smc.algorithm.expansion import LEAD_GAIN, PopulationKind
from smc.kernels.launch import one_variant
from smc.kernels.round_tensors import PlanTensors, Room

BEST = tl.constexpr(int(PopulationKind.BEST))
LEAD = tl.constexpr(LEAD_GAIN)
NONE = tl.constexpr(-float("inf"))
ROWS = 4
"""Rows of a program that takes them."""
PHASES, OUTCOMES = 4, 1
"""Phases of `_choose_rows`, and the one that limits outcomes, of which lockstep has none."""
MOST_PROGRAMS = 16
"""Of a group, in one phase: each compares one tile of nodes after another with all nodes."""


class StepRows(NamedTuple):
    """Of a `smc.executor.draft.DraftStep`."""

    parent_X: Tensor
    root_X: Tensor
    tokens_XK: Tensor
    logq_XK: Tensor
    tail_XB: Tensor
    count_X: Tensor
    alive_X: Tensor
    ended_X: Tensor
    before_X: Tensor
    text_X: Tensor
    mass_X: Tensor
    last_X: Tensor
    next_X: Tensor
    cut_X: Tensor
    outcome_X: Tensor


class TakenRows(NamedTuple):
    """Of a `smc.executor.draft.TokenTree`."""

    root_X: Tensor
    tokens_XK: Tensor
    logq_XK: Tensor
    tail_XB: Tensor
    count_X: Tensor
    alive_X: Tensor
    ended_X: Tensor
    before_X: Tensor
    text_X: Tensor
    mass_X: Tensor
    last_X: Tensor
    next_X: Tensor
    cut_X: Tensor
    outcome_X: Tensor


class Scratch(NamedTuple):
    """Of every node."""

    worth_M: Tensor
    """float64 gains along its best path; afterwards, -1 where that is no row."""
    useful_M: Tensor
    """float64 the same of the paths that their outcome has room for."""
    heaviest_M: Tensor
    """int32 row of the next step in which its best path goes on; -1: it ends here."""
    leaf_M: Tensor
    """int32 node at which its best path ends."""
    kept_M: Tensor
    """int32: the path is a row."""
    outcome_M: Tensor
    """int32 outcome that it is drafted for; in lockstep 0."""


def choose_rows(
    plan: PlanTensors, steps: tuple[StepRows, ...], branches: int, lookahead: bool, block: int = 64
) -> tuple[TakenRows, Tensor]:
    """See `smc.executor.tree_rows.choose_rows`: the rows, and the node that each ends at."""
    rows, tokens = steps[0].tokens_XK.shape
    pages, nodes, room = steps[0].tail_XB.shape[1], len(steps) * rows, Room(plan.slot_A.device)
    scratch = Scratch(*(room.doubles(nodes) for _ in range(2)), *(room.ints(nodes) for _ in range(4)))
    leaf_X, is_there_X = room.longs(rows), room.bools(rows)
    programs = min(triton.cdiv(nodes, block), MOST_PROGRAMS)
    # A phase reads what programs of the one before have written.
    apart = [range(phase, phase + 1) for phase in range(PHASES) if lookahead or phase != OUTCOMES]
    phases = [range(PHASES)] if programs == 1 else apart
    for of_launch in phases:
        _choose_rows[(len(plan.first_G), programs if of_launch.start else 1)](
            plan, steps, scratch, leaf_X, is_there_X, rows, FROM=of_launch.start, UPTO=of_launch.stop,
            K=len(steps), F=branches, AHEAD=lookahead, BLOCK=block, num_warps=8,
        )  # fmt: skip
    out = TakenRows(
        root_X=room.longs(rows),
        tokens_XK=room.longs(rows, tokens),
        logq_XK=room.floats(rows, tokens),
        tail_XB=room.ints(rows, pages),
        count_X=room.longs(rows),
        alive_X=room.bools(rows),
        ended_X=room.bools(rows),
        before_X=room.longs(rows),
        text_X=room.longs(rows),
        mass_X=room.doubles(rows),
        last_X=room.longs(rows),
        next_X=room.longs(rows),
        cut_X=room.longs(rows),
        outcome_X=room.longs(rows),
    )
    _take_rows[(triton.cdiv(rows, ROWS),)](
        plan, steps, leaf_X, is_there_X, out, rows, tokens, pages,
        K=len(steps), F=branches, BLOCK=ROWS, BLOCK_T=triton.next_power_of_2(tokens),
        BLOCK_B=triton.next_power_of_2(max(pages, 1)), num_warps=1,
    )  # fmt: skip
    return out, leaf_X


@triton.jit
def _node(tile, i, first, size, rows, tiles):
    """Step, row, index and existence of the I nodes of a tile; a step of a group has so many tiles."""
    step = tile // tiles
    within_I = (tile % tiles) * i.shape[0] + i
    row_I = first + within_I
    return step, row_I, step * rows + row_I, within_I < size


@triton.jit
def _node_of_all(tile, i, first, size, rows, total):
    """Index and existence of the I nodes of a tile, of all `total` nodes of a group, one step after another."""
    at_I = tile * i.shape[0] + i
    return (at_I // size) * rows + first + at_I % size, at_I < total


@one_variant()
def _choose_rows(
    plan, steps, scratch, leaf_X, is_there_X, rows, FROM: tl.constexpr, UPTO: tl.constexpr,
    K: tl.constexpr, F: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The phases from `FROM` up to `UPTO`, the first of which has one program a group."""
    group = tl.program_id(0)
    first, size = tl.load(plan.first_G + group).to(tl.int32) * F, tl.load(plan.size_G + group).to(tl.int32) * F
    if tl.load(plan.kind_G + group) != BEST:
        return
    if FROM == 0:
        _find_paths(steps, scratch, first, size, rows, K, AHEAD, BLOCK)
        _keep_first_nodes(steps, scratch, first, size, rows, K, AHEAD, BLOCK)
        tl.debug_barrier()
    if (FROM <= 1) & (UPTO > 1) & AHEAD:
        most = tl.load(plan.draws_G + group).to(tl.int32)
        _limit_outcomes_to(most, scratch, first, size, rows, K, BLOCK)
        tl.debug_barrier()
    if (FROM <= 2) & (UPTO > 2):
        _keep_heaviest(scratch, first, size, rows, K, BLOCK)
        tl.debug_barrier()
    if UPTO > 3:
        _number_rows(scratch, leaf_X, is_there_X, first, size, rows, K, BLOCK)


@triton.jit
def _find_paths(steps, scratch, first, size, rows, K: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr):
    """Best paths from all nodes."""
    i, tiles = tl.arange(0, BLOCK), tl.cdiv(size, BLOCK)
    top = tl.full((), NONE, tl.float64)
    for tile in range(tiles):
        _, x_I, _, in_I = _node(tile, i, first, size, rows, tiles)
        alive_I = tl.load(steps[0].alive_X + x_I, mask=in_I, other=0) != 0
        top = tl.maximum(top, tl.max(tl.load(steps[0].mass_X + x_I, mask=alive_I, other=NONE), 0))
    # From their ends: the worth of every node, and which of those of the step after it continues its best path.
    for k in tl.static_range(K - 1, -1, -1):
        for tile in range(tiles):
            _, x_I, _, in_I = _node(tile, i, first, size, rows, tiles)
            alive_I = tl.load(steps[k].alive_X + x_I, mask=in_I, other=0) != 0
            mass_I = tl.load(steps[k].mass_X + x_I, mask=alive_I, other=NONE)
            counts_I = alive_I & (tl.load(steps[k].count_X + x_I, mask=alive_I, other=0) > k)
            if AHEAD:
                counts_I = counts_I & (k > 0)
            worth_I = tl.where(counts_I, tl.exp(mass_I - top), 0.0)
            worth_I += tl.where(alive_I & (x_I == first), LEAD, 0.0)
            heaviest_I, leaf_I = tl.full((BLOCK,), -1, tl.int32), (k * rows + x_I).to(tl.int32)
            if k < K - 1:
                best_I = tl.full((BLOCK,), NONE, tl.float64)
                for other in range(tiles):
                    _, y_J, _, in_J = _node(other, i, first, size, rows, tiles)
                    child_J = tl.load(steps[k + 1].alive_X + y_J, mask=in_J, other=0) != 0
                    parent_J = tl.load(steps[k + 1].parent_X + y_J, mask=child_J, other=-1)
                    worth_J = tl.load(scratch.worth_M + (k + 1) * rows + y_J, mask=child_J, other=NONE)
                    is_child_IJ = (parent_J[None, :] == x_I[:, None]) & child_J[None, :]
                    worth_IJ = tl.where(is_child_IJ, worth_J[None, :], NONE)
                    most_I = tl.max(worth_IJ, 1)
                    is_most_IJ = is_child_IJ & (worth_IJ == most_I[:, None])
                    at_I = tl.min(tl.where(is_most_IJ, y_J[None, :], 2147483647), 1)
                    heaviest_I = tl.where(most_I > best_I, at_I, heaviest_I)
                    best_I = tl.maximum(best_I, most_I)
                goes_on_I = heaviest_I >= 0
                worth_I += tl.where(goes_on_I, best_I, 0.0)
                next_I = tl.load(scratch.leaf_M + (k + 1) * rows + heaviest_I, mask=goes_on_I & in_I, other=0)
                leaf_I = tl.where(goes_on_I, next_I, leaf_I)
            tl.store(scratch.worth_M + k * rows + x_I, worth_I, mask=in_I)
            tl.store(scratch.heaviest_M + k * rows + x_I, heaviest_I, mask=in_I)
            tl.store(scratch.leaf_M + k * rows + x_I, leaf_I, mask=in_I)
        tl.debug_barrier()


@triton.jit
def _keep_first_nodes(steps, scratch, first, size, rows, K: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr):
    """Only the first node of a path stands for it: paths that are part of another's are worth less than nothing."""
    i, tiles = tl.arange(0, BLOCK), tl.cdiv(size, BLOCK)
    for k in tl.static_range(K):
        for tile in range(tiles):
            _, x_I, _, in_I = _node(tile, i, first, size, rows, tiles)
            m_I = k * rows + x_I
            is_top_I = in_I & (tl.load(steps[k].alive_X + x_I, mask=in_I, other=0) != 0)
            if k > 0:
                parent_I = tl.load(steps[k].parent_X + x_I, mask=is_top_I, other=0)
                before_I = tl.load(scratch.heaviest_M + (k - 1) * rows + parent_I, mask=is_top_I, other=-1)
                is_top_I = is_top_I & (before_I != x_I)
            worth_I = tl.load(scratch.worth_M + m_I, mask=in_I, other=0.0)
            if AHEAD and k == 0:
                # A row of nothing but an outcome is of no use, unless it ends the answer.
                is_short_I = tl.load(scratch.leaf_M + m_I, mask=in_I, other=0) < rows
                is_short_I = is_short_I & (tl.load(steps[0].ended_X + x_I, mask=in_I, other=0) == 0)
                is_top_I = is_top_I & ((is_short_I == 0) | (worth_I >= LEAD))
            tl.store(scratch.worth_M + m_I, tl.where(is_top_I, worth_I, -1.0), mask=in_I)
            tl.store(scratch.useful_M + m_I, tl.where(is_top_I, worth_I, -1.0), mask=in_I)
            outcome_I = tl.zeros((BLOCK,), tl.int32)
            if AHEAD:
                outcome_I = tl.load(steps[k].outcome_X + x_I, mask=in_I, other=0).to(tl.int32)
            tl.store(scratch.outcome_M + m_I, outcome_I, mask=in_I)


@triton.jit
def _limit_outcomes_to(most, scratch, first, size, rows, K: tl.constexpr, BLOCK: tl.constexpr):
    """An outcome has room for `most` paths. From here on all nodes are compared with all, whatever steps they are of."""
    i, total = tl.arange(0, BLOCK), K * size
    tiles = tl.cdiv(total, BLOCK)
    for tile in range(tl.program_id(1), tiles, tl.num_programs(1)):
        m_I, in_I = _node_of_all(tile, i, first, size, rows, total)
        worth_I = tl.load(scratch.worth_M + m_I, mask=in_I, other=-1.0)
        outcome_I = tl.load(scratch.outcome_M + m_I, mask=in_I, other=-1)
        rank_I = tl.zeros((BLOCK,), tl.int32)
        for other in range(tiles):
            m_J, in_J = _node_of_all(other, i, first, size, rows, total)
            worth_J = tl.load(scratch.worth_M + m_J, mask=in_J, other=-1.0)
            outcome_J = tl.load(scratch.outcome_M + m_J, mask=in_J, other=-2)
            rank_I += _before(worth_J, m_J, outcome_J, worth_I, m_I, outcome_I)
        tl.store(scratch.useful_M + m_I, tl.where(rank_I < most, worth_I, -1.0), mask=in_I)


@triton.jit
def _keep_heaviest(scratch, first, size, rows, K: tl.constexpr, BLOCK: tl.constexpr):
    """The heaviest paths are rows, as many as there is room for."""
    i, total = tl.arange(0, BLOCK), K * size
    tiles = tl.cdiv(total, BLOCK)
    for tile in range(tl.program_id(1), tiles, tl.num_programs(1)):
        m_I, in_I = _node_of_all(tile, i, first, size, rows, total)
        worth_I = tl.load(scratch.useful_M + m_I, mask=in_I, other=-1.0)
        rank_I, zero_I = tl.zeros((BLOCK,), tl.int32), m_I * 0
        for other in range(tiles):
            m_J, in_J = _node_of_all(other, i, first, size, rows, total)
            worth_J = tl.load(scratch.useful_M + m_J, mask=in_J, other=-1.0)
            rank_I += _before(worth_J, m_J, m_J * 0, worth_I, m_I, zero_I)
        kept_I = in_I & (worth_I >= 0) & (rank_I < size)
        tl.store(scratch.kept_M + m_I, kept_I.to(tl.int32), mask=in_I)


@triton.jit
def _number_rows(scratch, leaf_X, is_there_X, first, size, rows, K: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of one outcome are beside each other, the heaviest first."""
    i, total = tl.arange(0, BLOCK), K * size
    tiles = tl.cdiv(total, BLOCK)
    for tile in range(tl.program_id(1), tiles, tl.num_programs(1)):
        m_I, in_I = _node_of_all(tile, i, first, size, rows, total)
        kept_I = tl.load(scratch.kept_M + m_I, mask=in_I, other=0) > 0
        worth_I = tl.load(scratch.useful_M + m_I, mask=in_I, other=-1.0)
        outcome_I = tl.load(scratch.outcome_M + m_I, mask=in_I, other=0)
        number_I, kept = tl.zeros((BLOCK,), tl.int32), 0
        for other in range(tiles):
            m_J, in_J = _node_of_all(other, i, first, size, rows, total)
            kept_J = tl.load(scratch.kept_M + m_J, mask=in_J, other=0) > 0
            worth_J = tl.load(scratch.useful_M + m_J, mask=kept_J, other=-1.0)
            outcome_J = tl.load(scratch.outcome_M + m_J, mask=kept_J, other=0)
            earlier_IJ = kept_J[None, :] & (outcome_J[None, :] < outcome_I[:, None])
            number_I += tl.sum(earlier_IJ.to(tl.int32), 1)
            number_I += _before(worth_J, m_J, outcome_J, worth_I, m_I, outcome_I)
            kept += tl.sum(kept_J.to(tl.int32), 0)
        leaf_I = tl.load(scratch.leaf_M + m_I, mask=kept_I, other=0).to(tl.int64)
        tl.store(leaf_X + first + number_I, leaf_I, mask=kept_I)
        tl.store(is_there_X + first + number_I, kept_I, mask=kept_I)
        # A row that is not alive repeats the first of its group.
        begins_I = kept_I & (number_I == 0)
        if tl.max(begins_I.to(tl.int32), 0) > 0:
            leaf = tl.max(tl.where(begins_I, leaf_I, 0), 0)
            for rest in range(kept, size, BLOCK):
                is_rest_J = rest + i < size
                tl.store(leaf_X + first + rest + i, tl.zeros((BLOCK,), tl.int64) + leaf, mask=is_rest_J)
                tl.store(is_there_X + first + rest + i, is_rest_J == 0, mask=is_rest_J)
        if (kept == 0) & (tile == 0):
            for rest in range(0, size, BLOCK):
                in_J = rest + i < size
                x_J = first + rest + i
                tl.store(leaf_X + x_J, ((K - 1) * rows + x_J).to(tl.int64), mask=in_J)
                tl.store(is_there_X + x_J, in_J == 0, mask=in_J)


@triton.jit
def _before(worth_J, m_J, of_J, worth_I, m_I, of_I):
    """How many [I] of the nodes J that stand for a path are heavier, or come first among equals, and of the same
    kind."""
    is_heavier_IJ = worth_J[None, :] > worth_I[:, None]
    is_heavier_IJ = is_heavier_IJ | ((worth_J[None, :] == worth_I[:, None]) & (m_J[None, :] < m_I[:, None]))
    is_heavier_IJ = is_heavier_IJ & (of_J[None, :] == of_I[:, None]) & (worth_J[None, :] >= 0)
    return tl.sum(is_heavier_IJ.to(tl.int32), 1)


@one_variant()
def _take_rows(
    plan, steps, leaf_X, is_there_X, out, rows, tokens, pages,
    K: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = x < rows
    group = tl.load(plan.group_A + x // F, mask=inside, other=0)
    chosen = inside & (tl.load(plan.kind_G + group, mask=inside, other=0) == BEST)
    chosen = chosen & (tl.load(plan.size_G + group, mask=inside, other=0) > 0)
    leaf = tl.load(leaf_X + x, mask=chosen, other=0)
    leaf = tl.where(chosen, leaf, ((K - 1) * rows + x).to(tl.int64))
    there = (chosen == 0) | (tl.load(is_there_X + x, mask=chosen, other=0) != 0)
    tl.store(leaf_X + x, leaf, mask=inside)
    t, b = tl.arange(0, BLOCK_T)[None, :], tl.arange(0, BLOCK_B)[None, :]
    to_T, to_B = x[:, None] * tokens + t, x[:, None] * pages + b
    for k in tl.static_range(K):
        here, at = inside & (leaf // rows == k), leaf % rows
        step = steps[k]
        tl.store(out.root_X + x, tl.load(step.root_X + at, mask=here, other=0), mask=here)
        tl.store(out.count_X + x, tl.load(step.count_X + at, mask=here, other=0), mask=here)
        alive = tl.load(step.alive_X + at, mask=here, other=0) != 0
        tl.store(out.alive_X + x, alive & there, mask=here)
        tl.store(out.ended_X + x, tl.load(step.ended_X + at, mask=here, other=0) != 0, mask=here)
        tl.store(out.before_X + x, tl.load(step.before_X + at, mask=here, other=0), mask=here)
        tl.store(out.text_X + x, tl.load(step.text_X + at, mask=here, other=0), mask=here)
        mass = tl.load(step.mass_X + at, mask=here, other=0.0)
        tl.store(out.mass_X + x, tl.where(there, mass, NONE), mask=here)
        tl.store(out.last_X + x, tl.load(step.last_X + at, mask=here, other=0), mask=here)
        tl.store(out.next_X + x, tl.load(step.next_X + at, mask=here, other=0), mask=here)
        tl.store(out.cut_X + x, tl.load(step.cut_X + at, mask=here, other=0), mask=here)
        tl.store(out.outcome_X + x, tl.load(step.outcome_X + at, mask=here, other=0), mask=here)
        is_token, is_page = here[:, None] & (t < tokens), here[:, None] & (b < pages)
        token = tl.load(step.tokens_XK + at[:, None] * tokens + t, mask=is_token, other=0)
        tl.store(out.tokens_XK + to_T, token, mask=is_token)
        logq = tl.load(step.logq_XK + at[:, None] * tokens + t, mask=is_token, other=0.0)
        tl.store(out.logq_XK + to_T, logq, mask=is_token)
        page = tl.load(step.tail_XB + at[:, None] * pages + b, mask=is_page, other=0)
        tl.store(out.tail_XB + to_B, page, mask=is_page)
