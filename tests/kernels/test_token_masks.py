"""The kernel masks logits as the reference does, for any masks and logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from smc.executor.masks import apply_mask
from smc.kernels import truncation

COLUMNS, BEYOND = 300, 5
rng = np.random.default_rng(7)
SOME = np.sort(rng.choice(2000, COLUMNS, replace=False))


def cases(tokens: int, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [R, V] and masks [R, W]. Masks allow everything, nothing, a single token at either end, only impossible
    tokens, or tokens without a column; some logits are NaN or infinite."""
    allowed_RT = rng.random((12, 32 * (tokens // 32 + 1))) < 0.3
    logits_RV = rng.normal(size=(12, COLUMNS + BEYOND)).astype(np.float32)
    allowed_RT[0], allowed_RT[1] = True, False
    for row, column in ((2, 0), (3, COLUMNS - 1), (4, 130)):
        allowed_RT[row] = False
        allowed_RT[row, ids[column]] = True
    allowed_RT[5, ids] = False
    logits_RV[6, :COLUMNS] = -np.inf
    logits_RV[7, :COLUMNS][allowed_RT[7, ids]] = -np.inf
    logits_RV[8, :COLUMNS][allowed_RT[8, ids]] = -np.inf
    logits_RV[8, COLUMNS - 1], allowed_RT[8, ids[COLUMNS - 1]] = np.nan, True
    logits_RV[9, :20], logits_RV[9, COLUMNS:] = np.inf, -np.inf
    logits_RV[10, 3] = np.nan
    words_RW = np.packbits(allowed_RT, axis=-1, bitorder="little").view(np.int32)
    return torch.from_numpy(logits_RV), torch.from_numpy(words_RW)


@pytest.mark.parametrize(
    ("has_head", "dtype", "fails", "block"),
    [
        (False, torch.float32, True, 64),
        (False, torch.bfloat16, False, None),
        (True, torch.float32, False, 128),
        (True, torch.bfloat16, True, None),
    ],
    ids=["all", "all rounded, stays", "some, stays", "some rounded"],
)
def test_rows_are_masked_as_by_the_reference(device, has_head, dtype, fails, block):
    ids = SOME if has_head else np.arange(COLUMNS)
    logits_RV, mask_RW = (tensor.to(device) for tensor in cases(2000 if has_head else COLUMNS, ids))
    # Rows of a wider tensor, as the logits of several passes are.
    logits_RV = torch.cat((logits_RV, logits_RV), 1).to(dtype)[:, : COLUMNS + BEYOND]
    ids_M = torch.from_numpy(ids).to(device) if has_head else None
    expected_RV = apply_mask(logits_RV, mask_RW, COLUMNS, ids_M, fails=fails)
    found_RV = truncation.apply_mask(logits_RV, mask_RW, COLUMNS, ids_M, fails=fails, block=block)
    torch.testing.assert_close(found_RV, expected_RV, rtol=0, atol=0, equal_nan=True)
    assert expected_RV[1, :COLUMNS].isnan().all() == fails, "nothing is allowed"
    assert set(expected_RV[7, :COLUMNS].tolist()) == {0.0, -np.inf}, "nothing that is allowed is possible"
