"""Laws of one round's selection: what is preserved in expectation, when a group resamples, and what padding may not do.

Axes: G groups, N particles, F branches, M = N * F candidates, U uniforms.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from smc.algorithm.resampling import SCHEMES
from smc.algorithm.selection import (
    Selection,
    committed_length,
    final_draw,
    lockstep_candidates,
    lookahead_candidates,
    own_branch,
    select,
)

LARGEST = 1 - 2.0**-53
examples = settings(max_examples=60, deadline=None)
log_weight = st.floats(-8, 8) | st.just(-math.inf)


def random_candidates(n: int, branches: int, seed: int, spread: float = 1.5) -> Tensor:
    """Candidate log-weights [N, F], some of them zero weight."""
    generator = torch.Generator().manual_seed(seed)
    logw_NF = torch.randn(n, branches, dtype=torch.float64, generator=generator) * spread
    dropped_NF = torch.rand(n, branches, generator=generator) < 0.2
    dropped_NF[0, 0] = False
    return torch.where(dropped_NF, -torch.inf, logw_NF)


def random_uniforms(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def select_one(candidates_NF: Tensor, threshold: float, scheme: str = "systematic", seed: int = 0) -> Selection:
    n, branches = candidates_NF.shape
    return select(
        candidates_NF[None],
        torch.tensor([n]),
        torch.tensor([threshold]),
        [scheme],
        random_uniforms(1, n * branches, seed=seed),
        random_uniforms(1, n, seed=seed + 1),
    )


def mean_weight_after(chosen: Selection, groups: slice, size: int, branches: int) -> Tensor:
    """Mean over groups of Z-hat's increment times the weight that ended on each candidate, [size * F]."""
    index_GN = chosen.ancestor_GN[groups, :size] * branches + chosen.branch_GN[groups, :size]
    weight_GN = (chosen.log_z_G[groups, None] + chosen.logw_GN[groups, :size]).exp()
    return torch.zeros(len(index_GN), size * branches, dtype=torch.float64).scatter_add_(1, index_GN, weight_GN).mean(0)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("branches", [1, 2, 4])
@pytest.mark.parametrize("path", ["own branch", *SCHEMES])
def test_expected_weight_of_every_candidate_is_preserved(path, branches, padded):
    """The law that keeps Z-hat and every estimate unbiased, for resampled groups and for those that keep their own branch.

    Repeated over a grid of uniforms, which is exact to total / grid where each choice depends on one uniform. SSP needs
    independent ones: fixed random uniforms within 4.5 standard errors, false alarm 7e-6 a candidate, 6e-4 in all.
    """
    repeats, sizes = (4096, [4]) if path == "ssp" else (512, [5])
    if padded:
        sizes = [1, 2, 3] if path == "ssp" else [1, 2, 3, 5]
    width = max(sizes) + padded
    cases = [random_candidates(size, branches, seed=10 * size + branches) for size in sizes]
    candidates_GNF = torch.full((len(sizes), width, branches), torch.nan, dtype=torch.float64)
    for g, case in enumerate(cases):
        candidates_GNF[g, : len(case)] = case
    grid_G1 = ((torch.arange(repeats, dtype=torch.float64) + 0.5) / repeats)[:, None]
    uniforms_GU = random_uniforms(repeats, width * branches) if path == "ssp" else grid_G1.expand(-1, width * branches)
    chosen = select(
        candidates_GNF.repeat_interleave(repeats, 0),
        torch.tensor(sizes).repeat_interleave(repeats),
        torch.full((len(sizes) * repeats,), 0.0 if path == "own branch" else 2.0),
        ["systematic" if path == "own branch" else path] * (len(sizes) * repeats),
        uniforms_GU.repeat(len(sizes), 1),
        grid_G1.expand(-1, width).repeat(len(sizes), 1),
    )
    assert chosen.resampled_G.all() == (path != "own branch")
    for g, (size, case) in enumerate(zip(sizes, cases)):
        exact_M = case.exp().flatten()
        total = exact_M.sum()
        mean_M = mean_weight_after(chosen, slice(g * repeats, (g + 1) * repeats), size, branches)
        if path == "ssp":
            part_M = exact_M / total * size % 1
            tolerance_M = total / size * 4.5 * (part_M * (1 - part_M) / repeats).sqrt()
        else:
            tolerance_M = total / repeats
        assert ((mean_M - exact_M).abs() <= tolerance_M + 1e-9).all()


