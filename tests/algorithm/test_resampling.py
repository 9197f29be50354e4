"""Resampling schemes and the placement of copies in slots.

Local axes: U uniforms, Y = N * F candidates of a group."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from smc.algorithm.resampling import SCHEMES, assign_slots, offspring
from smc.api.limits import SCHEME_NAMES
from tests.pairwise import few

LARGEST = 1 - 2.0**-53
MOST = 12
examples = settings(max_examples=25, deadline=None)
uniform = st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, 0.5, LARGEST])
uniforms = st.lists(uniform, min_size=MOST, max_size=MOST)
weights = st.lists(st.integers(0, 20), min_size=1, max_size=10).filter(any)
draws = st.integers(1, MOST)
groups = st.lists(st.tuples(weights, draws, uniforms, st.sampled_from(sorted(SCHEMES))), min_size=1, max_size=5)


def normalised(weights: list[int]) -> Tensor:
    return torch.tensor(weights, dtype=torch.float64)[None] / sum(weights)


def indices(*names: str) -> Tensor:
    return torch.tensor([SCHEME_NAMES.index(name) for name in names])


def resample(scheme: str, weights: list[int], draws: int, uniforms: list[float]) -> list[int]:
    uniforms_GU = torch.tensor([uniforms], dtype=torch.float64)
    return offspring(indices(scheme), normalised(weights), torch.tensor([draws]), draws, uniforms_GU)[0].tolist()


def test_every_scheme_has_an_index():
    assert sorted(SCHEME_NAMES) == sorted(SCHEMES)


@pytest.mark.parametrize("scheme", SCHEMES)
@examples
@given(weights=weights, draws=draws, uniforms=uniforms)
def test_counts_sum_to_the_draws_and_zero_weight_is_never_chosen(scheme, weights, draws, uniforms):
    counts = resample(scheme, weights, draws, uniforms)
    assert sum(counts) == draws
    assert min(counts) >= 0
    assert all(count == 0 for count, weight in zip(counts, weights) if weight == 0)


@pytest.mark.parametrize(
    ("scheme", "edge", "row"),
    few(
        product(
            SCHEMES,
            [0.0, LARGEST],
            [[0, 0, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1], [0, 3, 7, 10, 13, 17, 0]],
        )
    ),
)
def test_zero_weight_is_never_chosen_at_the_ends_of_the_unit_interval(scheme, edge, row):
    for draws in range(1, MOST + 1):
        counts = resample(scheme, row, draws, [edge] * MOST)
        assert sum(counts) == draws
        assert all(count == 0 for count, weight in zip(counts, row) if weight == 0)


@pytest.mark.parametrize(
    ("scheme", "below", "above"), [("systematic", 0, 0), ("ssp", 0, 0), ("stratified", 1, 1), ("residual", 0, MOST)]
)
@examples
@given(weights=weights, draws=draws, uniforms=uniforms)
def test_counts_stay_near_their_expectation(scheme, below, above, weights, draws, uniforms):
    """Systematic and SSP give the floor or ceiling of n w; stratified differs from that by at most one; residual gives
    at least the floor."""
    for count, weight in zip(resample(scheme, weights, draws, uniforms), weights):
        expected = draws * weight / sum(weights)
        assert math.floor(expected - 1e-9) - below <= count <= math.ceil(expected + 1e-9) + above


@pytest.mark.parametrize("scheme", ["systematic", "stratified", "residual", "multinomial"])
@examples
@given(weights=weights, draws=draws)
def test_expected_offspring_is_n_times_the_weight(scheme, weights, draws):
    """Exact: each draw depends on one uniform, and a grid of midpoints integrates an indicator of an interval to 1 /
    grid."""
    grid = 1024
    uniforms_GU = ((torch.arange(grid, dtype=torch.float64) + 0.5) / grid)[:, None].expand(-1, MOST)
    counts_GY = offspring(
        indices(scheme).expand(grid),
        normalised(weights).expand(grid, -1),
        torch.full((grid,), draws),
        draws,
        uniforms_GU,
    )
    error_Y = counts_GY.double().mean(0) - normalised(weights)[0] * draws
    assert error_Y.abs().max() <= draws / grid + 1e-9


SSP_CASES = [
    ([1, 1], 1),
    ([3, 1, 1], 1),
    ([0, 2, 3, 0, 1], 4),
    ([7, 1, 5, 3, 9, 2, 8], 7),
    ([20, 1, 1, 1], 3),
    ([4, 3, 2, 1, 1, 1, 1, 1], 5),
]


@pytest.mark.parametrize(("weights", "draws"), SSP_CASES)
def test_expected_offspring_of_ssp_is_n_times_the_weight(weights, draws):
    """8192 fixed draws; a count has variance f (1 - f), f its fractional part. Within 4.5 standard errors: false alarm
    2e-4 in all."""
    rows = 8192
    generator = torch.Generator().manual_seed(1)
    uniforms_GU = torch.rand(rows, MOST, dtype=torch.float64, generator=generator)
    counts_GY = offspring(
        indices("ssp").expand(rows),
        normalised(weights).expand(rows, -1),
        torch.full((rows,), draws),
        draws,
        uniforms_GU,
    ).double()
    expected_Y = normalised(weights)[0] * draws
    part_Y = expected_Y - expected_Y.floor()
    assert ((counts_GY.mean(0) - expected_Y).abs() <= 4.5 * (part_Y * (1 - part_Y) / rows).sqrt() + 1e-9).all()


def test_schemes_differ_in_variance_as_the_theory_says():
    """20000 fixed draws: multinomial has variance n w (1 - w), the others less (Douc et al. 2005). The gaps exceed 20
    standard errors."""
    row, draws, rows = [5, 4, 3, 2, 1, 1, 1, 1], 6, 20_000
    generator = torch.Generator().manual_seed(2)
    uniforms_GU = torch.rand(rows, MOST, dtype=torch.float64, generator=generator)
    variance = {
        name: offspring(
            indices(name).expand(rows), normalised(row).expand(rows, -1), torch.full((rows,), draws), draws, uniforms_GU
        )
        .double()
        .var(0)
        .sum()
        for name in SCHEMES
    }
    weights_Y = normalised(row)[0]
    torch.testing.assert_close(variance["multinomial"], (draws * weights_Y * (1 - weights_Y)).sum(), atol=0, rtol=0.02)
    assert variance["residual"] < 0.9 * variance["multinomial"]
    assert variance["stratified"] < 0.9 * variance["multinomial"]
    expected_Y = weights_Y * draws
    least = ((expected_Y - expected_Y.floor()) * (expected_Y.ceil() - expected_Y)).sum()
    for name in ("systematic", "ssp"):
        torch.testing.assert_close(variance[name], least, atol=0, rtol=0.02)


@examples
@given(groups)
def test_groups_in_one_call_equal_each_group_alone(groups):
    """Groups of different sizes, draws and schemes do not influence each other, and padding is never chosen."""
    width = max(len(weights) for weights, *_ in groups)
    weights_GY = torch.zeros(len(groups), width, dtype=torch.float64)
    for g, (weights, *_) in enumerate(groups):
        weights_GY[g, : len(weights)] = normalised(weights)[0]
    draws_G = torch.tensor([draws for _, draws, _, _ in groups])
    uniforms_GU = torch.tensor([uniforms for *_, uniforms, _ in groups], dtype=torch.float64)
    together = offspring(
        indices(*(scheme for *_, scheme in groups)), weights_GY, draws_G, int(draws_G.max()), uniforms_GU
    ).tolist()
    for counts, (weights, draws, uniforms, scheme) in zip(together, groups):
        assert counts == resample(scheme, weights, draws, uniforms) + [0] * (width - len(weights))


@st.composite
def chosen_counts(draw) -> tuple[list[list[list[int]]], list[int]]:
    """Counts [G][N][F] that sum to at most each group's size, zero in padding, and the sizes."""
    branches, n = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(1, n), min_size=1, max_size=4))
    counts = []
    for size in sizes:
        picks = Counter(
            draw(
                st.lists(st.integers(0, size * branches - 1), min_size=draw(st.sampled_from([0, size])), max_size=size)
            )
        )
        counts.append([[picks[i * branches + f] if i < size else 0 for f in range(branches)] for i in range(n)])
    return counts, sizes


