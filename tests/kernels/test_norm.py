"""Residual add, RMSNorm and gated activation against torch."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.nn import functional as F

from smc.kernels.norm import add_norm, add_norm_rounded, round_rows, silu_mul
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
