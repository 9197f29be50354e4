"""What a round's choice is among, and its weights, in one launch: `smc.executor.select.weigh`.

The first programs have some rows each, those after them a group each: what its deciders are told of it, and whether
there is NaN in it. Weights are float64, as there. Nothing reads the host, and the grid follows from shapes alone: it
can be captured in a CUDA graph.

Axes: A places, G groups, X rows (F of each place), Q tokens of a block, K tokens of a row, C offers of a place, W
numbers of a row."""

from __future__ import annotations

import triton
import triton.language as tl

from smc.algorithm.expansion import Kind
from smc.kernels.variants import one_variant

INDEPENDENT, DISTINCT, BEST = (tl.constexpr(int(kind)) for kind in (Kind.INDEPENDENT, Kind.DISTINCT, Kind.BEST))
NONE = tl.constexpr(-float("inf"))


@one_variant()
def weigh(
    slot_A, group_A, alpha_A, seed_A, round_A, first_G, size_G, kind_G, alive_S,
    origin_A, logq_AQ, count_A, alive_A, logw_A, open_A, logp_AQ, drawn_AQ, nan_A, nan_AQ, rows_WX,
    logp_X, log_z_A, share_AC, tokens_AQ, best_A, right_A,
    root_X, weight_X, there_X, token_X1, share_XC, lives_A, nan_2G, size_3G, random_2G, places, groups, rows,
    F: tl.constexpr, K: tl.constexpr, Q: tl.constexpr, C: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_C: tl.constexpr, LOOKAHEAD: tl.constexpr, EXACT: tl.constexpr, SAID: tl.constexpr, OFFERED: tl.constexpr,
):  # fmt: skip
    """`logp_X` where SAID in look-ahead, `log_z_A` where SAID in lockstep; `share_AC` where OFFERED, else rows offer
    themselves."""
    program, blocks = tl.program_id(0), tl.cdiv(rows, BLOCK_X)
    if program < blocks:
        x = program * BLOCK_X + tl.arange(0, BLOCK_X)
        inside, place = x < rows, x // F
        is_own = inside & (x % F == 0)
        slot = tl.load(slot_A + place, mask=is_own, other=0)
        tl.store(lives_A + place, tl.load(alive_S + slot, mask=is_own, other=0) != 0, mask=is_own)
        kind = tl.load(kind_G + tl.load(group_A + place, mask=inside, other=0))
        if LOOKAHEAD:
            root = tl.load(rows_WX + 2 * K * rows + x, mask=inside, other=0)
            block = root
        else:
            root = tl.load(origin_A + x, mask=inside, other=0).to(tl.int32)
            block = x
        share = (
            tl.load(rows_WX + (2 * K + 3) * rows + x, mask=inside, other=0).to(tl.float32, bitcast=True).to(tl.float64)
        )
        is_open = tl.load(open_A + block, mask=inside, other=0) != 0
        there = tl.load(alive_A + block, mask=inside, other=0) != 0
        alpha = tl.load(alpha_A + block, mask=inside, other=1.0)
        weight = tl.load(logw_A + block, mask=inside, other=0.0)
        weight += _of_block(logq_AQ, logp_AQ, count_A, block, inside, alpha, Q, BLOCK_Q)
        token = tl.load(rows_WX + x, mask=inside, other=0)
        if LOOKAHEAD:
            logq = tl.load(rows_WX + K * rows + x, mask=inside, other=0).to(tl.float32, bitcast=True).to(tl.float64)
            logp = tl.zeros_like(logq)
            if SAID:
                logp = tl.load(logp_X + x, mask=inside, other=0.0).to(tl.float64)
            weight = weight + tl.where(is_open, alpha * logp - logq, 0.0) + share
            there = there & (share > NONE)
        elif SAID:
            weight += tl.where(is_open, tl.load(log_z_A + x, mask=inside, other=0.0).to(tl.float64), 0.0)
        if EXACT:
            agrees = _agrees(
                best_A,
                right_A,
                count_A,
                alive_A,
                tokens_AQ,
                drawn_AQ,
                place,
                root,
                token,
                is_open,
                inside,
                Q,
                BLOCK_Q,
                LOOKAHEAD,
            )
            there = there & (agrees | (kind < BEST))
            weight = tl.where(kind >= BEST, tl.where(share == share, share, 0.0), weight)
        tl.store(root_X + x, root.to(tl.int64), mask=inside)
        tl.store(weight_X + x, tl.where(weight == weight, weight, NONE), mask=inside)
        tl.store(there_X + x, there, mask=inside)
        c = tl.arange(0, BLOCK_C)
        if OFFERED:
            # A row that takes no token offers itself.
            offered = tl.load(
                share_AC + x[:, None] * C + c[None, :], mask=inside[:, None] & (c < C)[None, :], other=NONE
            )
            takes = is_open & (kind < BEST)
            offered = tl.where(takes[:, None], offered, tl.where(c == 0, 0.0, NONE)[None, :])
            tl.store(share_XC + x[:, None] * C + c[None, :], offered, mask=inside[:, None] & (c < C)[None, :])
        else:
            tl.store(share_XC + x, tl.zeros_like(share).to(tl.float32), mask=inside)
            tl.store(token_X1 + x, tl.zeros_like(x).to(tl.int64), mask=inside)
    else:
        _group(
            program - blocks, seed_A, round_A, first_G, size_G, kind_G, logq_AQ, count_A, open_A, nan_A, nan_AQ, rows_WX, logp_X, log_z_A,
            best_A, right_A, nan_2G, size_3G, random_2G, places, groups, rows,
            F, K, Q, BLOCK_X, BLOCK_Q, LOOKAHEAD, EXACT, SAID,
        )  # fmt: skip