@examples
@given(chosen_counts())
def test_placement_holds_every_copy_and_moves_no_survivor(case):
    counts, sizes = case
    ancestor_GN, branch_GN, filled_GN = assign_slots(torch.tensor(counts), torch.tensor(sizes))
    for g, size in enumerate(sizes):
        ancestors, branches, filled = ancestor_GN[g].tolist(), branch_GN[g].tolist(), filled_GN[g].tolist()
        placed = Counter((a, f) for a, f, is_filled in zip(ancestors, branches, filled) if is_filled)
        assert placed == Counter({(i, f): c for i, row in enumerate(counts[g]) for f, c in enumerate(row) if c})
        for i in range(size):
            first = next((f for f, c in enumerate(counts[g][i]) if c), None)
            if first is not None:
                assert (ancestors[i], branches[i]) == (i, first)
        # Further copies fill the first slots of particles that were not chosen, in order of their candidates.
        open_slots = [i for i in range(size) if not any(counts[g][i])]
        copies = [(ancestors[i], branches[i]) for i in open_slots if filled[i]]
        assert copies == sorted(copies)
        assert [filled[i] for i in open_slots] == [True] * len(copies) + [False] * (len(open_slots) - len(copies))
        for i, is_filled in enumerate(filled):
            assert is_filled or (ancestors[i], branches[i]) == (i, 0)
        assert not any(filled[size:])
