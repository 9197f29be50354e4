"""The draft's side of a round: K tokens for F branches of every particle, then the branches that were chosen become the particles.

A branch's tokens are stored in pages of its own. Those of branches that were not chosen serve the next round, so that a particle holds
no more than its answer and F blocks. See the package's legend for axes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smc.arrays import to_device
from smc.laws import LawSpec
from smc.philox import STREAMS_PER_PARTICLE, Purpose
from smc.resident.forward import StaticForward, StaticRows
from smc.resident.plan import Choice, Drafted, Joining, RoundPlan
from smc.resident.sampling import DrawKeys, Sampling
from smc.resident.state import SlotState


class ResidentDraft:
    """One draft model with the state of `slots` particles."""

    def __init__(
        self,
        forward: StaticForward,
        sampling: Sampling,
        *,
        slots: int,
        width: int,
        block: int,
        branches: int,
        lookahead: bool,
        mixture: float,
        purpose: Purpose = Purpose.PROPOSAL,
    ) -> None:
        self.forward, self.sampling, self.mixture, self.purpose = forward, sampling, mixture, purpose
        self.block, self.branches, self.lookahead = block, branches, lookahead
        self.device = forward.model.embed.weight.device
        self.state = SlotState(slots, width, sampling.vocab, self.device)
        self.last_S2 = torch.zeros(slots + 1, 2, dtype=torch.int64, device=self.device)
        """The last two tokens; the model has run neither (lockstep) or all but the last (look-ahead)."""
        self.branch_pages_SFB = torch.zeros(slots + 1, branches, block - 1, dtype=torch.int32, device=self.device)

    def join(self, group: Joining) -> None:
        slots_N = self.state.join(group)
        self.last_S2[slots_N, 1] = to_device(group.start.first_N, self.device).long()
        first = group.start.prompt_size + 1
        self.branch_pages_SFB[slots_N, 0] = self.state.table_SL[slots_N, first : first + self.block - 1]
        self.branch_pages_SFB[slots_N, 1:] = to_device(group.spare_NFB, self.device)

    def begin(self, plan: RoundPlan) -> Drafted:
        """First token of every branch."""
        slots_A, f = plan.slots_A, self.branches
        q = 1 if self.lookahead else 2
        open_A = ~self.state.ended_S[slots_A]
        # In its first round a lockstep particle has one token to run; the one before it is the prompt's, and is there already.
        skip_A = None if self.lookahead else (plan.round_A == 1).int()
        rows = StaticRows(
            table_RL=self.state.table_SL[slots_A],
            start_R=(plan.position_A - (q - 1)).int(),
            count_R=open_A.int() * q,
            size_G=plan.size_G.int(),
            shared_G=plan.shared_G - (q - 1),
            queries=q,
            short=plan.short,
            skip_R=skip_A,
        )
        hidden_TE = self.forward(self.last_S2[slots_A, 2 - q :].flatten(), rows)
        stream_AF = plan.particle_A[:, None] * STREAMS_PER_PARTICLE + torch.arange(f, device=self.device)
        keys = DrawKeys(plan.seed_A, plan.round_A, stream_AF, plan.position_A + 1, self.purpose)
        token_AF, logq_AF = self._draw(hidden_TE[q - 1 :: q], plan.draft_law, keys)
        return Drafted.of([token_AF], [logq_AF])

    def extend(self, plan: RoundPlan, first: Drafted) -> Drafted:
        """The rest of every branch's K tokens."""
        f, slots_A = self.branches, plan.slots_A
        table_XL = self._branch_table(slots_A, plan.position_A)
        branch_X = torch.arange(f, device=self.device).repeat(len(slots_A))
        seed_X, round_X, particle_X, position_X = (
            v.repeat_interleave(f) for v in (plan.seed_A, plan.round_A, plan.particle_A, plan.position_A)
        )
        stream_X1 = (particle_X * STREAMS_PER_PARTICLE + branch_X)[:, None]
        law = plan.draft_law.take(torch.arange(len(slots_A), device=self.device).repeat_interleave(f))
        open_X, size_G = (~self.state.ended_S[slots_A]).int().repeat_interleave(f), (plan.size_G * f).int()
        # One operation for all steps: beside the kernels of a small model, a launch counts.
        position_KX = position_X + torch.arange(self.block + 1, device=self.device)[:, None]
        start_KX, tokens, logq = position_KX.int(), [first.tokens_AFK[..., 0]], [first.logq_AFK[..., 0]]
        for k in range(1, self.block):
            rows = StaticRows(table_XL, start_KX[k], open_X, size_G, plan.shared_G, queries=1, short=plan.short)
            hidden_XE = self.forward(tokens[-1].flatten(), rows)
            keys = DrawKeys(seed_X, round_X, stream_X1, position_KX[k + 1], self.purpose)
            token_X1, logq_X1 = self._draw(hidden_XE, law, keys)
            tokens.append(token_X1.view(-1, f))
            logq.append(logq_X1.view(-1, f))
        self._table_XL = table_XL
        return Drafted.of(tokens, logq)

    def follow(self, plan: RoundPlan, drafted: Drafted, choice: Choice) -> None:
        """Let the chosen branches be the particles."""
        state, slots_A, k = self.state, plan.slots_A, self.block
        ancestor_A = choice.ancestor_A
        from_A = slots_A[ancestor_A]
        open_A = ~state.ended_S[from_A]
        chosen_AK = drafted.tokens_AFK[ancestor_A, choice.branch_A].long()
        growth = state.grow(plan, from_A, chosen_AK, plan.room_A)
        ends_A, last_A2 = growth.ends_A, torch.cat((self.last_S2[from_A, 1:], chosen_AK), -1)[:, -2:]
        if not self.lookahead:
            bonus_A1 = choice.bonus_A[ancestor_A, None]
            growth = state.grow(plan, from_A, bonus_A1, plan.room_A - growth.count_A, growth.text_A)
            ends_A, last_A2 = ends_A | growth.ends_A, torch.cat((chosen_AK[:, -1:], bonus_A1), -1)
        source_X = ancestor_A * self.branches + choice.branch_A
        state.reroot(slots_A, self._table_XL[source_X], plan.position_A + k)
        self._reuse_pages(plan, source_X, plan.position_A + k + (not self.lookahead))
        state.text_S[slots_A] = growth.text_A
        state.ended_S[slots_A] = ~open_A | ends_A
        self.last_S2[slots_A] = last_A2
        state.keep_dummy()

    def _draw(self, hidden_RE: Tensor, law: LawSpec, keys: DrawKeys) -> tuple[Tensor, Tensor]:
        """Tokens and their log q, [R, D] each."""
        return self.sampling.propose(self.forward.logits(hidden_RE), law, self.mixture, keys)

    def _branch_table(self, slots_A: Tensor, position_A: Tensor) -> Tensor:
        """Tables [A * F, L] of all branches: the particle's past, then the branch's own pages."""
        table_AL, pages_AFB = self.state.table_SL[slots_A], self.branch_pages_SFB[slots_A]
        table_AFL = table_AL[:, None].repeat(1, self.branches, 1)
        column_AB = position_A[:, None] + 1 + torch.arange(self.block - 1, device=self.device)
        return table_AFL.scatter(2, column_AB[:, None].expand_as(pages_AFB), pages_AFB).flatten(0, 1)

    def _reuse_pages(self, plan: RoundPlan, source_A: Tensor, position_A: Tensor) -> None:
        """Pages for the next round's branches: the first of each particle writes where its answer goes on, the others where
        branches were dropped. At most one branch in F was taken, so there are always enough of those."""
        (groups, places), slots_A = plan.shape_GM, plan.slots_A
        f, b = self.branches, self.block - 1
        # Past the end of a table is past the longest answer: those particles have ended, and write nothing.
        column_AB = (position_A[:, None] + 1 + torch.arange(b, device=self.device)).clamp(max=self.state.table_SL.shape[1] - 1)
        first_AB = self.state.table_SL[slots_A[:, None], column_AB]
        if f > 1:
            pages_GXB = self.branch_pages_SFB[slots_A].view(groups, places * f, b)
            taken_X = (slots_A == self.state.dummy).repeat_interleave(f)
            taken_X = taken_X.scatter(0, source_A, torch.ones_like(source_A, dtype=torch.bool))
            dropped_GX = _first_false(taken_X.view(groups, -1), places * (f - 1))
            spare_GXB = pages_GXB.gather(1, dropped_GX[..., None].expand(-1, -1, b))
            self.branch_pages_SFB[slots_A, 1:] = spare_GXB.view(groups * places, f - 1, b)
        self.branch_pages_SFB[slots_A, 0] = first_AB
        self.branch_pages_SFB[self.state.dummy :].fill_(0)


def _first_false(mask_GX: Tensor, count: int) -> Tensor:
    """Indices of the first `count` entries of each row that are false, [G, count]; 0 where there are fewer."""
    groups, size = mask_GX.shape
    rank_GX = torch.where(mask_GX, size, (~mask_GX).cumsum(-1) - 1)
    index_GX = torch.arange(size, device=mask_GX.device).expand(groups, size)
    return torch.zeros(groups, size + 1, dtype=torch.int64, device=mask_GX.device).scatter(1, rank_GX, index_GX)[:, :count]
