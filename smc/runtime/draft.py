"""What a model drafts in a round: rows of K tokens for every group; then the chosen ones become the particles.

Rows grow step by step: each of a round's X = F A rows takes the place that a row of the step before continues with one more token. An
independent row continues itself; those of other groups (`smc.algorithm.expansion`) are re-parented, which permutes the names of pages and
moves no key: every row has a page of its own for each step, which the plan names. See the package's legend for axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from smc.algorithm.expansion import Expansion, Kind, Offers
from smc.laws import LawSpec
from smc.philox import STREAMS_PER_PARTICLE, Purpose
from smc.runtime.forward import Rows, StaticForward
from smc.runtime.outcome import Choice, Drafted, Lineage
from smc.runtime.plan import RoundPlan
from smc.runtime.sampling import DrawKeys, Sampling
from smc.runtime.state import SlotState
from smc.runtime.tables import Grow, Reroot
from smc.runtime.tree import Continuation, Tree


@dataclass(frozen=True)
class Offering:
    """What stays the same of rows that offer tokens, however they are re-parented: one a place at the first step, later F."""

    width: int
    """Rows of a place."""
    group_S: Tensor
    """int32."""
    sources: tuple[Tensor, Tensor]
    """First row and how many, [G] each."""
    rows: tuple[Tensor, Tensor]
    """The same of those that continue them."""
    rank_S1: Tensor
    """Number of the row in its group."""
    stream_SD: Tensor
    """Of independent rows: the numbers of those that continue each."""
    seed_S: Tensor
    round_S: Tensor
    seed_G: Tensor
    round_G: Tensor
    law: LawSpec


@dataclass(frozen=True)
class Drafter:
    """A model that drafts. Without a target it keeps all it drafts, with one row a particle: plain decoding."""

    forward: StaticForward
    sampling: Sampling
    state: SlotState
    grow: Grow
    reroot: Reroot
    expand: Callable[..., Expansion]
    adopt: Callable[..., Tree]
    block: int
    """K."""
    branches: int
    """F."""
    mixture: float
    """Share of the untruncated law in the proposal."""
    purpose: Purpose = Purpose.PROPOSAL
    by_round: bool = True
    """Random numbers are keyed by the round, too; else by the position alone."""

    def draft(self, plan: RoundPlan, law: LawSpec) -> tuple[Drafted, Tree]:
        """Run the pending tokens of every particle, then extend rows by K tokens."""
        hidden_SE, tree = self._begin(plan)
        offering = self._offering(plan, law, 1)
        for step in range(self.block):
            if step:
                hidden_SE = self._run(plan, offering, tree)
            tree = self._extend(plan, offering, hidden_SE, tree, step)
            if not step:
                offering = self._offering(plan, law, self.branches)
        share_X = tree.mass_X - self.state.logw_S[plan.slot_A[tree.root_X]]
        if Kind.INDEPENDENT in plan.kinds:
            share_X = torch.where(self._is_tree(plan), share_X, self._of_branches(plan, tree))
        drafted = Drafted.of(tree.tokens_XK, tree.logq_XK, tree.root_X, tree.count_X, tree.ended_X, share_X)
        return drafted, tree

    def follow(self, plan: RoundPlan, tree: Tree, choice: Choice) -> Lineage:
        """Let the chosen rows be the particles."""
        state, slot_A, row_A = self.state, plan.slot_A, choice.row_A
        ancestor_A, taken_A, cut_A = choice.ancestor_A, choice.count_A, choice.cut_A
        source_A = slot_A[ancestor_A]
        end_A, pending_A = state.end_S[source_A], state.pending_S[source_A]
        # One that had ended goes on where its end is taken back.
        open_A = ~state.ended_S[source_A] | (cut_A > 0)
        has_bonus_A = choice.bonus_A >= 0
        tail_AB = tree.tail_XB[row_A]
        path_AW = torch.cat((plan.begin_pages_AP[ancestor_A], tail_AB), 1)
        self.reroot(state.table_SL, slot_A, source_A, state.base_S[slot_A], end_A, tail_AB, plan.columns)
        # The last token of a whole row has not been run, and one that ends an answer never is.
        whole_A = taken_A == self.block
        run_A = taken_A - (whole_A | (choice.ended_A & ~has_bonus_A & (taken_A > 0))).long()
        bonus_A = choice.bonus_A.clamp(min=0)
        tokens_A2 = torch.stack((torch.where(whole_A, tree.tokens_XK[row_A, -1], bonus_A), bonus_A), 1)
        left_A = torch.where(choice.ended_A, 1, whole_A.long() + has_bonus_A.long())
        text_A = torch.where(whole_A, tree.before_X[row_A], choice.text_A)
        new_end_A = end_A - cut_A + taken_A + has_bonus_A.long()
        kept_A = torch.where(open_A, (pending_A - cut_A).clamp(min=0) + run_A, 0)
        dropped_A = torch.where(open_A, (cut_A - pending_A).clamp(min=0), 0)
        lineage = self._lineage(plan, path_AW, pending_A, kept_A, dropped_A)
        state.advance(slot_A, choice, new_end_A, tokens_A2[:, : state.pending_SQ.shape[1]], left_A.clamp(min=1), text_A)
        return lineage

    def _begin(self, plan: RoundPlan) -> tuple[Tensor, Tree]:
        """Hidden states [A, E] after the particles' last tokens, and the particles as rows."""
        state, slot_A = self.state, plan.slot_A
        queries = plan.begin_pages_AP.shape[1]
        pending_A, ended_A, alive_A = state.pending_S[slot_A], state.ended_S[slot_A], state.alive_S[slot_A]
        rows = state.pending_rows(plan, plan.begin_pages_AP, torch.where(ended_A, 0, pending_A))
        tokens_AP = state.pending_SQ[slot_A, :queries]
        hidden_TE = self.forward(tokens_AP.flatten(), rows)
        place_A = torch.arange(len(slot_A), device=state.device)
        if queries > 1:
            hidden_TE = hidden_TE[place_A * queries + pending_A - 1]
        # What is pending has been found not to end the answer.
        text_A = self.grow(state.stops, state.entry_S[slot_A], state.text_S[slot_A], tokens_AP, pending_A).text_A
        zero_A = torch.zeros_like(place_A)
        tokens_AK = zero_A[:, None].expand(-1, self.block)
        return hidden_TE, Tree(
            root_X=place_A,
            tokens_XK=tokens_AK,
            logq_XK=tokens_AK.float(),
            tail_XB=plan.branch_pages_XB[:: self.branches],
            count_X=zero_A,
            alive_X=alive_A,
            ended_X=ended_A,
            before_X=text_A,
            text_X=text_A,
            mass_X=state.logw_S[slot_A],
            last_X=zero_A,
            next_X=state.end_S[slot_A],
            run_4X=torch.stack((slot_A, zero_A, zero_A, zero_A)).int(),
        )

    def _run(self, plan: RoundPlan, offering: Offering, tree: Tree) -> Tensor:
        """Hidden states [X, E] after the rows' last tokens."""
        slot_X, begin_X, last_X, runs_X = tree.run_4X
        rows = Rows(
            table_SL=self.state.table_SL,
            slot_R=slot_X,
            tail_RB=tree.tail_XB,
            tail_R=begin_X,
            start_R=last_X,
            count_R=runs_X,
            group_R=offering.group_S,
            first_G=offering.rows[0],
            size_G=offering.rows[1],
            shared_G=plan.shared_G,
            queries=1,
            short=plan.short,
        )
        return self.forward(tree.last_X, rows)

    def _offering(self, plan: RoundPlan, law: LawSpec, width: int) -> Offering:
        place_S, f = plan.place_of_rows(width), self.branches
        group_S = plan.group_A[place_S]
        rank_S = torch.arange(len(place_S), device=place_S.device) - plan.first_G[group_S] * width
        stream_AF = plan.particle_A[:, None] * STREAMS_PER_PARTICLE + torch.arange(self.branches, device=place_S.device)
        round_S = plan.round_A[place_S]
        return Offering(
            width=width,
            group_S=group_S.int(),
            sources=(plan.first_G * width, plan.size_G * width),
            rows=(plan.first_G * f, plan.size_G * f),
            rank_S1=rank_S[:, None],
            stream_SD=stream_AF.view(len(place_S), -1),
            seed_S=plan.seed_A[place_S],
            round_S=round_S if self.by_round else torch.zeros_like(round_S),
            seed_G=plan.seed_G,
            round_G=plan.round_G,
            law=law.take(place_S),
        )

    def _extend(self, plan: RoundPlan, offering: Offering, hidden_SE: Tensor, tree: Tree, step: int) -> Tree:
        """Every row continues one of those before it with a token: at the first step a particle, later a row."""
        logits_SV = self.forward.logits(hidden_SE)
        own = offers = chosen = None
        if Kind.INDEPENDENT in plan.kinds:
            keys = DrawKeys(offering.seed_S, offering.round_S, offering.stream_SD, tree.next_X, self.purpose)
            own = self.sampling.propose(logits_SV, offering.law, self.mixture, keys)
        if plan.kinds - {Kind.INDEPENDENT}:
            offers, chosen = self._expanded(plan, offering, logits_SV, tree, step)
        more = Continuation(offers, chosen, own)
        return self.adopt(tree, more, plan, self.state, self.grow, step=step, branches=self.branches)

    def _expanded(self, plan: RoundPlan, offering: Offering, logits_SV: Tensor, tree: Tree, step: int) -> tuple[Offers, Expansion]:
        """The rows of a group are chosen among all that they offer together. The best are those that are likely themselves, which nothing
        that stands for others is."""
        has_rest = plan.kinds != {Kind.BEST}
        keys = DrawKeys(offering.seed_S, offering.round_S, offering.rank_S1, tree.next_X, self.purpose)
        offers = self.sampling.offer(logits_SV, offering.law, self.mixture, keys, has_rest)
        rows, random = offering.rows, (offering.seed_G, offering.round_G, step)
        total = len(plan.slot_A) * self.branches
        given = (offers, tree.mass_X, tree.alive_X, offering.sources, rows, rows[1], plan.kind_G, random, total)
        return offers, self.expand(*given, ended_R=tree.ended_X, has_rest=has_rest)

    def _of_branches(self, plan: RoundPlan, tree: Tree) -> Tensor:
        """Share of independent rows: F of each particle, or of one that has ended one alone."""
        branch_X = torch.arange(len(tree.root_X), device=tree.root_X.device) % self.branches
        alone_X = torch.where(branch_X == 0, 0.0, -torch.inf).double()
        return torch.where(self.state.ended_S[plan.slot_A[tree.root_X]], alone_X, -math.log(self.branches))

    def _is_tree(self, plan: RoundPlan) -> Tensor:
        return ~plan.places_of(Kind.INDEPENDENT).repeat_interleave(self.branches)

    def _lineage(self, plan: RoundPlan, path_AW: Tensor, pending_A: Tensor, kept_A: Tensor, dropped_A: Tensor) -> Lineage:
        """A particle's pending tokens, of which there may be fewer than places for them, then its row's."""
        queries = plan.begin_pages_AP.shape[1]
        if queries > 1:
            column_W = torch.arange(path_AW.shape[1], device=path_AW.device)
            skipped_A1 = (queries - pending_A)[:, None]
            shifted_AW = torch.where(column_W < pending_A[:, None], column_W, column_W + skipped_A1)
            path_AW = path_AW.gather(1, shifted_AW.clamp(max=path_AW.shape[1] - 1))
        return Lineage(path_AW, kept_A.int(), dropped_A.int())
