"""Time one pass of a model in a CUDA graph, as a step of a draft or a target's pass is one, and its kernels.

    python -m benchmarks.passes [llama-1b:bfloat16:32x1:256:1:8 llama-8b:bfloat16:64x1:1024:64 ...] [--no-pdl]
    [--kernels]

A pass is a shape, a type, rows x tokens of a row, the positions that rows of a group share, groups, one if nothing is
said, and the groups that there is room for: in a service as many as places, of which a row each is meant if nothing is
said. Each row has some positions of its own. Random weights. All tokens' logits are made. With `--no-pdl` no kernel
begins before the one before it has ended. The last line is JSON."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from benchmarks.attention import full
from smc.api.limits import DTYPE_NAMES
from smc.executor.forward import Rows
from smc.executor.plan import Contexts
from smc.executor.triton_forward import TritonForward
from smc.executor.worker import ModelWorker
from smc.memory.pages import DUMMY_PAGE
from smc.model.linear import DTYPES
from smc.model.presets import NoText, preset
from smc.model.random_model import random_model
from smc.stops import TokenBytes

PASSES = [
    *(f"llama-1b:{dtype}:{rows}x1:256:1:8" for dtype in ("bfloat16", "fp8") for rows in (8, 32)),
    *(f"llama-8b:{dtype}:{block}:256" for dtype in ("bfloat16", "fp8") for block in ("1x1", "1x5", "8x5")),
    *(f"llama-1b:bfloat16:32x1:{context}:1:8" for context in (4096, 16384)),
    *(f"llama-8b:bfloat16:8x5:{context}" for context in (4096, 16384)),
    *(f"llama-8b:bfloat16:64x1:{context}:64" for context in (1024, 4096)),
]
OWN, WIDTH, PAGES = 24, 16_800, 17_500
"""Positions that each row has for itself, positions of a row at most, and pages, of which there are as often as many as
it takes."""


@dataclass(frozen=True)
class Pass:
    shape: str
    dtype: str
    rows: int
    queries: int
    context: int
    groups: int = 1
    room: int | None = None
    layers: int | None = None

    @staticmethod
    def parse(text: str) -> Pass:
        shape, dtype, block, *sizes = text.split(":")
        assert dtype in DTYPE_NAMES, f"{text!r}: allowed types: {', '.join(DTYPE_NAMES)}"
        rows, queries = map(int, block.split("x"))
        made = Pass(shape, dtype, rows, queries, *map(int, sizes))
        assert rows % made.groups == 0, f"{text!r}: allowed groups: those that divide {rows}"
        assert made.groups <= (made.room or rows) <= rows, f"{text!r}: allowed room: {made.groups} to {rows}"
        return made

    @property
    def pages(self) -> int:
        """Of its rows."""
        return self.groups * self.context + self.rows * (OWN + self.queries)

    @property
    def worker(self) -> ModelWorker:
        return worker(self.shape, self.dtype, self.layers, PAGES * -(-self.pages // PAGES))

    def build(self, pdl: bool) -> Callable[[], Tensor]:
        """Something that runs it, for the logits of all tokens."""
        forward, rows, tokens_T = TritonForward(self.worker, pdl=pdl), self.places(), self.tokens()
        return lambda: forward.logits(forward(tokens_T, rows))

    def tokens(self) -> Tensor:
        return torch.randint(0, 1000, (self.rows * self.queries,), device="cuda")

    def places(self) -> Rows:
        """Anywhere in the pool."""
        own, size = OWN + self.queries, self.rows // self.groups
        shared, others = (
            1 + torch.randperm(len(self.worker.pool.keys[0]) - 1, device="cuda")[: self.pages].int()
        ).split([self.groups * self.context, self.rows * own])
        table_SL = torch.zeros(self.rows, WIDTH, dtype=torch.int32, device="cuda")
        table_SL[:, : self.context] = shared.view(self.groups, -1).repeat_interleave(size, 0)
        table_SL[:, self.context : self.context + own] = others.view(self.rows, own)
        slot_R = torch.arange(self.rows, dtype=torch.int32, device="cuda")
        group_R, first_G, size_G, shared_G = slot_R // size, *(torch.zeros_like(slot_R[: self.room]) for _ in range(3))
        first_G[: self.groups], size_G[: self.groups], shared_G[: self.groups] = slot_R[::size], size, self.context
        bounds, contexts = (
            (full(self.rows, self.context + OWN), full(self.rows, self.queries)),
            Contexts.of(self.context + own, self.room or self.rows, self.groups),
        )
        return Rows(table_SL, slot_R, None, None, *bounds, group_R, first_G, size_G, shared_G, self.queries, contexts)


@lru_cache(2)
def worker(shape: str, dtype: str, layers: int | None, pages: int) -> ModelWorker:
    config = preset(shape)
    config = config if layers is None else replace(config, num_layers=layers)
    model = random_model(config, dtype=DTYPES[dtype], device="cuda")
    vocab = config.vocab_size
    made = ModelWorker(
        "bench", model, width=WIDTH, pages=pages, vocab_size=vocab, token_bytes=TokenBytes.of(NoText(vocab))
    )
    for store in (made.pool.keys, made.pool.values):
        store.normal_()
        store[:, DUMMY_PAGE] = 0.0
    return made


def record(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A recording, and where its result is. What `call` holds must live as long: a recording runs in it."""
    # What the call reads has been written by another stream than the one that it is first run on.
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    torch.cuda.synchronize()
    return graph, out


def milliseconds(graph: torch.cuda.CUDAGraph, replays: int = 12) -> float:
    times = []
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / replays)
    return statistics.median(times[1:])


def kernels(graph: torch.cuda.CUDAGraph) -> dict[str, tuple[int, float]]:
    """Of each kind of kernel: launches, and microseconds of all of them. Those that begin early count from then."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as run:
        graph.replay()
        torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = {}
    for event in run.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            launches, spent = found.get(event.name, (0, 0.0))
            found[event.name] = (launches + 1, spent + event.time_range.elapsed_us())
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("passes", nargs="*", default=PASSES)
    parser.add_argument("--no-pdl", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    given = parser.parse_args()
    found = {}
    for name in given.passes:
        call = Pass.parse(name).build(pdl=not given.no_pdl)
        graph, _ = record(call)
        found[name] = round(milliseconds(graph), 3)
        print(f"{name:36s} {found[name]:8.3f} ms", flush=True)
        for kernel, (launches, spent) in kernels(graph).items() if given.kernels else ():
            print(f"    {kernel[:60]:60s} {launches:5d} x {spent / launches:8.2f} us = {spent:8.1f}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
