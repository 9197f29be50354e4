"""Stages of a round that run a model or sample from its logits: `DraftStage`, `VerifyStage` and `SelectStage`. Their
other operations are in `smc.executor.draft`, `verify`, `select` and `remap`, in torch or in Triton
(`RoundOps`).

Local axes: P chains, Y rows of chains."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from smc.algorithm.coupling import Coupling
from smc.algorithm.expansion import SelectedTrees, SourceRows
from smc.algorithm.resampling import Bounds, Spans
from smc.algorithm.selection import Selection
from smc.arrays import PackedFields, to_device
from smc.distributions import DistributionSpec
from smc.executor.draft import assign_chains
from smc.executor.guidance import GuidedPass, PassLogits
from smc.executor.masks import given_constraint
from smc.executor.ops import RoundOps
from smc.executor.redraft import RedraftStart, known_step, plan_again, selected_again, with_slots_of
from smc.executor.sampling import HeadSampling, Sampling
from smc.executor.select import LEAST_SHARE, target_outputs
from smc.executor.verify import chain_groups
from smc.philox import DrawKeys, Purpose
from smc.round.plan import RoundPlan, SequenceHandoff
from smc.round.slot_state import BiasTables, InnerNodes, SlotState
from smc.round.tensors import (
    AppliedSelection,
    CandidateLayout,
    ChainAssignment,
    ChainDraws,
    ChosenTokens,
    Continuation,
    DraftedRows,
    DraftInputs,
    DraftReport,
    DraftShape,
    DraftStep,
    GrownRows,
    ObservedDraws,
    OwnDraws,
    RoundResult,
    RoundSelection,
    Rows,
    ScoredRows,
    ScoreInputs,
    TargetDraws,
    TokenTree,
    VerifyInputs,
    VerifyOutputs,
)
from smc.types import SEPARATE, Decoding


class GrownStep(NamedTuple):
    """Rows after a step of the draft."""

    tree: TokenTree
    kept: DraftStep | None
    """The step as one of a draft tree. None: the step chose nothing."""
    raw_logp_X: Tensor | None = None
    """As `GrownRows.raw_logp_XK`, of this step's tokens."""


