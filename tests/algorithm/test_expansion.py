"""Expansion of rows: distinct rows drawn without replacement, or the best rows; which are chosen, how often, and at
which indices.

Local axes: Y = N * F candidates of a group."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smc.algorithm.expansion import CandidateTokens, SourceRows, assign_rows, expand, inclusion
from smc.algorithm.resampling import Spans
from smc.algorithm.verification import match_samples
from smc.philox import RoundKeys
from smc.types import Decoding

DISTINCT, BEST = int(Decoding.DISTINCT), int(Decoding.WALK)
MASSES = st.lists(st.floats(-40, 3), min_size=1, max_size=12)


def bounds(*sizes: int) -> Spans:
    """Consecutive groups."""
    size_G = torch.tensor(sizes)
    return Spans(size_G.cumsum(0) - size_G, size_G)


def expanded(share_RC, mass_R, sizes, most, kind, *, seeds=None, there_R=None, least=0.0, step=0):
    """Expand groups of the given sizes into `most` rows each."""
    share_RC = torch.tensor(share_RC, dtype=torch.float32)
    token_RC = torch.arange(share_RC.numel()).view(share_RC.shape)
    count = len(sizes)
    there_R = torch.ones(len(share_RC), dtype=torch.bool) if there_R is None else torch.tensor(there_R)
    keys_G = RoundKeys(torch.tensor(seeds or [7] * count), torch.ones(count, dtype=torch.int64))
    most_G, decoding_G = torch.full((count,), most), torch.full((count,), kind)
    rows = bounds(*[most] * count)
    offers = CandidateTokens(token_RC, share_RC, share_RC)
    mass_R = torch.tensor(mass_R, dtype=torch.float64)
    source = SourceRows(offers, mass_R, there_R, bounds(*sizes))
    return expand(source, rows, most_G, decoding_G, keys_G, step, most * count, least)


@settings(max_examples=30, deadline=None)
@given(MASSES, st.integers(1, 12))
def test_inclusion_probabilities(masses, most):
    """They are min(1, c m) for one c and sum to `most`; all are 1 if there are at most `most` candidates."""
    mass_1Y = torch.tensor([masses], dtype=torch.float64)
    pi_Y = inclusion(mass_1Y, torch.tensor([most]), torch.tensor([False])).exp()[0]
    assert pi_Y.max() <= 1
    if len(masses) <= most:
        assert (pi_Y == 1).all()
        return
    assert pi_Y.sum().item() == pytest.approx(most)
    scale_Y = pi_Y / mass_1Y[0].exp()
    below = pi_Y < 1 - 1e-9
    if below.any():
        assert scale_Y[below].max().item() == pytest.approx(scale_Y[below].min().item(), rel=1e-6)
        assert (scale_Y[~below] <= scale_Y[below].max() * (1 + 1e-6)).all()


def test_the_best():
    """The first of equal candidates is chosen; padding and absent rows are ignored."""
    found = expanded(
        [[0.0, -1.0], [0.0, -9.0], [0.0, 0.0]], [-1.0, -2.0, 5.0], [3], 3, BEST, there_R=[True, True, False]
    )
    assert list(zip(found.parent_X.tolist(), found.candidate_X.tolist())) == [(0, 0), (0, 1), (1, 0)]
    assert found.mass_X.tolist() == pytest.approx([-1.0, -2.0, -2.0])


def _chosen(found, rows):
    """(parent, candidate) of each chosen row that is alive."""
    alive_X = found.alive_X[rows]
    return list(zip(found.parent_X[rows][alive_X].tolist(), found.candidate_X[rows][alive_X].tolist()))


@settings(max_examples=20, deadline=None)
@given(st.lists(MASSES, min_size=1, max_size=3), st.integers(1, 6), st.integers(0, 10**6), st.sampled_from([0.0, 0.5]))
def test_no_two_are_the_same_and_they_stand_in_order(groups, most, seed, least):
    """Also for groups of different sizes side by side; each gets the same result as alone."""
    rows = [[0.0, -0.7]] * sum(map(len, groups))
    mass_R = [m for masses in groups for m in masses]
    seeds = [seed + g for g in range(len(groups))]
    together = expanded(rows, mass_R, [len(m) for m in groups], most, DISTINCT, seeds=seeds, least=least)
    first = 0
    for g, masses in enumerate(groups):
        mine = slice(g * most, (g + 1) * most)
        alone = expanded(
            rows[: len(masses)], masses, [len(masses)], most, DISTINCT, seeds=seeds[g : g + 1], least=least
        )
        chosen = [(parent - first, offer) for parent, offer in _chosen(together, mine)]
        assert chosen == sorted(set(chosen)) and 0 < len(chosen) <= most
        assert chosen == _chosen(alone, slice(None))
        torch.testing.assert_close(together.mass_X[mine], alone.mass_X)
        first += len(masses)


@pytest.mark.parametrize("least", [0.0, 0.5])
def test_masses_keep_their_expectation(least):
    """For every candidate, whatever its mass: 4,000 draws at 5 standard errors."""
    mass_R, share_RC, count = [0.0, -1.5, -4.0], [[-0.3, -1.6, -4.0]] * 3, 4000
    sums = np.zeros((3, 3))
    squares = np.zeros((3, 3))
    found = expanded(share_RC * count, mass_R * count, [3] * count, 3, DISTINCT, seeds=list(range(count)), least=least)
    for parent, offer, mass in zip(found.parent_X.tolist(), found.candidate_X.tolist(), found.mass_X.exp().tolist()):
        sums[parent % 3, offer] += mass
        squares[parent % 3, offer] += mass**2
    mean = sums / count
    error = np.sqrt(squares / count - mean**2) / np.sqrt(count)
    expected = np.exp(np.add.outer(mass_R, share_RC[0]))
    assert (abs(mean - expected) < 5 * error + 1e-6).all()
    assert (error < 0.3 * expected.max()).all()


def test_wide_laws_leave_every_row_one_child():
    """With equal masses and many candidates, the limit is independent sampling."""
    share_RC = [[float(np.log(1 / 30))] * 30] * 5
    found = expanded(share_RC * 20, [0.0] * 100, [5] * 20, 5, DISTINCT, seeds=list(range(20)))
    assert (found.parent_X.view(20, 5) - 5 * torch.arange(20)[:, None] == torch.arange(5)).all()
    assert found.mass_X.exp().tolist() == pytest.approx([1.0] * 100, rel=1e-5)


def test_a_population_without_weight_is_given_the_same_weights():
    """Equal weights for the rows that it has, also in a batch with a larger group."""
    share_RC = [[0.0, -np.inf]] * 5
    found = expanded(share_RC, [-np.inf, -np.inf, 0.0, 0.0, 0.0], [2, 3], 3, DISTINCT)
    assert found.collapsed_G.tolist() == [True, False]
    assert found.parent_X.tolist()[:2] == [0, 1] and found.mass_X.tolist()[:3] == [0.0, 0.0, -np.inf]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), max_size=5), min_size=1, max_size=3))
def test_surviving_roots_keep_their_index(groups):
    """Each surviving root keeps its index, and every row gets an index."""
    root_X, alive_X = torch.zeros(5 * len(groups), dtype=torch.int64), torch.zeros(5 * len(groups), dtype=torch.bool)
    for g, roots in enumerate(groups):
        root_X[5 * g : 5 * g + len(roots)] = torch.tensor(sorted(roots), dtype=torch.int64) + 5 * g
        alive_X[5 * g : 5 * g + len(roots)] = True
    groups_G = bounds(*[5] * len(groups))
    row_A, alive_A = assign_rows(root_X, torch.arange(len(root_X)), alive_X, groups_G, groups_G, len(root_X))
    for g, roots in enumerate(groups):
        mine = range(5 * g, 5 * g + 5)
        taken = {place: int(row_A[place]) for place in mine if alive_A[place]}
        assert sorted(taken.values()) == list(range(5 * g, 5 * g + len(roots)))
        for place in mine:
            if place - 5 * g in roots:
                assert root_X[taken[place]] == place
            elif roots:
                assert int(row_A[place]) in taken.values()


def test_the_block_that_agrees_longest():
    tokens_AQ = torch.tensor([[5, 1, 2, 3], [5, 1, 4, 3], [5, 1, 4, 9], [6, 0, 0, 0], [7, 7, 7, 7]])
    drawn_AQ = torch.tensor([[1, 4, 0, 0], [1, 4, 9, 8], [1, 4, 9, 8], [2, 0, 0, 0], [7, 7, 7, 7]])
    count_A, alive_A = torch.tensor([4, 4, 4, 1, 4]), torch.tensor([True, True, True, True, False])
    best_A, right_A = match_samples(
        tokens_AQ, count_A, drawn_AQ, alive_A, Spans(torch.tensor([0, 3, 0]), torch.tensor([3, 1, 0]))
    )
    assert best_A.tolist() == [2, 2, 2, 3, 4] and right_A.tolist() == [4, 4, 4, 1, 1]
