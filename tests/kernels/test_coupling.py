"""Kernels of coupled drafting against torch: candidate tokens, and the statistics of the target's draws from which the
exponent is fitted."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from smc.algorithm.coupling import Coupling, is_ranked
from smc.arrays import map_tensors
from smc.distributions import DistributionSpec, Processors
from smc.executor.draft import observe_draws
from smc.executor.ops import RoundOps
from smc.executor.sampling import HeadSampling
from smc.executor.triton_ops import TritonOps
from smc.kernels import draft
from smc.model.draft_vocab import DraftVocab
from smc.philox import DrawKeys, Purpose
from smc.types import Decoding
from tests.kernels.conftest import DEVICE
from tests.kernels.rounds import VOCAB
from tests.kernels.test_draft import CPU, DraftRound
from tests.kernels.test_slot_update import selection_of
from tests.pairwise import few_of_pairs

PLACES = 3


def drawn(
    vocab: int, width: int, seed: int, dtype: torch.dtype
) -> tuple[torch.Tensor, DistributionSpec, DrawKeys, Coupling]:
    """Logits of `width` rows for each of three batch indices: coupled, not coupled (exponent 0), and without noise
    (temperature 0)."""
    rng, rows = np.random.default_rng(seed), PLACES * width
    logits_RV = torch.from_numpy(rng.normal(size=(rows, vocab)) * 3).to(dtype)
    longs = torch.from_numpy(rng.integers(0, 2**31, (3, rows)))
    distribution = DistributionSpec.of(temperature_R=[0.8] * rows).to(CPU)
    keys = DrawKeys(longs[0], longs[1], torch.arange(rows)[:, None], longs[2], Purpose.PROPOSAL)
    exponent_A, temperature_A = torch.tensor([1.3, 0.0, 3.0]), torch.tensor([0.8, 0.8, 0.0])
    return logits_RV, distribution, keys, Coupling(exponent_A, temperature_A, longs[0, :PLACES])


def moved(value: object) -> object:
    """Return a copy of `value` on the device of the kernels."""
    return map_tensors(lambda tensor: tensor.to(DEVICE), value)


SHAPES = [(40, 1, torch.float32), (300, 4, torch.bfloat16), (5000, 2, torch.float32)]


@pytest.mark.parametrize(
    ("shape", "cut", "has_head"), few_of_pairs(product(SHAPES, (False, True), (False, True))), ids=str
)
def test_candidate_tokens_are_the_torch_ones(shape, cut, has_head):
    vocab, width, dtype = shape
    logits_RV, distribution, keys, coupling = drawn(vocab, width, vocab + width, dtype)
    if cut:
        active = distribution.active | Processors.TOP_K
        distribution = distribution._replace(top_k_R=distribution.top_k_R + 35, active=active)
    head = DraftVocab(np.arange(vocab) * 2 + 1, 2 * vocab + 3, 0.05)
    found = []
    for device, ops in ((CPU, RoundOps()), (DEVICE, TritonOps())):
        sampling = ops.head_sampling(head, device) if has_head else ops.sampling(vocab)
        of = moved(coupling) if isinstance(ops, TritonOps) else coupling
        of = of._replace(ids_M=sampling.ids_M)
        kept_RV = torch.zeros(2 * width, vocab, device=device)
        spec, key = (moved(distribution), moved(keys)) if isinstance(ops, TritonOps) else (distribution, keys)
        candidates = sampling.propose_candidates(
            logits_RV.to(device), spec, 0.2, key, has_rest=True, coupling=of, kept_RV=kept_RV
        )
        found.append((candidates, kept_RV.cpu()))
    (one, kept_one), (other, kept_other) = found
    is_coupled_R = (coupling.exponent_A > 0).repeat_interleave(width)
    is_finite_RV = torch.isfinite(kept_one)
    shift_B1 = (kept_other - kept_one).where(is_finite_RV, torch.zeros(())).amax(-1, keepdim=True)
    torch.testing.assert_close(kept_other, kept_one + shift_B1, atol=1e-4, rtol=1e-4)
    # The last candidate stands for the rest; coupled rows ignore it.
    if dtype is torch.float32:  # without noise, equal logits in bfloat16 have equal scores
        assert torch.equal(other.token_RC.cpu()[is_coupled_R, :-1], one.token_RC[is_coupled_R, :-1])
    torch.testing.assert_close(other.share_RC.cpu()[:, :-1], one.share_RC[:, :-1], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(other.share_RC.cpu()[~is_coupled_R], one.share_RC[~is_coupled_R], atol=2e-5, rtol=2e-5)
    assert torch.equal(other.token_RC.cpu()[~is_coupled_R, -1], one.token_RC[~is_coupled_R, -1])


def test_noise_belongs_to_tokens_and_not_to_columns():
    """A draft head with half of the vocabulary gives its tokens the same scores as the whole head, up to a constant."""
    vocab = 60
    logits_RV, distribution, keys, coupling = drawn(vocab, 1, 5, torch.float32)
    ids_M = np.arange(0, vocab, 2)
    head = HeadSampling(RoundOps().sampling(len(ids_M)), DraftVocab(ids_M, vocab, 0.05), CPU)
    whole = RoundOps().sampling(vocab)
    of_head = coupling._replace(ids_M=head.ids_M)
    one = whole.propose_candidates(logits_RV, distribution, 0.0, keys, has_rest=False, coupling=coupling)
    other = head.propose_candidates(logits_RV[:, ids_M], distribution, 0.0, keys, has_rest=False, coupling=of_head)
    for row in (0, 2):
        among_whole = [token for token in one.token_RC[row].tolist() if token % 2 == 0]
        assert among_whole == other.token_RC[row].tolist()[: len(among_whole)]


@pytest.mark.parametrize("lookahead", [True, False])
@pytest.mark.parametrize("has_head", [False, True])
def test_draw_statistics_equal_torch(lookahead, has_head):
    seen = ranked = 0
    for seed in range(12):
        found = []
        for device, ops in ((CPU, RoundOps()), (DEVICE, TritonOps())):
            made = DraftRound(seed, frozenset({Decoding.WALK}), lookahead, device, largest=6)
            tree, selection = made.tree(), selection_of(made)
            ids_M = torch.arange(0, VOCAB, 2, device=device) if has_head else None
            columns = VOCAB if ids_M is None else len(ids_M)
            kept_RV = made.here(made.rng.normal(size=(5, columns)).astype(np.float32))
            kept_RV[:, :: 2 + seed] = -torch.inf
            coupling = Coupling(
                made.plan.arrays.exponent_A, made.plan.target_distribution.temperature_R, made.plan.arrays.seed_A, ids_M
            )
            selection.cut_A[selection.cut_A <= 1] = 0
            given = (made.state, made.plan, tree, selection, kept_RV, coupling)
            found.append(torch.stack(ops.observe_draws(*given)).cpu())
        torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-4, equal_nan=True)
        seen += int(torch.isfinite(found[0][:2]).all(0).sum())
        ranked += int(torch.isfinite(found[0][2]).sum())
    assert seen > 2 and ranked


@pytest.mark.parametrize("columns", [1, 16, 37, 301])
@pytest.mark.parametrize("has_head", [False, True])
def test_draw_statistics_of_several_parts_equal_torch(columns, has_head):
    """Parts that end within a run of columns; equal scores; rows in which all columns, all but one, or all of a part
    are forbidden; tokens that the head lacks."""
    counts = {"scored": 0, "ranked": 0, "cannot": 0}
    for seed in range(6):
        found = []
        for device, observe in ((CPU, observe_draws), (DEVICE, partial(draft.observe_draws, block=16))):
            made = DraftRound(seed, frozenset({Decoding.WALK}), False, device, largest=6)
            tree, selection, rng = made.tree(), selection_of(made), made.rng
            tokens = 2 * columns if has_head else columns
            tree.tokens_XK[:] = made.here(rng.integers(0, tokens, tree.tokens_XK.shape))
            selection.bonus_A[:] = made.here(rng.integers(-1, tokens, made.places))
            selection.cut_A[:] = 0
            kept_RV = made.here(rng.normal(size=(made.places, columns)).astype(np.float32).round(1))
            kept_RV[0], kept_RV[1, 1:], kept_RV[2, :16], kept_RV[3, ::2] = (-torch.inf,) * 4
            ids_M = torch.arange(0, tokens, 2, device=device) if has_head else None
            temperature_A = torch.where(made.here(rng.random(made.places) < 0.5), 0.0, 0.7)
            coupling = Coupling(made.plan.arrays.exponent_A, temperature_A, made.plan.arrays.seed_A, ids_M)
            found.append(torch.stack(observe(made.state, made.plan, tree, selection, kept_RV, coupling)).cpu())
        torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-4, equal_nan=True)
        assert torch.equal(found[1][2].nan_to_num(-1.0), found[0][2].nan_to_num(-1.0)), "ranks are whole numbers"
        counts["scored"] += int(torch.isfinite(found[0][:2]).all(0).sum())
        counts["ranked"] += int(torch.isfinite(found[0][2]).sum())
        counts["cannot"] += int((found[0][2] == columns).sum())
    assert min(counts.values()), counts


def test_ranked_positions_for_all_round_lengths():
    """Whatever the length of a round, a fair share of the visited positions is ranked. Rounds of n tokens visit every
    n-th position."""
    ranked_R = is_ranked(torch.arange(4096))
    for length in range(1, 20):
        for begin in range(length):
            assert 0.1 < ranked_R[begin::length].float().mean() < 0.45


def test_the_rank_of_a_draw_is_how_many_tokens_the_draft_prefers():
    """The reference counts the tokens with a higher score. A token that the head lacks or that has no probability is
    ranked last. Ranks are computed at some positions only."""
    found = {False: 0, True: 0}
    for seed in range(40):
        made = DraftRound(seed, frozenset({Decoding.WALK}), False, CPU, largest=6)
        plan, tree, selection = made.plan, made.tree(), selection_of(made)
        kept_RV = made.here(made.rng.normal(size=(made.places, VOCAB)).astype(np.float32))
        if seed % 2:  # like a token mask
            kept_RV[:, ::3] = -torch.inf
        coupled = partial(Coupling, plan.arrays.exponent_A, plan.target_distribution.temperature_R, plan.arrays.seed_A)
        root_A = selection.particles.ancestor_A
        position_A = made.state.end_S[plan.arrays.slot_A[root_A]]
        score_AV = plan.arrays.exponent_A[root_A, None] * kept_RV[root_A] + coupled().noise(root_A, position_A, VOCAB)
        token_A = torch.where(selection.taken_A > 0, tree.tokens_XK[selection.particles.row_A, 0], selection.bonus_A)
        for ids_M in (torch.arange(VOCAB), torch.arange(0, VOCAB, 2)):
            rank_A = observe_draws(made.state, plan, tree, selection, kept_RV[:, ids_M], coupled(ids_M)).rank_A
            for index in torch.isfinite(rank_A).nonzero()[:, 0].tolist():
                score_V, token = score_AV[index], int(token_A[index])
                is_there = token in ids_M and bool(score_V[token] > -torch.inf)
                expected = (score_V[ids_M] > score_V[token]).sum() if is_there else len(ids_M)
                assert rank_A[index] == expected and is_ranked(position_A[index])
                found[is_there] += 1
    assert min(found.values()) > 2
