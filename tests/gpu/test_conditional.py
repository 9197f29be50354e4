"""Recordings that run only where a flag on the GPU says so."""

from __future__ import annotations

import pytest
import torch

from smc.kernels.conditional import ConditionalGraph


@pytest.fixture
def recorded():
    """A counter, a flag, and the conditional graph that adds one to the counter."""
    count, wanted_1 = torch.zeros(1024, device="cuda"), torch.zeros(1, dtype=torch.bool, device="cuda")
    recording = torch.cuda.CUDAGraph(keep_graph=True)
    stream = torch.cuda.Stream()
    with torch.cuda.graph(recording, stream=stream):
        halves = torch.full_like(count, 0.5)
        count.add_(halves).add_(halves)
    return count, wanted_1, ConditionalGraph(recording, wanted_1)


def test_the_flag_decides_when_the_graph_runs(recorded):
    """The flag changes on the GPU, in the order of the stream; the host never waits."""
    count, wanted_1, graph = recorded
    expected = 0
    for i in range(200):
        wanted_1.fill_(i % 3 == 0)
        graph.replay()
        expected += i % 3 == 0
    wanted_1.zero_()
    graph.replay()
    assert torch.equal(count.cpu(), torch.full((1024,), float(expected)))


def test_a_graph_ends_with_its_object(recorded):
    """Memory of the recording stays until then."""
    count, wanted_1, graph = recorded
    wanted_1.fill_(True)
    graph.replay()
    del graph, recorded
    torch.cuda.synchronize()
    assert float(count.sum()) == 1024
