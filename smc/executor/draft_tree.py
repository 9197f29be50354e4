"""The draft tree of exact decoding: prunes it to the rows that are verified, and stores the inner nodes at which rows
ahead start. This is the torch form; `smc.kernels.draft_tree` has the Triton form.

**Rows that are verified** (`prune_tree`). Every step of the draft keeps the likeliest continuations of the group, so
some rows of a step have no continuation in a later step. A row that is verified is a path to any node, of any length.
The chosen rows hold as much of the tree together as possible: every node has a gain, its share of the group's mass, and
a row is worth the gains of those of its nodes that no other row holds. Nodes continue in their heaviest child, the one
with the most gain along its own best path. This divides the tree into paths, of which the heaviest are taken; on a tree
this equals greedy selection. In look-ahead the first token of a row is the outcome that the row is drafted for. If the
outcome comes true, it is known without verification, so it has no gain; and for one outcome at most as many rows are
useful as the group may have.

**Outcomes at inner nodes** (`store_inner_nodes`, `with_inner_nodes`). While the target verifies a block, the draft
grows rows from outcomes. An outcome is the node of the block's tree at which the walk of the target's draws ends, and
the token that the target draws there, which no row has. At the last token of a row every candidate token makes an
outcome. At an inner node, outcomes are the tokens that were candidates when the block was drafted and that no row of
the block took. Their scores were computed then: `InnerNodes` stores them when a round ends for the next round, whose
first step chooses among the outcomes of all nodes. A row ahead that starts at an inner node rolls back the rest of its
root's block (`cut`). Its keys and values continue those of the node, at the positions of the root's rolled-back tokens.

Local axes: U = A * K nodes from which rows may begin (for each batch index the last token of its row, then its inner
nodes), Y = K * X nodes of a tree (node k * X + x is row x of step k), Z = K - 1 inner nodes of a row (number d has d
+ 1 tokens)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smc.algorithm.expansion import LEAD_GAIN, CandidateTokens
from smc.algorithm.resampling import Spans
from smc.round.plan import RoundPlan
from smc.round.slot_state import InnerNodes, RoundSelection, SlotState
from smc.round.tensors import GrownRows, TokenTree
from smc.types import Decoding


def prune_tree(plan: RoundPlan[Tensor], grown: GrownRows, lookahead: bool) -> GrownRows:
    """Return the rows of groups with draft trees that are verified: at most as many as a step has. Other groups keep
    the rows of the last step."""
    steps, rows = grown.steps, len(plan.arrays.branch_pages_XB)
    gain_KX, alive_KX = _gains(plan, grown, lookahead)
    worth_KX, leaf_KX, is_top_KX = _paths(grown, gain_KX, alive_KX)
    is_useful_KX = is_top_KX
    if lookahead:
        # A row of an outcome alone would confirm no more than a miss does.
        is_short_Y = (leaf_KX < rows).flatten() & ~torch.cat([step.tree.ended_X for step in steps])
        is_useful_KX = is_top_KX & (~is_short_Y.view_as(is_top_KX) | (worth_KX >= LEAD_GAIN))
    worth_Y, leaf_Y = worth_KX.flatten(), leaf_KX.flatten()
    group_Y = plan.arrays.group_A.long().repeat_interleave(plan.kind.branches).repeat(len(steps))
    outcome_Y = torch.cat([step.tree.outcome_X for step in steps]) if lookahead else torch.zeros_like(group_Y)
    kept_Y = is_useful_KX.flatten()
    if lookahead:
        kept_Y = kept_Y & (
            _rank(worth_Y.masked_fill(~kept_Y, -1.0), outcome_Y) < plan.arrays.next_count_G.long()[group_Y]
        )
    most_G = plan.arrays.size_G.long() * plan.kind.branches
    kept_Y = kept_Y & (_rank(worth_Y.masked_fill(~kept_Y, -1.0), group_Y) < most_G[group_Y])
    # Rows with the same outcome are adjacent, the heaviest first.
    order_Y = worth_Y.sort(descending=True, stable=True).indices
    for key_Y in (outcome_Y, group_Y, (~kept_Y).long()):
        order_Y = order_Y[key_Y[order_Y].sort(stable=True).indices]
    number_Y = torch.empty_like(order_Y).scatter_(0, order_Y, torch.arange(len(order_Y), device=order_Y.device))
    count_G = torch.zeros_like(most_G).index_add(0, group_Y, kept_Y.long())
    before_G = count_G.cumsum(0) - count_G
    to_Y = (plan.arrays.first_G.long() * plan.kind.branches - before_G)[group_Y] + number_Y
    row_X = torch.arange(rows, device=worth_Y.device)
    group_X, last = group_Y[:rows], (len(steps) - 1) * rows
    leaf_X = torch.full_like(row_X, -1).index_copy(0, to_Y[kept_Y], leaf_Y[kept_Y])
    is_walk_X = (plan.arrays.decoding_G == Decoding.WALK)[group_X] & (plan.arrays.size_G > 0)[group_X]
    # A row that is not alive repeats the first of its group.
    first_X = leaf_X[(plan.arrays.first_G.long() * plan.kind.branches)[group_X].clamp(max=rows - 1)]
    is_there_X = leaf_X >= 0
    leaf_X = torch.where(is_there_X, leaf_X, first_X)
    leaf_X = torch.where(is_walk_X & (leaf_X >= 0), leaf_X, last + row_X)
    return grown._replace(tree=_taken(grown, leaf_X, is_there_X | ~is_walk_X), leaf_X=leaf_X)


def _gains(plan: RoundPlan[Tensor], grown: GrownRows, lookahead: bool) -> tuple[Tensor, Tensor]:
    """Return the gain of every node, float64 [K, X], and whether the node belongs to a live row of a draft tree
    [K, X]."""
    steps, branches = grown.steps, plan.kind.branches
    group_X = plan.arrays.group_A.long().repeat_interleave(branches)
    is_walk_X = (plan.arrays.decoding_G == Decoding.WALK)[group_X]
    alive_KX = torch.stack([step.tree.alive_X for step in steps]) & is_walk_X
    mass_KX = torch.stack([step.tree.mass_X for step in steps])
    first_mass_X = mass_KX[0].masked_fill(~alive_KX[0], -torch.inf)
    top_G = torch.full_like(plan.arrays.size_G, -torch.inf, dtype=torch.float64)
    top_X = top_G.scatter_reduce(0, group_X, first_mass_X, "amax")[group_X]
    # A row that ended at an earlier step continues as itself, without a token.
    step_K1 = torch.arange(len(steps), device=mass_KX.device)[:, None]
    is_new_KX = torch.stack([step.tree.count_X for step in steps]) > step_K1
    if lookahead:
        is_new_KX = is_new_KX & (step_K1 > 0)
    gain_KX = torch.where(alive_KX & is_new_KX, (mass_KX - top_X).exp(), 0.0)
    lead_G = plan.arrays.first_G.long() * branches
    is_lead_X = torch.arange(mass_KX.shape[1], device=mass_KX.device) == lead_G[group_X]
    gain_KX = gain_KX + torch.where(alive_KX & is_lead_X, LEAD_GAIN, 0.0)
    if not plan.kind.nodes:
        return gain_KX, alive_KX
    # The first token of a block, which is known, takes a node, too.
    tree_KX = torch.stack([step.tree.outcome_X if lookahead else group_X for step in steps])
    rank_Y = _rank(gain_KX.masked_fill(~(alive_KX & is_new_KX), -1.0).flatten(), tree_KX.flatten())
    is_kept_KX = is_new_KX & (rank_Y.view_as(gain_KX) < plan.arrays.nodes_G.long()[group_X] - 1)
    if lookahead:
        is_kept_KX[0] = True
    is_kept_KX = is_kept_KX & alive_KX
    # Only rounding, and the first row's gain, put a node before its parent.
    for step in range(1, len(steps)):
        is_kept_KX[step] &= is_kept_KX[step - 1][steps[step].parent_X]
    return torch.where(is_kept_KX, gain_KX, 0.0), is_kept_KX


def _paths(grown: GrownRows, gain_KX: Tensor, alive_KX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return for every node [K, X]: the sum of gains from it along its best path, the node at which that path ends, and
    whether a path begins at the node."""
    steps, (k, rows) = grown.steps, gain_KX.shape
    row_X = torch.arange(rows, device=gain_KX.device)
    worth, leaf = [gain_KX[-1]], [(k - 1) * rows + row_X]
    is_top: list[Tensor] = []
    for step in range(k - 2, -1, -1):
        parent_X, is_child_X = steps[step + 1].parent_X, alive_KX[step + 1]
        child_worth_X = torch.where(is_child_X, worth[0], -torch.inf)
        best_X = torch.full_like(child_worth_X, -torch.inf).scatter_reduce(0, parent_X, child_worth_X, "amax")
        is_heaviest_X = is_child_X & (child_worth_X == best_X[parent_X])
        # Among equals, the first.
        heaviest_X = torch.full_like(row_X, rows).scatter_reduce(
            0, parent_X, torch.where(is_heaviest_X, row_X, rows), "amin"
        )
        goes_on_X = heaviest_X < rows
        is_top.insert(0, is_child_X & (heaviest_X[parent_X] != row_X))
        leaf.insert(0, torch.where(goes_on_X, leaf[0][heaviest_X.clamp(max=rows - 1)], step * rows + row_X))
        worth.insert(0, gain_KX[step] + torch.where(goes_on_X, best_X, 0.0))
    return torch.stack(worth), torch.stack(leaf), torch.stack([alive_KX[0], *is_top])


