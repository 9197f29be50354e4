"""What the target runs in a round, and its verdict: the references, in plain torch; `smc.executor.kernel_blocks` has
what GPUs use.

A block is a particle's last tokens, whose first is already counted in its weight, or known to be the target's own draw.
In look-ahead it was drafted in the round before, and its place is the particle's; in lockstep it has just been drafted,
and continues the particle of its root. See the package's legend for axes.

Chains: rows that draw their own tokens from one root, for decoding by rejection (`smc.algorithm.rejection`).

At the draft, every row of a group continues one of its particles at the first step, and itself from then on. In
lockstep all its tokens are drawn. In look-ahead its first is a guess of what the target is going to say after the
particle's block, one of the likeliest; the others are drawn, so that those that follow the right guess are as good as
drawn after the target has spoken. At the target, what the chains propose is tried against its law. Random numbers are
keyed by seed, position and chain, and by no round: what has been drawn for a position by chains that are off the path
when it is reached has decided nothing.

See the package's legend for axes; C places of groups of chains, Y = C F rows of theirs, V vocabulary.

The target's part of a round up to the choice, and after it: score blocks, then let the chosen candidates be the
particles.

What blocks are: `smc.executor.verify`. What is chosen, and how: `smc.executor.select`. See the package's legend for
axes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from smc.algorithm.expansion import Kind
from smc.algorithm.rejection import Chains, say
from smc.arrays import to_device
from smc.executor.forward import Rows
from smc.executor.guidance import GuidedPass
from smc.executor.messages import DraftedRows, RoundChoice
from smc.executor.plan import RoundPlan, SequenceHandoff
from smc.executor.sampling import DrawKeys, Sampling
from smc.executor.state import Lives, SlotState, remap_block_table
from smc.laws import LawSpec
from smc.philox import STREAMS_PER_PARTICLE, Purpose, exponentials, words
from smc.types import TensorOptions


@dataclass(frozen=True)
class Blocks:
    """What the target scores, by place."""

    origin_A: Tensor
    """int64 place whose particle the block continues; in look-ahead its own."""
    tokens_AQ: Tensor
    logq_AQ: Tensor
    count_A: Tensor
    """Tokens that exist; at least 1."""
    ended_A: Tensor
    """bool: the last of them ends the answer."""
    alive_A: Tensor
    logw_A: Tensor
    """float64 log-weight before what the target says of it."""
    open_A: Tensor
    """bool: the particle goes on after its block."""
    run_A: Tensor
    """Tokens of the block that the model runs: of one that has ended all but the last."""
    position_A: Tensor
    """int64 of the token after the block, counted from the beginning of the sequence."""
    stream_A: Tensor
    """int64: which random numbers an independent particle's bonus is drawn by."""
    rank_A: Tensor
    """int64 number of the place in its group."""


@dataclass(frozen=True)
class VerifyInputs:
    """What is run of blocks, and asked of the logits."""

    blocks: Blocks
    rows: Rows
    law_T: LawSpec[Tensor]
    label_T: Tensor
    """Integers: the token of the block after this one; -1: there is none."""
    keys: DrawKeys
    """Of the target's own draws after each token: those of plain decoding, which know the answer's position, and no
    round."""
    last_A: Tensor
    """int64: which of all T tokens is the block's last."""


@dataclass(frozen=True)
class VerifyOutputs:
    """The target's verdict on blocks, by place."""

    blocks: Blocks
    logp_AQ: Tensor
    """log p of the tokens after the block's first; 0 where there is none. Where the target draws for itself: of what it
    drew."""
    drawn_AQ: Tensor
    """int64: what the target says after each token (exact decoding): its own draw, or what it keeps."""
    next_AV: Tensor | None
    """Logits after the block; None: nobody asks for them."""
    nan_A: Tensor
    """bool: the target's logits were NaN."""
    nan_AQ: Tensor
    """bool: so were those that it drew from for itself."""


LayOut = Callable[[SlotState, Tensor, RoundPlan[Tensor], DraftedRows | None], VerifyInputs]
TargetDraws = tuple[Tensor, Tensor, Tensor]
"""Tokens [T, 1], their log p [T, 1], and log Z [T], as of `smc.executor.sampling.Sampling.bonus`."""
Judge = Callable[[VerifyInputs, RoundPlan[Tensor], Tensor | None, TargetDraws | None, Tensor | None], VerifyOutputs]


