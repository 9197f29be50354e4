"""Stages of a round on one device: run as they are, or recorded as CUDA graphs and replayed. Knows nothing about what they do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from smc.resident.plan import RoundResult

READINGS = 3
"""Results that may be on their way to the host at once."""


class Reading:
    """A round's result on its way to the host."""

    def __init__(self, result: RoundResult, arrived: torch.cuda.Event | None, marks: dict[str, torch.cuda.Event]) -> None:
        self._result, self._arrived = result, arrived
        self.marks = marks
        """Points in the work of both devices, by name, for whoever times rounds."""

    def result(self) -> RoundResult:
        """Waits for it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return RoundResult(**{name: tensor.numpy() for name, tensor in vars(self._result).items()})


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

    def mark(self) -> Any:
        """A point in this device's work that another may wait for."""
        return None

    def wait(self, mark: Any) -> None:
        """Do nothing further before that point has been reached."""

    def take(self, key: tuple, name: str, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Tensors of the other side, here."""
        return list(tensors)

    def read(self, key: tuple, result: RoundResult, grown: tuple[Tensor, Tensor, Tensor], marks: dict[str, Any]) -> Reading:
        """Bring a result to the host; `grown` are its tokens, how many exist, and whether that was the end."""
        return Reading(_complete(result, grown), None, {})


class Graphs(Stages):
    """One stream of a GPU. A stage runs as it is the first time, which compiles its kernels, and is recorded the second time."""

    records = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._seen: set[tuple] = set()
        self._recorded: dict[tuple, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._here: dict[tuple, list[Tensor]] = {}
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

    def take(self, key: tuple, name: str, tensors: Iterable[Tensor]) -> list[Tensor]:
        tensors = list(tensors)
        if (key, name) not in self._here:
            self._here[key, name] = [torch.empty_like(tensor, device=self.device) for tensor in tensors]
        for here, tensor in zip(self._here[key, name], tensors):
            here.copy_(tensor, non_blocking=True)
        return self._here[key, name]

    def read(self, key: tuple, result: RoundResult, grown: tuple[Tensor, Tensor, Tensor], marks: dict[str, Any]) -> Reading:
        whole = _complete(result, grown)
        if key not in self._hosts:
            pinned = lambda: {n: torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for n, t in vars(whole).items()}  # noqa: E731
            self._hosts[key] = [RoundResult(**pinned()) for _ in range(READINGS)]
        host = self._hosts[key][self._turn % READINGS]
        self._turn += 1
        for name, tensor in vars(whole).items():
            getattr(host, name).copy_(tensor, non_blocking=True)
        return Reading(host, self.mark(), marks)


def _complete(result: RoundResult, grown: tuple[Tensor, Tensor, Tensor]) -> RoundResult:
    tokens_AQ, count_A, ended_A = grown
    return replace(result, grown_AQ=tokens_AQ, count_A=count_A, ended_A=ended_A)
