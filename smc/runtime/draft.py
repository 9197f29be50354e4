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

from smc.algorithm.expansion import Expansion, Kind
from smc.laws import LawSpec
from smc.philox import STREAMS_PER_PARTICLE, Purpose
from smc.runtime.forward import Rows, StaticForward
from smc.runtime.outcome import Choice, Drafted, Lineage
from smc.runtime.plan import RoundPlan
from smc.runtime.sampling import DrawKeys, Sampling
from smc.runtime.state import SlotState
from smc.runtime.tables import Grow, Reroot


@dataclass(frozen=True)
class Tree:
    """Rows in the making, or the particles that they continue."""

    root_X: Tensor
    """int64 place whose particle a row continues."""
    tokens_XK: Tensor
    """int64; of these the first steps' exist."""
    logq_XK: Tensor
    tail_XB: Tensor
    """Pages of the tokens, all but the last."""
    count_X: Tensor
    """Tokens that exist."""
    alive_X: Tensor
    ended_X: Tensor
    """The sequence has ended; it takes no further token."""
    before_X: Tensor
    """State of the stop machine before the last token."""
    text_X: Tensor
    """State after it."""
    mass_X: Tensor
    """float64 log mass."""


@dataclass(frozen=True)
class Offering:
    """What stays the same of rows that offer tokens, however they are re-parented: one a place at the first step, later F."""

    width: int
    """Rows of a place."""
    group_S: Tensor
    rank_S: Tensor
    """Number of the row in its group."""
    stream_SD: Tensor
    """Of independent rows: the numbers of those that continue each."""
    seed_S: Tensor
    round_S: Tensor
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
                hidden_SE = self._run(plan, tree, step)
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
        )

    def _run(self, plan: RoundPlan, tree: Tree, step: int) -> Tensor:
        """Hidden states [X, E] after the rows' last tokens."""
        state, f = self.state, self.branches
        slot_X = plan.slot_A[tree.root_X]
        begin_X = state.end_S[slot_X].int()
        rows = Rows(
            table_SL=state.table_SL,
            slot_R=slot_X.int(),
            tail_RB=tree.tail_XB,
            tail_R=begin_X,
            start_R=begin_X + (step - 1),
            count_R=(tree.alive_X & ~tree.ended_X).int(),
            group_R=plan.group_A.repeat_interleave(f).int(),
            first_G=plan.first_G * f,
            size_G=plan.size_G * f,
            shared_G=plan.shared_G,
            queries=1,
            short=plan.short,
        )
        return self.forward(tree.tokens_XK[:, step - 1], rows)

    def _offering(self, plan: RoundPlan, law: LawSpec, width: int) -> Offering:
        place_S = plan.place_of_rows(width)
        group_S = plan.group_A[place_S]
        stream_AF = plan.particle_A[:, None] * STREAMS_PER_PARTICLE + torch.arange(self.branches, device=place_S.device)
        round_S = plan.round_A[place_S]
        return Offering(
            width=width,
            group_S=group_S,
            rank_S=torch.arange(len(place_S), device=place_S.device) - plan.first_G[group_S] * width,
            stream_SD=stream_AF.view(len(place_S), -1),
            seed_S=plan.seed_A[place_S],
            round_S=round_S if self.by_round else torch.zeros_like(round_S),
            law=law.take(place_S),
        )

    def _extend(self, plan: RoundPlan, offering: Offering, hidden_SE: Tensor, tree: Tree, step: int) -> Tree:
        """Every row continues one of those before it with a token: at the first step a particle, later a row."""
        state = self.state
        slot_S = plan.slot_A[tree.root_X]
        position_S = state.end_S[slot_S] + step
        logits_SV = self.forward.logits(hidden_SE)
        parent_X, token_X, logq_X, mass_X = self._continue(plan, offering, logits_SV, tree, position_S, step)
        slot_X, ended_X, text_X, count_X = slot_S[parent_X], tree.ended_X[parent_X], tree.text_X[parent_X], tree.count_X[parent_X]
        room_X = state.limit_S[slot_X] - state.end_S[slot_X] - count_X
        growth = self.grow(state.stops, state.entry_S[slot_X], text_X, token_X[:, None], room_X)
        column_K = torch.arange(self.block, device=state.device)
        column_B = column_K[:-1]
        at_K = column_K == step
        return Tree(
            root_X=tree.root_X[parent_X],
            tokens_XK=torch.where(at_K, token_X[:, None], tree.tokens_XK[parent_X]),
            logq_XK=torch.where(at_K, logq_X[:, None], tree.logq_XK[parent_X]),
            # Pages of the tokens so far go with them; those of later ones are this row's own.
            tail_XB=torch.where(column_B < step, tree.tail_XB[parent_X], plan.branch_pages_XB) if step else plan.branch_pages_XB,
            count_X=count_X + (~ended_X).long(),
            alive_X=tree.alive_X[parent_X] & (mass_X > -torch.inf),
            ended_X=ended_X | growth.ends_A,
            before_X=torch.where(ended_X, tree.before_X[parent_X], text_X),
            text_X=torch.where(ended_X, text_X, growth.text_A),
            mass_X=mass_X,
        )

    def _continue(
        self, plan: RoundPlan, offering: Offering, logits_SV: Tensor, tree: Tree, position_S: Tensor, step: int
    ) -> tuple[Tensor, ...]:
        """Row that every row continues [X], its token [X], its log q [X] and the row's log mass [X]."""
        own = trees = None
        if Kind.INDEPENDENT in plan.kinds:
            own = self._independent(offering, logits_SV, position_S)
        if plan.kinds - {Kind.INDEPENDENT}:
            trees = self._re_parented(plan, offering, logits_SV, tree, position_S, step)
        if own is None or trees is None:
            return own or trees
        is_tree_X = self._is_tree(plan)
        return tuple(torch.where(is_tree_X, theirs_X, own_X) for theirs_X, own_X in zip(trees, own))

    def _independent(self, offering: Offering, logits_SV: Tensor, position_S: Tensor) -> tuple[Tensor, ...]:
        """Every row draws its own token; at the first step F rows from each particle."""
        keys = DrawKeys(offering.seed_S, offering.round_S, offering.stream_SD, position_S, self.purpose)
        token_SD, logq_SD = self.sampling.propose(logits_SV, offering.law, self.mixture, keys)
        rows = torch.arange(len(logits_SV), device=logits_SV.device)
        parent_X = rows.repeat_interleave(token_SD.shape[1])
        return parent_X, token_SD.flatten().long(), logq_SD.flatten(), torch.zeros(len(parent_X), dtype=torch.float64, device=rows.device)

    def _re_parented(
        self, plan: RoundPlan, offering: Offering, logits_SV: Tensor, tree: Tree, position_S: Tensor, step: int
    ) -> tuple[Tensor, ...]:
        """The rows of a group are chosen among all that they offer together."""
        group_S, there_S = offering.group_S, tree.alive_X
        keys = DrawKeys(offering.seed_S, offering.round_S, offering.rank_S[:, None], position_S, self.purpose)
        # The best are those that are likely themselves.
        is_best_S = plan.places_of(Kind.BEST).repeat_interleave(offering.width)
        offers = self.sampling.offer(logits_SV, offering.law, self.mixture, keys).without_rest(is_best_S).unless(tree.ended_X)
        sources, rows = ((plan.first_G * width, plan.size_G * width) for width in (offering.width, self.branches))
        random = (plan.seed_G, plan.round_G, step)
        total = len(plan.slot_A) * self.branches
        chosen = self.expand(offers, tree.mass_X, there_S, sources, rows, rows[1], plan.kind_G, random, total)
        token_X, logq_X = (values_SC[chosen.parent_X, chosen.offer_X] for values_SC in (offers.token_RC, offers.logq_RC))
        # A draft that returns NaN must be seen, where what it says matters.
        nan_S = there_S & torch.isnan(offers.logq_RC[:, 0])
        nan_A = plan.any_of_group(nan_S[None], group_S)[0][plan.group_A] & plan.places_of(Kind.DISTINCT)
        return chosen.parent_X, token_X, torch.where(nan_A.repeat_interleave(self.branches), torch.nan, logq_X), chosen.mass_X

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
