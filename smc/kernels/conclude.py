"""What becomes of every place after a round, and what the host learns of it, in one launch:
`smc.executor.select.conclude`.

A program has the places of one group, or places of none. Nothing reads the host, and the grid follows from shapes
alone: it can be captured in a CUDA graph.

Axes: A places, G groups, X rows (F of each place), Q tokens of a block, K tokens of a row, C offers of a place, N
places of a program."""

from __future__ import annotations

import triton
import triton.language as tl

from smc.algorithm.expansion import Kind
from smc.kernels.program_ids import own_places
from smc.kernels.stops import after, after_all
from smc.kernels.variants import one_variant

INDEPENDENT, BEST = tl.constexpr(int(Kind.INDEPENDENT)), tl.constexpr(int(Kind.BEST))
NONE = tl.constexpr(-float("inf"))


@one_variant()
def conclude(
    slot_A, group_A, first_G, size_G, kind_G, pages_AQ, end_S, pending_S, limit_S, text_S, entry_S, least_S,
    is_stop_EV, vocab, has_strings_E, next_EXB, data_B, offset_V, spelled,
    origin_A, tokens_AQ, count_A, ended_A, open_A, run_A, logp_AQ, drawn_AQ, rows_WX, root_X,
    said_logp_X, said_bonus_A, offered_token_AC, offered_logp_AC, best_A, right_A,
    own_ancestor_A, own_branch_A, own_logw_A, own_alive_A, own_log_z_G, own_ess_G, own_resampled_G, own_collapsed_G,
    parent_X, offer_X, mass_X, tree_ess_G, tree_collapsed_G, pick_A, picked_A,
    choice_9A, flags_2A, grown_AQ, new_count_A, new_logq_AQ, new_logp_AQ, first_logp_A, group_2G, flags_3G, path_AQ, run_2A,
    places, groups, rows,
    F: tl.constexpr, K: tl.constexpr, Q: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr,
    LOOKAHEAD: tl.constexpr, OWN: tl.constexpr, TREES: tl.constexpr, EXACT: tl.constexpr,
    SAID: tl.constexpr, OFFERED: tl.constexpr, STRINGS: tl.constexpr, DONE: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """`said_logp_X` where SAID; `offered_token_AC` and their log p where OFFERED."""
    place, exists, group, is_group = own_places(first_G, size_G, groups, places, BLOCK_N)
    kind = tl.load(kind_G + tl.load(group_A + place, mask=exists, other=0), mask=exists, other=0)
    row, ancestor, alive = tl.zeros_like(place), tl.zeros_like(place), tl.zeros_like(place) != 0
    bonus, logw, misses = tl.full((BLOCK_N,), -1, tl.int64), tl.full((BLOCK_N,), NONE, tl.float64), alive
    logp, block = tl.full((BLOCK_N,), float("nan"), tl.float32), place
    if OWN:
        mine = exists & (kind == INDEPENDENT) if TREES else exists
        ancestor = tl.load(own_ancestor_A + place, mask=mine, other=0).to(tl.int32)
        row = ancestor * F + tl.load(own_branch_A + place, mask=mine, other=0).to(tl.int32)
        alive = tl.load(own_alive_A + place, mask=mine, other=0) != 0
        logw = tl.load(own_logw_A + place, mask=mine, other=NONE)
        is_open = (
            tl.load(open_A + (tl.load(root_X + row, mask=mine, other=0) if LOOKAHEAD else row), mask=mine, other=0) != 0
        )
        logp = tl.load(said_logp_X + row, mask=mine & is_open, other=float("nan"))
        if not LOOKAHEAD:
            bonus = tl.load(said_bonus_A + row, mask=mine & is_open, other=-1).to(tl.int64)
        block = ancestor
    if TREES:
        theirs = exists & (kind != INDEPENDENT) if OWN else exists
        tree_row, tree_ancestor, tree_alive, tree_logw, tree_bonus, tree_logp = _of_trees(
            theirs, place, parent_X, offer_X, mass_X, pick_A, picked_A, root_X, open_A, said_logp_X, offered_token_AC, offered_logp_AC,
            C, LOOKAHEAD, OFFERED, SAID,
        )  # fmt: skip
        tree_block = tree_ancestor if LOOKAHEAD else tree_row
        row, block = tl.where(theirs, tree_row, row), tl.where(theirs, tree_block, block)
        ancestor, alive = tl.where(theirs, tree_ancestor, ancestor), tl.where(theirs, tree_alive, alive)
        bonus, logp, logw = (
            tl.where(theirs, tree_bonus, bonus),
            tl.where(theirs, tree_logp, logp),
            tl.where(theirs, tree_logw, logw),
        )
    right = tl.full((BLOCK_N,), 2**30, tl.int32)
    if EXACT:
        exact, anyone = exists & (kind >= BEST), tl.max((exists & alive).to(tl.int32), 0) > 0
        best = tl.load(best_A + place, mask=exact, other=0).to(tl.int32)
        right = tl.load(right_A + place, mask=exact, other=2**30).to(tl.int32)
        misses = exact & is_group & (anyone == 0)
        ended = (tl.load(ended_A + best, mask=exact, other=0) != 0) & (
            right == tl.load(count_A + best, mask=exact, other=0)
        )
        ancestor = tl.where(misses, tl.load(origin_A + best, mask=misses, other=0).to(tl.int32), ancestor)
        says = (misses if LOOKAHEAD else exact) & (ended == 0)
        said = tl.load(drawn_AQ + best * Q + right - 1, mask=says, other=-1).to(tl.int64)
        # Nothing follows what has ended.
        said_logp = tl.load(logp_AQ + best * Q + right - 1, mask=exact & (ended == 0), other=float("nan"))
        bonus, logp = tl.where(exact, said, bonus), tl.where(exact, said_logp, logp)
        block, alive = tl.where(misses if LOOKAHEAD else exact, best, block), tl.where(misses, place == ancestor, alive)
        logw = tl.where(misses, tl.where(place == ancestor, 0.0, NONE), logw)
        if not LOOKAHEAD:
            row = tl.where(misses, best, row)
    count = tl.load(count_A + block, mask=exists, other=1).to(tl.int32)
    kept = tl.minimum(right, count)
    slot = tl.load(slot_A + ancestor, mask=exists, other=0)
    entry = tl.load(entry_S + slot, mask=exists, other=0)
    text = tl.load(text_S + slot, mask=exists, other=0).to(tl.int32)
    end, pending = tl.load(end_S + slot, mask=exists, other=0), tl.load(pending_S + slot, mask=exists, other=0)
    early = tl.load(least_S + slot, mask=exists, other=0) - (end - pending)
    text, _ = after_all(
        text, tokens_AQ + block * Q, 1, entry, exists, kept, early,
        is_stop_EV, vocab, has_strings_E, next_EXB, data_B, offset_V, spelled, Q, STRINGS, DONE, STATES,
    )  # fmt: skip
    room = tl.load(limit_S + slot, mask=exists, other=0) - (end - pending) - kept
    has_bonus, going = bonus >= 0, exists & (bonus >= 0) & (room > 0)
    last = after(
        text, bonus, entry, going, kept < early,
        is_stop_EV, vocab, has_strings_E, next_EXB, data_B, offset_V, spelled, STRINGS, DONE, STATES,
    )  # fmt: skip
    ended = (tl.load(ended_A + block, mask=exists, other=1) != 0) & (kept == count)
    grown = kept - 1
    if LOOKAHEAD:
        goes_on = exists & (misses == 0) & (ended == 0)
        grown = tl.load(rows_WX + (2 * K + 1) * rows + row, mask=goes_on, other=0)
        ended = ended | (tl.load(rows_WX + (2 * K + 2) * rows + row, mask=goes_on, other=0) > 0)
    ended = tl.where(has_bonus, (room <= 1) | (last == DONE), ended) | (alive == 0)
    cut = count - kept if LOOKAHEAD else tl.zeros_like(count)
    out = choice_9A + place
    tl.store(out, ancestor.to(tl.int64), mask=exists)
    tl.store(out + places, row.to(tl.int64), mask=exists)
    tl.store(out + 2 * places, grown.to(tl.int64), mask=exists)
    tl.store(out + 3 * places, cut.to(tl.int64), mask=exists)
    tl.store(out + 4 * places, bonus, mask=exists)
    tl.store(out + 5 * places, alive.to(tl.int64), mask=exists)
    tl.store(out + 6 * places, ended.to(tl.int64), mask=exists)
    tl.store(out + 7 * places, text.to(tl.int64), mask=exists)
    tl.store(out + 8 * places, logw.to(tl.int64, bitcast=True), mask=exists)
    tl.store(flags_2A + place, alive, mask=exists)
    tl.store(flags_2A + places + place, ended, mask=exists)
    tl.store(new_count_A + place, (grown + has_bonus.to(tl.int32)).to(tl.int64), mask=exists)
    tl.store(first_logp_A + place, logp, mask=exists)
    run = tl.minimum(tl.load(run_A + block, mask=exists, other=0).to(tl.int32), kept)
    tl.store(run_2A + place, run, mask=exists)
    tl.store(run_2A + places + place, tl.zeros_like(run), mask=exists)
    _write_tokens(
        place, exists, row, block, kept, bonus, pages_AQ, tokens_AQ, logp_AQ, rows_WX, grown_AQ, new_logq_AQ, new_logp_AQ, path_AQ, rows,
        K, Q, BLOCK_Q, LOOKAHEAD,
    )  # fmt: skip
    if is_group:
        group_kind, anyone_says = tl.load(kind_G + group), tl.max((exists & has_bonus & alive).to(tl.int32), 0) > 0
        tl.store(flags_3G + 2 * groups + group, (group_kind >= BEST) & (anyone_says == 0))
        _write_group(
            group, groups, group_kind, own_log_z_G, own_ess_G, own_resampled_G, own_collapsed_G, tree_ess_G, tree_collapsed_G,
            group_2G, flags_3G, OWN, TREES,
        )  # fmt: skip


@triton.jit
def _of_trees(
    exists, place, parent_X, offer_X, mass_X, pick_A, picked_A, root_X, open_A, said_logp_X, offered_token_AC, offered_logp_AC,
    C: tl.constexpr, LOOKAHEAD: tl.constexpr, OFFERED: tl.constexpr, SAID: tl.constexpr,
):  # fmt: skip
    """Rows that are never the same: row, ancestor, whether alive, log-weight, the token that is offered after the
    block, and its log p."""
    pick = tl.load(pick_A + place, mask=exists, other=0)
    alive = tl.load(picked_A + place, mask=exists, other=0) != 0
    row = tl.load(parent_X + pick, mask=exists, other=0).to(tl.int32)
    ancestor = tl.load(root_X + row, mask=exists, other=0).to(tl.int32)
    logw = tl.load(mass_X + pick, mask=exists & alive, other=NONE)
    bonus, logp = place.to(tl.int64) * 0 - 1, place.to(tl.float32) * 0 + float("nan")
    is_open = exists & (tl.load(open_A + (ancestor if LOOKAHEAD else row), mask=exists, other=0) != 0)
    if OFFERED:
        at = row * C + tl.load(offer_X + pick, mask=exists, other=0).to(tl.int32)
        bonus = tl.load(offered_token_AC + at, mask=is_open, other=-1).to(tl.int64)
        logp = tl.load(offered_logp_AC + at, mask=is_open, other=float("nan"))
    elif LOOKAHEAD and SAID:
        logp = tl.load(said_logp_X + row, mask=is_open, other=float("nan"))
    return row, ancestor, alive, logw, bonus, logp


@triton.jit
def _write_tokens(
    place, exists, row, block, kept, bonus, pages_AQ, tokens_AQ, logp_AQ, rows_WX, grown_AQ, new_logq_AQ, new_logp_AQ, path_AQ, rows,
    K: tl.constexpr, Q: tl.constexpr, BLOCK_Q: tl.constexpr, LOOKAHEAD: tl.constexpr,
):  # fmt: skip
    """Tokens that came, their log q, log p of those that stay of the block, and pages of those that the target ran."""
    q = tl.arange(0, BLOCK_Q)[None, :]
    inside, out, of = exists[:, None] & (q < Q), place[:, None] * Q + q, block[:, None] * Q + q
    said = tl.maximum(bonus, 0)[:, None]
    if LOOKAHEAD:
        grows = inside & (bonus < 0)[:, None]
        token = tl.load(rows_WX + q * rows + row[:, None], mask=grows, other=0).to(tl.int64)
        token = tl.where(grows, token, said)
        logq = tl.load(rows_WX + (K + q) * rows + row[:, None], mask=inside, other=0).to(tl.float32, bitcast=True)
    else:
        # The last of them is followed by the first.
        token = tl.load(tokens_AQ + block[:, None] * Q + (q + 1) % Q, mask=inside, other=0).to(tl.int64)
        token = tl.where(q == kept[:, None] - 1, said, token)
        logq = out.to(tl.float32) * 0
    tl.store(grown_AQ + out, token, mask=inside)
    tl.store(new_logq_AQ + out, logq, mask=inside)
    logp = tl.load(logp_AQ + of, mask=inside & (q < kept[:, None] - 1), other=float("nan"))
    tl.store(new_logp_AQ + out, logp, mask=inside)
    tl.store(path_AQ + out, tl.load(pages_AQ + of, mask=inside, other=0), mask=inside)


@triton.jit
def _write_group(
    group, groups, kind, own_log_z_G, own_ess_G, own_resampled_G, own_collapsed_G, tree_ess_G, tree_collapsed_G, group_2G, flags_3G,
    OWN: tl.constexpr, TREES: tl.constexpr,
):  # fmt: skip
    """What the round did to a group's population."""
    log_z, ess = tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    resampled, collapsed = False, False
    if OWN:
        log_z, ess = tl.load(own_log_z_G + group), tl.load(own_ess_G + group)
        resampled, collapsed = tl.load(own_resampled_G + group) != 0, tl.load(own_collapsed_G + group) != 0
    if TREES:
        is_tree = (kind != INDEPENDENT) if OWN else (kind == kind)
        tree_collapsed = tl.load(tree_collapsed_G + group) != 0
        ess = tl.where(is_tree, tl.load(tree_ess_G + group), ess)
        log_z = tl.where(is_tree, tl.where(tree_collapsed, NONE, tl.zeros((), tl.float64)), log_z)
        resampled, collapsed = resampled & (is_tree == 0), tl.where(is_tree, tree_collapsed, collapsed)
    tl.store(group_2G + group, log_z)
    tl.store(group_2G + groups + group, ess)
    tl.store(flags_3G + group, resampled)
    tl.store(flags_3G + groups + group, collapsed)
