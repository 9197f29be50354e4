"""A side's channel in a process of its own: the leader talks to the other side's leader and tells its own ranks."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from services.link.base import PeerEnd
from services.workers.parallel import TensorParallel
from smc.runtime.stages import Stages


class PeerChannel:
    """`smc.runtime.channel.Channel`. `end` is the leader's, None at other ranks; `group` None: there are no others."""

    def __init__(self, end: PeerEnd | None, group: TensorParallel | None, stages: Stages, timeout: float) -> None:
        """`timeout`: seconds to wait for the other side where the host has to."""
        self._end, self._group, self._stages, self._timeout = end, group, stages, timeout
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()

    def send(self, name: str, tensor: Tensor) -> None:
        if self._end is not None:
            self._sent[name] += 1
            self._end.send(name, self._sent[name], tensor)

    def receive(self, key: tuple, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        here = self._stages.keep(key, f"received {name}", lambda: torch.empty(shape, dtype=dtype, device=self._stages.device))
        if self._end is not None:
            self._received[name] += 1
            self._end.receive(name, self._received[name], here, self._timeout)
        return self.share(here)

    def share(self, tensor: Tensor) -> Tensor:
        if self._group is not None:
            self._group.share(tensor)
        return tensor

    def settle(self) -> None:
        if self._end is not None:
            self._end.settle()
