"""First tokens of one row at a time: a row's draw is that of the row alone, whatever the other rows use."""

from __future__ import annotations

import numpy as np
import torch

from smc.arrays import map_tensors
from smc.distributions import DistributionSpec
from smc.executor.sampling import RowSampling, Sampling
from smc.philox import DrawKeys, Purpose

ROWS, DRAWS, VOCAB = 5, 3, 700


def test_rows_are_drawn_as_if_alone():
    logits_RV = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    distribution = DistributionSpec.of(
        np.array([1, 0, 0.7, 1, 1], np.float32),
        np.array([0, 0, 5, 0, 0], np.int64),
        np.array([1, 1, 1, 0.9, 1], np.float32),
        np.array([0, 0, 0, 0, 0.1], np.float32),
        np.array([1, 1, 1, 1, 2], np.float32),
    )
    seed_R, stream_RF = torch.arange(ROWS), torch.arange(DRAWS).expand(ROWS, DRAWS)
    keys = DrawKeys(seed_R, torch.zeros_like(seed_R), stream_RF, seed_R + 40, Purpose.TARGET)
    made, usual = RowSampling(VOCAB, distribution), Sampling(VOCAB)
    found = made.own_draws(logits_RV, distribution, keys)
    candidates = made.propose_bonus(logits_RV, distribution, keys._replace(stream_RF=stream_RF[:, :1]))
    for row in range(ROWS):
        own = slice(row, row + 1)
        alone = DistributionSpec.of(*(values_R[own] for values_R in distribution[:-1]))
        own_keys = DrawKeys(*(values_R[own] for values_R in keys[:-1]), keys.purpose)
        for one, expected in zip(found, usual.own_draws(logits_RV[own], alone, own_keys)):
            assert torch.equal(one[own], expected)
        theirs = usual.propose_bonus(logits_RV[own], alone, own_keys._replace(stream_RF=stream_RF[own, :1]))
        map_tensors(lambda one, expected: _same(one[own], expected), candidates, theirs)  # noqa: B023
    together = usual.own_draws(logits_RV, distribution, keys)
    assert torch.equal(found[0], together[0])
    torch.testing.assert_close(found[1], together[1], atol=1e-5, rtol=1e-5)


def _same(one: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(one, expected)
