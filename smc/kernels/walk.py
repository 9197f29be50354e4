"""How far blocks of a tree agree with the target's own draws, on the device: `smc.algorithm.walk` in one launch, one
program a group.

Nothing reads the host, and the grid follows from shapes alone: it can be captured in a CUDA graph.

Axes: A places, Q tokens of a block, G groups, N places of a group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smc.api.limits import MAX_PARTICLES
from smc.kernels.program_ids import own_places, programs
from smc.kernels.variants import one_variant


def walk(
    tokens_AQ: Tensor, count_A: Tensor, drawn_AQ: Tensor, alive_A: Tensor, groups: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """As `smc.algorithm.walk.walk`, for groups of up to MAX_PARTICLES places; integers of any type."""
    places, tokens = tokens_AQ.shape
    best_A, right_A = torch.empty(2, places, dtype=torch.int64, device=tokens_AQ.device)
    given = (tensor.contiguous() for tensor in (tokens_AQ, count_A, drawn_AQ, alive_A, *groups))
    count = len(groups[0])
    blocks = {"BLOCK_N": MAX_PARTICLES, "BLOCK_Q": triton.next_power_of_2(tokens + 1)}
    _walk[(programs(places, count),)](*given, best_A, right_A, tokens, count, places, **blocks, num_warps=4)
    return best_A, right_A


@one_variant()
def _walk(
    tokens_AQ, count_A, drawn_AQ, alive_A, first_G, size_G, best_A, right_A, tokens, groups, places,
    BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    q = tl.arange(0, BLOCK_Q)
    place_N, exists_N, _, is_group = own_places(first_G, size_G, groups, places, BLOCK_N)
    count_N = tl.load(count_A + place_N, mask=exists_N, other=0)
    at_NQ = place_N[:, None] * tokens + q[None, :]
    # The first token is right; after it, each that exists and was drawn where the one before it stands.
    asks_NQ = exists_N[:, None] & (q > 0)[None, :] & (q < tokens)[None, :] & (q[None, :] < count_N[:, None])
    said_NQ = tl.load(tokens_AQ + at_NQ, mask=asks_NQ, other=0)
    agrees_NQ = (q == 0)[None, :] | (asks_NQ & (said_NQ == tl.load(drawn_AQ + at_NQ - 1, mask=asks_NQ, other=-1)))
    right_N = tl.min(tl.where(agrees_NQ, BLOCK_Q, q[None, :]), 1)
    right_N = tl.where(tl.load(alive_A + place_N, mask=exists_N, other=0) != 0, right_N, 0)
    right, best = tl.max(tl.where(exists_N, right_N, -1), 0, return_indices=True, return_indices_tie_break_left=True)
    first = tl.min(place_N, 0)
    tl.store(best_A + place_N, tl.where(is_group, first + best, place_N).to(tl.int64), mask=exists_N)
    tl.store(right_A + place_N, tl.where(is_group, tl.maximum(right, 1), 1) + place_N.to(tl.int64) * 0, mask=exists_N)
