"""Draft chains, for decoding by rejection (`smc.algorithm.verification`): rows that draw their own tokens from one
root, with the distributions that these were drawn from. The draft has `DraftedChains`, the target `VerifiedChains`. The
Triton form of `verify_chains` is in `smc.kernels.verify`.

At the first step of the draft, every row of a group continues one of the group's particles, and from then on itself. In
lockstep all its tokens are drawn. In look-ahead its first token is a guess, one of the likeliest, of the token that the
target will accept after the particle's block. The other tokens are drawn, so rows after a right guess have the same
distribution as rows drawn after the target's pass. Random numbers are keyed by seed, position and chain, not by the
round. A position may be drawn again with the same numbers, because chains off the accepted path have decided nothing
for it.

Local axes: P chains (batch indices of groups whose rows are chains), Y = P * F rows of chains, U groups of chains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from smc.algorithm.resampling import Spans
from smc.algorithm.verification import Chains, verify_by_rejection
from smc.api.engine_config import EngineConfig
from smc.arrays import to_device
from smc.executor.sampling import HeadSampling, Sampling
from smc.philox import DrawKeys, Purpose, exponentials, words
from smc.round.plan import RoundPlan
from smc.round.tensors import (
    DISTRIBUTION,
    CandidateLayout,
    ChainAssignment,
    ChainDraws,
    TargetDraws,
    TokenTree,
    VerifyInputs,
)
from smc.types import Decoding


class DraftedChains:
    """The distributions that the draft has drawn chains from. Their memory is allocated once, for the maximum number of
    chains; entries are read only after they have been written. Methods that return () leave recordings nothing to
    keep."""

    def __init__(self, config: EngineConfig, vocab: int, device: torch.device) -> None:
        self._lookahead = config.lookahead
        chains, length = config.chains(vocab), config.target_tokens - 1
        rooms = (chains * config.branches, *((chains, chains) if config.lookahead else (0, 0)))
        self._drawn_YKV, self._kept_SKV, self._sent_PKV = (
            torch.empty(rows, length, vocab, dtype=DISTRIBUTION, device=device) for rows in rooms
        )

    def draw(
        self,
        sampling: Sampling | HeadSampling,
        plan: RoundPlan[Tensor],
        layout: CandidateLayout,
        logits_RV: Tensor,
        tree: TokenTree,
        step: int,
        assigned: ChainAssignment,
        width: int,
    ) -> ChainDraws:
        """Draw the next tokens of chains, or guess them. `width`: number of nodes into which each row of `tree` was
        split; its first node is the row itself."""
        begins, branches = step == 0, plan.kind.branches
        at_Y = assigned.source_Y if begins else assigned.row_Y
        logits_YV = logits_RV[at_Y]
        if begins and self._lookahead:
            token_Y = sampling.likeliest(logits_YV, branches).gather(1, assigned.guess_Y[:, None])[:, 0]
            logq_Y = torch.zeros_like(token_Y, dtype=torch.float32)
        else:
            seed_Y, rank_Y1 = layout.keys_R.seed[at_Y], assigned.rank_Y[:, None]
            keys = DrawKeys(seed_Y, torch.zeros_like(seed_Y), rank_Y1, tree.next_X[at_Y], Purpose.PROPOSAL)
            dist_YV = self._drawn_YKV[: len(at_Y), step - self._lookahead]
            token_Y, logq_Y = sampling.propose_by(logits_YV, layout.distribution.take(at_Y), keys, dist_YV)
        row_X = torch.arange(len(plan.arrays.slot_A) * branches, device=at_Y.device)
        none_X = torch.zeros_like(row_X)
        parent_X = row_X // branches if begins else row_X
        return ChainDraws(
            parent_X=assigned.spread(at_Y, parent_X) * width,
            token_X=assigned.spread(token_Y, none_X),
            logq_X=assigned.spread(logq_Y, none_X.float()),
        )

    def sent(self, chains: int) -> Tensor:
        """Return the distributions of the blocks that the target verifies in this round, which are sent to it."""
        return (self._sent_PKV if self._lookahead else self._drawn_YKV)[:chains]

    def gather_sent(self, plan: RoundPlan[Tensor]) -> tuple[()]:
        """Let `sent` return those of the blocks in flight (look-ahead)."""
        return self._gather(self._kept_SKV, plan.arrays.distribution_P)

    def follow(self, plan: RoundPlan[Tensor], row_A: Tensor) -> None:
        """Keep the distributions of the selected rows (look-ahead). Those that were sent have arrived, because the
        target verified by them."""
        index_P, f = plan.arrays.chain_P, plan.kind.branches
        order_P = torch.arange(len(index_P), device=index_P.device)
        chain_A, row_P = torch.zeros_like(plan.arrays.slot_A).index_copy(0, index_P, order_P), row_A[index_P]
        self._gather(self._drawn_YKV, chain_A[row_P // f] * f + row_P % f)
        self._kept_SKV.index_copy_(0, plan.arrays.distribution_P, self._sent_PKV[: len(index_P)])

    def _gather(self, from_YKV: Tensor, index_P: Tensor) -> tuple[()]:
        torch.index_select(from_YKV, 0, index_P, out=self._sent_PKV[: len(index_P)])
        return ()


def assign_chains(plan: RoundPlan[Tensor], alive_A: Tensor) -> ChainAssignment:
    """Assign the rows of every group to its particles in order, equally many to each. The assignment does not depend on
    what has been drawn."""
    device, index_P, branches = plan.arrays.chain_P.device, plan.arrays.chain_P, plan.kind.branches
    first_G, size_G = plan.arrays.first_G.long(), plan.arrays.size_G.long()
    row_Y = (index_P[:, None] * branches + torch.arange(branches, device=device)).flatten()
    group_Y = plan.arrays.group_A[index_P].repeat_interleave(branches)
    rank_Y, rows_Y = row_Y - first_G[group_Y] * branches, size_G[group_Y] * branches
    # Batch indices with a particle come first. `before_G`: their number before each group.
    order_A, before_A = (~alive_A).long().argsort(stable=True), alive_A.long().cumsum(0)
    before_G = torch.where(first_G > 0, before_A[(first_G - 1).clamp(min=0)], 0)
    until_G = before_A[(first_G + size_G - 1).clamp(0, len(alive_A) - 1)]
    count_Y = (until_G - before_G)[group_Y].clamp(min=1)
    which_Y = rank_Y * count_Y // rows_Y
    begin_Y = -(-which_Y * rows_Y // count_Y)
    source_Y = order_A[(before_G[group_Y] + which_Y).clamp(max=len(alive_A) - 1)]
    # Without a particle in the group, a row continues its own batch index, which holds nothing.
    is_own_Y = plan.arrays.group_A[source_Y] == group_Y
    source_Y = torch.where(is_own_Y & alive_A[source_Y], source_Y, row_Y // branches)
    return ChainAssignment(row_Y, source_Y, (rank_Y - begin_Y) % branches, rank_Y)


class VerifiedChains:
    """Chains at the target."""

    def __init__(
        self, chains: int, queries: int, sampling: Sampling, verify: Callable[..., Any], device: torch.device
    ) -> None:
        """`chains`: maximum number of chains in a round; `queries`: tokens of a block; `verify`: `verify_chains` in
        torch or in Triton."""
        self._sampling, self._verify, vocab = sampling, verify, sampling.vocab
        # Entries are read only after they have been written.
        self.drawn_PKV = torch.empty(chains, queries - 1, vocab, dtype=DISTRIBUTION, device=device)
        """Log-distributions that the tokens of chains, except the first ones, were drawn from; rewritten in
        every round."""
        self._dist_TV = torch.empty(chains * queries, vocab, device=device)

    def verify(
        self, plan: RoundPlan[Tensor], inputs: VerifyInputs, logits_TV: Tensor, drawn: TargetDraws | None
    ) -> TargetDraws:
        """Return the target's draws, with the results of rejection sampling in the place of those for chains."""
        index_P, q = plan.arrays.chain_P, inputs.rows.queries
        token_P = (index_P[:, None] * q + torch.arange(q, device=index_P.device)).flatten()
        logp_TV = self._dist_TV[: len(token_P)]
        self._sampling.write_distribution(logits_TV[token_P], inputs.distribution_T.take(token_P), logp_TV)
        logp_PQV, groups = logp_TV.view(len(index_P), q, -1), chain_groups(plan)
        verdicts = self._verify(plan, inputs, logp_PQV, self.drawn_PKV[: len(index_P)], groups)
        # Padding repeats the first chain.
        chain_P = torch.arange(len(index_P), device=index_P.device)
        chain_P = torch.where(chain_P < groups.size_G.sum(), chain_P, 0)
        token_PQ, logp_PQ = (values_PQ[chain_P] for values_PQ in verdicts)
        none_T = torch.zeros_like(logits_TV[:, 0], dtype=torch.float32)
        token_T1, logp_T1, log_z_T = drawn or (none_T[:, None].long(), none_T[:, None], none_T)
        return TargetDraws(
            token_T1.index_copy(0, token_P, token_PQ.view(-1, 1).to(token_T1.dtype)),
            logp_T1.index_copy(0, token_P, logp_PQ.view(-1, 1)),
            # If a distribution has a NaN, every entry of it is NaN.
            log_z_T.index_copy(0, token_P, logp_TV[:, 0].isnan().float().masked_fill(logp_TV[:, 0].isnan(), torch.nan)),
        )


