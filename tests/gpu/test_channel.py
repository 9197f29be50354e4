"""What one model sends to another stream, which receives it late: by then the graphs of other rounds have run. Graphs
of one runner share memory, so one graph's intermediate results may lie where another one's outputs do."""

from __future__ import annotations

import torch
from torch import Tensor

from smc.executor.graph_runner import GraphRunner
from smc.executor.round_executor import LocalChannel

SIZE = 1 << 20
LATE = 200_000_000
"""Clocks for which the receiver's stream is busy: about 0.1 s."""


def wrong_values() -> Tensor:
    """A stage with large intermediate results, which its graph frees."""
    parts = [torch.full((SIZE,), -1.0, device="cuda") for _ in range(8)]
    return torch.stack(parts).sum(0)[:1].clone()


def test_other_graphs_change_nothing_that_was_sent():
    device = torch.device("cuda", 0)
    one, other = GraphRunner(device), GraphRunner(device)
    here, there = LocalChannel.between(one, other)
    given = torch.zeros(SIZE, device=device)
    with one.working():
        for _ in range(2):  # recorded first, so that its intermediate results are free when the other one is recorded
            one.run("another", "stage", wrong_values)
    for value in range(1, 5):
        with one.working():
            here.settle()
            given.fill_(value)
            made = one.run("round", "stage", lambda: given * 10)
            here.send("round", "rows", made)
            one.run("another", "stage", wrong_values)
        with other.working():
            torch.cuda._sleep(LATE)
            received = there.receive("round", "rows", (SIZE,), torch.float32).clone()
        torch.cuda.synchronize()
        assert received.unique().tolist() == [10 * value]


def test_the_graphs_of_this_test_share_memory():
    """Otherwise the test above would prove nothing."""
    one = GraphRunner(torch.device("cuda", 0))
    given = torch.ones(SIZE, device="cuda")
    with one.working():
        for _ in range(2):
            one.run("another", "stage", wrong_values)
        for _ in range(2):
            made = one.run("round", "stage", lambda: given * 10)
        one.run("another", "stage", wrong_values)
    torch.cuda.synchronize()
    assert made.unique().tolist() != [10.0]
