"""The device's choice of candidates against the torch one.

Axes: G groups, N particles, F branches.
"""

from __future__ import annotations

import math

import pytest
import torch

from smc.algorithm.selection import select as reference
from smc.kernels.selection import select

SHAPES = [(1, 1), (2, 3), (3, 1), (4, 4), (8, 1), (8, 8), (13, 3), (32, 4), (64, 16)]
GROUPS = 12


def population(n: int, branches: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Random candidates of many shapes of weights, sizes, thresholds and uniforms; every group of a kind of its own."""
    spread_G = torch.tensor([0.01, 0.1, 1.0, 3.0, 10.0, 200.0]).repeat(GROUPS // 6).double()
    logw_GNF = torch.randn(GROUPS, n, branches, generator=generator, dtype=torch.float64) * spread_G[:, None, None] - 300
    dropped_GNF = torch.rand(GROUPS, n, branches, generator=generator) < torch.rand(GROUPS, 1, 1, generator=generator) - 0.3
    logw_GNF[dropped_GNF] = -math.inf
    logw_GNF[1, 0] += 50.0  # one heavy particle
    logw_GNF[2] = -math.inf
    logw_GNF[3, :, 1:] = -math.inf  # ended particles: one branch holds all
    logw_GNF[4] = -1.5  # identical: ESS = N up to rounding
    size_G = torch.randint(1, n + 1, (GROUPS,), generator=generator)
    size_G[::2] = n
    threshold_G = torch.tensor([1.0, 0.5, 0.0]).double().repeat_interleave(GROUPS // 3)[torch.randperm(GROUPS, generator=generator)]
    uniforms = torch.rand(GROUPS, 2 * n * branches, generator=generator, dtype=torch.float64)
    return logw_GNF, size_G, threshold_G, uniforms, torch.rand(GROUPS, n, generator=generator, dtype=torch.float64)


def assert_same(device: torch.device, *arguments: torch.Tensor) -> None:
    candidates, size_G, threshold_G, uniforms_GU, branch_uniforms_GN = arguments
    expected = reference(candidates, size_G, threshold_G, ["systematic"] * len(size_G), uniforms_GU, branch_uniforms_GN)
    actual = select(*(argument.to(device) for argument in arguments))
    for name in ("ancestor_GN", "branch_GN", "resampled_G", "collapsed_G"):
        assert torch.equal(getattr(actual, name).cpu().to(getattr(expected, name).dtype), getattr(expected, name)), name
    for name in ("logw_GN", "log_z_G", "ess_G"):
        torch.testing.assert_close(getattr(actual, name).cpu(), getattr(expected, name), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("n, branches", SHAPES)
def test_equals_the_torch_choice(device, n, branches):
    generator = torch.Generator().manual_seed(n * 100 + branches)
    for _ in range(20 if device.type == "cuda" else max(1, 24 // (n * branches))):
        assert_same(device, *population(n, branches, generator))


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
def test_grid_points_on_the_edges_choose_no_candidate_without_weight(device, uniform):
    """Uniforms at both ends put points on the edges of intervals: what is chosen may differ, but must have weight."""
    generator = torch.Generator().manual_seed(5)
    logw_GNF, size_G, _, uniforms_GU, branch_GN = population(8, 4, generator)
    logw_GNF[:, 0] = logw_GNF[:, -1] = -math.inf
    size_G[:] = 8
    ones_G, branch_GN = torch.full((GROUPS,), 1.1, dtype=torch.float64), torch.full_like(branch_GN, uniform)
    for threshold_G in (ones_G, ones_G * 0):
        arguments = (logw_GNF, size_G, threshold_G, torch.full_like(uniforms_GU, uniform), branch_GN)
        made = select(*(argument.to(device) for argument in arguments))
        family_GNF = logw_GNF.gather(1, made.ancestor_GN.cpu().long()[..., None].expand(-1, -1, 4))
        chosen_GN = family_GNF.gather(2, made.branch_GN.cpu().long()[..., None])[..., 0]
        has_weight_GN = (family_GNF > -math.inf).any(-1)
        assert (chosen_GN > -math.inf)[has_weight_GN].all()
        if threshold_G[0] > 0:
            assert has_weight_GN[~made.collapsed_G.cpu()].all()


def test_too_many_candidates_are_refused(device):
    with pytest.raises(ValueError, match="1024"):
        select(*population(128, 16, torch.Generator().manual_seed(1)))
