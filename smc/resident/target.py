"""The target's side of a round: score the blocks in flight, weigh the candidates, choose. See the package's legend for axes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from smc.algorithm.selection import lockstep_candidates, lookahead_candidates, select
from smc.algorithm.weights import block_log_weight
from smc.arrays import to_device, to_host
from smc.laws import Laws, draw
from smc.philox import STREAMS_PER_PARTICLE, Purpose, exponentials, words
from smc.resident.forward import StaticForward, StaticRows
from smc.resident.plan import Choice, Drafted, Joining, RoundPlan, RoundResult
from smc.resident.state import SlotState, spread


class ResidentTarget:
    """One target model with the state of `slots` particles."""

    def __init__(self, forward: StaticForward, *, slots: int, width: int, vocab_size: int, block: int, lookahead: bool) -> None:
        self.forward, self.vocab_size = forward, vocab_size
        self.block, self.lookahead = block, lookahead
        self.queries = block if lookahead else block + 1
        self.device = forward.model.embed.weight.device
        self.state = SlotState(slots, width, vocab_size, self.device)
        self.tokens_SQ = torch.zeros(slots + 1, self.queries, dtype=torch.int64, device=self.device)
        """The block in flight; its first token is already counted in the weight."""
        self.logq_SQ = torch.zeros(slots + 1, self.queries, device=self.device)
        self.count_S = torch.ones(slots + 1, dtype=torch.int64, device=self.device)
        """Tokens of the block that exist."""
        self.logw_S = torch.zeros(slots + 1, dtype=torch.float64, device=self.device)

    def join(self, group: Joining) -> None:
        slots_N = self.state.join(group)
        self.tokens_SQ[slots_N, 0] = to_device(group.first_N, self.device).long()
        self.logq_SQ[slots_N] = 0.0
        self.count_S[slots_N] = 1
        self.logw_S[slots_N] = to_device(group.logw_N, self.device)

    @torch.inference_mode()
    def choose(self, plan: RoundPlan, drafted: Drafted) -> tuple[Choice, RoundResult]:
        """Score, weigh, choose, and let the chosen go on. `drafted` is of the block in flight (lockstep) or of the next."""
        now = _Now.of(plan, self.device)
        if not self.lookahead:
            self._complete_blocks(now, drafted)
        now.open_A, now.count_A = ~self.state.ended_S[now.slots_A], self.count_S[now.slots_A]
        logp_AQ, next_AV = self._score(plan, now)
        candidates, first_AF, bonus_A, nan_A, draft_nan_A = self._weigh(plan, now, drafted, logp_AQ, next_AV)
        chosen = select(
            # A group with NaN logits is about to end with an error; until then it must not disturb the arithmetic.
            candidates.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf),
            *(to_device(v, self.device) for v in (plan.size_G, plan.threshold_G)),
            plan.schemes,
            *(to_device(v, self.device) for v in (plan.uniforms_GU, plan.branch_uniforms_GM)),
        )
        choice = Choice((chosen.ancestor_GN + now.first_G[:, None]).flatten(), chosen.branch_GN.flatten(), bonus_A)
        grown_AQ, grown_A = self._go_on(now, drafted, choice)
        self.logw_S[now.slots_A] = chosen.logw_GN.flatten()
        result = RoundResult(
            ancestor_A=choice.ancestor_A,
            grown_AQ=grown_AQ,
            count_A=grown_A,
            ended_A=self.state.ended_S[now.slots_A],
            logw_A=chosen.logw_GN.flatten(),
            logp_AQ=logp_AQ,
            first_logp_A=torch.where(now.open_A[choice.ancestor_A], first_AF[choice.ancestor_A, choice.branch_A], torch.nan),
            log_z_G=chosen.log_z_G,
            ess_G=chosen.ess_G,
            resampled_G=chosen.resampled_G,
            collapsed_G=chosen.collapsed_G,
            draft_nan_G=now.grid(draft_nan_A).any(-1),
            target_nan_G=now.grid(nan_A).any(-1),
        )
        self._keep_dummy()
        return choice, RoundResult(**{name: to_host(value) for name, value in vars(result).items()})

    def _complete_blocks(self, now: _Now, drafted: Drafted) -> None:
        """Lockstep: the drafted tokens complete the blocks in flight, whose seeds are there."""
        slots_A, tokens_AK = now.slots_A, drafted.tokens_AFK[:, 0]
        open_A = ~self.state.ended_S[slots_A]
        grown_A, ends_A = self.state.grow(slots_A, tokens_AK, now.room_A)
        grown_A = torch.where(open_A, grown_A, 0)
        self.tokens_SQ[slots_A, 1:] = tokens_AK
        self.logq_SQ[slots_A, 1:] = drafted.logq_AFK[:, 0]
        self.count_S[slots_A] = 1 + grown_A
        self.state.ended_S[slots_A] = ~open_A | ends_A
        now.room_A = now.room_A - grown_A

    def _score(self, plan: RoundPlan, now: _Now) -> tuple[Tensor, Tensor]:
        """log p of the tokens after the first of every block, [A, Q], 0 where there is none; and the law after the block [A, V].

        The last token of an ended particle is scored, never run.
        """
        q, places = self.queries, plan.shape_GM[1]
        back = self.block - 1 if self.lookahead else 0
        fresh_A = spread(to_device(plan.round_G == 1, self.device), places)
        start_A = torch.where(fresh_A, now.position_A, now.position_A - back)
        rows = StaticRows(
            self.state.table_SL[now.slots_A],
            start_A,
            now.count_A - (~now.open_A).long(),
            places,
            to_device(plan.size_G, self.device),
            to_device(plan.shared_G["target"], self.device),
            q,
            int(plan.position_G.max()) + 1 + (0 if self.lookahead else self.block),
        )
        tokens_AQ = self.tokens_SQ[now.slots_A]
        logits_TV = self.forward.model.logits(self.forward(tokens_AQ.flatten(), rows))[:, : self.vocab_size]
        law = plan.target_law.take(np.repeat(np.arange(len(plan.size_G)), places * q))
        logp_AQV = Laws(law, self.device).target(logits_TV).view(-1, q, self.vocab_size)
        labelled_AQ = torch.arange(1, q + 1, device=self.device) < now.count_A[:, None]
        logp_AQ = logp_AQV.gather(-1, tokens_AQ.roll(-1, 1)[..., None]).squeeze(-1)
        last_A = torch.where(fresh_A & self.lookahead, 0, q - 1)
        return torch.where(labelled_AQ, logp_AQ, 0.0), logp_AQV[torch.arange(len(last_A), device=self.device), last_A]

    def _weigh(
        self, plan: RoundPlan, now: _Now, drafted: Drafted, logp_AQ: Tensor, next_AV: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Candidates [G, M, F], log p of what follows [A, F], bonus tokens [A], NaN of the target [A] and of the draft [A]."""
        slots_A, open_A = now.slots_A, now.open_A
        alpha_A = spread(to_device(plan.alpha_G, self.device), plan.shape_GM[1])
        logq_AQ = self.logq_SQ[slots_A]
        block_A = block_log_weight(logp_AQ[:, :-1], logq_AQ[:, 1:], now.count_A - 1, alpha_A)
        nan_A = torch.isnan(logp_AQ).any(-1)
        exists_AQ = torch.arange(self.queries, device=self.device) < now.count_A[:, None]
        draft_nan_A = (torch.isnan(logq_AQ) & exists_AQ).any(-1)
        history = now.grid(self.logw_S[slots_A]), now.grid(block_A)
        if self.lookahead:
            first_AF, logq_AF = next_AV.gather(-1, drafted.tokens_AFK[..., 0]), drafted.logq_AFK[..., 0]
            next_AF = torch.where(open_A[:, None], alpha_A[:, None] * first_AF - logq_AF, 0.0)
            candidates = lookahead_candidates(*history, now.grid(next_AF), now.grid(open_A))
            nan_A = nan_A | open_A & torch.isnan(first_AF).any(-1)
            return candidates, first_AF, torch.zeros_like(slots_A), nan_A, draft_nan_A | open_A & torch.isnan(logq_AF).any(-1)
        bonus_A, bonus_logp_A, log_z_A = self._bonus(plan, next_AV)
        candidates = lockstep_candidates(*history, now.grid(torch.where(open_A, log_z_A, 0.0)))
        return candidates, bonus_logp_A[:, None], bonus_A, nan_A | open_A & torch.isnan(log_z_A), draft_nan_A

    def _bonus(self, plan: RoundPlan, next_AV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Token drawn from the law after the block, its log p, and log Z of the law it was drawn from, [A] each."""
        groups, places = plan.shape_GM
        powered_AV, log_z_A = Laws(plan.target_law.take(np.repeat(np.arange(groups), places)), self.device).powered(next_AV)
        seed_A, round_A, position_A = (np.repeat(v, places) for v in (plan.seed_G, plan.round_G, plan.position_G))
        stream_A = np.tile(np.arange(places), groups) * STREAMS_PER_PARTICLE
        word0, word1, _, _ = words(seed_A, round_A, stream_A, position_A + self.block + 1, Purpose.TARGET)
        noise_A1V = exponentials(to_device(word0, self.device), to_device(word1, self.device), self.vocab_size)[:, None]
        bonus_A1 = draw(powered_AV, noise_A1V)
        # The likeliest token's log-probability is finite for any law, so it carries NaN logits and nothing else.
        nan_A = powered_AV.amax(-1) * 0.0
        return bonus_A1[:, 0], next_AV.gather(-1, bonus_A1)[:, 0], nan_A if log_z_A is None else log_z_A + nan_A

    def _go_on(self, now: _Now, drafted: Drafted, choice: Choice) -> tuple[Tensor, Tensor]:
        """The chosen candidates become the particles. Returns the tokens they grew by after their ancestors' [A, Q], and how many [A]."""
        state, slots_A, ancestor_A = self.state, now.slots_A, choice.ancestor_A
        open_A, room_A = now.open_A[ancestor_A], now.room_A[ancestor_A]
        state.reroot(slots_A, state.table_SL[slots_A[ancestor_A]], now.position_A + 1 + (0 if self.lookahead else self.block))
        if self.lookahead:
            tokens_AQ = drafted.tokens_AFK[ancestor_A, choice.branch_A]
            count_A, ends_A = state.grow(slots_A, tokens_AQ, room_A)
            grown_AQ, grown_A = tokens_AQ, torch.where(open_A, count_A, 0)
            self.logq_SQ[slots_A] = drafted.logq_AFK[ancestor_A, choice.branch_A]
            self.count_S[slots_A] = torch.where(open_A, count_A, 1)
        else:
            bonus_A1 = choice.bonus_A[ancestor_A, None]
            _, ends_A = state.grow(slots_A, bonus_A1, room_A)
            count_A = now.count_A[ancestor_A]
            grown_AQ = self.tokens_SQ[slots_A[ancestor_A]].roll(-1, 1).scatter(1, (count_A - 1)[:, None], bonus_A1)
            grown_A = count_A - 1 + open_A.long()
            tokens_AQ = bonus_A1.expand(-1, self.queries)
            self.count_S[slots_A] = 1
        self.tokens_SQ[slots_A] = tokens_AQ
        state.ended_S[slots_A] = ~open_A | ends_A
        return grown_AQ, grown_A

    def _keep_dummy(self) -> None:
        self.state.ended_S[self.state.dummy] = True
        self.count_S[self.state.dummy] = 1
        self.logw_S[self.state.dummy] = 0.0


@dataclass
class _Now:
    """What one round works on, by place."""

    slots_A: Tensor
    position_A: Tensor
    """Of the last answer token of open particles."""
    room_A: Tensor
    first_G: Tensor
    """First place of each group."""
    open_A: Tensor | None = None
    """The particle goes on after its block."""
    count_A: Tensor | None = None

    @staticmethod
    def of(plan: RoundPlan, device: torch.device) -> _Now:
        groups, places = plan.shape_GM
        position_A, room_A = (spread(to_device(v, device), places) for v in (plan.position_G, plan.room_G))
        return _Now(to_device(plan.slots_GM, device).long().flatten(), position_A, room_A, torch.arange(groups, device=device) * places)

    def grid(self, values_A: Tensor) -> Tensor:
        """[A, ...] -> [G, M, ...]."""
        return values_A.unflatten(0, (len(self.first_G), -1))
