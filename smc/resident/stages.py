"""Stages of a round on one device: run as they are, or recorded as CUDA graphs and replayed. Knows nothing about what they do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from smc.resident.plan import IN_FLIGHT, RoundResult

Mark = int | torch.cuda.Event
"""A point in a device's work: of a CPU, nanoseconds of the monotonic clock."""


class Reading:
    """A round's result on its way to the host. `result` None: there is nothing to read, but a point in the work to be waited for."""

    def __init__(self, result: RoundResult | None, arrived: Mark, marks: dict[str, tuple[Mark, Mark]]) -> None:
        self._result, self._arrived, self._at = result, arrived, 0
        self.marks = marks
        """What was done, and when it began and ended; the pass of a model has the name of its side."""

    def result(self) -> RoundResult | None:
        """Waits for it."""
        if not isinstance(self._arrived, int):
            self._arrived.synchronize()
            self._at = time.monotonic_ns()
        return self._result and RoundResult(**{name: tensor.numpy() for name, tensor in vars(self._result).items()})

    def spans(self) -> dict[str, tuple[int, int]]:
        """`marks` in nanoseconds of the monotonic clock, after `result`: as near as that has waited for it."""
        return {name: (self._nanoseconds(begin), self._nanoseconds(end)) for name, (begin, end) in self.marks.items()}

    def _nanoseconds(self, mark: Mark) -> int:
        return mark if isinstance(mark, int) else self._at - int(1e6 * mark.elapsed_time(self._arrived))


class Stages:
    """Runs every stage as it is, at once."""

    records = False
    """Stages are recorded, once for each key."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def working(self) -> AbstractContextManager:
        """Around everything that this device is asked to do."""
        return contextlib.nullcontext()

    def run(self, key: tuple, name: str, stage: Callable[[], Any], record: bool = True) -> Any:
        """Stage `name` of rounds of this key: always the same operations on the same tensors, but for what is in them.

        `record` says whether the operations may be recorded and replayed; it is the same for all stages of a key.
        """
        return stage()

    def mark(self) -> Mark:
        """A point in this device's work that another may wait for."""
        return time.monotonic_ns()

    def wait(self, mark: Mark) -> None:
        """Do nothing further before that point has been reached."""

    def take(self, key: tuple, tensor: Tensor) -> Tensor:
        """A tensor of the other side, here; for the same key always the same."""
        return tensor

    def read(self, key: tuple, result: RoundResult, grown: tuple[Tensor, Tensor, Tensor], marks: dict[str, tuple[Mark, Mark]]) -> Reading:
        """Bring a result to the host; `grown` are its tokens, how many exist, and whether that was the end."""
        return Reading(_complete(result, grown), self.mark(), marks)


class Graphs(Stages):
    """One stream of a GPU. A stage runs as it is the first time, which compiles its kernels, and is recorded the second time."""

    records = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._seen: set[tuple] = set()
        self._recorded: dict[tuple, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._here: dict[tuple, Tensor] = {}
        self._hosts: dict[tuple, list[RoundResult]] = {}
        self._turn = 0

    @contextlib.contextmanager
    def working(self):
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield

    def run(self, key: tuple, name: str, stage: Callable[[], Any], record: bool = True) -> Any:
        place = (key, name)
        if not record:
            return stage()
        if place not in self._seen:
            self._seen.add(place)
            return stage()
        if place not in self._recorded:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"):
                outputs = stage()
            self._recorded[place] = (graph, outputs)
        graph, outputs = self._recorded[place]
        graph.replay()
        return outputs

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        self.stream.wait_event(mark)

    def take(self, key: tuple, tensor: Tensor) -> Tensor:
        if key not in self._here:
            self._here[key] = torch.empty_like(tensor, device=self.device)
        return self._here[key].copy_(tensor, non_blocking=True)

    def read(self, key: tuple, result: RoundResult, grown: tuple[Tensor, Tensor, Tensor], marks: dict[str, tuple[Mark, Mark]]) -> Reading:
        whole = _complete(result, grown)
        if key not in self._hosts:
            pinned = lambda: {n: torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for n, t in vars(whole).items()}  # noqa: E731
            self._hosts[key] = [RoundResult(**pinned()) for _ in range(IN_FLIGHT)]
        host = self._hosts[key][self._turn % IN_FLIGHT]
        self._turn += 1
        for name, tensor in vars(whole).items():
            getattr(host, name).copy_(tensor, non_blocking=True)
        return Reading(host, self.mark(), marks)


def _complete(result: RoundResult, grown: tuple[Tensor, Tensor, Tensor]) -> RoundResult:
    tokens_AQ, count_A, ended_A = grown
    return replace(result, grown_AQ=tokens_AQ, count_A=count_A, ended_A=ended_A)
