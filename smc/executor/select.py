"""The last two stages of a round, in torch. Select: `score_rows` computes the mass of rows from the target's outputs,
groups select among them (`smc.algorithm`), and `apply_selection` applies the selections to all batch indices and makes
the host's report. Remap: slots and block tables follow the selection, at both models. `remap_draft` and `remap_target`
let the block tables of a model refer to the pages of the selected rows, and return the other new values of the slots,
which `advance` writes; keys and values stay where they are. The Triton forms are in `smc.kernels.select`,
`apply_selection` and `remap`.

In look-ahead, the rows are those that the draft grew while the target verified the blocks before them. In lockstep they
are the blocks themselves, each followed by a token of the target. In exact decoding, rows that do not follow the
target's own draws are left out."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from smc.algorithm.expansion import CandidateTokens, SelectedTrees, SourceRows, assign_rows, expand
from smc.algorithm.resampling import Bounds, Spans, block_log_weight
from smc.algorithm.selection import (
    PREFIX_POSITION,
    NextParticles,
    Selection,
    SelectionStatistics,
    select,
    surviving_prefix,
)
from smc.algorithm.verification import Matches, match_samples
from smc.arrays import to_device, to_host, where
from smc.executor.sampling import Sampling
from smc.philox import DrawKeys, Purpose, uniforms
from smc.round.plan import RoundPlan
from smc.round.tensors import (
    AppliedSelection,
    DraftedRows,
    Lineage,
    NextSequences,
    RoundResult,
    RoundSelection,
    ScoredRows,
    ScoreInputs,
    SlotState,
    TargetOutputs,
    TokenTree,
    VerifyOutputs,
)
from smc.stops import grow
from smc.types import SEPARATE, Decoding

LEAST_SHARE = 0.1
"""Distinct particles of less than this share of the mean weight are kept with a probability that is proportional to
their weight: an answer waits for all of its particles."""


class SelectStage:
    """Selects how every batch index continues."""

    def __init__(self, sampling: Sampling, state: SlotState, ops: SelectOps, *, lookahead: bool) -> None:
        self.sampling, self.state, self.ops, self.lookahead = sampling, state, ops, lookahead

    def select(self, plan: RoundPlan[Tensor], verified: VerifyOutputs, drafted: DraftedRows) -> AppliedSelection:
        """Select among rows. `drafted`: the rows that may follow the blocks (look-ahead), or the blocks
        themselves (lockstep)."""
        matched = own = trees = None
        if plan.kind.has_exact:
            blocks, groups = verified.blocks, plan.arrays.groups
            count_A = blocks.count_A if verified.nodes is None else verified.nodes.count_A
            matched = self.ops.match_samples(blocks.tokens_AQ, count_A, verified.drawn_AQ, blocks.alive_A, groups)
        if verified.next_mass_A is not None and plan.constraints is not None:
            distribution = plan.target_distribution.neutral(plan.constraints.by_answer_A)
            plan = replace(plan, target_distribution=distribution)
        target = target_outputs(self.sampling, plan, verified, drafted, self.lookahead)
        inputs = ScoreInputs(plan, self.state, verified, drafted, target, matched, self.lookahead)
        scored = self.ops.score_rows(inputs)
        if plan.kind.has_separate:
            own = self._select_independent(plan, scored)
        if plan.kind.has_competing:
            trees = self._select_trees(plan, scored, plan.kind.steps or drafted.block)
        applied = self.ops.apply_selection(inputs, scored, own, trees)
        if verified.raw_TV is None:
            return applied
        raw_logp_AQ = self._raw_logprobs(verified, verified.raw_TV, applied.result)
        return applied._replace(result=applied.result._replace(raw_logp_AQ=raw_logp_AQ))

    def _raw_logprobs(self, verified: VerifyOutputs, raw_TV: Tensor, result: RoundResult[Tensor]) -> Tensor:
        """Return log-probabilities [A, Q] under the softmax of the target's own logits, as in
        `RoundResult.raw_logp_AQ`."""
        blocks, selection, q = verified.blocks, result.selection, verified.blocks.tokens_AQ.shape[1]
        if self.lookahead:
            block_A = selection.particles.ancestor_A
            kept_A = blocks.count_A[block_A] - selection.cut_A
            next_A = torch.where(selection.count_A > 0, result.grown_AQ[:, 0], -1)
        else:
            block_A, kept_A, next_A = selection.particles.row_A, selection.taken_A + 1, selection.bonus_A
        column_Q, last_A1 = torch.arange(q, device=block_A.device), kept_A[:, None] - 1
        token_AQ = torch.where(column_Q < last_A1, blocks.tokens_AQ[block_A].roll(-1, 1), -1)
        token_AQ = torch.where(column_Q == last_A1, next_A[:, None], token_AQ)
        row_AQ = block_A[:, None] * q + column_Q if verified.nodes is None else verified.nodes.node_AQ[block_A]
        logp_AQ = self.sampling.raw_score(raw_TV, token_AQ.flatten(), row_AQ.flatten()).view(token_AQ.shape)
        return torch.where(token_AQ >= 0, logp_AQ, torch.nan)

    def _select_independent(self, plan: RoundPlan[Tensor], scored: ScoredRows) -> Selection:
        """Select among independent particles (`smc.algorithm.selection`)."""
        spans = Spans(plan.arrays.first_G, scored.own_size_G)
        bounds = Bounds(spans, plan.arrays.count_G, plan.arrays.next_count_G)
        random = (plan.arrays.threshold_G, plan.arrays.scheme_G, *scored.keys_G)
        logw_AF = scored.source.mass_R.view(len(scored.alive_A), -1)
        return self.ops.select(logw_AF, scored.alive_A, bounds, *random)

    def _select_trees(self, plan: RoundPlan[Tensor], scored: ScoredRows, step: int) -> SelectedTrees:
        """Select for distinct populations and for exact decoding (`smc.algorithm.expansion`)."""
        rows, batch_size = plan.arrays.groups, len(plan.arrays.slot_A)
        chosen = self.ops.expand(
            scored.source,
            rows,
            plan.arrays.next_count_G,
            plan.arrays.decoding_G,
            scored.keys_G,
            step,
            batch_size,
            LEAST_SHARE,
        )
        kept = self.ops.assign_rows(scored.root_X, chosen.parent_X, chosen.alive_X, rows, rows, batch_size)
        return SelectedTrees(chosen, *kept)


def target_outputs(
    sampling: Sampling, plan: RoundPlan[Tensor], verified: VerifyOutputs, drafted: DraftedRows, lookahead: bool
) -> TargetOutputs:
    """Compute the target's outputs that a selection depends on."""
    if plan.kind.all_exact:
        # The target's own draws decide.
        return TargetOutputs()
    next_AV, mass_A = verified.next_AV, verified.next_mass_A
    assert next_AV is not None, "kept unless all are decoded exactly"
    if lookahead:
        logp_X = sampling.score(next_AV, plan.target_distribution, drafted.tokens_XK[:, 0], drafted.root_X)
        return TargetOutputs(logp_X if mass_A is None else logp_X + mass_A[drafted.root_X])
    target, blocks = TargetOutputs(), verified.blocks

    def keys(stream_A: Tensor) -> DrawKeys:
        return DrawKeys(plan.arrays.seed_A, plan.arrays.round_A, stream_A[:, None], blocks.position_A, Purpose.TARGET)

    if plan.kind.has_separate:
        bonus_A1, logp_A1, log_z_A = sampling.own_draws(next_AV, plan.target_distribution, keys(blocks.stream_A))
        target = TargetOutputs(logp_A1[:, 0], bonus_A1[:, 0], log_z_A)
    if plan.kind.has_competing:
        candidate_tokens, candidate_logp_AC, log_z_A = sampling.propose_bonus(
            next_AV, plan.target_distribution, keys(blocks.rank_A)
        )
        target = target._replace(
            log_z_A=log_z_A, candidate_tokens=candidate_tokens, candidate_logp_AC=candidate_logp_AC
        )
    return target if mass_A is None else _with_mass(target, mass_A, plan.arrays.alpha_A)


