"""Kernels of guidance against torch.

Local axes: Y unconditional rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from smc.executor.sampling import Sampling
from smc.executor.select import remap_block_table
from smc.kernels import remap, sampling
from tests.kernels.conftest import DEVICE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 4097), (2, 128_256)], ids=str)
def test_guided_logits_are_those_of_the_torch_one(dtype, shape):
    """Rows have a stride of their own; scales are none, moderate or large; unconditional rows belong to a few of the
    rows, in any order. Where a row has no scale, NaN in its unconditional row does no harm."""
    torch.manual_seed(shape[1])
    tokens, width = shape
    own_TV, unconditional_YV = (torch.randn(2, tokens, width + 5) * 30).to(dtype)[..., :width]
    scale_T, of_T = torch.tensor([1.0, 1.5, 1000.0, 7.5, 1.0])[:tokens], torch.tensor([0, 1, 2, 1, 0])[:tokens]
    own_TV[-1, 0], unconditional_YV[0] = -1e5, torch.nan
    expected_TV = Sampling(width).guide(own_TV, unconditional_YV, of_T, scale_T)
    here = [values.to(DEVICE) for values in (unconditional_YV[:3], of_T, scale_T)]
    found_TV = sampling.guide(own_TV.to(DEVICE), *here, block=1024)
    assert found_TV.dtype == torch.float32 and not found_TV.isnan().any()
    assert torch.equal(found_TV.cpu(), expected_TV)
    own_TV[-1, width // 2] = torch.nan
    assert sampling.guide(own_TV.to(DEVICE), *here)[-1].isnan().sum() == 1


def test_pages_follow_as_by_the_torch_one():
    """Copied ranges are longer than a chunk, or empty; tails have several widths, and the last one ends the table."""
    rng = np.random.default_rng(0)
    for width in (1, 3, 9):
        table_SL = torch.from_numpy(rng.integers(1, 999, (8, 1500 + width), dtype=np.int32))
        slot_A, source_A = torch.tensor([0, 1, 2, 3, 7]), torch.tensor([0, 0, 2, 2, 7])
        base_A, end_A = torch.tensor([5, 0, 3, 3, 0]), torch.tensor([1500, 1500, 3, 3, 0])
        tail_AB = torch.from_numpy(rng.integers(1, 999, (5, width), dtype=np.int32))
        # Positions before the base are the same already.
        table_SL[3, :3] = table_SL[2, :3]
        found_SL = table_SL.to(DEVICE)
        remap_block_table(table_SL, slot_A, source_A, base_A, end_A, tail_AB, 1500 + width)
        remap.remap_block_table(
            found_SL, *(values.to(DEVICE) for values in (slot_A, source_A, base_A, end_A, tail_AB)), 1500 + width
        )
        for slot, end in zip(slot_A.tolist(), end_A.tolist()):
            assert torch.equal(found_SL[slot, : end + width].cpu(), table_SL[slot, : end + width])
        assert torch.equal(found_SL[4:7].cpu(), table_SL[4:7])
