"""Decoding by rejection on the device: whole laws of rows, and `smc.algorithm.rejection.say` over them, one program a
group.

A group's path is followed token after token. A trial reads two numbers of two laws; only a token that is not kept costs
passes over the vocabulary, which leave what remains of the target's law in memory of the group's own, and so does the
draw from it. Nothing reads the host, and grids follow from shapes alone: both functions can be captured in a CUDA
graph.

Axes: R rows, V columns, A places, C places of groups of chains, Q tokens of a block, L those but the last, G groups, N
places of a group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from smc.api.limits import MAX_PARTICLES
from smc.kernels.law import (
    Cut,
    best_column,
    combine,
    cut_arguments,
    cut_logit,
    inverse_temperature,
    load_block,
    require_rows,
    sum_block,
)
from smc.kernels.sampling import exponentials
from smc.kernels.variants import one_variant

NOTHING = tl.constexpr(-1)


def write_law(
    logits_RV: Tensor,
    law_RV: Tensor,
    temperature_R: Tensor,
    cut: Cut | None = None,
    block: int | None = None,
    warps: int = 8,
) -> None:
    """Write log softmax(logits / temperature) after `cut` to `law`, float32 [R, vocab] at any stride of rows.
    Temperature 0 is greedy. A row with NaN gives NaN alone."""
    rows, vocab = law_RV.shape
    block = block or min(8192, triton.next_power_of_2(vocab))
    splits = triton.cdiv(vocab, block)
    assert law_RV.dtype == torch.float32 and law_RV.stride(1) == 1
    require_rows(logits_RV, vocab)
    sums_2RS = logits_RV.new_empty((2, rows, splits), dtype=torch.float32)
    top_RS = logits_RV.new_empty((rows, splits), dtype=torch.int32)
    law = (logits_RV, logits_RV.stride(0), temperature_R, *cut_arguments(cut, temperature_R))
    options = {"CUT": cut is not None, "BLOCK": block, "num_warps": warps}
    sum_block[(splits, rows)](*law, vocab, *sums_2RS, top_RS, **options)
    _write_law[(splits, rows)](
        *law, vocab, *sums_2RS, top_RS, law_RV, law_RV.stride(0), SPLITS=triton.next_power_of_2(splits), **options
    )


@dataclass(frozen=True)
class Trials:
    """What chains are tried by; integers. See `smc.algorithm.rejection.Chains`."""

    place_C: Tensor
    tokens_AQ: Tensor
    count_A: Tensor
    alive_A: Tensor
    rank_A: Tensor
    """Number of the chain in its group."""
    seed_A: Tensor
    position_AQ: Tensor
    """Of the token after each."""


def say(
    trials: Trials,
    logp_CQV: Tensor,
    logq_CLV: Tensor,
    groups: tuple[Tensor, Tensor],
    purposes: tuple[int, int],
    block: int | None = None,
    warps: int = 8,
) -> tuple[Tensor, Tensor]:
    """As `smc.algorithm.rejection.say`, by random numbers of `smc.philox` made here: of round 0, for trials of the
    chain's own stream and for draws of stream 0, by the two purposes. `groups`: first chain, of all C, and how many
    [G], up to MAX_PARTICLES."""
    (chains, q, vocab), device = logp_CQV.shape, logp_CQV.device
    said_CQ = torch.full((chains, q), -1, dtype=torch.int64, device=device)
    said_logp_CQ = torch.full((chains, q), torch.nan, dtype=torch.float32, device=device)
    # Of a group, what its first chain has is used.
    left_CV = torch.empty(chains, vocab, dtype=torch.float64, device=device)
    block = block or min(4096, triton.next_power_of_2(vocab))
    given = (*vars(trials).values(), logp_CQV, logq_CLV, *groups)
    _say[(len(groups[0]),)](
        *(value.contiguous() for value in given), left_CV, said_CQ, said_logp_CQ, vocab,
        TRIAL=int(purposes[0]), REMAINDER=int(purposes[1]), Q=q, BLOCK_N=MAX_PARTICLES, BLOCK=block, num_warps=warps,
        # Without fused multiply-adds the variates are those of `smc.philox.exponentials` to the last bit before the
        # logarithm.
        enable_fp_fusion=False,
    )  # fmt: skip
    return said_CQ, said_logp_CQ


@one_variant("logits", "stride", "vocab", "law_RV", "law_stride")
def _write_law(
    logits, stride, temperature_R, key_R, last_R, drop_R, vocab, max_RS, sum_RS, top_RS, law_RV, law_stride,
    SPLITS: tl.constexpr, CUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, splits = tl.program_id(1), tl.num_programs(0)
    inverse, greedy = inverse_temperature(temperature_R, row)
    max_S, top, total = combine(max_RS, sum_RS, row, splits, SPLITS)
    best, log_sum = best_column(max_S, top_RS, row, splits), tl.log(total)
    raw, column = load_block(logits, stride, row, vocab, BLOCK)
    logit = cut_logit(raw, column, row, inverse, key_R, last_R, drop_R, CUT)
    lse = top + log_sum
    # lse - lse is 0, or NaN where the row has no law.
    logp = tl.where(greedy, tl.where(column == best, 0.0, -float("inf")), (logit - top) - log_sum) + (lse - lse)
    tl.store(law_RV + row.to(tl.int64) * law_stride + column, logp, mask=column < vocab)


@one_variant("logp_CQV", "logq_CLV", "left_CV", "vocab")
def _say(
    place_C, tokens_AQ, count_A, alive_A, rank_A, seed_A, position_AQ, logp_CQV, logq_CLV, first_G, size_G,
    left_CV, said_CQ, said_logp_CQ, vocab,
    TRIAL: tl.constexpr, REMAINDER: tl.constexpr, Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group, n = tl.program_id(0), tl.arange(0, BLOCK_N)
    first, size = tl.load(first_G + group).to(tl.int64), tl.load(size_G + group).to(tl.int32)
    exists = n < size
    place = tl.load(place_C + first + n, mask=exists, other=0)
    count = tl.load(count_A + place, mask=exists, other=0)
    on_path = exists & (tl.load(alive_A + place, mask=exists, other=0) != 0)
    left_V = left_CV + first * vocab
    for j in range(Q):
        lead = tl.min(tl.where(on_path, n, BLOCK_N), 0)
        if lead < BLOCK_N:
            logp_V = logp_CQV + ((first + lead) * Q + j) * vocab
            asks = on_path & (count > j + 1)
            token = tl.load(tokens_AQ + place * Q + j + 1, mask=asks & (j + 1 < Q), other=NOTHING)
            said = _tried(
                place_C, rank_A, seed_A, position_AQ, logq_CLV, logp_V, left_V, first, size, asks & (token >= 0), token, vocab, j,
                TRIAL, REMAINDER, Q, BLOCK_N, BLOCK,
            )  # fmt: skip
            to = (first + n) * Q + j
            tl.store(said_CQ + to, said + to * 0, mask=on_path)
            tl.store(said_logp_CQ + to, tl.load(logp_V + said) + to.to(tl.float32) * 0, mask=on_path)
            on_path = asks & (token == said)


@triton.jit
def _tried(
    place_C, rank_A, seed_A, position_AQ, logq_CLV, logp_V, left_V, first, size, asks, token, vocab, j,
    TRIAL: tl.constexpr, REMAINDER: tl.constexpr, Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What the group says after token j."""
    n, kept, is_left = tl.arange(0, BLOCK_N), tl.full((), -1, tl.int64), tl.full((), 0, tl.int32)
    for m in range(size):
        is_tried = (tl.max((asks & (n == m)).to(tl.int32), 0) > 0) & (kept < 0)
        if is_tried:
            chosen = tl.sum(tl.where(n == m, token, 0), 0)
            law_V = logq_CLV + ((first + m) * (Q - 1) + j) * vocab
            w0, w1 = _words(place_C, rank_A, seed_A, position_AQ, first + m, j, TRIAL, Q, True)
            # The 53 highest bits of the two words.
            uniform = (w0.to(tl.float64) * 2097152.0 + (w1 >> 11).to(tl.float64)) * (2.0**-53)
            left = tl.load(left_V + chosen, mask=is_left > 0, other=0.0)
            left = tl.where(is_left > 0, left, tl.exp(tl.load(logp_V + chosen).to(tl.float64)))
            if uniform * tl.exp(tl.load(law_V + chosen).to(tl.float64)) < left:
                kept = chosen
            else:
                is_left = _leave(logp_V, law_V, left_V, is_left, vocab, BLOCK)
    if kept < 0:
        w0, w1 = _words(place_C, rank_A, seed_A, position_AQ, first, j, REMAINDER, Q, False)
        kept = _draw(logp_V, left_V, is_left, w0, w1, vocab, BLOCK)
    return kept