def _rank(worth_Y: Tensor, of_Y: Tensor) -> Tensor:
    """Return the rank [Y] of every entry by worth, among those with the same `of`: 0 for the heaviest. Among equals,
    the first one is the heaviest."""
    order_Y = worth_Y.sort(descending=True, stable=True).indices
    order_Y = order_Y[of_Y[order_Y].sort(stable=True).indices]
    sorted_Y = of_Y[order_Y]
    rank_Y = torch.arange(len(of_Y), device=of_Y.device) - torch.searchsorted(sorted_Y, sorted_Y)
    return torch.empty_like(rank_Y).scatter_(0, order_Y, rank_Y)


def _taken(grown: GrownRows, leaf_X: Tensor, alive_X: Tensor) -> TokenTree:
    """Return the rows that end at these nodes."""
    trees = [step.tree for step in grown.steps]

    def at_leaf(name: str) -> Tensor:
        return torch.cat([getattr(tree, name) for tree in trees])[leaf_X]

    values: dict[str, Any] = {name: at_leaf(name) for name in TokenTree._fields}
    values["alive_X"] = values["alive_X"] & alive_X
    values["mass_X"] = torch.where(alive_X, values["mass_X"], -torch.inf)
    return TokenTree(**values)


def store_inner_nodes(
    nodes: InnerNodes, state: SlotState, plan: RoundPlan[Tensor], grown: GrownRows, selection: RoundSelection[Tensor]
) -> None:
    """Store the outcomes at inner nodes of the selected rows. A node that several rows of a group share is stored for
    the first of them. Call it before `advance`."""
    slot_A, row_A, count_A = plan.arrays.slot_A, selection.particles.row_A, selection.taken_A
    offset_A = state.logw_S[slot_A[selection.particles.ancestor_A]]
    tokens_AK, width = grown.tree.tokens_XK[row_A].long(), nodes.share_SKC.shape[2]
    index_A = plan.index_of_rows(1)
    is_before_AA = index_A < index_A[:, None]
    shares_AA = (
        (plan.arrays.group_A == plan.arrays.group_A[:, None])
        & selection.particles.alive_A
        & plan.is_decoded_by(Decoding.WALK)
    )
    assert grown.leaf_X is not None, "rows of a pruned tree"
    rows = len(grown.tree.mass_X)
    at_A, leaf_step_A = grown.leaf_X[row_A] % rows, grown.leaf_X[row_A] // rows
    # Rows of fewer tokens than a block have no deeper nodes.
    nodes.share_SKC[slot_A] = -torch.inf
    for d in range(len(grown.steps) - 2, -1, -1):
        before, step = grown.steps[d].tree, grown.steps[d + 1]
        at_A = torch.where(leaf_step_A > d, step.parent_X[at_A], at_A)
        token_AC, share_AC = step.candidates.token_RC[at_A, :width], step.candidates.share_RC[at_A, :width]
        # Rows that go through this node and have a token after it.
        same_AA = (tokens_AK[:, None, : d + 1] == tokens_AK[None, :, : d + 1]).all(-1)
        through_AA = shares_AA & same_AA & (count_A > d + 1)
        is_node_A = through_AA.diagonal() & ~(through_AA & is_before_AA).any(-1)
        is_child_AC = (through_AA[:, None] & (token_AC[..., None] == tokens_AK[:, d + 1])).any(-1)
        is_outcome_AC = is_node_A[:, None] & ~is_child_AC
        nodes.token_SKC[slot_A, d] = token_AC.int()
        nodes.share_SKC[slot_A, d] = share_AC.masked_fill(~is_outcome_AC, -torch.inf)
        nodes.mass_SK[slot_A, d] = before.mass_X[at_A] - offset_A
        nodes.text_SK[slot_A, d] = before.text_X[at_A]
    nodes.count_S[slot_A] = count_A


