"""The prefix from which a population continues when no particle has weight."""

from __future__ import annotations

import math

import torch

from smc.algorithm.resampling import Spans
from smc.algorithm.selection import surviving_prefix

NONE = -math.inf


def test_each_block_is_cut_before_the_first_token_of_weight_zero_and_drawn_by_what_is_left():
    step_AQ = torch.tensor([[1.0, NONE, 5.0], [NONE, 0.0, 0.0], [0.0, 0.0, NONE], [9.0, 9.0, 9.0]])
    count_A, logw_A = torch.tensor([4, 4, 2, 4]), torch.tensor([0.0, 0.0, 1.0, NONE]).double()
    groups = Spans(torch.tensor([0]), torch.tensor([4]))
    weight_A = torch.tensor([math.e, 1.0, math.e, 0.0])  # kept tokens: 2, 1, and all 2; the last block has no weight
    counts = torch.zeros(4)
    for uniform in torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]:
        drawn_A, kept_A = surviving_prefix(step_AQ, count_A, logw_A, groups, uniform[None])
        assert (drawn_A == drawn_A[0]).all()
        assert kept_A[0].item() == [2, 1, 2][drawn_A[0]]
        counts[drawn_A[0]] += 1
    torch.testing.assert_close(counts / 1000, weight_A / weight_A.sum(), atol=0.002, rtol=0)


def test_groups_do_not_see_each_other_and_nan_is_no_weight():
    step_AQ = torch.tensor([[math.nan, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    logw_A = torch.tensor([0.0, NONE, math.nan, 0.0]).double()
    groups = Spans(torch.tensor([0, 2, 0]), torch.tensor([2, 1, 0]))
    drawn_A, kept_A = surviving_prefix(
        step_AQ, torch.tensor([3, 3, 3, 1]), logw_A, groups, torch.full((3,), 0.999).double()
    )
    assert drawn_A.tolist() == [0, 0, 2, 3] and kept_A.tolist() == [1, 1, 3, 1]
