"""Compiles the prefix kernel of Hopper GPUs on a machine without one, for given rows x queries x head dimension. The
last line of the output is JSON with the resources that each variant needs. Triton's interpreter cannot run this kernel.

    python -m tests.attention.compile_specialized 32x1x64 8x5x128"""

from __future__ import annotations

import json
import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from smc.attention.kernels import Tuning
from smc.attention.specialized import REGISTERS, WARPS, prefix_kernel
from smc.kernels.packed_rows import Pieces

POINTERS = {"q": "*bf16", "keys": "*bf16", "values": "*bf16", "part": "*fp32", "lse": "*fp32"}
NUMBERS = ("q_stride", "table_stride", "entries")
ALIGNED = ("q", "keys", "values", "part", "table_SL", "q_stride", "table_stride")


def compile_for(rows: int, queries: int, dim: int) -> dict:
    tuning = Tuning.choose(rows, rows, queries, (32, 8), dim, torch.bfloat16)
    constants = {
        "EACH": 4,
        "J": 8,
        "D": dim,
        "BLOCK_P": tuning.block_p,
        "STAGES": tuning.stages,
        "PDL": True,
    }
    names = prefix_kernel.arg_names
    signature = {
        n: "constexpr" if n in constants else POINTERS.get(n, "i32" if n in NUMBERS else "*i32") for n in names
    }
    signature["pieces"] = Pieces(*("*i32" for _ in Pieces._fields))
    values = {(names.index(n),): value for n, value in constants.items()}
    source = GluonASTSource(
        prefix_kernel, signature, values, {(names.index(n),): [["tt.divisibility", 16]] for n in ALIGNED}
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS, "maxnreg": REGISTERS})
    threads = int(re.findall(r"\.reqntid (\d+)", made.asm["ptx"])[0])
    return {"specialized": tuning.specialized, "shared": made.metadata.shared, "registers": threads * REGISTERS}


if __name__ == "__main__":
    print(json.dumps([compile_for(*map(int, shape.split("x"))) for shape in sys.argv[1:]]))
