"""Sampling kernels: draws from softmax(logits / temperature) and log-probabilities of given tokens, biases, tokens of a
draft's head, whole distributions, and guided logits.

`draw` makes the variates of `smc.philox` on the device, bit for bit, and runs the exponential race of
`smc.distributions.draw` beside the softmax's running sums: logits are read once, and no [R, V] array is written.
`score` takes one pass over the vocabulary, too. If a distribution is truncated, `smc.kernels.truncation` finds its cut
first.

`add_biases` adds biases to logits in one launch (`smc.executor.logit_changes.add_biases`), with a program for some of
the tokens of one row. `spread` and `spread_rest` turn columns of a draft's head into tokens (`smc.executor.sampling`),
in one launch each.

The host reads nothing, and grids follow from shapes alone, so all launches can be captured in a CUDA graph.

Local axes: P splits of the vocabulary, U tokens without a row in the head, Y more tokens of a row that are scored, Z
entries of the bias tables."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from smc.algorithm.expansion import CandidateTokens
from smc.arrays import Room, contiguous
from smc.kernels.launch import one_variant
from smc.kernels.truncation import (
    Cut,
    best_column,
    block_sum,
    combine,
    cut_logit,
    finite,
    inverse_temperature,
    load_block,
    require_rows,
    sum_block,
)
from smc.philox import DrawKeys
from smc.round.tensors import BiasTables

EXTRA = 64
"""Minimum room for further tokens of a row, so that one compiled kernel serves any number of them up to this."""
BIAS_BLOCK = 128
"""Tokens of a program of `add_biases`."""
HEAD_BLOCK = 128
"""Draws of a program of `spread`."""


class DrawnTokens(NamedTuple):
    """Tokens drawn after rows."""

    token_RF: Tensor
    """int32."""
    logq_RF: Tensor
    """float32 log-probability."""
    lse_R: Tensor
    """float32 logsumexp(logits / temperature)."""


def draw(
    logits_RV: Tensor,
    vocab: int,
    temperature_R: Tensor,
    keys: DrawKeys,
    cut: Cut | None = None,
    block: int | None = None,
    warps: int = 4,
) -> DrawnTokens:
    """Draw tokens.

    Only the first `vocab` columns count; the row stride is free. Temperature 0 is greedy (log-probability 0, logsumexp
    at temperature 1). All results are of the distribution after `cut`; so is the logsumexp: without its dropped
    entries, or with them lowered. A row with NaN gives NaN, and token 0."""
    seed_R, round_R, stream_RF, position_R, purpose = contiguous(keys)
    (rows, draws), block = stream_RF.shape, block or min(4096, triton.next_power_of_2(vocab))
    splits, room = triton.cdiv(vocab, block), Room(logits_RV.device)
    require_rows(logits_RV, vocab)
    max_RP, sum_RP = room.floats(rows, splits), room.floats(rows, splits)
    key_RPF, token_RPF = room.floats(rows, splits, draws), room.ints(rows, splits, draws)
    out = DrawnTokens(room.ints(rows, draws), room.floats(rows, draws), room.floats(rows))
    distribution = (logits_RV, logits_RV.stride(0), temperature_R, cut)
    # Without fused multiply-adds the variates equal those of `smc.philox.exponentials` to the last bit before the
    # logarithm, and a row's results do not depend on whether another row has a cut.
    options = {"num_warps": warps, "enable_fp_fusion": False}
    shape = {"DRAWS": draws, "DRAW_BLOCK": triton.next_power_of_2(draws), "BLOCK": block}
    _race[(splits, rows)](
        *distribution, vocab, seed_R, round_R, stream_RF, position_R, int(purpose), max_RP, sum_RP, key_RPF, token_RPF,
        **shape, **options,
    )  # fmt: skip
    _finish_race[(rows, draws)](
        *distribution, max_RP, sum_RP, key_RPF, token_RPF, *out, splits,
        BLOCK=triton.next_power_of_2(splits), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def score(
    logits_TV: Tensor,
    vocab: int,
    temperature_T: Tensor,
    label_X: Tensor,
    extra_XY: Tensor | None = None,
    cut: Cut | None = None,
    block: int | None = None,
    warps: int = 8,
    row_X: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of one label a row [X], and of Y further tokens [X, Y] (None if there are none), under
    softmax(logits / temperature) after `cut`; float32. `row_X`: the row of the logits that each belongs to; without it,
    there is one for every row.

    A token of -1 (none) scores 0. Temperature 0 is greedy: 0 for the largest logit, -inf for any other. A row with NaN
    gives NaN."""
    rows, requested, block = len(temperature_T), len(label_X), block or min(8192, triton.next_power_of_2(vocab))
    splits, room = triton.cdiv(vocab, block), Room(logits_TV.device)
    require_rows(logits_TV, vocab)
    max_TP, sum_TP, top_TP = room.floats(rows, splits), room.floats(rows, splits), room.ints(rows, splits)
    logp_X = room.floats(requested)
    extra = 0 if extra_XY is None else extra_XY.shape[1]
    extra_logp_XY = room.floats(requested, extra) if extra else logp_X
    more = extra_XY if extra_XY is not None and extra else label_X
    tokens = contiguous((label_X, more, row_X))
    distribution = (logits_TV, logits_TV.stride(0), temperature_T, cut)
    unfused = {"enable_fp_fusion": False}  # as in `draw`
    sums = (max_TP, sum_TP, top_TP, None)
    sum_block[(splits, rows)](*distribution, vocab, *sums, BLOCK=block, PART=block, num_warps=warps, **unfused)
    _finish_sum[(requested,)](
        *distribution, max_TP, sum_TP, top_TP, *tokens, logp_X, extra_logp_XY, splits, extra,
        BLOCK=triton.next_power_of_2(splits), EXTRA_BLOCK=max(EXTRA, triton.next_power_of_2(extra)), num_warps=1,
        **unfused,
    )  # fmt: skip
    return logp_X, extra_logp_XY if extra else None


