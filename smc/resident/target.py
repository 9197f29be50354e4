"""The target's side of a round: score the blocks in flight, weigh the candidates, choose. See the package's legend for axes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from smc.algorithm.selection import Selection, lockstep_candidates, lookahead_candidates, select
from smc.algorithm.weights import block_log_weight
from smc.arrays import to_device
from smc.philox import STREAMS_PER_PARTICLE, Purpose
from smc.resident.forward import StaticForward, StaticRows
from smc.resident.plan import Choice, Drafted, Joining, RoundPlan, RoundResult
from smc.resident.sampling import DrawKeys, Sampling
from smc.resident.state import SlotState


@dataclass(frozen=True)
class Scored:
    """The target's verdict on the blocks in flight, by place."""

    open_A: Tensor
    """bool: the particle goes on after its block."""
    count_A: Tensor
    """Tokens of the block that exist."""
    room_A: Tensor
    """Tokens by which the answer may grow after its block."""
    logp_AQ: Tensor
    """log p of the tokens after the block's first; 0 where there is none."""
    next_AV: Tensor
    """Logits after the block."""


class ResidentTarget:
    """One target model with the state of `slots` particles."""

    def __init__(
        self,
        forward: StaticForward,
        sampling: Sampling,
        *,
        slots: int,
        width: int,
        block: int,
        lookahead: bool,
        select: Callable[..., Selection] = select,
    ) -> None:
        self.forward, self.sampling, self.select = forward, sampling, select
        self.block, self.lookahead = block, lookahead
        self.queries = block if lookahead else block + 1
        self.device = forward.model.embed.weight.device
        self.state = SlotState(slots, width, sampling.vocab, self.device)
        self.tokens_SQ = torch.zeros(slots + 1, self.queries, dtype=torch.int64, device=self.device)
        """The block in flight; its first token is already counted in the weight."""
        self.logq_SQ = torch.zeros(slots + 1, self.queries, device=self.device)
        self.count_S = torch.ones(slots + 1, dtype=torch.int64, device=self.device)
        """Tokens of the block that exist."""
        self.logw_S = torch.zeros(slots + 1, dtype=torch.float64, device=self.device)

    def join(self, group: Joining) -> None:
        slots_N = self.state.join(group)
        self.tokens_SQ[slots_N, 0] = to_device(group.start.first_N, self.device).long()
        self.logq_SQ[slots_N] = 0.0
        self.count_S[slots_N] = 1
        self.logw_S[slots_N] = to_device(group.start.logw_N, self.device)

    def complete(self, plan: RoundPlan, drafted: Drafted) -> None:
        """Lockstep: the drafted tokens complete the blocks in flight, whose seeds are there."""
        slots_A, tokens_AK = plan.slots_A, drafted.tokens_AFK[:, 0].long()
        open_A = ~self.state.ended_S[slots_A]
        growth = self.state.grow(plan, slots_A, tokens_AK, plan.room_A)
        self.tokens_SQ[slots_A, 1:] = tokens_AK
        self.logq_SQ[slots_A, 1:] = drafted.logq_AFK[:, 0]
        self.count_S[slots_A] = torch.where(open_A, 1 + growth.count_A, 1)
        self.state.ended_S[slots_A] = ~open_A | growth.ends_A
        self.state.text_S[slots_A] = growth.text_A
        self._keep_dummy()

    def score(self, plan: RoundPlan) -> Scored:
        """Run the blocks in flight. The last token of an ended particle is scored, never run."""
        q, slots_A = self.queries, plan.slots_A
        open_A, count_A, tokens_AQ = ~self.state.ended_S[slots_A], self.count_S[slots_A], self.tokens_SQ[slots_A]
        fresh_A = plan.round_A == 1
        back_A = torch.where(fresh_A, 0, self.block - 1) if self.lookahead else 0
        rows = StaticRows(
            table_RL=self.state.table_SL[slots_A],
            start_R=(plan.position_A - back_A).int(),
            count_R=(count_A - (~open_A).long()).int(),
            size_G=plan.size_G.int(),
            shared_G=plan.shared_G,
            queries=q,
            short=plan.short,
        )
        logits_TV = self.forward.logits(self.forward(tokens_AQ.flatten(), rows))
        place_T = torch.arange(len(slots_A), device=self.device).repeat_interleave(q)
        label_T1 = tokens_AQ.roll(-1, 1).view(-1, 1)
        logp_AQ = self.sampling.score(logits_TV, plan.target_law.take(place_T), label_T1).view(-1, q)
        labelled_AQ = torch.arange(1, q + 1, device=self.device) < count_A[:, None]
        last_A = torch.where(fresh_A, 0, q - 1) if self.lookahead else q - 1
        next_AV = logits_TV[torch.arange(len(slots_A), device=self.device) * q + last_A]
        room_A = plan.room_A if self.lookahead else plan.room_A - (count_A - 1)
        return Scored(open_A, count_A, room_A, torch.where(labelled_AQ, logp_AQ, 0.0), next_AV)

    def choose(self, plan: RoundPlan, scored: Scored, first: Drafted | None) -> tuple[Choice, RoundResult]:
        """Weigh the candidates and choose. `first`: of the branches' first tokens (look-ahead)."""
        slots_A, open_A, (groups, places) = plan.slots_A, scored.open_A, plan.shape_GM
        block_A, target_nan_A, draft_nan_A = self._weigh_blocks(plan, scored)
        history = (self.logw_S[slots_A].view(groups, places), block_A.view(groups, places))
        if self.lookahead:
            logq_AF = first.logq_AFK[..., 0]
            next_logp_AF = self.sampling.score(scored.next_AV, plan.target_law, first.tokens_AFK[..., 0].long())
            next_AF = torch.where(open_A[:, None], plan.alpha_A[:, None] * next_logp_AF - logq_AF, 0.0)
            candidates = lookahead_candidates(*history, next_AF.view(groups, places, -1), open_A.view(groups, places))
            bonus_A = torch.zeros_like(slots_A)
            target_nan_A = target_nan_A | open_A & torch.isnan(next_logp_AF).any(-1)
            draft_nan_A = draft_nan_A | open_A & torch.isnan(logq_AF).any(-1)
        else:
            stream_A1 = (plan.particle_A * STREAMS_PER_PARTICLE)[:, None]
            keys = DrawKeys(plan.seed_A, plan.round_A, stream_A1, plan.position_A + self.block + 1, Purpose.TARGET)
            bonus_A1, next_logp_AF, log_z_A = self.sampling.bonus(scored.next_AV, plan.target_law, keys)
            bonus_A = bonus_A1[:, 0]
            candidates = lockstep_candidates(*history, torch.where(open_A, log_z_A, 0.0).view(groups, places))
            target_nan_A = target_nan_A | open_A & torch.isnan(log_z_A)
        # A group with NaN logits is about to end with an error; until then it must not disturb the arithmetic.
        candidates = candidates.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        chosen = self._select(plan, candidates)
        ancestor_GN = chosen.ancestor_GN + torch.arange(0, groups * places, places, device=self.device)[:, None]
        choice = Choice(torch.stack((ancestor_GN.flatten(), chosen.branch_GN.flatten(), bonus_A)).long())
        self.logw_S[slots_A] = chosen.logw_GN.flatten()
        nothing = torch.zeros_like(slots_A)
        goes_on_A = open_A[choice.ancestor_A]
        result = RoundResult(
            ancestor_A=choice.ancestor_A,
            grown_AQ=nothing,
            count_A=nothing,
            ended_A=nothing,
            logw_A=chosen.logw_GN.flatten(),
            logp_AQ=scored.logp_AQ,
            first_logp_A=torch.where(goes_on_A, next_logp_AF[choice.ancestor_A, choice.branch_A], torch.nan),
            log_z_G=chosen.log_z_G,
            ess_G=chosen.ess_G,
            resampled_G=chosen.resampled_G,
            collapsed_G=chosen.collapsed_G,
            draft_nan_G=draft_nan_A.view(groups, places).any(-1),
            target_nan_G=target_nan_A.view(groups, places).any(-1),
        )
        return choice, result

    def go_on(self, plan: RoundPlan, scored: Scored, drafted: Drafted, choice: Choice) -> tuple[Tensor, Tensor, Tensor]:
        """The chosen candidates become the particles.

        Returns the tokens they have more than their ancestors had [A, Q], how many [A], and whether they have ended [A].
        """
        state, slots_A, ancestor_A = self.state, plan.slots_A, choice.ancestor_A
        source_A, open_A, room_A = slots_A[ancestor_A], scored.open_A[ancestor_A], scored.room_A[ancestor_A]
        end_A = plan.position_A + 1 + (0 if self.lookahead else self.block)
        state.reroot(slots_A, state.table_SL[source_A], end_A)
        if self.lookahead:
            tokens_AQ = drafted.tokens_AFK[ancestor_A, choice.branch_A].long()
            growth = state.grow(plan, source_A, tokens_AQ, room_A)
            grown_AQ, grown_A = tokens_AQ, torch.where(open_A, growth.count_A, 0)
            self.logq_SQ[slots_A] = drafted.logq_AFK[ancestor_A, choice.branch_A]
            self.count_S[slots_A] = torch.where(open_A, growth.count_A, 1)
        else:
            bonus_A1 = choice.bonus_A[ancestor_A, None]
            growth = state.grow(plan, source_A, bonus_A1, room_A)
            count_A = scored.count_A[ancestor_A]
            grown_AQ = self.tokens_SQ[source_A].roll(-1, 1).scatter(1, (count_A - 1)[:, None], bonus_A1)
            grown_A = count_A - 1 + open_A.long()
            tokens_AQ = bonus_A1.expand(-1, self.queries)
            self.count_S[slots_A] = torch.ones_like(count_A)
        self.tokens_SQ[slots_A] = tokens_AQ
        state.text_S[slots_A] = growth.text_A
        ended_A = ~open_A | growth.ends_A
        state.ended_S[slots_A] = ended_A
        self._keep_dummy()
        return grown_AQ, grown_A, ended_A

    def _weigh_blocks(self, plan: RoundPlan, scored: Scored) -> tuple[Tensor, Tensor, Tensor]:
        """log-weight increment of every block [A], and whether there is a NaN of the target, or of the draft [A]."""
        logq_AQ = self.logq_SQ[plan.slots_A]
        block_A = block_log_weight(scored.logp_AQ[:, :-1], logq_AQ[:, 1:], scored.count_A - 1, plan.alpha_A)
        exists_AQ = torch.arange(self.queries, device=self.device) < scored.count_A[:, None]
        return block_A, torch.isnan(scored.logp_AQ).any(-1), (torch.isnan(logq_AQ) & exists_AQ).any(-1)

    def _select(self, plan: RoundPlan, candidates_GMF: Tensor) -> Selection:
        return self.select(candidates_GMF, plan.size_G, plan.threshold_G, list(plan.schemes), plan.uniforms_GU, plan.branch_uniforms_GM)

    def _keep_dummy(self) -> None:
        self.state.keep_dummy()
        self.count_S[self.state.dummy :].fill_(1)
        self.logw_S[self.state.dummy :].fill_(0.0)
