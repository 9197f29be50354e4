"""Tokens that blocks of one draft tree have in common run once at the target. This is the torch form; the Triton form
is `smc.kernels.nodes`.

The blocks of a group are paths of one tree (`smc.executor.draft_tree`), and many begin alike: of eight blocks of six
tokens, on average 43 tokens are drafted and 24 are different. A node is a token together with all tokens of its block
before it. It runs as a row of one token, on the page of the first block that holds it; this block's earlier tokens are
its ancestors, whose pages it reads. Blocks then have the pages and outputs of their nodes, so everything after the pass
is as if each block had run by itself.

Shapes follow from the plan: there is room for a fixed number of nodes, of which each group has a share. The draft keeps
its trees to these shares (`smc.executor.draft_tree.prune_tree`). In look-ahead, a block was drafted by an earlier
plan, whose shares may have been larger: tokens without a node are not verified."""

from __future__ import annotations

import torch
from torch import Tensor

from smc.round.draws import DrawKeys
from smc.round.plan import RoundPlan
from smc.round.tensors import NodeLayout, VerifyInputs


def lay_out_nodes(plan: RoundPlan[Tensor], inputs: VerifyInputs) -> VerifyInputs:
    """Return the inputs of a pass over the nodes of blocks."""
    blocks, rows, most = inputs.blocks, inputs.rows, plan.kind.nodes
    tokens_AQ, pages_AQ = blocks.tokens_AQ, plan.arrays.target_pages_AQ
    (batch_size, q), device = tokens_AQ.shape, tokens_AQ.device
    column_Q, index_A = torch.arange(q, device=device), torch.arange(batch_size, device=device)
    runs_AQ, group_A = column_Q < blocks.run_A[:, None], rows.group_R.long()
    # Two blocks have a token in common if all tokens up to it are the same. The first block holds it.
    is_equal_AA = (group_A == group_A[:, None]) & (rows.start_R == rows.start_R[:, None])
    is_same_AAQ = (tokens_AQ == tokens_AQ[:, None]).long().cumprod(-1).bool() & is_equal_AA[..., None] & runs_AQ
    holder_AQ = is_same_AAQ.long().argmax(1)
    is_first_AQ = runs_AQ & (holder_AQ == index_A[:, None])
    # Nodes are numbered within their group. Along a block numbers grow, so the tokens that have a node come first.
    number_AQ = is_first_AQ.flatten().cumsum(0).view_as(is_first_AQ)
    before_G = torch.zeros_like(rows.first_G, dtype=torch.int64).index_add(0, group_A, is_first_AQ.sum(-1)).cumsum(0)
    number_AQ = number_AQ[holder_AQ, column_Q] - 1 - torch.cat((before_G[:1] * 0, before_G[:-1]))[group_A][:, None]
    has_node_AQ = runs_AQ & (number_AQ < plan.arrays.nodes_G[group_A][:, None])
    is_node_AQ = is_first_AQ & has_node_AQ
    count_G = torch.zeros_like(before_G).index_add(0, group_A, is_node_AQ.sum(-1))
    first_G = count_G.cumsum(0) - count_G
    node_AQ = torch.where(has_node_AQ, first_G[group_A][:, None] + number_AQ, 0)
    token_T = torch.zeros(most, dtype=torch.int64, device=device)
    token_T[node_AQ[is_node_AQ]] = torch.arange(batch_size * q, device=device).view_as(node_AQ)[is_node_AQ]
    run_A = has_node_AQ.sum(-1)
    pages_AQ = torch.where(has_node_AQ, pages_AQ[holder_AQ, column_Q], pages_AQ)
    index_T, depth_T = token_T // q, token_T % q
    nodes = NodeLayout(
        node_AQ=node_AQ,
        token_T=token_T,
        count_A=torch.where(run_A < blocks.run_A, run_A, blocks.count_A),
        pages_AQ=pages_AQ,
    )
    return inputs._replace(
        blocks=blocks._replace(run_A=run_A),
        rows=rows._replace(
            slot_R=rows.slot_R[index_T],
            tail_RB=pages_AQ[index_T],
            tail_R=rows.start_R[index_T],
            start_R=(rows.start_R[index_T] + depth_T).int(),
            count_R=(torch.arange(most, device=device) < count_G.sum()).int(),
            group_R=rows.group_R[index_T],
            first_G=first_G.int(),
            size_G=count_G.int(),
            queries=1,
            path_RB=_path(node_AQ, index_T, depth_T),
        ),
        distribution_T=inputs.distribution_T.take(token_T),
        label_T=inputs.label_T[token_T],
        keys=DrawKeys(
            seed_R=inputs.keys.seed_R[token_T],
            round_R=inputs.keys.round_R[token_T],
            stream_RF=inputs.keys.stream_RF[token_T],
            position_R=inputs.keys.position_R[token_T],
            purpose=inputs.keys.purpose,
        ),
        nodes=nodes,
    )


def _path(node_AQ: Tensor, index_T: Tensor, depth_T: Tensor) -> Tensor:
    """Return the nodes of every node's block up to itself, int32 [T, Q], and 0 after it."""
    is_past_TQ = torch.arange(node_AQ.shape[1], device=node_AQ.device) > depth_T[:, None]
    return node_AQ[index_T].masked_fill(is_past_TQ, 0).int()
