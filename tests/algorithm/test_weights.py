"""Importance weights: increments, normalisation, effective sample size, evidence."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smc.algorithm.resampling import block_log_weight, effective_sample_size, log_mean_weight, normalise, valid

examples = settings(max_examples=25, deadline=None)
log_weight = st.floats(-50, 50) | st.just(-math.inf)
groups = st.lists(log_weight, min_size=1, max_size=9)


@examples
@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.5, 1.0, 2.0])), min_size=1, max_size=5),
    st.lists(st.tuples(st.floats(-20, 0, width=32), st.floats(-20, 0, width=32)), min_size=20, max_size=20),
    st.sampled_from([math.nan, math.inf, -math.inf, 1e30]),
)
def test_block_weight_is_the_sum_over_existing_tokens_whatever_follows(rows, pairs, junk):
    counts, alphas = zip(*rows)
    logp = [[pairs[4 * r + k][0] if k < n else junk for k in range(4)] for r, n in enumerate(counts)]
    logq = [[pairs[4 * r + k][1] if k < n else junk for k in range(4)] for r, n in enumerate(counts)]
    expected = [sum(a * p - q for p, q in zip(lp[:n], lq[:n])) for n, a, lp, lq in zip(counts, alphas, logp, logq)]
    actual_X = block_log_weight(
        torch.tensor(logp), torch.tensor(logq), torch.tensor(counts), torch.tensor(alphas, dtype=torch.float64)
    )
    assert actual_X.dtype == torch.float64
    torch.testing.assert_close(actual_X, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=1e-12)


def test_a_token_the_target_forbids_takes_all_weight():
    actual = block_log_weight(
        torch.tensor([[-1.0, -torch.inf]]), torch.tensor([[-1.0, -2.0]]), torch.tensor([2]), torch.ones(1)
    )
    assert actual.item() == -math.inf


@examples
@given(groups, st.floats(-1e4, 1e4), st.integers(0, 3))
def test_normalised_weights_sum_to_one_and_ignore_scale_and_padding(logw, shift, padding):
    logw_GN = torch.tensor([logw], dtype=torch.float64)
    weights_GN, log_sum_G = normalise(logw_GN)
    padded_GN = torch.tensor([[x + shift for x in logw] + [-math.inf] * padding], dtype=torch.float64)
    shifted_GN, shifted_sum_G = normalise(padded_GN)
    if max(logw) == -math.inf:
        for weights, log_sum in ((weights_GN, log_sum_G), (shifted_GN, shifted_sum_G)):
            assert (weights == 0).all()
            assert log_sum.item() == -math.inf
        return
    exact = [math.exp(x) for x in logw]
    torch.testing.assert_close(
        weights_GN[0], torch.tensor(exact, dtype=torch.float64) / sum(exact), atol=1e-13, rtol=1e-10
    )
    torch.testing.assert_close(shifted_GN[:, : len(logw)], weights_GN, atol=1e-10, rtol=1e-10)
    assert (shifted_GN[:, len(logw) :] == 0).all()
    assert shifted_sum_G.item() == pytest.approx(math.log(sum(exact)) + shift, abs=1e-9)


@examples
@given(groups)
def test_effective_sample_size_is_one_over_the_sum_of_squares(logw):
    weights_GN, _ = normalise(torch.tensor([logw]))
    ess = effective_sample_size(weights_GN).item()
    positive = sum(x > -math.inf for x in logw)
    if not positive:
        assert ess == 0
        return
    exact = [math.exp(x) for x in logw]
    assert ess == pytest.approx(sum(exact) ** 2 / sum(x * x for x in exact), rel=1e-4)
    assert 1 - 1e-9 <= ess <= positive + 1e-9


@pytest.mark.parametrize("n", [1, 2, 7, 32])
def test_even_weights_have_full_effective_sample_size(n):
    assert effective_sample_size(normalise(torch.full((1, n), -3.0))[0]).item() == pytest.approx(n)


@examples
@given(groups, st.integers(0, 3))
def test_log_mean_weight_is_the_mean_over_the_groups_own_size(logw, padding):
    _, log_sum_G = normalise(torch.tensor([logw + [-math.inf] * padding], dtype=torch.float64))
    mean = sum(math.exp(x) for x in logw) / len(logw)
    expected = math.log(mean) if mean else -math.inf
    assert log_mean_weight(log_sum_G, torch.tensor([len(logw)])).item() == pytest.approx(expected, abs=1e-9)


def test_valid_marks_the_first_entries_of_every_group():
    assert valid(torch.tensor([0, 1, 3]), 3).tolist() == [[False] * 3, [True, False, False], [True] * 3]
