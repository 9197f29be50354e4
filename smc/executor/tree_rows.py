"""Which rows of a draft tree are verified (exact decoding). The torch form; `smc.kernels.tree_rows` is the Triton form.

Every step of the draft keeps the likeliest continuations of the group, so some of its rows go on in no row of a later
step. A row that is verified is a path to any node, of any length, and the rows are those that hold most of the tree
together: every node has a gain, its share of the group's mass, and a row is worth the gains of its nodes that no other
row holds. Nodes continue in their heaviest child, the one with most gain along its own best path; this divides the tree
into paths, of which the heaviest are taken. On a tree this is what choosing greedily comes to.

In look-ahead the first token of a row is the outcome that it is drafted for. If it comes true, it is known without being
verified, so it has no gain; and of one outcome at most as many rows are of use as the group may have.

See the package's legend for axes; M nodes, K X of them: node k X + x is row x of step k."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from smc.algorithm.expansion import LEAD_GAIN, PopulationKind
from smc.executor.draft import GrownRows, TokenTree
from smc.executor.plan import RoundPlan


def choose_rows(plan: RoundPlan[Tensor], grown: GrownRows, lookahead: bool) -> GrownRows:
    """The rows of groups that are decoded exactly: as many as a step has, at most. Other groups keep those of the last
    step."""
    steps, rows = grown.steps, len(plan.branch_pages_XB)
    gain_KX, alive_KX = _gains(plan, grown, lookahead)
    worth_KX, leaf_KX, is_top_KX = _paths(grown, gain_KX, alive_KX)
    is_useful_KX = is_top_KX
    if lookahead:
        is_short_M = (leaf_KX < rows).flatten() & ~torch.cat([step.tree.ended_X for step in steps])
        is_useful_KX = is_top_KX & (~is_short_M.view_as(is_top_KX) | (worth_KX >= LEAD_GAIN))
    worth_M, leaf_M = worth_KX.flatten(), leaf_KX.flatten()
    group_M = plan.group_A.long().repeat_interleave(plan.branches).repeat(len(steps))
    outcome_M = torch.cat([step.tree.outcome_X for step in steps]) if lookahead else torch.zeros_like(group_M)
    kept_M = is_useful_KX.flatten()
    if lookahead:
        kept_M = kept_M & (_rank(worth_M, kept_M, outcome_M) < plan.draws_G.long()[group_M])
    most_G = plan.size_G.long() * plan.branches
    kept_M = kept_M & (_rank(worth_M, kept_M, group_M) < most_G[group_M])
    # Rows of one outcome are beside each other, the heaviest first.
    order_M = worth_M.sort(descending=True, stable=True).indices
    for key_M in (outcome_M, group_M, (~kept_M).long()):
        order_M = order_M[key_M[order_M].sort(stable=True).indices]
    number_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))
    count_G = torch.zeros_like(most_G).index_add(0, group_M, kept_M.long())
    before_G = count_G.cumsum(0) - count_G
    to_M = (plan.first_G.long() * plan.branches - before_G)[group_M] + number_M
    index_X = torch.arange(rows, device=worth_M.device)
    group_X, last = group_M[:rows], (len(steps) - 1) * rows
    leaf_X = torch.full_like(index_X, -1).index_copy(0, to_M[kept_M], leaf_M[kept_M])
    is_best_X = (plan.kind_G == PopulationKind.BEST)[group_X] & (plan.size_G > 0)[group_X]
    # A row that is not alive repeats the first of its group.
    first_X = leaf_X[(plan.first_G.long() * plan.branches)[group_X].clamp(max=rows - 1)]
    is_there_X = leaf_X >= 0
    leaf_X = torch.where(is_there_X, leaf_X, first_X)
    leaf_X = torch.where(is_best_X & (leaf_X >= 0), leaf_X, last + index_X)
    return replace(grown, tree=_taken(grown, leaf_X, is_there_X | ~is_best_X), leaf_X=leaf_X)


def _gains(plan: RoundPlan[Tensor], grown: GrownRows, lookahead: bool) -> tuple[Tensor, Tensor]:
    """Gain [K, X] of every node, float64, and whether it is of a row that is alive."""
    steps, branches = grown.steps, plan.branches
    group_X = plan.group_A.long().repeat_interleave(branches)
    is_best_X = (plan.kind_G == PopulationKind.BEST)[group_X]
    alive_KX = torch.stack([step.tree.alive_X for step in steps]) & is_best_X
    mass_KX = torch.stack([step.tree.mass_X for step in steps])
    first_mass_X = mass_KX[0].masked_fill(~alive_KX[0], -torch.inf)
    top_G = torch.full_like(plan.size_G, -torch.inf, dtype=torch.float64)
    top_X = top_G.scatter_reduce(0, group_X, first_mass_X, "amax")[group_X]
    # A row that had ended before goes on as itself, without a token.
    step_K1 = torch.arange(len(steps), device=mass_KX.device)[:, None]
    is_new_KX = torch.stack([step.tree.count_X for step in steps]) > step_K1
    if lookahead:
        is_new_KX = is_new_KX & (step_K1 > 0)
    gain_KX = torch.where(alive_KX & is_new_KX, (mass_KX - top_X).exp(), 0.0)
    lead_G = plan.first_G.long() * branches
    is_lead_X = torch.arange(mass_KX.shape[1], device=mass_KX.device) == lead_G[group_X]
    return gain_KX + torch.where(alive_KX & is_lead_X, LEAD_GAIN, 0.0), alive_KX


def _paths(grown: GrownRows, gain_KX: Tensor, alive_KX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of every node: the gains from it along its best path [K, X], the node [K, X] at which that path ends, and whether
    the path begins here [K, X]."""
    steps, (k, rows) = grown.steps, gain_KX.shape
    index_X = torch.arange(rows, device=gain_KX.device)
    worth, leaf = [gain_KX[-1]], [(k - 1) * rows + index_X]
    is_top: list[Tensor] = []
    for step in range(k - 2, -1, -1):
        parent_X, is_child_X = steps[step + 1].parent_X, alive_KX[step + 1]
        child_worth_X = torch.where(is_child_X, worth[0], -torch.inf)
        best_X = torch.full_like(child_worth_X, -torch.inf).scatter_reduce(0, parent_X, child_worth_X, "amax")
        is_heaviest_X = is_child_X & (child_worth_X == best_X[parent_X])
        # Of equal ones the first.
        heaviest_X = torch.full_like(index_X, rows).scatter_reduce(
            0, parent_X, torch.where(is_heaviest_X, index_X, rows), "amin"
        )
        goes_on_X = heaviest_X < rows
        is_top.insert(0, is_child_X & (heaviest_X[parent_X] != index_X))
        leaf.insert(0, torch.where(goes_on_X, leaf[0][heaviest_X.clamp(max=rows - 1)], step * rows + index_X))
        worth.insert(0, gain_KX[step] + torch.where(goes_on_X, best_X, 0.0))
    return torch.stack(worth), torch.stack(leaf), torch.stack([alive_KX[0], *is_top])


def _rank(worth_M: Tensor, exists_M: Tensor, of_M: Tensor) -> Tensor:
    """Rank [M] of every node among those of the same `of` that exist, by worth: 0 for the heaviest."""
    order_M = torch.where(exists_M, worth_M, -1.0).sort(descending=True, stable=True).indices
    order_M = order_M[of_M[order_M].sort(stable=True).indices]
    sorted_M = of_M[order_M]
    rank_M = torch.arange(len(of_M), device=of_M.device) - torch.searchsorted(sorted_M, sorted_M)
    return torch.empty_like(rank_M).scatter_(0, order_M, rank_M)


def _taken(grown: GrownRows, leaf_X: Tensor, alive_X: Tensor) -> TokenTree:
    """The rows that end at these nodes."""
    trees = [step.tree for step in grown.steps]

    def at_leaf(name: str) -> Tensor:
        return torch.cat([getattr(tree, name) for tree in trees])[leaf_X]

    values = {name: at_leaf(name) for name in vars(grown.tree) if name != "run_4X"}
    values["alive_X"] = values["alive_X"] & alive_X
    values["mass_X"] = torch.where(alive_X, values["mass_X"], -torch.inf)
    return TokenTree(**values, run_4X=None)