def lay_out(state: SlotState, logq_SQ: Tensor, plan: RoundPlan[Tensor], drafted: DraftedRows | None) -> VerifyInputs:
    """What the target runs: what is pending (look-ahead), or the seed and what has just been drafted. The last token of
    a block that has ended is scored, never run. `logq_SQ`: log q of the pending tokens."""
    known = _pending(state, logq_SQ, plan) if drafted is None else _drafted(state, logq_SQ, plan, drafted)
    alive_A, ended_A, count_A, (_, q) = known["alive_A"], known["ended_A"], known["count_A"], known["tokens_AQ"].shape
    slot_A = plan.slot_A[known["origin_A"]]
    held_A, place_A = state.held(slot_A), plan.place_of_rows(1)
    blocks = Blocks(
        **known,
        open_A=alive_A & ~ended_A,
        run_A=torch.where(alive_A, count_A - ended_A.long(), 0),
        position_A=held_A + count_A,
        stream_A=plan.particle_A * STREAMS_PER_PARTICLE,
        rank_A=place_A - plan.first_G[plan.group_A],
    )
    rows = Rows(
        table_SL=state.table_SL,
        slot_R=slot_A.int(),
        tail_RB=plan.target_pages_AQ,
        tail_R=held_A.int(),
        start_R=held_A.int(),
        count_R=blocks.run_A.int(),
        group_R=plan.group_A.int(),
        first_G=plan.first_G,
        size_G=plan.size_G,
        shared_G=plan.shared_G,
        queries=q,
        contexts=plan.contexts,
    )
    column_Q, of_T = torch.arange(q, device=state.device), plan.place_of_rows(q)
    label_AQ = torch.where(column_Q < count_A[:, None] - 1, blocks.tokens_AQ.roll(-1, 1), -1)
    zero_T, position_T = torch.zeros_like(of_T), (held_A[:, None] + 1 + column_Q).flatten()
    return VerifyInputs(
        blocks=blocks,
        rows=rows,
        law_T=plan.target_law.take(of_T),
        label_T=label_AQ.flatten(),
        keys=DrawKeys(plan.seed_A[of_T], zero_T, zero_T[:, None], position_T, Purpose.TARGET),
        last_A=place_A * q + count_A - 1,
    )


def _pending(state: SlotState, logq_SQ: Tensor, plan: RoundPlan[Tensor]) -> dict[str, Tensor]:
    """Look-ahead: blocks that were drafted in the round before."""
    slot_A = plan.slot_A
    return {
        "origin_A": torch.arange(len(slot_A), device=state.device),
        "tokens_AQ": state.pending_SQ[slot_A],
        "logq_AQ": logq_SQ[slot_A],
        "count_A": state.pending_S[slot_A],
        "ended_A": state.ended_S[slot_A],
        "alive_A": state.alive_S[slot_A],
        "logw_A": state.logw_S[slot_A],
    }


def _drafted(state: SlotState, logq_SQ: Tensor, plan: RoundPlan[Tensor], drafted: DraftedRows) -> dict[str, Tensor]:
    """Lockstep: the seed, and what has just been drafted for each place."""
    root_A = drafted.root_X.long()
    slot_A = plan.slot_A[root_A]
    alive_A = state.alive_S[slot_A] & (drafted.share_X > -torch.inf)
    count_A, ended_A = 1 + drafted.count_X, drafted.ended_X
    if plan.has_exact:
        # A draft that proposes nothing, such as one that returns NaN, leaves the seed alone.
        nothing_G = plan.is_exact_G & ~plan.any_of_group(alive_A[None], plan.group_A)[0]
        lone_A = nothing_G[plan.group_A] & state.alive_S[plan.slot_A]
        root_A, slot_A = torch.where(lone_A, plan.place_of_rows(1), root_A), torch.where(lone_A, plan.slot_A, slot_A)
        count_A, ended_A = torch.where(lone_A, 1, count_A), torch.where(lone_A, state.ended_S[plan.slot_A], ended_A)
        alive_A = alive_A | lone_A
    return {
        "origin_A": root_A,
        "tokens_AQ": torch.cat((state.pending_SQ[slot_A, :1], drafted.tokens_XK.long()), 1),
        "logq_AQ": torch.cat((logq_SQ[slot_A, :1], drafted.logq_XK), 1),
        "count_A": count_A,
        "ended_A": ended_A,
        "alive_A": alive_A,
        "logw_A": state.logw_S[slot_A] + drafted.share_X,
    }


