"""Draws and scores against the torch distributions: equal keys give equal tokens and log-probabilities.

Local axes: Y more tokens of a row that are scored."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from smc import distributions
from smc.kernels import sampling
from smc.philox import DrawKeys, Purpose, exponentials, words

rng = np.random.default_rng(7)


def keys(rows: int, draws: int) -> tuple[np.ndarray, ...]:
    """Random keys: seeds use all 64 bits; rounds, streams and positions all 32."""
    big = rng.integers(0, 2**32, (3, rows, draws))
    return rng.integers(-(2**63), 2**63, rows), big[0, :, 0], big[1], big[2, :, 0]


def to(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays]


def reference(
    logits_RV: torch.Tensor, temperature_R: torch.Tensor, key: tuple, purpose: int
) -> tuple[torch.Tensor, ...]:
    """Return tokens, their log-probabilities and the race keys [R, F, V], by the torch distributions."""
    seed_R, round_R, stream_RF, position_R = key
    bits = words(seed_R[:, None], round_R[:, None], stream_RF, position_R[:, None], purpose)
    w0_RF, w1_RF = to(logits_RV.device, bits[0], bits[1])
    spec = distributions.DistributionSpec.of(temperature_R=temperature_R.cpu().numpy())
    logq_RV = distributions.Distributions(spec, logits_RV.device).target(logits_RV.float())
    variate_RFV = exponentials(w0_RF, w1_RF, logits_RV.shape[-1])
    token_RF = distributions.draw(logq_RV, variate_RFV)
    return token_RF, logq_RV.gather(1, token_RF), variate_RFV / logq_RV.exp()[:, None]


def assert_same_draws(logits_RV, vocab, temperature_R, key, **options) -> None:
    """Tokens must be equal, unless two race keys are within 1e-6 of each other; where tokens are equal,
    log-probabilities must be too."""
    token_RF, logq_RF, lse_R = sampling.draw(
        logits_RV, vocab, temperature_R, DrawKeys(*to(logits_RV.device, *key), Purpose.PROPOSAL), **options
    )
    law_RV = logits_RV[:, :vocab]
    expected_RF, expected_logq_RF, race_RFV = reference(law_RV, temperature_R, key, Purpose.PROPOSAL)
    same_RF = token_RF == expected_RF
    won_RF, lowest_RF = race_RFV.gather(2, token_RF.long()[..., None])[..., 0], race_RFV.amin(-1)
    assert ((won_RF / lowest_RF)[~same_RF] < 1 + 1e-6).all()
    assert (~same_RF).sum() <= 1
    torch.testing.assert_close(logq_RF[same_RF], expected_logq_RF[same_RF], atol=1e-5, rtol=0)
    scale_R1 = torch.where(temperature_R == 0, 1.0, temperature_R)[:, None]
    torch.testing.assert_close(lse_R, (law_RV.float() / scale_R1).logsumexp(-1), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize(("vocab", "draws"), [(1, 4), (2, 1), (40, 4), (128, 1), (1000, 4), (5000, 1)])
def test_draws_equal_the_torch_laws(device, vocab, draws):
    rows = 12
    logits_RV = torch.randn(rows, vocab, device=device) * torch.linspace(0.1, 8, rows, device=device)[:, None]
    temperature_R = torch.tensor([1.0, 0.7, 1.3, 0.0], device=device).repeat(rows // 4)
    assert_same_draws(logits_RV, vocab, temperature_R, keys(rows, draws), block=min(512, 1 << vocab.bit_length()))


@pytest.mark.slow
def test_thousands_of_draws(device):
    draws = 64  # the interpreter's time depends on programs and draws, not on entries
    logits_RV = torch.randn(24, 3000, device=device) * torch.linspace(0.1, 8, 24, device=device)[:, None]
    assert_same_draws(logits_RV, 3000, torch.rand(24, device=device) + 0.3, keys(24, draws), block=4096)


def test_bfloat16_strided_rows_and_unused_columns(device):
    wide = torch.randn(8, 3, 1100, device=device).bfloat16()
    wide[..., 1000:] = 100.0
    assert_same_draws(wide[:, 1], 1000, torch.ones(8, device=device), keys(8, 2), block=256)


def test_real_vocabulary_in_default_blocks(device):
    logits_RV = (torch.randn(3, 128256, device=device) * 2).bfloat16()
    assert_same_draws(logits_RV, 128256, torch.tensor([1.0, 0.8, 0.0], device=device), keys(3, 4))


def test_forbidden_entries_are_never_drawn(device):
    logits_RV = torch.randn(16, 600, device=device)
    logits_RV[torch.rand(16, 600, device=device) < 0.95] = -torch.inf
    logits_RV[:, :256] = -torch.inf
    logits_RV[:, 599] = 0.0
    assert_same_draws(logits_RV, 600, torch.ones(16, device=device), keys(16, 4), block=256)


def test_greedy_takes_the_first_of_equal_logits(device):
    logits_RV = torch.zeros(4, 700, device=device)
    logits_RV[1, [300, 650]] = 1e-20
    logits_RV[2, 699] = 2.0
    logits_RV[3] = -1e30
    zeros = torch.zeros(4, device=device)
    draw_keys = DrawKeys(*to(device, *keys(4, 2)), Purpose.PROPOSAL)
    token_RF, logq_RF, _ = sampling.draw(logits_RV, 700, zeros, draw_keys, block=256)
    assert token_RF.tolist() == [[0, 0], [300, 300], [699, 699], [0, 0]]
    assert (logq_RF == 0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_law_give_nan(device, bad, temperature):
    logits_RV = torch.randn(3, 700, device=device)
    logits_RV[1] = bad
    logits_RV[2, 300] = bad if bad != -torch.inf else torch.nan
    temperature_R = torch.full((3,), temperature, device=device)
    draw_keys = DrawKeys(*to(device, *keys(3, 2)), Purpose.PROPOSAL)
    token_RF, logq_RF, _ = sampling.draw(logits_RV, 700, temperature_R, draw_keys, block=256)
    assert logq_RF[0].isfinite().all() and logq_RF[1:].isnan().all()
    assert ((token_RF >= 0) & (token_RF < 700)).all()
    logp_T, _ = sampling.score(
        logits_RV, 700, temperature_R, torch.zeros(3, dtype=torch.int32, device=device), block=256
    )
    assert logp_T[1:].isnan().all() and not logp_T[0].isnan()


def test_draws_follow_the_law(device):
    """Chi-square test with 39 degrees of freedom; its 1e-6 quantile is 100. The seed is fixed."""
    logits_V = torch.randn(40, generator=torch.Generator().manual_seed(3)).to(device)
    stream_RF = np.arange(32 * 8).reshape(8, 32)
    constant = np.full(8, 5)
    token_RF, _, _ = sampling.draw(
        logits_V.expand(8, 40),
        40,
        torch.ones(8, device=device),
        DrawKeys(*to(device, constant, constant, stream_RF, constant), Purpose.TARGET),
    )
    expected_V = logits_V.softmax(0).cpu() * stream_RF.size
    counts_V = torch.bincount(token_RF.flatten().cpu(), minlength=40)
    assert ((counts_V - expected_V).square() / expected_V).sum() < 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extra", [0, 1, 3])
def test_scores_equal_log_softmax(device, dtype, extra):
    rows, vocab = 12, 1000
    logits_TV = (torch.randn(rows, 1100, device=device) * 4).to(dtype)
    temperature_T = torch.tensor([1.0, 0.6, 0.0], device=device).repeat(4)
    label_T = torch.randint(0, vocab, (rows,), device=device, dtype=torch.int32)
    extra_TY = torch.randint(0, vocab, (rows, extra), device=device, dtype=torch.int32)
    best_T = logits_TV[:, :vocab].float().argmax(-1).int()
    label_T[2], label_T[3] = best_T[2], -1
    logp_T, extra_logp_TY = sampling.score(
        logits_TV, vocab, temperature_T, label_T, extra_TY if extra else None, block=256
    )
    spec = distributions.DistributionSpec.of(temperature_R=temperature_T.cpu().numpy())
    expected_TV = distributions.Distributions(spec, device).target(logits_TV[:, :vocab].float())
    expected_T = torch.where(label_T < 0, 0.0, expected_TV.gather(1, label_T.clamp(min=0).long()[:, None])[:, 0])
    torch.testing.assert_close(logp_T, expected_T, atol=1e-5, rtol=0)
    assert (extra_logp_TY is None) == (extra == 0)
    if extra:
        torch.testing.assert_close(extra_logp_TY, expected_TV.gather(1, extra_TY.long()), atol=1e-5, rtol=0)


def test_unusable_logits_are_refused(device):
    with pytest.raises(ValueError, match="vocab"):
        sampling.score(
            torch.zeros(2, 8, device=device), 9, torch.ones(2, device=device), torch.zeros(2, dtype=torch.int32)
        )