@examples
@given(st.lists(st.lists(log_weight, min_size=2, max_size=2), min_size=1, max_size=6).filter(lambda rows: max(map(max, rows)) > -math.inf))
def test_effective_sample_size_is_that_of_the_families(rows):
    family = [sum(math.exp(x) for x in row) for row in rows]
    ess = sum(family) ** 2 / sum(x * x for x in family)
    assert select_one(torch.tensor(rows, dtype=torch.float64), 0.0).ess_G.item() == pytest.approx(ess, rel=1e-9)


@examples
@given(st.integers(1, 6), st.sampled_from([1, 2, 4]), st.integers(0, 1000), st.floats(0, 1))
def test_a_group_resamples_exactly_when_its_ess_is_below_threshold(n, branches, seed, threshold):
    candidates_NF = random_candidates(n, branches, seed)
    family_N = candidates_NF.logsumexp(-1)
    chosen = select_one(candidates_NF, threshold, seed=seed)
    assert chosen.resampled_G.item() == (chosen.ess_G.item() < threshold * n)
    assert not chosen.collapsed_G.item()
    if chosen.resampled_G.item():
        assert chosen.log_z_G.item() == pytest.approx(family_N.logsumexp(-1).item() - math.log(n), abs=1e-12)
        assert (chosen.logw_GN == 0).all()
    else:
        assert chosen.log_z_G.item() == 0
        assert chosen.ancestor_GN.tolist() == [list(range(n))]
        torch.testing.assert_close(chosen.logw_GN[0], family_N)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_threshold_zero_never_resamples_and_one_always_does_when_uneven(scheme):
    for seed in range(20):
        candidates_NF = random_candidates(6, 2, seed, spread=5.0)
        assert not select_one(candidates_NF, 0.0, scheme, seed).resampled_G.any()
        assert select_one(candidates_NF, 1.0, scheme, seed).resampled_G.all()


@pytest.mark.parametrize("branches", [1, 2, 4])
def test_zero_weight_is_never_chosen(branches):
    for seed in range(60):
        candidates_NF = random_candidates(5, branches, seed)
        for scheme in SCHEMES:
            for threshold in (0.0, 1.0):
                chosen = select_one(candidates_NF, threshold, scheme, seed)
                weight_N = candidates_NF[chosen.ancestor_GN[0], chosen.branch_GN[0]]
                assert (weight_N[chosen.logw_GN[0] > -torch.inf] > -torch.inf).all()


@examples
@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from(sorted(SCHEMES)), st.booleans()),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([1, 3]),
    st.integers(0, 1000),
)
def test_groups_in_one_call_equal_each_group_alone(groups, branches, seed):
    """Different sizes, thresholds, schemes and collapses: no group sees another, and padding stays padding."""
    width = max(size for size, *_ in groups) + 1
    candidates_GNF = torch.full((len(groups), width, branches), torch.nan, dtype=torch.float64)
    for g, (size, _, _, dead) in enumerate(groups):
        candidates_GNF[g, :size] = -torch.inf if dead else random_candidates(size, branches, seed + g)
    sizes_G = torch.tensor([size for size, *_ in groups])
    threshold_G = torch.tensor([threshold for _, threshold, _, _ in groups])
    schemes = [scheme for *_, scheme, _ in groups]
    uniforms_GU, branch_GN = random_uniforms(len(groups), width * branches, seed=seed), random_uniforms(len(groups), width, seed=seed + 1)
    together = select(candidates_GNF, sizes_G, threshold_G, schemes, uniforms_GU, branch_GN)
    for g, (size, _, scheme, dead) in enumerate(groups):
        one = slice(g, g + 1)
        alone = select(candidates_GNF[one, :size], sizes_G[one], threshold_G[one], [scheme], uniforms_GU[one], branch_GN[one, :size])
        assert together.collapsed_G[g].item() == dead
        for name in ("log_z_G", "ess_G", "resampled_G", "collapsed_G"):
            torch.testing.assert_close(getattr(together, name)[one], getattr(alone, name))
        for name in ("ancestor_GN", "branch_GN", "logw_GN"):
            torch.testing.assert_close(getattr(together, name)[one, :size], getattr(alone, name))
        assert together.ancestor_GN[g, size:].tolist() == list(range(size, width))
        assert (together.branch_GN[g, size:] == 0).all()
        assert (together.logw_GN[g, size:] == -torch.inf).all()


