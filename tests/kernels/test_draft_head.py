"""Conversion of a draft head's columns to tokens: the kernels against torch, and the torch code against the
distribution that it reports."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from smc.algorithm.expansion import CandidateTokens
from smc.distributions import DistributionSpec
from smc.executor.sampling import HeadSampling, Sampling
from smc.executor.triton_ops import TritonHeadSampling
from smc.model.draft_vocab import DraftVocab
from smc.philox import DrawKeys, Purpose
from tests.kernels.conftest import DEVICE
from tests.kernels.rounds import assert_equal

CPU = torch.device("cpu")


def keys_of(rng: np.random.Generator, rows: int, draws: int, device: torch.device) -> DrawKeys:
    seed_R, round_R, position_R = (
        torch.from_numpy(rng.integers(0, high, rows)).to(device) for high in (2**62, 2**31, 2**20)
    )
    return DrawKeys(
        seed_R,
        round_R,
        torch.from_numpy(rng.integers(0, 2**31, (rows, draws))).to(device),
        position_R,
        Purpose.PROPOSAL,
    )


@pytest.mark.parametrize("share", [1e-3, 0.9])
def test_kernels_are_the_torch_ones(share):
    """Inputs with NaN, rests without mass, one row and many rows."""
    for seed, (rows, draws, width) in enumerate([(1, 1, 2), (7, 3, 5), (9, 8, 33)]):
        made = []
        for device, sampling in ((CPU, HeadSampling), (DEVICE, TritonHeadSampling)):
            rng = np.random.default_rng(seed)
            ids_M = np.sort(rng.permutation(300)[:100])
            head = sampling(Sampling(100), DraftVocab(ids_M, 300, share), device)
            logq = [
                -np.abs(rng.normal(size=shape) * 9).astype(np.float32)
                for shape in ((rows, draws), (rows, width), (rows, width))
            ]
            logq[2][rng.random(rows) < 0.3, -1] = -np.inf
            for values in logq:
                values[rng.random(rows) < 0.2] = np.nan
            logq_RF, logq_RC, share_RC = (torch.from_numpy(values).to(device) for values in logq)
            column_RF, column_RC = (
                torch.from_numpy(rng.integers(0, 100, values.shape)).to(device) for values in logq[:2]
            )
            keys = keys_of(rng, rows, draws, device)
            own = head._spread(column_RF.int() if device == DEVICE else column_RF, logq_RF, keys)
            keys = keys_of(rng, rows, 1, device)
            offers = CandidateTokens(column_RC, logq_RC, share_RC)
            made.append((own, *(head._spread_rest(offers, keys, has_rest) for has_rest in (True, False))))
        assert_equal(made[1], made[0])


def test_a_law_that_is_nan_somewhere_is_nan_everywhere():
    head = HeadSampling(Sampling(2), DraftVocab(np.array([1, 3]), 5, 0.1), CPU)
    zero_R, law = torch.zeros(2, dtype=torch.int64), DistributionSpec.plain(2).to(CPU)
    logits_RM = torch.tensor([[0.0, 1.0], [0.0, math.nan]])
    law_RV = torch.empty(2, 5)
    head.propose_by(logits_RM, law, DrawKeys(zero_R, zero_R, zero_R[:, None], zero_R, Purpose.PROPOSAL), law_RV)
    assert law_RV[0].exp().sum().item() == pytest.approx(1.0) and law_RV[1].isnan().all()


@pytest.mark.parametrize("truncated", [False, True], ids=["whole", "top-k"])
def test_draws_follow_reported_logq(truncated, monkeypatch):
    """The reported probabilities of all tokens add up to 1, and frequencies in 6,000 draws of each kind are within 4.5
    standard errors of them. 11 tokens, 2 kinds, 2 cases: a false alarm for about one seed in 3,000."""
    monkeypatch.setattr("smc.executor.sampling.CANDIDATES_PER_ROW", 3)
    vocab, rows = 10, 6000
    ids_M = np.array([0, 3, 4, 7, 9, 10])
    sampling = HeadSampling(Sampling(6), DraftVocab(ids_M, vocab + 1, 0.2), CPU)
    rng = np.random.default_rng(5)
    law = DistributionSpec.of(temperature_R=[0.8] * rows, top_k_R=[2 if truncated else 0] * rows).to(CPU)
    logits_RM = torch.tensor([[1.0, -1.0, 0.5, 0.0, 2.0, -2.0]]).expand(rows, -1).contiguous()
    token_RF, logq_RF = sampling.propose(logits_RM, law, 0.3, keys_of(rng, rows, 1, CPU))
    offers = sampling.propose_candidates(logits_RM, law, 0.3, keys_of(rng, rows, 1, CPU))
    logq_of = dict(zip(token_RF.flatten().tolist(), logq_RF.flatten().tolist()))
    assert len(logq_of) == vocab + 1 and sum(map(math.exp, logq_of.values())) == pytest.approx(1, abs=1e-5)
    own_V = token_RF.flatten().bincount(minlength=vocab + 1) / rows
    offered = offers.token_RC[0, :-1].tolist()
    rest_V = offers.token_RC[:, -1].bincount(minlength=vocab + 1) / rows
    rest = sum(math.exp(logq) for token, logq in logq_of.items() if token not in offered)
    assert offers.share_RC[:, -1].exp().tolist() == pytest.approx([rest] * rows, abs=1e-5)
    assert offers.share_RC[0, :-1].tolist() == pytest.approx([logq_of[token] for token in offered], abs=1e-5)
    for token, logq in logq_of.items():
        for found, share in (
            (own_V[token], math.exp(logq)),
            (rest_V[token], 0.0 if token in offered else math.exp(logq) / rest),
        ):
            assert abs(found - share) <= 4.5 * math.sqrt(share * (1 - share) / rows)
    assert offers.logq_RC[:, -1].tolist() == pytest.approx(
        [logq_of[token] for token in offers.token_RC[:, -1].tolist()], abs=1e-5
    )
