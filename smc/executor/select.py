"""The select stage of a round: computes the candidates' mass from the target's outputs, so that groups can select
among them (`smc.algorithm`). This is the torch form; the Triton form is `smc.kernels.select`. The stage ends with
`smc.executor.apply_selection`.

In look-ahead, candidates are the rows that the draft grew while the target scored the blocks before them. In lockstep
they are the blocks themselves, each followed by a token of the target. In exact decoding, candidates that do not follow
the target's own draws are left out."""

from __future__ import annotations

import torch
from torch import Tensor

from smc.algorithm.expansion import CandidateTokens, SourceRows
from smc.algorithm.resampling import Spans, block_log_weight
from smc.algorithm.verification import Matches
from smc.executor.sampling import Sampling
from smc.philox import Purpose
from smc.round.draws import DrawKeys
from smc.round.plan import RoundPlan
from smc.round.tensors import Candidates, DraftedRows, ScoreInputs, TargetOutputs, VerifyOutputs
from smc.types import Decoding

LEAST_SHARE = 0.1
"""Distinct particles of less than this share of the mean weight are kept with a probability that is proportional to
their weight: an answer waits for all of its particles."""


def target_outputs(
    sampling: Sampling, plan: RoundPlan[Tensor], scored: VerifyOutputs, drafted: DraftedRows, lookahead: bool
) -> TargetOutputs:
    """Compute the target's outputs that a selection depends on."""
    if plan.kind.all_exact:
        # The target's own draws decide.
        return TargetOutputs()
    next_AV, mass_A = scored.next_AV, scored.next_mass_A
    assert next_AV is not None, "kept unless all are decoded exactly"
    if lookahead:
        logp_X = sampling.score(next_AV, plan.target_distribution, drafted.tokens_XK[:, 0], drafted.root_X)
        return TargetOutputs(logp_X if mass_A is None else logp_X + mass_A[drafted.root_X])
    target, blocks = TargetOutputs(), scored.blocks

    def keys(stream_A: Tensor) -> DrawKeys:
        return DrawKeys(plan.arrays.seed_A, plan.arrays.round_A, stream_A[:, None], blocks.position_A, Purpose.TARGET)

    if plan.kind.has_separate:
        bonus_A1, logp_A1, log_z_A = sampling.bonus(next_AV, plan.target_distribution, keys(blocks.stream_A))
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


def score_candidates(inputs: ScoreInputs) -> Candidates:
    """Return the candidates and their mass."""
    return CandidateScorer(inputs).candidates()


