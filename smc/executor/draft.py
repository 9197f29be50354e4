"""The draft stage of a round: rows of K tokens grow for every group, and afterwards the chosen rows become the
particles. `DraftStage` runs the model; the functions below it are its operations in torch, in the order of a round;
`smc.kernels.draft` and `smc.kernels.draft_tree` have them in Triton. Knows nothing about the target.

Rows grow step by step: each of a round's X = F A rows continues a row of the step before by one token. An independent
row continues itself. The rows of other groups (`smc.algorithm.expansion`) are reparented, which permutes page numbers
and moves no keys: every row has its own page for each step, named by the plan. Rows of chains continue themselves, too
(`smc.executor.chains`). In a walk the rows of all steps form a draft tree:

**Outcomes at inner nodes** (`with_inner_nodes`, `store_inner_nodes`). While the target verifies a block, the draft
grows rows from outcomes. An outcome is the node of the block's tree at which the walk of the target's draws ends, and
the token that the target draws there, which no row has. At the last token of a row every candidate token makes an
outcome. At an inner node, outcomes are the tokens that were candidates when the block was drafted and that no row of
the block took. Their scores were computed then: `InnerNodes` stores them when a round ends for the next round, whose
first step chooses among the outcomes of all nodes. A row ahead that starts at an inner node rolls back the rest of its
root's block (`cut`). Its keys and values continue those of the node, at the positions of the root's rolled-back tokens.

**Rows that are verified** (`prune_tree`). Every step of the draft keeps the likeliest continuations of the group, so
some rows of a step have no continuation in a later step. A row that is verified is a path to any node, of any length.
The chosen rows hold as much of the tree together as possible: every node has a gain, its share of the group's mass, and
a row is worth the gains of those of its nodes that no other row holds. Nodes continue in their heaviest child, the one
with the most gain along its own best path. This divides the tree into paths, of which the heaviest are taken; on a tree
this equals greedy selection. In look-ahead the first token of a row is the outcome that the row is drafted for. If the
outcome comes true, it is known without verification, so it has no gain; and for one outcome at most as many rows are
useful as the group may have.

Local axes: U = A * K nodes from which rows may begin (for each batch index the last token of its row, then its inner
nodes), Y = K * X nodes of a tree (node k * X + x is row x of step k), Z = K - 1 inner nodes of a row (number d has d
+ 1 tokens)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from smc.algorithm.coupling import Coupling, is_ranked, score_of_exponent
from smc.algorithm.expansion import LEAD_GAIN, CandidateTokens, SourceRows, expand
from smc.algorithm.resampling import Spans
from smc.arrays import PackedFields
from smc.distributions import DistributionSpec
from smc.executor.chains import DraftedChains, assign_chains
from smc.executor.guidance import GuidedPass, PassLogits
from smc.executor.logit_changes import add_biases
from smc.executor.masks import apply_mask
from smc.executor.redraft import RedraftStart, known_step, plan_again, selected_again
from smc.executor.sampling import HeadSampling, Sampling
from smc.executor.select import advance, remap_draft
from smc.philox import STREAMS_PER_PARTICLE, DrawKeys, Purpose, RoundKeys
from smc.round.plan import RoundPlan
from smc.round.tensors import (
    BiasTables,
    CandidateLayout,
    ChosenTokens,
    Continuation,
    DraftedRows,
    DraftInputs,
    DraftReport,
    DraftStep,
    GrownRows,
    InnerNodes,
    LastTokens,
    ObservedDraws,
    OwnDraws,
    RoundSelection,
    RowGroups,
    Rows,
    RowSpans,
    RowTables,
    SlotState,
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


def with_inner_nodes(
    nodes: InnerNodes, plan: RoundPlan[Tensor], tree: TokenTree, candidates: CandidateTokens
) -> tuple[CandidateTokens, TokenTree, Spans]:
    """Return the candidates [U, C] at all nodes of the particles, the nodes as rows [U], and the nodes of each
    group. `tree`: the particles as rows; `candidates`: [A, C] after their last tokens."""
    slot_A, k = plan.arrays.slot_A, nodes.block
    most = nodes.share_SKC.shape[2]
    share_AZC = nodes.share_SKC[slot_A].masked_fill(~plan.is_decoded_by(Decoding.WALK)[:, None, None], -torch.inf)
    token_AKC, logq_AKC, share_AKC = (values_AC[:, None].repeat(1, k, 1) for values_AC in candidates)
    share_AKC[:, 1:] = -torch.inf
    token_AKC[:, 1:, :most] = nodes.token_SKC[slot_A].to(token_AKC.dtype)
    logq_AKC[:, 1:, :most] = share_AZC
    share_AKC[:, 1:, :most] = share_AZC
    depth_K = torch.arange(k, device=slot_A.device)
    cut_AK = torch.where(depth_K == 0, 0, nodes.count_S[slot_A][:, None] - depth_K)

    def of_nodes(first_A: Tensor, inner_AZ: Tensor) -> Tensor:
        return torch.cat((first_A[:, None], inner_AZ.to(first_A.dtype)), 1).flatten()

    inner_AZ, rows_U = torch.zeros_like(nodes.text_SK[slot_A]), plan.index_of_rows(k)
    nodes_as_rows = TokenTree(*(values_A[rows_U] for values_A in tree))._replace(
        ended_X=of_nodes(tree.ended_X, inner_AZ),
        before_X=of_nodes(tree.before_X, nodes.text_SK[slot_A]),
        text_X=of_nodes(tree.text_X, nodes.text_SK[slot_A]),
        mass_X=of_nodes(tree.mass_X, nodes.mass_SK[slot_A]),
        cut_X=cut_AK.flatten(),
    )
    candidates = CandidateTokens(*(values.flatten(0, 1) for values in (token_AKC, logq_AKC, share_AKC)))
    return candidates, nodes_as_rows, Spans(plan.arrays.first_G * k, plan.arrays.size_G * k)


def limit_outcomes(
    plan: RoundPlan[Tensor], tree: TokenTree, candidates: CandidateTokens, has_rest: bool
) -> CandidateTokens:
    """Return the candidates [X, C] without useless ones: of each outcome, only the candidates of largest mass continue,
    at most as many as the group may have rows after the round. The first candidate of a group's first row stays
    (`smc.algorithm.expansion`)."""
    share_XC, device = candidates.share_RC, tree.mass_X.device
    (rows, width), group_X = share_XC.shape, plan.arrays.group_A.repeat_interleave(plan.kind.branches)
    is_ended_X = tree.ended_X & tree.alive_X
    ended_X = torch.zeros(rows, dtype=torch.int64, device=device).index_add(0, tree.outcome_X, is_ended_X.long())
    most_X = plan.arrays.next_count_G.long()[group_X] - ended_X[tree.outcome_X]
    is_walk_X = (plan.arrays.decoding_G == Decoding.WALK)[group_X]
    mass_XC = (tree.mass_X[:, None] + share_XC.double()).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    mass_XC = mass_XC.masked_fill((tree.ended_X | ~tree.alive_X)[:, None], -torch.inf)
    mass_XC = mass_XC.masked_fill(torch.arange(width, device=device) >= width - has_rest, -torch.inf)
    rank_XC = _rank(mass_XC.flatten(), tree.outcome_X.repeat_interleave(width)).view(rows, width)
    is_first_X = torch.arange(rows, device=device) == plan.arrays.first_G.long()[group_X] * plan.kind.branches
    is_lead_XC = is_first_X[:, None] & (torch.arange(width, device=device) == 0)
    too_many_XC = (rank_XC >= most_X[:, None]) & (mass_XC > -torch.inf) & is_walk_X[:, None] & ~is_lead_XC
    return candidates._replace(share_RC=share_XC.masked_fill(too_many_XC, -torch.inf))


def reparent(
    tree: TokenTree, more: Continuation, plan: RoundPlan[Tensor], state: SlotState, *, step: int
) -> tuple[TokenTree, LastTokens]:
    """Extend the rows by their next token, and return them with the pass over these tokens. The first step (0) makes F
    rows for each batch index. This is the reference: `smc.kernels.draft.reparent` does the same in one launch."""
    parent_X, token_X, logq_X, mass_X = _continued(tree, more, plan)
    before = TokenTree(*(values_R[parent_X] for values_R in tree))
    slot_X, ended_X, text_X, count_X = plan.arrays.slot_A[before.root_X], before.ended_X, before.text_X, before.count_X
    end_X = state.end_S[slot_X] - before.cut_X
    room_X = state.limit_S[slot_X] - end_X - count_X
    growth = grow(
        state.stops, state.entry_S[slot_X], text_X, token_X[:, None], room_X, state.least_S[slot_X] - end_X - count_X
    )
    is_now_K = torch.arange(tree.tokens_XK.shape[1], device=state.device) == step
    is_known_B = torch.arange(tree.tail_XB.shape[1], device=state.device) < step
    alive_X, has_ended_X = before.alive_X & (mass_X > -torch.inf), ended_X | growth.ends_A
    grown = before._replace(
        tokens_XK=torch.where(is_now_K, token_X[:, None], before.tokens_XK),
        logq_XK=torch.where(is_now_K, logq_X[:, None], before.logq_XK),
        # Pages of earlier tokens are the parent's; pages of later tokens are this row's own.
        tail_XB=torch.where(is_known_B, before.tail_XB, plan.arrays.branch_pages_XB),
        count_X=count_X + (~ended_X).long(),
        alive_X=alive_X,
        ended_X=has_ended_X,
        before_X=torch.where(ended_X, before.before_X, text_X),
        text_X=torch.where(ended_X, text_X, growth.text_A),
        mass_X=mass_X,
        last_X=token_X,
        next_X=end_X + (step + 1),
        outcome_X=before.outcome_X if step else torch.arange(len(parent_X), device=state.device),
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


def prune_tree(plan: RoundPlan[Tensor], grown: GrownRows, lookahead: bool) -> GrownRows:
    """Return the rows of groups with draft trees that are verified: at most as many as a step has. Other groups keep
    the rows of the last step."""
    steps, rows = grown.steps, len(plan.arrays.branch_pages_XB)
    gain_KX, alive_KX = _gains(plan, grown, lookahead)
    worth_KX, leaf_KX, is_top_KX = _paths(grown, gain_KX, alive_KX)
    is_useful_KX = is_top_KX
    if lookahead:
        # A row of an outcome alone would confirm no more than a miss does.
        is_short_Y = (leaf_KX < rows).flatten() & ~torch.cat([step.tree.ended_X for step in steps])
        is_useful_KX = is_top_KX & (~is_short_Y.view_as(is_top_KX) | (worth_KX >= LEAD_GAIN))
    worth_Y, leaf_Y = worth_KX.flatten(), leaf_KX.flatten()
    group_Y = plan.arrays.group_A.long().repeat_interleave(plan.kind.branches).repeat(len(steps))
    outcome_Y = torch.cat([step.tree.outcome_X for step in steps]) if lookahead else torch.zeros_like(group_Y)
    kept_Y = is_useful_KX.flatten()
    if lookahead:
        kept_Y = kept_Y & (
            _rank(worth_Y.masked_fill(~kept_Y, -1.0), outcome_Y) < plan.arrays.next_count_G.long()[group_Y]
        )
    most_G = plan.arrays.size_G.long() * plan.kind.branches
    kept_Y = kept_Y & (_rank(worth_Y.masked_fill(~kept_Y, -1.0), group_Y) < most_G[group_Y])
    # Rows with the same outcome are adjacent, the heaviest first.
    order_Y = worth_Y.sort(descending=True, stable=True).indices
    for key_Y in (outcome_Y, group_Y, (~kept_Y).long()):
        order_Y = order_Y[key_Y[order_Y].sort(stable=True).indices]
    number_Y = torch.empty_like(order_Y).scatter_(0, order_Y, torch.arange(len(order_Y), device=order_Y.device))
    count_G = torch.zeros_like(most_G).index_add(0, group_Y, kept_Y.long())
    before_G = count_G.cumsum(0) - count_G
    to_Y = (plan.arrays.first_G.long() * plan.kind.branches - before_G)[group_Y] + number_Y
    row_X = torch.arange(rows, device=worth_Y.device)
    group_X, last = group_Y[:rows], (len(steps) - 1) * rows
    leaf_X = torch.full_like(row_X, -1).index_copy(0, to_Y[kept_Y], leaf_Y[kept_Y])
    is_walk_X = (plan.arrays.decoding_G == Decoding.WALK)[group_X] & (plan.arrays.size_G > 0)[group_X]
    # A row that is not alive repeats the first of its group.
    first_X = leaf_X[(plan.arrays.first_G.long() * plan.kind.branches)[group_X].clamp(max=rows - 1)]
    is_there_X = leaf_X >= 0
    leaf_X = torch.where(is_there_X, leaf_X, first_X)
    leaf_X = torch.where(is_walk_X & (leaf_X >= 0), leaf_X, last + row_X)
    return grown._replace(tree=_taken(grown, leaf_X, is_there_X | ~is_walk_X), leaf_X=leaf_X)


def _gains(plan: RoundPlan[Tensor], grown: GrownRows, lookahead: bool) -> tuple[Tensor, Tensor]:
    """Return the gain of every node, float64 [K, X], and whether the node belongs to a live row of a draft tree
    [K, X]."""
    steps, branches = grown.steps, plan.kind.branches
    group_X = plan.arrays.group_A.long().repeat_interleave(branches)
    is_walk_X = (plan.arrays.decoding_G == Decoding.WALK)[group_X]
    alive_KX = torch.stack([step.tree.alive_X for step in steps]) & is_walk_X
    mass_KX = torch.stack([step.tree.mass_X for step in steps])
    first_mass_X = mass_KX[0].masked_fill(~alive_KX[0], -torch.inf)
    top_G = torch.full_like(plan.arrays.size_G, -torch.inf, dtype=torch.float64)
    top_X = top_G.scatter_reduce(0, group_X, first_mass_X, "amax")[group_X]
    # A row that ended at an earlier step continues as itself, without a token.
    step_K1 = torch.arange(len(steps), device=mass_KX.device)[:, None]
    is_new_KX = torch.stack([step.tree.count_X for step in steps]) > step_K1
    if lookahead:
        is_new_KX = is_new_KX & (step_K1 > 0)
    gain_KX = torch.where(alive_KX & is_new_KX, (mass_KX - top_X).exp(), 0.0)
    lead_G = plan.arrays.first_G.long() * branches
    is_lead_X = torch.arange(mass_KX.shape[1], device=mass_KX.device) == lead_G[group_X]
    gain_KX = gain_KX + torch.where(alive_KX & is_lead_X, LEAD_GAIN, 0.0)
    if not plan.kind.nodes:
        return gain_KX, alive_KX
    # The first token of a block, which is known, takes a node, too.
    tree_KX = torch.stack([step.tree.outcome_X if lookahead else group_X for step in steps])
    rank_Y = _rank(gain_KX.masked_fill(~(alive_KX & is_new_KX), -1.0).flatten(), tree_KX.flatten())
    is_kept_KX = is_new_KX & (rank_Y.view_as(gain_KX) < plan.arrays.nodes_G.long()[group_X] - 1)
    if lookahead:
        is_kept_KX[0] = True
    is_kept_KX = is_kept_KX & alive_KX
    # Only rounding, and the first row's gain, put a node before its parent.
    for step in range(1, len(steps)):
        is_kept_KX[step] &= is_kept_KX[step - 1][steps[step].parent_X]
    return torch.where(is_kept_KX, gain_KX, 0.0), is_kept_KX


def _paths(grown: GrownRows, gain_KX: Tensor, alive_KX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return for every node [K, X]: the sum of gains from it along its best path, the node at which that path ends, and
    whether a path begins at the node."""
    steps, (k, rows) = grown.steps, gain_KX.shape
    row_X = torch.arange(rows, device=gain_KX.device)
    worth, leaf = [gain_KX[-1]], [(k - 1) * rows + row_X]
    is_top: list[Tensor] = []
    for step in range(k - 2, -1, -1):
        parent_X, is_child_X = steps[step + 1].parent_X, alive_KX[step + 1]
        child_worth_X = torch.where(is_child_X, worth[0], -torch.inf)
        best_X = torch.full_like(child_worth_X, -torch.inf).scatter_reduce(0, parent_X, child_worth_X, "amax")
        is_heaviest_X = is_child_X & (child_worth_X == best_X[parent_X])
        # Among equals, the first.
        heaviest_X = torch.full_like(row_X, rows).scatter_reduce(
            0, parent_X, torch.where(is_heaviest_X, row_X, rows), "amin"
        )
        goes_on_X = heaviest_X < rows
        is_top.insert(0, is_child_X & (heaviest_X[parent_X] != row_X))
        leaf.insert(0, torch.where(goes_on_X, leaf[0][heaviest_X.clamp(max=rows - 1)], step * rows + row_X))
        worth.insert(0, gain_KX[step] + torch.where(goes_on_X, best_X, 0.0))
    return torch.stack(worth), torch.stack(leaf), torch.stack([alive_KX[0], *is_top])


