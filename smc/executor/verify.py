"""The verify stage of a round: lays out the tokens that the target runs, runs them, and reads its outputs from the
logits. The functions below `VerifyStage` are its operations in torch; `smc.kernels.verify` and `smc.kernels.nodes` have
them in Triton. The selection that follows is in `smc.executor.select`.

A block consists of the last tokens of a particle. Its first token is already counted in the particle's weight, or is
known to be the target's own draw. In look-ahead a block was drafted one round earlier, and its batch index is that of
its particle. In lockstep it has just been drafted, and continues the particle of its root. Draft chains
(`smc.executor.chains`) are verified against the target's distribution (`smc.algorithm.verification`). Tokens that
blocks of one draft tree have in common run once, as nodes (`lay_out_nodes`), where `RoundKind.nodes` says so. In a walk
this stage only collects the target's draws; how far blocks agree with them is found in the selection
(`smc.algorithm.verification.match_samples`)."""

from __future__ import annotations

import torch
from torch import Tensor

from smc.arrays import map_tensors, to_device
from smc.executor.chains import VerifiedChains, verify_chains
from smc.executor.guidance import GuidedPass, PassLogits
from smc.executor.logit_changes import add_biases
from smc.executor.masks import apply_mask, given_constraint
from smc.executor.redraft import selected_again, with_slots_of
from smc.executor.sampling import Sampling
from smc.executor.select import advance, remap_target
from smc.philox import STREAMS_PER_PARTICLE, DrawKeys, Purpose
from smc.round.plan import RoundPlan, SequenceHandoff
from smc.round.tensors import (
    BiasTables,
    Blocks,
    DraftedRows,
    NodeLayout,
    RoundSelection,
    RowGroups,
    Rows,
    RowSpans,
    RowTables,
    SlotState,
    TargetDraws,
    VerifyInputs,
    VerifyOutputs,
)
from smc.types import Decoding


