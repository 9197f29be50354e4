"""Time a prompt's pass on a GPU, and what it is made of: attention by every kernel, products, and what is between them.

`python -m benchmarks.prompt_passes [attention] [pass] [--shapes llama-8b,llama-1b] [--queries 16,256,...] [--pasts
0,4096,...]`

Random weights, bfloat16. `attention`: one layer, a row of so many queries behind a past, and 8 rows of an eighth each;
by torch (fused), fa2 and fa3, checked against torch. `smc.attention.flashinfer.FEW_QUERIES` is where fa3 begins to win.
`pass`: whole passes of one row, the host's time to queue one, and the sums of its products alone. Shares are of 790
TFLOP/s. The last line is JSON."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.prompts import PEAK, operations
from smc.attention.base import ForwardBatch
from smc.attention.flashinfer import FlashInferAttention, kernels_of, obstacle
from smc.attention.fused import FusedAttention
from smc.executor.messages import PromptBatch
from smc.executor.ops import TorchOps
from smc.executor.triton_ops import TritonOps
from smc.executor.worker import ModelWorker
from smc.memory.kv_pool import KVPool
from smc.model.presets import NoText, preset
from smc.model.random_model import random_model
from smc.stops import TokenBytes

DEVICE, DTYPE = torch.device("cuda:0"), torch.bfloat16
LAYERS = 4
"""Of a pool for attention alone, one after another: the L2 cache does not hold them."""


def milliseconds(call: Callable[[], object], times: int = 7) -> float:
    """The median of a call, on the device."""
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
    """Pages in any order, none shared."""
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
            spent = milliseconds(lambda: [planned.read(layer, q_THD) for layer in range(LAYERS)]) / LAYERS  # noqa: B023
            share = 4 * heads[0] * dim * seen / (1e-3 * spent * PEAK)
            line |= {kernel: round(spent, 4), f"{kernel}_peak": round(share, 3), f"{kernel}_plan": round(host, 3)}
            assert error < 2e-2, (line, kernel, error)
        print(line, flush=True)
        found.append(line)
    return found


def products(worker: ModelWorker, tokens: int) -> Callable[[], Tensor]:
    """A pass's products and nothing else."""
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
        name, model, width=width, pages=width, vocab_size=vocab, token_bytes=TokenBytes.of(NoText(vocab))
    )
    pages_X = 1 + np.random.default_rng(0).permutation(width).astype(np.int32)
    for count in queries:
        alone = milliseconds(products(worker, count))
        for past in pasts:
            held, tokens = np.array([past], np.int32), np.arange(count) % vocab
            batch = PromptBatch(pages_X[: past + count], held, np.array([count], np.int32), tokens)
            line = {"shape": name, "queries": count, "past": past, "products": round(alone, 3)}
            for which, ops in {"fused": TritonOps(), "decoder": TorchOps()}.items():
                worker.ops = ops
                call = torch.inference_mode()(lambda: worker._forward(batch, np.array([count - 1])))  # noqa: B023
                spent = milliseconds(call, 5)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["attention", "pass"])
    parser.add_argument("--shapes", default="llama-8b,llama-1b")
    parser.add_argument("--queries", default="16,128,256,512,1024,4096")
    parser.add_argument("--pasts", default="0,4096,16384,61440")
    options = parser.parse_args()
    os.environ.setdefault(
        "FLASHINFER_DISABLE_JIT", "1"
    )  # Before the first import of flashinfer; else it may compile for minutes.
    torch.manual_seed(0)
    queries, pasts = (list(map(int, values.split(","))) for values in (options.queries, options.pasts))
    found: dict[str, list[dict]] = {part: [] for part in options.parts}
    for name in options.shapes.split(","):
        if "attention" in options.parts:
            found["attention"] += [
                line for count in queries for past in pasts for line in time_attention(name, count, past)
            ]
        if "pass" in options.parts:
            found["pass"] += time_passes(name, queries, pasts)
        torch.cuda.empty_cache()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
