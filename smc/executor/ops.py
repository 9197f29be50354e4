"""Operations of a round on a device: the interface `RoundOps`, with one method for each operation, and `TorchOps`, the
reference in plain torch, which CPUs run. GPUs run `smc.executor.triton_ops`. Both give the same results: tests compare
them, operation by operation. See the package's legend for axes."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from smc.algorithm.expansion import CandidateTokens, Expansion, expand, keep_roots
from smc.algorithm.resampling import Bounds
from smc.algorithm.selection import Selection, select
from smc.algorithm.verification import match_samples
from smc.attention.backend import ForwardBatch
from smc.distributions import DistributionSpec
from smc.executor import draft
from smc.executor.draft import Continuation, DraftInputs, DraftShape, GrownRows, ResumedSequences, TokenTree, reparent
from smc.executor.draft_tree import InnerNodes, choose_rows, keep_nodes, limit_outcomes, with_inner_nodes
from smc.executor.finalize import Finalized, finalize
from smc.executor.forward import Reader, StaticForward, run_prompt
from smc.executor.graph_runner import StageRunner
from smc.executor.masks import apply_mask
from smc.executor.messages import DraftedRows, RoundChoice
from smc.executor.plan import RoundPlan
from smc.executor.remap import Followed, advance, follow, remap_block_table
from smc.executor.sampling import Coupling, HeadSampling, Sampling
from smc.executor.select import Candidates, ScoreInputs, SelectedTrees, score_candidates
from smc.executor.state import BiasTables, SlotEntries, SlotState, add_biases
from smc.executor.verify import TargetDraws, VerifyInputs, VerifyOutputs, lay_out, verify, verify_chains
from smc.model.draft_vocab import DraftVocab

Groups = tuple[Tensor, Tensor]
"""First entry of each group and number of its entries, integers [G] each."""


class RoundOps(Protocol):
    """The operations of a round."""

    # Running models.

    def stage_runner(self, device: torch.device) -> StageRunner:
        """Return the runner of stages on a device: it runs them directly or as CUDA graphs."""
        ...

    def forward(self, reader: Reader) -> StaticForward:
        """Return the forward pass of few packed rows through a model."""
        ...

    def run_prompt(self, reader: Reader, tokens_T: Tensor, batch: ForwardBatch, output_X: Tensor) -> Tensor:
        """Run rows of prompts through a model. Returns hidden states [X, E] of the tokens at index `output`; keys and
        values of all tokens are stored."""
        ...

    # Logits and draws.

    def sampling(self, vocab: int) -> Sampling:
        """Return the sampling from logits whose first `vocab` columns are tokens."""
        ...

    def head_sampling(self, vocab: DraftVocab, device: torch.device) -> HeadSampling:
        """Return the sampling from the logits of a draft whose head covers only part of the vocabulary."""
        ...

    def add_biases(
        self,
        tables: BiasTables,
        entries: SlotEntries,
        logits_RV: Tensor,
        slot_X: Tensor,
        position_R: Tensor,
        width: int,
    ) -> Tensor:
        """See `smc.executor.state.add_biases`."""
        ...

    def apply_mask(
        self, logits_RV: Tensor, mask_RW: Tensor, columns: int, ids_M: Tensor | None = None, *, fails: bool = True
    ) -> Tensor:
        """See `smc.executor.masks.apply_mask`."""
        ...

    # Draft.

    def begin_draft(
        self, state: SlotState, plan: RoundPlan[Tensor], distribution: DistributionSpec[Tensor], shape: DraftShape
    ) -> DraftInputs:
        """See `smc.executor.draft.begin`."""
        ...

    def expand(
        self,
        candidates: CandidateTokens,
        mass_R: Tensor,
        there_R: Tensor,
        sources: Groups,
        rows: Groups,
        most_G: Tensor,
        kind_G: Tensor,
        keys: tuple[Tensor, Tensor, int],
        total: int,
        least: float = 0.0,
        ended_R: Tensor | None = None,
        has_rest: bool = False,
    ) -> Expansion:
        """See `smc.algorithm.expansion.expand`."""
        ...

    def reparent(
        self,
        tree: TokenTree,
        more: Continuation,
        plan: RoundPlan[Tensor],
        state: SlotState,
        *,
        step: int,
        branches: int,
    ) -> TokenTree:
        """See `smc.executor.draft.reparent`."""
        ...

    def choose_rows(self, plan: RoundPlan[Tensor], grown: GrownRows, lookahead: bool) -> GrownRows:
        """See `smc.executor.draft_tree.choose_rows`."""
        ...

    def keep_nodes(
        self,
        nodes: InnerNodes,
        state: SlotState,
        plan: RoundPlan[Tensor],
        grown: GrownRows,
        choice: RoundChoice,
    ) -> None:
        """See `smc.executor.draft_tree.keep_nodes`."""
        ...

    def limit_outcomes(
        self, plan: RoundPlan[Tensor], tree: TokenTree, candidates: CandidateTokens, has_rest: bool
    ) -> CandidateTokens:
        """See `smc.executor.draft_tree.limit_outcomes`."""
        ...

    def with_inner_nodes(
        self, nodes: InnerNodes, plan: RoundPlan[Tensor], tree: TokenTree, candidates: CandidateTokens
    ) -> tuple[CandidateTokens, TokenTree, Groups]:
        """See `smc.executor.draft_tree.with_inner_nodes`."""
        ...

    def pack_rows(self, state: SlotState, plan: RoundPlan[Tensor], tree: TokenTree) -> DraftedRows:
        """See `smc.executor.draft.pack`."""
        ...

    def observe_draws(
        self,
        state: SlotState,
        plan: RoundPlan[Tensor],
        tree: TokenTree,
        choice: RoundChoice,
        kept_BV: Tensor,
        coupling: Coupling,
    ) -> Tensor:
        """See `smc.executor.draft.observe_draws`."""
        ...

    def resume_draft(
        self, state: SlotState, plan: RoundPlan[Tensor], tree: TokenTree, choice: RoundChoice, steps: int
    ) -> ResumedSequences:
        """See `smc.executor.draft.resume`."""
        ...

    # Verify.

    def lay_out_blocks(
        self, state: SlotState, logq_SQ: Tensor, plan: RoundPlan[Tensor], drafted: DraftedRows | None
    ) -> VerifyInputs:
        """See `smc.executor.verify.lay_out`."""
        ...

    def verify(
        self,
        inputs: VerifyInputs,
        plan: RoundPlan[Tensor],
        labelled_T: Tensor | None,
        drawn: TargetDraws | None,
        next_AV: Tensor | None,
    ) -> VerifyOutputs:
        """See `smc.executor.verify.verify`."""
        ...

    def verify_chains(
        self, plan: RoundPlan[Tensor], inputs: VerifyInputs, logp_CQV: Tensor, logq_CLV: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `smc.executor.verify.verify_chains`."""
        ...

    def match_samples(
        self, tokens_AQ: Tensor, count_A: Tensor, drawn_AQ: Tensor, alive_A: Tensor, groups: Groups
    ) -> tuple[Tensor, Tensor]:
        """See `smc.algorithm.verification.match_samples`."""
        ...

    # Select and finalize.

    def score_candidates(self, inputs: ScoreInputs) -> Candidates:
        """See `smc.executor.select.score_candidates`."""
        ...

    def select(
        self,
        candidates_AF: Tensor,
        alive_A: Tensor,
        groups: Bounds,
        threshold_G: Tensor,
        scheme_G: Tensor,
        seed_G: Tensor,
        round_G: Tensor,
    ) -> Selection:
        """See `smc.algorithm.selection.select`."""
        ...

    def keep_roots(
        self, root_R: Tensor, parent_X: Tensor, alive_X: Tensor, rows: Groups, indices: Groups, total: int
    ) -> tuple[Tensor, Tensor]:
        """See `smc.algorithm.expansion.keep_roots`."""
        ...

    def finalize(
        self, inputs: ScoreInputs, candidates: Candidates, own: Selection | None, trees: SelectedTrees | None
    ) -> Finalized:
        """See `smc.executor.finalize.finalize`."""
        ...

    # Remap.

    def follow(
        self,
        state: SlotState,
        logq_SQ: Tensor,
        plan: RoundPlan[Tensor],
        drafted: DraftedRows,
        choice: RoundChoice,
        lookahead: bool,
    ) -> Followed:
        """See `smc.executor.remap.follow`."""
        ...

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
        """See `smc.executor.remap.advance`."""
        ...

    def remap_block_table(
        self,
        table_SL: Tensor,
        slot_A: Tensor,
        source_A: Tensor,
        base_A: Tensor,
        end_A: Tensor,
        tail_AB: Tensor,
        columns: int,
    ) -> None:
        """See `smc.executor.remap.remap_block_table`."""
        ...


