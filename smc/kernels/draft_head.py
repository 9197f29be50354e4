"""Columns of a draft's head become tokens, in one launch: `smc.executor.sampling`.

Nothing reads the host, and grids follow from shapes alone: both functions can be captured in a CUDA graph.

Axes: R rows, D draws a row, C offers, M columns, U tokens without a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smc.algorithm.expansion import Offers
from smc.kernels.variants import one_variant

BLOCK = 128
"""Draws of a program."""

Keys = tuple[Tensor, Tensor, Tensor, Tensor, int]
"""Seed [R], round [R], stream [R, D], position [R], purpose."""


def spread(
    column_RD: Tensor,
    logq_RD: Tensor,
    keys: Keys,
    ids_M: Tensor,
    others_U: Tensor,
    chance: int,
    log_inside: float,
    log_each: float,
) -> tuple[Tensor, Tensor]:
    """Tokens int64 and log q of draws: another token with `chance` of 2^32."""
    token_RD, new_logq_RD, draws = (
        torch.empty_like(column_RD, dtype=torch.int64),
        torch.empty_like(logq_RD),
        column_RD.shape[1],
    )
    *numbers, purpose = keys
    _spread[(triton.cdiv(token_RD.numel(), BLOCK),)](
        column_RD, logq_RD, *(number.contiguous() for number in numbers), ids_M, others_U, len(others_U), token_RD, new_logq_RD,
        token_RD.numel(), chance, log_inside, log_each, D=draws, PURPOSE=int(purpose), BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip
    return token_RD, new_logq_RD


def spread_rest(
    offers: Offers,
    keys: Keys,
    ids_M: Tensor,
    others_U: Tensor,
    log_inside: float,
    log_share: float,
    log_each: float,
    has_rest: bool,
) -> Offers:
    """Offers over all tokens: with `has_rest` the last stands for those without a row, too."""
    (rows, width), (*numbers, purpose) = offers.token_RC.shape, keys
    made = tuple(torch.empty_like(values_RC) for values_RC in (offers.token_RC, offers.logq_RC, offers.share_RC))
    _spread_rest[(rows,)](
        offers.token_RC, offers.logq_RC, offers.share_RC, *(number.contiguous() for number in numbers), ids_M, others_U, len(others_U),
        *made, width, log_inside, log_share, log_each,
        PURPOSE=int(purpose), BLOCK=triton.next_power_of_2(width), HAS_REST=has_rest, num_warps=1,
    )  # fmt: skip
    return Offers(*made)


@triton.jit
def _other(seed, rounds, stream, position, others_U, others, given, PURPOSE: tl.constexpr):
    """A whole number below 2^32 and a token without a row."""
    _, _, coin, which = tl.philox(seed, position.to(tl.uint32), stream.to(tl.uint32), rounds.to(tl.uint32), PURPOSE)
    at = ((which.to(tl.uint32).to(tl.int64) * others) >> 32).to(tl.int32)
    return coin.to(tl.uint32).to(tl.int64), tl.load(others_U + at, mask=given, other=0)


@one_variant()
def _spread(
    column_RD, logq_RD, seed_R, round_R, stream_RD, position_R, ids_M, others_U, others, token_RD, new_logq_RD, count,
    chance, log_inside, log_each, D: tl.constexpr, PURPOSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, row = i < count, i // D
    seed, rounds = tl.load(seed_R + row, mask=inside, other=0), tl.load(round_R + row, mask=inside, other=0)
    stream, position = tl.load(stream_RD + i, mask=inside, other=0), tl.load(position_R + row, mask=inside, other=0)
    coin, other = _other(seed, rounds, stream, position, others_U, others, inside, PURPOSE)
    token = tl.load(ids_M + tl.load(column_RD + i, mask=inside, other=0), mask=inside, other=0)
    logq = tl.load(logq_RD + i, mask=inside, other=0.0)
    # NaN of the draft must be seen, whatever is drawn.
    tl.store(token_RD + i, tl.where(coin < chance, other, token), mask=inside)
    tl.store(new_logq_RD + i, tl.where(coin < chance, logq * 0.0 + log_each, logq + log_inside), mask=inside)


@one_variant()
def _spread_rest(
    token_RC, logq_RC, share_RC, seed_R, round_R, stream_R, position_R, ids_M, others_U, others, to_token, to_logq, to_share, width,
    log_inside, log_share, log_each, PURPOSE: tl.constexpr, BLOCK: tl.constexpr, HAS_REST: tl.constexpr,
):  # fmt: skip
    row, c = tl.program_id(0), tl.arange(0, BLOCK)
    inside, at = c < width, row.to(tl.int64) * width + c
    token = tl.load(ids_M + tl.load(token_RC + at, mask=inside, other=0), mask=inside, other=0)
    logq = tl.load(logq_RC + at, mask=inside, other=0.0) + log_inside
    share = tl.load(share_RC + at, mask=inside, other=0.0) + log_inside
    if HAS_REST:
        # A program's one key, for as many lanes as there are offers.
        seed, rounds, none = tl.load(seed_R + row), tl.load(round_R + row), c.to(tl.int64) * 0
        stream, position = tl.load(stream_R + row) + none, tl.load(position_R + row) + none
        coin, other = _other(seed, rounds + none, stream, position, others_U, others, inside, PURPOSE)
        is_rest = c == width - 1
        # A device's maximum of NaN and a number is the number; NaN is back with the first term.
        top = tl.maximum(share, log_share)
        rest = top + tl.log(tl.exp(share - top) + tl.exp(log_share - top))
        is_other = is_rest & ((coin >> 8).to(tl.float32) * 2.0**-24 < tl.exp(log_share - rest))
        first = tl.sum(tl.where(c == 0, logq, 0.0), 0)
        token = tl.where(is_other, other, token)
        logq = tl.where(is_other, first * 0.0 + log_each, logq)
        share = tl.where(is_rest, rest, share)
    tl.store(to_token + at, token, mask=inside)
    tl.store(to_logq + at, logq, mask=inside)
    tl.store(to_share + at, share, mask=inside)
