"""Time one layer's attention and store on a GPU at real sizes, compared with the time of reading the keys and values
once, and with flashinfer.

`python -m benchmarks.attention [--rows 8,32,64] [--contexts 256,...] [--groups 1,...] [--shapes
draft,target,plain] [--only SETTING]
    [--sweep] [--no-flashinfer]`

With several groups, the rows are split evenly among them, and each group has its own prefix: as many groups as rows
corresponds to plain decoding. `--sweep` replaces the settings by every combination of the prefix kernel's tile of
positions, depth, warps and pieces, and prints the best.

Every figure is the median over replays of a CUDA graph of many calls, each on the keys and values of another layer, so
that the L2 cache does not hold them. Each setting is first checked against float64. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from smc.attention.kernels import SharedPrefixAttention
from smc.attention.step import step_attention
from smc.kernels.launch import supports_pdl
from smc.kernels.packed_rows import CacheTensors, store_kv
from smc.round.tensors import RowGroups, RowSpans, RowTables

HEADS, OWN, BANDWIDTH = (
    (32, 8),
    24,
    4.26e12,
)  # OWN: a row's own positions before its new tokens; BANDWIDTH: bytes/s as measured on an H200.
SHAPES = {"draft": (64, 1), "target": (128, 8), "plain": (128, 1)}  # (D, Q)
LONGEST, COLD_BYTES, MOST_BYTES, MOST_CALLS = 16384, 256 << 20, 8 << 30, 400
SETTINGS = {
    "default": {},
    "by warps of one kind": {"specialized": False},
    "bf16 partials": {"partial": torch.bfloat16},
    "x64 w4": {"block_x": 64, "warps": 4, "specialized": False},
    "p128": {"block_p": 128, "stages": 2, "warps": 8, "specialized": False},
    "4 tiles": {"min_tiles": 4},
    "pieces 8": {"pieces": 8},
    "pieces 32": {"pieces": 32},
    "one after the other": {"pdl": False},
    "own, 2 warps": {"own_warps": 2},
    "tails": {"tails": True},
}
SWEEP = {
    f"p{block_p} s{stages} w{warps} {pieces} x{block_x}": {
        "block_p": block_p, "stages": stages, "warps": warps, "pieces": pieces, "block_x": block_x, "min_tiles": 1,
        "specialized": False,
    }
    for block_p, stages, warps, pieces, block_x in product(
        (32, 64, 128), (2, 3, 4, 6), (4, 8), (8, 16, 33, 49, 66), (64, 128)
    )
}  # fmt: skip
"""With more pieces for each key/value head than it has multiprocessors (16), several programs share a multiprocessor
and wait for memory in turn."""


def full(count: int, value: int) -> Tensor:
    return torch.full((count,), value, dtype=torch.int32, device="cuda")


@dataclass(frozen=True)
class Inputs:
    """Random queries, keys and values of one size; each layer of keys and values serves one call."""

    rows: int
    queries: int
    keys: Tensor
    """[layers, P + 1, J, D], as are `values`."""
    values: Tensor
    qkv: Tensor
    q_THD: Tensor
    prefix_GL: Tensor
    own_RB: Tensor
    context: int

    @staticmethod
    def random(rows: int, dim: int, queries: int, context: int, groups: int = 1) -> Inputs:
        (h, j), own = HEADS, OWN + queries
        pages = groups * context + rows * own
        layer_bytes = pages * j * dim * 4
        calls = min(MOST_CALLS, max(1, min(20, MOST_BYTES // layer_bytes), -(-COLD_BYTES // layer_bytes)))
        shape = (calls, pages + 1, j, dim)
        keys, values = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in "kv")
        keys[:, 0] = values[:, 0] = 0
        order = 1 + torch.randperm(pages, device="cuda", dtype=torch.int32)
        qkv = torch.randn(rows * queries, (h + 2 * j) * dim, dtype=torch.bfloat16, device="cuda")
        q_THD = qkv[:, : h * dim].unflatten(1, (h, dim))
        prefixes, others = order[: groups * context].view(groups, context), order[groups * context :].view(rows, own)
        return Inputs(rows, queries, keys, values, qkv, q_THD, prefixes, others, context)

    @property
    def prefix_RL(self) -> Tensor:
        return self.prefix_GL.repeat_interleave(self.rows // len(self.prefix_GL), 0)

    @property
    def calls(self) -> int:
        return len(self.keys)

    @property
    def floor_us(self) -> float:
        return (self.keys[0].numel() - self.keys[0, 0].numel()) * 4 / BANDWIDTH * 1e6

    def tables(self, tails: bool = False) -> RowTables:
        """Return block tables with a slot for every row; with `tails`, the pages of its new tokens are passed
        separately."""
        table_SL = torch.cat((self.prefix_RL, self.own_RB), 1)
        slot_R = torch.arange(self.rows, dtype=torch.int32, device="cuda")
        if not tails:
            return RowTables(table_SL, slot_R)
        return RowTables(table_SL, slot_R, self.own_RB[:, OWN:].contiguous(), full(self.rows, self.context + OWN))

    def groups(self) -> RowGroups:
        count = len(self.prefix_GL)
        size = self.rows // count
        first_G = torch.arange(0, self.rows, size, dtype=torch.int32, device="cuda")
        group_R = torch.arange(count, dtype=torch.int32, device="cuda").repeat_interleave(size)
        return RowGroups(group_R, first_G, full(count, size), full(count, self.context))

    def spans(self) -> RowSpans:
        """Return start and count of every row's new tokens."""
        return RowSpans(full(self.rows, self.context + OWN), full(self.rows, self.queries))

    def reference(self) -> Tensor:
        """Return the attention of layer 0, computed in float64 row by row."""
        (h, j), q = HEADS, self.queries
        out_THD = torch.empty(self.q_THD.shape, dtype=torch.float64, device="cuda")
        for r in range(self.rows):
            pages = torch.cat((self.prefix_RL[r], self.own_RB[r]))
            k, v = self.keys[0, pages].double(), self.values[0, pages].double()
            q_QJHD = self.q_THD[r * q : (r + 1) * q].double().unflatten(1, (j, h // j))
            scores = torch.einsum("qjnd,xjd->qjnx", q_QJHD, k) * k.shape[-1] ** -0.5
            hidden = (
                torch.arange(len(pages), device="cuda") > (self.context + OWN + torch.arange(q, device="cuda"))[:, None]
            )
            weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
            out_THD[r * q : (r + 1) * q] = torch.einsum("qjnx,xjd->qjnd", weights, v).flatten(1, 2)
        return out_THD


Call = Callable[[int], Tensor]
"""Runs the timed operation on the layer of this index."""


def attention_of(inputs: Inputs, setting: dict) -> SharedPrefixAttention:
    groups = len(inputs.prefix_GL)
    shape = (groups, inputs.rows, inputs.rows // groups, inputs.queries)
    setting = {"pdl": supports_pdl("cuda")} | setting
    return SharedPrefixAttention(*shape, HEADS, inputs.q_THD.shape[-1], torch.bfloat16, "cuda", LONGEST, **setting)


def kernels(inputs: Inputs, setting: dict) -> Call:
    attention = attention_of(inputs, {name: value for name, value in setting.items() if name != "tails"})
    prepared = attention.prepare(inputs.tables("tails" in setting), inputs.spans(), inputs.groups())
    out_THD = torch.full(inputs.q_THD.shape, torch.nan, dtype=torch.bfloat16, device="cuda")
    return lambda layer: attention.run(inputs.q_THD, inputs.keys[layer], inputs.values[layer], prepared, out_THD)


def prepare(inputs: Inputs) -> Call:
    """Return the work that a pass does once, not in every layer."""
    attention, arguments = attention_of(inputs, {}), (inputs.tables(tails=True), inputs.spans(), inputs.groups())
    return lambda _layer: attention.prepare(*arguments).layout.page_T


def cascade(inputs: Inputs) -> Call:
    import flashinfer

    m, q, (h, j), dim, count = inputs.rows, inputs.queries, HEADS, inputs.q_THD.shape[-1], len(inputs.prefix_GL)
    ints = lambda *values: torch.tensor(values, dtype=torch.int32, device="cuda")  # noqa: E731
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(
        2, torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "NHD"
    )
    wrapper.plan(
        [ints(*range(0, m * q + 1, m * q // count)), ints(*range(0, m * q + 1, q))],
        [ints(*range(0, count * inputs.context + 1, inputs.context)), ints(*range(0, m * (OWN + q) + 1, OWN + q))],
        [inputs.prefix_GL.flatten(), inputs.own_RB.flatten()],
        [ints(*[1] * count), ints(*[1] * m)],
        *(h, j, dim, 1),
        causal=True,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    q_THD = inputs.q_THD.contiguous()
    return lambda layer: wrapper.run(q_THD, (inputs.keys[layer][:, None], inputs.values[layer][:, None]))


def decode(inputs: Inputs) -> Call:
    import flashinfer

    if inputs.queries != 1:
        raise ValueError("decode has one query a row")
    m, (h, j), dim = inputs.rows, HEADS, inputs.q_THD.shape[-1]
    length = inputs.context + OWN + 1
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "NHD", use_tensor_cores=True
    )
    wrapper.plan(
        torch.arange(0, m * length + 1, length, dtype=torch.int32, device="cuda"),
        torch.cat((inputs.prefix_RL, inputs.own_RB), 1).flatten(),
        torch.ones(m, dtype=torch.int32, device="cuda"),
        *(h, j, dim, 1),
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    q_THD = inputs.q_THD.contiguous()
    return lambda layer: wrapper.run(q_THD, (inputs.keys[layer][:, None], inputs.values[layer][:, None]))


def store(inputs: Inputs) -> Call:
    """Return the call that rotates queries and keys, and stores keys and values. It overwrites pages, so time it after
    the attention."""
    dim, tokens = inputs.q_THD.shape[-1], len(inputs.qkv)
    rope = torch.randn(64, dim, device="cuda")
    position_T = torch.arange(tokens, dtype=torch.int32, device="cuda") % 64
    page_T = inputs.own_RB[:, OWN:].flatten()
    q_out = torch.empty(tokens, HEADS[0], dim, dtype=inputs.qkv.dtype, device="cuda")
    return lambda layer: store_kv(
        inputs.qkv, q_out, CacheTensors(inputs.keys[layer], inputs.values[layer]), rope, position_T, page_T, HEADS
    )


def step(inputs: Inputs) -> Call:
    """Return the call that stores and attends in one launch. It overwrites pages, so time it after the attention."""
    tables, spans = inputs.tables(), inputs.spans()
    rope = torch.randn(LONGEST + 64, inputs.q_THD.shape[-1], device="cuda")
    out_THD = torch.empty(inputs.q_THD.shape, dtype=torch.bfloat16, device="cuda")
    return lambda layer: step_attention(
        inputs.qkv, CacheTensors(inputs.keys[layer], inputs.values[layer]), rope, tables, spans, out_THD
    )


def microseconds(call: Call, calls: int) -> float:
    """Return the microseconds of one call: the median over replays of a graph of all calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for layer in range(min(3, calls)):
            call(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(calls):
            call(layer)
    times = []
    for _ in range(13):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times[3:])


def measure(name: str, inputs: Inputs, build: Callable[[], Call], reference_THD: Tensor | None) -> dict:
    """Measure one line of the table. A case that fails is reported and does not end the run."""
    try:
        call = build()
        error = None
        if reference_THD is not None:
            error = float((call(0).double() - reference_THD).norm() / reference_THD.norm())
        us = microseconds(call, inputs.calls)
    except Exception as failure:
        print(
            f"    {name:20s} failed: {type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:150]}",
            flush=True,
        )
        return {"name": name, "failed": type(failure).__name__}
    wrong = error is not None and not error < 1e-2
    checked = "" if error is None else f"  error {error:.1e}{'  WRONG' if wrong else ''}"
    print(f"    {name:20s} {us:9.2f} us  {us / inputs.floor_us:7.1f} x floor{checked}", flush=True)
    return {"name": name, "us": round(us, 2), "error": error, "wrong": wrong}


def measure_case(
    shape: str, rows: int, context: int, groups: int, settings: dict[str, dict], options: argparse.Namespace
) -> list[dict]:
    """Measure all lines of one size."""
    dim, queries = SHAPES[shape]
    inputs = Inputs.random(rows, dim, queries, context, groups)
    print(
        f"{shape} D {dim} Q {queries} rows {rows} groups {groups} context {context}: floor {inputs.floor_us:.2f} us",
        flush=True,
    )
    reference_THD = inputs.reference()
    builds = {name: (lambda setting=setting: kernels(inputs, setting)) for name, setting in settings.items()}
    if not options.no_flashinfer:
        builds |= {"flashinfer cascade": lambda: cascade(inputs), "flashinfer decode": lambda: decode(inputs)}
    lines = [measure(name, inputs, build, reference_THD) for name, build in builds.items()]
    if options.sweep:
        best = sorted((line for line in lines if "us" in line and not line["wrong"]), key=lambda line: line["us"])
        print("  best:", ", ".join(f"{line['name']} {line['us']}" for line in best[:8]), flush=True)
    else:
        lines.append(measure("prepare", inputs, lambda: prepare(inputs), None))
        lines.append(measure("store", inputs, lambda: store(inputs), None))
        lines.append(measure("step, with store", inputs, lambda: step(inputs), None))
    case = {"shape": shape, "rows": rows, "context": context, "groups": groups, "floor_us": round(inputs.floor_us, 2)}
    return [case | line for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="8,32,64", help="numbers of rows; default: %(default)s")
    parser.add_argument("--contexts", default="256,1024,4096,16384", help="context lengths; default: %(default)s")
    parser.add_argument(
        "--groups",
        default="1",
        help="numbers of groups; numbers that do not divide the rows are left out; default: %(default)s",
    )
    parser.add_argument("--shapes", default="draft,target", help="shapes: draft, target, plain; default: %(default)s")
    parser.add_argument(
        "--sweep", action="store_true", help="time every tiling of the prefix kernel, and print the best"
    )
    parser.add_argument("--only", default="", help="time only these settings, separated by commas; default: all")
    parser.add_argument("--no-flashinfer", action="store_true", help="do not time flashinfer")
    options = parser.parse_args()
    os.environ.setdefault(
        "FLASHINFER_DISABLE_JIT", "1"
    )  # Before the first import of flashinfer; else it may compile for minutes.
    torch.manual_seed(0)
    settings = (
        SWEEP
        if options.sweep
        else {name: SETTINGS[name] for name in options.only.split(",")}
        if options.only
        else SETTINGS
    )
    results = []
    sizes = ([int(value) for value in values.split(",")] for values in (options.rows, options.contexts, options.groups))
    for shape, (rows, context, groups) in product(options.shapes.split(","), product(*sizes)):
        if rows % groups == 0:
            results += measure_case(shape, rows, context, groups, settings, options)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
