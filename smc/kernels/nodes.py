"""Tokens that blocks of one draft tree have in common: the Triton form of `smc.executor.verify`.

Both kernels have a program for each group and some for batch indices of no group. `_find_nodes` numbers the nodes of
each group, `_write_nodes` those of all groups, and writes what a pass reads of each node."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from smc.api.limits import MAX_PARTICLES
from smc.arrays import Room, contiguous
from smc.distributions import DistributionSpec
from smc.kernels.launch import GROUPS, one_variant, own_indices, programs
from smc.kernels.truncation import copy_distribution
from smc.philox import DrawKeys
from smc.round.plan import RoundPlan
from smc.round.tensors import NodeLayout, RowSpans, VerifyInputs


class Numbers(NamedTuple):
    """Nodes numbered within their group."""

    holder_AQ: Tensor
    """int32 batch index whose block holds the node of each token; -1: the token has none."""
    number_AQ: Tensor
    """int32 number of this node."""
    count_G: Tensor
    """int32 number of nodes of each group."""


def lay_out_nodes(plan: RoundPlan[Tensor], inputs: VerifyInputs) -> VerifyInputs:
    """See `smc.executor.verify.lay_out_nodes`."""
    blocks, rows, most, arrays = inputs.blocks, inputs.rows, plan.kind.nodes, plan.arrays
    (batch_size, q), groups, room = blocks.tokens_AQ.shape, len(arrays.first_G), Room(blocks.tokens_AQ.device)
    numbers = Numbers(room.ints(batch_size, q), room.ints(batch_size, q), room.ints(groups))
    none_T = room.longs(most)
    out = VerifyInputs(
        blocks=blocks._replace(run_A=room.longs(batch_size)),
        rows=rows._replace(
            tables=rows.tables._replace(slot_R=room.ints(most), tail_RB=room.ints(most, q), tail_R=room.ints(most)),
            spans=RowSpans(room.ints(most), room.ints(most)),
            groups=rows.groups._replace(group_R=room.ints(most), first_G=room.ints(groups), size_G=room.ints(groups)),
            queries=1,
            path_RB=room.ints(most, q),
        ),
        distribution_T=DistributionSpec.allocate(room, most, inputs.distribution_T.active),
        label_T=room.ints(most),
        keys=DrawKeys(room.longs(most), none_T, none_T[:, None], room.longs(most), inputs.keys.purpose),
        last_A=inputs.last_A,
        nodes=NodeLayout(
            node_AQ=room.longs(batch_size, q),
            token_T=room.longs(most),
            count_A=room.longs(batch_size),
            pages_AQ=room.ints(batch_size, q),
        ),
    )
    grid, given = (programs(batch_size, groups),), contiguous(inputs)
    sizes = {"Q": q, "BLOCK_N": MAX_PARTICLES, "BLOCK_Q": triton.next_power_of_2(q)}
    start_R = given.rows.spans.start_R
    _find_nodes[grid](arrays, given.blocks, start_R, numbers, out, groups, batch_size, **sizes, num_warps=4)
    _write_nodes[grid](arrays, given, numbers, out, groups, batch_size, most, **sizes, num_warps=4)
    return out


@one_variant()
def _find_nodes(
    plan, blocks, start_R, numbers, out, groups, batch_size,
    Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Find the first block that holds each token, and number the tokens that a block is the first to hold."""
    index, exists, group, is_group = own_indices(plan.first_G, plan.size_G, groups, batch_size, BLOCK_N)
    q = tl.arange(0, BLOCK_Q)[None, :]
    at, inside = index[:, None] * Q + q, exists[:, None] & (q < Q)
    run = tl.load(blocks.run_A + index, mask=exists & is_group, other=0)
    start = tl.load(start_R + index, mask=exists, other=-1)
    token, runs = tl.load(blocks.tokens_AQ + at, mask=inside, other=-1), inside & (q < run[:, None])
    holder = tl.where(runs, index[:, None], -1)
    first, size = tl.load(plan.first_G + group).to(tl.int32), tl.load(plan.size_G + group).to(tl.int32)
    for back in range(tl.where(is_group, size, 0)):
        # From the last block to the first, so that the first one remains.
        other = first + size - 1 - back
        other_token = tl.load(blocks.tokens_AQ + other * Q + q, mask=q < Q, other=-1)
        other_run, other_start = tl.load(blocks.run_A + other), tl.load(start_R + other)
        alike = tl.min(tl.where(token == other_token, Q, q), 1)
        alike = tl.where(start == other_start, tl.minimum(alike.to(tl.int64), other_run), 0)
        holder = tl.where(runs & (q < alike[:, None]), other, holder)
    is_first = runs & (holder == index[:, None])
    in_row = tl.cumsum(is_first.to(tl.int32), 1)
    of_row = tl.sum(is_first.to(tl.int32), 1)
    number = (tl.cumsum(of_row, 0) - of_row)[:, None] + in_row - 1
    tl.store(numbers.number_AQ + at, number, mask=inside)
    tl.debug_barrier()
    # Along a block numbers grow, so the tokens that have a node come first.
    number = tl.load(numbers.number_AQ + holder * Q + q, mask=runs, other=0)
    most = tl.load(plan.nodes_G + group)
    has_node = runs & (number < most)
    tl.debug_barrier()
    tl.store(numbers.number_AQ + at, number, mask=inside)
    tl.store(numbers.holder_AQ + at, tl.where(has_node, holder, -1), mask=inside)
    page = tl.load(plan.target_pages_AQ + tl.where(has_node, holder, index[:, None]) * Q + q, mask=inside, other=0)
    tl.store(out.nodes.pages_AQ + at, page, mask=inside)
    reached = tl.sum(has_node.to(tl.int32), 1).to(tl.int64)
    count = tl.load(blocks.count_A + index, mask=exists, other=1)
    tl.store(out.blocks.run_A + index, reached, mask=exists)
    tl.store(out.nodes.count_A + index, tl.where(reached < run, reached, count), mask=exists)
    if is_group:
        tl.store(numbers.count_G + group, tl.minimum(tl.sum(of_row, 0), most))