@triton.jit
def exponentials(w0, w1, entry):
    """Return the variates of `smc.philox.exponentials` for the given entries; w0 and w1 are uint32."""
    x = w0 + entry.to(tl.uint32) * 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = x ^ w1
    x = (x ^ (x >> 15)) * 0x735A2D97
    x = (x ^ (x >> 15)) & 0x7FFFFFFF
    y = (x.to(tl.int32).to(tl.float32) + 0.5) * (2.0**-31 - 2.0**-55)
    return -_log_of_rest(y)


@triton.jit
def _log_of_rest(y):
    """Return log(1 - y) for y in (0, 1), to 2 ulp also where y is tiny, without the special cases of a general
    logarithm."""
    # 1 - y = 2^e (1 + m) with m in [-1/4, 1/2); m is computed from y itself, exactly.
    shifted = ((1.0 - y).to(tl.int32, bitcast=True) - 0x3F400000) & -0x800000
    scale = (0x40800000 - shifted).to(tl.float32, bitcast=True)
    m = ((-y).to(tl.int32, bitcast=True) - shifted).to(tl.float32, bitcast=True) + tl.fma(scale, 0.25, -1.0)
    # log(1 + m) = m + m^2 P(m), least maximum relative error (5e-9), fitted in float64.
    p = tl.fma(m, -0.04493048, 0.10450232)
    p = tl.fma(p, m, -0.13162249)
    p = tl.fma(p, m, 0.14481714)
    p = tl.fma(p, m, -0.16647725)
    p = tl.fma(p, m, 0.19990627)
    p = tl.fma(p, m, -0.25000057)
    p = tl.fma(p, m, 0.33333454)
    p = tl.fma(p, m, -0.5)
    return tl.fma(shifted.to(tl.float32), 0.6931471805599453 * 2.0**-23, tl.fma(p, m * m, m))


