"""The outcomes at inner nodes that rows ahead start from: the Triton form of `smc.executor.inner_nodes`. `keep_nodes` has
a program for every batch index, `with_inner_nodes` one for every node, `limit_outcomes` one for every row, of which the
first of an outcome does the work.

See `smc.executor.inner_nodes` for axes; N rows of a group, M candidates of all rows, I at a time."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from smc.algorithm.expansion import PopulationKind
from smc.api.limits import MAX_PARTICLES
from smc.kernels.expansion import _bound
from smc.kernels.launch import one_variant
from smc.kernels.round_tensors import PlanTensors, Room

BEST = tl.constexpr(int(PopulationKind.BEST))
NONE = tl.constexpr(-float("inf"))


class NodeTensors(NamedTuple):
    """Of `smc.executor.inner_nodes.InnerNodes`."""

    token_SDC: Tensor
    share_SDC: Tensor
    mass_SD: Tensor
    text_SD: Tensor
    count_S: Tensor


class StepTensors(NamedTuple):
    """Of `smc.executor.draft.DraftStep` and its rows."""

    parent_X: Tensor
    token_XC: Tensor
    share_XC: Tensor
    mass_X: Tensor
    text_X: Tensor


class ParticleTensors(NamedTuple):
    """Of a `smc.executor.draft.TokenTree` of particles, and of the candidates after them."""

    root_X: Tensor
    alive_X: Tensor
    ended_X: Tensor
    text_X: Tensor
    mass_X: Tensor
    token_AC: Tensor
    logq_AC: Tensor
    share_AC: Tensor


class OutcomeRows(NamedTuple):
    """Of a `smc.executor.draft.TokenTree`, and of the candidates of its rows."""

    outcome_X: Tensor
    mass_X: Tensor
    alive_X: Tensor
    ended_X: Tensor
    share_XC: Tensor


class NodeRows(NamedTuple):
    """Written by `with_inner_nodes`."""

    numbers_4H: Tensor
    """Root, 0, text state, tokens taken back."""
    flags_2H: Tensor
    """Alive, ended."""
    mass_H: Tensor
    token_HC: Tensor
    values_2HC: Tensor
    """Log q, log share."""
    bounds_2G: Tensor
    """First node, nodes."""


def keep_nodes(
    nodes: NodeTensors,
    plan: PlanTensors,
    logw_S: Tensor,
    tokens_XK: Tensor,
    steps: tuple[StepTensors, ...],
    choice_9A: Tensor,
    leaf_X: Tensor,
) -> None:
    """See `smc.executor.inner_nodes.keep_nodes`."""
    (batch_size, block), (_, inner, most) = (len(plan.slot_A), tokens_XK.shape[1]), nodes.share_SDC.shape
    assert block == inner + 1, f"rows of {block} tokens, {inner} inner nodes"
    _keep_nodes[(batch_size,)](
        nodes, plan, logw_S, tokens_XK, steps, choice_9A, leaf_X, batch_size, len(leaf_X), steps[-1].token_XC.shape[1],
        K=block, C=most, BLOCK_N=MAX_PARTICLES, BLOCK_C=triton.next_power_of_2(most), num_warps=4,
    )  # fmt: skip


def with_inner_nodes(nodes: NodeTensors, plan: PlanTensors, particles: ParticleTensors) -> NodeRows:
    """See `smc.executor.inner_nodes.with_inner_nodes`."""
    (batch_size, width), (_, inner, most) = particles.share_AC.shape, nodes.share_SDC.shape
    room, groups, count = Room(plan.slot_A.device), len(plan.first_G), batch_size * (inner + 1)
    out = NodeRows(
        numbers_4H=room.longs(4, count),
        flags_2H=room.bools(2, count),
        mass_H=room.doubles(count),
        token_HC=particles.token_AC.new_empty(count, width),
        values_2HC=room.floats(2, count, width),
        bounds_2G=room.ints(2, groups),
    )
    _with_inner_nodes[(max(count, groups),)](
        nodes, plan, particles, out, count, groups, width,
        K=inner + 1, C=most, BLOCK_C=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return out


def limit_outcomes(plan: PlanTensors, rows: OutcomeRows, branches: int, has_rest: bool, chunk: int = 512) -> Tensor:
    """See `smc.executor.inner_nodes.limit_outcomes`: the candidates' log shares."""
    (count, width), room = rows.share_XC.shape, Room(plan.slot_A.device)
    share_XC, log_mass_M = room.floats(count, width), room.doubles(count * width)
    _limit_outcomes[(count,)](
        plan, rows, share_XC, log_mass_M, count, width, width - 1 if has_rest else -1,
        # An outcome has one row more than its group where the first row's candidate is kept besides.
        F=branches, BLOCK_N=2 * MAX_PARTICLES, CHUNK=chunk, num_warps=4,
    )  # fmt: skip
    return share_XC