class CandidateScorer:
    """Scores the candidates of one round."""

    def __init__(self, inputs: ScoreInputs) -> None:
        self.inputs, self.plan, self.scored, self.drafted = inputs, inputs.plan, inputs.scored, inputs.drafted
        self.holder_X = self.plan.index_of_rows(inputs.width)
        """Batch index that holds each row, F of them. The row's root, whose particle it continues, may be another one
        of the group."""
        self.group_X = self.plan.arrays.group_A[self.holder_X]

    def candidates(self) -> Candidates:
        plan, lookahead = self.plan, self.inputs.lookahead
        mass_X, there_X, nan_2X = self._rows_ahead() if lookahead else self._blocks_with_bonus()
        nan_2G = self._of_group(nan_2X)
        nan_2G[1] |= self._of_group(self._nan_of_blocks()[None])[0]
        if plan.kind.has_exact:
            mass_X, there_X, nan_2G = self._matching(mass_X, there_X, nan_2G)
        mass_X = mass_X.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        candidate_tokens = self.inputs.target.candidate_tokens
        if candidate_tokens is None:
            candidate_tokens = CandidateTokens.whole(mass_X)
        else:
            candidate_tokens = candidate_tokens.mask_ended(~self.scored.blocks.open_A | plan.is_exact_A)
        width = self.inputs.width
        return Candidates(
            root_X=self.drafted.root_X.long() if lookahead else self.scored.blocks.origin_A,
            source=SourceRows(
                candidates=candidate_tokens,
                mass_R=mass_X,
                there_R=there_X,
                groups=Spans(plan.arrays.first_G * width, plan.arrays.size_G * width),
            ),
            alive_A=self.inputs.state.alive_S[plan.arrays.slot_A],
            target_nan_G=nan_2G[0],
            draft_nan_G=nan_2G[1],
            own_size_G=torch.where(plan.is_separate_G, plan.arrays.size_G, 0),
            keys_G=plan.keys_G,
        )

    def _rows_ahead(self) -> tuple[Tensor, Tensor, Tensor]:
        """Score the rows that were drafted while the blocks were scored (look-ahead). A row's mass is the product of
        its block's weight, its share of its root, and the target/draft ratio of its first token. Returns log masses
        [X], which rows exist [X], and NaN of target and draft [2, X]."""
        scored, drafted, root_X, open_X = self.scored, self.drafted, self.drafted.root_X, self.inputs.open_X
        logq_X = drafted.logq_XK[:, 0]
        logp_X = torch.zeros_like(logq_X) if self.inputs.target.logp_X is None else self.inputs.target.logp_X
        next_X = torch.where(open_X, self.plan.arrays.alpha_A[root_X] * logp_X - logq_X, 0.0)
        target_nan_X = (open_X & torch.isnan(logp_X)) | scored.nan_A[self.holder_X]
        return (
            self._weight_of_blocks()[root_X] + next_X + drafted.share_X.double(),
            scored.blocks.alive_A[root_X] & (drafted.share_X > -torch.inf),
            torch.stack((target_nan_X, open_X & torch.isnan(logq_X))),
        )

    def _blocks_with_bonus(self) -> tuple[Tensor, Tensor, Tensor]:
        """Score the blocks themselves with the target's normaliser after them (lockstep). Returns the same as
        `_rows_ahead`."""
        scored, weight_A = self.scored, self._weight_of_blocks()
        log_z_A = self.inputs.target.log_z_A
        log_z_A = torch.zeros_like(weight_A) if log_z_A is None else torch.where(scored.blocks.open_A, log_z_A, 0.0)
        nan_A = scored.nan_A | torch.isnan(log_z_A)
        return weight_A + log_z_A, scored.blocks.alive_A, torch.stack((nan_A, torch.zeros_like(nan_A)))

    def _matching(self, mass_X: Tensor, there_X: Tensor, nan_2G: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keep, in groups that are decoded exactly, only the candidates that follow the target's own draws: in lockstep
        the block that agrees longest; in look-ahead the rows that begin where it ceases to agree, with the token that
        the target draws there."""
        plan, scored, holder_X = self.plan, self.scored, self.holder_X
        assert self.inputs.matched is not None, "groups that are decoded exactly"
        best_A, right_A = self.inputs.matched
        is_exact_X = plan.is_exact_A[holder_X]
        agrees_X = holder_X == best_A[holder_X]
        if self.inputs.lookahead:
            root_X = self.drafted.root_X
            next_A = scored.drawn_AQ[best_A, right_A - 1]
            matches_X = self.drafted.tokens_XK[:, 0] == next_A[holder_X]
            cut_X = self.drafted.cut_X
            agrees_X = (
                self._agrees_up_to(cut_X, self.inputs.matched)
                & matches_X
                & (scored.blocks.open_A[root_X] | (cut_X > 0))
            )
        # The draft's outputs do not change exact answers, even if they are NaN, and neither do the target's outputs
        # after wrong tokens.
        column_Q = torch.arange(scored.nan_AQ.shape[1], device=holder_X.device)
        nan_A = (scored.nan_AQ[best_A] & (column_Q < right_A[:, None])).any(-1)
        is_exact_G = plan.is_exact_G
        target_nan_G = torch.where(is_exact_G, plan.any_of_group(nan_A), nan_2G[0])
        share_X = self.drafted.share_X.double().nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
        return (
            torch.where(is_exact_X, share_X, mass_X),
            there_X & (agrees_X | ~is_exact_X),
            torch.stack((target_nan_G, nan_2G[1] & ~is_exact_G)),
        )

    def _agrees_up_to(self, cut_X: Tensor, matched: Matches) -> Tensor:
        """Return bool [X]: the block that a row continues, without its last `cut` tokens, is exactly the prefix that
        agrees with the target's draws. Among chains this may hold for several blocks with the same tokens."""
        blocks, root_X, (best_A, right_A) = self.scored.blocks, self.drafted.root_X, matched
        best_X, right_X = best_A[self.holder_X], right_A[self.holder_X]
        column_Q = torch.arange(blocks.tokens_AQ.shape[1], device=best_A.device)
        is_same_XQ = blocks.tokens_AQ[root_X] == blocks.tokens_AQ[best_X]
        same_X = (is_same_XQ | (column_Q >= right_X[:, None])).all(-1)
        return same_X & blocks.alive_A[root_X] & (blocks.count_A[root_X] - cut_X == right_X)

    def _weight_of_blocks(self) -> Tensor:
        blocks = self.scored.blocks
        return blocks.logw_A + block_log_weight(
            self.scored.logp_AQ[:, :-1], blocks.logq_AQ[:, 1:], blocks.count_A - 1, self.plan.arrays.alpha_A
        )

    def _nan_of_blocks(self) -> Tensor:
        """Return bool [X]: the draft returned NaN in the block of the row's batch index."""
        blocks = self.scored.blocks
        exists_AQ = torch.arange(blocks.logq_AQ.shape[1], device=self.holder_X.device) < blocks.count_A[:, None]
        nan_X = (torch.isnan(blocks.logq_AQ) & exists_AQ).any(-1)[self.holder_X]
        if Decoding.DISTINCT in self.plan.kind.decodings:
            # Other rows have replaced those with NaN; the draft has marked them by a log q of NaN.
            nan_X = nan_X | (
                torch.isnan(self.drafted.logq_XK).any(-1) & self.plan.is_decoded_by(Decoding.DISTINCT)[self.holder_X]
            )
        return nan_X

    def _of_group(self, masks: Tensor) -> Tensor:
        """Return whether masks hold anywhere in a group, bool [N, G]."""
        return self.plan.any_of_groups(masks, self.group_X)
