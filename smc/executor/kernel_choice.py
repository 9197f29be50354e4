"""The choice after a round as kernels: same interfaces as the references in `smc.executor.select` and
`smc.executor.select`. See the package's legend for axes."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from smc.algorithm.expansion import Expansion, Offers
from smc.algorithm.selection import Selection
from smc.api.limits import MAX_PARTICLES
from smc.executor.messages import Lineage, RoundChoice, RoundResult
from smc.executor.select import Candidates, Concluded, GroupSizes, ScoreInputs, SelectedTrees
from smc.kernels import conclude as conclusion
from smc.kernels import weigh as weighing
from smc.kernels.program_ids import programs
from smc.kernels.stops import table_arguments
from smc.stops import DONE, MAX_STATES
from smc.types import TensorOptions

ROWS = 32
"""Rows of a program."""


def weigh(evidence: ScoreInputs) -> Candidates:
    """As `smc.executor.select.weigh`."""
    plan, scored, blocks, said, drafted = (
        evidence.plan,
        evidence.scored,
        evidence.scored.blocks,
        evidence.said,
        evidence.drafted,
    )
    (places, q), groups, rows, device = (
        blocks.tokens_AQ.shape,
        len(plan.first_G),
        drafted.all_WX.shape[1],
        plan.slot_A.device,
    )
    offers, asked = said.offers, said.logp_X if evidence.lookahead else said.log_z_A
    width = 1 if offers is None else offers.share_RC.shape[1]
    integers: TensorOptions = {"dtype": torch.int64, "device": device}
    flags: TensorOptions = {"dtype": torch.bool, "device": device}
    root_X, weight_X = torch.empty(rows, **integers), torch.empty(rows, dtype=torch.float64, device=device)
    there_X, alive_A, nan_2G = torch.empty(rows, **flags), torch.empty(places, **flags), torch.empty(2, groups, **flags)
    share_XC = torch.empty(rows, width, dtype=torch.float32, device=device)
    token_XC = torch.empty(rows, 1, **integers) if offers is None else offers.token_RC
    size_3G, random_2G = torch.empty(3, groups, dtype=torch.int32, device=device), torch.empty(2, groups, **integers)
    given = (
        plan.slot_A, plan.group_A, plan.alpha_A, plan.seed_A, plan.round_A, plan.first_G, plan.size_G, plan.kind_G, evidence.state.alive_S,
        blocks.origin_A, blocks.logq_AQ, blocks.count_A, blocks.alive_A, blocks.logw_A, blocks.open_A, scored.logp_AQ, scored.drawn_AQ,
        scored.nan_A, scored.nan_AQ, drafted.all_WX, said.logp_X, said.log_z_A, None if offers is None else offers.share_RC,
        blocks.tokens_AQ, evidence.best_A, evidence.right_A,
    )  # fmt: skip
    weighing.weigh[(triton.cdiv(rows, ROWS) + groups,)](
        *_contiguous(given), root_X, weight_X, there_X, token_XC, share_XC, alive_A, nan_2G, size_3G, random_2G, places, groups, rows,
        F=evidence.width, K=drafted.block, Q=q, C=width, BLOCK_X=ROWS, BLOCK_Q=triton.next_power_of_2(max(q, drafted.block)),
        BLOCK_C=triton.next_power_of_2(width), LOOKAHEAD=evidence.lookahead, EXACT=plan.has_exact, SAID=asked is not None,
        OFFERED=offers is not None,
        # The reference rounds a product before it subtracts from it.
        enable_fp_fusion=False, num_warps=4,
    )  # fmt: skip
    whole = Offers(token_XC, share_XC if offers is None else offers.logq_RC, share_XC)
    target_nan_G, draft_nan_G = nan_2G
    return Candidates(
        root_X, weight_X, there_X, whole, alive_A, target_nan_G, draft_nan_G, GroupSizes(*size_3G, *random_2G)
    )


def conclude(
    evidence: ScoreInputs, candidates: Candidates, own: Selection | None, trees: SelectedTrees | None
) -> Concluded:
    """As `smc.executor.select.conclude`; answers grow in the same launch."""
    plan, state, scored, blocks, said = (
        evidence.plan,
        evidence.state,
        evidence.scored,
        evidence.scored.blocks,
        evidence.said,
    )
    (places, q), groups, rows, device = (
        blocks.tokens_AQ.shape,
        len(plan.first_G),
        len(candidates.root_X),
        plan.slot_A.device,
    )
    tables, chosen = state.stops, None if trees is None else trees.chosen
    integers: TensorOptions = {"dtype": torch.int64, "device": device}
    floats: TensorOptions = {"dtype": torch.float32, "device": device}
    flags: TensorOptions = {"dtype": torch.bool, "device": device}
    choice_9A, flags_2A, count_A = (
        torch.empty(9, places, **integers),
        torch.empty(2, places, **flags),
        torch.empty(places, **integers),
    )
    grown_AQ, (logq_AQ, logp_AQ) = torch.empty(places, q, **integers), torch.empty(2, places, q, **floats)
    first_logp_A, group_2G = torch.empty(places, **floats), torch.empty(2, groups, dtype=torch.float64, device=device)
    flags_3G, path_AQ = torch.empty(3, groups, **flags), torch.empty_like(plan.target_pages_AQ)
    run_2A = torch.empty(2, places, dtype=torch.int32, device=device)
    given = (
        plan.slot_A, plan.group_A, plan.first_G, plan.size_G, plan.kind_G, plan.target_pages_AQ,
        state.end_S, state.pending_S, state.limit_S, state.text_S, state.entry_S, state.least_S, *table_arguments(tables),
        blocks.origin_A, blocks.tokens_AQ, blocks.count_A, blocks.ended_A, blocks.open_A, blocks.run_A, scored.logp_AQ, scored.drawn_AQ,
        evidence.drafted.all_WX, candidates.root_X, said.logp_X, said.bonus_A, candidates.offers.token_RC, said.offered_logp_AC,
        evidence.best_A, evidence.right_A, *(vars(own).values() if own else (None,) * 8), *_of_expansion(chosen),
        *((None, None) if trees is None else (trees.pick_A, trees.alive_A)),
    )  # fmt: skip
    conclusion.conclude[(programs(places, groups),)](
        *_contiguous(given),
        choice_9A, flags_2A, grown_AQ, count_A, logq_AQ, logp_AQ, first_logp_A, group_2G, flags_3G, path_AQ, run_2A, places, groups, rows,
        F=evidence.width, K=evidence.drafted.block, Q=q, C=candidates.offers.token_RC.shape[1], BLOCK_N=MAX_PARTICLES,
        BLOCK_Q=triton.next_power_of_2(q), LOOKAHEAD=evidence.lookahead, OWN=own is not None,
        TREES=trees is not None, EXACT=plan.has_exact, SAID=said.logp_X is not None,
        OFFERED=said.offered_logp_AC is not None, STRINGS=tables.next_EXB is not None, DONE=DONE, STATES=MAX_STATES, num_warps=4,
    )  # fmt: skip
    choice = RoundChoice(choice_9A)
    return choice, RoundResult(
        ancestor_A=choice.ancestor_A,
        alive_A=flags_2A[0],
        cut_A=choice.cut_A,
        grown_AQ=grown_AQ,
        count_A=count_A,
        ended_A=flags_2A[1],
        logw_A=choice.mass_A,
        logq_AQ=logq_AQ,
        logp_AQ=logp_AQ,
        first_logp_A=first_logp_A,
        log_z_G=group_2G[0],
        ess_G=group_2G[1],
        resampled_G=flags_3G[0],
        collapsed_G=flags_3G[1],
        draft_nan_G=candidates.draft_nan_G,
        target_nan_G=candidates.target_nan_G,
        hit_G=flags_3G[2],
        lineage=Lineage(path_AQ, *run_2A),
    )


def _of_expansion(chosen: Expansion | None) -> tuple[Tensor | None, ...]:
    if chosen is None:
        return (None,) * 5
    return chosen.parent_X, chosen.offer_X, chosen.mass_X, chosen.ess_G, chosen.collapsed_G


def _contiguous(given: tuple) -> list:
    return [value.contiguous() if isinstance(value, Tensor) else value for value in given]