def _with_mass(target: TargetOutputs, mass_A: Tensor, alpha_A: Tensor) -> TargetOutputs:
    """Convert outputs given a constraint into those of the distribution itself, by adding the log mass that the
    constraint allows."""

    def added(values: Tensor | None, mass: Tensor) -> Tensor | None:
        return None if values is None else values + mass

    return target._replace(
        logp_X=added(target.logp_X, mass_A),
        log_z_A=added(target.log_z_A, (alpha_A * mass_A).to(mass_A.dtype)),
        candidate_logp_AC=added(target.candidate_logp_AC, mass_A[:, None]),
    )


def score_rows(inputs: ScoreInputs) -> ScoredRows:
    """Return the rows and their mass."""
    return RowScorer(inputs).scored_rows()


class RowMass(NamedTuple):
    """The mass of rows, and what is wrong with them."""

    mass_X: Tensor
    """float64 log mass."""
    there_X: Tensor
    """bool: there is a row."""
    target_nan_X: Tensor
    """bool: the target's outputs for the row are NaN."""
    draft_nan_X: Tensor


class GroupNan(NamedTuple):
    """bool: the outputs of a model are NaN for some row of the group."""

    target_G: Tensor
    draft_G: Tensor


class RowScorer:
    """Scores the rows of one round."""

    def __init__(self, inputs: ScoreInputs) -> None:
        self.inputs, self.plan, self.verified, self.drafted = inputs, inputs.plan, inputs.verified, inputs.drafted
        self.holder_X = self.plan.index_of_rows(inputs.width)
        """Batch index that holds each row, F of them. The row's root, whose particle it continues, may be another one
        of the group."""
        self.group_X = self.plan.arrays.group_A[self.holder_X]

    def scored_rows(self) -> ScoredRows:
        plan, lookahead = self.plan, self.inputs.lookahead
        mass = self._rows_ahead() if lookahead else self._blocks_with_bonus()
        nan = GroupNan(
            target_G=self._of_group(mass.target_nan_X),
            draft_G=self._of_group(mass.draft_nan_X | self._nan_of_blocks()),
        )
        if plan.kind.has_exact:
            mass, nan = self._following(mass, nan)
        mass_X = mass.mass_X.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        candidate_tokens = self.inputs.target.candidate_tokens
        if candidate_tokens is None:
            candidate_tokens = CandidateTokens.whole(mass_X)
        else:
            candidate_tokens = candidate_tokens.mask_ended(~self.verified.blocks.open_A | plan.is_exact_A)
        width = self.inputs.width
        return ScoredRows(
            root_X=self.drafted.root_X.long() if lookahead else self.verified.blocks.origin_A,
            source=SourceRows(
                candidates=candidate_tokens,
                mass_R=mass_X,
                there_R=mass.there_X,
                groups=Spans(plan.arrays.first_G * width, plan.arrays.size_G * width),
            ),
            alive_A=self.inputs.state.alive_S[plan.arrays.slot_A],
            target_nan_G=nan.target_G,
            draft_nan_G=nan.draft_G,
            own_size_G=torch.where(plan.is_separate_G, plan.arrays.size_G, 0),
            keys_G=plan.keys_G,
        )

    def _rows_ahead(self) -> RowMass:
        """Score the rows that were drafted while the blocks were scored (look-ahead). A row's mass is the product of
        its block's weight, its share of its root, and the target/draft ratio of its first token."""
        verified, drafted, root_X, open_X = self.verified, self.drafted, self.drafted.root_X, self.inputs.open_X
        logq_X = drafted.logq_XK[:, 0]
        logp_X = torch.zeros_like(logq_X) if self.inputs.target.logp_X is None else self.inputs.target.logp_X
        next_X = torch.where(open_X, self.plan.arrays.alpha_A[root_X] * logp_X - logq_X, 0.0)
        return RowMass(
            mass_X=self._weight_of_blocks()[root_X] + next_X + drafted.share_X.double(),
            there_X=verified.blocks.alive_A[root_X] & (drafted.share_X > -torch.inf),
            target_nan_X=(open_X & torch.isnan(logp_X)) | verified.nan_A[self.holder_X],
            draft_nan_X=open_X & torch.isnan(logq_X),
        )

    def _blocks_with_bonus(self) -> RowMass:
        """Score the blocks themselves with the target's normaliser after them (lockstep)."""
        verified, weight_A = self.verified, self._weight_of_blocks()
        log_z_A = self.inputs.target.log_z_A
        log_z_A = torch.zeros_like(weight_A) if log_z_A is None else torch.where(verified.blocks.open_A, log_z_A, 0.0)
        nan_A = verified.nan_A | torch.isnan(log_z_A)
        return RowMass(weight_A + log_z_A, verified.blocks.alive_A, nan_A, torch.zeros_like(nan_A))

    def _following(self, mass: RowMass, nan: GroupNan) -> tuple[RowMass, GroupNan]:
        """Keep, in groups that are decoded exactly, only the rows that follow the target's own draws: in lockstep
        the block that agrees longest; in look-ahead the rows that begin where it ceases to agree, with the token that
        the target draws there."""
        plan, verified, holder_X = self.plan, self.verified, self.holder_X
        assert self.inputs.matched is not None, "groups that are decoded exactly"
        best_A, right_A = self.inputs.matched
        is_exact_X = plan.is_exact_A[holder_X]
        agrees_X = holder_X == best_A[holder_X]
        if self.inputs.lookahead:
            root_X = self.drafted.root_X
            next_A = verified.drawn_AQ[best_A, right_A - 1]
            matches_X = self.drafted.tokens_XK[:, 0] == next_A[holder_X]
            cut_X = self.drafted.cut_X
            agrees_X = (
                self._agrees_up_to(cut_X, self.inputs.matched)
                & matches_X
                & (verified.blocks.open_A[root_X] | (cut_X > 0))
            )
        # The draft's outputs do not change exact answers, even if they are NaN, and neither do the target's outputs
        # after wrong tokens.
        column_Q = torch.arange(verified.nan_AQ.shape[1], device=holder_X.device)
        nan_A = (verified.nan_AQ[best_A] & (column_Q < right_A[:, None])).any(-1)
        is_exact_G = plan.is_exact_G
        share_X = self.drafted.share_X.double().nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
        matching = mass._replace(
            mass_X=torch.where(is_exact_X, share_X, mass.mass_X), there_X=mass.there_X & (agrees_X | ~is_exact_X)
        )
        target_nan_G = torch.where(is_exact_G, plan.any_of_group(nan_A), nan.target_G)
        return matching, GroupNan(target_nan_G, nan.draft_G & ~is_exact_G)

    def _agrees_up_to(self, cut_X: Tensor, matched: Matches) -> Tensor:
        """Return bool [X]: the block that a row continues, without its last `cut` tokens, is exactly the prefix that
        agrees with the target's draws. Among chains this may hold for several blocks with the same tokens."""
        blocks, root_X, (best_A, right_A) = self.verified.blocks, self.drafted.root_X, matched
        best_X, right_X = best_A[self.holder_X], right_A[self.holder_X]
        column_Q = torch.arange(blocks.tokens_AQ.shape[1], device=best_A.device)
        is_same_XQ = blocks.tokens_AQ[root_X] == blocks.tokens_AQ[best_X]
        same_X = (is_same_XQ | (column_Q >= right_X[:, None])).all(-1)
        return same_X & blocks.alive_A[root_X] & (blocks.count_A[root_X] - cut_X == right_X)

    def _weight_of_blocks(self) -> Tensor:
        blocks = self.verified.blocks
        return blocks.logw_A + block_log_weight(
            self.verified.logp_AQ[:, :-1], blocks.logq_AQ[:, 1:], blocks.count_A - 1, self.plan.arrays.alpha_A
        )

    def _nan_of_blocks(self) -> Tensor:
        """Return bool [X]: the draft returned NaN in the block of the row's batch index."""
        blocks = self.verified.blocks
        exists_AQ = torch.arange(blocks.logq_AQ.shape[1], device=self.holder_X.device) < blocks.count_A[:, None]
        nan_X = (torch.isnan(blocks.logq_AQ) & exists_AQ).any(-1)[self.holder_X]
        if Decoding.DISTINCT in self.plan.kind.decodings:
            # Other rows have replaced those with NaN; the draft has marked them by a log q of NaN.
            nan_X = nan_X | (
                torch.isnan(self.drafted.logq_XK).any(-1) & self.plan.is_decoded_by(Decoding.DISTINCT)[self.holder_X]
            )
        return nan_X

    def _of_group(self, mask_X: Tensor) -> Tensor:
        """Return whether a mask holds anywhere in a group, bool [G]."""
        return self.plan.any_of_group(mask_X, self.group_X)


