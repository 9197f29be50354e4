"""The target's part of a round up to the choice, and after it: score blocks, then let the chosen candidates be the particles.

A block is a particle's last tokens, whose first is already counted in its weight, or known to be the target's own draw. In look-ahead it
was drafted in the round before, and its place is the particle's; in lockstep it has just been drafted, and continues the particle of its
root. What is chosen, and how: `smc.runtime.choice`. See the package's legend for axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from smc.algorithm.expansion import Kind
from smc.arrays import to_device
from smc.philox import Purpose
from smc.runtime.forward import Rows, StaticForward
from smc.runtime.outcome import Choice, Drafted
from smc.runtime.plan import Join, RoundPlan
from smc.runtime.sampling import DrawKeys, Sampling
from smc.runtime.state import SlotState
from smc.runtime.tables import Reroot


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


@dataclass(frozen=True)
class Scored:
    """The target's verdict on blocks, by place."""

    blocks: Blocks
    open_A: Tensor
    """bool: the particle goes on after its block."""
    run_A: Tensor
    """Tokens of the block that the model ran: of one that has ended all but the last."""
    logp_AQ: Tensor
    """log p of the tokens after the block's first; 0 where there is none. Where the target draws for itself: of what it drew."""
    drawn_AQ: Tensor
    """int64: the target's own draw after each token (exact decoding)."""
    next_AV: Tensor
    """Logits after the block."""
    nan_A: Tensor
    """bool: the target's logits were NaN."""
    nan_AQ: Tensor
    """bool: so were those that it drew from for itself."""


