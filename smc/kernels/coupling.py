"""What the target's draws say of the exponent of coupled drafting, and their ranks: the Triton form of
`smc.executor.draft.observe_draws`, with a program for every batch index. See `smc.executor` for axes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smc.algorithm.coupling import RANK_BITS, RANK_FACTOR, RANKED_BELOW, SLACK
from smc.kernels.candidate_tokens import CouplingTensors, coupled_score
from smc.kernels.launch import one_variant
from smc.kernels.round_tensors import PlanTensors, SlotTensors
from smc.kernels.truncation import finite

_SLACK = tl.constexpr(SLACK)
_FACTOR, _BELOW = tl.constexpr(RANK_FACTOR), tl.constexpr(RANKED_BELOW)
_HALF, _MOST = tl.constexpr(RANK_BITS // 2), tl.constexpr((1 << RANK_BITS) - 1)


def observe_draws(
    plan: PlanTensors,
    slots: SlotTensors,
    tokens_XK: Tensor,
    choice_9A: Tensor,
    kept_BV: Tensor,
    coupling: CouplingTensors,
    block: int = 4096,
) -> Tensor:
    """See `smc.executor.draft.observe_draws`."""
    batch_size, columns = len(plan.slot_A), kept_BV.shape[1]
    observed_3A = torch.empty(3, batch_size, device=kept_BV.device)
    _observe[(batch_size,)](
        plan.slot_A, (slots.end_S, slots.ended_S), (tokens_XK, tokens_XK.stride(0)), choice_9A, kept_BV,
        (len(kept_BV), columns, batch_size), coupling, observed_3A,
        HEAD=coupling.ids_M is not None, BLOCK=min(block, triton.next_power_of_2(columns)), num_warps=8,
    )  # fmt: skip
    return observed_3A


@triton.jit
def _hash(position):
    """As of `smc.algorithm.coupling.is_ranked`."""
    hashed = (position.to(tl.int64) * _FACTOR) & _MOST
    return ((hashed ^ (hashed >> _HALF)) * _FACTOR) & _MOST


@triton.jit
def _part(begin, columns, kept_BV, root, position, token, coupling, HEAD: tl.constexpr, BLOCK: tl.constexpr):
    """Of some columns after a root: whether they exist, log q, score, and whether they are of the drawn token."""
    column_V = begin + tl.arange(0, BLOCK)
    inside_V = column_V < columns
    logq_V = tl.load(kept_BV + root * columns + column_V, mask=inside_V, other=-float("inf"))
    score_V = coupled_score(logq_V, column_V, inside_V, root, position, coupling, HEAD)
    token_V = column_V.to(tl.int64)
    if HEAD:
        token_V = tl.load(coupling.ids_M + column_V, mask=inside_V, other=-1)
    return inside_V, logq_V, score_V, inside_V & (token_V == token)


@one_variant("kept_BV")
def _observe(
    slot_A, slots, tokens, choice_9A, kept_BV, sizes, coupling, observed_3A, HEAD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    index, kept, columns, batch_size = tl.program_id(0), sizes[0], sizes[1], sizes[2]
    of = choice_9A + index
    root, row, taken = tl.load(of), tl.load(of + batch_size), tl.load(of + 2 * batch_size)
    cut, bonus, is_alive = tl.load(of + 3 * batch_size), tl.load(of + 4 * batch_size), tl.load(of + 5 * batch_size) > 0
    slot = tl.load(slot_A + root)
    token = tl.where(taken > 0, tl.load(tokens[0] + row * tokens[1]).to(tl.int64), bonus)
    is_seen = is_alive & (tl.load(slots[1] + slot) == 0) & (cut == 0) & (token >= 0) & (root < kept)
    is_seen = is_seen & (tl.load(coupling.exponent_A + root) > 0)
    score, information, rank = float("nan"), float("nan"), float("nan")
    if is_seen:
        position = tl.load(slots[0] + slot)
        # Sums of exp(score), and of log q and its square weighted by it, from the greatest score so far.
        top, total, first, second = -float("inf"), 0.0, 0.0, 0.0
        drawn_logq, drawn_score = -float("inf"), -float("inf")
        for begin in range(0, columns, BLOCK):
            _, logq_V, score_V, is_drawn_V = _part(
                begin, columns, kept_BV, root, position, token, coupling, HEAD, BLOCK
            )
            drawn_logq = tl.maximum(drawn_logq, tl.max(tl.where(is_drawn_V, logq_V, -float("inf")), 0))
            drawn_score = tl.maximum(drawn_score, tl.max(tl.where(is_drawn_V, score_V, -float("inf")), 0))
            higher = tl.maximum(top, tl.max(score_V, 0))
            scale, weight_V = tl.exp(top - finite(higher)), tl.exp(score_V - finite(higher))
            value_V = tl.where(weight_V > 0, logq_V, 0.0)
            total = total * scale + tl.sum(weight_V, 0)
            first = first * scale + tl.sum(weight_V * value_V, 0)
            second = second * scale + tl.sum(weight_V * value_V * value_V, 0)
            top = higher
        mean = first / total
        win = tl.exp(drawn_score - top) / total
        weight = win / (win + _SLACK)
        if drawn_logq > -float("inf"):
            score = weight * (drawn_logq - mean)
            information = 0.5 * weight * tl.maximum(second / total - mean * mean, 0.0)
        if _hash(position) < _BELOW:
            # A token that the draft cannot draw, or that its head does not have, is after all of its tokens.
            rank = columns * 1.0
            if drawn_score > -float("inf"):
                rank = 0.0
                for begin in range(0, columns, BLOCK):
                    inside_V, _, score_V, is_drawn_V = _part(
                        begin, columns, kept_BV, root, position, token, coupling, HEAD, BLOCK
                    )
                    is_above_V = inside_V & (score_V > drawn_score) & (is_drawn_V == 0)
                    rank += tl.sum(is_above_V.to(tl.float32), 0)
    tl.store(observed_3A + index, score)
    tl.store(observed_3A + batch_size + index, information)
    tl.store(observed_3A + 2 * batch_size + index, rank)
