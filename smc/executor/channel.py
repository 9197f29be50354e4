"""What the two sides of a pair send each other within a round, and how. Knows nothing about what the tensors mean.

draft -> target   rows     what has been drafted
target -> draft   choice   which of it goes on, and how
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from smc.executor.graph_runner import Event, Stages


class Channel(Protocol):
    """One side's end. Tensors are on this side's device; every call is made in its `Stages.working()`, and none waits for a GPU."""

    def send(self, name: str, tensor: Tensor) -> None:
        """It must stay as it is until `settle`."""
        ...

    def receive(self, key: tuple, name: str, shape: tuple[int, ...], dtype: torch.dtype, into: Tensor | None = None) -> Tensor:
        """What the other side sent by this name: `into` this tensor, or by default one that is always the same in rounds of one key."""
        ...

    def share(self, tensor: Tensor) -> Tensor:
        """The leader's values, in place, on every rank that holds a part of this side's model."""
        ...

    def settle(self) -> None:
        """Work that is asked for after this may overwrite what was sent."""
        ...


class LocalChannel:
    """One end of a channel inside a process, between two devices or two streams of one."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._other = self
        self._sent: dict[str, tuple[Tensor, Event]] = {}
        self._kept: list[Tensor] = []
        """What was sent, until the other side has its copy: memory that is let go is used again at once."""
        self._received: Event | None = None

    @staticmethod
    def between(one: Stages, other: Stages) -> tuple[LocalChannel, LocalChannel]:
        ends = LocalChannel(one), LocalChannel(other)
        ends[0]._other, ends[1]._other = ends[1], ends[0]
        return ends

    def send(self, name: str, tensor: Tensor) -> None:
        self._sent[name] = (tensor, self._stages.event())
        self._kept.append(tensor)

    def receive(self, key: tuple, name: str, shape: tuple[int, ...], dtype: torch.dtype, into: Tensor | None = None) -> Tensor:
        tensor, there = self._other._sent.pop(name)
        assert tensor.shape == shape and tensor.dtype == dtype, f"{name}: {tensor.shape} {tensor.dtype} was sent, {shape} {dtype} expected"
        self._stages.wait(there)
        here = self._stages.copy_of(key, name, tensor) if into is None else into.copy_(tensor, non_blocking=True)
        self._other._received = self._stages.event()
        return here

    def share(self, tensor: Tensor) -> Tensor:
        return tensor

    def settle(self) -> None:
        if self._received is not None:
            self._stages.wait(self._received)
        self._kept.clear()