@one_variant("logits", "stride", "vocab")
def _race(
    logits, stride, temperature_R, cut, vocab, seed_R, round_R, stream_RF, position_R, purpose,
    max_RP, sum_RP, key_RPF, token_RPF,
    DRAWS: tl.constexpr, DRAW_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce one block of one row: its maximum, its sum of exponentials relative to that, and the winner of every draw
    with its key."""
    split, row, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    inverse, greedy = inverse_temperature(temperature_R, row)
    raw, entry = load_block(logits, stride, row, vocab, BLOCK)
    logit = cut_logit(raw, entry, row, inverse, cut)
    seed, position, rounds = tl.load(seed_R + row), tl.load(position_R + row), tl.load(round_R + row)
    top = tl.max(logit, 0)
    safe = finite(top)
    tl.store(max_RP + row * splits + split, top)
    tl.store(sum_RP + row * splits + split, block_sum(tl.exp(logit - safe)))
    rarity = tl.exp(safe - logit)
    draw_F = tl.arange(0, DRAW_BLOCK)
    stream_F = tl.load(stream_RF + row * DRAWS + draw_F, mask=draw_F < DRAWS, other=0)
    # Philox runs once for all draws, with a lane for each.
    w0_F, w1_F, _, _ = tl.philox(seed, position.to(tl.uint32), stream_F.to(tl.uint32), rounds.to(tl.uint32), purpose)
    for d in tl.static_range(DRAWS):
        w0, w1 = tl.sum(tl.where(draw_F == d, w0_F, 0), 0), tl.sum(tl.where(draw_F == d, w1_F, 0), 0)
        key = tl.where(greedy, -logit, exponentials(w0, w1, entry) * rarity)
        best, at = tl.min(key, 0, return_indices=True, return_indices_tie_break_left=True)
        out = (row * splits + split) * DRAWS + d
        tl.store(key_RPF + out, best)
        tl.store(token_RPF + out, split * BLOCK + at)


@one_variant()
def _finish_race(
    logits, stride, temperature_R, cut, max_RP, sum_RP, key_RPF, token_RPF, token_RF, logq_RF, lse_R, splits,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Finish one draw of one row: the blocks' winners race on one scale."""
    row, d, draws, split = tl.program_id(0), tl.program_id(1), tl.num_programs(1), tl.arange(0, BLOCK)
    inverse, greedy = inverse_temperature(temperature_R, row)
    max_P, top, total = combine(max_RP, sum_RP, row, splits, BLOCK)
    log_sum = tl.log(total)
    lse = top + log_sum
    tl.store(lse_R + row, lse)
    key_P = tl.load(key_RPF + (row * splits + split) * draws + d, mask=split < splits, other=float("inf"))
    key_P = tl.where(greedy, key_P, key_P * tl.exp(top - max_P))
    _, at = tl.min(key_P, 0, return_indices=True, return_indices_tie_break_left=True)
    # If the row has a NaN, any winner may result, even one past the end.
    token = tl.load(token_RPF + (row * splits + tl.minimum(at, splits - 1)) * draws + d)
    token = tl.where(lse == lse, token, 0)
    raw = tl.load(logits + row.to(tl.int64) * stride + token)
    logit = cut_logit(raw, token, row, inverse, cut)
    tl.store(token_RF + row * draws + d, token)
    # lse - lse is 0, or NaN if the row has no distribution.
    tl.store(logq_RF + row * draws + d, tl.where(greedy, lse - lse, (logit - top) - log_sum))


@triton.jit
def _gather(logits, stride, temperature_R, cut, row, token, given, best, top, log_sum):
    """Return log-probabilities of tokens of one row; 0 where no token is given."""
    inverse, greedy = inverse_temperature(temperature_R, row)
    raw = tl.load(logits + row.to(tl.int64) * stride + token, mask=given, other=0.0)
    logit = cut_logit(raw, token, row, inverse, cut)
    lse = top + log_sum
    logp = tl.where(greedy, tl.where(token == best, 0.0, -float("inf")) + (lse - lse), (logit - top) - log_sum)
    return tl.where(given, logp, 0.0)


@one_variant()
def _finish_sum(
    logits, stride, temperature_R, cut, max_RP, sum_RP, top_RP, label_X, extra_XY, row_X, logp_X, extra_logp_XY,
    splits, extra, BLOCK: tl.constexpr, EXTRA_BLOCK: tl.constexpr,
):  # fmt: skip
    """Finish one requested row: compute the log-normaliser from its blocks, and the log-probabilities of the label and
    of extra tokens."""
    x = tl.program_id(0)
    row = x if row_X is None else tl.load(row_X + x).to(tl.int32)
    max_P, top, total = combine(max_RP, sum_RP, row, splits, BLOCK)
    best, log_sum = best_column(max_P, top_RP, row, splits), tl.log(total)
    token = tl.load(label_X + x)
    logp = _gather(logits, stride, temperature_R, cut, row, token, token >= 0, best, top, log_sum)
    tl.store(logp_X + x, logp)
    if extra > 0:
        f = tl.arange(0, EXTRA_BLOCK)
        token_Y = tl.load(extra_XY + x * extra + f, mask=f < extra, other=-1)
        given_Y = (f < extra) & (token_Y >= 0)
        logp_Y = _gather(logits, stride, temperature_R, cut, row, token_Y, given_Y, best, top, log_sum)
        tl.store(extra_logp_XY + x * extra + f, logp_Y, mask=f < extra)


def add_biases(
    tables: BiasTables,
    entry_S: Tensor,
    least_S: Tensor,
    logits_RV: Tensor,
    slot_X: Tensor,
    position_R: Tensor,
    width: int,
) -> Tensor:
    """See `smc.executor.logit_changes.add_biases`. Changes the logits in place."""
    rows = len(logits_RV)
    _add_biases[(triton.cdiv(width, BIAS_BLOCK), rows)](
        logits_RV, logits_RV.stride(0), slot_X.contiguous(), position_R.contiguous(), entry_S, least_S, tables,
        rows // len(slot_X), tables.column_ZT.shape[1], BLOCK=BIAS_BLOCK, num_warps=1,
    )  # fmt: skip
    return logits_RV


@one_variant("tables", "most")
def _add_biases(
    logits, stride, slot_X, position_R, entry_S, least_S, tables, each, most, BLOCK: tl.constexpr,
):  # fmt: skip
    row, b = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_X + row // each).to(tl.int64)
    entry = tl.load(entry_S + slot)
    early = tl.load(position_R + row) < tl.load(least_S + slot)
    inside, at = b < tl.load(tables.count_Z + entry), entry * most + b
    value = tl.load(tables.late_ZT + at, mask=inside, other=0.0)
    value = tl.where(early, tl.load(tables.early_ZT + at, mask=inside, other=0.0), value)
    # No column occurs twice.
    changes = inside & (value != 0)
    logit = logits + row.to(tl.int64) * stride + tl.load(tables.column_ZT + at, mask=inside, other=0)
    sum_ = tl.load(logit, mask=changes, other=0.0).to(tl.float32) + value
    tl.store(logit, sum_.to(logits.dtype.element_ty), mask=changes)


def spread(
    column_RF: Tensor,
    logq_RF: Tensor,
    keys: DrawKeys,
    ids_M: Tensor,
    others_U: Tensor,
    chance: int,
    log_inside: float,
    log_each: float,
) -> tuple[Tensor, Tensor]:
    """Return tokens, int64, and log q of draws [R, F] from a head. With probability `chance` / 2^32, a token without a
    row replaces the drawn one."""
    token_RF, new_logq_RF = torch.empty_like(column_RF, dtype=torch.int64), torch.empty_like(logq_RF)
    count = column_RF.numel()
    _spread[(triton.cdiv(count, HEAD_BLOCK),)](
        column_RF, logq_RF, contiguous(keys), ids_M, others_U, len(others_U), token_RF, new_logq_RF, count, chance,
        log_inside, log_each,
        F=column_RF.shape[1], PURPOSE=int(keys.purpose), BLOCK=HEAD_BLOCK, num_warps=1,
    )  # fmt: skip
    return token_RF, new_logq_RF


def spread_rest(
    tokens: CandidateTokens,
    keys: DrawKeys,
    ids_M: Tensor,
    others_U: Tensor,
    log_inside: float,
    log_share: float,
    log_each: float,
    has_rest: bool,
) -> CandidateTokens:
    """Return candidate tokens over the whole vocabulary. With `has_rest`, the last one also represents the tokens
    without a row."""
    rows, width = tokens.token_RC.shape
    out = CandidateTokens(*(torch.empty_like(values_RC) for values_RC in tokens))
    _spread_rest[(rows,)](
        tokens, contiguous(keys), ids_M, others_U, len(others_U), out, width, log_inside, log_share, log_each,
        PURPOSE=int(keys.purpose), BLOCK=triton.next_power_of_2(width), HAS_REST=has_rest, num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _other(seed, rounds, stream, position, others_U, others, given, PURPOSE: tl.constexpr):
    """Return a whole number below 2^32, and a token without a row."""
    _, _, coin, which = tl.philox(seed, position.to(tl.uint32), stream.to(tl.uint32), rounds.to(tl.uint32), PURPOSE)
    at = ((which.to(tl.uint32).to(tl.int64) * others) >> 32).to(tl.int32)
    return coin.to(tl.uint32).to(tl.int64), tl.load(others_U + at, mask=given, other=0)


@one_variant()
def _spread(
    column_RF, logq_RF, keys, ids_M, others_U, others, token_RF, new_logq_RF, count, chance, log_inside, log_each,
    F: tl.constexpr, PURPOSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, row = i < count, i // F
    seed, rounds = tl.load(keys.seed_R + row, mask=inside, other=0), tl.load(keys.round_R + row, mask=inside, other=0)
    stream = tl.load(keys.stream_RF + i, mask=inside, other=0)
    position = tl.load(keys.position_R + row, mask=inside, other=0)
    coin, other = _other(seed, rounds, stream, position, others_U, others, inside, PURPOSE)
    token = tl.load(ids_M + tl.load(column_RF + i, mask=inside, other=0), mask=inside, other=0)
    logq = tl.load(logq_RF + i, mask=inside, other=0.0)
    # A NaN of the draft must show, whichever token is drawn.
    tl.store(token_RF + i, tl.where(coin < chance, other, token), mask=inside)
    tl.store(new_logq_RF + i, tl.where(coin < chance, logq * 0.0 + log_each, logq + log_inside), mask=inside)


@one_variant()
def _spread_rest(
    tokens, keys, ids_M, others_U, others, out, width, log_inside, log_share, log_each,
    PURPOSE: tl.constexpr, BLOCK: tl.constexpr, HAS_REST: tl.constexpr,
):  # fmt: skip
    row, c = tl.program_id(0), tl.arange(0, BLOCK)
    inside, at = c < width, row.to(tl.int64) * width + c
    token = tl.load(ids_M + tl.load(tokens.token_RC + at, mask=inside, other=0), mask=inside, other=0)
    logq = tl.load(tokens.logq_RC + at, mask=inside, other=0.0) + log_inside
    share = tl.load(tokens.share_RC + at, mask=inside, other=0.0) + log_inside
    if HAS_REST:
        # The program's one key, repeated for as many lanes as there are tokens.
        seed, rounds, none = tl.load(keys.seed_R + row), tl.load(keys.round_R + row), c.to(tl.int64) * 0
        stream, position = tl.load(keys.stream_RF + row) + none, tl.load(keys.position_R + row) + none
        coin, other = _other(seed, rounds + none, stream, position, others_U, others, inside, PURPOSE)
        is_rest = c == width - 1
        # A GPU's maximum of NaN and a number is the number; the first term brings NaN back.
        top = tl.maximum(share, log_share)
        rest = top + tl.log(tl.exp(share - top) + tl.exp(log_share - top))
        is_other = is_rest & ((coin >> 8).to(tl.float32) * 2.0**-24 < tl.exp(log_share - rest))
        first = tl.sum(tl.where(c == 0, logq, 0.0), 0)
        token = tl.where(is_other, other, token)
        logq = tl.where(is_other, first * 0.0 + log_each, logq)
        share = tl.where(is_rest, rest, share)
    tl.store(out.token_RC + at, token, mask=inside)
    tl.store(out.logq_RC + at, logq, mask=inside)
    tl.store(out.share_RC + at, share, mask=inside)


def write_distribution(logits_RV: Tensor, dist_RV: Tensor, temperature_R: Tensor, cut: Cut | None = None) -> None:
    """Write log softmax(logits / temperature) after `cut` to `dist_RV`, float32 [R, vocab] at any stride of rows.
    Temperature 0 is greedy. A row with NaN becomes NaN throughout."""
    rows, vocab = dist_RV.shape
    block = min(8192, triton.next_power_of_2(vocab))
    splits, room = triton.cdiv(vocab, block), Room(logits_RV.device)
    assert dist_RV.dtype == torch.float32 and dist_RV.stride(1) == 1
    require_rows(logits_RV, vocab)
    sums = (room.floats(rows, splits), room.floats(rows, splits), room.ints(rows, splits))
    given = (logits_RV, logits_RV.stride(0), temperature_R, cut, vocab, *sums)
    options = {"BLOCK": block, "num_warps": 8, "enable_fp_fusion": False}
    sum_block[(splits, rows)](*given, None, PART=block, **options)
    _write_distribution[(splits, rows)](
        *given, dist_RV, dist_RV.stride(0), SPLITS=triton.next_power_of_2(splits), **options
    )


@one_variant("logits", "stride", "vocab", "dist_RV", "dist_stride")
def _write_distribution(
    logits, stride, temperature_R, cut, vocab, max_RP, sum_RP, top_RP, dist_RV, dist_stride,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, splits = tl.program_id(1), tl.num_programs(0)
    inverse, greedy = inverse_temperature(temperature_R, row)
    max_P, top, total = combine(max_RP, sum_RP, row, splits, SPLITS)
    best, log_sum = best_column(max_P, top_RP, row, splits), tl.log(total)
    raw, column = load_block(logits, stride, row, vocab, BLOCK)
    logit = cut_logit(raw, column, row, inverse, cut)
    lse = top + log_sum
    # lse - lse is 0, or NaN if the row has no distribution.
    logp = tl.where(greedy, tl.where(column == best, 0.0, -float("inf")), (logit - top) - log_sum) + (lse - lse)
    tl.store(dist_RV + row.to(tl.int64) * dist_stride + column, logp, mask=column < vocab)


def log_mass(logp_RV: Tensor) -> Tensor:
    """Return the log of the sum of each row's exponentials, float32 [R]; -inf if there are none, NaN if there is a
    NaN."""
    rows, vocab = logp_RV.shape
    block = min(8192, triton.next_power_of_2(vocab))
    splits, room = triton.cdiv(vocab, block), Room(logp_RV.device)
    require_rows(logp_RV, vocab)
    sums = (room.floats(rows, splits), room.floats(rows, splits), room.ints(rows, splits))
    one_R = torch.ones(rows, device=logp_RV.device)
    unfused = {"enable_fp_fusion": False}
    sum_block[(splits, rows)](
        logp_RV, logp_RV.stride(0), one_R, None, vocab, *sums, None, BLOCK=block, PART=block, num_warps=8, **unfused
    )
    mass_R = room.floats(rows)
    _finish_mass[(rows,)](*sums[:2], mass_R, splits, SPLITS=triton.next_power_of_2(splits), num_warps=1, **unfused)
    return mass_R


@one_variant()
def _finish_mass(max_RP, sum_RP, mass_R, splits, SPLITS: tl.constexpr):
    row = tl.program_id(0)
    _, top, total = combine(max_RP, sum_RP, row, splits, SPLITS)
    tl.store(mass_R + row, top + tl.log(total))


def guide(own_TV: Tensor, unconditional_YV: Tensor, of_T: Tensor, scale_T: Tensor, block: int = 4096) -> Tensor:
    """Return l_u + s (l_c - l_u) [T, V], float32: l_c are a row's own logits, l_u those of its unconditional row,
    number `of` in `unconditional_YV`, both of one type and at any stride of rows. At scale 1 the result is the row's
    own logits, and no unconditional row is read."""
    tokens, width = own_TV.shape
    assert width == unconditional_YV.shape[1] and own_TV.stride(1) == unconditional_YV.stride(1) == 1
    out_TV = torch.empty(tokens, width, dtype=torch.float32, device=own_TV.device)
    block = min(block, triton.next_power_of_2(width))
    # Tokens come first, because a grid's second axis ends at 65,535.
    _guide[(tokens, triton.cdiv(width, block))](
        own_TV, own_TV.stride(0), unconditional_YV, unconditional_YV.stride(0), of_T.contiguous(), scale_T.contiguous(),
        out_TV, width, BLOCK=block,
        # The reference rounds a product before it adds it.
        enable_fp_fusion=False, num_warps=4,
    )  # fmt: skip
    return out_TV


@one_variant("own_TV", "own_stride", "out_TV", "width")
def _guide(
    own_TV, own_stride, unconditional_YV, unconditional_stride, of_T, scale_T, out_TV, width, BLOCK: tl.constexpr
):
    token, v = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scale, inside, beside = tl.load(scale_T + token), v < width, tl.load(of_T + token).to(tl.int64)
    own_V = tl.load(own_TV + token * own_stride + v, mask=inside, other=0.0).to(tl.float32)
    theirs_V = tl.load(
        unconditional_YV + beside * unconditional_stride + v, mask=v < tl.where(scale == 1, 0, width), other=0.0
    ).to(tl.float32)
    guided_V = theirs_V + scale * (own_V - theirs_V)
    tl.store(out_TV + token * width + v, tl.where(scale == 1, own_V, guided_V), mask=inside)
