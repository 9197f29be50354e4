"""Activations in FP8 against the reference, over extremes.

Axes: T tokens, K inputs.
"""

from __future__ import annotations

import pytest
import torch

from smc.kernels.rounding import round_rows
from smc.models import linear


@pytest.mark.parametrize("inputs", [1, 48, 1000, 4096, 14336])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_rows_are_rounded_each_for_itself(device, inputs, kind):
    """A row of zeros, a tiny one, a huge one, one with a single large number."""
    x_TK = torch.randn(5, inputs, device=device)
    x_TK *= torch.tensor([1.0, 0.0, 1e-20, 1e30, 1.0], device=device)[:, None]
    x_TK[4, -1] = 1e4
    x_TK = x_TK.to(kind)
    found_TK, scale_T1 = round_rows(x_TK)
    expected_TK, expected_T1 = linear.round_rows(x_TK)
    torch.testing.assert_close(scale_T1, expected_T1, rtol=1e-6, atol=0)
    same = (found_TK.float() == expected_TK.float()).float().mean()
    assert same == 1 or (device.type == "cuda" and same > 0.999), "a quotient between two numbers may fall to either"
    assert torch.equal(round_rows(x_TK[2:3])[0].float(), found_TK[2:3].float())


def test_rows_may_lie_apart(device):
    wide = torch.randn(4, 96, device=device)
    assert torch.equal(round_rows(wide[:, :64])[0].float(), round_rows(wide[:, :64].contiguous())[0].float())
    with pytest.raises(ValueError, match="stand side by side"):
        round_rows(wide.T)