@one_variant()
def _write_nodes(
    plan, given, numbers, out, groups, batch_size, most,
    Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Write what a pass reads of each node. Programs without a group write the unused nodes."""
    index, exists, group, is_group = own_indices(plan.first_G, plan.size_G, groups, batch_size, BLOCK_N)
    until = tl.where(is_group, group, groups)
    before = 0
    for begin in range(0, until, GROUPS):
        g = begin + tl.arange(0, GROUPS)
        before += tl.sum(tl.load(numbers.count_G + g, mask=g < until, other=0), 0)
    if is_group:
        tl.store(out.rows.groups.first_G + group, before)
        tl.store(out.rows.groups.size_G + group, tl.load(numbers.count_G + group))
    q = tl.arange(0, BLOCK_Q)[None, :]
    at, inside = index[:, None] * Q + q, exists[:, None] & (q < Q)
    holder = tl.load(numbers.holder_AQ + at, mask=inside, other=-1)
    node = tl.where(holder >= 0, before + tl.load(numbers.number_AQ + at, mask=inside, other=0), 0)
    tl.store(out.nodes.node_AQ + at, node.to(tl.int64), mask=inside)
    is_first = inside & (holder == index[:, None])
    one = index[:, None] + q * 0
    _write_node(node, is_first, at, one, q, given, out)
    tl.store(out.rows.spans.count_R + node, q * 0 + 1 + index[:, None] * 0, mask=is_first)
    for b in tl.static_range(Q):
        page = tl.load(out.nodes.pages_AQ + index * Q + b, mask=exists, other=0)
        tl.store(out.rows.tables.tail_RB + node * Q + b, page[:, None] + q * 0, mask=is_first)
        ancestor = tl.load(numbers.number_AQ + index * Q + b, mask=exists, other=0) + before
        tl.store(out.rows.path_RB + node * Q + b, tl.where(b <= q, ancestor[:, None], 0), mask=is_first)
    if not is_group:
        _write_unused(before + (tl.program_id(0) - groups) * BLOCK_N, most, (tl.num_programs(0) - groups) * BLOCK_N,
                      given, out, Q, BLOCK_N)  # fmt: skip


@triton.jit
def _write_unused(first, most, stride, given, out, Q: tl.constexpr, BLOCK_N: tl.constexpr):
    """Let unused nodes repeat the first token of the batch, without running it."""
    n = tl.arange(0, BLOCK_N)[:, None]
    zero = n * 0
    for begin in range(first, most, stride):
        node = begin + n
        is_unused = node < most
        _write_node(node, is_unused, zero, zero, zero, given, out)
        tl.store(out.rows.spans.count_R + node, zero, mask=is_unused)
        for b in tl.static_range(Q):
            page_of_first = tl.load(out.nodes.pages_AQ + b)
            tl.store(out.rows.tables.tail_RB + node * Q + b, zero + page_of_first, mask=is_unused)
            tl.store(out.rows.path_RB + node * Q + b, zero, mask=is_unused)


@triton.jit
def _write_node(node, mask, token, index, depth, given, out):
    """Write the fields of nodes that have the same shape for all: of the token `token` of batch index `index`, the
    `depth`-th of its block."""
    start = tl.load(given.rows.spans.start_R + index, mask=mask, other=0)
    tl.store(out.nodes.token_T + node, token.to(tl.int64), mask=mask)
    tl.store(out.rows.tables.slot_R + node, tl.load(given.rows.tables.slot_R + index, mask=mask, other=0), mask=mask)
    tl.store(out.rows.groups.group_R + node, tl.load(given.rows.groups.group_R + index, mask=mask, other=0), mask=mask)
    tl.store(out.rows.tables.tail_R + node, start, mask=mask)
    tl.store(out.rows.spans.start_R + node, start + depth, mask=mask)
    tl.store(out.label_T + node, tl.load(given.label_T + token, mask=mask, other=-1), mask=mask)
    copy_distribution(out.distribution_T, node, given.distribution_T, token, mask)
    tl.store(out.keys.seed_R + node, tl.load(given.keys.seed_R + token, mask=mask, other=0), mask=mask)
    tl.store(out.keys.round_R + node, tl.load(given.keys.round_R + token, mask=mask, other=0), mask=mask)
    tl.store(out.keys.position_R + node, tl.load(given.keys.position_R + token, mask=mask, other=0), mask=mask)