class TorchOps(RoundOps):
    """The reference, in plain torch."""

    def stage_runner(self, device: torch.device) -> StageRunner:
        return StageRunner(device)

    def forward(self, reader: Reader) -> StaticForward:
        return StaticForward(reader.model, reader.pool, reader.rope)

    def sampling(self, vocab: int) -> Sampling:
        return Sampling(vocab)

    def head_sampling(self, vocab: DraftVocab, device: torch.device) -> HeadSampling:
        return HeadSampling(self.sampling(len(vocab.ids_M)), vocab, device)

    run_prompt = staticmethod(run_prompt)
    add_biases = staticmethod(add_biases)
    apply_mask = staticmethod(apply_mask)
    begin_draft = staticmethod(draft.begin)
    expand = staticmethod(expand)
    reparent = staticmethod(reparent)
    choose_rows = staticmethod(choose_rows)
    keep_nodes = staticmethod(keep_nodes)
    limit_outcomes = staticmethod(limit_outcomes)
    with_inner_nodes = staticmethod(with_inner_nodes)
    pack_rows = staticmethod(draft.pack)
    observe_draws = staticmethod(draft.observe_draws)
    resume_draft = staticmethod(draft.resume)
    lay_out_blocks = staticmethod(lay_out)
    verify = staticmethod(verify)
    verify_chains = staticmethod(verify_chains)
    match_samples = staticmethod(match_samples)
    score_candidates = staticmethod(score_candidates)
    select = staticmethod(select)
    keep_roots = staticmethod(keep_roots)
    finalize = staticmethod(finalize)
    follow = staticmethod(follow)
    advance = staticmethod(advance)
    remap_block_table = staticmethod(remap_block_table)
