"""Candidate tokens of rows against the torch distributions: tokens, log-probabilities, share of the rest, and the token
that stands for the rest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smc.algorithm.expansion import CANDIDATES_PER_ROW, CandidateTokens
from smc.arrays import to_device
from smc.distributions import Distributions, DistributionSpec, Processors
from smc.executor.sampling import Sampling
from smc.executor.triton_ops import TritonSampling
from smc.kernels.candidate_tokens import propose_candidates
from smc.kernels.truncation import truncate
from smc.philox import DrawKeys, Purpose, exponentials, words
from tests.kernels.conftest import DEVICE
from tests.kernels.test_extremes import DTYPES, largest, logit_rows, truncating
from tests.test_distributions import TOLERANCE, Spec, law_spec

examples = settings(max_examples=200 if DEVICE.type == "cuda" else 4, deadline=None)
SIZES = [1, 2, 15, CANDIDATES_PER_ROW - 1, CANDIDATES_PER_ROW, CANDIDATES_PER_ROW + 1, 40, 300]
ALPHAS = (1.0, 0.5, 2.0)


def keys(rows: int, device: torch.device = DEVICE) -> DrawKeys:
    """Keys of one draw per row: seeds use all 64 bits; rounds, streams and positions all 32."""
    rng = np.random.default_rng(rows)
    big = torch.from_numpy(rng.integers(0, 2**32, (3, rows))).to(device)
    return DrawKeys(
        torch.from_numpy(rng.integers(-(2**63), 2**63, rows)).to(device),
        big[0],
        big[1][:, None],
        big[2],
        Purpose.PROPOSAL,
    )


def made(
    logits_RV: torch.Tensor, vocab: int, spec: DistributionSpec, share: float = 0.0, block: int | None = None
) -> CandidateTokens:
    """Run the kernel and return its candidates on the CPU."""
    key, on_device = keys(len(logits_RV)), spec.to(DEVICE)
    cut = truncate(logits_RV, vocab, on_device, share) if spec.active & Processors.TRUNCATION else None
    offers = propose_candidates(logits_RV, vocab, on_device.temperature_R, key, cut, block=block)
    return CandidateTokens(offers.token_RC.cpu(), offers.logq_RC.cpu(), offers.share_RC.cpu())


def assert_offers(
    offers: CandidateTokens, logits_RV: torch.Tensor, log_law_RV: torch.Tensor, slack: float = 0.0
) -> None:
    """Compare with `log_law_RV`, which is on the CPU. If the race keys of two tokens of the rest are equal up to
    rounding, either may win."""
    rows, vocab = log_law_RV.shape
    most = min(CANDIDATES_PER_ROW, vocab)
    tolerance = {"atol": TOLERANCE + slack, "rtol": TOLERANCE}
    order_RV = logits_RV[:, :vocab].cpu().float().sort(dim=-1, descending=True, stable=True)[1]
    assert torch.equal(offers.token_RC[:, :most], order_RV[:, :most])
    torch.testing.assert_close(offers.logq_RC, log_law_RV.gather(1, offers.token_RC), **tolerance)
    torch.testing.assert_close(offers.share_RC[:, :most], offers.logq_RC[:, :most], rtol=0, atol=0)
    rest_RV = log_law_RV.scatter(1, order_RV[:, :most], -torch.inf)
    rest_R1 = rest_RV.logsumexp(-1, keepdim=True)
    torch.testing.assert_close(offers.share_RC[:, most], rest_R1[:, 0], **tolerance)
    key = keys(rows, torch.device("cpu"))
    columns = (key.seed_R[:, None], key.round_R[:, None], key.stream_RF, key.position_R[:, None])
    word0_R1, word1_R1, _, _ = (
        torch.from_numpy(word) for word in words(*(column.numpy() for column in columns), key.purpose)
    )
    law_RV = torch.where(rest_R1 > -torch.inf, rest_RV - rest_R1, rest_RV).exp()
    race_RV = exponentials(word0_R1, word1_R1, vocab)[:, 0] / law_RV
    won_R = race_RV.gather(1, offers.token_RC[:, most:])[:, 0]
    assert ((won_R <= race_RV.amin(-1) * (1 + 1e-5 + 2 * slack)) | (race_RV.amin(-1) == torch.inf)).all()
    assert (offers.token_RC[rest_R1[:, 0] == -torch.inf, most] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@examples
@given(data=st.data(), share=st.sampled_from([0.0, 0.1]))
def test_truncated_mixed_and_greedy_laws(dtype, data, share):
    """Includes fewer columns than candidates, logits far from 0, all tokens but one forbidden, and equal logits."""
    vocab = data.draw(st.sampled_from(SIZES))
    rows = data.draw(
        st.lists(st.tuples(logit_rows(dtype, vocab), truncating | st.just(Spec())), min_size=1, max_size=4)
    )
    logits_RV = torch.tensor([row for row, _ in rows], dtype=dtype, device=DEVICE)
    spec = law_spec(*(of for _, of in rows))
    log_law_RV = Distributions(spec).proposal(logits_RV.cpu().float(), share)
    slack = largest(logits_RV, spec) * 2**-23 if share else 0.0
    assert_offers(made(logits_RV, vocab, spec, share, block=32), logits_RV, log_law_RV, slack)


@pytest.mark.parametrize("vocab", [256, 257, 2048, 2049, 16384, 16385, 20000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_threshold_search_step_boundaries(vocab, dtype):
    """Includes so many equal logits that only some of them are candidates."""
    logits_RV = (torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab)) * 3).to(dtype).to(DEVICE)
    logits_RV[1] = (logits_RV[1] / 4).round()
    logits_RV[2] = -torch.inf
    logits_RV[2, [0, 63, vocab // 2, vocab - 1]] = torch.tensor([0.0, 1.0, 1.0, -0.0], dtype=dtype, device=DEVICE)
    assert_offers(
        made(logits_RV, vocab, law_spec(*[Spec()] * 3)),
        logits_RV,
        Distributions(law_spec(*[Spec()] * 3)).target(logits_RV.cpu().float()),
    )


@pytest.mark.parametrize(
    ("vocab", "dtype", "cut"), [(128256, torch.float32, {}), (151936, torch.bfloat16, {"min_p": 1e-3})]
)
def test_real_vocabularies_in_strided_rows_with_unused_columns(vocab, dtype, cut):
    wide = (torch.randn(2, 2, vocab + 64, generator=torch.Generator().manual_seed(1)) * 2).to(dtype).to(DEVICE)
    wide[..., vocab:] = 100.0
    spec = law_spec(Spec(temperature=0.7), Spec(**cut))
    log_law_RV = Distributions(spec).proposal(wide[:, 1, :vocab].cpu().float(), 0.05)
    assert_offers(made(wide[:, 1], vocab, spec, 0.05), wide[:, 1], log_law_RV, 1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [20, 700])
def test_rows_without_a_law_give_nan(vocab, temperature):
    logits_RV = torch.randn(5, vocab, device=DEVICE)
    logits_RV[1, 3], logits_RV[2, :], logits_RV[3, vocab - 1], logits_RV[4, :] = (
        torch.nan,
        torch.nan,
        torch.inf,
        -torch.inf,
    )
    logits_RV[1, 4] = logits_RV[2, : vocab // 2] = -logits_RV[1, 3]
    offers = made(logits_RV, vocab, law_spec(*[Spec(temperature=temperature)] * 5), block=128)
    for values_RC in (offers.logq_RC, offers.share_RC):
        assert not values_RC[0].isnan().any() and values_RC[1:].isnan().all()
    assert ((offers.token_RC >= 0) & (offers.token_RC < vocab)).all()


def powered(rows: int, truncated: bool) -> DistributionSpec:
    """Distributions with one power per row, one of them 1, on the device as in a round."""
    rng = np.random.default_rng(rows)
    top_k_R = rng.choice([0, 3, 40], rows) if truncated else np.zeros(rows, dtype=np.int64)
    temperature_R, alpha_R = rng.choice([0.0, 0.7, 1.0], rows), np.resize(ALPHAS, rows)
    return DistributionSpec.of(temperature_R=temperature_R, top_k_R=top_k_R, alpha_R=alpha_R).to(DEVICE)


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("vocab", [8, 200])
def test_offers_of_a_powered_law(vocab, truncated):
    logits_RV = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab)).to(DEVICE) * 3
    spec, key = powered(6, truncated), keys(6)
    found = TritonSampling(vocab).propose_bonus(logits_RV, spec, key)
    expected = Sampling(vocab).propose_bonus(logits_RV, spec, key)
    laws = Distributions(spec, DEVICE)
    offers = CandidateTokens(*(values_RC.cpu() for values_RC in found[0]))
    assert_offers(offers, logits_RV, laws.powered(laws.target(logits_RV))[0].cpu())
    # Among tokens without mass, any may be a candidate.
    torch.testing.assert_close(
        found[1].cpu(), laws.target(logits_RV).cpu().gather(1, offers.token_RC), atol=TOLERANCE, rtol=TOLERANCE
    )
    torch.testing.assert_close(found[2], expected[2], atol=1e-4, rtol=TOLERANCE)


def test_a_bonus_without_a_power_and_scores_of_rows_that_repeat():
    logits_RV, vocab = torch.randn(4, 100, generator=torch.Generator().manual_seed(2)).to(DEVICE), 90
    spec = DistributionSpec.of(top_k_R=[7] * 4).to(DEVICE)
    (offers, logp_RC, log_z_R), expected = (
        kind(vocab).propose_bonus(logits_RV, spec, keys(4)) for kind in (TritonSampling, Sampling)
    )
    torch.testing.assert_close(logp_RC, expected[1], atol=TOLERANCE, rtol=TOLERANCE)
    assert torch.equal(logp_RC, offers.logq_RC) and (log_z_R == 0).all()
    row_X = to_device(np.array([3, 0, 0, 2, 3, 1]), DEVICE)
    for token_X in (torch.randint(0, vocab, (6,), device=DEVICE), logits_RV[row_X, :vocab].argmax(-1)):
        found, wanted = (kind(vocab).score(logits_RV, spec, token_X, row_X) for kind in (TritonSampling, Sampling))
        torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=TOLERANCE)
