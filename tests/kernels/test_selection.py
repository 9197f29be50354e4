"""The kernel that selects candidates against torch."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from smc.algorithm.selection import Selection
from smc.algorithm.selection import select as reference
from smc.api.limits import MAX_PARTICLES, SCHEME_NAMES
from smc.arrays import map_tensors
from smc.kernels import select as selection
from smc.kernels.select import select
from smc.philox import Purpose, uniforms
from tests.algorithm.packing import Population, pack, random_candidates
from tests.kernels.conftest import DEVICE

NO_WEIGHT = -math.inf
ON_GPU = DEVICE.type == "cuda"


def on_device(arguments: dict[str, object]) -> dict[str, object]:
    """Move the arguments to the device."""
    return {name: map_tensors(lambda tensor: tensor.to(DEVICE), value) for name, value in arguments.items()}


def assert_same(populations: list[Population], padding: int = 0, padding_groups: int = 0) -> Selection:
    """Compare kernel and reference, and return the kernel's selection."""
    arguments = pack(populations, padding, padding_groups)
    expected, made = reference(**arguments), select(**on_device(arguments))
    made = map_tensors(Tensor.cpu, made)
    for of_made, of_expected in zip(made, expected):
        for name in of_made._fields:
            value, wanted = getattr(of_made, name), getattr(of_expected, name)
            if value.is_floating_point():
                torch.testing.assert_close(value, wanted, atol=1e-12, rtol=1e-12)
            else:
                assert torch.equal(value, wanted), name
    return made


@pytest.mark.parametrize(
    ("offset", "places"),
    [
        (0, "dead"),
        (-744, "weightless"),
        (-746, "another group's"),
        (-900, "dead"),
        (-1e5, "weightless"),
        (-1e5, "another group's"),
        (1e5, "dead"),
        (-746, "weightless"),
    ],
)
def test_zero_weight_never_chosen(offset, places):
    """Six particles, and two batch indices that have no candidate with weight."""
    candidates_NF = random_candidates(6, 1, 3) + offset
    wide_NF = torch.cat((candidates_NF, torch.full((2, 1), NO_WEIGHT, dtype=torch.float64)))
    group = {
        "dead": Population(wide_NF, 1.0, dead=(6, 7)),
        "weightless": Population(wide_NF, 1.0),
        "another group's": Population(candidates_NF, 1.0),
    }[places]
    made = assert_same(
        [group, replace(group, scheme="residual", seed=4), replace(group, threshold=0.0)], padding=3, padding_groups=2
    )
    assert made.statistics.resampled_G.tolist() == [True, True, False, False, False]
    assert (made.particles.ancestor_A[: group.size][made.particles.alive_A[: group.size]] < 6).all()


@st.composite
def candidates(draw, size: int, branches: int) -> torch.Tensor:
    """Log-weights of one group: of any spread, far from 0, partly or wholly zero weight, all equal, or all weight on
    one candidate."""
    logw_NF = random_candidates(
        size, branches, draw(st.integers(0, 10**6)), draw(st.sampled_from([0.01, 1.0, 10.0, 300.0]))
    )
    kind = draw(st.sampled_from(["any", "any", "any", "first branches", "equal", "one", "none"]))
    if kind == "first branches":  # like particles that have ended
        logw_NF[:, 1:] = NO_WEIGHT
    elif kind == "equal":
        logw_NF[:] = -1.5
    elif kind == "one":
        only = draw(st.integers(0, size - 1)), draw(st.integers(0, branches - 1))
        logw_NF[:] = NO_WEIGHT
        logw_NF[only] = 0.0
    elif kind == "none":
        logw_NF[:] = NO_WEIGHT
    return logw_NF + draw(st.sampled_from([0.0, -700.0, -750.0, -3000.0, -1e5, 1e5]))


@st.composite
def populations(draw, branches: int) -> Population:
    size = draw(st.integers(1, 9))
    dead = draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    return Population(
        draw(candidates(size, branches)),
        threshold=draw(st.sampled_from([0.0, 0.5, 1.0, 1.0])),
        scheme=draw(st.sampled_from(SCHEME_NAMES)),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        draws=draw(st.none() | st.integers(1, size)),
        dead=tuple(dead),
        round=draw(st.integers(1, 2**31)),
    )


@settings(max_examples=400 if ON_GPU else 8, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 3, 5]), st.integers(0, 3), st.integers(0, 3))
def test_equals_the_torch_choice(data, branches, padding, padding_groups):
    assert_same(data.draw(st.lists(populations(branches), min_size=1, max_size=5)), padding, padding_groups)


LARGEST = (MAX_PARTICLES, 32)
SHAPES = [
    *((1, 1), (1, 32), (2, 3), (8, 8), (17, 4), (33, 32), (64, 1)),
    *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((16, 4), (32, 32), (63, 17), LARGEST)),
]


