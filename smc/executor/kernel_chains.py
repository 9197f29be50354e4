"""What the target says of chains, as a kernel: same interface as the reference in `smc.executor.verify`. Axes: the
package's legend."""

from __future__ import annotations

from torch import Tensor

from smc.executor.plan import RoundPlan
from smc.executor.verify import VerifyInputs, chain_groups
from smc.kernels.rejection import Trials, say
from smc.philox import Purpose


def verify(plan: RoundPlan[Tensor], asked: VerifyInputs, logp_CQV: Tensor, logq_CLV: Tensor) -> tuple[Tensor, Tensor]:
    """As `smc.executor.verify.verify`."""
    blocks = asked.blocks
    trials = Trials(
        place_C=plan.chain_C,
        tokens_AQ=blocks.tokens_AQ,
        count_A=blocks.count_A,
        alive_A=blocks.alive_A,
        rank_A=blocks.rank_A,
        seed_A=plan.seed_A,
        position_AQ=asked.keys.position_R.view(blocks.tokens_AQ.shape),
    )
    return say(trials, logp_CQV, logq_CLV, chain_groups(plan), (Purpose.TRIAL, Purpose.REMAINDER))
