"""Rows of a tree take their next token, on the device: `smc.executor.draft.adopt` in one launch, a program for every
few rows.

Nothing reads the host, and the grid follows from shapes alone: it can be captured in a CUDA graph.

Axes: S rows before, X rows after, A places, G groups, K tokens of a row, B pages of a row, C offers of a row, D draws
of a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from smc.algorithm.expansion import Expansion, Kind, Offers
from smc.kernels.stops import after, table_arguments
from smc.kernels.variants import one_variant
from smc.stops import DONE, MAX_STATES, StopTables

BLOCK = 4
"""Rows of a program: each waits for the longest token among them."""
INDEPENDENT, CHAINS = tl.constexpr(int(Kind.INDEPENDENT)), tl.constexpr(int(Kind.CHAINS))


@dataclass(frozen=True)
class SequenceLimits:
    """What of slots decides how far their rows may go; int64 by slot."""

    end_S: Tensor
    limit_S: Tensor
    least_S: Tensor
    entry_S: Tensor
    stops: StopTables


def adopt(
    before: dict[str, Tensor],
    chosen: tuple[Expansion, Offers] | None,
    own: tuple[Tensor, Tensor] | None,
    chains: tuple[Tensor, Tensor, Tensor] | None,
    plan: tuple[Tensor, Tensor, Tensor, Tensor],
    lives: SequenceLimits,
    *,
    step: int,
    branches: int,
) -> dict[str, Tensor]:
    """Fields of `smc.executor.draft.TokenTree` by name, as `before` has them. `chains`: row of the step before [X],
    token [X] and its log q [X]. `plan`: group [A], kind [G], slot [A], pages of rows [X, B]."""
    group_A, kind_G, slot_A, pages_XB = plan
    rows, device = len(slot_A) * branches, slot_A.device
    tokens, tables = before["tokens_XK"].shape[1], lives.stops
    pages = pages_XB.shape[1]
    longs = {name: torch.empty(rows, dtype=torch.int64, device=device) for name in LONGS}
    flags = {name: torch.empty(rows, dtype=torch.bool, device=device) for name in ("alive_X", "ended_X")}
    wide = {
        "tokens_XK": torch.empty(rows, tokens, dtype=torch.int64, device=device),
        "logq_XK": torch.empty(rows, tokens, dtype=torch.float32, device=device),
        "tail_XB": torch.empty(rows, pages, dtype=torch.int32, device=device),
        "mass_X": torch.empty(rows, dtype=torch.float64, device=device),
        "run_4X": torch.empty(4, rows, dtype=torch.int32, device=device),
    }
    made = longs | flags | wide
    whom = (slot_A,) * 6 if chosen is None else _of_trees(*chosen)
    drawn = (slot_A, slot_A) if own is None else own
    dealt = (slot_A,) * 3 if chains is None else chains
    _adopt[(triton.cdiv(rows, BLOCK),)](
        *(before[name] for name in BEFORE), *(before[name].stride(0) for name in ("tokens_XK", "logq_XK", "tail_XB")),
        *whom, *drawn, *dealt, group_A, kind_G, slot_A, pages_XB, lives.end_S, lives.limit_S, lives.least_S, lives.entry_S,
        *table_arguments(tables),
        *(made[name] for name in MADE), rows, step, tokens, pages,
        BLOCK=BLOCK, BLOCK_K=triton.next_power_of_2(tokens), BLOCK_B=triton.next_power_of_2(max(1, pages)), BRANCHES=branches,
        WIDTH=0 if chosen is None else chosen[1].token_RC.shape[1], DRAWS=0 if own is None else own[0].shape[1],
        CHAINED=chains is not None, STRINGS=tables.next_EXB is not None, DONE=DONE, STATES=MAX_STATES, num_warps=1,
    )  # fmt: skip
    return made


LONGS = ("root_X", "count_X", "before_X", "text_X", "last_X", "next_X")
BEFORE = ("root_X", "tokens_XK", "logq_XK", "tail_XB", "count_X", "alive_X", "ended_X", "before_X", "text_X")
MADE = (*BEFORE, "mass_X", "last_X", "next_X", "run_4X")


def _of_trees(chosen: Expansion, offers: Offers) -> tuple[Tensor, ...]:
    return chosen.parent_X, chosen.offer_X, chosen.mass_X, chosen.nan_G, offers.token_RC, offers.logq_RC


@one_variant()
def _adopt(
    root_S, tokens_SK, logq_SK, tail_SB, count_S, alive_S, ended_S, before_S, text_S, tokens_stride, logq_stride, tail_stride,
    parent_X, offer_X, mass_X, nan_G, token_SC, logq_SC, token_SD, logq_SD,
    chain_parent_X, chain_token_X, chain_logq_X, group_A, kind_G, slot_A, pages_XB, end_of, limit_of, least_of, entry_of,
    is_stop_EV, vocab, has_strings_E, next_EXB, data_B, offset_V, spelled,
    root_to, tokens_to, logq_to, tail_to, count_to, alive_to, ended_to, before_to, text_to, mass_to, last_to, next_to, run_to,
    rows, step, tokens, pages,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr, BRANCHES: tl.constexpr, WIDTH: tl.constexpr, DRAWS: tl.constexpr,
    CHAINED: tl.constexpr, STRINGS: tl.constexpr, DONE: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = x < rows
    group = tl.load(group_A + x // BRANCHES, mask=inside, other=0)
    if DRAWS > 0:
        parent, mass = (x // DRAWS).to(tl.int64), tl.zeros((BLOCK,), tl.float64)
        token, logq = (
            tl.load(token_SD + x, mask=inside, other=0).to(tl.int64),
            tl.load(logq_SD + x, mask=inside, other=0.0),
        )
        is_tree = inside & (tl.load(kind_G + group, mask=inside, other=0) != INDEPENDENT)
    else:
        parent, mass = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.float64)
        token, logq = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.float32)
        is_tree = inside
    if WIDTH > 0:
        parent = tl.where(is_tree, tl.load(parent_X + x, mask=is_tree, other=0), parent)
        mass = tl.where(is_tree, tl.load(mass_X + x, mask=is_tree, other=0.0), mass)
        at = parent * WIDTH + tl.load(offer_X + x, mask=is_tree, other=0)
        token = tl.where(is_tree, tl.load(token_SC + at, mask=is_tree, other=0), token)
        was_over = tl.load(ended_S + parent, mask=is_tree, other=0) != 0
        offered = tl.where(was_over, 0.0, tl.load(logq_SC + at, mask=is_tree, other=0.0))
        offered = tl.where(tl.load(nan_G + group, mask=is_tree, other=0) != 0, float("nan"), offered)
        logq = tl.where(is_tree, offered, logq)
    if CHAINED:
        is_chain = inside & (tl.load(kind_G + group, mask=inside, other=0) == CHAINS)
        parent = tl.where(is_chain, tl.load(chain_parent_X + x, mask=is_chain, other=0), parent)
        token = tl.where(is_chain, tl.load(chain_token_X + x, mask=is_chain, other=0), token)
        logq = tl.where(is_chain, tl.load(chain_logq_X + x, mask=is_chain, other=0.0), logq)
        mass = tl.where(is_chain, 0.0, mass)
    root = tl.load(root_S + parent, mask=inside, other=0)
    ended = tl.load(ended_S + parent, mask=inside, other=1) != 0
    text, count = tl.load(text_S + parent, mask=inside, other=0), tl.load(count_S + parent, mask=inside, other=0)
    slot = tl.load(slot_A + root, mask=inside, other=0)
    end, entry = tl.load(end_of + slot, mask=inside, other=0), tl.load(entry_of + slot, mask=inside, other=0)
    # As `grow` of one token.
    room = tl.load(limit_of + slot, mask=inside, other=0) - end - count
    going = inside & (room > 0)
    state = after(
        text.to(tl.int32), token, entry, going, tl.load(least_of + slot, mask=inside, other=0) - end - count > 0,
        is_stop_EV, vocab, has_strings_E, next_EXB, data_B, offset_V, spelled, STRINGS, DONE, STATES,
    )  # fmt: skip
    has_ended = ended | (going.to(tl.int64) >= room) | (state == DONE)
    alive = (tl.load(alive_S + parent, mask=inside, other=0) != 0) & (mass > -float("inf"))
    tl.store(root_to + x, root, mask=inside)
    tl.store(count_to + x, count + tl.where(ended, 0, 1), mask=inside)
    tl.store(alive_to + x, alive, mask=inside)
    tl.store(ended_to + x, has_ended, mask=inside)
    tl.store(before_to + x, tl.where(ended, tl.load(before_S + parent, mask=inside, other=0), text), mask=inside)
    tl.store(text_to + x, tl.where(ended, text, state.to(tl.int64)), mask=inside)
    tl.store(mass_to + x, mass, mask=inside)
    tl.store(last_to + x, token, mask=inside)
    tl.store(next_to + x, end + step + 1, mask=inside)
    tl.store(run_to + x, slot.to(tl.int32), mask=inside)
    tl.store(run_to + rows + x, end.to(tl.int32), mask=inside)
    tl.store(run_to + 2 * rows + x, (end + step).to(tl.int32), mask=inside)
    tl.store(run_to + 3 * rows + x, (alive & ~has_ended).to(tl.int32), mask=inside)
    k, b = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_B)[None, :]
    of, to, is_old = parent[:, None], x[:, None].to(tl.int64), inside[:, None] & (k < step)
    tokens_XK = tl.where(k == step, token[:, None], tl.load(tokens_SK + of * tokens_stride + k, mask=is_old, other=0))
    logq_XK = tl.where(k == step, logq[:, None], tl.load(logq_SK + of * logq_stride + k, mask=is_old, other=0.0))
    tl.store(tokens_to + to * tokens + k, tokens_XK, mask=inside[:, None] & (k < tokens))
    tl.store(logq_to + to * tokens + k, logq_XK, mask=inside[:, None] & (k < tokens))
    is_page, is_known = inside[:, None] & (b < pages), inside[:, None] & (b < pages) & (b < step)
    known_XB = tl.load(tail_SB + of * tail_stride + b, mask=is_known, other=0)
    own_XB = tl.load(pages_XB + to * pages + b, mask=is_page & (b >= step), other=0)
    tl.store(tail_to + to * pages + b, tl.where(b < step, known_XB, own_XB), mask=is_page)