@pytest.mark.parametrize("size, branches", SHAPES)
def test_equals_the_torch_choice_up_to_the_largest_shape(size, branches):
    """Every scheme draws as many particles as there are, or fewer; dead batch indices are filled."""
    groups = []
    for g, scheme in enumerate(SCHEME_NAMES):
        candidates_NF = random_candidates(size, branches, 10 * size + g, spread=2.0) - 1e5 * (g % 2)
        dead, draws = [((), None), ((), (size + 1) // 2), (tuple(range(1, size, 3)), size)][g % 3]
        groups.append(Population(candidates_NF, 1.1, scheme, g, draws, dead))
    made = assert_same([*groups, replace(groups[0], threshold=0.0)], padding=1)
    assert made.statistics.resampled_G.tolist() == [True] * len(SCHEME_NAMES) + [False]


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
def test_equal_weights_resample_only_on_resize(scheme):
    """Equal particles have ESS = N up to rounding. Resampling to another size meets expectations whose fractional parts
    add up to 1 only up to rounding; the SSP scheme must handle that."""
    even = [
        Population(torch.full((size, 2), -900.3, dtype=torch.float64), 1.0, scheme, seed=size) for size in (3, 7, 12)
    ]
    changed = [replace(even[2], draws=6), replace(even[1], draws=5), replace(even[2], dead=(1, 2, 4, 8), draws=12)]
    made = assert_same([*even, *changed])
    assert made.statistics.resampled_G.tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_group_with_nan_keeps_its_places_and_disturbs_no_other(bad):
    broken_NF = random_candidates(5, 2, 1)
    broken_NF[2, 1] = bad
    fine = Population(random_candidates(4, 2, 2), seed=3)
    arguments = pack([fine, Population(broken_NF, draws=3), fine])
    expected, made = reference(**arguments), select(**on_device(arguments))
    for name in ("ancestor_A", "logw_A", "alive_A"):
        torch.testing.assert_close(getattr(made.particles, name).cpu(), getattr(expected.particles, name))
    for name in ("resampled_G", "collapsed_G"):
        torch.testing.assert_close(getattr(made.statistics, name).cpu(), getattr(expected.statistics, name))
    assert made.particles.ancestor_A[4:9].tolist() == [4, 5, 6, 7, 8]
    assert made.particles.alive_A[4:9].tolist() == [True] * 3 + [False] * 2


@pytest.mark.parametrize("threshold", [1.1, 0.0])
def test_points_on_edges_choose_no_candidate_without_weight(threshold):
    """Weights end, up to rounding, at the points of a systematic draw, or at the uniform that picks a branch, next to
    candidates without weight. The selection may differ from the reference, but must have weight."""
    groups = []
    for seed in range(12):
        shift = uniforms(
            np.array([seed]), np.array([1]), np.array([0 if threshold else 1 << 20]), Purpose.SELECTION
        ).item()
        weights_NF = torch.zeros(8, 4, dtype=torch.float64)
        weights_NF[0, 1], weights_NF[1:7, 1], weights_NF[7, 2] = shift / 8, 1 / 8, (1 - shift) / 8 + 1e-300
        weights_NF[0, 3] = 1e-17 if threshold else (1 - shift) / 8
        groups.append(Population(weights_NF.log() - 800, threshold, "systematic", seed))
    arguments = pack(groups)
    assert_chosen_have_weight(arguments, select(**on_device(arguments)))


@pytest.mark.skipif(ON_GPU, reason="a compiled kernel's uniforms cannot be replaced")
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
def test_uniforms_at_the_ends_choose_no_candidate_without_weight(uniform, monkeypatch):
    monkeypatch.setattr(selection, "draw_uniforms", lambda _, position_X, __: position_X.to(tl.float64) * 0 + uniform)
    groups = []
    for scheme in SCHEME_NAMES:
        candidates_NF = random_candidates(8, 4, 5)
        candidates_NF[[0, -1]] = NO_WEIGHT
        groups += [Population(candidates_NF, threshold, scheme) for threshold in (1.1, 0.0)]
    arguments = pack(groups)
    assert_chosen_have_weight(arguments, select(**arguments))


def assert_chosen_have_weight(arguments: dict[str, object], made: Selection) -> None:
    """Chosen branches have weight if any branch of the particle has; in a resampled group every particle must have
    one."""
    family_AF = arguments["candidates_AF"][made.particles.ancestor_A.cpu()]
    chosen_A = arguments["candidates_AF"].flatten()[made.particles.row_A.cpu()]
    has_weight_A = (family_AF > NO_WEIGHT).any(-1)
    assert (chosen_A > NO_WEIGHT)[has_weight_A].all()
    resampled_A = made.statistics.resampled_G.cpu().repeat_interleave(arguments["groups"].spans.size_G)
    assert has_weight_A[resampled_A].all()
