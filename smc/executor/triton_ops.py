"""The operations of a round on a GPU: `RoundOps` as Triton kernels. This module packs tensors into arguments of the
launchers in `smc.kernels` and names what these return. See the package's legend for axes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from smc.algorithm.expansion import CandidateTokens, PopulationKind, SelectedTrees
from smc.algorithm.resampling import Spans
from smc.algorithm.selection import Selection
from smc.algorithm.verification import Matches
from smc.distributions import DistributionSpec
from smc.executor.draft import (
    CandidateLayout,
    Continuation,
    DraftInputs,
    DraftShape,
    DraftStep,
    GrownRows,
    ResumedSequences,
    TokenTree,
)
from smc.executor.draft_tree import InnerNodes
from smc.executor.finalize import Finalized
from smc.executor.forward import Reader, Rows, StaticForward
from smc.executor.graph_runner import GraphRunner, StageRunner
from smc.executor.messages import DraftedRows, Lineage, RoundChoice, RoundResult
from smc.executor.ops import RoundOps
from smc.executor.plan import RoundPlan
from smc.executor.remap import Followed
from smc.executor.sampling import Coupling, DrawKeys, HeadSampling, Sampling
from smc.executor.select import Candidates, ScoreInputs
from smc.executor.state import BiasTables, SlotEntries, SlotState
from smc.executor.triton_forward import TritonForward, run_prompt
from smc.executor.verify import Blocks, TargetDraws, VerifyInputs, VerifyOutputs, chain_groups
from smc.kernels import draft, draft_tree, finalize, remap, sampling, select, verify
from smc.kernels.candidate_tokens import CouplingTensors, propose_candidates
from smc.kernels.draft import ChainTokens, ChosenTokens, observe_draws
from smc.kernels.draft_tree import NodeTensors, StepRows, StepTensors
from smc.kernels.expansion import expand, keep_roots
from smc.kernels.finalize import CandidateOutputs
from smc.kernels.remap import NextSequences, remap_block_table
from smc.kernels.round_tensors import (
    BlockTensors,
    DistributionTensors,
    PlanTensors,
    SlotTensors,
    StopTensors,
    TreeTensors,
    contiguous,
    fields_of,
)
from smc.kernels.sampling import draw, guide, score, spread, spread_rest, write_distribution
from smc.kernels.select import ScoreTensors
from smc.kernels.select import select as select_particles
from smc.kernels.truncation import Cut, apply_mask, truncate
from smc.kernels.verify import ChainTrials, SampleTensors, VerifyTensors, match_samples
from smc.model.draft_vocab import DraftVocab
from smc.philox import Purpose


class TritonOps(RoundOps):
    """Triton kernels, in CUDA graphs. Replaces every operation of `RoundOps`."""

    def stage_runner(self, device: torch.device) -> StageRunner:
        return GraphRunner(device)

    def forward(self, reader: Reader) -> StaticForward:
        return TritonForward(reader)

    run_prompt = staticmethod(run_prompt)

    def sampling(self, vocab: int) -> Sampling:
        return TritonSampling(vocab)

    def head_sampling(self, vocab: DraftVocab, device: torch.device) -> HeadSampling:
        return TritonHeadSampling(self.sampling(len(vocab.ids_M)), vocab, device)

    def add_biases(
        self,
        tables: BiasTables,
        entries: SlotEntries,
        logits_RV: Tensor,
        slot_X: Tensor,
        position_R: Tensor,
        width: int,
    ) -> Tensor:
        added = (tables.column_EB, tables.early_EB, tables.late_EB, tables.count_E)
        return sampling.add_biases(logits_RV, added, entries, slot_X.contiguous(), position_R.contiguous(), width)

    apply_mask = staticmethod(apply_mask)

    def begin_draft(
        self, state: SlotState, plan: RoundPlan[Tensor], distribution: DistributionSpec[Tensor], shape: DraftShape
    ) -> DraftInputs:
        branches, (batch_size, queries) = plan.branches, plan.begin_pages_AP.shape
        out = draft.begin(
            fields_of(PlanTensors, plan),
            fields_of(DistributionTensors, distribution),
            fields_of(SlotTensors, state),
            StopTensors.of(state.stops),
            branches,
            shape.by_round,
        )
        index_A, none_A, text_A, end_A, last_A, rank_A = out.numbers_6A
        (slot_R, held_R, run_R, group_R), (alive_A, ended_A) = out.rows_4A, out.flags_2A
        stream_X, rank_X, seed_X, round_X, top_k_X = out.numbers_5X
        temperature_X, top_p_X, min_p_X, alpha_X = out.distribution_4X
        bounds = (plan.first_G, plan.size_G, plan.shared_G)
        tree = TokenTree(
            root_X=index_A,
            tokens_XK=none_A[:, None].expand(-1, shape.block),
            logq_XK=out.zero_A[:, None].expand(-1, shape.block),
            tail_XB=plan.branch_pages_XB[::branches],
            count_X=none_A,
            alive_X=alive_A,
            ended_X=ended_A,
            before_X=text_A,
            text_X=text_A,
            mass_X=out.mass_A,
            last_X=none_A,
            next_X=end_A,
            cut_X=none_A,
            outcome_X=none_A,
            run_4X=None,
        )
        later, (seed_G, round_G) = Spans(*out.bounds_2G), out.keys_2G
        return DraftInputs(
            tokens_AP=out.tokens_AP,
            rows=Rows(state.table_SL, slot_R, None, None, held_R, run_R, group_R, *bounds, queries, plan.contexts),
            last_A=last_A,
            tree=tree,
            first=CandidateLayout(
                group_S=group_R,
                sources=Spans(plan.first_G, plan.size_G),
                rows=later,
                rank_S1=rank_A[:, None],
                stream_SD=stream_X.view(batch_size, branches),
                seed_S=plan.seed_A,
                round_S=plan.round_A if shape.by_round else none_A,
                seed_G=seed_G,
                round_G=round_G,
                distribution=distribution,
            ),
            later=CandidateLayout(
                group_S=out.group_X,
                sources=later,
                rows=later,
                rank_S1=rank_X[:, None],
                stream_SD=stream_X[:, None],
                seed_S=seed_X,
                round_S=round_X,
                seed_G=seed_G,
                round_G=round_G,
                distribution=DistributionSpec(temperature_X, top_k_X, top_p_X, min_p_X, alpha_X, distribution.active),
            ),
        )

    expand = staticmethod(expand)

    def reparent(
        self, tree: TokenTree, more: Continuation, plan: RoundPlan[Tensor], state: SlotState, *, step: int
    ) -> TokenTree:
        chosen = None
        if more.chosen is not None:
            expansion, candidate_tokens = more.chosen
            chosen = ChosenTokens(
                expansion.parent_X,
                expansion.candidate_X,
                expansion.mass_X,
                expansion.nan_G,
                candidate_tokens.token_RC,
                candidate_tokens.logq_RC,
            )
        made, run_4X = draft.reparent(
            fields_of(TreeTensors, tree),
            chosen,
            more.own,
            None if more.chains is None else fields_of(ChainTokens, more.chains),
            fields_of(PlanTensors, plan),
            fields_of(SlotTensors, state),
            StopTensors.of(state.stops),
            step,
            plan.branches,
        )
        return TokenTree(**made._asdict(), run_4X=run_4X)

    def choose_rows(self, plan: RoundPlan[Tensor], grown: GrownRows, lookahead: bool) -> GrownRows:
        steps = tuple(
            StepRows(step.parent_X.contiguous(), contiguous(fields_of(TreeTensors, step.tree))) for step in grown.steps
        )
        taken, leaf_X = draft_tree.choose_rows(fields_of(PlanTensors, plan), steps, plan.branches, lookahead)
        return replace(grown, tree=TokenTree(**taken._asdict(), run_4X=None), leaf_X=leaf_X)

    def keep_nodes(
        self,
        nodes: InnerNodes,
        state: SlotState,
        plan: RoundPlan[Tensor],
        grown: GrownRows,
        choice: RoundChoice,
    ) -> None:
        assert grown.leaf_X is not None, "rows of exact decoding have been chosen"
        draft_tree.keep_nodes(
            fields_of(NodeTensors, nodes),
            fields_of(PlanTensors, plan),
            state.logw_S,
            grown.tree.tokens_XK,
            tuple(map(_step_tensors, grown.steps)),
            choice.all_9A,
            grown.leaf_X,
        )

    def limit_outcomes(
        self, plan: RoundPlan[Tensor], tree: TokenTree, candidates: CandidateTokens, has_rest: bool
    ) -> CandidateTokens:
        of_plan, of_tree = fields_of(PlanTensors, plan), fields_of(TreeTensors, tree)
        share_XC = draft_tree.limit_outcomes(
            of_plan, of_tree, candidates.share_RC.contiguous(), plan.branches, has_rest
        )
        return CandidateTokens(candidates.token_RC, candidates.logq_RC, share_XC)

    def with_inner_nodes(
        self, nodes: InnerNodes, plan: RoundPlan[Tensor], tree: TokenTree, candidates: CandidateTokens
    ) -> tuple[CandidateTokens, TokenTree, Spans]:
        out = draft_tree.with_inner_nodes(
            fields_of(NodeTensors, nodes),
            fields_of(PlanTensors, plan),
            fields_of(TreeTensors, tree),
            contiguous(candidates),
        )
        (root_H, none_H, text_H, cut_H), (alive_H, ended_H) = out.numbers_4H, out.flags_2H
        rows = TokenTree(
            root_X=root_H,
            tokens_XK=none_H[:, None].expand(-1, nodes.block),
            logq_XK=out.values_2HC[1][:, :1].expand(-1, nodes.block),
            tail_XB=tree.tail_XB[:1].expand(len(root_H), -1),
            count_X=none_H,
            alive_X=alive_H,
            ended_X=ended_H,
            before_X=text_H,
            text_X=text_H,
            mass_X=out.mass_H,
            last_X=none_H,
            next_X=none_H,
            cut_X=cut_H,
            outcome_X=none_H,
            run_4X=None,
        )
        return CandidateTokens(out.token_HC, *out.values_2HC), rows, Spans(*out.bounds_2G)

    def pack_rows(self, state: SlotState, plan: RoundPlan[Tensor], tree: TokenTree) -> DraftedRows:
        rows, block = tree.tokens_XK.shape
        all_WX = torch.empty(DraftedRows.width(block), rows, dtype=torch.int32, device=state.device)
        draft.pack(
            fields_of(PlanTensors, plan),
            fields_of(SlotTensors, state),
            fields_of(TreeTensors, tree),
            all_WX,
            plan.branches,
            PopulationKind.INDEPENDENT in plan.kinds,
        )
        return DraftedRows(all_WX)

    def observe_draws(
        self,
        state: SlotState,
        plan: RoundPlan[Tensor],
        tree: TokenTree,
        choice: RoundChoice,
        kept_BV: Tensor,
        coupling: Coupling,
    ) -> Tensor:
        return observe_draws(
            fields_of(PlanTensors, plan),
            fields_of(SlotTensors, state),
            tree.tokens_XK,
            choice.all_9A,
            kept_BV,
            fields_of(CouplingTensors, coupling),
        )

    def resume_draft(
        self, state: SlotState, plan: RoundPlan[Tensor], tree: TokenTree, choice: RoundChoice, steps: int
    ) -> ResumedSequences:
        out = draft.resume(
            fields_of(PlanTensors, plan),
            fields_of(SlotTensors, state),
            fields_of(TreeTensors, tree),
            choice.all_9A,
            steps,
        )
        end_A, pending_A, text_A = out.numbers_3A
        return ResumedSequences(Lineage(out.path_AW, *out.counts_2A), end_A, out.tokens_AW, pending_A, text_A)

    def lay_out_blocks(
        self, state: SlotState, logq_SQ: Tensor, plan: RoundPlan[Tensor], drafted: DraftedRows | None
    ) -> VerifyInputs:
        distribution = plan.target_distribution
        out = verify.lay_out(
            fields_of(PlanTensors, plan),
            fields_of(DistributionTensors, distribution),
            fields_of(SlotTensors, state),
            logq_SQ,
            None if drafted is None else drafted.all_WX,
            plan.has_exact,
        )
        origin_A, count_A, run_A, *next_3A, last_A = out.numbers_7A
        ended_A, alive_A, open_A = out.flags_3A
        slot_R, held_R, run_R, group_R = out.rows_4A
        bounds, pages_AQ = (plan.first_G, plan.size_G, plan.shared_G), plan.target_pages_AQ
        temperature_T, top_p_T, min_p_T, alpha_T = out.distribution_4T
        seed_T, position_T, zero_T = out.keys_3T
        known = (origin_A, out.tokens_AQ, out.logq_AQ, count_A, ended_A, alive_A, out.logw_A, open_A, run_A)
        per_row = (slot_R, pages_AQ, held_R, held_R, run_R, group_R)
        return VerifyInputs(
            blocks=Blocks(*known, *next_3A),
            rows=Rows(state.table_SL, *per_row, *bounds, pages_AQ.shape[1], plan.contexts),
            distribution_T=DistributionSpec(temperature_T, out.top_k_T, top_p_T, min_p_T, alpha_T, distribution.active),
            label_T=out.label_T,
            keys=DrawKeys(seed_T, zero_T, zero_T[:, None], position_T, Purpose.TARGET),
            last_A=last_A,
        )

    def verify(
        self,
        inputs: VerifyInputs,
        plan: RoundPlan[Tensor],
        labelled_T: Tensor | None,
        drawn: TargetDraws | None,
        next_AV: Tensor | None,
    ) -> VerifyOutputs:
        out = verify.verify(
            fields_of(PlanTensors, plan),
            fields_of(BlockTensors, inputs.blocks),
            None if labelled_T is None else labelled_T.contiguous(),
            None if drawn is None else contiguous(SampleTensors(*drawn)),
        )
        return VerifyOutputs(inputs.blocks, next_AV=next_AV, **out._asdict())

    def verify_chains(
        self, plan: RoundPlan[Tensor], inputs: VerifyInputs, logp_CQV: Tensor, logq_CLV: Tensor
    ) -> tuple[Tensor, Tensor]:
        blocks = inputs.blocks
        trials = ChainTrials(
            index_C=plan.chain_C,
            tokens_AQ=blocks.tokens_AQ,
            count_A=blocks.count_A,
            alive_A=blocks.alive_A,
            rank_A=blocks.rank_A,
            seed_A=plan.seed_A,
            position_AQ=inputs.keys.position_R.view(blocks.tokens_AQ.shape),
        )
        return verify.verify_chains(contiguous(trials), logp_CQV, logq_CLV, chain_groups(plan))

    match_samples = staticmethod(match_samples)

    def score_candidates(self, inputs: ScoreInputs) -> Candidates:
        target, candidate_tokens = inputs.target, inputs.target.candidate_tokens
        scores = ScoreTensors(
            target.logp_X, target.log_z_A, None if candidate_tokens is None else candidate_tokens.share_RC
        )
        out = select.score_candidates(
            *_scored(inputs),
            scores=contiguous(scores),
            matched=_matched(inputs),
            lookahead=inputs.lookahead,
            alive_S=inputs.state.alive_S,
        )
        if candidate_tokens is None:
            assert out.token_X1 is not None, "rows are their own candidates"
            candidate_tokens = CandidateTokens(out.token_X1, out.share_XC, out.share_XC)
        else:
            candidate_tokens = CandidateTokens(candidate_tokens.token_RC, candidate_tokens.logq_RC, out.share_XC)
        rows = (out.root_X, out.weight_X, out.there_X, candidate_tokens, out.alive_A)
        own_size_G, *sources = out.size_3G
        return Candidates(*rows, *out.nan_2G, own_size_G, Spans(*sources), *out.random_2G)

    select = staticmethod(select_particles)
    keep_roots = staticmethod(keep_roots)

    def finalize(
        self, inputs: ScoreInputs, candidates: Candidates, own: Selection | None, trees: SelectedTrees | None
    ) -> Finalized:
        target = inputs.target
        outputs = CandidateOutputs(
            candidates.root_X,
            candidates.candidate_tokens.token_RC,
            target.logp_X,
            target.bonus_A,
            target.candidate_logp_AC,
        )
        out = finalize.finalize(
            *_scored(inputs),
            slots=fields_of(SlotTensors, inputs.state),
            tables=StopTensors.of(inputs.state.stops),
            candidates=contiguous(outputs),
            matched=_matched(inputs),
            own=None if own is None else contiguous(own),
            trees=contiguous(trees),
            lookahead=inputs.lookahead,
        )
        choice = RoundChoice(out.choice_9A)
        return choice, RoundResult(
            ancestor_A=choice.ancestor_A,
            alive_A=out.flags_2A[0],
            cut_A=choice.cut_A,
            grown_AQ=out.grown_AQ,
            count_A=out.count_A,
            ended_A=out.flags_2A[1],
            logw_A=choice.mass_A,
            logq_AQ=out.logq_AQ,
            logp_AQ=out.logp_AQ,
            first_logp_A=out.first_logp_A,
            raw_logp_AQ=out.logp_AQ[:, :0],
            log_z_G=out.values_2G[0],
            ess_G=out.values_2G[1],
            resampled_G=out.flags_3G[0],
            collapsed_G=out.flags_3G[1],
            draft_nan_G=candidates.draft_nan_G,
            target_nan_G=candidates.target_nan_G,
            hit_G=out.flags_3G[2],
            lineage=Lineage(out.path_AQ, *out.run_2A),
        )

    def follow(
        self,
        state: SlotState,
        logq_SQ: Tensor,
        plan: RoundPlan[Tensor],
        drafted: DraftedRows,
        choice: RoundChoice,
        lookahead: bool,
    ) -> Followed:
        out = remap.follow(
            fields_of(PlanTensors, plan),
            fields_of(SlotTensors, state),
            drafted.all_WX,
            choice.all_9A,
            logq_SQ,
            lookahead,
        )
        return Followed(out.end_A, out.tokens_AW, out.pending_A)

    def advance(
        self,
        state: SlotState,
        slot_A: Tensor,
        choice: RoundChoice,
        end_A: Tensor,
        tokens_AW: Tensor,
        pending_A: Tensor,
        text_A: Tensor,
    ) -> None:
        next_ = NextSequences(end_A, tokens_AW, pending_A, text_A)
        remap.advance(fields_of(SlotTensors, state), state.dummy, slot_A, choice.all_9A, next_)

    remap_block_table = staticmethod(remap_block_table)


def _step_tensors(step: DraftStep) -> StepTensors:
    candidates = (step.candidates.token_RC.contiguous(), step.candidates.share_RC.contiguous())
    return StepTensors(step.parent_X, *candidates, step.tree.mass_X, step.tree.text_X)


def _scored(inputs: ScoreInputs) -> tuple[PlanTensors, BlockTensors, VerifyTensors, Tensor]:
    """Return what scoring and finalizing read of the blocks."""
    scored = inputs.scored
    return (
        fields_of(PlanTensors, inputs.plan),
        contiguous(fields_of(BlockTensors, scored.blocks)),
        contiguous(fields_of(VerifyTensors, scored)),
        inputs.drafted.all_WX,
    )


def _matched(inputs: ScoreInputs) -> Matches | None:
    """Return the matches of groups that are decoded exactly; None: there are no such groups."""
    return contiguous(inputs.matched)


class TritonSampling(Sampling):
    """Sampling by kernels, which do not write the array of a distribution, except for chains."""

    def propose(
        self, logits_RV: Tensor, distribution: DistributionSpec[Tensor], mixture: float, keys: DrawKeys
    ) -> tuple[Tensor, Tensor]:
        token_RD, logq_RD, _ = self._draw(
            logits_RV, distribution.temperature_R, keys, self._cut(logits_RV, distribution, mixture)
        )
        return token_RD, logq_RD

    def propose_by(
        self, logits_RV: Tensor, distribution: DistributionSpec[Tensor], keys: DrawKeys, dist_RV: Tensor
    ) -> tuple[Tensor, Tensor]:
        token_R1, logq_R1, _ = self._draw(
            logits_RV, distribution.temperature_R, keys, self._cut(logits_RV, distribution)
        )
        self.write_distribution(logits_RV, distribution, dist_RV)
        return token_R1[:, 0], logq_R1[:, 0]

    def write_distribution(self, logits_RV: Tensor, distribution: DistributionSpec[Tensor], dist_RV: Tensor) -> None:
        write_distribution(logits_RV, dist_RV, distribution.temperature_R, self._cut(logits_RV, distribution))

    def propose_candidates(
        self,
        logits_RV: Tensor,
        distribution: DistributionSpec[Tensor],
        mixture: float,
        keys: DrawKeys,
        has_rest: bool = True,
        coupling: Coupling | None = None,
        kept_BV: Tensor | None = None,
    ) -> CandidateTokens:
        cut, coupled = self._cut(logits_RV, distribution, mixture), None
        if coupling is not None:
            coupled = fields_of(CouplingTensors, coupling)
        return self._propose_candidates(
            logits_RV, distribution.temperature_R, keys, cut, has_rest, coupling=coupled, kept_BV=kept_BV
        )

    def propose_bonus(
        self, logits_RV: Tensor, distribution: DistributionSpec[Tensor], keys: DrawKeys
    ) -> tuple[CandidateTokens, Tensor, Tensor]:
        cut = self._cut(logits_RV, distribution)
        if "alpha" not in distribution.active:
            candidate_tokens = self._propose_candidates(logits_RV, distribution.temperature_R, keys, cut)
            return candidate_tokens, candidate_tokens.logq_RC, candidate_tokens.logq_RC[:, 0] * 0.0
        # As in `bonus`. The likeliest token's log-probability is finite in any distribution.
        candidate_tokens = self._propose_candidates(
            logits_RV, distribution.temperature_R / distribution.alpha_R, keys, cut
        )
        logp_RC = self._score(logits_RV, distribution, candidate_tokens.token_RC, cut)
        log_z_R = torch.where(
            distribution.alpha_R == 1, 0.0, distribution.alpha_R * logp_RC[:, 0] - candidate_tokens.logq_RC[:, 0]
        )
        return candidate_tokens, logp_RC, log_z_R + candidate_tokens.logq_RC[:, 0] * 0.0

    def score(
        self, logits_RV: Tensor, distribution: DistributionSpec[Tensor], token_X: Tensor, row_X: Tensor | None = None
    ) -> Tensor:
        cut = self._cut(logits_RV, distribution)
        return score(logits_RV, self.vocab, distribution.temperature_R, token_X.int(), cut=cut, row_X=row_X)[0]

    def bonus(
        self, logits_RV: Tensor, distribution: DistributionSpec[Tensor], keys: DrawKeys
    ) -> tuple[Tensor, Tensor, Tensor]:
        cut = self._cut(logits_RV, distribution)
        if "alpha" not in distribution.active:
            token_RD, logp_RD, lse_R = self._draw(logits_RV, distribution.temperature_R, keys, cut)
            return token_RD, logp_RD, lse_R * 0.0
        # p^alpha is p at the temperature divided by alpha, and its normaliser follows from any of its tokens.
        token_RD, powered_RD, lse_R = self._draw(
            logits_RV, distribution.temperature_R / distribution.alpha_R, keys, cut
        )
        logp_RD = self._score(logits_RV, distribution, token_RD, cut)
        log_z_R = torch.where(distribution.alpha_R == 1, 0.0, distribution.alpha_R * logp_RD[:, 0] - powered_RD[:, 0])
        return token_RD, logp_RD, log_z_R + lse_R * 0.0

    guide = staticmethod(guide)

    def _cut(self, logits_RV: Tensor, distribution: DistributionSpec[Tensor], share: float = 0.0) -> Cut | None:
        processors = {"top_k": distribution.top_k_R, "top_p": distribution.top_p_R, "min_p": distribution.min_p_R}
        top_k_R, top_p_R, min_p_R = (
            values_R if name in distribution.active else None for name, values_R in processors.items()
        )
        if not distribution.active & set(processors):
            return None
        return truncate(logits_RV, self.vocab, distribution.temperature_R, top_k_R, top_p_R, min_p_R, share)

    def _score(
        self, logits_RV: Tensor, distribution: DistributionSpec[Tensor], token_RD: Tensor, cut: Cut | None
    ) -> Tensor:
        none_R = torch.full_like(token_RD[:, 0], -1)
        _, logp_RD = score(logits_RV, self.vocab, distribution.temperature_R, none_R, token_RD, cut)
        assert logp_RD is not None, "asked for"
        return logp_RD

    def _propose_candidates(
        self,
        logits_RV: Tensor,
        temperature_R: Tensor,
        keys: DrawKeys,
        cut: Cut | None,
        has_rest: bool = True,
        **coupled: Any,
    ) -> CandidateTokens:
        random = (keys.seed_R, keys.round_R, keys.stream_RD[:, 0], keys.position_R, int(keys.purpose))
        return propose_candidates(logits_RV, self.vocab, temperature_R, *random, cut, has_rest, **coupled)

    def _draw(
        self, logits_RV: Tensor, temperature_R: Tensor, keys: DrawKeys, cut: Cut | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        random = (keys.seed_R, keys.round_R, keys.stream_RD, keys.position_R, int(keys.purpose))
        return draw(logits_RV, self.vocab, temperature_R, *random, cut)


class TritonHeadSampling(HeadSampling):
    """Turns columns into tokens in one launch."""

    def _spread(self, column_RD: Tensor, logq_RD: Tensor, keys: DrawKeys) -> tuple[Tensor, Tensor]:
        random = (keys.seed_R, keys.round_R, keys.stream_RD, keys.position_R, keys.purpose)
        return spread(
            column_RD, logq_RD, random, self.ids_M, self.others_U, self.chance, self.log_inside, self.log_each
        )

    def _spread_rest(self, candidate_tokens: CandidateTokens, keys: DrawKeys, has_rest: bool) -> CandidateTokens:
        random = (keys.seed_R, keys.round_R, keys.stream_RD, keys.position_R, keys.purpose)
        logs = (self.log_inside, self.log_share, self.log_each)
        return spread_rest(candidate_tokens, random, self.ids_M, self.others_U, *logs, has_rest)
