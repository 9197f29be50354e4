"""Draws next to a round's selection: a particle's own branch, and the final answer."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smc.algorithm.selection import draw_branch, final_draw
from tests.algorithm.packing import random_candidates

LARGEST = 1 - 2.0**-53
examples = settings(max_examples=12, deadline=None)
log_weight = st.floats(-8, 8) | st.just(-math.inf)


@examples
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 5))
def test_own_branch_is_drawn_by_its_share(shares, scale):
    """A grid of uniforms is exact to 1 / grid. Shares need not sum to one; a zero share is never drawn unless all are
    zero."""
    grid = 512
    uniforms_GN = ((torch.arange(grid, dtype=torch.float64) + 0.5) / grid)[None]
    share_F = torch.tensor(shares, dtype=torch.float64)
    drawn_GN = draw_branch((share_F.log() - scale).expand(1, grid, -1), uniforms_GN)
    frequency_F = drawn_GN[0].bincount(minlength=len(shares)) / grid
    if not any(shares):
        assert (drawn_GN == 0).all()
        return
    assert ((frequency_F - share_F / share_F.sum()).abs() <= 1 / grid + 1e-9).all()
    assert (frequency_F[share_F == 0] == 0).all()
    for edge in (0.0, LARGEST):
        assert (
            shares[draw_branch(share_F.log().expand(1, 1, -1), torch.tensor([[edge]], dtype=torch.float64)).item()] > 0
        )


@examples
@given(st.lists(log_weight, min_size=1, max_size=6))
def test_the_answer_is_one_draw_from_the_softmax_of_the_weights(logw):
    """A grid of uniforms is exact to 1 / grid. If all weights are zero, all particles are equally probable."""
    grid = 200
    logw_N = torch.tensor(logw, dtype=torch.float64)
    drawn = torch.tensor([final_draw(logw_N, (j + 0.5) / grid) for j in range(grid)])
    law_N = (
        logw_N.softmax(-1) if max(logw) > -math.inf else torch.full((len(logw),), 1 / len(logw), dtype=torch.float64)
    )
    assert ((drawn.bincount(minlength=len(logw)) / grid - law_N).abs() <= 1 / grid + 1e-6).all()


@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST])
def test_the_answer_never_has_zero_weight(uniform):
    for seed in range(100):
        logw_N = random_candidates(17, 1, seed)[:, 0]
        logw_N[-1] = -torch.inf
        assert logw_N[final_draw(logw_N, uniform)] > -torch.inf
        reverse_N = logw_N.flip(0)
        assert reverse_N[final_draw(reverse_N, uniform)] > -torch.inf
