"""Ranks of a model as threads of one process, which sum their parts where they meet."""

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
    """A `smc.model.parallel.Reduce` of one rank. Sums are taken in the order of ranks: the same bits on all."""

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
    """What each of so many ranks returns."""
    parts: list[Tensor | None] = [None] * degree
    meeting = threading.Barrier(degree)
    with ThreadPoolExecutor(degree) as pool:
        ranks = [pool.submit(act, Shard(rank, degree), ThreadSum(rank, parts, meeting)) for rank in range(degree)]
        return [rank.result() for rank in ranks]
