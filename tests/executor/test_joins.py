"""Particles join slots without waiting for the device: on a GPU a round is in flight, and a wait would leave it idle
until the host has prepared the next one.

A CPU never waits. What would wait on a GPU is seen by the operations that a join queues."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from smc.api.engine_config import EngineConfig
from smc.executor.round_executor import ModelRunner
from smc.local_engine import local_engine
from tests.scheduler.harness import answers, request
from tests.scheduler.pairs import tiny_pair

SETTINGS = (
    {"method": "exact", "particles": 4},
    {"method": "smc", "particles": 4, "stop": ("ab", "c")},
    {"method": "smc", "particles": 2, "population": "independent", "logit_bias": ((5, 1.0),)},
    {"method": "exact", "verification": "rejection", "presence_penalty": 0.5},
    {"method": "target", "min_tokens": 3, "stop_token_ids": (7,)},
)


class Waits(TorchDispatchMode):
    """Notes operations that wait for a GPU: those that copy a Python number, or read a result."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        is_number = name in ("index_put", "index_put_") and isinstance(args[2], Tensor) and not args[2].dim()
        if is_number or name in ("_local_scalar_dense", "nonzero", "masked_select"):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", ["lockstep", "lookahead"])
def test_joins_do_not_wait(form, monkeypatch):
    waits, joined = Waits(), []
    join, from_list = ModelRunner.join, torch.tensor

    def watched(runner, group):
        joined.append(runner.worker.name)
        with waits, monkeypatch.context() as patches:
            patches.setattr(
                torch, "tensor", lambda values, **of: waits.found.append("tensor") or from_list(values, **of)
            )
            join(runner, group)

    monkeypatch.setattr(ModelRunner, "join", watched)
    engine = local_engine(tiny_pair(8), EngineConfig(form=form, block=3, max_slots=8, max_context=64))
    answers(engine, [request(request_id=str(n), seed=n, max_tokens=8, **one) for n, one in enumerate(SETTINGS)])
    assert len(set(joined)) == 2
    assert waits.found == []
