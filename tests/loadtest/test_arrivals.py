"""Distributions of arrival times. Seeds are fixed; each bound is about five standard errors, so a false alarm has a
probability below one in a million."""

from __future__ import annotations

from itertools import islice, pairwise, takewhile

import numpy as np
import pytest

from loadtest import arrivals

COUNT = 20_000


def gaps_of(times) -> np.ndarray:
    return np.diff([0.0, *islice(times, COUNT)])


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_has_its_rate_and_its_burstiness(burstiness):
    """The coefficient of variation of a gamma distribution of shape k is 1/sqrt(k)."""
    gaps = gaps_of(arrivals.gamma(5.0, burstiness, np.random.default_rng(1)))
    variation = burstiness**-0.5
    assert gaps.mean() == pytest.approx(1 / 5, rel=5 * variation / COUNT**0.5)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.08)


def test_poisson_counts_have_their_mean_as_variance():
    times = list(takewhile(lambda at: at < 4000, arrivals.poisson(5.0, np.random.default_rng(2))))
    counts = np.histogram(times, 4000, (0, 4000))[0]
    assert counts.mean() == pytest.approx(5, rel=5 / len(times) ** 0.5)
    assert counts.var() / counts.mean() == pytest.approx(1, abs=5 * (2 / 4000) ** 0.5)


def test_constant():
    assert list(islice(arrivals.constant(4.0), 4)) == [0.0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize(("begin", "end"), [(2.0, 20.0), (20.0, 2.0), (5.0, 5.0)])
def test_ramp_has_the_rate_of_its_moment(begin, end):
    """Counts over many ramps: 10 seconds at the first rate, 100 seconds of change, then the last rate."""
    rng, runs = np.random.default_rng(3), 40
    times = [
        at for _ in range(runs) for at in takewhile(lambda at: at < 120, arrivals.ramp(begin, end, 10.0, 100.0, rng))
    ]
    counts = np.histogram(times, 12, (0, 120))[0]
    climb = [begin + (end - begin) * (step + 0.5) / 10 for step in range(10)]
    expected = runs * 10 * np.array([begin, *climb, end])
    assert np.all(np.abs(counts - expected) < 5 * expected**0.5)


def test_times_never_go_back():
    rng = np.random.default_rng(4)
    for times in (arrivals.gamma(3.0, 0.1, rng), arrivals.ramp(1.0, 9.0, 2.0, 5.0, rng), arrivals.constant(3.0)):
        assert all(earlier <= later for earlier, later in pairwise(islice(times, 1000)))
