"""The draft tree of exact decoding: the Triton form of `smc.executor.draft`.

`_prune_tree` has a program for every group. If groups may have many nodes, each of its phases is a launch of its own,
and all phases but the first have several programs a group. `_take_rows` has a program for every few rows,
`store_inner_nodes` one for every batch index, `with_inner_nodes` one for every node, and `limit_outcomes` one for every
row, of which the first row of an outcome does the work.

Local axes: P nodes from which rows may begin, U nodes of a tree or candidates of all rows, Y and Z some of these at
a time."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from smc.algorithm.expansion import LEAD_GAIN, CandidateTokens
from smc.algorithm.resampling import Spans
from smc.api.limits import MAX_PARTICLES
from smc.arrays import Room, contiguous
from smc.kernels.decodings import WALK
from smc.kernels.expansion import find_bound
from smc.kernels.launch import one_variant
from smc.round.plan import RoundPlan
from smc.round.tensors import GrownRows, InnerNodes, RoundSelection, SlotState, TokenTree

LEAD = tl.constexpr(LEAD_GAIN)
NONE = tl.constexpr(-float("inf"))
ROWS = 4
"""Rows of a program of `_take_rows`."""
PHASES = GAINS, LIKELIEST, PATHS, OUTCOMES, HEAVIEST, ROWS_OF_TREE = tuple(tl.constexpr(phase) for phase in range(6))
"""Phases of `_prune_tree`. Without a limit of nodes the first two are skipped, in lockstep the limit of outcomes."""
MOST_PROGRAMS = 16
"""Maximum number of programs of a group in one phase. Each compares one tile of nodes after another with all nodes."""


class Scratch(NamedTuple):
    """Intermediate values of every node."""

    worth_U: Tensor
    """float64 sum of gains along the node's best path; later -1 at nodes that represent no path."""
    useful_U: Tensor
    """float64: as `worth_U`, but -1 for paths for which their outcome has no room."""
    heaviest_U: Tensor
    """int32 row of the next step that continues the node's best path; -1: the path ends here."""
    leaf_U: Tensor
    """int32 node at which the best path ends."""
    kept_U: Tensor
    """int32: whether the path is chosen as a row."""
    outcome_U: Tensor
    """int32 outcome for which the node is drafted; in lockstep 0."""
    node_U: Tensor | None
    """int32: whether the node is one of the likeliest. None: there is no limit of nodes."""


def prune_tree(plan: RoundPlan[Tensor], grown: GrownRows, lookahead: bool) -> GrownRows:
    """See `smc.executor.draft.prune_tree`."""
    steps = contiguous(grown.steps)
    (rows, tokens), pages = steps[0].tree.tokens_XK.shape, steps[0].tree.tail_XB.shape[1]
    arrays, branches = plan.arrays, plan.kind.branches
    nodes, block, room = len(steps) * rows, 64, Room(arrays.slot_A.device)
    scratch = Scratch(
        worth_U=room.doubles(nodes),
        useful_U=room.doubles(nodes),
        heaviest_U=room.ints(nodes),
        leaf_U=room.ints(nodes),
        kept_U=room.ints(nodes),
        outcome_U=room.ints(nodes),
        node_U=room.ints(nodes) if plan.kind.nodes else None,
    )
    leaf_X, is_there_X = room.longs(rows), room.bools(rows)
    programs = min(triton.cdiv(nodes, block), MOST_PROGRAMS)
    skipped = {*(() if plan.kind.nodes else (GAINS, LIKELIEST)), *(() if lookahead else (OUTCOMES,))}
    phases = [phase.value for phase in PHASES if phase not in skipped]
    # A phase reads the results of all programs of the previous phase.
    for of_launch in [phases] if programs == 1 else [[phase] for phase in phases]:
        alone = of_launch[0] in (GAINS.value, PATHS.value)
        _prune_tree[(len(arrays.first_G), 1 if alone else programs)](
            arrays, steps, scratch, leaf_X, is_there_X, rows, branches, FROM=of_launch[0], UPTO=of_launch[-1] + 1,
            K=len(steps), AHEAD=lookahead, BLOCK=block, num_warps=8,
        )  # fmt: skip
    out = TokenTree.allocate(room, rows, tokens, pages)
    _take_rows[(triton.cdiv(rows, ROWS),)](
        arrays, steps, leaf_X, is_there_X, out, rows, tokens, pages, branches,
        K=len(steps), BLOCK=ROWS, BLOCK_T=triton.next_power_of_2(tokens),
        BLOCK_B=triton.next_power_of_2(max(pages, 1)), num_warps=1,
    )  # fmt: skip
    return grown._replace(tree=out, leaf_X=leaf_X)


@triton.jit
def _node(tile, i, first, size, rows, tiles):
    """Return step, row, index and existence of the I nodes of a tile; a step of a group has `tiles` tiles."""
    step = tile // tiles
    within_Y = (tile % tiles) * i.shape[0] + i
    row_Y = first + within_Y
    return step, row_Y, step * rows + row_Y, within_Y < size


