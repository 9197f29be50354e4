"""A side's channel in a process of its own: the leader talks to the other side's leader and tells its own ranks."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from services.link.base import PeerEnd
from services.workers.parallel import TensorParallel


class PeerChannel:
    """`smc.resident.channel.Channel`. `end` is the leader's, None at other ranks; `group` None: there are no others."""

    def __init__(self, end: PeerEnd | None, group: TensorParallel | None, device: torch.device, timeout: float) -> None:
        """`timeout`: seconds to wait for the other side where the host has to."""
        self._end, self._group, self._device, self._timeout = end, group, device, timeout
        self._given: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()
        self._here: dict[tuple, Tensor] = {}

    def give(self, name: str, tensor: Tensor) -> None:
        if self._end is not None:
            self._given[name] += 1
            self._end.give(name, self._given[name], tensor)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if (name, shape) not in self._here:
            self._here[name, shape] = torch.empty(shape, dtype=dtype, device=self._device)
        here = self._here[name, shape]
        if self._end is not None:
            self._taken[name] += 1
            self._end.take(name, self._taken[name], here, self._timeout)
        return self.share(here)

    def share(self, tensor: Tensor) -> Tensor:
        if self._group is not None:
            self._group.share(tensor)
        return tensor

    def settle(self) -> None:
        if self._end is not None:
            self._end.settle()
