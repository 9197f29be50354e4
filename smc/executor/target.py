"""The target's part of a round up to the choice, and after it: score blocks, then let the chosen candidates be the particles.

What blocks are: `smc.executor.verify`. What is chosen, and how: `smc.executor.select`. See the package's legend for axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from smc.algorithm.expansion import Kind
from smc.arrays import to_device
from smc.executor import tables
from smc.executor.biases import Lives
from smc.executor.chains import Verify, chain_groups
from smc.executor.guidance import Pass
from smc.executor.outcome import Choice, Drafted
from smc.executor.plan import Join, RoundPlan
from smc.executor.sampling import Sampling
from smc.executor.state import SlotState
from smc.executor.verify import Asked, Drawn, Judge, LayOut, Scored
from smc.types import TensorOptions


@dataclass(frozen=True)
class Followed:
    """How sequences go on, by place after the choice."""

    end_A: Tensor
    """int64 tokens of the sequence."""
    tokens_AW: Tensor
    """int64: the next block, in look-ahead K tokens; in lockstep one, the seed of it."""
    pending_A: Tensor
    """int64: how many of these exist."""


Follow = Callable[[SlotState, Tensor, RoundPlan[Tensor], Drafted, Choice, bool], Followed]


def follow(state: SlotState, logq_SQ: Tensor, plan: RoundPlan[Tensor], drafted: Drafted, choice: Choice, lookahead: bool) -> Followed:
    """Pages follow the choice, and so does log q of what is pending; what else becomes of the slots is returned: others read them yet."""
    slot_A, source_A = plan.slot_A, plan.slot_A[choice.ancestor_A]
    block_A = choice.ancestor_A if lookahead else choice.row_A
    has_bonus_A = choice.bonus_A >= 0
    tables.reroot(state.table_SL, slot_A, source_A, state.base_S[slot_A], state.held(source_A), plan.target_pages_AQ[block_A], plan.columns)
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
class Steps:
    """What is done beside the model: the references, or kernels."""

    lay_out: LayOut
    judge: Judge
    verify: Verify
    follow: Follow
    add_biases: Callable[[Lives, Tensor, Tensor, Tensor, int], Tensor]
    """`smc.executor.biases.add_biases` of the target's own tables."""


class Scorer:
    """A model that scores."""

    def __init__(
        self,
        run: Pass,
        sampling: Sampling,
        state: SlotState,
        steps: Steps,
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

    def join(self, group: Join, slots_N: Tensor) -> None:
        self.logq_SQ[slots_N, : group.logq_NQ.shape[1]] = to_device(group.logq_NQ, self.state.device)

    def score(self, plan: RoundPlan[Tensor], drafted: Drafted | None) -> Scored:
        """Run blocks: in look-ahead those that are pending, in lockstep those that have just been `drafted`."""
        asked = self._steps.lay_out(self.state, self.logq_SQ, plan, drafted)
        self.run.begin(plan, plan.target_pages_AQ[:, :0], plan.target_pages_AQ)
        logits_TV = self.run(plan, asked.blocks.tokens_AQ.flatten(), asked.rows, root_R=asked.blocks.origin_A)
        if plan.biased:
            logits_TV = self._steps.add_biases(self.state.lives, logits_TV.float(), asked.rows.slot_R, asked.keys.position_R, plan.biased)
        labelled_T = drawn = next_AV = None
        if not plan.all_exact:
            labelled_T = self.sampling.score(logits_TV, asked.law_T, asked.label_T[:, None])[:, 0]
            next_AV = logits_TV[asked.last_A]
        if Kind.BEST in plan.kinds:
            drawn = self.sampling.bonus(logits_TV, asked.law_T, asked.keys)
        if len(plan.chain_C):
            drawn = self._verified(plan, asked, logits_TV, drawn)
        return self._steps.judge(asked, plan, labelled_T, drawn, next_AV)

    def _verified(self, plan: RoundPlan[Tensor], asked: Asked, logits_TV: Tensor, drawn: Drawn | None) -> Drawn:
        """What the target has drawn itself, and of chains what it keeps."""
        place_C, q = plan.chain_C, self.queries
        token_C = (place_C[:, None] * q + torch.arange(q, device=place_C.device)).flatten()
        logp_TV = self._law_TV[: len(token_C)]
        self.sampling.write_law(logits_TV[token_C], asked.law_T.take(token_C), logp_TV)
        said = self._steps.verify(plan, asked, logp_TV.view(len(place_C), q, -1), self.drawn_CLV[: len(place_C)])
        # Padding repeats the first chain.
        chain_C = torch.arange(len(place_C), device=place_C.device)
        said_CQ, logp_CQ = (values_CQ[torch.where(chain_C < chain_groups(plan)[1].sum(), chain_C, 0)] for values_CQ in said)
        none_T = torch.zeros_like(logits_TV[:, 0], dtype=torch.float32)
        token_T1, logp_T1, log_z_T = drawn or (none_T[:, None].long(), none_T[:, None], none_T)
        return (
            token_T1.index_copy(0, token_C, said_CQ.view(-1, 1).to(token_T1.dtype)),
            logp_T1.index_copy(0, token_C, logp_CQ.view(-1, 1)),
            # Of a law that is NaN anywhere, every entry is.
            log_z_T.index_copy(0, token_C, logp_TV[:, 0].isnan().float().masked_fill(logp_TV[:, 0].isnan(), torch.nan)),
        )

    def follow(self, plan: RoundPlan[Tensor], drafted: Drafted, choice: Choice) -> Tensor:
        """The chosen candidates become the particles. Returns how many tokens of each are pending [A]."""
        block_A = choice.ancestor_A if self.lookahead else choice.row_A
        self.run.follow(plan, choice.ancestor_A, plan.target_pages_AQ, block_A, pending=False)
        next_ = self._steps.follow(self.state, self.logq_SQ, plan, drafted, choice, self.lookahead)
        self.state.advance(plan.slot_A, choice, next_.end_A, next_.tokens_AW, next_.pending_A, choice.text_A)
        return next_.pending_A