@triton.jit
def _of_block(logq_AQ, logp_AQ, count_A, block, inside, alpha, Q: tl.constexpr, BLOCK_Q: tl.constexpr):
    """`smc.algorithm.weights.block_log_weight` of blocks whose first token counts no more."""
    q = tl.arange(0, BLOCK_Q)
    count = tl.load(count_A + block, mask=inside, other=0).to(tl.int32)
    exists = inside[:, None] & (q[None, :] < count[:, None] - 1)
    at = block[:, None] * Q + q[None, :]
    logp = tl.load(logp_AQ + at, mask=exists, other=0.0).to(tl.float64)
    logq = tl.load(logq_AQ + at + 1, mask=exists, other=0.0).to(tl.float64)
    return tl.sum(tl.where(exists, alpha[:, None] * logp - logq, 0.0), 1)


@triton.jit
def _agrees(
    best_A, right_A, count_A, alive_A, tokens_AQ, drawn_AQ, place, root, token, is_open, inside,
    Q: tl.constexpr, BLOCK_Q: tl.constexpr, LOOKAHEAD: tl.constexpr,
):  # fmt: skip
    """Of groups that are decoded exactly: whether rows follow what the target says, behind a block that is right to its
    end. Of chains several may be, with the same tokens."""
    best = tl.load(best_A + place, mask=inside, other=0).to(tl.int32)
    if LOOKAHEAD:
        right = tl.load(right_A + place, mask=inside, other=1).to(tl.int32)
        is_whole = (right == tl.load(count_A + root, mask=inside, other=0)) & (
            tl.load(alive_A + root, mask=inside, other=0) != 0
        )
        q = tl.arange(0, BLOCK_Q)[None, :]
        compares = inside[:, None] & (q < right[:, None])
        of_root = tl.load(tokens_AQ + root[:, None] * Q + q, mask=compares, other=0)
        of_best = tl.load(tokens_AQ + best[:, None] * Q + q, mask=compares, other=0)
        is_whole = is_whole & (tl.max((of_root != of_best).to(tl.int32), 1) == 0)
        said = tl.load(drawn_AQ + best * Q + right - 1, mask=inside, other=-1)
        return is_whole & (token == said) & is_open
    else:
        return place == best