class Scorer:
    """A model that scores."""

    def __init__(
        self,
        forward: StaticForward,
        sampling: Sampling,
        state: SlotState,
        reroot: Reroot,
        follow: Follow,
        *,
        block: int,
        lookahead: bool,
    ) -> None:
        """`block`: K; in lockstep the seed is scored with it."""
        self.forward, self.sampling, self.state, self.reroot = forward, sampling, state, reroot
        self._follow, self.lookahead = follow, lookahead
        self.queries = block if lookahead else block + 1
        self.logq_SQ = torch.zeros(len(state.end_S), self.queries, device=state.device)
        """log q of the pending tokens."""

    def join(self, group: Join, slots_N: Tensor) -> None:
        self.logq_SQ[slots_N, : group.logq_NQ.shape[1]] = to_device(group.logq_NQ, self.state.device)

    def pending_blocks(self, plan: RoundPlan) -> Blocks:
        """Look-ahead: blocks that were drafted in the round before."""
        state, slot_A = self.state, plan.slot_A
        return Blocks(
            origin_A=torch.arange(len(slot_A), device=state.device),
            tokens_AQ=state.pending_SQ[slot_A],
            logq_AQ=self.logq_SQ[slot_A],
            count_A=state.pending_S[slot_A],
            ended_A=state.ended_S[slot_A],
            alive_A=state.alive_S[slot_A],
            logw_A=state.logw_S[slot_A],
        )

    def drafted_blocks(self, plan: RoundPlan, drafted: Drafted) -> Blocks:
        """Lockstep: the seed, and what has just been drafted for each place."""
        state, root_A = self.state, drafted.root_X.long()
        slot_A = plan.slot_A[root_A]
        alive_A = state.alive_S[slot_A] & (drafted.share_X > -torch.inf)
        count_A, ended_A = 1 + drafted.count_X, drafted.ended_X
        if Kind.BEST in plan.kinds:
            # A draft that proposes nothing, such as one that returns NaN, leaves the seed alone.
            nothing_G = (plan.kind_G == Kind.BEST) & ~plan.any_of_group(alive_A[None], plan.group_A)[0]
            lone_A = nothing_G[plan.group_A] & state.alive_S[plan.slot_A]
            place_A = torch.arange(len(root_A), device=root_A.device)
            root_A, slot_A = torch.where(lone_A, place_A, root_A), torch.where(lone_A, plan.slot_A, slot_A)
            count_A, ended_A = torch.where(lone_A, 1, count_A), torch.where(lone_A, state.ended_S[plan.slot_A], ended_A)
            alive_A = alive_A | lone_A
        return Blocks(
            origin_A=root_A,
            tokens_AQ=torch.cat((state.pending_SQ[slot_A, :1], drafted.tokens_XK.long()), 1),
            logq_AQ=torch.cat((self.logq_SQ[slot_A, :1], drafted.logq_XK), 1),
            count_A=count_A,
            ended_A=ended_A,
            alive_A=alive_A,
            logw_A=state.logw_S[slot_A] + drafted.share_X,
        )

    def score(self, plan: RoundPlan, blocks: Blocks) -> Scored:
        """Run blocks. The last token of one that has ended is scored, never run."""
        q, state = self.queries, self.state
        open_A = blocks.alive_A & ~blocks.ended_A
        run_A = torch.where(blocks.alive_A, blocks.count_A - blocks.ended_A.long(), 0)
        slot_A = plan.slot_A[blocks.origin_A]
        held_A = state.held(slot_A)
        rows = Rows(
            table_SL=state.table_SL,
            slot_R=slot_A.int(),
            tail_RB=plan.target_pages_AQ,
            tail_R=held_A.int(),
            start_R=held_A.int(),
            count_R=run_A.int(),
            group_R=plan.group_A.int(),
            first_G=plan.first_G,
            size_G=plan.size_G,
            shared_G=plan.shared_G,
            queries=q,
            short=plan.short,
        )
        logits_TV = self.forward.logits(self.forward(blocks.tokens_AQ.flatten(), rows))
        place_A = torch.arange(len(slot_A), device=state.device)
        column_Q = torch.arange(q, device=state.device)
        law_T = plan.target_law.take(place_A.repeat_interleave(q))
        next_AV = logits_TV[place_A * q + blocks.count_A - 1]
        labelled_AQ = column_Q < blocks.count_A[:, None] - 1
        is_run_AQ = column_Q < run_A[:, None]
        drawn_AQ, logp_AQ = torch.zeros_like(blocks.tokens_AQ), torch.zeros_like(blocks.logq_AQ)
        nan_A, nan_AQ = torch.zeros_like(open_A), torch.zeros_like(is_run_AQ)
        if plan.kinds - {Kind.BEST}:
            label_T1 = blocks.tokens_AQ.roll(-1, 1).view(-1, 1)
            logp_AQ = torch.where(labelled_AQ, self.sampling.score(logits_TV, law_T, label_T1).view(-1, q), 0.0)
            nan_A = torch.isnan(logp_AQ).any(-1)
        if Kind.BEST in plan.kinds:
            # The draws of plain decoding: they know the answer's position, and no round.
            of_T = place_A.repeat_interleave(q)
            position_T = (held_A[:, None] + 1 + column_Q).flatten()
            keys = DrawKeys(plan.seed_A[of_T], torch.zeros_like(of_T), torch.zeros_like(of_T)[:, None], position_T, Purpose.TARGET)
            drawn_T1, drawn_logp_T1, log_z_T = self.sampling.bonus(logits_TV, law_T, keys)
            is_best_A1 = plan.places_of(Kind.BEST)[:, None]
            drawn_AQ = drawn_T1.view(-1, q).long()
            logp_AQ = torch.where(is_best_A1, torch.where(is_run_AQ, drawn_logp_T1.view(-1, q), 0.0), logp_AQ)
            nan_AQ = torch.isnan(log_z_T.view(-1, q)) & is_run_AQ
        return Scored(blocks, open_A, run_A, logp_AQ, drawn_AQ, next_AV, nan_A, nan_AQ)

    def follow(self, plan: RoundPlan, drafted: Drafted, choice: Choice) -> Tensor:
        """The chosen candidates become the particles. Returns how many tokens of each are pending [A]."""
        next_ = self._follow(self.reroot, self.state, self.logq_SQ, plan, drafted, choice, self.lookahead)
        self.state.advance(plan.slot_A, choice, next_.end_A, next_.tokens_AW, next_.pending_A, choice.text_A)
        return next_.pending_A


@dataclass(frozen=True)
class Followed:
    """How sequences go on, by place after the choice."""

    end_A: Tensor
    """int64 tokens of the sequence."""
    tokens_AW: Tensor
    """int64: the next block, in look-ahead K tokens; in lockstep one, the seed of it."""
    pending_A: Tensor
    """int64: how many of these exist."""


Follow = Callable[[Reroot, SlotState, Tensor, RoundPlan, Drafted, Choice, bool], Followed]


def follow(
    reroot: Reroot, state: SlotState, logq_SQ: Tensor, plan: RoundPlan, drafted: Drafted, choice: Choice, lookahead: bool
) -> Followed:
    """Pages follow the choice, and so does log q of what is pending; what else becomes of the slots is returned: others read them yet."""
    slot_A, source_A = plan.slot_A, plan.slot_A[choice.ancestor_A]
    block_A = choice.ancestor_A if lookahead else choice.row_A
    has_bonus_A = choice.bonus_A >= 0
    reroot(state.table_SL, slot_A, source_A, state.base_S[slot_A], state.held(source_A), plan.target_pages_AQ[block_A], plan.columns)
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
