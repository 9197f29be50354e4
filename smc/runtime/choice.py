"""What goes on after a round: candidates are weighed and chosen from, or compared with what the target drew itself.

In look-ahead candidates are the rows that the draft made while the target scored the blocks before them; in lockstep they are the blocks
themselves, each with a token of the target's own after it. See the package's legend for axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from smc.algorithm.bounds import Bounds
from smc.algorithm.expansion import Expansion, Kind, Offers
from smc.algorithm.selection import Selection
from smc.runtime.candidates import Weigher
from smc.runtime.outcome import Choice, Drafted, Lineage, RoundResult
from smc.runtime.plan import RoundPlan
from smc.runtime.sampling import Sampling
from smc.runtime.state import SlotState
from smc.runtime.tables import Grow
from smc.runtime.target import Scored

LEAST_SHARE = 0.1
"""Distinct particles of less than this share of the mean weight lose their place more often than not: an answer waits for all of them."""


@dataclass(frozen=True)
class Deciders:
    """What decides for groups: the references, or kernels."""

    select: Callable[..., Selection]
    expand: Callable[..., Expansion]
    keep_roots: Callable[..., tuple[Tensor, Tensor]]
    walk: Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Taken:
    """What goes on at each place."""

    row_A: Tensor
    """int64, of the candidates."""
    ancestor_A: Tensor
    """int64 place whose particle it continues."""
    block_A: Tensor
    """int64 place whose block it continues: in look-ahead the ancestor."""
    alive_A: Tensor
    bonus_A: Tensor
    """int64 token of the target's own that is appended to what is kept of the block; -1: none."""
    logp_A: Tensor
    """float32 log p of the first token after what is kept of the block."""
    logw_A: Tensor
    misses_A: Tensor
    """bool: none of the drafted rows goes on (exact decoding in look-ahead)."""
    log_z_G: Tensor
    ess_G: Tensor
    resampled_G: Tensor
    collapsed_G: Tensor


class Chooser:
    """Chooses, round after round."""

    def __init__(self, sampling: Sampling, state: SlotState, grow: Grow, deciders: Deciders, *, lookahead: bool) -> None:
        self.sampling, self.state, self.grow, self.decide, self.lookahead = sampling, state, grow, deciders, lookahead

    def choose(self, plan: RoundPlan, scored: Scored, drafted: Drafted) -> tuple[Choice, RoundResult]:
        """`drafted`: what may follow the blocks (look-ahead), or the blocks themselves."""
        return RoundChoice(self, plan, scored, drafted).made()