@pytest.mark.parametrize("branches", [1, 2, 4])
@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_a_collapsed_group_goes_on_with_equal_weights_and_says_so(threshold, branches):
    chosen = select_one(torch.full((4, branches), -torch.inf, dtype=torch.float64), threshold)
    assert chosen.collapsed_G.tolist() == [True]
    assert chosen.resampled_G.tolist() == [False]
    assert chosen.log_z_G.tolist() == [-math.inf]
    assert chosen.ess_G.tolist() == [0]
    assert chosen.logw_GN.tolist() == [[0.0] * 4]
    assert chosen.ancestor_GN.tolist() == [[0, 1, 2, 3]]
    assert chosen.branch_GN.tolist() == [[0] * 4]


@examples
@given(st.lists(st.tuples(log_weight, st.floats(-9, 9), st.floats(-9, 9)), min_size=1, max_size=6))
def test_one_branch_look_ahead_candidates_equal_lockstep_ones(particles):
    logw_GN, block_GN, next_GN = torch.tensor([particles], dtype=torch.float64).unbind(-1)
    ahead = lookahead_candidates(logw_GN, block_GN, next_GN[..., None], torch.ones_like(logw_GN, dtype=torch.bool))
    torch.testing.assert_close(ahead, lockstep_candidates(logw_GN, block_GN + next_GN, torch.zeros_like(logw_GN)))
    torch.testing.assert_close(ahead, lockstep_candidates(logw_GN, block_GN, next_GN))


@examples
@given(st.floats(-9, 9), st.floats(-9, 9), st.lists(st.floats(-9, 9), min_size=1, max_size=5))
def test_a_family_weighs_the_mean_over_its_branches(logw, block, nexts):
    mean = sum(math.exp(x) for x in nexts) / len(nexts)
    to_GN = lambda x: torch.tensor([[x]], dtype=torch.float64)  # noqa: E731
    candidates_GNF = lookahead_candidates(to_GN(logw), to_GN(block), torch.tensor([[nexts]], dtype=torch.float64), torch.tensor([[True]]))
    assert candidates_GNF.logsumexp(-1).item() == pytest.approx(logw + block + math.log(mean), abs=1e-9)
    share_F = candidates_GNF[0, 0].softmax(-1)
    torch.testing.assert_close(share_F, torch.tensor(nexts, dtype=torch.float64).softmax(-1))


@pytest.mark.parametrize("junk", [0.0, 7.0, math.nan, math.inf, -math.inf])
def test_a_finished_particle_is_one_candidate_with_its_whole_weight(junk):
    logw_GN, block_GN = torch.tensor([[-1.0, 2.0]], dtype=torch.float64), torch.tensor([[0.25, 0.5]], dtype=torch.float64)
    next_GNF = torch.full((1, 2, 3), junk, dtype=torch.float64)
    next_GNF[0, 1] = torch.tensor([0.0, 1.0, 2.0])
    candidates_GNF = lookahead_candidates(logw_GN, block_GN, next_GNF, torch.tensor([[False, True]]))
    assert candidates_GNF[0, 0].tolist() == [-0.75, -math.inf, -math.inf]
    torch.testing.assert_close(candidates_GNF[0, 1], torch.tensor([2.5, 3.5, 4.5], dtype=torch.float64) - math.log(3))


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


SEQUENCES = st.lists(st.lists(st.integers(0, 1), min_size=0, max_size=6), min_size=1, max_size=4)


@examples
@given(st.lists(SEQUENCES, min_size=1, max_size=3), st.integers(2, 9))
def test_committed_length_is_the_longest_common_prefix(groups, junk):
    """Groups of different sizes and lengths side by side; what pads them and what follows a sequence may be anything."""
    most, width = max(map(len, groups)), max(len(row) for rows in groups for row in rows) + 1
    tokens_GNL = torch.full((len(groups), most, width), junk)
    for g, rows in enumerate(groups):
        for n, row in enumerate(rows):
            tokens_GNL[g, n, : len(row)] = torch.tensor(row)
    common_G = torch.tensor([min(map(len, rows)) for rows in groups])
    found_G = committed_length(tokens_GNL, common_G, torch.tensor([len(rows) for rows in groups]))
    for rows, common, found in zip(groups, common_G.tolist(), found_G.tolist()):
        assert found == max(n for n in range(common + 1) if all(row[:n] == rows[0][:n] for row in rows))
