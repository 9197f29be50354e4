"""The draft stage of a round: rows of K tokens grow for every group, and afterwards the chosen rows become the
particles. `DraftStage` runs the model; the functions below it are its operations in torch, `smc.kernels.draft` has them
in Triton. Knows nothing about the target.

Rows grow step by step: each of a round's X = F A rows continues a row of the step before by one token. An independent
row continues itself. The rows of other groups (`smc.algorithm.expansion`) are reparented, which permutes page numbers
and moves no keys: every row has its own page for each step, named by the plan. Rows of chains continue themselves, too
(`smc.executor.chains`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from smc.algorithm.coupling import Coupling, is_ranked, score_of_exponent
from smc.algorithm.expansion import SourceRows, expand
from smc.algorithm.resampling import Spans
from smc.arrays import PackedFields
from smc.distributions import DistributionSpec
from smc.executor.chains import DraftedChains, assign_chains
from smc.executor.draft_tree import limit_outcomes, prune_tree, store_inner_nodes, with_inner_nodes
from smc.executor.guidance import GuidedPass, PassLogits
from smc.executor.logit_changes import add_biases
from smc.executor.masks import apply_mask
from smc.executor.redraft import RedraftStart, known_step, plan_again, selected_again
from smc.executor.remap import advance, remap_draft
from smc.executor.sampling import HeadSampling, Sampling
from smc.philox import STREAMS_PER_PARTICLE, DrawKeys, Purpose, RoundKeys
from smc.round.plan import RoundPlan
from smc.round.slot_state import (
    BiasTables,
    InnerNodes,
    RoundSelection,
    SlotState,
)
from smc.round.tensors import (
    CandidateLayout,
    ChosenTokens,
    Continuation,
    DraftedRows,
    DraftInputs,
    DraftReport,
    DraftStep,
    GrownRows,
    LastTokens,
    ObservedDraws,
    OwnDraws,
    RowGroups,
    Rows,
    RowSpans,
    RowTables,
    TokenTree,
)
from smc.stops import grow
from smc.types import SEPARATE, Decoding


class GrownStep(NamedTuple):
    """Rows after a step of the draft."""

    tree: TokenTree
    last: LastTokens
    """The pass over the last tokens."""
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
    ops: DraftOps
    biases: BiasTables
    """Biases of these logits."""
    block: int
    """K: tokens of a row."""
    by_round: bool
    """Random numbers are keyed by the round and the position; otherwise by the position alone."""
    mixture: float
    """Share of the untruncated distribution in the proposal."""
    nan: Tensor
    """float32 [1] NaN, for reports without seen draws; allocated once, which saves a launch."""
    purpose: Purpose = Purpose.PROPOSAL
    kept_RV: Tensor | None = None
    """Buffer for log q after the first R roots of exact decoding, with which the target's draws are compared. None: the
    drafter has no target."""
    inner_nodes: InnerNodes | None = None
    """Inner nodes of the blocks in flight, at which rows ahead may begin. None: there are no rows ahead."""
    chains: DraftedChains | None = None
    """None: the drafter has no chains."""

    def draft(
        self, plan: RoundPlan[Tensor], distribution: DistributionSpec[Tensor]
    ) -> tuple[PackedFields[DraftedRows], GrownRows]:
        """Run the pending tokens of every particle, then extend rows by K tokens or by the plan's `steps`."""
        inputs = self.begin(plan, distribution)
        first = self.extend(plan, inputs, self.run_pending(plan, inputs), 0)
        return self.finish(plan, inputs, (first,))

    def begin(self, plan: RoundPlan[Tensor], distribution: DistributionSpec[Tensor]) -> DraftInputs:
        """Lay out the particles and their chains, before the first step."""
        inputs = self.ops.begin_draft(self.state, plan, distribution, self.block, self.by_round)
        self.run.begin(plan, plan.arrays.begin_pages_AQ, plan.arrays.branch_pages_XB.view(len(plan.arrays.slot_A), -1))
        if Decoding.REJECTION not in plan.kind.decodings:
            return inputs
        return inputs._replace(chains=assign_chains(plan, inputs.tree.alive_X))

    def run_pending(self, plan: RoundPlan[Tensor], inputs: DraftInputs) -> PassLogits:
        """Return logits [A, V] after the pending tokens of every particle."""
        last_A = inputs.last_A if inputs.rows.queries > 1 else None
        return self.run(plan, inputs.tokens_AQ.flatten(), inputs.rows, last_A)

    def run_rows(self, plan: RoundPlan[Tensor], inputs: DraftInputs, grown: GrownStep) -> PassLogits:
        """Return logits [X, V] after the last tokens of rows."""
        tree, last = grown.tree, grown.last
        rows = Rows(
            RowTables(self.state.table_SL, last.slot_X, tree.tail_XB, last.tail_X),
            RowSpans(last.start_X, last.count_X),
            RowGroups(inputs.later.group_R, *inputs.later.rows, plan.arrays.shared_G),
            queries=1,
            contexts=plan.kind.contexts,
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
            slot_R = plan.arrays.slot_A if before is None else before.last.slot_X
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
        continued = tree
        if plan.kind.has_separate:
            keys = DrawKeys(*layout.keys_R, layout.stream_RF, tree.next_X, self.purpose)
            own = OwnDraws(*self.sampling.propose(logits_RV, layout.distribution, self.mixture, keys))
        if raw_RV is not None:
            assert own is not None and isinstance(self.sampling, Sampling), "a target that decodes alone"
            raw_logp_X = self.sampling.raw_score(raw_RV, own.token_RF[:, 0])
        if plan.kind.decodings - SEPARATE - {Decoding.REJECTION}:
            chosen, continued = self._expanded(plan, layout, logits_RV, tree, step)
        if inputs.chains is not None and self.chains is not None:
            width = len(continued.root_X) // len(tree.root_X)
            chains = self.chains.draw(self.sampling, plan, layout, logits_RV, tree, step, inputs.chains, width)
        more = Continuation(chosen, own, chains)
        grown, last = self.ops.reparent(continued, more, plan, self.state, step=step)
        kept = None if chosen is None else DraftStep(grown, chosen.expansion.parent_X, chosen.candidates)
        return GrownStep(grown, last, kept, raw_logp_X)

    def finish(
        self, plan: RoundPlan[Tensor], inputs: DraftInputs, grown: tuple[GrownStep, ...]
    ) -> tuple[PackedFields[DraftedRows], GrownRows]:
        """Run the remaining steps. Returns the message to the target and the rows."""
        steps = list(grown)
        for step in range(len(grown), plan.kind.steps or self.block):
            steps.append(self.extend(plan, inputs, self.run_rows(plan, inputs, steps[-1]), step, steps[-1]))
        tree, kept = steps[-1].tree, []
        if Decoding.WALK in plan.kind.decodings:
            kept = [step.kept for step in steps if step.kept]
        raw_logp = [step.raw_logp_X for step in steps if step.raw_logp_X is not None]
        rows = GrownRows(tree, tuple(kept), raw_logp_XK=torch.stack(raw_logp, 1) if raw_logp else None)
        if kept:
            rows = self.ops.prune_tree(plan, rows, self.inner_nodes is not None)
        return self.ops.pack_rows(self.state, plan, rows.tree), rows

    def redraft(self, plan: RoundPlan[Tensor], start: RedraftStart) -> tuple[()]:
        """Draft again after a miss, and make the rows the particles. Writes the message and the lineage of `start`."""
        assert self.inner_nodes is not None, "a drafter of look-ahead"
        state, again = self.state, plan_again(plan, start)
        inputs = self.begin(again, again.draft_distribution)
        first, last = known_step(state, again, inputs, start.root_A)
        _, grown = self.finish(again, inputs, (GrownStep(first.tree, last, first),))
        rows = self.ops.pack_rows(state, again, grown.tree).fields
        is_again_A = start.slot_A != state.dummy
        start.message.write(rows._replace(count_X=torch.where(is_again_A, rows.count_X, 0)))
        selection = selected_again(state, again, start.message.fields)
        self.ops.store_inner_nodes(self.inner_nodes, state, again, grown, selection)
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
        if self.inner_nodes is not None and grown.steps:
            self.ops.store_inner_nodes(self.inner_nodes, self.state, plan, grown, selection)
        self.run.remap(plan, selection.particles.ancestor_A, tree.tail_XB, selection.particles.row_A, pending=True)
        lineage, next_ = self.ops.remap_draft(self.state, plan, tree, selection, plan.kind.steps or self.block)
        self.ops.advance(self.state, plan.arrays.slot_A, selection, next_)
        return DraftReport(lineage, observed)

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
        if self.inner_nodes is not None and coupling is not None:
            if step == 0:
                candidate_tokens, tree, sources = self.ops.with_inner_nodes(
                    self.inner_nodes, plan, tree, candidate_tokens
                )
                useful = candidate_tokens
            elif plan.kind.branches > 1:
                useful = self.ops.limit_outcomes(plan, tree, candidate_tokens, has_rest)
        source = SourceRows(useful, tree.mass_X, tree.alive_X, sources, tree.ended_X)
        rows, total = layout.rows, len(plan.arrays.branch_pages_XB)
        given = (source, rows, rows.size_G, plan.arrays.decoding_G, layout.keys_G, step, total)
        chosen = self.ops.expand(*given, has_rest=has_rest)
        return ChosenTokens(chosen, candidate_tokens), tree


def begin_draft(
    state: SlotState, plan: RoundPlan[Tensor], distribution: DistributionSpec[Tensor], block: int, by_round: bool
) -> DraftInputs:
    """Return the particles as inputs of the draft, and enter the pages of their pending tokens into the block
    tables."""
    slot_A, pages_AQ = plan.arrays.slot_A, plan.arrays.begin_pages_AQ
    queries = pages_AQ.shape[1]
    pending_A, ended_A = state.pending_S[slot_A], state.ended_S[slot_A]
    held_A = state.held(slot_A)
    # Entries past the pending tokens are overwritten later.
    state.table_SL[slot_A[:, None], held_A[:, None] + torch.arange(queries, device=state.device)] = pages_AQ
    tokens_AQ = state.pending_SQ[slot_A, :queries]
    index_A = plan.index_of_rows(1)
    zero_A = torch.zeros_like(index_A)
    # Pending tokens are known not to end the answer.
    text_A = grow(
        state.stops, state.entry_S[slot_A], state.text_S[slot_A], tokens_AQ, pending_A, state.least_S[slot_A] - held_A
    ).text_A
    rows = Rows(
        RowTables(state.table_SL, slot_A.int()),
        RowSpans(held_A.int(), torch.where(ended_A, 0, pending_A).int()),
        RowGroups(plan.arrays.group_A.int(), *plan.arrays.groups, plan.arrays.shared_G),
        queries=queries,
        contexts=plan.kind.contexts,
    )
    tree = TokenTree(
        root_X=index_A,
        tokens_XK=zero_A[:, None].expand(-1, block),
        logq_XK=zero_A[:, None].expand(-1, block).float(),
        tail_XB=plan.arrays.branch_pages_XB[:: plan.kind.branches],
        count_X=zero_A,
        alive_X=state.alive_S[slot_A],
        ended_X=ended_A,
        before_X=text_A,
        text_X=text_A,
        mass_X=state.logw_S[slot_A],
        last_X=zero_A,
        next_X=state.end_S[slot_A],
        cut_X=zero_A,
        outcome_X=zero_A,
    )
    first, later = (_candidate_layout(plan, distribution, by_round, width) for width in (1, plan.kind.branches))
    return DraftInputs(tokens_AQ, rows, index_A * queries + pending_A - 1, tree, first, later)


def _candidate_layout(
    plan: RoundPlan[Tensor], distribution: DistributionSpec[Tensor], by_round: bool, width: int
) -> CandidateLayout:
    """Return the layout of `width` rows for each batch index."""
    index_R, f = plan.index_of_rows(width), plan.kind.branches
    group_R = plan.arrays.group_A[index_R]
    rank_R = torch.arange(len(index_R), device=index_R.device) - plan.arrays.first_G[group_R] * width
    stream_AF = plan.arrays.particle_A[:, None] * STREAMS_PER_PARTICLE + torch.arange(f, device=index_R.device)
    round_R = plan.arrays.round_A[index_R]
    return CandidateLayout(
        group_R=group_R.int(),
        sources=Spans(plan.arrays.first_G * width, plan.arrays.size_G * width),
        rows=Spans(plan.arrays.first_G * f, plan.arrays.size_G * f),
        rank_R1=rank_R[:, None],
        stream_RF=stream_AF.view(len(index_R), -1),
        keys_R=RoundKeys(plan.arrays.seed_A[index_R], round_R if by_round else torch.zeros_like(round_R)),
        keys_G=plan.keys_G,
        distribution=distribution.take(index_R),
    )


def reparent(
    tree: TokenTree, more: Continuation, plan: RoundPlan[Tensor], state: SlotState, *, step: int
) -> tuple[TokenTree, LastTokens]:
    """Extend the rows by their next token, and return them with the pass over these tokens. The first step (0) makes F
    rows for each batch index. This is the reference: `smc.kernels.draft.reparent` does the same in one launch."""
    parent_X, token_X, logq_X, mass_X = _continued(tree, more, plan)
    root_X, ended_X, text_X, count_X, cut_X = (
        values_R[parent_X] for values_R in (tree.root_X, tree.ended_X, tree.text_X, tree.count_X, tree.cut_X)
    )
    slot_X = plan.arrays.slot_A[root_X]
    end_X = state.end_S[slot_X] - cut_X
    room_X = state.limit_S[slot_X] - end_X - count_X
    growth = grow(
        state.stops, state.entry_S[slot_X], text_X, token_X[:, None], room_X, state.least_S[slot_X] - end_X - count_X
    )
    is_now_K = torch.arange(tree.tokens_XK.shape[1], device=state.device) == step
    is_known_B = torch.arange(tree.tail_XB.shape[1], device=state.device) < step
    alive_X, has_ended_X = tree.alive_X[parent_X] & (mass_X > -torch.inf), ended_X | growth.ends_A
    grown = TokenTree(
        root_X=root_X,
        tokens_XK=torch.where(is_now_K, token_X[:, None], tree.tokens_XK[parent_X]),
        logq_XK=torch.where(is_now_K, logq_X[:, None], tree.logq_XK[parent_X]),
        # Pages of earlier tokens are the parent's; pages of later tokens are this row's own.
        tail_XB=torch.where(is_known_B, tree.tail_XB[parent_X], plan.arrays.branch_pages_XB),
        count_X=count_X + (~ended_X).long(),
        alive_X=alive_X,
        ended_X=has_ended_X,
        before_X=torch.where(ended_X, tree.before_X[parent_X], text_X),
        text_X=torch.where(ended_X, text_X, growth.text_A),
        mass_X=mass_X,
        last_X=token_X,
        next_X=end_X + (step + 1),
        cut_X=cut_X,
        outcome_X=tree.outcome_X[parent_X] if step else torch.arange(len(parent_X), device=state.device),
    )
    return grown, LastTokens(slot_X.int(), end_X.int(), (end_X + step).int(), (alive_X & ~has_ended_X).int())


def _continued(tree: TokenTree, more: Continuation, plan: RoundPlan[Tensor]) -> tuple[Tensor, ...]:
    """Return for every row [X]: the row that it continues, its token, its log q and its log mass."""
    parts: list[tuple[Tensor, tuple[Tensor, ...]]] = []
    if more.own is not None:
        token_RF, logq_RF = more.own
        parent_X = torch.arange(len(token_RF), device=token_RF.device).repeat_interleave(token_RF.shape[1])
        # If inner nodes are among the rows, the particle is the first row of each batch index.
        parent_X = parent_X * (len(tree.root_X) // len(token_RF))
        own = (parent_X, token_RF.flatten().long(), logq_RF.flatten(), torch.zeros_like(parent_X, dtype=torch.float64))
        parts.append((plan.arrays.decoding_G >= 0, own))
    if more.chosen is not None:
        parts.append((~plan.is_separate_G, _chosen(tree, more.chosen, plan)))
    if more.chains is not None:
        none_X = torch.zeros_like(more.chains.logq_X, dtype=torch.float64)
        parts.append((plan.arrays.decoding_G == Decoding.REJECTION, (*more.chains, none_X)))
    _, found = parts[0]
    for is_theirs_G, theirs in parts[1:]:
        is_theirs_X = is_theirs_G[plan.arrays.group_A].repeat_interleave(plan.kind.branches)
        found = tuple(torch.where(is_theirs_X, theirs_X, found_X) for theirs_X, found_X in zip(theirs, found))
    return found


def _chosen(tree: TokenTree, more: ChosenTokens, plan: RoundPlan[Tensor]) -> tuple[Tensor, ...]:
    chosen, candidate_tokens = more
    token_X, logq_X = (
        values_RC[chosen.parent_X, chosen.candidate_X]
        for values_RC in (candidate_tokens.token_RC, candidate_tokens.logq_RC)
    )
    logq_X = torch.where(tree.ended_X[chosen.parent_X], 0.0, logq_X)
    # NaN of the draft must be reported in groups where the draft's outputs count.
    is_nan_X = chosen.nan_G[plan.arrays.group_A].repeat_interleave(plan.kind.branches)
    return chosen.parent_X, token_X, torch.where(is_nan_X, torch.nan, logq_X), chosen.mass_X


def pack_rows(state: SlotState, plan: RoundPlan[Tensor], tree: TokenTree) -> PackedFields[DraftedRows]:
    """Pack the rows for the target. An independent row has the share 1 / F of its particle; if the particle has ended,
    its first row has the whole share."""
    slot_X, branches = plan.arrays.slot_A[tree.root_X], plan.kind.branches
    share_X = tree.mass_X - state.logw_S[slot_X]
    if Decoding.REJECTION in plan.kind.decodings:
        # Chains have equal shares until they are verified, except rows that continue nothing.
        of_chains_X = torch.where(tree.alive_X, 0.0, -torch.inf)
        share_X = torch.where(plan.is_decoded_by(Decoding.REJECTION).repeat_interleave(branches), of_chains_X, share_X)
    if plan.kind.has_separate:
        branch_X = torch.arange(len(slot_X), device=slot_X.device) % branches
        alone_X = torch.where(branch_X == 0, 0.0, -torch.inf).double()
        own_X = torch.where(state.ended_S[slot_X], alone_X, -math.log(branches))
        share_X = torch.where(plan.is_decoded_by(*SEPARATE).repeat_interleave(branches), own_X, share_X)
    rows, block = tree.tokens_XK.shape
    drafted = DraftedRows(
        tokens_XK=tree.tokens_XK,
        logq_XK=tree.logq_XK,
        root_X=tree.root_X,
        count_X=tree.count_X,
        ended_X=tree.ended_X,
        cut_X=tree.cut_X,
        share_X=share_X,
    )
    return DraftedRows.memory(rows, block).allocate(state.device).write(drafted)


def observe_draws(
    state: SlotState,
    plan: RoundPlan[Tensor],
    tree: TokenTree,
    selection: RoundSelection[Tensor],
    kept_RV: Tensor,
    coupling: Coupling,
) -> ObservedDraws[Tensor]:
    """Return what the target's draws after the roots of the drafted rows tell about the exponent of coupled drafting,
    and at some positions their rank. A draw is seen only if the block before the root was accepted as a whole, which
    does not depend on the draw. `kept`: log q after the first R roots. Call it
    before `advance`."""
    root_A = selection.particles.ancestor_A
    token_A = torch.where(selection.taken_A > 0, tree.tokens_XK[selection.particles.row_A, 0], selection.bonus_A)
    slot_A, exponent_A = plan.arrays.slot_A[root_A], plan.arrays.exponent_A[root_A]
    kept_AV = kept_RV[root_A.clamp(max=len(kept_RV) - 1)]
    is_drawn_AV = coupling.tokens(kept_AV.shape[1], state.device) == token_A[:, None]
    is_seen_A = (
        selection.particles.alive_A
        & ~state.ended_S[slot_A]
        & (selection.cut_A == 0)
        & (exponent_A > 0)
        & (token_A >= 0)
    )
    is_seen_A = is_seen_A & (root_A < len(kept_RV))
    position_A = state.end_S[slot_A]
    noise_AV = coupling.noise(root_A, position_A, kept_AV.shape[1])
    score_A, information_A = score_of_exponent(kept_AV, exponent_A, noise_AV, is_drawn_AV)
    is_missing_A = ~is_seen_A | ~is_drawn_AV.any(-1) | ~score_A.isfinite()
    score_AV = exponent_A[:, None] * kept_AV + noise_AV
    drawn_A1 = score_AV.masked_fill(~is_drawn_AV, -torch.inf).amax(-1, keepdim=True)
    # A token that the draft cannot draw, or that its head lacks, ranks after all tokens that it can draw.
    is_above_AV = (score_AV > drawn_A1) | (drawn_A1 == -torch.inf)
    rank_A = is_above_AV.sum(-1).float().masked_fill(~is_seen_A | ~is_ranked(position_A), torch.nan)
    return ObservedDraws(
        score_A=score_A.masked_fill(is_missing_A, torch.nan),
        information_A=information_A.masked_fill(is_missing_A, torch.nan),
        rank_A=rank_A,
    )


class DraftOps:
    """Operations of this stage that have Triton forms, in torch."""

    add_biases = staticmethod(add_biases)
    apply_mask = staticmethod(apply_mask)
    begin_draft = staticmethod(begin_draft)
    expand = staticmethod(expand)
    reparent = staticmethod(reparent)
    prune_tree = staticmethod(prune_tree)
    store_inner_nodes = staticmethod(store_inner_nodes)
    limit_outcomes = staticmethod(limit_outcomes)
    with_inner_nodes = staticmethod(with_inner_nodes)
    pack_rows = staticmethod(pack_rows)
    observe_draws = staticmethod(observe_draws)
    remap_draft = staticmethod(remap_draft)
    advance = staticmethod(advance)