class RoundChoice:
    """The choice of one round."""

    def __init__(self, chooser: Chooser, plan: RoundPlan, scored: Scored, drafted: Drafted) -> None:
        self.plan, self.scored, self.drafted, self.blocks = plan, scored, drafted, scored.blocks
        self.state, self.grow, self.decide, self.lookahead = chooser.state, chooser.grow, chooser.decide, chooser.lookahead
        self.is_exact_A = plan.places_of(Kind.BEST)
        # Of groups that are decoded exactly: the block that agrees longest with the target's draws, and how many of its tokens do.
        self.best_A = torch.arange(len(plan.slot_A), device=plan.slot_A.device)
        self.right_A = self.blocks.count_A
        if Kind.BEST in plan.kinds:
            groups = (plan.first_G, plan.size_G)
            self.best_A, self.right_A = self.decide.walk(
                self.blocks.tokens_AQ, self.blocks.count_A, scored.drawn_AQ, self.blocks.alive_A, groups
            )
        weigher = Weigher(chooser.sampling, chooser.state, plan, scored, drafted)
        self.candidates = weigher.rows_ahead() if self.lookahead else weigher.blocks_with_bonus()
        if Kind.BEST in plan.kinds:
            self.candidates = weigher.that_agree(self.candidates, self.is_exact_A, self.best_A, self.right_A, self.lookahead)

    def made(self) -> tuple[Choice, RoundResult]:
        taken = self._take()
        count_A = self.blocks.count_A[taken.block_A]
        kept_A = torch.where(self.is_exact_A, torch.minimum(self.right_A, count_A), count_A)
        ended_A, text_A, grown_A = self._grown(taken, kept_A)
        choice = Choice.of(
            ancestor_A=taken.ancestor_A,
            row_A=taken.row_A,
            count_A=grown_A,
            cut_A=count_A - kept_A if self.lookahead else torch.zeros_like(count_A),
            bonus_A=taken.bonus_A,
            alive_A=taken.alive_A,
            ended_A=ended_A | ~taken.alive_A,
            text_A=text_A,
            mass_A=taken.logw_A,
        )
        return choice, self._result(taken, choice, kept_A)

    def _take(self) -> Taken:
        kinds, own, trees = self.plan.kinds, None, None
        if Kind.INDEPENDENT in kinds:
            own = self._selected()
        if kinds - {Kind.INDEPENDENT}:
            trees = self._expanded()
        if own is None or trees is None:
            return own or trees
        is_tree_G = self.plan.kind_G != Kind.INDEPENDENT
        is_tree_A = is_tree_G[self.plan.group_A]
        pairs = ((name, getattr(trees, name), mine) for name, mine in vars(own).items())
        return Taken(**{name: torch.where(is_tree_G if name.endswith("_G") else is_tree_A, theirs, mine) for name, theirs, mine in pairs})

    def _selected(self) -> Taken:
        """Independent particles: `smc.algorithm.selection`."""
        plan, candidates, places = self.plan, self.candidates, len(self.plan.slot_A)
        branches = len(candidates.root_X) // places
        # A group with NaN logits is about to end with an error; until then it must not disturb the arithmetic.
        weight_X = candidates.weight_X.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        size_G = torch.where(plan.kind_G == Kind.INDEPENDENT, plan.size_G, 0)
        bounds = Bounds(plan.first_G, size_G, plan.count_G, plan.draws_G)
        alive_A = self.state.alive_S[plan.slot_A]
        chosen = self.decide.select(
            weight_X.view(places, branches), alive_A, bounds, plan.threshold_G, plan.scheme_G, plan.seed_G, plan.round_G
        )
        row_A = chosen.ancestor_A.long() * branches + chosen.branch_A.long()
        return Taken(
            row_A=row_A,
            ancestor_A=chosen.ancestor_A.long(),
            block_A=chosen.ancestor_A.long(),
            alive_A=chosen.alive_A,
            bonus_A=candidates.bonus_X[row_A],
            logp_A=candidates.logp_X[row_A],
            logw_A=chosen.logw_A,
            misses_A=torch.zeros_like(chosen.alive_A),
            log_z_G=chosen.log_z_G.double(),
            ess_G=chosen.ess_G.double(),
            resampled_G=chosen.resampled_G,
            collapsed_G=chosen.collapsed_G,
        )

    def _expanded(self) -> Taken:
        """Particles that are never the same, and exact decoding: `smc.algorithm.expansion`."""
        plan, candidates, scored, places = self.plan, self.candidates, self.scored, len(self.plan.slot_A)
        width = len(candidates.root_X) // places
        offers = candidates.offers or Offers.whole(candidates.weight_X)
        sources, rows = (plan.first_G * width, plan.size_G * width), (plan.first_G, plan.size_G)
        random = (plan.seed_G, plan.round_G, self.drafted.block)
        weights = (candidates.weight_X, candidates.there_X)
        chosen = self.decide.expand(offers, *weights, sources, rows, plan.draws_G, plan.kind_G, random, places, LEAST_SHARE)
        pick_A, alive_A = self.decide.keep_roots(candidates.root_X[chosen.parent_X], chosen.alive_X, rows, rows, places)
        row_A, offer_A = chosen.parent_X[pick_A], chosen.offer_X[pick_A]
        ancestor_A = candidates.root_X[row_A]
        bonus_A, logp_A = candidates.bonus_X[row_A], candidates.logp_X[row_A]
        if not self.lookahead:
            bonus_A = torch.where(scored.open_A[row_A], offers.token_RC[row_A, offer_A], -1)
            logp_A = torch.where(scored.open_A[row_A], candidates.offered_logp_XC[row_A, offer_A], torch.nan)
        zero_G = torch.zeros_like(chosen.ess_G)
        taken = Taken(
            row_A=row_A,
            ancestor_A=ancestor_A,
            block_A=ancestor_A if self.lookahead else row_A,
            alive_A=alive_A,
            bonus_A=bonus_A,
            logp_A=logp_A,
            logw_A=torch.where(alive_A, chosen.mass_X[pick_A], -torch.inf),
            misses_A=torch.zeros_like(alive_A),
            log_z_G=torch.where(chosen.collapsed_G, -torch.inf, zero_G),
            ess_G=chosen.ess_G,
            resampled_G=zero_G > 0,
            collapsed_G=chosen.collapsed_G,
        )
        return self._confirmed(taken) if Kind.BEST in plan.kinds else taken

    def _confirmed(self, taken: Taken) -> Taken:
        """Of groups that are decoded exactly: where nothing that was drafted goes on, the block that agrees longest does, and the token
        that the target says after it."""
        plan, blocks, best_A, is_exact_A = self.plan, self.blocks, self.best_A, self.is_exact_A
        any_A = plan.any_of_group(taken.alive_A[None], plan.group_A)[0][plan.group_A]
        misses_A = is_exact_A & ~any_A & (plan.size_G > 0)[plan.group_A]
        ancestor_A = torch.where(misses_A, blocks.origin_A[best_A], taken.ancestor_A)
        place_A = torch.arange(len(best_A), device=best_A.device)
        is_over_A = blocks.ended_A[best_A] & (self.right_A == blocks.count_A[best_A])
        says_A = is_exact_A & ~is_over_A & (misses_A if self.lookahead else is_exact_A)
        next_A, next_logp_A = (values_AQ[best_A, self.right_A - 1] for values_AQ in (self.scored.drawn_AQ, self.scored.logp_AQ))
        changed = {
            "row_A": taken.row_A if self.lookahead else torch.where(misses_A, best_A, taken.row_A),
            "ancestor_A": ancestor_A,
            "block_A": torch.where(is_exact_A, best_A, taken.block_A),
            "alive_A": torch.where(misses_A, place_A == ancestor_A, taken.alive_A),
            "bonus_A": torch.where(is_exact_A, torch.where(says_A, next_A, -1), taken.bonus_A),
            "logp_A": torch.where(is_exact_A, torch.where(is_over_A, torch.nan, next_logp_A), taken.logp_A),
            "logw_A": torch.where(misses_A, torch.where(place_A == ancestor_A, 0.0, -torch.inf), taken.logw_A),
            "misses_A": misses_A,
        }
        return Taken(**(vars(taken) | changed))

    def _grown(self, taken: Taken, kept_A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Whether what goes on has ended [A], the stop machine's state after what is kept of the blocks [A], and how many drafted tokens
        each place takes [A]."""
        state, blocks, drafted = self.state, self.blocks, self.drafted
        slot_A = self.plan.slot_A[taken.ancestor_A]
        entry_A = state.entry_S[slot_A]
        text_A = self.grow(state.stops, entry_A, state.text_S[slot_A], blocks.tokens_AQ[taken.block_A], kept_A).text_A
        room_A = state.limit_S[slot_A] - state.held(slot_A) - kept_A
        said = self.grow(state.stops, entry_A, text_A, taken.bonus_A[:, None], room_A)
        over_A = blocks.ended_A[taken.block_A] & (kept_A == blocks.count_A[taken.block_A])
        grown_A, ended_A = kept_A - 1, over_A
        if self.lookahead:
            goes_on_A = ~taken.misses_A & ~over_A
            grown_A = torch.where(goes_on_A, drafted.count_X[taken.row_A], 0)
            ended_A = over_A | (goes_on_A & drafted.ended_X[taken.row_A])
        return torch.where(taken.bonus_A >= 0, said.ends_A, ended_A), text_A, grown_A

    def _result(self, taken: Taken, choice: Choice, kept_A: Tensor) -> RoundResult:
        plan, blocks, candidates, has_bonus_A = self.plan, self.blocks, self.candidates, choice.bonus_A >= 0
        bonus_A1 = choice.bonus_A.clamp(min=0)[:, None]
        if self.lookahead:
            grown_AQ = torch.where(has_bonus_A[:, None], bonus_A1, self.drafted.tokens_XK[choice.row_A].long())
            logq_AQ = self.drafted.logq_XK[choice.row_A]
        else:
            grown_AQ = blocks.tokens_AQ[taken.block_A].roll(-1, 1).scatter(1, (kept_A - 1)[:, None], bonus_A1)
            logq_AQ = torch.zeros_like(grown_AQ, dtype=torch.float32)
        column_Q = torch.arange(blocks.tokens_AQ.shape[1], device=kept_A.device)
        nan_2G = plan.any_of_group(torch.stack((candidates.draft_nan_A, candidates.target_nan_A)), plan.group_A)
        says_G = plan.any_of_group((has_bonus_A & choice.alive_A)[None], plan.group_A)[0]
        run_A = torch.minimum(self.scored.run_A[taken.block_A], kept_A)
        return RoundResult(
            ancestor_A=choice.ancestor_A,
            alive_A=choice.alive_A,
            cut_A=choice.cut_A,
            grown_AQ=grown_AQ,
            count_A=choice.count_A + has_bonus_A.long(),
            ended_A=choice.ended_A,
            logw_A=taken.logw_A,
            logq_AQ=logq_AQ,
            logp_AQ=torch.where(column_Q < kept_A[:, None] - 1, self.scored.logp_AQ[taken.block_A], torch.nan),
            first_logp_A=taken.logp_A,
            log_z_G=taken.log_z_G,
            ess_G=taken.ess_G,
            resampled_G=taken.resampled_G,
            collapsed_G=taken.collapsed_G,
            draft_nan_G=nan_2G[0],
            target_nan_G=nan_2G[1],
            hit_G=(plan.kind_G == Kind.BEST) & ~says_G,
            lineage=Lineage(plan.target_pages_AQ[taken.block_A], run_A.int(), torch.zeros_like(run_A).int()),
        )
