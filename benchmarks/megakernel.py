"""Time passes of a draft in one launch (`smc.kernels.megakernel`) beside the same passes in many launches, and the
phases of the one launch. Needs a GPU of compute capability 9.0.

    python -m benchmarks.megakernel [qwen2.5-0.5b:fp8:8x1:256 llama-1b:fp8:32x1:256:1 ...]

Random weights; names as in `benchmarks.passes`, of at most 64 tokens. The last line is JSON: milliseconds of both ways
without the head, their relative difference, and for each phase of a layer, in clocks: the longest work of a block and
the shortest wait at the barrier after it. The rest of a phase's time is what blocks wait for the slowest."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import torch

from benchmarks.passes import WIDTH, DecodePass, milliseconds, record
from smc.executor.triton_forward import TritonForward
from smc.kernels.megakernel import Megakernel, obstacle

PASSES = [
    *(f"qwen2.5-0.5b:{dtype}:{rows}x1:256:1:1" for dtype in ("fp8", "bfloat16") for rows in (8, 16, 32)),
    *(f"{shape}:fp8:8x1:256:1:1" for shape in ("llama-1b", "llama-8b/4")),
    "qwen2.5-0.5b:fp8:8x1:2000:1:1",
    # Norms of outputs and heads of 256; norms of all heads together; norms of single heads.
    *(f"{shape}:{dtype}:8x1:256:1:1" for shape in ("gemma3-270m", "gemma3-1b") for dtype in ("bfloat16", "fp8")),
    "gemma3-1b:bfloat16:8x1:2000:1:1",
    *(f"olmo2-1b:{dtype}:8x1:256:1:1" for dtype in ("bfloat16", "fp8")),
    *(f"qwen3-0.6b:fp8:{rows}x1:256:1:1" for rows in (8, 32)),
    # int4.
    *(f"qwen2.5-0.5b:int4:{rows}x1:256:1:1" for rows in (8, 16, 32)),
    *(f"{shape}:int4:8x1:256:1:1" for shape in ("llama-1b", "qwen2.5-1.5b", "gemma3-1b", "olmo2-1b")),
    # Long rows.
    "qwen2.5-0.5b:fp8:8x1:16000:1:1",
]
WARM_LAYERS = 2
"""Layers at the beginning that are left out of the phases' means."""


def time_pass(name: str) -> dict[str, Any]:
    asked = DecodePass.parse(name)
    worker, rows, tokens_T = asked.worker, asked.random_rows(), asked.tokens()
    if (why := obstacle(worker.model, worker.pool, WIDTH)) is not None:
        return {"obstacle": why}
    forward, whole = TritonForward(worker), Megakernel(worker.model, worker.pool, worker.rope, WIDTH)
    (many, expected_TE), (one, found_TE) = (record(partial(run, tokens_T, rows)) for run in (forward, whole))
    whole.check()
    error = float((found_TE.float() - expected_TE.float()).norm() / expected_TE.float().norm())
    found = {"many_ms": round(milliseconds(many), 3), "one_ms": round(milliseconds(one), 3)}
    profiled = Megakernel(worker.model, worker.pool, worker.rope, WIDTH, profile=True)
    for _ in range(3):
        profiled(tokens_T, rows)
    torch.cuda.synchronize()
    return {**found, "difference": round(error, 4), "phases": phases(profiled.workspace.times, profiled.phases)}


def phases(times: torch.Tensor, names: tuple[str, ...]) -> dict[str, dict[str, int]]:
    """Return the mean over layers of the longest work and the shortest wait of each phase, in clocks; `times` as in
    `smc.kernels.megakernel.MegakernelRoom`."""
    times = times[:, WARM_LAYERS:]
    work = (times[:, :, 1::2] - times[:, :, ::2]).amax(0).double().mean(0)
    after = torch.cat((times[:, :-1, 2::2], times[:, 1:, :1]), dim=2)
    wait = (after - times[:, :-1, 1::2]).amin(0).double().mean(0)
    return {name: {"work": round(float(work[i])), "wait": round(float(wait[i]))} for i, name in enumerate(names)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("passes", nargs="*", help="names of passes, such as qwen2.5-0.5b:fp8:8x1:256:1")
    found = {}
    for name in parser.parse_args().passes or PASSES:
        found[name] = time_pass(name)
        print(f"{name:32s} {found[name]}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
