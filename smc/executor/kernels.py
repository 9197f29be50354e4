"""The parts of rounds that run as fused kernels on a GPU: forward pass, draws, choice. Same interfaces as the
references. See the package's legend for axes."""

from __future__ import annotations

import torch
from torch import Tensor

from smc.algorithm.expansion import Offers
from smc.executor import kernel_draft
from smc.executor.draft import Continuation, TokenTree
from smc.executor.graph_runner import GraphRunner
from smc.executor.kernel_blocks import judge, lay_out
from smc.executor.kernel_chains import verify
from smc.executor.kernel_choice import conclude, weigh
from smc.executor.kernel_follow import advance, follow
from smc.executor.kernel_forward import KernelForward
from smc.executor.kernel_prompts import run_prompt
from smc.executor.model_runner import Parts
from smc.executor.plan import RoundPlan
from smc.executor.sampling import DrawKeys, HeadSampling, Sampling
from smc.executor.state import BiasTables, Lives, SlotState
from smc.kernels import biases
from smc.kernels.candidate_tokens import offer
from smc.kernels.draft_head import spread, spread_rest
from smc.kernels.expansion import expand, keep_roots
from smc.kernels.guidance import guide, reroot
from smc.kernels.law import Cut
from smc.kernels.rejection import write_law
from smc.kernels.sampling import draw, score
from smc.kernels.selection import select
from smc.kernels.tree import SequenceLimits as TreeLives
from smc.kernels.tree import adopt as kernel_adopt
from smc.kernels.truncation import truncate
from smc.kernels.walk import walk
from smc.laws import LawSpec