class SelectedRows(NamedTuple):
    """The continuation of each batch index."""

    particles: NextParticles[Tensor]
    block_A: Tensor
    """int64 batch index whose block it continues; in look-ahead this is the ancestor."""
    bonus_A: Tensor
    """int64 token of the target that is appended to the kept part of the block; -1: none."""
    logp_A: Tensor
    """float32 log p of the first token after the kept part of the block."""
    misses_A: Tensor
    """bool: none of the drafted rows continues: after a miss of exact decoding, where its answer is over, or because no
    particle of the group has weight."""


def apply_selection(
    inputs: ScoreInputs, scored: ScoredRows, own: Selection | None, trees: SelectedTrees | None
) -> AppliedSelection:
    """Return the continuation of every batch index, and the report to the host. `own`: the selection of independent
    particles; `trees`: that of the other groups."""
    return SelectionApplier(inputs, scored).of(own, trees)


class SelectionApplier:
    """Applies the groups' selections to all batch indices."""

    def __init__(self, inputs: ScoreInputs, scored: ScoredRows) -> None:
        self.inputs, self.scored, self.plan = inputs, scored, inputs.plan
        self.verified, self.drafted, self.lookahead = inputs.verified, inputs.drafted, inputs.lookahead
        self.blocks = self.verified.blocks
        self.is_exact_A = self.plan.is_exact_A

    def of(self, own: Selection | None, trees: SelectedTrees | None) -> AppliedSelection:
        statistics = self._statistics(own, trees)
        selected = self._selected_rows(own, trees)
        right_A = torch.full_like(selected.block_A, self.blocks.tokens_AQ.shape[1])
        if self.inputs.matched is not None:
            right_A = torch.where(self.is_exact_A, self.inputs.matched.right_A, right_A)
        if not self.plan.kind.all_exact:
            selected, right_A = self._redrawn(selected, statistics.collapsed_G, right_A)
        count_A = self.blocks.count_A[selected.block_A]
        kept_A = torch.minimum(right_A, count_A)
        ended_A, text_A, taken_A = self._grown(selected, kept_A)
        message = (
            RoundSelection.memory(len(kept_A))
            .allocate(kept_A.device)
            .write(
                RoundSelection(
                    particles=selected.particles,
                    taken_A=taken_A,
                    cut_A=count_A - kept_A if self.lookahead else torch.zeros_like(count_A),
                    bonus_A=selected.bonus_A,
                    ended_A=ended_A | ~selected.particles.alive_A,
                    text_A=text_A,
                )
            )
        )
        return AppliedSelection(message.memory, self._result(selected, message.fields, statistics, kept_A))

    def _statistics(self, own: Selection | None, trees: SelectedTrees | None) -> SelectionStatistics[Tensor]:
        if trees is None:
            assert own is not None, "a round has groups of some kind"
            return own.statistics
        chosen, zero_G = trees.chosen, torch.zeros_like(trees.chosen.ess_G)
        theirs = SelectionStatistics(
            log_z_G=torch.where(chosen.collapsed_G, -torch.inf, zero_G),
            ess_G=chosen.ess_G,
            resampled_G=zero_G > 0,
            collapsed_G=chosen.collapsed_G,
        )
        return theirs if own is None else where(self.plan.is_separate_G, own.statistics, theirs)

    def _selected_rows(self, own: Selection | None, trees: SelectedTrees | None) -> SelectedRows:
        if trees is None:
            assert own is not None, "a round has groups of some kind"
            return self._of_own(own)
        theirs = self._of_trees(trees)
        if self.inputs.matched is not None:
            theirs = self._with_misses(theirs, self.inputs.matched)
        if own is None:
            return theirs
        return where(self.plan.is_decoded_by(*SEPARATE), self._of_own(own), theirs)

    def _of_own(self, own: Selection) -> SelectedRows:
        target, particles = self.inputs.target, own.particles
        open_A, none_A = self.inputs.open_X[particles.row_A], torch.full_like(particles.row_A, -1)
        assert target.logp_X is not None, "asked for where there are independent rows"
        return SelectedRows(
            particles=particles,
            block_A=particles.ancestor_A,
            bonus_A=none_A if target.bonus_A is None else torch.where(open_A, target.bonus_A[particles.row_A], none_A),
            logp_A=torch.where(open_A, target.logp_X[particles.row_A], torch.nan),
            misses_A=torch.zeros_like(particles.alive_A),
        )

    def _of_trees(self, trees: SelectedTrees) -> SelectedRows:
        target, chosen, candidate_tokens = self.inputs.target, trees.chosen, self.scored.source.candidates
        row_A, candidate_A = chosen.parent_X[trees.selected_A], chosen.candidate_X[trees.selected_A]
        ancestor_A, open_A = self.scored.root_X[row_A], self.inputs.open_X[row_A]
        bonus_A, logp_A = torch.full_like(row_A, -1), torch.full_like(row_A, torch.nan, dtype=torch.float32)
        if target.candidate_logp_AC is not None:
            bonus_A = torch.where(open_A, candidate_tokens.token_RC[row_A, candidate_A], bonus_A)
            logp_A = torch.where(open_A, target.candidate_logp_AC[row_A, candidate_A], logp_A)
        elif self.lookahead and target.logp_X is not None:
            logp_A = torch.where(open_A, target.logp_X[row_A], logp_A)
        logw_A = torch.where(trees.alive_A, chosen.mass_X[trees.selected_A], -torch.inf)
        return SelectedRows(
            particles=NextParticles(ancestor_A, row_A, trees.alive_A, logw_A),
            block_A=ancestor_A if self.lookahead else row_A,
            bonus_A=bonus_A,
            logp_A=logp_A,
            misses_A=torch.zeros_like(trees.alive_A),
        )

    def _with_misses(self, selected: SelectedRows, matched: Matches) -> SelectedRows:
        """Complete the groups that are decoded exactly. If no drafted row of a group continues, the block that agrees
        longest does, followed by the target's next token."""
        plan, blocks, is_exact_A, particles = self.plan, self.blocks, self.is_exact_A, selected.particles
        best_A, right_A = matched
        any_A = plan.any_of_group(particles.alive_A)[plan.arrays.group_A]
        misses_A = is_exact_A & ~any_A & (plan.arrays.size_G > 0)[plan.arrays.group_A]
        ancestor_A = torch.where(misses_A, blocks.origin_A[best_A], particles.ancestor_A)
        index_A = torch.arange(len(best_A), device=best_A.device)
        is_over_A = blocks.ended_A[best_A] & (right_A == blocks.count_A[best_A])
        has_next_A = is_exact_A & ~is_over_A & (misses_A if self.lookahead else is_exact_A)
        next_A, next_logp_A = (
            values_AQ[best_A, right_A - 1] for values_AQ in (self.verified.drawn_AQ, self.verified.logp_AQ)
        )
        lone_logw_A = torch.where(index_A == ancestor_A, 0.0, -torch.inf)
        return SelectedRows(
            particles=NextParticles(
                ancestor_A=ancestor_A,
                row_A=particles.row_A if self.lookahead else torch.where(misses_A, best_A, particles.row_A),
                alive_A=torch.where(misses_A, index_A == ancestor_A, particles.alive_A),
                logw_A=torch.where(misses_A, lone_logw_A, particles.logw_A),
            ),
            # A row after a block that agrees as a whole keeps its own block, even if several blocks have the same
            # tokens.
            block_A=torch.where(misses_A if self.lookahead else is_exact_A, best_A, selected.block_A),
            bonus_A=torch.where(is_exact_A, torch.where(has_next_A, next_A, -1), selected.bonus_A),
            logp_A=torch.where(is_exact_A, torch.where(is_over_A, torch.nan, next_logp_A), selected.logp_A),
            misses_A=misses_A,
        )

    def _redrawn(self, selected: SelectedRows, collapsed_G: Tensor, right_A: Tensor) -> tuple[SelectedRows, Tensor]:
        """Let groups in which no particle has weight continue from a prefix of a block (`surviving_prefix`), followed
        by the token that the target draws after it: independent populations as copies of it, distinct ones as one row.
        Returns the rows, and the number of tokens that are kept of each block."""
        plan, blocks, verified = self.plan, self.blocks, self.verified
        lost_A = (collapsed_G & ~plan.is_exact_G & (plan.arrays.size_G > 0))[plan.arrays.group_A]
        if not lost_A.any():
            return selected, right_A
        step_AQ = plan.arrays.alpha_A[:, None] * verified.logp_AQ[:, :-1] - blocks.logq_AQ[:, 1:]
        logw_A = torch.where(blocks.alive_A, blocks.logw_A, -torch.inf)
        seed_G, round_G = map(to_host, plan.keys_G)
        uniform_G1 = uniforms(seed_G, round_G, np.array([PREFIX_POSITION]), Purpose.SELECTION)
        uniform_G = to_device(uniform_G1[:, 0], blocks.count_A.device)
        drawn_A, kept_A = surviving_prefix(step_AQ, blocks.count_A, logw_A, plan.arrays.groups, uniform_G)
        index_A = torch.arange(len(drawn_A), device=drawn_A.device)
        origin_A = blocks.origin_A[drawn_A]
        is_copy_A = index_A - plan.arrays.first_G[plan.arrays.group_A] < plan.arrays.next_count_G[plan.arrays.group_A]
        stays_A = torch.where(plan.is_decoded_by(*SEPARATE), is_copy_A, index_A == origin_A)
        is_over_A = blocks.ended_A[drawn_A] & (kept_A == blocks.count_A[drawn_A])
        next_A, next_logp_A = (
            values_AQ[drawn_A, kept_A - 1] for values_AQ in (verified.drawn_AQ, verified.drawn_logp_AQ)
        )
        redrawn = SelectedRows(
            particles=NextParticles(
                ancestor_A=origin_A,
                row_A=selected.particles.row_A if self.lookahead else drawn_A,
                alive_A=stays_A,
                logw_A=torch.where(stays_A, 0.0, -torch.inf).double(),
            ),
            block_A=drawn_A,
            bonus_A=torch.where(is_over_A, -1, next_A),
            logp_A=torch.where(is_over_A, torch.nan, next_logp_A),
            misses_A=lost_A,
        )
        return where(lost_A, redrawn, selected), torch.where(lost_A, kept_A, right_A)

    def _grown(self, selected: SelectedRows, kept_A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return whether each continuation has ended [A], the stop machine's state after the kept part of its block
        [A], and the number of drafted tokens that it takes [A]."""
        state, blocks, drafted = self.inputs.state, self.blocks, self.drafted
        slot_A = self.plan.arrays.slot_A[selected.particles.ancestor_A]
        entry_A, early_A = state.entry_S[slot_A], state.least_S[slot_A] - state.held(slot_A)
        text_A = grow(
            state.stops, entry_A, state.text_S[slot_A], blocks.tokens_AQ[selected.block_A], kept_A, early_A
        ).text_A
        room_A = state.limit_S[slot_A] - state.held(slot_A) - kept_A
        bonus = grow(state.stops, entry_A, text_A, selected.bonus_A[:, None], room_A, early_A - kept_A)
        over_A = blocks.ended_A[selected.block_A] & (kept_A == blocks.count_A[selected.block_A])
        taken_A, ended_A = kept_A - 1, over_A
        if self.lookahead:
            goes_on_A = ~selected.misses_A & ~over_A
            taken_A = torch.where(goes_on_A, drafted.count_X[selected.particles.row_A].long(), 0)
            ended_A = over_A | (goes_on_A & drafted.ended_X[selected.particles.row_A])
        return torch.where(selected.bonus_A >= 0, bonus.ends_A, ended_A), text_A, taken_A

    def _result(
        self,
        selected: SelectedRows,
        selection: RoundSelection[Tensor],
        statistics: SelectionStatistics[Tensor],
        kept_A: Tensor,
    ) -> RoundResult[Tensor]:
        plan, blocks, scored, has_bonus_A = self.plan, self.blocks, self.scored, selection.bonus_A >= 0
        row_A, bonus_A1 = selection.particles.row_A, selection.bonus_A.clamp(min=0)[:, None]
        if self.lookahead:
            grown_AQ = torch.where(has_bonus_A[:, None], bonus_A1, self.drafted.tokens_XK[row_A].long())
            logq_AQ = self.drafted.logq_XK[row_A]
        else:
            grown_AQ = blocks.tokens_AQ[selected.block_A].roll(-1, 1).scatter(1, (kept_A - 1)[:, None], bonus_A1)
            logq_AQ = torch.zeros_like(grown_AQ, dtype=torch.float32)
        column_Q = torch.arange(blocks.tokens_AQ.shape[1], device=kept_A.device)
        has_bonus_G = plan.any_of_group(has_bonus_A & selection.particles.alive_A)
        run_A = torch.minimum(self.verified.blocks.run_A[selected.block_A], kept_A)
        return RoundResult(
            selection=selection,
            grown_AQ=grown_AQ,
            logq_AQ=logq_AQ,
            logp_AQ=torch.where(column_Q < kept_A[:, None] - 1, self.verified.logp_AQ[selected.block_A], torch.nan),
            first_logp_A=selected.logp_A,
            raw_logp_AQ=logq_AQ[:, :0],
            statistics=statistics,
            draft_nan_G=scored.draft_nan_G,
            target_nan_G=scored.target_nan_G,
            hit_G=plan.is_exact_G & ~has_bonus_G,
            lineage=Lineage(plan.arrays.target_pages_AQ[selected.block_A], run_A.int(), torch.zeros_like(run_A).int()),
        )


def remap_draft(
    state: SlotState, plan: RoundPlan[Tensor], tree: TokenTree, selection: RoundSelection[Tensor], steps: int
) -> tuple[Lineage[Tensor], NextSequences]:
    """Remap the block tables to the chosen rows. The other new values of the slots are returned, because the present
    ones are still read. `steps`: tokens of a whole row."""
    slot_A, row_A = plan.arrays.slot_A, selection.particles.row_A
    ancestor_A, taken_A, cut_A = selection.particles.ancestor_A, selection.taken_A, selection.cut_A
    source_A = slot_A[ancestor_A]
    end_A, pending_A = state.end_S[source_A], state.pending_S[source_A]
    # A particle that had ended continues if its end is rolled back.
    open_A = ~state.ended_S[source_A] | (cut_A > 0)
    has_bonus_A = selection.bonus_A >= 0
    tail_AB = tree.tail_XB[row_A]
    path_AB = torch.cat((plan.arrays.begin_pages_AQ[ancestor_A], tail_AB), 1)
    left_A = end_A - cut_A
    remap_block_table(state.table_SL, slot_A, source_A, state.base_S[slot_A], left_A, tail_AB, plan.columns)
    # The last token of a whole row has not been run, and a token that ends an answer never is. The last token of a
    # shorter row has been run. It runs again, on a page of the next round, if no bonus token is pending.
    last_A = (taken_A == steps) | (~has_bonus_A & (taken_A > 0))
    run_A = taken_A - last_A.long()
    bonus_A, last_token_A = selection.bonus_A.clamp(min=0), tree.tokens_XK[row_A, (taken_A - 1).clamp(min=0)]
    tokens_A2 = torch.stack((torch.where(last_A, last_token_A, bonus_A), bonus_A), 1)
    unrun_A = torch.where(selection.ended_A, 1, last_A.long() + has_bonus_A.long())
    stays_A = (pending_A - cut_A).clamp(min=0)
    kept_A = torch.where(open_A, stays_A + run_A, 0)
    dropped_A = torch.where(open_A, (cut_A - pending_A).clamp(min=0), 0)
    return _lineage(plan, path_AB, stays_A, kept_A, dropped_A), NextSequences(
        end_A=left_A + taken_A + has_bonus_A.long(),
        tokens_AQ=tokens_A2[:, : state.pending_SQ.shape[1]],
        pending_A=unrun_A.clamp(min=1),
        text_A=torch.where(last_A, tree.before_X[row_A], selection.text_A),
    )


def _lineage(
    plan: RoundPlan[Tensor], path_AB: Tensor, stays_A: Tensor, kept_A: Tensor, dropped_A: Tensor
) -> Lineage[Tensor]:
    """Return the pages in order: those of a particle's pending tokens that stay, of which there may be fewer than
    columns, then those of its row."""
    column_B = torch.arange(path_AB.shape[1], device=path_AB.device)
    skipped_A1 = (plan.arrays.begin_pages_AQ.shape[1] - stays_A)[:, None]
    shifted_AB = torch.where(column_B < stays_A[:, None], column_B, column_B + skipped_A1)
    path_AB = path_AB.gather(1, shifted_AB.clamp(max=path_AB.shape[1] - 1))
    return Lineage(path_AB, kept_A.int(), dropped_A.int())


def remap_target(
    state: SlotState,
    logq_SQ: Tensor,
    plan: RoundPlan[Tensor],
    drafted: DraftedRows,
    selection: RoundSelection[Tensor],
    lookahead: bool,
) -> NextSequences:
    """Remap the block tables, and log q of the pending tokens, to the selection. The other new values of the slots are
    returned, because the present ones are still read."""
    slot_A, source_A = plan.arrays.slot_A, plan.arrays.slot_A[selection.particles.ancestor_A]
    block_A = selection.particles.ancestor_A if lookahead else selection.particles.row_A
    has_bonus_A = selection.bonus_A >= 0
    remap_block_table(
        state.table_SL,
        slot_A,
        source_A,
        state.base_S[slot_A],
        state.held(source_A),
        plan.arrays.target_pages_AQ[block_A],
        plan.columns,
    )
    end_A = state.end_S[source_A] - selection.cut_A + selection.taken_A + has_bonus_A.long()
    bonus_A1 = selection.bonus_A.clamp(min=0)[:, None]
    if lookahead:
        tokens_AQ = torch.where(has_bonus_A[:, None], bonus_A1, drafted.tokens_XK[selection.particles.row_A].long())
        logq_AQ, count_A = drafted.logq_XK[selection.particles.row_A], torch.where(has_bonus_A, 1, selection.taken_A)
    else:
        tokens_AQ, logq_AQ, count_A = bonus_A1, torch.zeros_like(bonus_A1, dtype=torch.float32), torch.ones_like(end_A)
    logq_SQ[slot_A, : logq_AQ.shape[1]] = logq_AQ
    # A particle that had ended keeps its last token, which is neither run nor scored again.
    return NextSequences(end_A, tokens_AQ, count_A.clamp(min=1), selection.text_A)


def remap_block_table(
    table_SL: Tensor,
    slot_A: Tensor,
    source_A: Tensor,
    base_A: Tensor,
    end_A: Tensor,
    tail_AB: Tensor,
    columns: int,
) -> None:
    """Replace the pages of the slots' positions from `base` up to `end` by those of `source`, and enter `tail` as the
    pages from `end` on. Positions below `base` already have the same pages; only the Triton form leaves them out.

    A slot that others copy from copies from itself, so no page that is read is overwritten. `columns`: maximum number
    of positions that any row holds, including `tail`."""
    table_SL[slot_A, :columns] = table_SL[source_A, :columns]
    column_AB = end_A[:, None] + torch.arange(tail_AB.shape[1], device=table_SL.device)
    table_SL[slot_A[:, None], column_AB] = tail_AB


def advance(state: SlotState, slot_A: Tensor, selection: RoundSelection[Tensor], next_: NextSequences) -> None:
    """Write the new state of the slots."""
    state.end_S[slot_A] = next_.end_A
    state.pending_SQ[slot_A, : next_.tokens_AQ.shape[1]] = next_.tokens_AQ
    state.pending_S[slot_A] = next_.pending_A
    state.text_S[slot_A] = next_.text_A
    state.ended_S[slot_A], state.alive_S[slot_A] = selection.ended_A, selection.particles.alive_A
    state.logw_S[slot_A] = selection.particles.logw_A
    # Padding has written to the dummy slot, too; it must stay ended, and short.
    state.alive_S[state.dummy :].fill_(False)
    state.logw_S[state.dummy :].fill_(0.0)
    state.ended_S[state.dummy :].fill_(True)
    state.end_S[state.dummy :].fill_(1)
    state.pending_S[state.dummy :].fill_(1)


class SelectOps:
    """Operations of this stage that have Triton forms, in torch."""

    match_samples = staticmethod(match_samples)
    score_rows = staticmethod(score_rows)
    select = staticmethod(select)
    expand = staticmethod(expand)
    assign_rows = staticmethod(assign_rows)
    apply_selection = staticmethod(apply_selection)
