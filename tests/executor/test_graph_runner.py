"""Stages that a GPU may leave out, with a runner that records nothing."""

from __future__ import annotations

import torch

from smc.executor.graph_runner import GraphRunner, StageRunner


class Listing(GraphRunner):
    """Lists the stages that run."""

    def __init__(self) -> None:
        StageRunner.__init__(self, torch.device("cpu"))
        self.ran: list[str] = []

    def run(self, key, name, stage):
        kept = self._of(key)
        if name in kept.seen:
            kept.graphs[name] = (None, ())
        kept.seen.add(name)
        self.ran.append(name)


def test_dummy_rounds_warm_up_what_they_do_not_want():
    """Otherwise the first request that wants it would wait for its kernels."""
    runner = Listing()
    for wanted in (False, False, False, True, False):
        runner.run_if(torch.tensor([wanted]), "key", "stage", lambda: (), host_waits=True)
    assert len(runner.ran) == 3
