"""What a round's choice is among, and its weights. See the package's legend for axes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smc.algorithm.expansion import Kind, Offers
from smc.algorithm.weights import block_log_weight
from smc.philox import STREAMS_PER_PARTICLE, Purpose
from smc.runtime.outcome import Drafted
from smc.runtime.plan import RoundPlan
from smc.runtime.sampling import DrawKeys, Sampling
from smc.runtime.state import SlotState
from smc.runtime.target import Scored


@dataclass(frozen=True)
class Candidates:
    """X rows: those of the batch's places (lockstep), or F for each of them (look-ahead)."""

    root_X: Tensor
    """int64 place whose particle a row continues."""
    weight_X: Tensor
    """float64 log-weight; of exact decoding, the draft's log-likelihood."""
    there_X: Tensor
    """bool: the row may be chosen."""
    logp_X: Tensor
    """float32 log p of the first token after the scored block; NaN where there is none."""
    bonus_X: Tensor
    """int64 token of an independent row's own; -1: none."""
    target_nan_A: Tensor
    draft_nan_A: Tensor
    offers: Offers | None = None
    """Of the token after the block, where it is chosen, too."""
    offered_logp_XC: Tensor | None = None


@dataclass(frozen=True)
class Weigher:
    """Weighs the candidates of one round."""

    sampling: Sampling
    state: SlotState
    plan: RoundPlan
    scored: Scored
    drafted: Drafted

    def rows_ahead(self) -> Candidates:
        """Look-ahead: the rows that were drafted while the blocks were scored. A row's weight is that of its block, the share that it has
        of its root, and what the target says of its first token."""
        plan, scored, root_X = self.plan, self.scored, self.drafted.root_X
        weight_A, draft_nan_A = self._blocks()
        logq_X = self.drafted.logq_XK[:, 0]
        if plan.kinds == {Kind.BEST}:
            # What the target drew itself decides.
            logp_X = torch.zeros_like(logq_X)
        else:
            logp_X = self.sampling.score(scored.next_AV, plan.target_law, self.drafted.tokens_XK[:, :1].long(), root_X)[:, 0]
        open_X = scored.open_A[root_X]
        next_X = torch.where(open_X, plan.alpha_A[root_X] * logp_X - logq_X, 0.0)
        nan_2X = torch.stack((open_X & torch.isnan(logp_X), open_X & torch.isnan(logq_X)))
        nan_2G = plan.any_of_group(nan_2X, plan.group_A[self._place()])
        return Candidates(
            root_X=root_X,
            weight_X=weight_A[root_X] + next_X + self.drafted.share_X,
            there_X=scored.blocks.alive_A[root_X] & (self.drafted.share_X > -torch.inf),
            logp_X=torch.where(open_X, logp_X, torch.nan),
            bonus_X=torch.full_like(root_X, -1),
            target_nan_A=scored.nan_A | nan_2G[0, plan.group_A],
            draft_nan_A=draft_nan_A | nan_2G[1, plan.group_A],
        )

    def blocks_with_bonus(self) -> Candidates:
        """Lockstep: the blocks themselves, and what the target says after them."""
        plan, scored, blocks = self.plan, self.scored, self.scored.blocks
        weight_A, draft_nan_A = self._blocks()
        position_A = self.state.held(plan.slot_A[blocks.origin_A]) + blocks.count_A
        bonus_A, logp_A = torch.full_like(position_A, -1), torch.full_like(scored.logp_AQ[:, 0], torch.nan)
        log_z_A, offers, offered_logp_AC = torch.zeros_like(logp_A), None, None
        if Kind.INDEPENDENT in plan.kinds:
            stream_A = plan.particle_A * STREAMS_PER_PARTICLE
            bonus_A1, logp_A1, log_z_A = self.sampling.bonus(scored.next_AV, plan.target_law, self._keys(stream_A, position_A))
            bonus_A, logp_A = bonus_A1[:, 0], logp_A1[:, 0]
        if plan.kinds == {Kind.BEST}:
            offers, offered_logp_AC = Offers.whole(logp_A), logp_A[:, None]
        elif plan.kinds - {Kind.INDEPENDENT}:
            rank_A = self._place() - plan.first_G[plan.group_A]
            keys = self._keys(rank_A, position_A)
            offers, offered_logp_AC, log_z_A = self.sampling.bonus_offer(scored.next_AV, plan.target_law, keys)
            offers = offers.unless(~scored.open_A | plan.places_of(Kind.BEST))
        return Candidates(
            root_X=blocks.origin_A,
            weight_X=weight_A + torch.where(scored.open_A, log_z_A, 0.0),
            there_X=blocks.alive_A,
            logp_X=torch.where(scored.open_A, logp_A, torch.nan),
            bonus_X=torch.where(scored.open_A, bonus_A, -1),
            target_nan_A=scored.nan_A | (scored.open_A & torch.isnan(log_z_A)),
            draft_nan_A=draft_nan_A,
            offers=offers,
            offered_logp_XC=offered_logp_AC,
        )

    def that_agree(self, candidates: Candidates, is_exact_A: Tensor, best_A: Tensor, right_A: Tensor, lookahead: bool) -> Candidates:
        """Of groups that are decoded exactly, only what follows the target's own draws is left: in lockstep the block that agrees
        longest; in look-ahead rows of it, if it agrees as a whole, that begin with what the target says next."""
        place_X, root_X, blocks = self._place(), candidates.root_X, self.scored.blocks
        is_exact_X, block_X = is_exact_A[place_X], root_X if lookahead else place_X
        agrees_X = block_X == best_A[place_X]
        if lookahead:
            is_whole_A = right_A == blocks.count_A[best_A]
            next_A = self.scored.drawn_AQ[best_A, right_A - 1]
            says_X = self.drafted.tokens_XK[:, 0] == next_A[place_X]
            agrees_X = agrees_X & is_whole_A[place_X] & says_X & self.scored.open_A[root_X]
        # What the draft says is of no consequence here, be it NaN; nor what the target would say after tokens that are wrong.
        column_Q = torch.arange(self.scored.nan_AQ.shape[1], device=root_X.device)
        nan_A = (self.scored.nan_AQ[best_A] & (column_Q < right_A[:, None])).any(-1)
        likelihood_X = self.drafted.share_X.nan_to_num(nan=0.0, neginf=-torch.inf)
        return replace(
            candidates,
            weight_X=torch.where(is_exact_X, likelihood_X, candidates.weight_X),
            there_X=candidates.there_X & (agrees_X | ~is_exact_X),
            target_nan_A=torch.where(is_exact_A, nan_A, candidates.target_nan_A),
            draft_nan_A=candidates.draft_nan_A & ~is_exact_A,
        )

    def _blocks(self) -> tuple[Tensor, Tensor]:
        """Log-weight of every block [A], and whether there is a NaN of the draft in it [A]."""
        blocks = self.scored.blocks
        block_A = block_log_weight(self.scored.logp_AQ[:, :-1], blocks.logq_AQ[:, 1:], blocks.count_A - 1, self.plan.alpha_A)
        exists_AQ = torch.arange(blocks.logq_AQ.shape[1], device=block_A.device) < blocks.count_A[:, None]
        nan_A = (torch.isnan(blocks.logq_AQ) & exists_AQ).any(-1)
        if Kind.DISTINCT in self.plan.kinds:
            # Rows of NaN have given way to others, on which the draft has left a mark.
            is_marked_X = torch.isnan(self.drafted.logq_XK).any(-1)
            marked_G = self.plan.any_of_group(is_marked_X[None], self.plan.group_A[self._place()])[0]
            nan_A = nan_A | (marked_G[self.plan.group_A] & self.plan.places_of(Kind.DISTINCT))
        return blocks.logw_A + block_A, nan_A

    def _keys(self, stream_A: Tensor, position_A: Tensor) -> DrawKeys:
        return DrawKeys(self.plan.seed_A, self.plan.round_A, stream_A[:, None], position_A, Purpose.TARGET)

    def _place(self) -> Tensor:
        """Place that every row belongs to [X]: its group is that of its root."""
        return self.plan.place_of_rows(len(self.drafted.root_X) // len(self.plan.slot_A))