def limit_outcomes(
    plan: RoundPlan[Tensor], tree: TokenTree, candidates: CandidateTokens, has_rest: bool
) -> CandidateTokens:
    """Return the candidates [X, C] without useless ones: of each outcome, only the candidates of largest mass continue,
    at most as many as the group may have rows after the round. The first candidate of a group's first row stays
    (`smc.algorithm.expansion`)."""
    share_XC, device = candidates.share_RC, tree.mass_X.device
    (rows, width), group_X = share_XC.shape, plan.arrays.group_A.repeat_interleave(plan.kind.branches)
    is_ended_X = tree.ended_X & tree.alive_X
    ended_X = torch.zeros(rows, dtype=torch.int64, device=device).index_add(0, tree.outcome_X, is_ended_X.long())
    most_X = plan.arrays.next_count_G.long()[group_X] - ended_X[tree.outcome_X]
    is_walk_X = (plan.arrays.decoding_G == Decoding.WALK)[group_X]
    mass_XC = (tree.mass_X[:, None] + share_XC.double()).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    mass_XC = mass_XC.masked_fill((tree.ended_X | ~tree.alive_X)[:, None], -torch.inf)
    mass_XC = mass_XC.masked_fill(torch.arange(width, device=device) >= width - has_rest, -torch.inf)
    rank_XC = _rank(mass_XC.flatten(), tree.outcome_X.repeat_interleave(width)).view(rows, width)
    is_first_X = torch.arange(rows, device=device) == plan.arrays.first_G.long()[group_X] * plan.kind.branches
    is_lead_XC = is_first_X[:, None] & (torch.arange(width, device=device) == 0)
    too_many_XC = (rank_XC >= most_X[:, None]) & (mass_XC > -torch.inf) & is_walk_X[:, None] & ~is_lead_XC
    return candidates._replace(share_RC=share_XC.masked_fill(too_many_XC, -torch.inf))