@dataclass(frozen=True)
class DraftStage:
    """A model that drafts. Without a target it keeps everything that it drafts, one row for each particle: plain
    decoding."""

    run: GuidedPass
    sampling: Sampling | HeadSampling
    """Sampling from its logits."""
    state: SlotState
    ops: RoundOps
    biases: BiasTables
    """Biases of these logits."""
    shape: DraftShape
    mixture: float
    """Share of the untruncated distribution in the proposal."""
    nan: Tensor
    """float32 [1] NaN, for reports without seen draws; allocated once, which saves a launch."""
    purpose: Purpose = Purpose.PROPOSAL
    kept_RV: Tensor | None = None
    """Buffer for log q after the first R roots of exact decoding, with which the target's draws are compared. None: the
    drafter has no target."""
    nodes: InnerNodes | None = None
    """Inner nodes of the blocks in flight, at which rows ahead may begin. None: there are no rows ahead."""
    dists_YKV: Tensor | None = None
    """Buffer for the log-distributions that the tokens of chains are drawn from: K of a row, or K - 1 if the
    first token is a guess. None: the drafter has no chains."""

    def draft(
        self, plan: RoundPlan[Tensor], distribution: DistributionSpec[Tensor]
    ) -> tuple[PackedFields[DraftedRows], GrownRows]:
        """Run the pending tokens of every particle, then extend rows by K tokens or by the plan's `steps`. The
        distributions of chains are written to `dists_YKV`."""
        inputs = self.begin(plan, distribution)
        first = self.extend(plan, inputs, self.run_pending(plan, inputs), 0)
        return self.finish(plan, inputs, (first,))

    def begin(self, plan: RoundPlan[Tensor], distribution: DistributionSpec[Tensor]) -> DraftInputs:
        """Lay out the particles and their chains, before the first step."""
        inputs = self.ops.begin_draft(self.state, plan, distribution, self.shape)
        self.run.begin(plan, plan.arrays.begin_pages_AQ, plan.arrays.branch_pages_XB.view(len(plan.arrays.slot_A), -1))
        if Decoding.REJECTION not in plan.kind.decodings:
            return inputs
        return inputs._replace(chains=assign_chains(plan, inputs.tree.alive_X))

    def run_pending(self, plan: RoundPlan[Tensor], inputs: DraftInputs) -> PassLogits:
        """Return logits [A, V] after the pending tokens of every particle."""
        last_A = inputs.last_A if inputs.rows.queries > 1 else None
        return self.run(plan, inputs.tokens_AQ.flatten(), inputs.rows, last_A)

    def run_rows(self, plan: RoundPlan[Tensor], inputs: DraftInputs, tree: TokenTree) -> PassLogits:
        """Return logits [X, V] after the last tokens of rows."""
        assert tree.run is not None, "rows, of which the last token alone is run"
        rows = Rows(
            table_SL=self.state.table_SL,
            slot_R=tree.run.slot_X,
            tail_RB=tree.tail_XB,
            tail_R=tree.run.tail_X,
            start_R=tree.run.start_X,
            count_R=tree.run.count_X,
            group_R=inputs.later.group_R,
            first_G=inputs.later.rows.first_G,
            size_G=inputs.later.rows.size_G,
            shared_G=plan.arrays.shared_G,
            queries=1,
            contexts=plan.kind.contexts,
            wanted_1=inputs.wanted_1,
        )
        return self.run(plan, tree.last_X, rows, root_R=tree.root_X)

    def extend(
        self,
        plan: RoundPlan[Tensor],
        inputs: DraftInputs,
        after: PassLogits,
        step: int,
        before: GrownStep | None = None,
        mask_RW: Tensor | None = None,
    ) -> GrownStep:
        """Extend rows by one token. Every new row continues a particle or an inner node at the first step, and a row of
        the step before at later steps. `after`: logits after the particles or rows; `before`: the rows after the last
        step, None at the first; `mask`: tokens that may follow."""
        logits_RV, raw_RV = after
        layout, tree = (inputs.first, inputs.tree) if before is None else (inputs.later, before.tree)
        if plan.kind.biased:
            slot_R = plan.arrays.slot_A if tree.run is None else tree.run.slot_X
            logits_RV = self.ops.add_biases(
                self.biases,
                self.state.entry_S,
                self.state.least_S,
                logits_RV.float(),
                slot_R,
                tree.next_X,
                plan.kind.biased,
            )
        if mask_RW is not None:
            is_own = self.purpose is Purpose.TARGET
            columns, ids_M = self.sampling.columns, self.sampling.ids_M
            logits_RV = self.ops.apply_mask(logits_RV, mask_RW, columns, ids_M, fails=is_own)
        own = chosen = chains = raw_logp_X = None
        nodes = tree
        if plan.kind.has_separate:
            keys = DrawKeys(*layout.keys_R, layout.stream_RF, tree.next_X, self.purpose)
            own = OwnDraws(*self.sampling.propose(logits_RV, layout.distribution, self.mixture, keys))
        if raw_RV is not None:
            assert own is not None and isinstance(self.sampling, Sampling), "a target that decodes alone"
            raw_logp_X = self.sampling.raw_score(raw_RV, own.token_RF[:, 0])
        if plan.kind.decodings - SEPARATE - {Decoding.REJECTION}:
            chosen, nodes = self._expanded(plan, layout, logits_RV, tree, step)
        if inputs.chains is not None:
            width = len(nodes.root_X) // len(tree.root_X)
            chains = self._drawn(plan, layout, logits_RV, tree, step, inputs.chains, width)
        more = Continuation(chosen, own, chains)
        grown = self.ops.reparent(nodes, more, plan, self.state, step=step)
        kept = None if chosen is None else DraftStep(grown, chosen.expansion.parent_X, chosen.candidates)
        return GrownStep(grown, kept, raw_logp_X)

    def finish(
        self, plan: RoundPlan[Tensor], inputs: DraftInputs, grown: tuple[GrownStep, ...]
    ) -> tuple[PackedFields[DraftedRows], GrownRows]:
        """Run the remaining steps. Returns the message to the target and the rows."""
        steps = list(grown)
        for step in range(len(grown), plan.kind.steps or self.shape.block):
            steps.append(self.extend(plan, inputs, self.run_rows(plan, inputs, steps[-1].tree), step, steps[-1]))
        tree, kept = steps[-1].tree, []
        if Decoding.WALK in plan.kind.decodings:
            kept = [step.kept for step in steps if step.kept]
        raw_logp = [step.raw_logp_X for step in steps if step.raw_logp_X is not None]
        rows = GrownRows(tree, tuple(kept), raw_logp_XK=torch.stack(raw_logp, 1) if raw_logp else None)
        if kept:
            rows = self.ops.prune_tree(plan, rows, self.nodes is not None)
        return self.ops.pack_rows(self.state, plan, rows.tree), rows

    def redraft(self, plan: RoundPlan[Tensor], start: RedraftStart) -> tuple[()]:
        """Draft again after a miss, and make the rows the particles. Writes the message and the lineage of `start`."""
        assert self.nodes is not None, "a drafter of look-ahead"
        state, again = self.state, plan_again(plan, start)
        inputs = self.begin(again, again.draft_distribution)._replace(wanted_1=start.any_1)
        first = known_step(state, again, inputs, start.root_A)
        _, grown = self.finish(again, inputs, (GrownStep(first.tree, first),))
        rows = self.ops.pack_rows(state, again, grown.tree).fields
        is_again_A = start.slot_A != state.dummy
        start.message.write(rows._replace(count_X=torch.where(is_again_A, rows.count_X, 0)))
        selection = selected_again(state, again, start.message.fields)
        self.ops.store_inner_nodes(self.nodes, state, again, grown, selection)
        lineage, next_ = self.ops.remap_draft(state, again, grown.tree, selection, plan.kind.redrafted + 1)
        self.ops.advance(state, again.arrays.slot_A, selection, next_)
        start.lineage.path_AB.copy_(lineage.path_AB)
        start.lineage.kept_A.copy_(torch.where(is_again_A, lineage.kept_A, 0))
        return ()

    def remap(
        self, plan: RoundPlan[Tensor], grown: GrownRows, selection: RoundSelection[Tensor]
    ) -> DraftReport[Tensor]:
        """Make the selected rows the particles."""
        tree = grown.tree
        nan_A = self.nan.expand(len(plan.arrays.slot_A))
        observed = ObservedDraws(nan_A, nan_A, nan_A)
        if self.kept_RV is not None and Decoding.WALK in plan.kind.decodings:
            observed = self.ops.observe_draws(self.state, plan, tree, selection, self.kept_RV, self._coupling(plan))
        if self.nodes is not None and grown.steps:
            self.ops.store_inner_nodes(self.nodes, self.state, plan, grown, selection)
        self.run.remap(plan, selection.particles.ancestor_A, tree.tail_XB, selection.particles.row_A, pending=True)
        lineage, next_ = self.ops.remap_draft(self.state, plan, tree, selection, plan.kind.steps or self.shape.block)
        self.ops.advance(self.state, plan.arrays.slot_A, selection, next_)
        return DraftReport(lineage, observed)

    def _drawn(
        self,
        plan: RoundPlan[Tensor],
        layout: CandidateLayout,
        logits_RV: Tensor,
        tree: TokenTree,
        step: int,
        assigned: ChainAssignment,
        width: int,
    ) -> ChainDraws:
        """Draw the next tokens of chains, or guess them. `width`: number of nodes into which each row of `tree` was
        split; its first node is the row itself."""
        begins, branches = step == 0, plan.kind.branches
        at_Y = assigned.source_Y if begins else assigned.row_Y
        logits_YV = logits_RV[at_Y]
        if begins and self.shape.guesses:
            token_Y = self.sampling.likeliest(logits_YV, branches).gather(1, assigned.guess_Y[:, None])[:, 0]
            logq_Y = torch.zeros_like(token_Y, dtype=torch.float32)
        else:
            seed_Y, rank_Y1 = layout.keys_R.seed[at_Y], assigned.rank_Y[:, None]
            keys = DrawKeys(seed_Y, torch.zeros_like(seed_Y), rank_Y1, tree.next_X[at_Y], self.purpose)
            assert self.dists_YKV is not None
            dist_YV = self.dists_YKV[: len(at_Y), step - self.shape.guesses]
            token_Y, logq_Y = self.sampling.propose_by(logits_YV, layout.distribution.take(at_Y), keys, dist_YV)
        row_X = torch.arange(len(plan.arrays.slot_A) * branches, device=at_Y.device)
        none_X = torch.zeros_like(row_X)
        parent_X = row_X // branches if begins else row_X
        return ChainDraws(
            parent_X=assigned.spread(at_Y, parent_X) * width,
            token_X=assigned.spread(token_Y, none_X),
            logq_X=assigned.spread(logq_Y, none_X.float()),
        )

    def _coupling(self, plan: RoundPlan[Tensor]) -> Coupling:
        temperature_A = plan.target_distribution.temperature_R
        return Coupling(plan.arrays.exponent_A, temperature_A, plan.arrays.seed_A, self.sampling.ids_M)

    def _expanded(
        self, plan: RoundPlan[Tensor], layout: CandidateLayout, logits_RV: Tensor, tree: TokenTree, step: int
    ) -> tuple[ChosenTokens, TokenTree]:
        """Choose a group's rows among the candidate tokens of all its rows. Returns the choice with the candidates, and
        the rows that it continues. Exact decoding keeps only tokens that are likely themselves, so it never uses
        the candidate that stands for the rest."""
        has_rest = Decoding.DISTINCT in plan.kind.decodings
        coupling = self._coupling(plan) if Decoding.WALK in plan.kind.decodings else None
        keys = DrawKeys(*layout.keys_R, layout.rank_R1, tree.next_X, self.purpose)
        kept_RV = None if coupling is None or step else self.kept_RV
        candidate_tokens = self.sampling.propose_candidates(
            logits_RV, layout.distribution, self.mixture, keys, has_rest, coupling, kept_RV
        )
        sources, useful = layout.sources, candidate_tokens
        if self.nodes is not None and coupling is not None:
            if step == 0:
                candidate_tokens, tree, sources = self.ops.with_inner_nodes(self.nodes, plan, tree, candidate_tokens)
                useful = candidate_tokens
            elif plan.kind.branches > 1:
                useful = self.ops.limit_outcomes(plan, tree, candidate_tokens, has_rest)
        source = SourceRows(useful, tree.mass_X, tree.alive_X, sources, tree.ended_X)
        rows, total = layout.rows, len(plan.arrays.branch_pages_XB)
        given = (source, rows, rows.size_G, plan.arrays.decoding_G, layout.keys_G, step, total)
        chosen = self.ops.expand(*given, has_rest=has_rest)
        return ChosenTokens(chosen, candidate_tokens), tree


