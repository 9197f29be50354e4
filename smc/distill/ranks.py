"""Processes that train one draft together: every one writes and learns from data of its own; gradients are summed.

Knows nothing about models and data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(minutes=30)
"""Of one process for another, which may write or measure meanwhile."""


@dataclass(frozen=True)
class Ranks:
    """This process among `count`. The methods are collective: every process calls them in the same order."""

    rank: int = 0
    count: int = 1
    control: Any = None
    """Group for values on the CPU."""

    @staticmethod
    def join(rank: int, count: int, rendezvous: Path, on_gpu: bool) -> Ranks:
        """Meet the other processes at a file that does not exist yet."""
        if count == 1:
            return Ranks()
        # Processes of one host need no network.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(str(rendezvous), count)
        if on_gpu:
            torch.cuda.set_device(rank)
        dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=count, timeout=TIMEOUT)
        control = dist.new_group(backend="gloo", timeout=TIMEOUT) if on_gpu else dist.group.WORLD
        return Ranks(rank, count, control)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Replace gradients by their sums over all processes, in float32."""
        if self.count == 1:
            return
        flat = torch.cat([gradient.flatten().float() for gradient in gradients])
        dist.all_reduce(flat)
        begin = 0
        for gradient in gradients:
            gradient.copy_(flat[begin : begin + gradient.numel()].view_as(gradient))
            begin += gradient.numel()

    def sum(self, values: Sequence[float]) -> list[float]:
        if self.count == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.control)
        return total.tolist()

    def first(self, value: Any) -> Any:
        """The value of the first process."""
        if self.count == 1:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=0, group=self.control)
        return held[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in order."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self.control)
        return found

    def leave(self) -> None:
        if self.count > 1:
            dist.destroy_process_group()
