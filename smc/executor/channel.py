"""The connection between the draft and the target in a round: what a channel does, and the channel within a process.
`services.workers.process.PeerChannel` is the one between two processes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch
from torch import Tensor

from smc.executor.graph_runner import Event, StageRunner

Share = Callable[[Tensor], None]
"""Replaces the values of a tensor by those of the leader, on every rank."""


class Channel(Protocol):
    """One model's end of the connection between the models. Tensors are on this model's device. Every call is made
    inside `StageRunner.working()`, and none waits for a GPU."""

    host_waits: bool
    """The host waits for every message, so that it may wait for this device, too. The same on every rank."""

    def send(self, key: Hashable, name: str, tensor: Tensor, *, keeps: bool = False) -> None:
        """Send a copy of a tensor under a name: the other model may receive it while the stages of other rounds, or of
        prompts, take its memory. `keeps`: the tensor has memory of its own that does not change until `settle`, and is
        sent without a copy."""
        ...

    def receive(
        self, key: Hashable, name: str, shape: tuple[int, ...], dtype: torch.dtype, into: Tensor | None = None
    ) -> Tensor:
        """Return the tensor that the other model sent under this name: in `into`, or by default in a tensor that is
        always the same in rounds of one key."""
        ...

    def share(self, tensor: Tensor) -> Tensor:
        """Replace the tensor's values by those of the leader, on every rank that holds a part of this model. Returns
        the tensor."""
        ...

    def settle(self) -> None:
        """Let what is sent after this call take the memory of what was sent before."""
        ...


class LocalChannel:
    """One end of a channel within a process, between two devices or on one."""

    host_waits = False

    def __init__(self, stages: StageRunner, share: Share | None = None) -> None:
        """`share`: see `Channel.share`; None if this process holds the whole models."""
        self._stages, self._share = stages, share
        self._other = self
        self._sent: dict[str, tuple[Tensor, Event]] = {}
        self._kept: list[Tensor] = []
        """Sent tensors, until the other end has copied them: memory that is freed is reused at once, and the runner may
        release what it keeps."""
        self._received: Event | None = None

    @staticmethod
    def between(one: StageRunner, other: StageRunner, share: Share | None = None) -> tuple[LocalChannel, LocalChannel]:
        ends = LocalChannel(one, share), LocalChannel(other, share)
        ends[0]._other, ends[1]._other = ends[1], ends[0]
        return ends

    def send(self, key: Hashable, name: str, tensor: Tensor, *, keeps: bool = False) -> None:
        sent = tensor if keeps else self._stages.copy_of(key, f"sent {name}", tensor)
        self._sent[name] = (sent, self._stages.event())
        self._kept.append(sent)

    def receive(
        self, key: Hashable, name: str, shape: tuple[int, ...], dtype: torch.dtype, into: Tensor | None = None
    ) -> Tensor:
        tensor, there = self._other._sent.pop(name)
        assert tensor.shape == shape and tensor.dtype == dtype, (
            f"{name}: {tensor.shape} {tensor.dtype} was sent, {shape} {dtype} expected"
        )
        self._stages.wait(there)
        here = (
            self._stages.copy_of(key, f"received {name}", tensor)
            if into is None
            else into.copy_(tensor, non_blocking=True)
        )
        self._other._received = self._stages.event()
        return here

    def share(self, tensor: Tensor) -> Tensor:
        if self._share is not None:
            self._share(tensor)
        return tensor

    def settle(self) -> None:
        if self._received is not None:
            self._stages.wait(self._received)
        self._kept.clear()
