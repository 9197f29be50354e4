"""What one model sends, although the stages of other rounds take the memory of its own stages' outputs before the other
model has received it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from services.workers.rank import PeerChannel
from smc.executor.graph_runner import StageRunner
from smc.executor.round_executor import Channel, LocalChannel

WRONG = -1.0


class SharedMemory(StageRunner):
    """As recordings on a GPU: all stages put their outputs in the same memory, and copies have memory of their own."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._output = torch.empty(4)

    def run(self, key, name, stage):
        return self._output.copy_(stage())

    def copy_of(self, key, name, tensor):
        return self.keep(key, name, lambda: torch.empty_like(tensor)).copy_(tensor)


@dataclass
class LateEnd:
    """An end of a link that reads what is sent when the other side asks for it, as NCCL may."""

    sent: dict[str, Tensor]

    def send(self, name: str, tensor: Tensor) -> None:
        self.sent[name] = tensor

    def receive(self, name: str, here: Tensor, timeout: float) -> None:
        here.copy_(self.sent.pop(name))

    def settle(self) -> None: ...

    def close(self) -> None: ...


def local(stages: StageRunner) -> tuple[Channel, Channel]:
    return LocalChannel.between(stages, SharedMemory())


def peers(stages: StageRunner) -> tuple[Channel, Channel]:
    end = LateEnd({})
    one, other = (PeerChannel(end, None, runner, 1.0, host_waits=False) for runner in (stages, SharedMemory()))
    return one, other


@pytest.mark.parametrize("between", [local, peers])
def test_other_rounds_change_nothing_that_was_sent(between):
    stages = SharedMemory()
    here, there = between(stages)
    for value in (1.0, 2.0):
        made = stages.run("round", "draft", lambda value=value: torch.full((4,), value))
        here.settle()
        here.send("round", "rows", made)
        stages.run("another", "draft", lambda: torch.full((4,), WRONG))
        assert there.receive("round", "rows", (4,), torch.float32).tolist() == [value] * 4


@pytest.mark.parametrize("between", [local, peers])
def test_a_tensor_that_keeps_its_values_is_sent_as_it_is(between):
    here, there = between(SharedMemory())
    kept, into = torch.arange(4.0), torch.empty(4)
    here.send("round", "distributions", kept, keeps=True)
    kept[0] = 7.0
    assert there.receive("round", "distributions", (4,), torch.float32, into) is into
    assert into.tolist() == kept.tolist()
