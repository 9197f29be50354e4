"""What a model drafts in a round: rows of K tokens for every group; then the chosen ones become the particles.

Rows grow step by step: each of a round's X = F A rows takes the place that a row of the step before continues with one more token. An
independent row continues itself; those of other groups (`smc.algorithm.expansion`) are re-parented, which permutes the names of pages and
moves no key: every row has a page of its own for each step, which the plan names. See the package's legend for axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from smc.algorithm.expansion import Expansion, Kind, Offers
from smc.executor.biases import AddBiases, BiasTables
from smc.executor.chains import Deal, Drawn, deal
from smc.executor.draft_head import HeadSampling
from smc.executor.draft_steps import Offering, Shape, Steps
from smc.executor.forward import Rows
from smc.executor.guidance import Pass
from smc.executor.outcome import Choice, Drafted, Lineage
from smc.executor.plan import RoundPlan
from smc.executor.sampling import DrawKeys, Sampling
from smc.executor.state import SlotState
from smc.executor.tree import Continuation, Tree
from smc.laws import LawSpec
from smc.philox import Purpose


@dataclass(frozen=True)
class Drafter:
    """A model that drafts. Without a target it keeps all it drafts, with one row a particle: plain decoding."""

    run: Pass
    sampling: Sampling | HeadSampling
    """Over its logits."""
    state: SlotState
    expand: Callable[..., Expansion]
    adopt: Callable[..., Tree]
    add_biases: AddBiases
    biases: BiasTables
    """Of these logits."""
    steps: Steps
    shape: Shape
    mixture: float
    """Share of the untruncated law in the proposal."""
    purpose: Purpose = Purpose.PROPOSAL
    laws_YLV: Tensor | None = None
    """Room for the log-laws that tokens of chains are drawn from: L = K, or where the first is a guess K - 1. None: it has none."""

    def draft(self, plan: RoundPlan[Tensor], law: LawSpec[Tensor]) -> tuple[Drafted, Tree]:
        """Run the pending tokens of every particle, then extend rows by K tokens. The laws of chains are written to the room for them."""
        begun = self.steps.begin(self.state, plan, law, self.shape)
        self.run.begin(plan, plan.begin_pages_AP, plan.branch_pages_XB.view(len(plan.slot_A), -1))
        logits_SV = self.run(plan, begun.tokens_AP.flatten(), begun.rows, begun.last_A if begun.rows.queries > 1 else None)
        dealt = deal(plan, begun.tree.alive_X) if Kind.CHAINS in plan.kinds else None
        tree = self._extend(plan, begun.first, logits_SV, begun.tree, 0, dealt)
        for step in range(1, self.shape.block):
            logits_SV = self._run(plan, begun.later, tree)
            tree = self._extend(plan, begun.later, logits_SV, tree, step, dealt)
        return self.steps.pack(self.state, plan, tree), tree

    def follow(self, plan: RoundPlan[Tensor], tree: Tree, choice: Choice) -> Lineage[Tensor]:
        """Let the chosen rows be the particles."""
        self.run.follow(plan, choice.ancestor_A, tree.tail_XB, choice.row_A, pending=True)
        next_ = self.steps.resume(self.state, plan, tree, choice, self.shape.block)
        self.state.advance(plan.slot_A, choice, next_.end_A, next_.tokens_AW, next_.pending_A, next_.text_A)
        return next_.lineage

    def _run(self, plan: RoundPlan[Tensor], offering: Offering, tree: Tree) -> Tensor:
        """Logits [X, V] after the rows' last tokens."""
        assert tree.run_4X is not None, "rows, of which the last token alone is run"
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
            contexts=plan.contexts,
        )
        return self.run(plan, tree.last_X, rows, root_R=tree.root_X)

    def _extend(self, plan: RoundPlan[Tensor], offering: Offering, logits_SV: Tensor, tree: Tree, step: int, dealt: Deal | None) -> Tree:
        """Every row continues one of those before it with a token: at the first step a particle, later a row."""
        if plan.biased:
            slot_S = plan.slot_A if tree.run_4X is None else tree.run_4X[0]
            logits_SV = self.add_biases(self.biases, self.state.lives, logits_SV.float(), slot_S, tree.next_X, plan.biased)
        own = chosen = chains = None
        if Kind.INDEPENDENT in plan.kinds:
            keys = DrawKeys(offering.seed_S, offering.round_S, offering.stream_SD, tree.next_X, self.purpose)
            own = self.sampling.propose(logits_SV, offering.law, self.mixture, keys)
        if plan.kinds - {Kind.INDEPENDENT, Kind.CHAINS}:
            chosen = self._expanded(plan, offering, logits_SV, tree, step)
        if dealt is not None:
            chains = self._drawn(plan, offering, logits_SV, tree, step, dealt)
        more = Continuation(chosen, own, chains)
        return self.adopt(tree, more, plan, self.state, step=step, branches=plan.branches)

    def _drawn(self, plan: RoundPlan[Tensor], offering: Offering, logits_SV: Tensor, tree: Tree, step: int, dealt: Deal) -> Drawn:
        """Chains draw their next tokens, or guess."""
        begins, branches = step == 0, plan.branches
        at_Y = dealt.source_Y if begins else dealt.row_Y
        logits_YV = logits_SV[at_Y]
        if begins and self.shape.guesses:
            token_Y = self.sampling.likeliest(logits_YV, branches).gather(1, dealt.guess_Y[:, None])[:, 0]
            logq_Y = torch.zeros_like(token_Y, dtype=torch.float32)
        else:
            seed_Y, rank_Y1 = offering.seed_S[at_Y], dealt.rank_Y[:, None]
            keys = DrawKeys(seed_Y, torch.zeros_like(seed_Y), rank_Y1, tree.next_X[at_Y], self.purpose)
            assert self.laws_YLV is not None
            law_YV = self.laws_YLV[: len(at_Y), step - self.shape.guesses]
            token_Y, logq_Y = self.sampling.propose_by(logits_YV, offering.law.take(at_Y), keys, law_YV)
        row_X = torch.arange(len(plan.slot_A) * branches, device=at_Y.device)
        none_X = torch.zeros_like(row_X)
        parent_X = row_X // branches if begins else row_X
        return Drawn(
            parent_X=dealt.spread(at_Y, parent_X),
            token_X=dealt.spread(token_Y, none_X),
            logq_X=dealt.spread(logq_Y, none_X.float()),
        )

    def _expanded(self, plan: RoundPlan[Tensor], offering: Offering, logits_SV: Tensor, tree: Tree, step: int) -> tuple[Expansion, Offers]:
        """The rows of a group are chosen among all that they offer together. The best are those that are likely themselves, which nothing
        that stands for others is."""
        has_rest = Kind.DISTINCT in plan.kinds
        keys = DrawKeys(offering.seed_S, offering.round_S, offering.rank_S1, tree.next_X, self.purpose)
        offers = self.sampling.offer(logits_SV, offering.law, self.mixture, keys, has_rest)
        rows, random = offering.rows, (offering.seed_G, offering.round_G, step)
        total = len(plan.branch_pages_XB)
        given = (offers, tree.mass_X, tree.alive_X, offering.sources, rows, rows[1], plan.kind_G, random, total)
        return self.expand(*given, ended_R=tree.ended_X, has_rest=has_rest), offers
