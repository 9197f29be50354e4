"""Check and time int4 on a GPU, compared with the time that reading the weights takes.

    python -m benchmarks.int4 products [--models 8b,70b] [--rows 8,16,40,64] [--only "8b down"] [--group 64] [--zeros]
    python -m benchmarks.int4 passes [llama-8b:int4:8x5:256 llama-8b:fp8:8x5:256 ...]

The floor is the time to read the bytes of the weights, at the speed at which this GPU reads a large tensor, which is
measured first. The last line is JSON.

`products` times each product of a decoder with codes in groups of 128, or --group, with every tiling, checked against
float32. A line has the chosen tiling, the fastest ones as n/splits/warps/stages, and the floor, in microseconds.
`passes` times whole passes with random weights as `benchmarks.passes decode` does; their floor includes all weights
that a pass reads (not the embedding)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.backends import read_bytes
from benchmarks.kernels import BEYOND_L2, CALLS, PRODUCTS, microseconds, random, same
from benchmarks.passes import DecodePass, call_milliseconds, milliseconds, record
from smc.kernels.int4 import choose_int4, gate_up_int4, linear_int4
from smc.model.linear import Linear
from smc.model.quantisation import GROUP, Int4Format

PASSES = [
    *(f"llama-8b:{dtype}:{block}:256" for block in ("1x1", "8x5") for dtype in ("int4", "fp8", "bfloat16")),
    *(f"llama-1b:{dtype}:8x1:256" for dtype in ("int4", "fp8", "bfloat16")),
]
READ_BYTES = 4 << 30


def read_bandwidth() -> float:
    """Return the bytes a second that this GPU reads."""
    large = torch.zeros(READ_BYTES // 4, device="cuda")
    return READ_BYTES / (1e-3 * call_milliseconds(large.sum))


def matrices(inputs: int, outputs: int, held: Int4Format) -> list[Linear]:
    """Return random matrices, as many as exceed the L2 cache together. `held`: their format."""
    found = []
    size = held.bytes(outputs, inputs)
    with torch.device("cuda"):
        for _ in range(min(CALLS, BEYOND_L2 // size + 1)):
            matrix = Linear(inputs, outputs).requires_grad_(False)
            matrix.to_int4(held)
            matrix.weight.random_(-(1 << 31), 1 << 31)
            assert matrix.scale is not None
            matrix.scale.uniform_(0.5, 1.5).mul_(0.2 * inputs**-0.5)
            if matrix.zero is not None:
                matrix.zero.random_(0, 16)
            found.append(matrix)
    return found


def tilings(rows: int, outputs: int, inputs: int, gated: bool, held: Int4Format) -> Iterator[dict[str, int]]:
    """Yield the fields of tilings, the chosen one first."""
    chosen = choose_int4(rows, outputs, inputs, held.group, zeros=held.zeros, gated=gated)
    seen = []
    for block_n in (chosen.block_n, 64, 128):
        tiles, groups = -(-outputs // block_n), inputs // held.group
        possible = [splits for splits in (1, 2, 4, 7, 8, 14, 16) if groups % splits == 0 and tiles * splits <= 1700]
        for splits in [chosen.splits, *([] if gated else possible)]:
            for stages in (chosen.stages, 2, 3, 4):
                for warps in (chosen.warps, 2, 4) if block_n == 64 else (chosen.warps, 4, 8):
                    fields = {"block_n": block_n, "splits": splits, "warps": warps, "stages": stages}
                    if fields not in seen:
                        seen.append(fields)
                        yield fields


def product(x_TI: Tensor, gated: bool, fields: dict[str, Any], matrix: Linear) -> Tensor:
    if gated:
        return gate_up_int4(x_TI, matrix, **{name: value for name, value in fields.items() if name != "splits"})
    return linear_int4(x_TI, matrix, **fields)


def time_products(given: argparse.Namespace) -> dict[str, dict]:
    found, bandwidth, held = {}, read_bandwidth(), Int4Format(given.group, given.zeros, "BF16")
    print(f"reads {bandwidth / 1e12:.2f} TB/s", flush=True)
    for model in given.models.split(","):
        for name, (inputs, outputs, _) in PRODUCTS[model].items():
            if name == "head" or given.only not in ("", f"{model} {name}"):
                continue
            each, gated = matrices(inputs, outputs, held), name == "gate_up"
            values_OI = each[0].values(slice(0, outputs), torch.float32)
            for rows in map(int, given.rows.split(",")):
                x_TI = random(rows, inputs)
                expected = x_TI.float() @ values_OI.T
                if gated:
                    expected = F.silu(expected[:, : outputs // 2]) * expected[:, outputs // 2 :]
                timed = {}
                for fields in tilings(rows, outputs // 2 if gated else outputs, inputs, gated, held):
                    key = "/".join(map(str, fields.values()))
                    try:
                        call = partial(product, x_TI, gated, fields)
                        made = call(each[0])
                        same(made.sum(0) if made.dim() == 3 else made, expected)
                        timed[key] = microseconds(call, each)  # type: ignore[arg-type]  # of matrices, not tensors
                    except Exception as failure:
                        print(f"    {key} failed: {type(failure).__name__}: {str(failure)[:120]}", flush=True)
                chosen, floor = next(iter(timed)), 1e6 * sum(one.nbytes for one in each[0].parameters()) / bandwidth
                best = dict(sorted(timed.items(), key=lambda item: item[1])[:5])
                found[f"{model} {name} {rows}"] = {"floor_us": floor, "chosen": {chosen: timed[chosen]}, "best": best}
                print(
                    f"{model} {name:8s}{rows:4d} rows  floor {floor:7.2f}  {chosen}* {timed[chosen]:7.2f}   "
                    + "  ".join(f"{key} {us:.2f}" for key, us in best.items()),
                    flush=True,
                )
            torch.cuda.empty_cache()
    return found


@torch.inference_mode()
def time_passes(given: argparse.Namespace) -> dict[str, dict[str, float]]:
    found, bandwidth = {}, read_bandwidth()
    print(f"reads {bandwidth / 1e12:.2f} TB/s", flush=True)
    for name in given.passes or PASSES:
        one = DecodePass.parse(name)
        call = one.build(pdl=True)  # must outlive the recording, which uses its tensors
        spent = milliseconds(record(call)[0])
        floor = 1e3 * read_bytes(one.worker.model) / bandwidth
        found[name] = {"ms": round(spent, 3), "floor_ms": round(floor, 3)}
        print(f"{name:36s} {spent:8.3f} ms   floor {floor:8.3f} ms   {floor / spent:5.0%}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("products", "passes"))
    parser.add_argument("passes", nargs="*", help="for passes: passes to time, named as for benchmarks.passes decode")
    parser.add_argument("--models", default="8b", help="for products: models; default: %(default)s")
    parser.add_argument("--rows", default="8,16,40,64", help="for products: numbers of rows; default: %(default)s")
    parser.add_argument(
        "--group", type=int, default=GROUP, help="for products: number of inputs of a group; default: %(default)s"
    )
    parser.add_argument("--zeros", action="store_true", help="for products: give each group its own zero point")
    parser.add_argument("--only", default="", help="for products: time only this model and product, such as '8b down'")
    given = parser.parse_args()
    torch.manual_seed(0)
    print(json.dumps(time_products(given) if given.part == "products" else time_passes(given)))


if __name__ == "__main__":
    main()
