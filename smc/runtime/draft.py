"""What a model drafts in a round: K tokens for F branches of every particle; then the chosen branches become the particles.

A branch's tokens are stored in pages of its own, which the plan names. See the package's legend for axes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smc.laws import LawSpec
from smc.philox import STREAMS_PER_PARTICLE, Purpose
from smc.runtime.forward import Rows, StaticForward
from smc.runtime.plan import Choice, Drafted, Lineage, RoundPlan
from smc.runtime.sampling import DrawKeys, Sampling
from smc.runtime.state import SlotState
from smc.runtime.tables import Grow, Reroot


@dataclass(frozen=True)
class Drafter:
    """A model that drafts. Without a target it keeps all it drafts, with one branch: plain decoding."""

    forward: StaticForward
    sampling: Sampling
    state: SlotState
    grow: Grow
    reroot: Reroot
    block: int
    """K."""
    branches: int
    """F."""
    bonus: bool
    """The target adds a token of its own after the block (lockstep)."""
    mixture: float
    """Share of the untruncated law in the proposal."""
    purpose: Purpose = Purpose.PROPOSAL
    by_round: bool = True
    """Random numbers are keyed by the round, too; else by the position alone."""

    def begin(self, plan: RoundPlan, law: LawSpec) -> Drafted:
        """Run the pending tokens of every particle; first token of every branch."""
        state, slot_A, f = self.state, plan.slot_A, self.branches
        queries = plan.begin_pages_AP.shape[1]
        pending_A = state.pending_S[slot_A]
        rows = state.pending_rows(plan, plan.begin_pages_AP, torch.where(state.ended_S[slot_A], 0, pending_A))
        hidden_TE = self.forward(state.pending_SQ[slot_A, :queries].flatten(), rows)
        if queries > 1:
            hidden_TE = hidden_TE[torch.arange(len(slot_A), device=state.device) * queries + pending_A - 1]
        branch_F = torch.arange(f, device=state.device)
        stream_AF = plan.particle_A[:, None] * STREAMS_PER_PARTICLE + branch_F
        keys = DrawKeys(plan.seed_A, self._round(plan.round_A), stream_AF, state.end_S[slot_A], self.purpose)
        token_AF, logq_AF = self._draw(hidden_TE, law, keys)
        return Drafted.of([token_AF.flatten()], [logq_AF.flatten()])

    def extend(self, plan: RoundPlan, law: LawSpec, first: Drafted) -> Drafted:
        """The rest of every branch's K tokens."""
        state, f = self.state, self.branches
        place_X = torch.arange(len(plan.slot_A), device=state.device).repeat_interleave(f)
        branch_X = torch.arange(f, device=state.device).repeat(len(plan.slot_A))
        slot_X = plan.slot_A[place_X]
        end_X = state.end_S[slot_X]
        stream_X1 = (plan.particle_A[place_X] * STREAMS_PER_PARTICLE + branch_X)[:, None]
        seed_X, round_X = plan.seed_A[place_X], self._round(plan.round_A[place_X])
        law = law.take(place_X)
        # One operation for all steps: beside the kernels of a small model, a launch counts.
        position_KX = end_X + torch.arange(self.block, device=state.device)[:, None]
        start_KX = position_KX.int()
        group_X, slot_X = plan.group_A[place_X].int(), slot_X.int()
        open_X = (~state.ended_S[slot_X.long()]).int()
        first_G, size_G = plan.first_G * f, plan.size_G * f
        tokens, logq = [first.all_2KX[0, 0]], [first.logq_XK[:, 0]]
        for k in range(1, self.block):
            rows = Rows(
                table_SL=state.table_SL,
                slot_R=slot_X,
                tail_RB=plan.branch_pages_XB,
                tail_R=start_KX[0],
                start_R=start_KX[k - 1],
                count_R=open_X,
                group_R=group_X,
                first_G=first_G,
                size_G=size_G,
                shared_G=plan.shared_G,
                queries=1,
                short=plan.short,
            )
            hidden_XE = self.forward(tokens[-1].long(), rows)
            keys = DrawKeys(seed_X, round_X, stream_X1, position_KX[k], self.purpose)
            token_X1, logq_X1 = self._draw(hidden_XE, law, keys)
            tokens.append(token_X1[:, 0])
            logq.append(logq_X1[:, 0])
        return Drafted.of(tokens, logq)

    def follow(self, plan: RoundPlan, drafted: Drafted, choice: Choice) -> Lineage:
        """Let the chosen branches be the particles."""
        state, slot_A, k = self.state, plan.slot_A, self.block
        source_A = slot_A[choice.ancestor_A]
        open_A = ~state.ended_S[source_A] & choice.alive_A
        end_A, pending_A, text_A = state.end_S[source_A], state.pending_S[source_A], state.text_S[source_A]
        room_A = state.limit_S[slot_A] - end_A
        entry_A = state.entry_S[slot_A]
        row_A = choice.ancestor_A * self.branches + choice.branch_A
        tokens_AK = drafted.tokens_XK[row_A].long()
        growth = self.grow(state.stops, entry_A, text_A, tokens_AK, room_A)
        drafted_A = growth.count_A
        grown_A, ends_A, text_A = drafted_A, growth.ends_A, growth.text_A
        last_A2 = torch.cat((tokens_AK[:, -1:], tokens_AK[:, -1:]), 1)
        if self.bonus:
            bonus_A1 = choice.bonus_A[choice.ancestor_A, None]
            growth = self.grow(state.stops, entry_A, text_A, bonus_A1, room_A - grown_A)
            last_A2[:, 1:] = bonus_A1
            grown_A, ends_A, text_A = grown_A + (~ends_A).long(), ends_A | growth.ends_A, growth.text_A
        pages_AB = plan.branch_pages_XB[row_A]
        path_AW = torch.cat((plan.begin_pages_AP[choice.ancestor_A], pages_AB), 1)
        self.reroot(state.table_SL, slot_A, source_A, state.base_S[slot_A], end_A, pages_AB, plan.columns)
        # A particle that has ended runs nothing any more.
        new_end_A = torch.where(open_A, end_A + grown_A, end_A)
        state.advance(slot_A, new_end_A, ~open_A | ends_A, torch.where(open_A, text_A, state.text_S[source_A]))
        state.set_pending(slot_A, last_A2[:, -state.pending_SQ.shape[1] :], torch.full_like(end_A, 1 + self.bonus))
        state.keep_dummy()
        run_A = pending_A + drafted_A.clamp(max=k - 1)
        return self._lineage(plan, path_AW, pending_A, torch.where(open_A, run_A, 0))

    def _lineage(self, plan: RoundPlan, path_AW: Tensor, pending_A: Tensor, kept_A: Tensor) -> Lineage:
        """A particle's pending tokens, of which there may be fewer than places for them, then its branch's."""
        queries = plan.begin_pages_AP.shape[1]
        if queries > 1:
            column_W = torch.arange(path_AW.shape[1], device=path_AW.device)
            skipped_A1 = (queries - pending_A)[:, None]
            shifted_AW = torch.where(column_W < pending_A[:, None], column_W, column_W + skipped_A1)
            path_AW = path_AW.gather(1, shifted_AW.clamp(max=path_AW.shape[1] - 1))
        return Lineage(path_AW, kept_A.int())

    def _round(self, round_A: Tensor) -> Tensor:
        return round_A if self.by_round else torch.zeros_like(round_A)

    def _draw(self, hidden_RE: Tensor, law: LawSpec, keys: DrawKeys) -> tuple[Tensor, Tensor]:
        """Tokens and their log q, [R, D] each."""
        return self.sampling.propose(self.forward.logits(hidden_RE), law, self.mixture, keys)
