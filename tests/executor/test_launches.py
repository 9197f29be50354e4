"""The number of kernel launches of a draft round, apart from its model. Each launch takes a few microseconds of a
captured round, whatever it does.

Launches are counted as calls in Triton's interpreter: our kernels, and torch's operations except for views and
uninitialised memory."""

from __future__ import annotations

import collections

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from triton.runtime import interpreter

from smc.api.engine_config import EngineConfig
from smc.executor.draft import DraftStage
from smc.executor.triton_forward import TritonForward
from smc.local_engine import local_engine
from tests.executor.test_kernels import KERNELS, pair
from tests.scheduler.harness import answers, request

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled there, not interpreted")
FREE = {
    "empty",
    "new_empty",
    "empty_like",
    "view",
    "_unsafe_view",
    "flatten",
    "slice",
    "select",
    "expand",
    "t",
    "alias",
    "detach",
}
FREE |= {"unsqueeze", "squeeze", "split", "unbind", "as_strided", "transpose", "permute", "lift_fresh"}


class Launches(TorchDispatchMode):
    """Counts launches by name while switched on, except for those within a counted kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self.within, self.count = False, 0, collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if self.on and not self.within and name not in FREE:
            self.count[name] += 1
        return func(*args, **(kwargs or {}))

    def beside(self, call, name: str | None = None):
        """Wrap `call` so that everything it does counts as one `name`, or as nothing if `name` is None."""

        def counted(own, *args, **kwargs):
            if name and self.on and not self.within:
                self.count[own.fn.__name__ if name == "kernel" else name] += 1
            self.within += 1
            try:
                return call(own, *args, **kwargs)
            finally:
                self.within -= 1

        return counted

    def during(self, call):
        """Wrap `call` so that launches are counted while it runs."""

        def counted(*args, **kwargs):
            self.on = True
            try:
                return call(*args, **kwargs)
            finally:
                self.on = False

        return counted


@pytest.fixture
def launches(monkeypatch) -> Launches:
    found = Launches()
    launch = interpreter.InterpretedFunction.run
    monkeypatch.setattr(interpreter.InterpretedFunction, "run", found.beside(launch, "kernel"))
    for name in ("__call__", "logits"):
        monkeypatch.setattr(TritonForward, name, found.beside(getattr(TritonForward, name)))
    for name in ("draft", "remap"):
        monkeypatch.setattr(DraftStage, name, found.during(getattr(DraftStage, name)))
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: KERNELS)
    return found


@pytest.mark.parametrize(
    ("config", "law", "a_step"),
    [
        pytest.param(
            EngineConfig(block=2, branches=2),
            {"population": "distinct"},
            ["_survey", "_find", "_race_rest", "_finish_rest", "_expand"],
            marks=pytest.mark.slow,
        ),
        (EngineConfig(form="lockstep", block=2), {"population": "independent"}, ["_race", "_finish_race"]),
    ],
    ids=["distinct ahead", "independent in lockstep"],
)
def test_a_round_takes_few_launches_beside_the_model(launches, config, law, a_step):
    with launches:
        found = answers(
            local_engine(pair("llama"), config), [request([1, 2, 3], particles=2, max_tokens=2, ignore_eos=True, **law)]
        )
    rounds = launches.count["_begin"]
    assert rounds >= found["r"].statistics.rounds > 0
    each = ["_begin", "_pack", "_remap_draft", "_advance", *([] if config.lookahead else ["index"])]
    steps = [*a_step, "_reparent"]
    assert launches.count == dict.fromkeys(each, rounds) | dict.fromkeys(steps, rounds * config.block)
