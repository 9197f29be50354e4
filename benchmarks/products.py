"""Products of a decoder's matrices on a GPU, in bf16 and in FP8, ours and the library's, beside the time that reading
the weights takes.

    python -m benchmarks.products [--models 1b,8b] [--rows 8,32,64,160,512] [--only "8b down"]

Every tiling is checked against float32 and timed as in `benchmarks.kernels`: weights come from memory. A line a
product and a number of rows, in microseconds, then what a whole model's products take, in milliseconds. Under each the
fastest tilings of FP8, as n/k/splits/warps/stages, that of `choose` marked *; of bf16 it is the only one, since it has
been searched before. Ours of FP8 are given rounded activations, as by a norm; "library fp8" rounds them first, "its
product" does not. Takes about four minutes a model, most of it to compile. The last line is JSON. Axes: see
`smc.kernels`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels import BANDWIDTH, copies, microseconds, random, same
from smc.kernels.linear import ProductTiling, choose, gate_up_silu, linear, token_block_of
from smc.kernels.norm import round_rows, silu_mul
from smc.model.linear import FP8, Rounded, quantise

SHAPES = {
    "1b": {
        "qkv": (2048, 3072, 16),
        "o": (2048, 2048, 16),
        "gate_up": (2048, 16384, 16),
        "down": (8192, 2048, 16),
        "head": (2048, 128256, 1),
    },
    "8b": {
        "qkv": (4096, 6144, 32),
        "o": (4096, 4096, 32),
        "gate_up": (4096, 28672, 32),
        "down": (14336, 4096, 32),
        "head": (4096, 128256, 1),
    },
    "70b": {
        "qkv": (8192, 10240, 80),
        "o": (8192, 8192, 80),
        "gate_up": (8192, 57344, 80),
        "down": (28672, 8192, 80),
        "head": (8192, 128256, 1),
    },
}
"""Model, product: (inputs, outputs, how often a pass has it)."""
ROWS = (8, 32, 64, 160, 512)
MOST_OWN = 256
"""Rows in bf16; sums of more do not fit a program's registers."""
BLOCKS = ((64, 128, 4), (64, 256, 4), (128, 128, 4), (128, 128, 8), (128, 256, 4), (256, 128, 4), (256, 128, 8))
"""(block_n, block_k, warps)"""
SHARED_BYTES = 227 * 1024
COLUMNS = (
    "floor fp8",
    "own fp8",
    "default",
    "library fp8",
    "its product",
    "fast sums",
    "floor bf16",
    "own bf16",
    "library bf16",
)


