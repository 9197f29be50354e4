"""Rows in the making: each takes the place that a row of the step before continues with a token. See the package's legend for axes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smc.algorithm.expansion import Expansion, Kind, Offers
from smc.executor.chains import Drawn
from smc.executor.plan import RoundPlan
from smc.executor.state import SlotState
from smc.stops import grow


@dataclass(frozen=True)
class Tree:
    """Rows in the making, or the particles that they continue."""

    root_X: Tensor
    """int64 place whose particle a row continues."""
    tokens_XK: Tensor
    """int64; of these the first steps' exist."""
    logq_XK: Tensor
    tail_XB: Tensor
    """int32 pages of the tokens, all but the last."""
    count_X: Tensor
    """int64 tokens that exist."""
    alive_X: Tensor
    ended_X: Tensor
    """The sequence has ended; it takes no further token."""
    before_X: Tensor
    """int64 state of the stop machine before the last token."""
    text_X: Tensor
    """int64 state after it."""
    mass_X: Tensor
    """float64 log mass."""
    last_X: Tensor
    """int64 last token."""
    next_X: Tensor
    """int64 position of the token that comes next."""
    run_4X: Tensor | None
    """int32, for the pass over the last tokens: slot, position of the first of the row's own tokens, of the last one, and whether it is
    run. None: particles, of which more may be pending."""


@dataclass(frozen=True)
class Continuation:
    """How rows go on: those of trees as chosen among what all of a group offer, the others as each has drawn, chains from what they were
    dealt. None: there are none such."""

    chosen: tuple[Expansion, Offers] | None
    """And what it was chosen among."""
    own: tuple[Tensor, Tensor] | None
    """Tokens and their log q, [S, D] each: D rows continue each of the S there are."""
    chains: Drawn | None = None


def adopt(tree: Tree, more: Continuation, plan: RoundPlan[Tensor], state: SlotState, *, step: int, branches: int) -> Tree:
    """The rows with their next token: at the first step (0) `branches` for each place. The reference: `smc.kernels.tree.adopt` does the
    same in one launch."""
    parent_X, token_X, logq_X, mass_X = _continued(tree, more, plan, branches)
    root_X, ended_X, text_X, count_X = (values_S[parent_X] for values_S in (tree.root_X, tree.ended_X, tree.text_X, tree.count_X))
    slot_X = plan.slot_A[root_X]
    end_X = state.end_S[slot_X]
    room_X = state.limit_S[slot_X] - end_X - count_X
    growth = grow(state.stops, state.entry_S[slot_X], text_X, token_X[:, None], room_X, state.least_S[slot_X] - end_X - count_X)
    is_now_K = torch.arange(tree.tokens_XK.shape[1], device=state.device) == step
    is_known_B = torch.arange(tree.tail_XB.shape[1], device=state.device) < step
    alive_X, has_ended_X = tree.alive_X[parent_X] & (mass_X > -torch.inf), ended_X | growth.ends_A
    return Tree(
        root_X=root_X,
        tokens_XK=torch.where(is_now_K, token_X[:, None], tree.tokens_XK[parent_X]),
        logq_XK=torch.where(is_now_K, logq_X[:, None], tree.logq_XK[parent_X]),
        # Pages of the tokens so far go with them; those of later ones are this row's own.
        tail_XB=torch.where(is_known_B, tree.tail_XB[parent_X], plan.branch_pages_XB),
        count_X=count_X + (~ended_X).long(),
        alive_X=alive_X,
        ended_X=has_ended_X,
        before_X=torch.where(ended_X, tree.before_X[parent_X], text_X),
        text_X=torch.where(ended_X, text_X, growth.text_A),
        mass_X=mass_X,
        last_X=token_X,
        next_X=end_X + (step + 1),
        run_4X=torch.stack((slot_X, end_X, end_X + step, alive_X & ~has_ended_X)).int(),
    )


def _continued(tree: Tree, more: Continuation, plan: RoundPlan[Tensor], branches: int) -> tuple[Tensor, ...]:
    """Row that every row continues [X], its token [X], its log q [X] and the row's log mass [X]."""
    parts: list[tuple[Tensor, tuple[Tensor, ...]]] = []
    if more.own is not None:
        token_SD, logq_SD = more.own
        parent_X = torch.arange(len(token_SD), device=token_SD.device).repeat_interleave(token_SD.shape[1])
        own = (parent_X, token_SD.flatten().long(), logq_SD.flatten(), torch.zeros_like(parent_X, dtype=torch.float64))
        parts.append((plan.kind_G >= 0, own))
    if more.chosen is not None:
        parts.append((plan.kind_G != Kind.INDEPENDENT, _chosen(tree, *more.chosen, plan, branches)))
    if more.chains is not None:
        drawn, none_X = more.chains, torch.zeros_like(more.chains.logq_X, dtype=torch.float64)
        parts.append((plan.kind_G == Kind.CHAINS, (drawn.parent_X, drawn.token_X, drawn.logq_X, none_X)))
    _, found = parts[0]
    for is_theirs_G, theirs in parts[1:]:
        is_theirs_X = is_theirs_G[plan.group_A].repeat_interleave(branches)
        found = tuple(torch.where(is_theirs_X, theirs_X, found_X) for theirs_X, found_X in zip(theirs, found))
    return found


def _chosen(tree: Tree, chosen: Expansion, offers: Offers, plan: RoundPlan[Tensor], branches: int) -> tuple[Tensor, ...]:
    token_X, logq_X = (values_SC[chosen.parent_X, chosen.offer_X] for values_SC in (offers.token_RC, offers.logq_RC))
    logq_X = torch.where(tree.ended_X[chosen.parent_X], 0.0, logq_X)
    # A draft that returns NaN must be seen, where what it says matters.
    is_nan_X = chosen.nan_G[plan.group_A].repeat_interleave(branches)
    return chosen.parent_X, token_X, torch.where(is_nan_X, torch.nan, logq_X), chosen.mass_X