@triton.jit
def _node_of_all(tile, i, first, size, rows, total):
    """Return index and existence of the I nodes of a tile, among all `total` nodes of a group, one step after
    another."""
    at_Y = tile * i.shape[0] + i
    return (at_Y // size) * rows + first + at_Y % size, at_Y < total


@one_variant()
def _prune_tree(
    plan, steps, scratch, leaf_X, is_there_X, rows, branches, FROM: tl.constexpr, UPTO: tl.constexpr,
    K: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Run the phases from FROM up to UPTO, exclusive. Gains and paths have one program a group."""
    group = tl.program_id(0)
    first, size = tl.load(plan.first_G + group).to(tl.int32), tl.load(plan.size_G + group).to(tl.int32)
    first, size = first * branches, size * branches
    if tl.load(plan.decoding_G + group) != WALK:
        return
    if (FROM <= GAINS) & (UPTO > GAINS):
        _find_gains(steps, scratch, first, size, rows, K, AHEAD, BLOCK)
        tl.debug_barrier()
    if (FROM <= LIKELIEST) & (UPTO > LIKELIEST):
        _keep_likeliest(tl.load(plan.nodes_G + group) - 1, scratch, first, size, rows, K, BLOCK)
        tl.debug_barrier()
    if (FROM <= PATHS) & (UPTO > PATHS):
        if scratch.node_U is not None:
            _drop_orphans(steps, scratch, first, size, rows, K, BLOCK)
        _find_paths(steps, scratch, first, size, rows, K, AHEAD, BLOCK)
        _keep_first_nodes(steps, scratch, first, size, rows, K, AHEAD, BLOCK)
        tl.debug_barrier()
    if (FROM <= OUTCOMES) & (UPTO > OUTCOMES) & AHEAD:
        most = tl.load(plan.next_count_G + group).to(tl.int32)
        _limit_outcomes_to(most, scratch, first, size, rows, K, BLOCK)
        tl.debug_barrier()
    if (FROM <= HEAVIEST) & (UPTO > HEAVIEST):
        _keep_heaviest(scratch, first, size, rows, K, BLOCK)
        tl.debug_barrier()
    if UPTO > ROWS_OF_TREE:
        _number_rows(scratch, leaf_X, is_there_X, first, size, rows, K, BLOCK)


@triton.jit
def _top_mass(tree, first, size, rows, BLOCK: tl.constexpr):
    """Return the largest mass of a group's rows after the first step."""
    i, tiles = tl.arange(0, BLOCK), tl.cdiv(size, BLOCK)
    top = tl.full((), NONE, tl.float64)
    for tile in range(tiles):
        _, x_Y, _, in_Y = _node(tile, i, first, size, rows, tiles)
        alive_Y = tl.load(tree.alive_X + x_Y, mask=in_Y, other=0) != 0
        top = tl.maximum(top, tl.max(tl.load(tree.mass_X + x_Y, mask=alive_Y, other=NONE), 0))
    return top


@triton.jit
def _gain(tree, x_Y, alive_Y, first, top, k: tl.constexpr, AHEAD: tl.constexpr):
    """Return the gains of nodes of step k, and whether they are new: they add a token to their row."""
    mass_Y = tl.load(tree.mass_X + x_Y, mask=alive_Y, other=NONE)
    is_new_Y = alive_Y & (tl.load(tree.count_X + x_Y, mask=alive_Y, other=0) > k)
    if AHEAD:
        is_new_Y = is_new_Y & (k > 0)
    return tl.where(is_new_Y, tl.exp(mass_Y - top), 0.0) + tl.where(alive_Y & (x_Y == first), LEAD, 0.0), is_new_Y


@triton.jit
def _find_gains(steps, scratch, first, size, rows, K: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr):
    """Write the gain of every new node; others get a negative worth. In look-ahead, first tokens are kept anyway."""
    i, tiles = tl.arange(0, BLOCK), tl.cdiv(size, BLOCK)
    top = _top_mass(steps[0].tree, first, size, rows, BLOCK)
    for k in tl.static_range(K):
        for tile in range(tiles):
            _, x_Y, _, in_Y = _node(tile, i, first, size, rows, tiles)
            m_Y = k * rows + x_Y
            alive_Y = tl.load(steps[k].tree.alive_X + x_Y, mask=in_Y, other=0) != 0
            gain_Y, is_new_Y = _gain(steps[k].tree, x_Y, alive_Y, first, top, k, AHEAD)
            tl.store(scratch.worth_U + m_Y, tl.where(is_new_Y, gain_Y, -1.0), mask=in_Y)
            outcome_Y, is_kept_Y = tl.zeros((BLOCK,), tl.int32), alive_Y & (k == 0)
            if AHEAD:
                outcome_Y = tl.load(steps[k].tree.outcome_X + x_Y, mask=in_Y, other=0).to(tl.int32)
            else:
                is_kept_Y = alive_Y & (k < 0)
            tl.store(scratch.outcome_U + m_Y, outcome_Y, mask=in_Y)
            tl.store(scratch.node_U + m_Y, is_kept_Y.to(tl.int32), mask=in_Y)


@triton.jit
def _ranked(tile, i, scratch, first, size, rows, total):
    """Return index, existence and worth of the I nodes of a tile among all nodes, whatever their steps, and the number
    of nodes of the same outcome that come before each."""
    m_Y, in_Y = _node_of_all(tile, i, first, size, rows, total)
    worth_Y = tl.load(scratch.worth_U + m_Y, mask=in_Y, other=-1.0)
    outcome_Y = tl.load(scratch.outcome_U + m_Y, mask=in_Y, other=-1)
    rank_Y = tl.zeros_like(m_Y.to(tl.int32))
    for other in range(tl.cdiv(total, i.shape[0])):
        m_Z, in_Z = _node_of_all(other, i, first, size, rows, total)
        worth_Z = tl.load(scratch.worth_U + m_Z, mask=in_Z, other=-1.0)
        outcome_Z = tl.load(scratch.outcome_U + m_Z, mask=in_Z, other=-2)
        rank_Y += _before(worth_Z, m_Z, outcome_Z, worth_Y, m_Y, outcome_Y)
    return m_Y, in_Y, worth_Y, rank_Y


@triton.jit
def _keep_likeliest(most, scratch, first, size, rows, K: tl.constexpr, BLOCK: tl.constexpr):
    """Keep the `most` nodes of each tree, in look-ahead of each outcome, that gain most."""
    i, total = tl.arange(0, BLOCK), K * size
    tiles = tl.cdiv(total, BLOCK)
    for tile in range(tl.program_id(1), tiles, tl.num_programs(1)):
        m_Y, in_Y, worth_Y, rank_Y = _ranked(tile, i, scratch, first, size, rows, total)
        is_kept_Y = in_Y & (worth_Y >= 0) & (rank_Y < most)
        tl.store(scratch.node_U + m_Y, is_kept_Y.to(tl.int32), mask=is_kept_Y)


@triton.jit
def _drop_orphans(steps, scratch, first, size, rows, K: tl.constexpr, BLOCK: tl.constexpr):
    """Drop nodes without their parent: rounding, or the first row's gain, may put a node before its parent."""
    i, tiles = tl.arange(0, BLOCK), tl.cdiv(size, BLOCK)
    for k in tl.static_range(1, K):
        for tile in range(tiles):
            _, x_Y, _, in_Y = _node(tile, i, first, size, rows, tiles)
            m_Y = k * rows + x_Y
            is_kept_Y = tl.load(scratch.node_U + m_Y, mask=in_Y, other=0) != 0
            parent_Y = tl.load(steps[k].parent_X + x_Y, mask=is_kept_Y, other=0)
            has_parent_Y = tl.load(scratch.node_U + (k - 1) * rows + parent_Y, mask=is_kept_Y, other=1) != 0
            tl.store(scratch.node_U + m_Y, x_Y * 0, mask=has_parent_Y == 0)
        tl.debug_barrier()


@triton.jit
def _in_tree(tree, scratch, m_Y, x_Y, in_Y):
    """Return whether nodes belong to the tree: they are alive and, with a limit of nodes, among the likeliest."""
    if scratch.node_U is not None:
        return tl.load(scratch.node_U + m_Y, mask=in_Y, other=0) != 0
    else:
        return tl.load(tree.alive_X + x_Y, mask=in_Y, other=0) != 0


@triton.jit
def _find_paths(steps, scratch, first, size, rows, K: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr):
    """Find the best path from every node."""
    i, tiles = tl.arange(0, BLOCK), tl.cdiv(size, BLOCK)
    top = _top_mass(steps[0].tree, first, size, rows, BLOCK)
    # From the last step back: the worth of every node, and the node of the next step that continues its best path.
    for k in tl.static_range(K - 1, -1, -1):
        for tile in range(tiles):
            _, x_Y, _, in_Y = _node(tile, i, first, size, rows, tiles)
            alive_Y = _in_tree(steps[k].tree, scratch, k * rows + x_Y, x_Y, in_Y)
            worth_Y = _gain(steps[k].tree, x_Y, alive_Y, first, top, k, AHEAD)[0]
            heaviest_Y, leaf_Y = tl.full((BLOCK,), -1, tl.int32), (k * rows + x_Y).to(tl.int32)
            if k < K - 1:
                best_Y = tl.full((BLOCK,), NONE, tl.float64)
                for other in range(tiles):
                    _, y_Z, _, in_Z = _node(other, i, first, size, rows, tiles)
                    child_Z = _in_tree(steps[k + 1].tree, scratch, (k + 1) * rows + y_Z, y_Z, in_Z)
                    parent_Z = tl.load(steps[k + 1].parent_X + y_Z, mask=child_Z, other=-1)
                    worth_Z = tl.load(scratch.worth_U + (k + 1) * rows + y_Z, mask=child_Z, other=NONE)
                    is_child_YZ = (parent_Z[None, :] == x_Y[:, None]) & child_Z[None, :]
                    worth_YZ = tl.where(is_child_YZ, worth_Z[None, :], NONE)
                    most_Y = tl.max(worth_YZ, 1)
                    is_most_YZ = is_child_YZ & (worth_YZ == most_Y[:, None])
                    at_Y = tl.min(tl.where(is_most_YZ, y_Z[None, :], 2147483647), 1)
                    heaviest_Y = tl.where(most_Y > best_Y, at_Y, heaviest_Y)
                    best_Y = tl.maximum(best_Y, most_Y)
                goes_on_Y = heaviest_Y >= 0
                worth_Y += tl.where(goes_on_Y, best_Y, 0.0)
                next_Y = tl.load(scratch.leaf_U + (k + 1) * rows + heaviest_Y, mask=goes_on_Y & in_Y, other=0)
                leaf_Y = tl.where(goes_on_Y, next_Y, leaf_Y)
            tl.store(scratch.worth_U + k * rows + x_Y, worth_Y, mask=in_Y)
            tl.store(scratch.heaviest_U + k * rows + x_Y, heaviest_Y, mask=in_Y)
            tl.store(scratch.leaf_U + k * rows + x_Y, leaf_Y, mask=in_Y)
        tl.debug_barrier()


@triton.jit
def _keep_first_nodes(steps, scratch, first, size, rows, K: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr):
    """Let only the first node of a path represent it: every other node gets a negative worth."""
    i, tiles = tl.arange(0, BLOCK), tl.cdiv(size, BLOCK)
    for k in tl.static_range(K):
        for tile in range(tiles):
            _, x_Y, _, in_Y = _node(tile, i, first, size, rows, tiles)
            m_Y = k * rows + x_Y
            is_top_Y = in_Y & _in_tree(steps[k].tree, scratch, m_Y, x_Y, in_Y)
            if k > 0:
                parent_Y = tl.load(steps[k].parent_X + x_Y, mask=is_top_Y, other=0)
                before_Y = tl.load(scratch.heaviest_U + (k - 1) * rows + parent_Y, mask=is_top_Y, other=-1)
                is_top_Y = is_top_Y & (before_Y != x_Y)
            worth_Y = tl.load(scratch.worth_U + m_Y, mask=in_Y, other=0.0)
            if AHEAD and k == 0:
                # A row that consists of an outcome alone is useless, unless it ends the answer.
                is_short_Y = tl.load(scratch.leaf_U + m_Y, mask=in_Y, other=0) < rows
                is_short_Y = is_short_Y & (tl.load(steps[0].tree.ended_X + x_Y, mask=in_Y, other=0) == 0)
                is_top_Y = is_top_Y & ((is_short_Y == 0) | (worth_Y >= LEAD))
            tl.store(scratch.worth_U + m_Y, tl.where(is_top_Y, worth_Y, -1.0), mask=in_Y)
            tl.store(scratch.useful_U + m_Y, tl.where(is_top_Y, worth_Y, -1.0), mask=in_Y)
            outcome_Y = tl.zeros((BLOCK,), tl.int32)
            if AHEAD:
                outcome_Y = tl.load(steps[k].tree.outcome_X + x_Y, mask=in_Y, other=0).to(tl.int32)
            tl.store(scratch.outcome_U + m_Y, outcome_Y, mask=in_Y)


@triton.jit
def _limit_outcomes_to(most, scratch, first, size, rows, K: tl.constexpr, BLOCK: tl.constexpr):
    """Drop all but the `most` heaviest paths of each outcome. From here on every node is compared with all nodes,
    whatever their steps."""
    i, total = tl.arange(0, BLOCK), K * size
    tiles = tl.cdiv(total, BLOCK)
    for tile in range(tl.program_id(1), tiles, tl.num_programs(1)):
        m_Y, in_Y, worth_Y, rank_Y = _ranked(tile, i, scratch, first, size, rows, total)
        tl.store(scratch.useful_U + m_Y, tl.where(rank_Y < most, worth_Y, -1.0), mask=in_Y)


@triton.jit
def _keep_heaviest(scratch, first, size, rows, K: tl.constexpr, BLOCK: tl.constexpr):
    """Choose the heaviest paths as rows, as many as there is room for."""
    i, total = tl.arange(0, BLOCK), K * size
    tiles = tl.cdiv(total, BLOCK)
    for tile in range(tl.program_id(1), tiles, tl.num_programs(1)):
        m_Y, in_Y = _node_of_all(tile, i, first, size, rows, total)
        worth_Y = tl.load(scratch.useful_U + m_Y, mask=in_Y, other=-1.0)
        rank_Y, zero_Y = tl.zeros((BLOCK,), tl.int32), m_Y * 0
        for other in range(tiles):
            m_Z, in_Z = _node_of_all(other, i, first, size, rows, total)
            worth_Z = tl.load(scratch.useful_U + m_Z, mask=in_Z, other=-1.0)
            rank_Y += _before(worth_Z, m_Z, m_Z * 0, worth_Y, m_Y, zero_Y)
        kept_Y = in_Y & (worth_Y >= 0) & (rank_Y < size)
        tl.store(scratch.kept_U + m_Y, kept_Y.to(tl.int32), mask=in_Y)


@triton.jit
def _number_rows(scratch, leaf_X, is_there_X, first, size, rows, K: tl.constexpr, BLOCK: tl.constexpr):
    """Number the rows: those of one outcome are adjacent, the heaviest first."""
    i, total = tl.arange(0, BLOCK), K * size
    tiles = tl.cdiv(total, BLOCK)
    for tile in range(tl.program_id(1), tiles, tl.num_programs(1)):
        m_Y, in_Y = _node_of_all(tile, i, first, size, rows, total)
        kept_Y = tl.load(scratch.kept_U + m_Y, mask=in_Y, other=0) > 0
        worth_Y = tl.load(scratch.useful_U + m_Y, mask=in_Y, other=-1.0)
        outcome_Y = tl.load(scratch.outcome_U + m_Y, mask=in_Y, other=0)
        number_Y, kept = tl.zeros((BLOCK,), tl.int32), 0
        for other in range(tiles):
            m_Z, in_Z = _node_of_all(other, i, first, size, rows, total)
            kept_Z = tl.load(scratch.kept_U + m_Z, mask=in_Z, other=0) > 0
            worth_Z = tl.load(scratch.useful_U + m_Z, mask=kept_Z, other=-1.0)
            outcome_Z = tl.load(scratch.outcome_U + m_Z, mask=kept_Z, other=0)
            earlier_YZ = kept_Z[None, :] & (outcome_Z[None, :] < outcome_Y[:, None])
            number_Y += tl.sum(earlier_YZ.to(tl.int32), 1)
            number_Y += _before(worth_Z, m_Z, outcome_Z, worth_Y, m_Y, outcome_Y)
            kept += tl.sum(kept_Z.to(tl.int32), 0)
        leaf_Y = tl.load(scratch.leaf_U + m_Y, mask=kept_Y, other=0).to(tl.int64)
        tl.store(leaf_X + first + number_Y, leaf_Y, mask=kept_Y)
        tl.store(is_there_X + first + number_Y, kept_Y, mask=kept_Y)
        # A row that is not alive repeats the first row of its group.
        begins_Y = kept_Y & (number_Y == 0)
        if tl.max(begins_Y.to(tl.int32), 0) > 0:
            leaf = tl.max(tl.where(begins_Y, leaf_Y, 0), 0)
            for rest in range(kept, size, BLOCK):
                is_rest_Z = rest + i < size
                tl.store(leaf_X + first + rest + i, tl.zeros((BLOCK,), tl.int64) + leaf, mask=is_rest_Z)
                tl.store(is_there_X + first + rest + i, is_rest_Z == 0, mask=is_rest_Z)
        if (kept == 0) & (tile == 0):
            for rest in range(0, size, BLOCK):
                in_Z = rest + i < size
                x_Z = first + rest + i
                tl.store(leaf_X + x_Z, ((K - 1) * rows + x_Z).to(tl.int64), mask=in_Z)
                tl.store(is_there_X + x_Z, in_Z == 0, mask=in_Z)


@triton.jit
def _before(worth_Z, m_Z, of_Z, worth_Y, m_Y, of_Y):
    """For each of the nodes [Y], count the nodes [Z] that represent a path, have the same `of`, and are heavier, or
    equally heavy and earlier."""
    is_heavier_YZ = worth_Z[None, :] > worth_Y[:, None]
    is_heavier_YZ = is_heavier_YZ | ((worth_Z[None, :] == worth_Y[:, None]) & (m_Z[None, :] < m_Y[:, None]))
    is_heavier_YZ = is_heavier_YZ & (of_Z[None, :] == of_Y[:, None]) & (worth_Z[None, :] >= 0)
    return tl.sum(is_heavier_YZ.to(tl.int32), 1)


@one_variant()
def _take_rows(
    plan, steps, leaf_X, is_there_X, out, rows, tokens, pages, branches,
    K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = x < rows
    group = tl.load(plan.group_A + x // branches, mask=inside, other=0)
    chosen = inside & (tl.load(plan.decoding_G + group, mask=inside, other=0) == WALK)
    chosen = chosen & (tl.load(plan.size_G + group, mask=inside, other=0) > 0)
    leaf = tl.load(leaf_X + x, mask=chosen, other=0)
    leaf = tl.where(chosen, leaf, ((K - 1) * rows + x).to(tl.int64))
    there = (chosen == 0) | (tl.load(is_there_X + x, mask=chosen, other=0) != 0)
    tl.store(leaf_X + x, leaf, mask=inside)
    t, b = tl.arange(0, BLOCK_T)[None, :], tl.arange(0, BLOCK_B)[None, :]
    to_T, to_B = x[:, None] * tokens + t, x[:, None] * pages + b
    for k in tl.static_range(K):
        here, at = inside & (leaf // rows == k), leaf % rows
        step = steps[k].tree
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


def store_inner_nodes(
    nodes: InnerNodes, state: SlotState, plan: RoundPlan[Tensor], grown: GrownRows, selection: RoundSelection[Tensor]
) -> None:
    """See `smc.executor.draft.store_inner_nodes`."""
    tokens_XK, leaf_X = grown.tree.tokens_XK, grown.leaf_X
    assert leaf_X is not None, "rows of exact decoding have been chosen"
    (batch_size, block), (_, inner, most) = (plan.kind.batch_size, tokens_XK.shape[1]), nodes.share_SKC.shape
    assert block == inner + 1, f"rows of {block} tokens, {inner} inner nodes"
    steps = contiguous(grown.steps)
    _store_inner_nodes[(batch_size,)](
        nodes, plan.arrays, state.logw_S, tokens_XK, steps, selection, leaf_X, len(leaf_X),
        steps[-1].candidates.token_RC.shape[1],
        K=block, S=len(steps), C=most, BLOCK_N=MAX_PARTICLES, BLOCK_C=triton.next_power_of_2(most), num_warps=4,
    )  # fmt: skip


def with_inner_nodes(
    nodes: InnerNodes, plan: RoundPlan[Tensor], tree: TokenTree, candidates: CandidateTokens
) -> tuple[CandidateTokens, TokenTree, Spans]:
    """See `smc.executor.draft.with_inner_nodes`."""
    (batch_size, width), (_, inner, most) = candidates.share_RC.shape, nodes.share_SKC.shape
    room, groups, count = Room(tree.mass_X.device), len(plan.arrays.first_G), batch_size * (inner + 1)
    none_P, text_P = room.longs(count), room.longs(count)
    found = CandidateTokens(
        token_RC=candidates.token_RC.new_empty(count, width),
        logq_RC=room.floats(count, width),
        share_RC=room.floats(count, width),
    )
    rows = TokenTree(
        root_X=room.longs(count),
        tokens_XK=none_P[:, None].expand(-1, nodes.block),
        # No token exists yet, so these are not read.
        logq_XK=found.share_RC[:, :1].expand(-1, nodes.block),
        tail_XB=tree.tail_XB[:1].expand(count, -1),
        count_X=none_P,
        alive_X=room.bools(count),
        ended_X=room.bools(count),
        before_X=text_P,
        text_X=text_P,
        mass_X=room.doubles(count),
        last_X=none_P,
        next_X=none_P,
        cut_X=room.longs(count),
        outcome_X=none_P,
    )
    spans = Spans(room.ints(groups), room.ints(groups))
    _with_inner_nodes[(max(count, groups),)](
        nodes, plan.arrays, tree, contiguous(candidates), found, rows, spans, count, groups, width,
        K=inner + 1, C=most, BLOCK_C=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return found, rows, spans


def limit_outcomes(
    plan: RoundPlan[Tensor], tree: TokenTree, candidates: CandidateTokens, has_rest: bool
) -> CandidateTokens:
    """See `smc.executor.draft.limit_outcomes`."""
    (count, width), room = candidates.share_RC.shape, Room(tree.mass_X.device)
    limited_XC, log_mass_U = room.floats(count, width), room.doubles(count * width)
    _limit_outcomes[(count,)](
        plan.arrays, tree, candidates.share_RC.contiguous(), limited_XC, log_mass_U, count, width,
        width - 1 if has_rest else -1,
        # An outcome has one row more than its group if the first row's candidate is kept in addition.
        F=plan.kind.branches, BLOCK_N=2 * MAX_PARTICLES, CHUNK=512, num_warps=4,
    )  # fmt: skip
    return candidates._replace(share_RC=limited_XC)


@one_variant()
def _limit_outcomes(
    plan, tree, share_XC, limited_XC, log_mass_U, total, width, rest,
    F: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the candidates' log shares, -inf for those that are dropped. In a group with a draft tree, the first row of
    an outcome does so for all rows of the outcome."""
    first = tl.program_id(0)
    group = tl.load(plan.group_A + first // F)
    is_walk = tl.load(plan.decoding_G + group) == WALK
    outcome = tl.load(tree.outcome_X + first)
    if is_walk & (tl.load(tree.outcome_X + first - 1, mask=first > 0, other=-1) == outcome):
        return
    n = first + tl.arange(0, BLOCK_N)
    of_N = (tl.load(tree.outcome_X + n, mask=n < total, other=-1) == outcome) & (is_walk | (n == first))
    alive_N = tl.load(tree.alive_X + n, mask=of_N, other=0) != 0
    ended_N = tl.load(tree.ended_X + n, mask=of_N, other=0) != 0
    count = tl.sum(of_N.to(tl.int32), 0) * width
    most = tl.load(plan.next_count_G + group).to(tl.int32) - tl.sum((alive_N & ended_N).to(tl.int32), 0)
    share_U, log_mass_U = share_XC + first * width, log_mass_U + first * width
    valid, lowest, top = 0, tl.full((), float("inf"), tl.float64), tl.full((), NONE, tl.float64)
    for begin in range(0, count, CHUNK):
        m_Y = begin + tl.arange(0, CHUNK)
        row_Y, inside_Y = first + m_Y // width, (m_Y < count) & (m_Y % width != rest)
        goes_Y = inside_Y & (tl.load(tree.alive_X + row_Y, mask=inside_Y, other=0) != 0)
        goes_Y = goes_Y & (tl.load(tree.ended_X + row_Y, mask=inside_Y, other=1) == 0)
        mass_Y = tl.load(tree.mass_X + row_Y, mask=goes_Y, other=NONE)
        mass_Y += tl.load(share_U + m_Y, mask=goes_Y, other=NONE).to(tl.float64)
        mass_Y = tl.where(goes_Y & (mass_Y == mass_Y), mass_Y, NONE)
        tl.store(log_mass_U + m_Y, mass_Y, mask=m_Y < count)
        has_mass_Y = mass_Y > NONE
        valid += tl.sum(has_mass_Y.to(tl.int32), 0)
        lowest = tl.minimum(lowest, tl.min(tl.where(has_mass_Y, mass_Y, float("inf")), 0))
        top = tl.maximum(top, tl.max(mass_Y, 0))
    tl.debug_barrier()
    bound, ties = tl.full((), NONE, tl.float64), 0
    if is_walk & (most <= 0):
        bound = tl.full((), float("inf"), tl.float64)
    if is_walk & (valid > most) & (most > 0):
        bound, ties = top, 1
        if most > 1:
            bound, ties, _ = find_bound(log_mass_U, log_mass_U, count, lowest, top, most, is_walk, CHUNK)
    # The first candidate of the group's first row always stays; it belongs to the group's first outcome.
    lead, equal = tl.load(plan.first_G + group).to(tl.int32) * F, 0
    lead = tl.where(first == lead, first, -1)
    for begin in range(0, count, CHUNK):
        m_Y = begin + tl.arange(0, CHUNK)
        mass_Y = tl.load(log_mass_U + m_Y, mask=m_Y < count, other=NONE)
        is_equal_Y = (mass_Y == bound) & (m_Y < count)
        rank_Y = equal + tl.cumsum(is_equal_Y.to(tl.int32), 0)
        is_kept_Y = (mass_Y > bound) | (mass_Y == NONE) | (is_equal_Y & (rank_Y <= ties))
        is_kept_Y = is_kept_Y | (first + m_Y == lead)
        share_Y = tl.load(share_U + m_Y, mask=m_Y < count, other=NONE)
        tl.store(limited_XC + first * width + m_Y, tl.where(is_kept_Y, share_Y, NONE), mask=m_Y < count)
        equal += tl.sum(is_equal_Y.to(tl.int32), 0)


@one_variant()
def _store_inner_nodes(
    nodes, plan, logw_S, tokens_XK, steps, selection, leaf_X, rows, width,
    K: tl.constexpr, S: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    index, n, c = tl.program_id(0), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_C)
    ancestor, row = tl.load(selection.particles.ancestor_A + index), tl.load(selection.particles.row_A + index)
    count = tl.load(selection.taken_A + index)
    slot, group = tl.load(plan.slot_A + index), tl.load(plan.group_A + index)
    offset = tl.load(logw_S + tl.load(plan.slot_A + ancestor))
    first, size = tl.load(plan.first_G + group).to(tl.int32), tl.load(plan.size_G + group).to(tl.int32)
    size = tl.where(tl.load(plan.decoding_G + group) == WALK, size, 0)
    exists_N, at_N = n < size, first + n
    exists_N = exists_N & (tl.load(selection.particles.alive_A + at_N, mask=exists_N, other=0) != 0)
    row_N = tl.load(selection.particles.row_A + at_N, mask=exists_N, other=0)
    count_N = tl.load(selection.taken_A + at_N, mask=exists_N, other=0)
    # Number of leading tokens that each row of the group shares with this row.
    common_N = tl.zeros((BLOCK_N,), tl.int32)
    for k in tl.static_range(K):
        token_N = tl.load(tokens_XK + row_N * K + k, mask=exists_N, other=-1)
        common_N += ((common_N == k) & (token_N == tl.load(tokens_XK + row * K + k))).to(tl.int32)
    leaf = tl.load(leaf_X + row)
    at = leaf % rows
    for d in tl.static_range(S - 1, K - 1):
        # Rows of fewer tokens than a block have no deeper nodes.
        tl.store(nodes.share_SKC + (slot * (K - 1) + d) * C + c, tl.zeros_like(c).to(tl.float32) + NONE, mask=c < C)
    for d in tl.static_range(S - 2, -1, -1):
        # Nodes of d + 1 tokens, the longest first; `at` is the row of the step that drafted the node's last token.
        at = tl.where(leaf // rows > d, tl.load(steps[d + 1].parent_X + at), at)
        through_N = exists_N & (common_N > d) & (count_N > d + 1)
        is_node = tl.max((through_N & (at_N == index)).to(tl.int32), 0) > 0
        is_node = is_node & (tl.max((through_N & (at_N < index)).to(tl.int32), 0) == 0)
        child_N = tl.load(tokens_XK + row_N * K + d + 1, mask=through_N, other=-1).to(tl.int32)
        token_C = tl.load(steps[d + 1].candidates.token_RC + at * width + c, mask=c < C, other=0).to(tl.int32)
        share_C = tl.load(steps[d + 1].candidates.share_RC + at * width + c, mask=c < C, other=NONE)
        is_child_C = tl.max((through_N[:, None] & (child_N[:, None] == token_C[None, :])).to(tl.int32), 0) > 0
        to = slot * (K - 1) + d
        tl.store(nodes.token_SKC + to * C + c, token_C, mask=c < C)
        tl.store(nodes.share_SKC + to * C + c, tl.where(is_child_C | (is_node == 0), NONE, share_C), mask=c < C)
        tl.store(nodes.mass_SK + to, tl.load(steps[d].tree.mass_X + at) - offset)
        tl.store(nodes.text_SK + to, tl.load(steps[d].tree.text_X + at))
    tl.store(nodes.count_S + slot, count)


@one_variant()
def _with_inner_nodes(
    nodes, plan, particles, candidates, found, out, spans, count, groups, width,
    K: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    node, c = tl.program_id(0), tl.arange(0, BLOCK_C)
    if node < groups:
        tl.store(spans.first_G + node, tl.load(plan.first_G + node) * K)
        tl.store(spans.size_G + node, tl.load(plan.size_G + node) * K)
    if node >= count:
        return
    index, depth = node // K, node % K
    decoding = tl.load(plan.decoding_G + tl.load(plan.group_A + index))
    at, is_inner = tl.load(plan.slot_A + index) * (K - 1) + depth - 1, depth > 0
    first_C, inner_C = (c < width) & (is_inner == 0), (c < C) & is_inner & (decoding == WALK)
    token_C = tl.load(candidates.token_RC + index * width + c, mask=first_C, other=0)
    inner_token_C = tl.load(nodes.token_SKC + at * C + c, mask=inner_C, other=0)
    token_C = tl.where(is_inner, inner_token_C.to(token_C.dtype), token_C)
    share_C = tl.load(nodes.share_SKC + at * C + c, mask=inner_C, other=NONE)
    logq_C = tl.where(is_inner, share_C, tl.load(candidates.logq_RC + index * width + c, mask=first_C, other=NONE))
    share_C = tl.where(is_inner, share_C, tl.load(candidates.share_RC + index * width + c, mask=first_C, other=NONE))
    tl.store(found.token_RC + node * width + c, token_C, mask=c < width)
    tl.store(found.logq_RC + node * width + c, logq_C, mask=c < width)
    tl.store(found.share_RC + node * width + c, share_C, mask=c < width)
    text = tl.load(particles.text_X + index)
    text = tl.where(is_inner, tl.load(nodes.text_SK + at, mask=is_inner, other=0), text)
    mass = tl.load(particles.mass_X + index)
    mass = tl.where(is_inner, tl.load(nodes.mass_SK + at, mask=is_inner, other=0.0), mass)
    block = tl.load(nodes.count_S + tl.load(plan.slot_A + index))
    tl.store(out.root_X + node, tl.load(particles.root_X + index))
    # The same zeros are the count, the last token, its position and the outcome of every node, and its tokens.
    tl.store(out.count_X + node, block * 0)
    tl.store(out.text_X + node, text)
    tl.store(out.cut_X + node, tl.where(is_inner, block - depth, 0))
    tl.store(out.alive_X + node, tl.load(particles.alive_X + index) != 0)
    tl.store(out.ended_X + node, (is_inner == 0) & (tl.load(particles.ended_X + index) != 0))
    tl.store(out.mass_X + node, mass)
