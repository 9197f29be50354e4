"""Ranks of a model as threads of one process that sum their parts at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from smc.model.parallel import Reduce, Shard

Result = TypeVar("Result")


class ThreadSum:
    """A `smc.model.parallel.Reduce` of one rank. It adds in the order of ranks, so that all ranks get the same bits."""

    def __init__(self, rank: int, parts: list[Tensor | None], meeting: threading.Barrier) -> None:
        self.rank, self.parts, self.meeting = rank, parts, meeting

    def __call__(self, part_TE: Tensor) -> Tensor:
        self.parts[self.rank] = part_TE
        self.meeting.wait(timeout=60)
        total = torch.stack([part for part in self.parts if part is not None]).sum(0)
        self.meeting.wait(timeout=60)
        return total

    def room(self, tokens: int, features: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(tokens, features, dtype=dtype)


def in_ranks(degree: int, act: Callable[[Shard, Reduce], Result]) -> list[Result]:
    """Run `act` as each of `degree` ranks, and return their results."""
    parts: list[Tensor | None] = [None] * degree
    meeting = threading.Barrier(degree)
    with ThreadPoolExecutor(degree) as pool:
        ranks = [pool.submit(act, Shard(rank, degree), ThreadSum(rank, parts, meeting)) for rank in range(degree)]
        return [rank.result() for rank in ranks]