def chain_groups(plan: RoundPlan[Tensor]) -> Spans:
    """Return the chains of every group, counted among all C."""
    size_G = torch.where(plan.arrays.decoding_G == Decoding.REJECTION, plan.arrays.size_G, 0).long()
    return Spans(size_G.cumsum(0) - size_G, size_G)


def verify_chains(
    plan: RoundPlan[Tensor], inputs: VerifyInputs, logp_PQV: Tensor, logq_PKV: Tensor, groups: Spans
) -> tuple[Tensor, Tensor]:
    """Verify chains by rejection sampling. Returns the target's token after every token of the chains [P, Q] and its
    log-probability [P, Q], as `smc.algorithm.verification.verify_by_rejection` does.

    `logp`: the target's log-distribution after every token; `logq`: the log-distribution that the next token was drawn
    from, after all tokens but the last. `groups`: see `chain_groups`."""
    blocks, index_P, vocab = inputs.blocks, plan.arrays.chain_P, logp_PQV.shape[-1]
    q = blocks.tokens_AQ.shape[1]
    position_PQ = inputs.keys.position_R.view(-1, q)[index_P]
    seed_P1 = plan.arrays.seed_A[index_P][:, None]
    high_PQ, low_PQ, _, _ = _words(seed_P1, blocks.rank_A[index_P][:, None], position_PQ, Purpose.TRIAL)
    uniform_PQ = ((high_PQ << 21) | (low_PQ >> 11)) * 2.0**-53
    lead_U = groups.first_G[groups.size_G > 0]
    none_U1 = torch.zeros_like(seed_P1[lead_U])
    high_UQ, low_UQ, _, _ = _words(seed_P1[lead_U], none_U1, position_PQ[lead_U], Purpose.REMAINDER)
    noise_UQV = -exponentials(high_UQ, low_UQ, vocab).log()
    chains = Chains(blocks.tokens_AQ[index_P], blocks.count_A[index_P], blocks.alive_A[index_P], logp_PQV, logq_PKV)
    return verify_by_rejection(chains, groups, uniform_PQ, noise_UQV)


def _words(seed_P1: Tensor, stream_P1: Tensor, position_PQ: Tensor, purpose: Purpose) -> list[Tensor]:
    seed, rounds, stream, position = (
        key.cpu().numpy() for key in (seed_P1, torch.zeros_like(seed_P1), stream_P1, position_PQ)
    )
    return [to_device(word, seed_P1.device) for word in words(seed, rounds, stream, position, purpose)]