@triton.jit
def _group(
    group, seed_A, round_A, first_G, size_G, kind_G, logq_AQ, count_A, open_A, nan_A, nan_AQ, rows_WX, logp_X, log_z_A,
    best_A, right_A, nan_2G, size_3G, random_2G, places, groups, rows,
    F: tl.constexpr, K: tl.constexpr, Q: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Q: tl.constexpr,
    LOOKAHEAD: tl.constexpr, EXACT: tl.constexpr, SAID: tl.constexpr,
):  # fmt: skip
    first, size, kind = (
        tl.load(first_G + group).to(tl.int32),
        tl.load(size_G + group).to(tl.int32),
        tl.load(kind_G + group),
    )
    lead = tl.minimum(first, places - 1)
    tl.store(size_3G + group, tl.where(kind == INDEPENDENT, size, 0))
    tl.store(size_3G + groups + group, first * F)
    tl.store(size_3G + 2 * groups + group, size * F)
    tl.store(random_2G + group, tl.load(seed_A + lead))
    tl.store(random_2G + groups + group, tl.load(round_A + lead))
    target_nan, draft_nan = 0, 0
    q = tl.arange(0, BLOCK_Q)
    for begin in range(0, size, BLOCK_X):
        place = begin + tl.arange(0, BLOCK_X)
        inside, place = place < size, first + place
        count = tl.load(count_A + place, mask=inside, other=0)
        exists = inside[:, None] & (q[None, :] < count[:, None]) & (q < Q)[None, :]
        logq = tl.load(logq_AQ + place[:, None] * Q + q[None, :], mask=exists, other=0.0)
        draft_nan = tl.maximum(draft_nan, tl.max(tl.max((logq != logq).to(tl.int32), 1), 0))
        target_nan = tl.maximum(target_nan, tl.max(tl.load(nan_A + place, mask=inside, other=0).to(tl.int32), 0))
        if SAID and not LOOKAHEAD:
            log_z = tl.load(log_z_A + place, mask=inside, other=0.0)
            is_open = tl.load(open_A + place, mask=inside, other=0) != 0
            target_nan = tl.maximum(target_nan, tl.max((is_open & (log_z != log_z)).to(tl.int32), 0))
    for begin in range(0, size * F, BLOCK_X):
        x = begin + tl.arange(0, BLOCK_X)
        inside, x = x < size * F, first * F + x
        if LOOKAHEAD:
            root = tl.load(rows_WX + 2 * K * rows + x, mask=inside, other=0)
            is_open = inside & (tl.load(open_A + root, mask=inside, other=0) != 0)
            logq = tl.load(rows_WX + K * rows + x, mask=is_open, other=0).to(tl.float32, bitcast=True)
            draft_nan = tl.maximum(draft_nan, tl.max((logq != logq).to(tl.int32), 0))
            if SAID:
                logp = tl.load(logp_X + x, mask=is_open, other=0.0)
                target_nan = tl.maximum(target_nan, tl.max((logp != logp).to(tl.int32), 0))
        # Rows of NaN have given way to others, on which the draft has left a mark.
        is_token = (kind == DISTINCT) & inside[None, :] & (q < K)[:, None]
        logq_QX = tl.load(rows_WX + (K + q[:, None]) * rows + x[None, :], mask=is_token, other=0).to(
            tl.float32, bitcast=True
        )
        draft_nan = tl.maximum(draft_nan, tl.max(tl.max((logq_QX != logq_QX).to(tl.int32), 0), 0))
    if EXACT:
        # What the draft says is of no consequence here, be it NaN; nor what the target would say after tokens that are
        # wrong.
        is_best = (kind >= BEST) & (size > 0)
        best, right = tl.load(best_A + lead).to(tl.int32), tl.load(right_A + lead)
        nan_Q = tl.load(nan_AQ + best * Q + q, mask=is_best & (q < right) & (q < Q), other=0).to(tl.int32)
        target_nan = tl.where(is_best, tl.max(nan_Q, 0), target_nan)
        draft_nan = tl.where(is_best, 0, draft_nan)
    tl.store(nan_2G + group, target_nan != 0)
    tl.store(nan_2G + groups + group, draft_nan != 0)
