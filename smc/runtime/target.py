"""The target's part of a round: score the blocks in flight, weigh the candidates, choose. See the package's legend for axes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from smc.algorithm.selection import Selection, lockstep_candidates, lookahead_candidates
from smc.algorithm.weights import block_log_weight
from smc.philox import STREAMS_PER_PARTICLE, Purpose
from smc.runtime.forward import StaticForward
from smc.runtime.plan import Choice, Drafted, Join, Lineage, RoundPlan, RoundResult
from smc.runtime.sampling import DrawKeys, Sampling
from smc.runtime.state import SlotState
from smc.runtime.tables import Grow, Reroot


@dataclass(frozen=True)
class Scored:
    """The target's verdict on the blocks in flight, by place."""

    open_A: Tensor
    """bool: the particle goes on after its block."""
    run_A: Tensor
    """Tokens of the block that the model ran: of an ended particle all but the last."""
    logp_AQ: Tensor
    """log p of the tokens after the block's first; 0 where there is none."""
    next_AV: Tensor
    """Logits after the block."""


class Scorer:
    """A model that scores. Pending tokens of a slot are its block in flight, whose first is already counted in its weight."""

    def __init__(
        self,
        forward: StaticForward,
        sampling: Sampling,
        state: SlotState,
        grow: Grow,
        reroot: Reroot,
        select: Callable[..., Selection],
        *,
        block: int,
        lookahead: bool,
    ) -> None:
        self.forward, self.sampling, self.state = forward, sampling, state
        self.grow, self.reroot, self.select = grow, reroot, select
        self.block, self.lookahead = block, lookahead
        self.queries = block if lookahead else block + 1
        slots, device = len(state.end_S), state.device
        self.logq_SQ = torch.zeros(slots, self.queries, device=device)
        """log q of the pending tokens."""
        self.logw_S = torch.zeros(slots, dtype=torch.float64, device=device)
        self.alive_S = torch.zeros(slots, dtype=torch.bool, device=device)
        """The slot holds a particle, be it without weight."""

    def join(self, group: Join, slots_N: Tensor) -> None:
        self.logq_SQ[slots_N, : group.logq_NQ.shape[1]] = torch.from_numpy(group.logq_NQ).to(self.state.device)
        self.logw_S[slots_N] = torch.from_numpy(group.logw_N).to(self.state.device)
        self.alive_S[slots_N] = torch.from_numpy(group.alive_N).to(self.state.device)

    def complete(self, plan: RoundPlan, drafted: Drafted) -> None:
        """Lockstep: the drafted tokens complete the blocks in flight, whose seeds are there."""
        state, slot_A, tokens_AK = self.state, plan.slot_A, drafted.tokens_XK.long()
        open_A = ~state.ended_S[slot_A]
        end_A, text_A = state.end_S[slot_A], state.text_S[slot_A]
        growth = self.grow(state.stops, state.entry_S[slot_A], text_A, tokens_AK, state.limit_S[slot_A] - end_A)
        count_A = torch.where(open_A, growth.count_A, 0)
        state.pending_SQ[slot_A, 1:] = tokens_AK
        state.pending_S[slot_A] = 1 + count_A
        self.logq_SQ[slot_A, 1:] = drafted.logq_XK
        state.advance(slot_A, end_A + count_A, ~open_A | growth.ends_A, torch.where(open_A, growth.text_A, text_A))
        state.keep_dummy()

    def score(self, plan: RoundPlan) -> Scored:
        """Run the blocks in flight. The last token of an ended particle is scored, never run."""
        q, state, slot_A = self.queries, self.state, plan.slot_A
        open_A, pending_A, tokens_AQ = ~state.ended_S[slot_A], state.pending_S[slot_A], state.pending_SQ[slot_A]
        run_A = pending_A - (~open_A).long()
        rows = state.pending_rows(plan, plan.target_pages_AQ, run_A)
        logits_TV = self.forward.logits(self.forward(tokens_AQ.flatten(), rows))
        place_A = torch.arange(len(slot_A), device=state.device)
        label_T1 = tokens_AQ.roll(-1, 1).view(-1, 1)
        logp_AQ = self.sampling.score(logits_TV, plan.target_law.take(place_A.repeat_interleave(q)), label_T1).view(-1, q)
        labelled_AQ = torch.arange(1, q + 1, device=state.device) < pending_A[:, None]
        next_AV = logits_TV[place_A * q + pending_A - 1]
        return Scored(open_A, run_A, torch.where(labelled_AQ, logp_AQ, 0.0), next_AV)

    def choose(self, plan: RoundPlan, scored: Scored, first: Drafted | None) -> tuple[Choice, RoundResult]:
        """Weigh the candidates and choose. `first`: of the branches' first tokens (look-ahead)."""
        slot_A, open_A = plan.slot_A, scored.open_A
        block_A, target_nan_A, draft_nan_A = self._weigh_blocks(plan, scored)
        if self.lookahead:
            tokens_AF, logq_AF = (values.view(len(slot_A), -1) for values in (first.tokens_XK, first.logq_XK))
            next_logp_AF = self.sampling.score(scored.next_AV, plan.target_law, tokens_AF.long())
            next_AF = torch.where(open_A[:, None], plan.alpha_A[:, None] * next_logp_AF - logq_AF, 0.0)
            candidates_AF = lookahead_candidates(self.logw_S[slot_A], block_A, next_AF, open_A)
            bonus_A = torch.zeros_like(slot_A)
            target_nan_A = target_nan_A | open_A & torch.isnan(next_logp_AF).any(-1)
            draft_nan_A = draft_nan_A | open_A & torch.isnan(logq_AF).any(-1)
        else:
            stream_A1 = (plan.particle_A * STREAMS_PER_PARTICLE)[:, None]
            keys = DrawKeys(plan.seed_A, plan.round_A, stream_A1, self.state.end_S[slot_A], Purpose.TARGET)
            bonus_A1, next_logp_AF, log_z_A = self.sampling.bonus(scored.next_AV, plan.target_law, keys)
            bonus_A = bonus_A1[:, 0]
            candidates_AF = lockstep_candidates(self.logw_S[slot_A], block_A, torch.where(open_A, log_z_A, 0.0))
            target_nan_A = target_nan_A | open_A & torch.isnan(log_z_A)
        # A group with NaN logits is about to end with an error; until then it must not disturb the arithmetic.
        candidates_AF = candidates_AF.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        chosen = self.select(candidates_AF, self.alive_S[slot_A], plan.bounds, plan.threshold_G, plan.scheme_G, plan.seed_G, plan.round_G)
        choice = Choice(torch.stack((chosen.ancestor_A.long(), chosen.branch_A.long(), bonus_A, chosen.alive_A.long())))
        self.logw_S[slot_A], self.alive_S[slot_A] = chosen.logw_A, chosen.alive_A
        goes_on_A = open_A[choice.ancestor_A] & chosen.alive_A
        first_logp_A = torch.where(goes_on_A, next_logp_AF[choice.ancestor_A, choice.branch_A], torch.nan)
        nan_2G = _any_of_group(torch.stack((draft_nan_A, target_nan_A)), plan)
        nothing_A = torch.zeros_like(slot_A)
        result = RoundResult(
            ancestor_A=choice.ancestor_A,
            alive_A=chosen.alive_A,
            grown_AQ=nothing_A,
            count_A=nothing_A,
            ended_A=nothing_A,
            logw_A=chosen.logw_A,
            logq_AQ=nothing_A,
            logp_AQ=scored.logp_AQ,
            first_logp_A=first_logp_A,
            log_z_G=chosen.log_z_G,
            ess_G=chosen.ess_G,
            resampled_G=chosen.resampled_G,
            collapsed_G=chosen.collapsed_G,
            draft_nan_G=nan_2G[0],
            target_nan_G=nan_2G[1],
            lineage=Lineage(plan.target_pages_AQ[choice.ancestor_A], scored.run_A[choice.ancestor_A].int()),
        )
        return choice, result

    def follow(self, plan: RoundPlan, scored: Scored, drafted: Drafted, choice: Choice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The chosen candidates become the particles.

        Returns the tokens they have more than their ancestors had before the round [A, Q], how many [A], whether they have ended [A],
        and log q of those tokens [A, Q].
        """
        state, slot_A, ancestor_A = self.state, plan.slot_A, choice.ancestor_A
        source_A, open_A = slot_A[ancestor_A], scored.open_A[ancestor_A] & choice.alive_A
        end_A, text_A, pending_A = state.end_S[source_A], state.text_S[source_A], state.pending_S[source_A]
        room_A = state.limit_S[slot_A] - end_A
        self.reroot(state.table_SL, slot_A, source_A, state.base_S[slot_A], end_A, None, plan.columns)
        if self.lookahead:
            row_A = ancestor_A * (drafted.all_2KX.shape[2] // len(slot_A)) + choice.branch_A
            tokens_AQ, logq_AQ = drafted.tokens_XK[row_A].long(), drafted.logq_XK[row_A]
            growth = self.grow(state.stops, state.entry_S[slot_A], text_A, tokens_AQ, room_A)
            grown_A = torch.where(open_A, growth.count_A, 0)
            grown_AQ, pending_AQ, count_A = tokens_AQ, tokens_AQ, grown_A.clamp(min=1)
        else:
            bonus_A1 = choice.bonus_A[ancestor_A, None]
            growth = self.grow(state.stops, state.entry_S[slot_A], text_A, bonus_A1, room_A)
            grown_AQ = state.pending_SQ[source_A].roll(-1, 1).scatter(1, (pending_A - 1)[:, None], bonus_A1)
            logq_AQ = torch.zeros_like(grown_AQ, dtype=torch.float32)
            # What the block had before the bonus was appended when it was completed.
            grown_A = pending_A - 1 + open_A.long()
            pending_AQ, count_A = bonus_A1, torch.ones_like(pending_A)
        ended_A = ~open_A | growth.ends_A
        new_end_A = end_A + torch.where(open_A, growth.count_A, 0)
        state.advance(slot_A, new_end_A, ended_A, torch.where(open_A, growth.text_A, text_A))
        state.set_pending(slot_A, pending_AQ, count_A)
        self.logq_SQ[slot_A, : logq_AQ.shape[1]] = logq_AQ
        state.keep_dummy()
        self.logw_S[state.dummy :].fill_(0.0)
        return grown_AQ, grown_A, ended_A, logq_AQ

    def _weigh_blocks(self, plan: RoundPlan, scored: Scored) -> tuple[Tensor, Tensor, Tensor]:
        """log-weight increment of every block [A], and whether there is a NaN of the target, or of the draft [A]."""
        logq_AQ, count_A = self.logq_SQ[plan.slot_A], self.state.pending_S[plan.slot_A]
        block_A = block_log_weight(scored.logp_AQ[:, :-1], logq_AQ[:, 1:], count_A - 1, plan.alpha_A)
        exists_AQ = torch.arange(self.queries, device=logq_AQ.device) < count_A[:, None]
        return block_A, torch.isnan(scored.logp_AQ).any(-1), (torch.isnan(logq_AQ) & exists_AQ).any(-1)


def _any_of_group(mask_XA: Tensor, plan: RoundPlan) -> Tensor:
    """Whether the mask holds anywhere in a group, bool [X, G]."""
    counts_XG = torch.zeros(len(mask_XA), len(plan.first_G), device=mask_XA.device)
    return counts_XG.index_add(1, plan.group_A, mask_XA.float()) > 0