def _rank(worth_Y: Tensor, of_Y: Tensor) -> Tensor:
    """Return the rank [Y] of every entry by worth, among those with the same `of`: 0 for the heaviest. Among equals,
    the first one is the heaviest."""
    order_Y = worth_Y.sort(descending=True, stable=True).indices
    order_Y = order_Y[of_Y[order_Y].sort(stable=True).indices]
    sorted_Y = of_Y[order_Y]
    rank_Y = torch.arange(len(of_Y), device=of_Y.device) - torch.searchsorted(sorted_Y, sorted_Y)
    return torch.empty_like(rank_Y).scatter_(0, order_Y, rank_Y)


def _taken(grown: GrownRows, leaf_X: Tensor, alive_X: Tensor) -> TokenTree:
    """Return the rows that end at these nodes."""
    tree = TokenTree(*(torch.cat(of_steps)[leaf_X] for of_steps in zip(*(step.tree for step in grown.steps))))
    return tree._replace(alive_X=tree.alive_X & alive_X, mass_X=torch.where(alive_X, tree.mass_X, -torch.inf))


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


def store_inner_nodes(
    nodes: InnerNodes, state: SlotState, plan: RoundPlan[Tensor], grown: GrownRows, selection: RoundSelection[Tensor]
) -> None:
    """Store the outcomes at inner nodes of the selected rows. A node that several rows of a group share is stored for
    the first of them. Call it before `advance`."""
    slot_A, row_A, count_A = plan.arrays.slot_A, selection.particles.row_A, selection.taken_A
    offset_A = state.logw_S[slot_A[selection.particles.ancestor_A]]
    tokens_AK, width = grown.tree.tokens_XK[row_A].long(), nodes.share_SKC.shape[2]
    index_A = plan.index_of_rows(1)
    is_before_AA = index_A < index_A[:, None]
    shares_AA = (
        (plan.arrays.group_A == plan.arrays.group_A[:, None])
        & selection.particles.alive_A
        & plan.is_decoded_by(Decoding.WALK)
    )
    assert grown.leaf_X is not None, "rows of a pruned tree"
    rows = len(grown.tree.mass_X)
    at_A, leaf_step_A = grown.leaf_X[row_A] % rows, grown.leaf_X[row_A] // rows
    # Rows of fewer tokens than a block have no deeper nodes.
    nodes.share_SKC[slot_A] = -torch.inf
    for d in range(len(grown.steps) - 2, -1, -1):
        before, step = grown.steps[d].tree, grown.steps[d + 1]
        at_A = torch.where(leaf_step_A > d, step.parent_X[at_A], at_A)
        token_AC, share_AC = step.candidates.token_RC[at_A, :width], step.candidates.share_RC[at_A, :width]
        # Rows that go through this node and have a token after it.
        same_AA = (tokens_AK[:, None, : d + 1] == tokens_AK[None, :, : d + 1]).all(-1)
        through_AA = shares_AA & same_AA & (count_A > d + 1)
        is_node_A = through_AA.diagonal() & ~(through_AA & is_before_AA).any(-1)
        is_child_AC = (through_AA[:, None] & (token_AC[..., None] == tokens_AK[:, d + 1])).any(-1)
        is_outcome_AC = is_node_A[:, None] & ~is_child_AC
        nodes.token_SKC[slot_A, d] = token_AC.int()
        nodes.share_SKC[slot_A, d] = share_AC.masked_fill(~is_outcome_AC, -torch.inf)
        nodes.mass_SK[slot_A, d] = before.mass_X[at_A] - offset_A
        nodes.text_SK[slot_A, d] = before.text_X[at_A]
    nodes.count_S[slot_A] = count_A


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
