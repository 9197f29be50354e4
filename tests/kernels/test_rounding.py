"""Rounding of activations to FP8 against the reference, with extreme inputs."""

from __future__ import annotations

import pytest
import torch

from smc.kernels.norm import add_norm_rounded, round_rows
from smc.model import linear


@pytest.mark.parametrize("inputs", [1, 48, 1000, 4096, 14336])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_rows_are_rounded_each_for_itself(device, inputs, kind):
    """Every row has its own scale: a row of zeros, a tiny one, a huge one, and one with a single large number."""
    torch.manual_seed(inputs)
    x_TI = torch.randn(5, inputs, device=device)
    x_TI *= torch.tensor([1.0, 0.0, 1e-20, 1e30, 1.0], device=device)[:, None]
    x_TI[4, -1] = 1e4
    x_TI = x_TI.to(kind)
    found_TI, scale_T1 = round_rows(x_TI)
    expected_TI, expected_T1 = linear.quantise_rows(x_TI)
    torch.testing.assert_close(scale_T1, expected_T1, rtol=1e-6, atol=0)
    off_TI, expected_off_TI = (
        (made_TI.float() * expected_T1 - x_TI.float()).abs() for made_TI in (found_TI, expected_TI)
    )
    assert torch.equal(found_TI.float(), expected_TI.float()) or (
        device.type == "cuda" and (off_TI <= expected_off_TI * (1 + 1e-4)).all()
    ), "a GPU's quotient in the middle of two numbers may fall to either"
    assert torch.equal(round_rows(x_TI[2:3])[0].float(), found_TI[2:3].float())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_inf_propagate(device, value):
    """Every conversion to FP8 keeps NaN and infinity visible, and other rows do not change. The kernels report them
    through the scale, because a GPU's maximum and clamp drop NaN."""
    x_TI, weight_I = torch.randn(3, 256, device=device).bfloat16(), torch.ones(256, device=device).bfloat16()
    clean_TI, x_TI[1, 77] = x_TI.clone(), value
    ways = (round_rows, linear.quantise_rows, lambda given_TI: add_norm_rounded(given_TI.clone(), None, weight_I, 1e-5))
    for way in ways:
        made, clean = way(x_TI), way(clean_TI)
        numbers_TI, expected_TI = (one.value_TI.float() * one.scale_T1 for one in (made, clean))
        assert numbers_TI[1].sum().isnan() and torch.equal(numbers_TI[[0, 2]], expected_TI[[0, 2]])
        assert way is linear.quantise_rows or made.scale_T1[1].isnan()


def test_rows_may_lie_apart(device):
    wide = torch.randn(4, 96, device=device)
    assert torch.equal(round_rows(wide[:, :64])[0].float(), round_rows(wide[:, :64].contiguous())[0].float())
    with pytest.raises(ValueError, match="contiguous"):
        round_rows(wide.T)