def with_inner_nodes(
    nodes: InnerNodes, plan: RoundPlan[Tensor], tree: TokenTree, candidates: CandidateTokens
) -> tuple[CandidateTokens, TokenTree, Spans]:
    """Return the candidates [U, C] at all nodes of the particles, the nodes as rows [U], and the nodes of each
    group. `tree`: the particles as rows; `candidates`: [A, C] after their last tokens."""
    slot_A, k = plan.arrays.slot_A, nodes.block
    most = nodes.share_SKC.shape[2]
    share_AZC = nodes.share_SKC[slot_A].masked_fill(~plan.is_decoded_by(Decoding.WALK)[:, None, None], -torch.inf)
    token_AKC, logq_AKC, share_AKC = (
        values_AC[:, None].repeat(1, k, 1)
        for values_AC in (candidates.token_RC, candidates.logq_RC, candidates.share_RC)
    )
    share_AKC[:, 1:] = -torch.inf
    token_AKC[:, 1:, :most] = nodes.token_SKC[slot_A].to(token_AKC.dtype)
    logq_AKC[:, 1:, :most] = share_AZC
    share_AKC[:, 1:, :most] = share_AZC
    depth_K = torch.arange(k, device=slot_A.device)
    cut_AK = torch.where(depth_K == 0, 0, nodes.count_S[slot_A][:, None] - depth_K)

    def of_nodes(first_A: Tensor, inner_AZ: Tensor) -> Tensor:
        return torch.cat((first_A[:, None], inner_AZ.to(first_A.dtype)), 1).flatten()

    inner_AZ = torch.zeros_like(nodes.text_SK[slot_A])
    rows_U = plan.index_of_rows(k)
    nodes_as_rows = TokenTree(
        root_X=tree.root_X.repeat_interleave(k),
        tokens_XK=tree.tokens_XK[rows_U],
        logq_XK=tree.logq_XK[rows_U],
        tail_XB=tree.tail_XB[rows_U],
        count_X=tree.count_X.repeat_interleave(k),
        alive_X=tree.alive_X.repeat_interleave(k),
        ended_X=of_nodes(tree.ended_X, inner_AZ),
        before_X=of_nodes(tree.before_X, nodes.text_SK[slot_A]),
        text_X=of_nodes(tree.text_X, nodes.text_SK[slot_A]),
        mass_X=of_nodes(tree.mass_X, nodes.mass_SK[slot_A]),
        last_X=tree.last_X.repeat_interleave(k),
        next_X=tree.next_X.repeat_interleave(k),
        cut_X=cut_AK.flatten(),
        outcome_X=tree.outcome_X.repeat_interleave(k),
    )
    candidates = CandidateTokens(*(values.flatten(0, 1) for values in (token_AKC, logq_AKC, share_AKC)))
    return candidates, nodes_as_rows, Spans(plan.arrays.first_G * k, plan.arrays.size_G * k)