class VerifyStage:
    """A model that scores blocks."""

    def __init__(
        self,
        run: GuidedPass,
        sampling: Sampling,
        state: SlotState,
        ops: RoundOps,
        biases: BiasTables,
        *,
        block: int,
        lookahead: bool,
        chains: int,
    ) -> None:
        """`block`: K; in lockstep the seed is scored, too. `chains`: maximum number of chains in a round."""
        self.run, self.sampling, self.state = run, sampling, state
        self._ops, self._biases, self.lookahead = ops, biases, lookahead
        self.queries = block if lookahead else block + 1
        self.logq_SQ = torch.zeros(len(state.end_S), self.queries, device=state.device)
        """log q of the pending tokens of each slot."""
        # Entries are read only after they have been written.
        vocab = sampling.vocab
        self.drawn_PKV = torch.empty(chains, self.queries - 1, vocab, device=state.device)
        """float32 log-distributions that the tokens of chains, except the first ones, were drawn from; rewritten in
        every round."""
        self._dist_TV = torch.empty(chains * self.queries, vocab, device=state.device)

    def join(self, group: SequenceHandoff, slots_N: Tensor) -> None:
        self.logq_SQ[slots_N, : group.logq_NQ.shape[1]] = to_device(group.logq_NQ, self.state.device)

    def verify(self, plan: RoundPlan[Tensor], drafted: DraftedRows | None) -> VerifyOutputs:
        """Run and verify blocks: in look-ahead the pending ones, in lockstep those that have just been `drafted`."""
        inputs = self.lay_out(plan, drafted)
        return self.read_logits(plan, inputs, self.run_blocks(plan, inputs))

    def lay_out(self, plan: RoundPlan[Tensor], drafted: DraftedRows | None) -> VerifyInputs:
        inputs = self._ops.lay_out_blocks(self.state, self.logq_SQ, plan, drafted)
        return self._ops.lay_out_nodes(plan, inputs) if plan.kind.nodes else inputs

    def run_blocks(self, plan: RoundPlan[Tensor], inputs: VerifyInputs) -> PassLogits:
        """Return logits [T, V] after all tokens of the pass."""
        tokens_T, root_R = inputs.blocks.tokens_AQ.flatten(), inputs.blocks.origin_A
        if inputs.nodes is not None:
            index_T = inputs.nodes.token_T // inputs.blocks.tokens_AQ.shape[1]
            tokens_T, root_R, plan = tokens_T[inputs.nodes.token_T], root_R[index_T], plan.penalising(index_T)
        self.run.begin(plan, plan.arrays.target_pages_AQ[:, :0], plan.arrays.target_pages_AQ)
        logits_TV, raw_TV = self.run(plan, tokens_T, inputs.rows, root_R=root_R)
        if plan.kind.biased:
            logits_TV = self._ops.add_biases(
                self._biases,
                self.state.entry_S,
                self.state.least_S,
                logits_TV.float(),
                inputs.rows.slot_R,
                inputs.keys.position_R,
                plan.kind.biased,
            )
        return PassLogits(logits_TV, raw_TV)

    def read_logits(
        self, plan: RoundPlan[Tensor], inputs: VerifyInputs, after: PassLogits, mask_TW: Tensor | None = None
    ) -> VerifyOutputs:
        """Compute the target's outputs for blocks from its logits. `mask`: tokens that may follow each token of the
        blocks."""
        logits_TV, raw_TV = after
        distribution_T, log_mass_T = inputs.distribution_T, None
        if mask_TW is not None and plan.constraints is not None:
            by_answer_T = None
            if inputs.nodes is not None:
                mask_TW = mask_TW[inputs.nodes.token_T]
            elif plan.kind.has_answers:
                by_answer_T = plan.constraints.by_answer_A[plan.index_of_rows(inputs.rows.queries)]
            masked_TV = self._ops.apply_mask(logits_TV, mask_TW, self.sampling.vocab)
            logits_TV, distribution_T, log_mass_T = given_constraint(
                self.sampling, logits_TV, masked_TV, mask_TW, distribution_T, by_answer_T
            )
            inputs = inputs._replace(distribution_T=distribution_T)
        labelled_T = drawn = next_AV = None
        if not plan.kind.all_exact:
            labelled_T = self.sampling.score(logits_TV, distribution_T, inputs.label_T)
            next_AV = logits_TV[inputs.last_A]
        if plan.kind.decodings != {Decoding.REJECTION}:
            # Exact decoding follows these draws; a population in which no particle has weight continues with them.
            drawn = TargetDraws(*self.sampling.own_draws(logits_TV, distribution_T, inputs.keys))
        if log_mass_T is not None:
            # Without the constraint, log p is log p given the constraint plus the log mass that it allows.
            if labelled_T is not None:
                labelled_T = labelled_T + torch.where(inputs.label_T >= 0, log_mass_T, 0.0)
            if drawn is not None:
                drawn = drawn._replace(logp_T1=drawn.logp_T1 + log_mass_T[:, None])
        if len(plan.arrays.chain_P):
            drawn = self._verified(plan, inputs, logits_TV, drawn)
        scored = self._ops.collect_outputs(inputs, plan, labelled_T, drawn, next_AV)._replace(raw_TV=raw_TV)
        return scored if log_mass_T is None else scored._replace(next_mass_A=log_mass_T[inputs.last_A])

    def _verified(
        self, plan: RoundPlan[Tensor], inputs: VerifyInputs, logits_TV: Tensor, drawn: TargetDraws | None
    ) -> TargetDraws:
        """Return the target's draws, with the results of rejection sampling in the place of those for chains."""
        index_P, q = plan.arrays.chain_P, inputs.rows.queries
        token_P = (index_P[:, None] * q + torch.arange(q, device=index_P.device)).flatten()
        logp_TV = self._dist_TV[: len(token_P)]
        self.sampling.write_distribution(logits_TV[token_P], inputs.distribution_T.take(token_P), logp_TV)
        logp_PQV, groups = logp_TV.view(len(index_P), q, -1), chain_groups(plan)
        verdicts = self._ops.verify_chains(plan, inputs, logp_PQV, self.drawn_PKV[: len(index_P)], groups)
        # Padding repeats the first chain.
        chain_P = torch.arange(len(index_P), device=index_P.device)
        chain_P = torch.where(chain_P < groups.size_G.sum(), chain_P, 0)
        token_PQ, logp_PQ = (values_PQ[chain_P] for values_PQ in verdicts)
        none_T = torch.zeros_like(logits_TV[:, 0], dtype=torch.float32)
        token_T1, logp_T1, log_z_T = drawn or (none_T[:, None].long(), none_T[:, None], none_T)
        return TargetDraws(
            token_T1.index_copy(0, token_P, token_PQ.view(-1, 1).to(token_T1.dtype)),
            logp_T1.index_copy(0, token_P, logp_PQ.view(-1, 1)),
            # If a distribution has a NaN, every entry of it is NaN.
            log_z_T.index_copy(0, token_P, logp_TV[:, 0].isnan().float().masked_fill(logp_TV[:, 0].isnan(), torch.nan)),
        )

    def redrafted(self, plan: RoundPlan[Tensor], rows: DraftedRows) -> Tensor:
        """Make the rows that were drafted again the particles, before their blocks are verified. Returns as
        `remap`."""
        again = with_slots_of(self.state, plan, rows)
        return self.remap(again, rows, selected_again(self.state, again, rows))

    def remap(self, plan: RoundPlan[Tensor], drafted: DraftedRows, selection: RoundSelection[Tensor]) -> Tensor:
        """Make the selected candidates the particles. Returns the number of pending tokens of each [A]."""
        block_A = selection.particles.ancestor_A if self.lookahead else selection.particles.row_A
        self.run.remap(plan, selection.particles.ancestor_A, plan.arrays.target_pages_AQ, block_A, pending=False)
        next_ = self._ops.remap_target(self.state, self.logq_SQ, plan, drafted, selection, self.lookahead)
        self._ops.advance(self.state, plan.arrays.slot_A, selection, next_)
        return next_.pending_A


