"""The draft's side of a round: K tokens for F branches of every particle, then the branches that were chosen become the particles.

A branch's tokens are stored in pages of its own. Those of branches that were not chosen serve the next round, so that a particle holds
no more than its answer and F blocks. See the package's legend for axes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from smc.arrays import to_device
from smc.laws import Laws, draw
from smc.philox import STREAMS_PER_PARTICLE, Purpose, exponentials, words
from smc.resident.forward import StaticForward, StaticRows
from smc.resident.plan import Choice, Drafted, Joining, RoundPlan
from smc.resident.state import SlotState, spread


class ResidentDraft:
    """One draft model with the state of `slots` particles."""

    def __init__(
        self, forward: StaticForward, *, slots: int, width: int, vocab_size: int, block: int, branches: int, lookahead: bool, mixture: float
    ) -> None:
        self.forward, self.vocab_size, self.mixture = forward, vocab_size, mixture
        self.block, self.branches, self.lookahead = block, branches, lookahead
        self.device = forward.model.embed.weight.device
        self.state = SlotState(slots, width, vocab_size, self.device)
        self.last_S2 = torch.zeros(slots + 1, 2, dtype=torch.int64, device=self.device)
        """The last two tokens; the model has run neither (lockstep) or all but the last (look-ahead)."""
        self.branch_pages_SFB = torch.zeros(slots + 1, branches, block - 1, dtype=torch.int32, device=self.device)

    def join(self, group: Joining) -> None:
        slots_N = self.state.join(group)
        self.last_S2[slots_N, 1] = to_device(group.first_N, self.device).long()
        first = group.prompt_size + 1
        self.branch_pages_SFB[slots_N, 0] = self.state.table_SL[slots_N, first : first + self.block - 1]
        self.branch_pages_SFB[slots_N, 1:] = to_device(group.spare_NFB, self.device)

    @torch.inference_mode()
    def draft(self, plan: RoundPlan) -> Drafted:
        """Extend every particle."""
        state, (groups, places), f = self.state, plan.shape_GM, self.branches
        slots_A = to_device(plan.slots_GM, self.device).long().flatten()
        position_A = spread(to_device(plan.position_G, self.device), places)
        open_A = ~state.ended_S[slots_A]
        end = int(plan.position_G.max()) + self.block
        size_G, shared_G = to_device(plan.size_G, self.device), to_device(plan.shared_G["draft"], self.device)
        q = 1 if self.lookahead else 2
        word_KAF = self._words(plan)
        laws = Laws(plan.draft_law.take(np.repeat(np.arange(groups), places)), self.device)
        # In its first round a lockstep particle has one token to run; the one before it is the prompt's, and is there already.
        skip_A = None if self.lookahead else spread(to_device(plan.round_G == 1, self.device).long(), places)
        table_AL, count_A = state.table_SL[slots_A], torch.where(open_A, q, 0)
        first = StaticRows(table_AL, position_A - (q - 1), count_A, places, size_G, shared_G, q, end, skip_A)
        hidden_TE = self.forward(self.last_S2[slots_A, 2 - q :].flatten(), first)
        tokens_AF, logq_AF = self._draw(hidden_TE[q - 1 :: q], laws, word_KAF, 0)
        tokens, logq = [tokens_AF], [logq_AF]
        laws = Laws(plan.draft_law.take(np.repeat(np.arange(groups), places * f)), self.device)
        table_XL = self._branch_table(slots_A, position_A)
        open_X, position_X = open_A.repeat_interleave(f), position_A.repeat_interleave(f)
        for k in range(1, self.block):
            rows = StaticRows(table_XL, position_X + k, open_X.long(), places * f, size_G * f, shared_G, 1, end)
            hidden_XE = self.forward(tokens[-1].flatten(), rows)
            token_X1, logq_X1 = self._draw(hidden_XE, laws, [w.view(self.block, -1, 1) for w in word_KAF], k)
            tokens.append(token_X1.view(-1, f))
            logq.append(logq_X1.view(-1, f))
        self._round = (slots_A, position_A, open_A, table_XL)
        return Drafted(torch.stack(tokens, -1), torch.stack(logq, -1))

    @torch.inference_mode()
    def follow(self, plan: RoundPlan, drafted: Drafted, choice: Choice) -> None:
        """Let the chosen branches be the particles."""
        state, (_, places), k = self.state, plan.shape_GM, self.block
        slots_A, position_A, open_A, table_XL = self._round
        room_A = spread(to_device(plan.room_G, self.device), places)
        ancestor_A, branch_A = choice.ancestor_A, choice.branch_A
        chosen_AK = drafted.tokens_AFK[ancestor_A, branch_A]
        count_A, ends_A = state.grow(slots_A, chosen_AK, room_A)
        ended_A = ~open_A[ancestor_A] | ends_A
        last_A2 = chosen_AK[:, -2:] if k > 1 else torch.stack((self.last_S2[slots_A[ancestor_A], 1], chosen_AK[:, 0]), -1)
        if not self.lookahead:
            bonus_A1 = choice.bonus_A[ancestor_A, None]
            _, bonus_ends_A = state.grow(slots_A, bonus_A1, room_A - count_A)
            ended_A = ended_A | bonus_ends_A
            last_A2 = torch.cat((chosen_AK[:, -1:], bonus_A1), -1)
        source_X = ancestor_A * self.branches + branch_A
        state.reroot(slots_A, table_XL[source_X], position_A + k)
        self._reuse_pages(plan, slots_A, source_X, position_A + k + (not self.lookahead))
        state.ended_S[slots_A] = ended_A
        self.last_S2[slots_A] = last_A2
        state.ended_S[state.dummy] = True

    def _words(self, plan: RoundPlan) -> list[Tensor]:
        """Two random words for every draw, [K, A, F] each."""
        places = plan.shape_GM[1]
        seed_A, round_A, position_A = (np.repeat(v, places)[:, None] for v in (plan.seed_G, plan.round_G, plan.position_G))
        particle_A = np.tile(np.arange(places), len(plan.seed_G))[:, None]
        stream_AF = particle_A * STREAMS_PER_PARTICLE + np.arange(self.branches)
        position_KA = position_A + 1 + np.arange(self.block)[:, None, None]
        word0, word1, _, _ = words(seed_A, round_A, stream_AF, position_KA, Purpose.PROPOSAL)
        return [to_device(word0, self.device), to_device(word1, self.device)]

    def _draw(self, hidden_RE: Tensor, laws: Laws, word_KRD: list[Tensor], k: int) -> tuple[Tensor, Tensor]:
        """Tokens and their log q, [R, D] each."""
        logq_RV = laws.proposal(self.forward.model.logits(hidden_RE)[:, : self.vocab_size], self.mixture)
        token_RD = draw(logq_RV, exponentials(word_KRD[0][k], word_KRD[1][k], self.vocab_size))
        return token_RD, logq_RV.gather(-1, token_RD)

    def _branch_table(self, slots_A: Tensor, position_A: Tensor) -> Tensor:
        """Tables [A * F, L] of all branches: the particle's past, then the branch's own pages."""
        table_AL, pages_AFB = self.state.table_SL[slots_A], self.branch_pages_SFB[slots_A]
        table_AFL = table_AL[:, None].repeat(1, self.branches, 1)
        column_AFB = (position_A[:, None] + 1 + torch.arange(self.block - 1, device=self.device))[:, None].expand_as(pages_AFB)
        return table_AFL.scatter(2, column_AFB, pages_AFB).flatten(0, 1)

    def _reuse_pages(self, plan: RoundPlan, slots_A: Tensor, source_A: Tensor, position_A: Tensor) -> None:
        """Pages for the next round's branches: the first of each particle writes where its answer goes on, the others where
        branches were dropped. At most one branch in F was taken, so there are always enough of those."""
        groups, places = plan.shape_GM
        f, b = self.branches, self.block - 1
        column_AB = position_A[:, None] + 1 + torch.arange(b, device=self.device)
        first_AB = self.state.table_SL[slots_A[:, None], column_AB]
        if f > 1:
            pages_GXB = self.branch_pages_SFB[slots_A].view(groups, places * f, b)
            real_GM = torch.arange(places, device=self.device) < to_device(plan.size_G, self.device)[:, None]
            taken_A = (~real_GM).flatten().repeat_interleave(f)
            taken_A[source_A] = True
            dropped_GX = torch.argsort(taken_A.view(groups, -1).int(), dim=-1, stable=True)[:, : places * (f - 1)]
            spare_AFB = pages_GXB.gather(1, dropped_GX[..., None].expand(-1, -1, b)).view(groups * places, f - 1, b)
            self.branch_pages_SFB[slots_A, 1:] = spare_AFB
        self.branch_pages_SFB[slots_A, 0] = first_AB
        self.branch_pages_SFB[self.state.dummy] = 0