@triton.jit
def _words(place_C, rank_A, seed_A, position_AQ, chain, j, PURPOSE: tl.constexpr, Q: tl.constexpr, OWN: tl.constexpr):
    place = tl.load(place_C + chain)
    position = tl.load(position_AQ + place * Q + j).to(tl.uint32)
    stream = tl.load(rank_A + place).to(tl.uint32) if OWN else position * 0
    w0, w1, _, _ = tl.philox(tl.load(seed_A + place), position, stream, position * 0, PURPOSE)
    return w0, w1


@triton.jit
def _left(logp_V, left_V, is_left, column, vocab):
    """A block of what is left of the target's law: all of it, until something has been taken away."""
    inside = column < vocab
    of_law = tl.exp(tl.load(logp_V + column, mask=inside & (is_left == 0), other=-float("inf")).to(tl.float64))
    return tl.where(is_left > 0, tl.load(left_V + column, mask=inside & (is_left > 0), other=0.0), of_law)


@triton.jit
def _leave(logp_V, law_V, left_V, is_left, vocab, BLOCK: tl.constexpr):
    """max(0, left - law), normalised, unless rounding leaves nothing of it. Whether there is something in `left`
    now."""
    total = tl.full((), 0.0, tl.float64)
    for begin in range(0, vocab, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        law = tl.exp(tl.load(law_V + column, mask=column < vocab, other=-float("inf")).to(tl.float64))
        rest = _left(logp_V, left_V, is_left, column, vocab) - law
        total += tl.sum(tl.where(rest > 0, rest, 0.0), 0)
    if total > 0:
        for begin in range(0, vocab, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            law = tl.exp(tl.load(law_V + column, mask=column < vocab, other=-float("inf")).to(tl.float64))
            rest = _left(logp_V, left_V, is_left, column, vocab) - law
            tl.store(left_V + column, tl.where(rest > 0, rest, 0.0) / total, mask=column < vocab)
        # Others of this program's threads read it next.
        tl.debug_barrier()
    return tl.where(total > 0, 1, is_left)


@triton.jit
def _draw(logp_V, left_V, is_left, w0, w1, vocab, BLOCK: tl.constexpr):
    """The token that wins the exponential race; 0 where there is no law."""
    best, token = tl.full((), float("inf"), tl.float64), tl.full((), 0, tl.int64)
    for begin in range(0, vocab, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        left = _left(logp_V, left_V, is_left, column, vocab)
        key = tl.where(left > 0, exponentials(w0, w1, column).to(tl.float64) / left, float("inf"))
        least, at = tl.min(key, 0, return_indices=True, return_indices_tie_break_left=True)
        token = tl.where(least < best, (begin + at).to(tl.int64), token)
        best = tl.minimum(least, best)
    return token