class SelectStage:
    """Selects how every batch index continues."""

    def __init__(self, sampling: Sampling, state: SlotState, ops: RoundOps, *, lookahead: bool) -> None:
        self.sampling, self.state, self.ops, self.lookahead = sampling, state, ops, lookahead

    def select(self, plan: RoundPlan[Tensor], scored: VerifyOutputs, drafted: DraftedRows) -> AppliedSelection:
        """Select among candidates. `drafted`: the rows that may follow the blocks (look-ahead), or the blocks
        themselves (lockstep)."""
        matched = own = trees = None
        if plan.kind.has_exact:
            blocks, groups = scored.blocks, plan.arrays.groups
            count_A = blocks.count_A if scored.nodes is None else scored.nodes.count_A
            matched = self.ops.match_samples(blocks.tokens_AQ, count_A, scored.drawn_AQ, blocks.alive_A, groups)
        if scored.next_mass_A is not None and plan.constraints is not None:
            distribution = plan.target_distribution.neutral(plan.constraints.by_answer_A)
            plan = replace(plan, target_distribution=distribution)
        target = target_outputs(self.sampling, plan, scored, drafted, self.lookahead)
        inputs = ScoreInputs(plan, self.state, scored, drafted, target, matched, self.lookahead)
        candidates = self.ops.score_rows(inputs)
        if plan.kind.has_separate:
            own = self._select_independent(plan, candidates)
        if plan.kind.has_competing:
            trees = self._select_trees(plan, candidates, drafted.block)
        applied = self.ops.apply_selection(inputs, candidates, own, trees)
        if scored.raw_TV is None:
            return applied
        raw_logp_AQ = self._raw_logprobs(scored, scored.raw_TV, applied.result)
        return applied._replace(result=applied.result._replace(raw_logp_AQ=raw_logp_AQ))

    def _raw_logprobs(self, scored: VerifyOutputs, raw_TV: Tensor, result: RoundResult[Tensor]) -> Tensor:
        """Return log-probabilities [A, Q] under the softmax of the target's own logits, as in
        `RoundResult.raw_logp_AQ`."""
        blocks, selection, q = scored.blocks, result.selection, scored.blocks.tokens_AQ.shape[1]
        if self.lookahead:
            block_A = selection.particles.ancestor_A
            kept_A = blocks.count_A[block_A] - selection.cut_A
            next_A = torch.where(selection.count_A > 0, result.grown_AQ[:, 0], -1)
        else:
            block_A, kept_A, next_A = selection.particles.row_A, selection.taken_A + 1, selection.bonus_A
        column_Q, last_A1 = torch.arange(q, device=block_A.device), kept_A[:, None] - 1
        token_AQ = torch.where(column_Q < last_A1, blocks.tokens_AQ[block_A].roll(-1, 1), -1)
        token_AQ = torch.where(column_Q == last_A1, next_A[:, None], token_AQ)
        row_AQ = block_A[:, None] * q + column_Q if scored.nodes is None else scored.nodes.node_AQ[block_A]
        logp_AQ = self.sampling.raw_score(raw_TV, token_AQ.flatten(), row_AQ.flatten()).view(token_AQ.shape)
        return torch.where(token_AQ >= 0, logp_AQ, torch.nan)

    def _select_independent(self, plan: RoundPlan[Tensor], candidates: ScoredRows) -> Selection:
        """Select among independent particles (`smc.algorithm.selection`)."""
        spans = Spans(plan.arrays.first_G, candidates.own_size_G)
        bounds = Bounds(spans, plan.arrays.count_G, plan.arrays.draws_G)
        random = (plan.arrays.threshold_G, plan.arrays.scheme_G, *candidates.keys_G)
        logw_AF = candidates.source.mass_R.view(len(candidates.alive_A), -1)
        return self.ops.select(logw_AF, candidates.alive_A, bounds, *random)

    def _select_trees(self, plan: RoundPlan[Tensor], candidates: ScoredRows, step: int) -> SelectedTrees:
        """Select for distinct populations and for exact decoding (`smc.algorithm.expansion`)."""
        rows, batch_size = plan.arrays.groups, len(plan.arrays.slot_A)
        chosen = self.ops.expand(
            candidates.source,
            rows,
            plan.arrays.draws_G,
            plan.arrays.decoding_G,
            candidates.keys_G,
            step,
            batch_size,
            LEAST_SHARE,
        )
        kept = self.ops.assign_rows(candidates.root_X, chosen.parent_X, chosen.alive_X, rows, rows, batch_size)
        return SelectedTrees(chosen, *kept)