@one_variant()
def _limit_outcomes(
    plan, rows, share_XC, log_mass_M, total, width, rest, F: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Where a group is decoded exactly, the first row of an outcome writes the shares of all of its rows."""
    first = tl.program_id(0)
    group = tl.load(plan.group_A + first // F)
    is_best = tl.load(plan.kind_G + group) == BEST
    outcome = tl.load(rows.outcome_X + first)
    if is_best & (tl.load(rows.outcome_X + first - 1, mask=first > 0, other=-1) == outcome):
        return
    n = first + tl.arange(0, BLOCK_N)
    of_N = (tl.load(rows.outcome_X + n, mask=n < total, other=-1) == outcome) & (is_best | (n == first))
    alive_N, ended_N = (
        tl.load(rows.alive_X + n, mask=of_N, other=0) != 0,
        tl.load(rows.ended_X + n, mask=of_N, other=0) != 0,
    )
    count = tl.sum(of_N.to(tl.int32), 0) * width
    most = tl.load(plan.draws_G + group).to(tl.int32) - tl.sum((alive_N & ended_N).to(tl.int32), 0)
    share_M, log_mass_M = rows.share_XC + first * width, log_mass_M + first * width
    valid, lowest, top = 0, tl.full((), float("inf"), tl.float64), tl.full((), NONE, tl.float64)
    for begin in range(0, count, CHUNK):
        m_I = begin + tl.arange(0, CHUNK)
        row_I, inside_I = first + m_I // width, (m_I < count) & (m_I % width != rest)
        goes_I = inside_I & (tl.load(rows.alive_X + row_I, mask=inside_I, other=0) != 0)
        goes_I = goes_I & (tl.load(rows.ended_X + row_I, mask=inside_I, other=1) == 0)
        mass_I = tl.load(rows.mass_X + row_I, mask=goes_I, other=NONE)
        mass_I += tl.load(share_M + m_I, mask=goes_I, other=NONE).to(tl.float64)
        mass_I = tl.where(goes_I & (mass_I == mass_I), mass_I, NONE)
        tl.store(log_mass_M + m_I, mass_I, mask=m_I < count)
        has_mass_I = mass_I > NONE
        valid += tl.sum(has_mass_I.to(tl.int32), 0)
        lowest = tl.minimum(lowest, tl.min(tl.where(has_mass_I, mass_I, float("inf")), 0))
        top = tl.maximum(top, tl.max(mass_I, 0))
    tl.debug_barrier()
    bound, ties = tl.full((), NONE, tl.float64), 0
    if is_best & (most <= 0):
        bound = tl.full((), float("inf"), tl.float64)
    if is_best & (valid > most) & (most > 0):
        bound, ties = top, 1
        if most > 1:
            bound, ties, _ = _bound(log_mass_M, log_mass_M, count, lowest, top, most, is_best, CHUNK)
    # The first candidate of the group's first row stays, which is of its first outcome.
    lead, equal = tl.load(plan.first_G + group).to(tl.int32) * F, 0
    lead = tl.where(first == lead, first, -1)
    for begin in range(0, count, CHUNK):
        m_I = begin + tl.arange(0, CHUNK)
        mass_I = tl.load(log_mass_M + m_I, mask=m_I < count, other=NONE)
        is_equal_I = (mass_I == bound) & (m_I < count)
        rank_I = equal + tl.cumsum(is_equal_I.to(tl.int32), 0)
        is_kept_I = (mass_I > bound) | (mass_I == NONE) | (is_equal_I & (rank_I <= ties))
        is_kept_I = is_kept_I | (first + m_I == lead)
        share_I = tl.load(share_M + m_I, mask=m_I < count, other=NONE)
        tl.store(share_XC + first * width + m_I, tl.where(is_kept_I, share_I, NONE), mask=m_I < count)
        equal += tl.sum(is_equal_I.to(tl.int32), 0)


@one_variant()
def _keep_nodes(
    nodes, plan, logw_S, tokens_XK, steps, choice_9A, leaf_X, batch_size, rows, width,
    K: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    index, n, c = tl.program_id(0), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_C)
    of = choice_9A + index
    ancestor, row, count = tl.load(of), tl.load(of + batch_size), tl.load(of + 2 * batch_size)
    slot, group = tl.load(plan.slot_A + index), tl.load(plan.group_A + index)
    offset = tl.load(logw_S + tl.load(plan.slot_A + ancestor))
    first, size = tl.load(plan.first_G + group).to(tl.int32), tl.load(plan.size_G + group).to(tl.int32)
    size = tl.where(tl.load(plan.kind_G + group) == BEST, size, 0)
    exists_N, at_N = n < size, first + n
    exists_N = exists_N & (tl.load(choice_9A + 5 * batch_size + at_N, mask=exists_N, other=0) > 0)
    row_N = tl.load(choice_9A + batch_size + at_N, mask=exists_N, other=0)
    count_N = tl.load(choice_9A + 2 * batch_size + at_N, mask=exists_N, other=0)
    # Tokens from the first on that rows of the group have in common with this one.
    common_N = tl.zeros((BLOCK_N,), tl.int32)
    for k in tl.static_range(K):
        token_N = tl.load(tokens_XK + row_N * K + k, mask=exists_N, other=-1)
        common_N += ((common_N == k) & (token_N == tl.load(tokens_XK + row * K + k))).to(tl.int32)
    leaf = tl.load(leaf_X + row)
    at = leaf % rows
    for d in tl.static_range(K - 2, -1, -1):
        # The node of d + 1 tokens, the longest first; `at` is the row of the step that made its last token.
        at = tl.where(leaf // rows > d, tl.load(steps[d + 1].parent_X + at), at)
        through_N = exists_N & (common_N > d) & (count_N > d + 1)
        is_node = (tl.max((through_N & (at_N == index)).to(tl.int32), 0) > 0) & (
            tl.max((through_N & (at_N < index)).to(tl.int32), 0) == 0
        )
        child_N = tl.load(tokens_XK + row_N * K + d + 1, mask=through_N, other=-1).to(tl.int32)
        token_C = tl.load(steps[d + 1].token_XC + at * width + c, mask=c < C, other=0).to(tl.int32)
        share_C = tl.load(steps[d + 1].share_XC + at * width + c, mask=c < C, other=NONE)
        is_child_C = tl.max((through_N[:, None] & (child_N[:, None] == token_C[None, :])).to(tl.int32), 0) > 0
        to = slot * (K - 1) + d
        tl.store(nodes.token_SDC + to * C + c, token_C, mask=c < C)
        tl.store(nodes.share_SDC + to * C + c, tl.where(is_child_C | (is_node == 0), NONE, share_C), mask=c < C)
        tl.store(nodes.mass_SD + to, tl.load(steps[d].mass_X + at) - offset)
        tl.store(nodes.text_SD + to, tl.load(steps[d].text_X + at))
    tl.store(nodes.count_S + slot, count)


@one_variant()
def _with_inner_nodes(
    nodes, plan, particles, out, count, groups, width, K: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr
):
    node, c = tl.program_id(0), tl.arange(0, BLOCK_C)
    if node < groups:
        tl.store(out.bounds_2G + node, tl.load(plan.first_G + node) * K)
        tl.store(out.bounds_2G + groups + node, tl.load(plan.size_G + node) * K)
    if node >= count:
        return
    index, depth = node // K, node % K
    kind = tl.load(plan.kind_G + tl.load(plan.group_A + index))
    at, is_inner = tl.load(plan.slot_A + index) * (K - 1) + depth - 1, depth > 0
    first_C, inner_C = (c < width) & (is_inner == 0), (c < C) & is_inner & (kind == BEST)
    token_C = tl.load(particles.token_AC + index * width + c, mask=first_C, other=0)
    token_C = tl.where(
        is_inner, tl.load(nodes.token_SDC + at * C + c, mask=inner_C, other=0).to(token_C.dtype), token_C
    )
    share_C = tl.load(nodes.share_SDC + at * C + c, mask=inner_C, other=NONE)
    logq_C = tl.where(is_inner, share_C, tl.load(particles.logq_AC + index * width + c, mask=first_C, other=NONE))
    share_C = tl.where(is_inner, share_C, tl.load(particles.share_AC + index * width + c, mask=first_C, other=NONE))
    tl.store(out.token_HC + node * width + c, token_C, mask=c < width)
    tl.store(out.values_2HC + node * width + c, logq_C, mask=c < width)
    tl.store(out.values_2HC + (count + node) * width + c, share_C, mask=c < width)
    text = tl.load(particles.text_X + index)
    text = tl.where(is_inner, tl.load(nodes.text_SD + at, mask=is_inner, other=0), text)
    mass = tl.load(particles.mass_X + index)
    mass = tl.where(is_inner, tl.load(nodes.mass_SD + at, mask=is_inner, other=0.0), mass)
    block = tl.load(nodes.count_S + tl.load(plan.slot_A + index))
    tl.store(out.numbers_4H + node, tl.load(particles.root_X + index))
    tl.store(out.numbers_4H + count + node, block * 0)
    tl.store(out.numbers_4H + 2 * count + node, text)
    tl.store(out.numbers_4H + 3 * count + node, tl.where(is_inner, block - depth, 0))
    tl.store(out.flags_2H + node, tl.load(particles.alive_X + index) != 0)
    tl.store(out.flags_2H + count + node, (is_inner == 0) & (tl.load(particles.ended_X + index) != 0))
    tl.store(out.mass_H + node, mass)