def judge(
    asked: VerifyInputs,
    plan: RoundPlan[Tensor],
    labelled_T: Tensor | None,
    drawn: TargetDraws | None,
    next_AV: Tensor | None,
) -> VerifyOutputs:
    """The verdict: `labelled_T`, log p of the labels, 0 where there is none, unless all groups are decoded exactly;
    `drawn`, what the target drew itself, if any group is."""
    blocks, shape = asked.blocks, asked.blocks.tokens_AQ.shape
    column_Q = torch.arange(shape[1], device=blocks.count_A.device)
    is_run_AQ = column_Q < blocks.run_A[:, None]
    logp_AQ = torch.zeros_like(blocks.logq_AQ) if labelled_T is None else labelled_T.view(shape)
    nan_A, nan_AQ, drawn_AQ = (
        torch.isnan(logp_AQ).any(-1),
        torch.zeros_like(is_run_AQ),
        torch.zeros_like(blocks.tokens_AQ),
    )
    if drawn is not None:
        is_exact_A1 = plan.is_exact_A[:, None]
        drawn_AQ, drawn_logp_AQ, log_z_AQ = (values.view(shape) for values in drawn)
        logp_AQ = torch.where(is_exact_A1, torch.where(is_run_AQ, drawn_logp_AQ, 0.0), logp_AQ)
        nan_AQ = torch.isnan(log_z_AQ) & is_run_AQ
    return VerifyOutputs(blocks, logp_AQ, drawn_AQ.long(), next_AV, nan_A, nan_AQ)


@dataclass(frozen=True)
class ChainAssignment:
    """Which particle every row of chains continues; int64."""

    row_Y: Tensor
    """Of all X rows."""
    source_Y: Tensor
    """Place."""
    guess_Y: Tensor
    """Which of the likeliest tokens it begins with, where it begins with a guess."""
    rank_Y: Tensor
    """Number of the row in its group."""

    def spread(self, values_Y: Tensor, others_X: Tensor) -> Tensor:
        """Values of these rows among those of all."""
        return others_X.index_copy(0, self.row_Y, values_Y.to(others_X.dtype))


