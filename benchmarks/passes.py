"""Time whole passes of a model on a GPU, and their parts: decoding passes, and passes over prompts.

    python -m benchmarks.passes decode [llama-1b:bfloat16:32x1:256:1:8 llama-8b:bfloat16:64x1:1024:64 ...] [--no-pdl]
    [--kernels]
    python -m benchmarks.passes prompt|attention [--shapes llama-8b,llama-1b] [--queries 16,256,...]
    [--pasts 0,4096,...]

Random weights. The last line is JSON.

`decode` times one pass in a CUDA graph, such as a draft step or a target pass, and with `--kernels` its kernels. The
name of a pass consists of shape, type, rows x tokens of a row, positions that the rows of a group share, groups
(default 1), and the number of groups that there is room for (default: the number of rows; in a service the number of
slots). Each row has some positions of its own. The pass computes the logits of all tokens. With `--no-pdl` no kernel
begins before the previous one has ended.

`attention` times one layer in bfloat16, for a row of `--queries` behind `--pasts` positions, and for 8 rows of an
eighth of the queries each; by torch (fused), fa2 and fa3, checked against torch. `smc.attention.prompts.FEW_QUERIES` is
the number of queries from which fa3 is faster. `prompt` times whole passes of one row, the host's time to queue a pass,
and its matrix products alone. Shares are of 790 TFLOP/s."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.prompts import PEAK, operations
from smc.api.limits import DTYPE_NAMES
from smc.attention.backend import ForwardBatch
from smc.attention.prompts import FlashInferAttention, FusedAttention, kernels_of, obstacle
from smc.executor.invariant_forward import InvariantForward
from smc.executor.messages import PromptBatch
from smc.executor.ops import RoundOps
from smc.executor.triton_forward import TritonForward
from smc.executor.triton_ops import TritonOps
from smc.executor.worker import ModelWorker
from smc.memory.kv_cache import KVPool
from smc.memory.pages import DUMMY_PAGE
from smc.model.linear import DTYPES
from smc.model.loader import random_model
from smc.model.presets import NoText, preset
from smc.round.plan import Contexts
from smc.round.tensors import RowGroups, Rows, RowSpans, RowTables
from smc.stops import TokenBytes
from smc.types import ModelRole, Numerics

PASSES = [
    *(f"llama-1b:{dtype}:{rows}x1:256:1:8" for dtype in ("bfloat16", "fp8") for rows in (8, 32)),
    *(f"llama-8b:{dtype}:{block}:256" for dtype in ("bfloat16", "fp8") for block in ("1x1", "1x5", "8x5")),
    *(f"llama-1b:bfloat16:32x1:{context}:1:8" for context in (4096, 16384)),
    *(f"llama-8b:bfloat16:8x5:{context}" for context in (4096, 16384)),
    *(f"llama-8b:bfloat16:64x1:{context}:64" for context in (1024, 4096)),
]
OWN, WIDTH, PAGES = 24, 16_800, 17_500
"""Positions that each row has for itself; maximum number of positions of a row; and the unit in which the number of
pages of a pool grows."""
DEVICE, DTYPE = torch.device("cuda:0"), torch.bfloat16
LAYERS = 4
"""Layers of a pool for attention alone, used in turn, so that the L2 cache does not hold them."""


@dataclass(frozen=True)
class DecodePass:
    """A decoding pass; see the top of the file for its name and the meaning of the fields."""

    shape: str
    dtype: str
    rows: int
    queries: int
    context: int
    groups: int = 1
    room: int | None = None
    layers: int | None = None

    @staticmethod
    def parse(text: str) -> DecodePass:
        shape, dtype, block, *sizes = text.split(":")
        assert dtype in DTYPE_NAMES, f"{text!r}: allowed types: {', '.join(DTYPE_NAMES)}"
        rows, queries = map(int, block.split("x"))
        made = DecodePass(shape, dtype, rows, queries, *map(int, sizes))
        assert rows % made.groups == 0, f"{text!r}: allowed groups: those that divide {rows}"
        assert made.groups <= (made.room or rows) <= rows, f"{text!r}: allowed room: {made.groups} to {rows}"
        return made

    @property
    def pages(self) -> int:
        """Number of pages of all rows."""
        return self.groups * self.context + self.rows * (OWN + self.queries)

    @property
    def worker(self) -> ModelWorker:
        return pass_worker(self.shape, self.dtype, self.layers, PAGES * -(-self.pages // PAGES))

    def build(self, pdl: bool, numerics: Numerics = Numerics.FASTEST) -> Callable[[], Tensor]:
        """Return a call that runs the pass and returns the logits of all tokens."""
        kind = InvariantForward if numerics is Numerics.INVARIANT else TritonForward
        forward, rows, tokens_T = kind(self.worker, pdl=pdl), self.random_rows(), self.tokens()
        return lambda: forward.logits(forward(tokens_T, rows))

    def tokens(self) -> Tensor:
        return torch.randint(0, 1000, (self.rows * self.queries,), device="cuda")

    def random_rows(self) -> Rows:
        """Return rows whose pages are random ones of the pool."""
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
        return Rows(
            RowTables(table_SL, slot_R),
            RowSpans(full_column(self.rows, self.context + OWN), full_column(self.rows, self.queries)),
            RowGroups(group_R, first_G, size_G, shared_G),
            self.queries,
            Contexts.of(self.context + own, self.room or self.rows, self.groups),
        )


@lru_cache(2)
def pass_worker(shape: str, dtype: str, layers: int | None, pages: int) -> ModelWorker:
    config = preset(shape)
    config = config if layers is None else replace(config, num_layers=layers)
    model = random_model(config, dtype=DTYPES[dtype], device="cuda")
    vocab = config.vocab_size
    made = ModelWorker(
        ModelRole.TARGET, model, width=WIDTH, pages=pages, vocab_size=vocab, token_bytes=TokenBytes.of(NoText(vocab))
    )
    for store in (made.pool.keys, made.pool.values):
        store.normal_()
        store[:, DUMMY_PAGE] = 0.0
    return made


def record(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Record a call; return the graph and the tensor of its result. Tensors that `call` holds must live as long as the
    graph, which uses them."""
    # The inputs were written on another stream than the one on which the call first runs.
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
    """Return, by name of kernel, the number of launches and their microseconds. A kernel that begins early (PDL) counts
    from its beginning."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as run:
        graph.replay()
        torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = {}
    for event in run.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            launches, spent = found.get(event.name, (0, 0.0))
            found[event.name] = (launches + 1, spent + event.time_range.elapsed_us())
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def full_column(count: int, value: int) -> Tensor:
    return torch.full((count,), value, dtype=torch.int32, device="cuda")


def call_milliseconds(call: Callable[[], object], times: int = 7) -> float:
    """Return the median milliseconds of a call on the device."""
    found = []
    for _ in range(times + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found[2:])


def batch_of(rows: int, queries: int, past: int) -> ForwardBatch:
    """Return a batch whose pages are in random order, with none shared."""
    length = past + queries
    table_RL = 1 + np.random.default_rng(0).permutation(rows * length).reshape(rows, length).astype(np.int32)
    starts_R, counts_R = np.full(rows, past, np.int32), np.full(rows, queries, np.int32)
    positions_T = np.tile(np.arange(past, length), rows)
    return ForwardBatch(
        table_RL,
        starts_R,
        counts_R,
        table_RL[:, past:].ravel(),
        positions_T,
        np.arange(rows + 1),
        np.zeros(rows, np.int64),
    )


def read_layers(planned: Any, q_THD: Tensor) -> list[Tensor]:
    return [planned.read(layer, q_THD) for layer in range(LAYERS)]


def time_attention(name: str, queries: int, past: int) -> list[dict]:
    config = preset(name)
    heads, dim, found = (config.num_heads, config.num_kv_heads), config.head_dim, []
    why = obstacle(heads, dim, DTYPE, DEVICE)
    if why is not None:
        print("without flashinfer:", why)
    flash = FlashInferAttention(heads, dim, DTYPE, DEVICE) if why is None else None
    for rows in (1, 8) if queries >= 128 else (1,):
        batch = batch_of(rows, queries // rows, past)
        pool = KVPool(replace(config, num_layers=LAYERS), batch.table_RL.size, DTYPE, DEVICE)
        pool.keys.normal_()
        pool.values.normal_()
        q_THD = torch.randn(queries, heads[0], dim, device=DEVICE).to(DTYPE)
        plans = {"torch": lambda: FusedAttention().plan(pool, batch)}  # noqa: B023
        if flash is not None:
            plans |= {
                kernel: (lambda kernel=kernel: flash.plan_with(kernel, pool, batch))  # noqa: B023
                for kernel in kernels_of(DEVICE)
            }
        seen, expected = queries * past + queries * (queries // rows + 1) / 2, None
        line = {"shape": name, "rows": rows, "queries": queries, "past": past}
        for kernel, make in plans.items():
            begin = time.perf_counter()
            planned = make()
            host = 1e3 * (time.perf_counter() - begin)
            out = planned.read(0, q_THD).float()
            expected = out if expected is None else expected
            error = float((out - expected).norm() / expected.norm())
            read = partial(read_layers, planned, q_THD)
            spent = call_milliseconds(read) / LAYERS
            share = 4 * heads[0] * dim * seen / (1e-3 * spent * PEAK)
            line |= {kernel: round(spent, 4), f"{kernel}_peak": round(share, 3), f"{kernel}_plan": round(host, 3)}
            assert error < 2e-2, (line, kernel, error)
        print(line, flush=True)
        found.append(line)
    return found


def products(worker: ModelWorker, tokens: int) -> Callable[[], Tensor]:
    """Return a call that computes only the matrix products of a pass."""
    config = worker.model.config
    widths = (config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size)
    inputs = {width: torch.randn(tokens, width, device=DEVICE).to(DTYPE) for width in widths}

    def call() -> Tensor:
        for layer in worker.model.layers:
            for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
                out = F.linear(inputs[linear.weight.shape[1]], linear.weight)
        return out

    return call


def time_passes(name: str, queries: list[int], pasts: list[int]) -> list[dict]:
    model, found = random_model(preset(name), dtype=DTYPE, device=DEVICE), []
    vocab, width = model.config.vocab_size, max(queries) + max(pasts)
    worker = ModelWorker(
        ModelRole.TARGET, model, width=width, pages=width, vocab_size=vocab, token_bytes=TokenBytes.of(NoText(vocab))
    )
    pages_B = 1 + np.random.default_rng(0).permutation(width).astype(np.int32)
    for count in queries:
        alone = call_milliseconds(products(worker, count))
        for past in pasts:
            held, tokens = np.array([past], np.int32), np.arange(count) % vocab
            batch = PromptBatch(pages_B[: past + count], held, np.array([count], np.int32), tokens)
            line = {"shape": name, "queries": count, "past": past, "products": round(alone, 3)}
            for which, ops in {"fused": TritonOps(), "invariant": TritonOps(), "decoder": RoundOps()}.items():
                worker.ops = ops
                worker.wanted_numerics = Numerics.INVARIANT if which == "invariant" else Numerics.FASTEST
                call = torch.inference_mode()(lambda: worker._forward(batch, np.array([count - 1])))  # noqa: B023
                spent = call_milliseconds(call, 5)
                torch.cuda.synchronize()
                begin = time.perf_counter()
                call()
                host = 1e3 * (time.perf_counter() - begin)
                torch.cuda.synchronize()
                share = operations(model.config, count, past) / (1e-3 * spent * PEAK)
                line |= {which: round(spent, 3), f"{which}_peak": round(share, 3), f"{which}_host": round(host, 2)}
            print(line, flush=True)
            found.append(line)
    return found


@torch.inference_mode()
def time_decode_passes(given: argparse.Namespace) -> dict[str, float]:
    found = {}
    for name, numerics in product(given.passes or PASSES, given.numerics):
        # The call must outlive the recording, which uses its tensors.
        call = DecodePass.parse(name).build(not given.no_pdl, Numerics(numerics))
        graph, _ = record(call)
        found[f"{name} {numerics}"] = spent = round(milliseconds(graph), 3)
        print(f"{name:36s} {numerics:9s} {spent:8.3f} ms", flush=True)
        for kernel, (launches, spent) in kernels(graph).items() if given.kernels else ():
            print(f"    {kernel[:60]:60s} {launches:5d} x {spent / launches:8.2f} us = {spent:8.1f}", flush=True)
    return found


def time_prompts(given: argparse.Namespace) -> dict[str, list[dict]]:
    # Before the first import of flashinfer, which may compile for minutes otherwise.
    os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")
    torch.manual_seed(0)
    queries, pasts = (list(map(int, values.split(","))) for values in (given.queries, given.pasts))
    found: list[dict] = []
    for name in given.shapes.split(","):
        if given.part == "attention":
            found += [line for count in queries for past in pasts for line in time_attention(name, count, past)]
        else:
            found += time_passes(name, queries, pasts)
        torch.cuda.empty_cache()
    return {given.part: found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("decode", "prompt", "attention"))
    parser.add_argument("passes", nargs="*", help="for decode: names of passes, such as llama-1b:bfloat16:32x1:256:1:8")
    parser.add_argument(
        "--no-pdl", action="store_true", help="for decode: begin no kernel before the previous one has ended"
    )
    parser.add_argument(
        "--numerics", type=lambda text: text.split(","), default=["fastest", "invariant"],
        help="for decode: orders of sums; default: fastest,invariant",
    )  # fmt: skip
    parser.add_argument("--kernels", action="store_true", help="for decode: time the kernels of each pass as well")
    parser.add_argument(
        "--shapes", default="llama-8b,llama-1b", help="for prompt, attention: shapes; default: %(default)s"
    )
    parser.add_argument(
        "--queries", default="16,128,256,512,1024,4096", help="for prompt, attention: default: %(default)s"
    )
    parser.add_argument("--pasts", default="0,4096,16384,61440", help="for prompt, attention: default: %(default)s")
    given = parser.parse_args()
    print(json.dumps(time_decode_passes(given) if given.part == "decode" else time_prompts(given)))


if __name__ == "__main__":
    main()