def tilings(rows: int, outputs: int, inputs: int, gated: bool, fp8: bool) -> Iterator[ProductTiling]:
    """The chosen tiling, and for FP8 others, with as few splits as fill the machine; two programs share a
    multiprocessor if they can."""
    seen = [choose(rows, outputs, inputs, gated, fp8)]
    yield seen[0]
    padded = token_block_of(rows, fp8)
    for block_n, block_k, warps in BLOCKS if fp8 else ():
        # What a thread holds of the sums; with more than this there would be no room for anything else.
        if inputs % block_k or block_n * padded > 32 * warps * 160 or (gated and block_n == 64):
            continue
        tiles, steps = -(-outputs // block_n) * -(-rows // padded), inputs // block_k
        enough = [splits for splits in range(1, 17) if steps % splits == 0 and tiles * splits >= 120] or [1]
        stage_bytes = block_k * (block_n + padded)
        for splits in [1] if gated else enough[:2]:
            for programs in (2, 1):
                stages = min(6, SHARED_BYTES // programs // stage_bytes, max(2, steps // splits))
                tiling = ProductTiling(block_n, block_k, splits, warps, stages)
                if tiling not in seen and stages >= 2:
                    seen.append(tiling)
                    yield tiling


def _own(x: Tensor | Rounded, gated: bool, fields: dict[str, int], matrix: tuple[Tensor, Tensor | None]) -> Tensor:
    weight, scale = matrix
    if gated:
        return gate_up_silu(
            x, weight, scale=scale, **{name: value for name, value in fields.items() if name != "splits"}
        )
    return linear(x, weight, scale_N=scale, **fields)


def _library(
    x_TK: Tensor, gated: bool, matrix: tuple[Tensor, Tensor | None], rounded: tuple | None = None, fast: bool = False
) -> Tensor:
    weight, scale = matrix
    if scale is None:
        out_TN = F.linear(x_TK, weight)
    else:
        x8_TK, scale_T1 = rounded or round_rows(x_TK)
        scales = {"scale_a": scale_T1, "scale_b": scale[None]}
        out_TN = torch._scaled_mm(x8_TK, weight.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return silu_mul(out_TN) if gated and rounded is None else out_TN


def own(x: Tensor | Rounded, gated: bool, matrices: list, expected: Tensor) -> tuple[dict[str, float], float]:
    """Microseconds of every tiling, the fastest first, and of the one that is chosen."""
    rows = len(x.number_TK if isinstance(x, Rounded) else x)
    weight, scale = matrices[0]
    inputs, outputs = weight.shape[1], weight.shape[0]
    timed, default = {}, None
    for tiling in tilings(rows, outputs, inputs, gated, scale is not None):
        name = "/".join(map(str, vars(tiling).values())) + ("" if timed else "*")
        try:
            call = partial(_own, x, gated, vars(tiling))
            made = call(matrices[0])
            same(made.sum(0) if made.dim() == 3 else made, expected)
            timed[name] = microseconds(call, matrices)
        except Exception as failure:
            print(f"    {name} failed: {type(failure).__name__}: {str(failure)[:120]}", flush=True)
            timed[name] = float("inf")
        default = timed[name] if default is None else default
    return dict(sorted(timed.items(), key=lambda item: item[1])), default


def bench(inputs: int, outputs: int, rows: int, gated: bool) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Of one product: the columns, and all tilings by type."""
    weights, x_TK = copies(random(outputs, inputs, scale=inputs**-0.5)), random(rows, inputs)
    matrices = {"bf16": [(weight, None) for weight in weights]}
    weight8, scale = quantise(weights[0])
    matrices["fp8"] = [(weight.view(FP8), scale) for weight in copies(weight8.view(torch.uint8))]
    rounded = round_rows(x_TK)
    activations = {"bf16": x_TK, "fp8": rounded}
    found, sweeps = {}, {}
    for kind, bytes_each in (("fp8", 1), ("bf16", 2)):
        weight, scale_N = matrices[kind][0]
        exact_TK = x_TK.float() if scale_N is None else rounded.number_TK.float() * rounded.scale_T1
        expected = exact_TK @ (weight.float() * (1.0 if scale_N is None else scale_N[:, None])).T
        if gated:
            expected = F.silu(expected[:, : outputs // 2]) * expected[:, outputs // 2 :]
        found[f"floor {kind}"] = 1e6 * (bytes_each * inputs * outputs + 2 * rows * (inputs + outputs)) / BANDWIDTH
        if rows <= MOST_OWN or kind == "fp8":
            sweeps[kind], default = own(activations[kind], gated, matrices[kind], expected)
            found[f"own {kind}"] = next(iter(sweeps[kind].values()))
            if kind == "fp8":
                found["default"] = default
        same(_library(x_TK, gated, matrices[kind][0]), expected)
        found[f"library {kind}"] = microseconds(partial(_library, x_TK, gated), matrices[kind])
    for name, fast in (("its product", False), ("fast sums", True)):
        found[name] = microseconds(
            lambda matrix, fast=fast: _library(x_TK, gated, matrix, rounded, fast), matrices["fp8"]
        )
    return found, sweeps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="1b,8b")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--only", default="", help="a model and a product, as in '8b down'")
    given = parser.parse_args()
    torch.manual_seed(0)
    report: dict[str, dict] = {}
    print(f"{'':22s}" + "".join(f"{column:>13s}" for column in COLUMNS), flush=True)
    for model in given.models.split(","):
        for rows in map(int, given.rows.split(",")):
            sums: dict[str, float] = {}
            for product, (inputs, outputs, count) in SHAPES[model].items():
                if given.only not in ("", f"{model} {product}"):
                    continue
                found, sweeps = bench(inputs, outputs, rows, product == "gate_up")
                report[f"{model} {product} {rows}"] = {"us": found, "tilings": sweeps}
                print(f"{model} {product:8s}{rows:5d} rows   " + _cells(found), flush=True)
                for kind, timed in sweeps.items():
                    print(
                        f"    {kind:5s}" + "  ".join(f"{name} {us:.2f}" for name, us in list(timed.items())[:6]),
                        flush=True,
                    )
                for name, us in found.items():
                    sums[name] = sums.get(name, 0.0) + 1e-3 * count * us
                torch.cuda.empty_cache()
            report[f"{model} all {rows}"] = {"ms": sums}
            print(f"{model} all, ms{rows:5d} rows  " + _cells(sums), flush=True)
    print(json.dumps(report))


def _cells(found: dict[str, float]) -> str:
    return "".join(f"{found[column]:13.2f}" if column in found else f"{'':13s}" for column in COLUMNS)


if __name__ == "__main__":
    main()