def assign_chains(plan: RoundPlan[Tensor], alive_A: Tensor) -> ChainAssignment:
    """Rows of every group in the order of its particles, each of which gets as many. No choice depends on what has been
    drawn."""
    device, place_C, branches = plan.chain_C.device, plan.chain_C, plan.branches
    first_G, size_G = plan.first_G.long(), plan.size_G.long()
    row_Y = (place_C[:, None] * branches + torch.arange(branches, device=device)).flatten()
    group_Y = plan.group_A[place_C].repeat_interleave(branches)
    rank_Y, rows_Y = row_Y - first_G[group_Y] * branches, size_G[group_Y] * branches
    # Particles one after another, and how many there are before each group's.
    order_A, before_A = (~alive_A).long().argsort(stable=True), alive_A.long().cumsum(0)
    before_G = torch.where(first_G > 0, before_A[(first_G - 1).clamp(min=0)], 0)
    until_G = before_A[(first_G + size_G - 1).clamp(0, len(alive_A) - 1)]
    count_Y = (until_G - before_G)[group_Y].clamp(min=1)
    which_Y = rank_Y * count_Y // rows_Y
    begin_Y = -(-which_Y * rows_Y // count_Y)
    source_Y = order_A[(before_G[group_Y] + which_Y).clamp(max=len(alive_A) - 1)]
    # Where a group has no particle, its rows continue what is at their own places: nothing.
    is_own_Y = plan.group_A[source_Y] == group_Y
    source_Y = torch.where(is_own_Y & alive_A[source_Y], source_Y, row_Y // branches)
    return ChainAssignment(row_Y, source_Y, (rank_Y - begin_Y) % branches, rank_Y)


@dataclass(frozen=True)
class ChainDraws:
    """What all rows go on with, of which those of chains are used."""

    parent_X: Tensor
    """int64 row of the step before."""
    token_X: Tensor
    logq_X: Tensor


Verify = Callable[[RoundPlan[Tensor], VerifyInputs, Tensor, Tensor], tuple[Tensor, Tensor]]
"""See `verify`."""


def chain_groups(plan: RoundPlan[Tensor]) -> tuple[Tensor, Tensor]:
    """First chain, of all C, and how many, of every group [G]."""
    size_G = torch.where(plan.kind_G == Kind.CHAINS, plan.size_G, 0).long()
    return size_G.cumsum(0) - size_G, size_G


def verify(plan: RoundPlan[Tensor], asked: VerifyInputs, logp_CQV: Tensor, logq_CLV: Tensor) -> tuple[Tensor, Tensor]:
    """What the target says after every token of chains [C, Q], and its log-probability [C, Q], as
    `smc.algorithm.rejection.say`.

    `logp`: the target's log-law after every token; `logq`: what the next was drawn from, of all but the last. The
    reference."""
    blocks, place_C, vocab = asked.blocks, plan.chain_C, logp_CQV.shape[-1]
    first_G, size_G = chain_groups(plan)
    q = blocks.tokens_AQ.shape[1]
    position_CQ = asked.keys.position_R.view(-1, q)[place_C]
    seed_C1 = plan.seed_A[place_C][:, None]
    high_CQ, low_CQ, _, _ = _words(seed_C1, blocks.rank_A[place_C][:, None], position_CQ, Purpose.TRIAL)
    uniform_CQ = ((high_CQ << 21) | (low_CQ >> 11)) * 2.0**-53
    lead_H = first_G[size_G > 0]
    noise = _words(seed_C1[lead_H], torch.zeros_like(seed_C1[lead_H]), position_CQ[lead_H], Purpose.REMAINDER)
    noise_HQV = -exponentials(noise[0], noise[1], vocab).log()
    chains = Chains(blocks.tokens_AQ[place_C], blocks.count_A[place_C], blocks.alive_A[place_C], logp_CQV, logq_CLV)
    return say(chains, (first_G, size_G), uniform_CQ, noise_HQV)


def _words(seed_C1: Tensor, stream_C1: Tensor, position_CQ: Tensor, purpose: Purpose) -> list[Tensor]:
    seed, rounds, stream, position = (
        key.cpu().numpy() for key in (seed_C1, torch.zeros_like(seed_C1), stream_C1, position_CQ)
    )
    return [to_device(word, seed_C1.device) for word in words(seed, rounds, stream, position, purpose)]


@dataclass(frozen=True)
class Followed:
    """How sequences go on, by place after the choice."""

    end_A: Tensor
    """int64 tokens of the sequence."""
    tokens_AW: Tensor
    """int64: the next block, in look-ahead K tokens; in lockstep one, the seed of it."""
    pending_A: Tensor
    """int64: how many of these exist."""


Follow = Callable[[SlotState, Tensor, RoundPlan[Tensor], DraftedRows, RoundChoice, bool], Followed]


def follow(
    state: SlotState,
    logq_SQ: Tensor,
    plan: RoundPlan[Tensor],
    drafted: DraftedRows,
    choice: RoundChoice,
    lookahead: bool,
) -> Followed:
    """Pages follow the choice, and so does log q of what is pending; what else becomes of the slots is returned: others
    read them yet."""
    slot_A, source_A = plan.slot_A, plan.slot_A[choice.ancestor_A]
    block_A = choice.ancestor_A if lookahead else choice.row_A
    has_bonus_A = choice.bonus_A >= 0
    remap_block_table(
        state.table_SL,
        slot_A,
        source_A,
        state.base_S[slot_A],
        state.held(source_A),
        plan.target_pages_AQ[block_A],
        plan.columns,
    )
    end_A = state.end_S[source_A] - choice.cut_A + choice.count_A + has_bonus_A.long()
    bonus_A1 = choice.bonus_A.clamp(min=0)[:, None]
    if lookahead:
        tokens_AW = torch.where(has_bonus_A[:, None], bonus_A1, drafted.tokens_XK[choice.row_A].long())
        logq_AW, count_A = drafted.logq_XK[choice.row_A], torch.where(has_bonus_A, 1, choice.count_A)
    else:
        tokens_AW, logq_AW, count_A = bonus_A1, torch.zeros_like(bonus_A1, dtype=torch.float32), torch.ones_like(end_A)
    logq_SQ[slot_A, : logq_AW.shape[1]] = logq_AW
    # Of a particle that had ended, its last token remains; nothing of it is run or scored again.
    return Followed(end_A, tokens_AW, count_A.clamp(min=1))


@dataclass(frozen=True)
class VerifyOps:
    """What is done beside the model: the references, or kernels."""

    lay_out: LayOut
    judge: Judge
    verify: Verify
    follow: Follow
    add_biases: Callable[[Lives, Tensor, Tensor, Tensor, int], Tensor]
    """`smc.executor.state.add_biases` of the target's own tables."""


class Scorer:
    """A model that scores."""

    def __init__(
        self,
        run: GuidedPass,
        sampling: Sampling,
        state: SlotState,
        steps: VerifyOps,
        *,
        block: int,
        lookahead: bool,
        chains: int,
    ) -> None:
        """`block`: K; in lockstep the seed is scored with it. `chains`: at most, in a round."""
        self.run, self.sampling, self.state = run, sampling, state
        self._steps, self.lookahead = steps, lookahead
        self.queries = block if lookahead else block + 1
        self.logq_SQ = torch.zeros(len(state.end_S), self.queries, device=state.device)
        """log q of the pending tokens."""
        # Nothing is read of these that has not been written.
        laws: TensorOptions = {"dtype": torch.float32, "device": state.device}
        vocab = sampling.vocab
        self.drawn_CLV = torch.empty(chains, self.queries - 1, vocab, **laws)
        """Log-laws that all tokens of chains but the first were drawn from, in every round anew."""
        self._law_TV = torch.empty(chains * self.queries, vocab, **laws)

    def join(self, group: SequenceHandoff, slots_N: Tensor) -> None:
        self.logq_SQ[slots_N, : group.logq_NQ.shape[1]] = to_device(group.logq_NQ, self.state.device)

    def score(self, plan: RoundPlan[Tensor], drafted: DraftedRows | None) -> VerifyOutputs:
        """Run blocks: in look-ahead those that are pending, in lockstep those that have just been `drafted`."""
        asked = self._steps.lay_out(self.state, self.logq_SQ, plan, drafted)
        self.run.begin(plan, plan.target_pages_AQ[:, :0], plan.target_pages_AQ)
        logits_TV = self.run(plan, asked.blocks.tokens_AQ.flatten(), asked.rows, root_R=asked.blocks.origin_A)
        if plan.biased:
            logits_TV = self._steps.add_biases(
                self.state.lives, logits_TV.float(), asked.rows.slot_R, asked.keys.position_R, plan.biased
            )
        labelled_T = drawn = next_AV = None
        if not plan.all_exact:
            labelled_T = self.sampling.score(logits_TV, asked.law_T, asked.label_T[:, None])[:, 0]
            next_AV = logits_TV[asked.last_A]
        if Kind.BEST in plan.kinds:
            drawn = self.sampling.bonus(logits_TV, asked.law_T, asked.keys)
        if len(plan.chain_C):
            drawn = self._verified(plan, asked, logits_TV, drawn)
        return self._steps.judge(asked, plan, labelled_T, drawn, next_AV)

    def _verified(
        self, plan: RoundPlan[Tensor], asked: VerifyInputs, logits_TV: Tensor, drawn: TargetDraws | None
    ) -> TargetDraws:
        """What the target has drawn itself, and of chains what it keeps."""
        place_C, q = plan.chain_C, self.queries
        token_C = (place_C[:, None] * q + torch.arange(q, device=place_C.device)).flatten()
        logp_TV = self._law_TV[: len(token_C)]
        self.sampling.write_law(logits_TV[token_C], asked.law_T.take(token_C), logp_TV)
        said = self._steps.verify(plan, asked, logp_TV.view(len(place_C), q, -1), self.drawn_CLV[: len(place_C)])
        # Padding repeats the first chain.
        chain_C = torch.arange(len(place_C), device=place_C.device)
        said_CQ, logp_CQ = (
            values_CQ[torch.where(chain_C < chain_groups(plan)[1].sum(), chain_C, 0)] for values_CQ in said
        )
        none_T = torch.zeros_like(logits_TV[:, 0], dtype=torch.float32)
        token_T1, logp_T1, log_z_T = drawn or (none_T[:, None].long(), none_T[:, None], none_T)
        return (
            token_T1.index_copy(0, token_C, said_CQ.view(-1, 1).to(token_T1.dtype)),
            logp_T1.index_copy(0, token_C, logp_CQ.view(-1, 1)),
            # Of a law that is NaN anywhere, every entry is.
            log_z_T.index_copy(0, token_C, logp_TV[:, 0].isnan().float().masked_fill(logp_TV[:, 0].isnan(), torch.nan)),
        )

    def follow(self, plan: RoundPlan[Tensor], drafted: DraftedRows, choice: RoundChoice) -> Tensor:
        """The chosen candidates become the particles. Returns how many tokens of each are pending [A]."""
        block_A = choice.ancestor_A if self.lookahead else choice.row_A
        self.run.follow(plan, choice.ancestor_A, plan.target_pages_AQ, block_A, pending=False)
        next_ = self._steps.follow(self.state, self.logq_SQ, plan, drafted, choice, self.lookahead)
        self.state.advance(plan.slot_A, choice, next_.end_A, next_.tokens_AW, next_.pending_A, choice.text_A)
        return next_.pending_A