class VerifyStage:
    """A model that scores blocks."""

    def __init__(
        self,
        run: GuidedPass,
        sampling: Sampling,
        state: SlotState,
        ops: VerifyOps,
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
        self.chains = VerifiedChains(chains, self.queries, sampling, ops.verify_chains, state.device)

    def join(self, group: SequenceHandoff, slots_N: Tensor) -> None:
        logq_NQ = to_device(group.logq_NQ, self.state.device)
        self.logq_SQ[:, : logq_NQ.shape[1]].index_copy_(0, slots_N, logq_NQ)

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
                inputs.rows.tables.slot_R,
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
            drawn = self.chains.verify(plan, inputs, logits_TV, drawn)
        outputs = self._ops.collect_outputs(inputs, plan, labelled_T, drawn, next_AV)._replace(raw_TV=raw_TV)
        return outputs if log_mass_T is None else outputs._replace(next_mass_A=log_mass_T[inputs.last_A])

    def redrafted(self, plan: RoundPlan[Tensor], rows: DraftedRows) -> Tensor:
        """Make the rows that were drafted again the particles, before their blocks are verified. Returns as
        `remap`."""
        again = with_slots_of(self.state, plan, rows)
        return self.remap(again, rows, selected_again(self.state, again, rows))

    def remap(self, plan: RoundPlan[Tensor], drafted: DraftedRows, selection: RoundSelection[Tensor]) -> Tensor:
        """Make the selected rows the particles. Returns the number of pending tokens of each [A]."""
        block_A = selection.particles.ancestor_A if self.lookahead else selection.particles.row_A
        self.run.remap(plan, selection.particles.ancestor_A, plan.arrays.target_pages_AQ, block_A, pending=False)
        next_ = self._ops.remap_target(self.state, self.logq_SQ, plan, drafted, selection, self.lookahead)
        self._ops.advance(self.state, plan.arrays.slot_A, selection, next_)
        return next_.pending_A


def lay_out_blocks(
    state: SlotState, logq_SQ: Tensor, plan: RoundPlan[Tensor], drafted: DraftedRows | None
) -> VerifyInputs:
    """Lay out what the target runs: the pending tokens (look-ahead), or the seed and what has just been drafted
    (lockstep). The last token of a block that has ended is scored, but never run. `logq_SQ`: log q of the pending
    tokens."""
    known = _pending(state, logq_SQ, plan) if drafted is None else _drafted(state, logq_SQ, plan, drafted)
    alive_A, ended_A, count_A, (_, q) = known["alive_A"], known["ended_A"], known["count_A"], known["tokens_AQ"].shape
    slot_A = plan.arrays.slot_A[known["origin_A"]]
    held_A, index_A = state.held(slot_A), plan.index_of_rows(1)
    blocks = Blocks(
        **known,
        open_A=alive_A & ~ended_A,
        run_A=torch.where(alive_A, count_A - ended_A.long(), 0),
        position_A=held_A + count_A,
        stream_A=plan.arrays.particle_A * STREAMS_PER_PARTICLE,
        rank_A=index_A - plan.arrays.first_G[plan.arrays.group_A],
    )
    rows = Rows(
        RowTables(state.table_SL, slot_A.int(), plan.arrays.target_pages_AQ, held_A.int()),
        RowSpans(held_A.int(), blocks.run_A.int()),
        RowGroups(plan.arrays.group_A.int(), *plan.arrays.groups, plan.arrays.shared_G),
        queries=q,
        contexts=plan.kind.contexts,
    )
    column_Q, of_T = torch.arange(q, device=state.device), plan.index_of_rows(q)
    label_AQ = torch.where(column_Q < count_A[:, None] - 1, blocks.tokens_AQ.roll(-1, 1), -1)
    zero_T, position_T = torch.zeros_like(of_T), (held_A[:, None] + 1 + column_Q).flatten()
    return VerifyInputs(
        blocks=blocks,
        rows=rows,
        distribution_T=plan.target_distribution.take(of_T),
        label_T=label_AQ.flatten(),
        keys=DrawKeys(plan.arrays.seed_A[of_T], zero_T, zero_T[:, None], position_T, Purpose.TARGET),
        last_A=index_A * q + count_A - 1,
    )


def _pending(state: SlotState, logq_SQ: Tensor, plan: RoundPlan[Tensor]) -> dict[str, Tensor]:
    """Return the blocks of look-ahead, which were drafted one round earlier."""
    slot_A, queries = plan.arrays.slot_A, plan.kind.queries
    return {
        "origin_A": torch.arange(len(slot_A), device=state.device),
        "tokens_AQ": state.pending_SQ[slot_A, :queries],
        "logq_AQ": logq_SQ[slot_A, :queries],
        "count_A": state.pending_S[slot_A],
        "ended_A": state.ended_S[slot_A],
        "alive_A": state.alive_S[slot_A],
        "logw_A": state.logw_S[slot_A],
    }


def _drafted(state: SlotState, logq_SQ: Tensor, plan: RoundPlan[Tensor], drafted: DraftedRows) -> dict[str, Tensor]:
    """Return the blocks of lockstep: the seed and what has just been drafted for each batch index."""
    root_A = drafted.root_X.long()
    slot_A = plan.arrays.slot_A[root_A]
    alive_A = state.alive_S[slot_A] & (drafted.share_X > -torch.inf)
    count_A, ended_A = 1 + drafted.count_X.long(), drafted.ended_X
    if plan.kind.has_exact:
        # If the draft proposes nothing, for example because it returns NaN, the block is the seed alone.
        nothing_G = plan.is_exact_G & ~plan.any_of_group(alive_A)
        lone_A = nothing_G[plan.arrays.group_A] & state.alive_S[plan.arrays.slot_A]
        root_A, slot_A = (
            torch.where(lone_A, plan.index_of_rows(1), root_A),
            torch.where(lone_A, plan.arrays.slot_A, slot_A),
        )
        count_A, ended_A = (
            torch.where(lone_A, 1, count_A),
            torch.where(lone_A, state.ended_S[plan.arrays.slot_A], ended_A),
        )
        alive_A = alive_A | lone_A
    # The plan has pages for exactly as many tokens as have been drafted.
    steps = plan.arrays.target_pages_AQ.shape[1] - 1
    return {
        "origin_A": root_A,
        "tokens_AQ": torch.cat((state.pending_SQ[slot_A, :1], drafted.tokens_XK[:, :steps].long()), 1),
        "logq_AQ": torch.cat((logq_SQ[slot_A, :1], drafted.logq_XK[:, :steps]), 1),
        "count_A": count_A,
        "ended_A": ended_A,
        "alive_A": alive_A,
        "logw_A": state.logw_S[slot_A] + drafted.share_X.double(),
    }


def lay_out_nodes(plan: RoundPlan[Tensor], inputs: VerifyInputs) -> VerifyInputs:
    """Return the inputs of a pass over the nodes of blocks.

    The blocks of a group are paths of one tree (`smc.executor.draft`), and many begin alike: of eight blocks of
    six tokens, on average 43 tokens are drafted and 24 are different. A node is a token together with all tokens of its
    block before it. It runs as a row of one token, on the page of the first block that holds it; this block's earlier
    tokens are its ancestors, whose pages it reads. Blocks then have the pages and outputs of their nodes, so everything
    after the pass is as if each block had run by itself.

    Shapes follow from the plan: there is room for a fixed number of nodes, of which each group has a share. The draft
    keeps its trees to these shares (`smc.executor.draft.prune_tree`). In look-ahead, a block was drafted by an
    earlier plan, whose shares may have been larger: tokens without a node are not verified."""
    blocks, rows, most = inputs.blocks, inputs.rows, plan.kind.nodes
    tokens_AQ, pages_AQ = blocks.tokens_AQ, plan.arrays.target_pages_AQ
    (batch_size, q), device = tokens_AQ.shape, tokens_AQ.device
    column_Q, index_A = torch.arange(q, device=device), torch.arange(batch_size, device=device)
    runs_AQ, group_A = column_Q < blocks.run_A[:, None], rows.groups.group_R.long()
    # Two blocks have a token in common if all tokens up to it are the same. The first block holds it.
    is_equal_AA = (group_A == group_A[:, None]) & (rows.spans.start_R == rows.spans.start_R[:, None])
    is_same_AAQ = (tokens_AQ == tokens_AQ[:, None]).long().cumprod(-1).bool() & is_equal_AA[..., None] & runs_AQ
    holder_AQ = is_same_AAQ.long().argmax(1)
    is_first_AQ = runs_AQ & (holder_AQ == index_A[:, None])
    # Nodes are numbered within their group. Along a block numbers grow, so the tokens that have a node come first.
    number_AQ = is_first_AQ.flatten().cumsum(0).view_as(is_first_AQ)
    zero_G = torch.zeros_like(rows.groups.first_G, dtype=torch.int64)
    before_G = zero_G.index_add(0, group_A, is_first_AQ.sum(-1)).cumsum(0)
    number_AQ = number_AQ[holder_AQ, column_Q] - 1 - torch.cat((before_G[:1] * 0, before_G[:-1]))[group_A][:, None]
    has_node_AQ = runs_AQ & (number_AQ < plan.arrays.nodes_G[group_A][:, None])
    is_node_AQ = is_first_AQ & has_node_AQ
    count_G = zero_G.index_add(0, group_A, is_node_AQ.sum(-1))
    first_G = count_G.cumsum(0) - count_G
    node_AQ = torch.where(has_node_AQ, first_G[group_A][:, None] + number_AQ, 0)
    token_T = torch.zeros(most, dtype=torch.int64, device=device)
    token_T[node_AQ[is_node_AQ]] = torch.arange(batch_size * q, device=device).view_as(node_AQ)[is_node_AQ]
    run_A = has_node_AQ.sum(-1)
    pages_AQ = torch.where(has_node_AQ, pages_AQ[holder_AQ, column_Q], pages_AQ)
    index_T, depth_T = token_T // q, token_T % q
    nodes = NodeLayout(
        node_AQ=node_AQ,
        token_T=token_T,
        count_A=torch.where(run_A < blocks.run_A, run_A, blocks.count_A),
        pages_AQ=pages_AQ,
    )
    return inputs._replace(
        blocks=blocks._replace(run_A=run_A),
        rows=rows._replace(
            tables=rows.tables._replace(
                slot_R=rows.tables.slot_R[index_T], tail_RB=pages_AQ[index_T], tail_R=rows.spans.start_R[index_T]
            ),
            spans=RowSpans(
                start_R=(rows.spans.start_R[index_T] + depth_T).int(),
                count_R=(torch.arange(most, device=device) < count_G.sum()).int(),
            ),
            groups=rows.groups._replace(
                group_R=rows.groups.group_R[index_T], first_G=first_G.int(), size_G=count_G.int()
            ),
            queries=1,
            path_RB=_path(node_AQ, index_T, depth_T),
        ),
        distribution_T=inputs.distribution_T.take(token_T),
        label_T=inputs.label_T[token_T],
        keys=map_tensors(lambda values_R: values_R[token_T], inputs.keys),
        nodes=nodes,
    )


def _path(node_AQ: Tensor, index_T: Tensor, depth_T: Tensor) -> Tensor:
    """Return the nodes of every node's block up to itself, int32 [T, Q], and 0 after it."""
    is_past_TQ = torch.arange(node_AQ.shape[1], device=node_AQ.device) > depth_T[:, None]
    return node_AQ[index_T].masked_fill(is_past_TQ, 0).int()


def collect_outputs(
    inputs: VerifyInputs,
    plan: RoundPlan[Tensor],
    labelled_T: Tensor | None,
    drawn: TargetDraws | None,
    next_AV: Tensor | None,
) -> VerifyOutputs:
    """Return the target's outputs. `labelled_T`: log p of the labels, 0 where there is none; None if all groups are
    decoded exactly. `drawn`: the target's own draws after the tokens of the pass. `next_AV`: logits after the
    blocks."""
    blocks, shape = inputs.blocks, inputs.blocks.tokens_AQ.shape
    column_Q = torch.arange(shape[1], device=blocks.count_A.device)
    is_run_AQ = column_Q < blocks.run_A[:, None]
    logp_AQ = torch.zeros_like(blocks.logq_AQ) if labelled_T is None else labelled_T.view(shape)
    nan_A, nan_AQ, drawn_AQ = (
        torch.isnan(logp_AQ).any(-1),
        torch.zeros_like(is_run_AQ),
        torch.zeros_like(blocks.tokens_AQ),
    )
    drawn_logp_AQ = torch.zeros_like(logp_AQ)
    if drawn is not None:
        if inputs.nodes is not None:
            drawn = TargetDraws(*(values_T[inputs.nodes.node_AQ.flatten()] for values_T in drawn))
        is_exact_A1 = plan.is_exact_A[:, None]
        drawn_AQ, drawn_logp_AQ, log_z_AQ = (values.view(shape) for values in drawn)
        logp_AQ = torch.where(is_exact_A1, torch.where(is_run_AQ, drawn_logp_AQ, 0.0), logp_AQ)
        nan_AQ = torch.isnan(log_z_AQ) & is_run_AQ
    drawn_AQ = drawn_AQ.long()
    return VerifyOutputs(blocks, logp_AQ, drawn_AQ, drawn_logp_AQ, next_AV, nan_A, nan_AQ, nodes=inputs.nodes)


class VerifyOps:
    """Operations of this stage that have Triton forms, in torch."""

    add_biases = staticmethod(add_biases)
    apply_mask = staticmethod(apply_mask)
    lay_out_blocks = staticmethod(lay_out_blocks)
    lay_out_nodes = staticmethod(lay_out_nodes)
    collect_outputs = staticmethod(collect_outputs)
    verify_chains = staticmethod(verify_chains)
    remap_target = staticmethod(remap_target)
    advance = staticmethod(advance)
