"""Residual add, RMSNorm and gated activation against torch.

Local axes: P partial sums."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from smc.kernels.linear import reduce
from smc.kernels.norm import Residual, add_norm, add_norm_rounded, round_rows, silu_mul
from smc.model.linear import QuantisedRows
from tests.pairwise import few_of_pairs

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("features", "kind", "splits"), few_of_pairs(product([48, 256, 2048, 8192], [BF16, FP32], [None, 0, 1, 3]))
)
def test_add_norm(device, features, kind, splits):
    """`splits` 0 adds one bf16 tensor [T, E]; None adds nothing."""
    x_TE = (torch.randn(5, features, device=device) * 3).to(kind)
    weight_E = torch.randn(features, device=device).to(BF16)
    if splits is None:
        parts, sum_TE = None, x_TE.float()
    else:
        parts = (
            torch.randn(5, features, device=device).to(BF16)
            if splits == 0
            else torch.randn(splits, 5, features, device=device)
        )
        sum_TE = x_TE.float() + (parts if splits == 0 else parts.sum(0)).to(kind).float()
    h_TE = add_norm(x_TE, parts, weight_E, 1e-5)
    # The interpreter cuts digits off where a GPU rounds.
    torch.testing.assert_close(x_TE, sum_TE.to(kind), rtol=0.016, atol=0.04 if device.type == "cpu" else 1e-5)
    assert h_TE.dtype == BF16
    torch.testing.assert_close(h_TE, F.rms_norm(x_TE.float(), (features,), weight_E.float(), 1e-5).to(BF16))


@pytest.mark.parametrize("features", [48, 2048])
@pytest.mark.parametrize("splits", [None, 3])
def test_add_norm_fp8_equals_rounding_after_norm(device, features, splits):
    x_TE, weight_E = torch.randn(5, features, device=device).to(BF16), torch.randn(features, device=device).to(BF16)
    x_TE[2] = 0.0
    parts = (
        None
        if splits is None
        else torch.randn(splits, 5, features, device=device) * (torch.arange(5, device=device) != 2)[:, None]
    )
    other_TE = x_TE.clone()
    expected, found = (
        round_rows(add_norm(x_TE, parts, weight_E, 1e-5)),
        add_norm_rounded(other_TE, parts, weight_E, 1e-5),
    )
    assert torch.equal(other_TE, x_TE)
    assert torch.equal(found.value_TI.float(), expected.value_TI.float()) and torch.equal(
        found.scale_T1, expected.scale_T1
    )


@pytest.mark.parametrize("inner", [40, 1024, 1536])
def test_silu_mul(device, inner):
    gate_up = torch.randn(3, 2 * inner, device=device).to(BF16)
    gate, up = gate_up.float().chunk(2, -1)
    torch.testing.assert_close(silu_mul(gate_up), (F.silu(gate) * up).to(BF16))


def test_strided_tensors_are_refused(device):
    with pytest.raises(ValueError, match="contiguous"):
        silu_mul(torch.zeros(4, 8, device=device).T)


def test_gelu_mul(device):
    gate_up = 4 * torch.randn(3, 80, device=device)
    gate, up = gate_up.chunk(2, -1)
    expected_TI = F.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(silu_mul(gate_up, gelu=True), expected_TI, atol=1e-5, rtol=1e-4)


def norm_near_ties(tokens: int, features: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return x and partial sums that nearly cancel each other: what rounding has left of them is added to x, beside
    whose first feature the squares of the others are rounded."""
    large, small, other = (torch.randn(tokens, features, device=device) for _ in range(3))
    x_TE = (large / 8).to(BF16)
    x_TE[:, 0] *= 4096
    return x_TE, torch.stack((1e4 * large, small, -1e4 * large, other))


def taken_in(add: Callable, x_TE: Tensor, parts: Tensor, weight_E: Tensor, residual: Residual) -> list[Tensor]:
    """Return what `add` leaves in a copy of x, and the norm: with its scales, if it is in FP8."""
    after_TE = x_TE.clone()
    norm = add(after_TE, parts.contiguous(), weight_E, 1e-5, residual=residual)
    return [after_TE.float(), *(one.float() for one in (norm if isinstance(norm, QuantisedRows) else (norm,)))]


@pytest.mark.parametrize("weight_kind", [BF16, FP32])
@pytest.mark.parametrize("add", [add_norm, add_norm_rounded])
@pytest.mark.parametrize("twice", [False, True])
def test_near_ties_of_up_to_512_rows(device, add, twice, weight_kind):
    """A row has the bits that it has alone, from partial sums that cancel and from their rounded sum, with and without
    a norm of the sum. Norms in float32 show every bit of their sums."""
    x_TE, parts_PTE = norm_near_ties(512, 896, device)
    weight_E, out_weight_E = torch.rand(2, 896, device=device).to(weight_kind)
    rest, at = (weight_E, Residual(out_weight_E if twice else None)), 7
    sum_TE = reduce(parts_PTE, torch.empty_like(x_TE))
    row = x_TE[at : at + 1]
    alone = taken_in(add, row, parts_PTE[:, at : at + 1], *rest)
    for count, parts in product((8, 65, 512), (parts_PTE, sum_TE)):
        for made, expected in zip(taken_in(add, x_TE[:count], parts[..., :count, :], *rest), alone):
            assert torch.equal(made[at], expected[0]), (count, parts.dim())
    assert not torch.equal(taken_in(add, row, parts_PTE[:, at : at + 1].flip(0), *rest)[0], alone[0]), "order of parts"


def test_near_ties_show_the_order_of_a_norm_s_sum(device):
    x_TE, parts_PTE = norm_near_ties(64, 896, device)
    order_E, weight_E = torch.randperm(896, device=device), torch.rand(896, device=device)
    _, norm_TE = taken_in(add_norm, x_TE, parts_PTE, weight_E, Residual())
    _, moved_TE = taken_in(add_norm, x_TE[:, order_E], parts_PTE[..., order_E], weight_E[order_E], Residual())
    assert not torch.equal(norm_TE[:, order_E], moved_TE)
