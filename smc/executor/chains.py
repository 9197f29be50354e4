"""Chains: rows that draw their own tokens from one root, for decoding by rejection (`smc.algorithm.rejection`).

At the draft, every row of a group continues one of its particles at the first step, and itself from then on. In lockstep all its tokens
are drawn. In look-ahead its first is a guess of what the target is going to say after the particle's block, one of the likeliest; the
others are drawn, so that those that follow the right guess are as good as drawn after the target has spoken. At the target, what the
chains propose is tried against its law. Random numbers are keyed by seed, position and chain, and by no round: what has been drawn for a
position by chains that are off the path when it is reached has decided nothing.

See the package's legend for axes; C places of groups of chains, Y = C F rows of theirs, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from smc.algorithm.expansion import Kind
from smc.algorithm.rejection import Chains, say
from smc.arrays import to_device
from smc.executor.plan import RoundPlan
from smc.executor.verify import Asked
from smc.philox import Purpose, exponentials, words


@dataclass(frozen=True)
class Deal:
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


def deal(plan: RoundPlan[Tensor], alive_A: Tensor) -> Deal:
    """Rows of every group in the order of its particles, each of which gets as many. No choice depends on what has been drawn."""
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
    return Deal(row_Y, source_Y, (rank_Y - begin_Y) % branches, rank_Y)


@dataclass(frozen=True)
class Drawn:
    """What all rows go on with, of which those of chains are used."""

    parent_X: Tensor
    """int64 row of the step before."""
    token_X: Tensor
    logq_X: Tensor


Verify = Callable[[RoundPlan[Tensor], Asked, Tensor, Tensor], tuple[Tensor, Tensor]]
"""See `verify`."""


def chain_groups(plan: RoundPlan[Tensor]) -> tuple[Tensor, Tensor]:
    """First chain, of all C, and how many, of every group [G]."""
    size_G = torch.where(plan.kind_G == Kind.CHAINS, plan.size_G, 0).long()
    return size_G.cumsum(0) - size_G, size_G


def verify(plan: RoundPlan[Tensor], asked: Asked, logp_CQV: Tensor, logq_CLV: Tensor) -> tuple[Tensor, Tensor]:
    """What the target says after every token of chains [C, Q], and its log-probability [C, Q], as `smc.algorithm.rejection.say`.

    `logp`: the target's log-law after every token; `logq`: what the next was drawn from, of all but the last. The reference.
    """
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
    seed, rounds, stream, position = (key.cpu().numpy() for key in (seed_C1, torch.zeros_like(seed_C1), stream_C1, position_CQ))
    return [to_device(word, seed_C1.device) for word in words(seed, rounds, stream, position, purpose)]
