"""Laws of what surrounds a round's selection: its candidates, a particle's own branch, the answer's draw.

Axes: A places, G groups, N particles, F branches.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smc.algorithm.selection import final_draw, lockstep_candidates, lookahead_candidates, own_branch
from tests.algorithm.packing import random_candidates

LARGEST = 1 - 2.0**-53
examples = settings(max_examples=60, deadline=None)
log_weight = st.floats(-8, 8) | st.just(-math.inf)


@examples
@given(st.lists(st.tuples(log_weight, st.floats(-9, 9), st.floats(-9, 9)), min_size=1, max_size=6))
def test_one_branch_look_ahead_candidates_equal_lockstep_ones(particles):
    logw_A, block_A, next_A = torch.tensor(particles, dtype=torch.float64).unbind(-1)
    ahead_A1 = lookahead_candidates(logw_A, block_A, next_A[:, None], torch.ones_like(logw_A, dtype=torch.bool))
    torch.testing.assert_close(ahead_A1, lockstep_candidates(logw_A, block_A + next_A, torch.zeros_like(logw_A)))
    torch.testing.assert_close(ahead_A1, lockstep_candidates(logw_A, block_A, next_A))


@examples
@given(st.floats(-9, 9), st.floats(-9, 9), st.lists(st.floats(-9, 9), min_size=1, max_size=5))
def test_a_family_weighs_the_mean_over_its_branches(logw, block, nexts):
    mean = sum(math.exp(x) for x in nexts) / len(nexts)
    logw_A, block_A = torch.tensor([[logw], [block]], dtype=torch.float64)
    candidates_AF = lookahead_candidates(logw_A, block_A, torch.tensor([nexts], dtype=torch.float64), torch.tensor([True]))
    assert candidates_AF.logsumexp(-1).item() == pytest.approx(logw + block + math.log(mean), abs=1e-9)
    share_F = candidates_AF[0].softmax(-1)
    torch.testing.assert_close(share_F, torch.tensor(nexts, dtype=torch.float64).softmax(-1))


@pytest.mark.parametrize("junk", [0.0, 7.0, math.nan, math.inf, -math.inf])
def test_a_finished_particle_is_one_candidate_with_its_whole_weight(junk):
    logw_A, block_A = torch.tensor([[-1.0, 2.0], [0.25, 0.5]], dtype=torch.float64)
    next_AF = torch.full((2, 3), junk, dtype=torch.float64)
    next_AF[1] = torch.tensor([0.0, 1.0, 2.0])
    candidates_AF = lookahead_candidates(logw_A, block_A, next_AF, torch.tensor([False, True]))
    assert candidates_AF[0].tolist() == [-0.75, -math.inf, -math.inf]
    torch.testing.assert_close(candidates_AF[1], torch.tensor([2.5, 3.5, 4.5], dtype=torch.float64) - math.log(3))


@examples
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 5))
def test_own_branch_is_drawn_by_its_share(shares, scale):
    """A grid of uniforms is exact to 1 / grid; shares need not sum to one; a zero share is never drawn unless all are zero."""
    grid = 512
    uniforms_GN = ((torch.arange(grid, dtype=torch.float64) + 0.5) / grid)[None]
    share_F = torch.tensor(shares, dtype=torch.float64)
    drawn_GN = own_branch((share_F.log() - scale).expand(1, grid, -1), uniforms_GN)
    frequency_F = drawn_GN[0].bincount(minlength=len(shares)) / grid
    if not any(shares):
        assert (drawn_GN == 0).all()
        return
    assert ((frequency_F - share_F / share_F.sum()).abs() <= 1 / grid + 1e-9).all()
    assert (frequency_F[share_F == 0] == 0).all()
    for edge in (0.0, LARGEST):
        assert shares[own_branch(share_F.log().expand(1, 1, -1), torch.tensor([[edge]], dtype=torch.float64)).item()] > 0


@examples
@given(st.lists(log_weight, min_size=1, max_size=6))
def test_the_answer_is_one_draw_from_the_softmax_of_the_weights(logw):
    """A grid of uniforms is exact to 1 / grid. If all weights are zero they count as equal."""
    grid = 200
    logw_N = torch.tensor(logw, dtype=torch.float64)
    drawn = torch.tensor([final_draw(logw_N, (j + 0.5) / grid) for j in range(grid)])
    law_N = logw_N.softmax(-1) if max(logw) > -math.inf else torch.full((len(logw),), 1 / len(logw), dtype=torch.float64)
    assert ((drawn.bincount(minlength=len(logw)) / grid - law_N).abs() <= 1 / grid + 1e-6).all()


@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST])
def test_the_answer_never_has_zero_weight(uniform):
    for seed in range(100):
        logw_N = random_candidates(17, 1, seed)[:, 0]
        logw_N[-1] = -torch.inf
        assert logw_N[final_draw(logw_N, uniform)] > -torch.inf
        reverse_N = logw_N.flip(0)
        assert reverse_N[final_draw(reverse_N, uniform)] > -torch.inf