class KernelSampling(Sampling):
    """Laws by the kernels: no array of a law is ever written, but for chains."""

    def propose(self, logits_RV: Tensor, law: LawSpec[Tensor], mixture: float, keys: DrawKeys) -> tuple[Tensor, Tensor]:
        token_RD, logq_RD, _ = self._draw(logits_RV, law.temperature_R, keys, self._cut(logits_RV, law, mixture))
        return token_RD, logq_RD

    def propose_by(
        self, logits_RV: Tensor, law: LawSpec[Tensor], keys: DrawKeys, law_RV: Tensor
    ) -> tuple[Tensor, Tensor]:
        token_R1, logq_R1, _ = self._draw(logits_RV, law.temperature_R, keys, self._cut(logits_RV, law))
        self.write_law(logits_RV, law, law_RV)
        return token_R1[:, 0], logq_R1[:, 0]

    def write_law(self, logits_RV: Tensor, law: LawSpec[Tensor], law_RV: Tensor) -> None:
        write_law(logits_RV, law_RV, law.temperature_R, self._cut(logits_RV, law))

    def offer(
        self, logits_RV: Tensor, law: LawSpec[Tensor], mixture: float, keys: DrawKeys, has_rest: bool = True
    ) -> Offers:
        return self._offer(logits_RV, law.temperature_R, keys, self._cut(logits_RV, law, mixture), has_rest)

    def bonus_offer(self, logits_RV: Tensor, law: LawSpec[Tensor], keys: DrawKeys) -> tuple[Offers, Tensor, Tensor]:
        cut = self._cut(logits_RV, law)
        if "alpha" not in law.active:
            offers = self._offer(logits_RV, law.temperature_R, keys, cut)
            return offers, offers.logq_RC, offers.logq_RC[:, 0] * 0.0
        # As of a bonus. The likeliest token's log-probability is finite for any law.
        offers = self._offer(logits_RV, law.temperature_R / law.alpha_R, keys, cut)
        logp_RC = self._score(logits_RV, law, offers.token_RC, cut)
        log_z_R = torch.where(law.alpha_R == 1, 0.0, law.alpha_R * logp_RC[:, 0] - offers.logq_RC[:, 0])
        return offers, logp_RC, log_z_R + offers.logq_RC[:, 0] * 0.0

    def score(self, logits_RV: Tensor, law: LawSpec[Tensor], token_RD: Tensor, row_X: Tensor | None = None) -> Tensor:
        cut = self._cut(logits_RV, law)
        if token_RD.shape[1] == 1:
            return score(logits_RV, self.vocab, law.temperature_R, token_RD[:, 0].int(), cut=cut, row_X=row_X)[0][
                :, None
            ]
        return self._score(logits_RV, law, token_RD, cut, row_X)

    def bonus(self, logits_RV: Tensor, law: LawSpec[Tensor], keys: DrawKeys) -> tuple[Tensor, Tensor, Tensor]:
        cut = self._cut(logits_RV, law)
        if "alpha" not in law.active:
            token_RD, logp_RD, lse_R = self._draw(logits_RV, law.temperature_R, keys, cut)
            return token_RD, logp_RD, lse_R * 0.0
        # p^alpha is p at 1 / alpha of the temperature, and what it takes to normalise shows in any of its tokens.
        token_RD, powered_RD, lse_R = self._draw(logits_RV, law.temperature_R / law.alpha_R, keys, cut)
        logp_RD = self._score(logits_RV, law, token_RD, cut)
        log_z_R = torch.where(law.alpha_R == 1, 0.0, law.alpha_R * logp_RD[:, 0] - powered_RD[:, 0])
        return token_RD, logp_RD, log_z_R + lse_R * 0.0

    def guide(self, own_TV: Tensor, companion_XV: Tensor, of_T: Tensor, scale_T: Tensor) -> Tensor:
        return guide(own_TV, companion_XV, of_T, scale_T)

    def _cut(self, logits_RV: Tensor, law: LawSpec[Tensor], share: float = 0.0) -> Cut | None:
        processors = {"top_k": law.top_k_R, "top_p": law.top_p_R, "min_p": law.min_p_R}
        top_k_R, top_p_R, min_p_R = (values_R if name in law.active else None for name, values_R in processors.items())
        if not law.active & set(processors):
            return None
        return truncate(logits_RV, self.vocab, law.temperature_R, top_k_R, top_p_R, min_p_R, share)

    def _score(
        self, logits_RV: Tensor, law: LawSpec[Tensor], token_XD: Tensor, cut: Cut | None, row_X: Tensor | None = None
    ) -> Tensor:
        none_X = torch.full_like(token_XD[:, 0], -1)
        _, logp_XD = score(logits_RV, self.vocab, law.temperature_R, none_X, token_XD, cut, row_X=row_X)
        assert logp_XD is not None, "asked for"
        return logp_XD

    def _offer(
        self, logits_RV: Tensor, temperature_R: Tensor, keys: DrawKeys, cut: Cut | None, has_rest: bool = True
    ) -> Offers:
        random = (keys.seed_R, keys.round_R, keys.stream_RD[:, 0], keys.position_R, int(keys.purpose))
        return offer(logits_RV, self.vocab, temperature_R, *random, cut, has_rest)

    def _draw(
        self, logits_RV: Tensor, temperature_R: Tensor, keys: DrawKeys, cut: Cut | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        random = (keys.seed_R, keys.round_R, keys.stream_RD, keys.position_R, int(keys.purpose))
        return draw(logits_RV, self.vocab, temperature_R, *random, cut)


class KernelHeadSampling(HeadSampling):
    """One launch makes tokens of columns."""

    def _spread(self, column_RD: Tensor, logq_RD: Tensor, keys: DrawKeys) -> tuple[Tensor, Tensor]:
        random = (keys.seed_R, keys.round_R, keys.stream_RD, keys.position_R, keys.purpose)
        return spread(
            column_RD, logq_RD, random, self.ids_M, self.others_U, self.chance, self.log_inside, self.log_each
        )

    def _spread_rest(self, offers: Offers, keys: DrawKeys, has_rest: bool) -> Offers:
        random = (keys.seed_R, keys.round_R, keys.stream_RD, keys.position_R, keys.purpose)
        logs = (self.log_inside, self.log_share, self.log_each)
        return spread_rest(offers, random, self.ids_M, self.others_U, *logs, has_rest)


def adopt(
    tree: TokenTree, more: Continuation, plan: RoundPlan[Tensor], state: SlotState, *, step: int, branches: int
) -> TokenTree:
    """As `smc.executor.draft.adopt`; answers grow within the same launch."""
    dealt = None if more.chains is None else (more.chains.parent_X, more.chains.token_X, more.chains.logq_X)
    places = (plan.group_A, plan.kind_G, plan.slot_A, plan.branch_pages_XB)
    lives = TreeLives(state.end_S, state.limit_S, state.least_S, state.entry_S, state.stops)
    return TokenTree(
        **kernel_adopt(vars(tree), more.chosen, more.own, dealt, places, lives, step=step, branches=branches)
    )


def add_biases(
    tables: BiasTables, lives: Lives, logits_RV: Tensor, slot_X: Tensor, position_R: Tensor, width: int
) -> Tensor:
    """As `smc.executor.state.add_biases`, in place."""
    added = (tables.column_EB, tables.early_EB, tables.late_EB, tables.count_E)
    return biases.add(logits_RV, added, lives, slot_X.contiguous(), position_R.contiguous(), width)


def gpu_parts(**options: bool) -> Parts:
    """What sides run on GPUs; options are those of `KernelForward`."""
    return Parts(
        forward=lambda worker: KernelForward(worker, **options),
        sampling=KernelSampling,
        head_sampling=KernelHeadSampling,
        stages=GraphRunner,
        select=select,
        expand=expand,
        adopt=adopt,
        keep_roots=keep_roots,
        walk=walk,
        weigh=weigh,
        conclude=conclude,
        lay_out=lay_out,
        judge=judge,
        verify=verify,
        follow=follow,
        advance=advance,
        drafting=kernel_draft.STEPS,
        run_prompt=run_prompt,
        add_biases=add_biases,
        reroot=reroot,
    )
