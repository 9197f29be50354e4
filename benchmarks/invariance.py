"""Find what changes the bits of a result: the rows beside a row, the chunks of its prompt, the pages of its keys.

    python -m benchmarks.invariance [MODEL] [--layers 4] [--dtype bfloat16] [--parts instructions,operations,passes]
    [--numerics fastest] [--context 640] [--kernels] [--ranks 2 --parts sums]

MODEL is a directory, a shape such as `qwen3-8b` with random weights, or `small`, a shape for CPUs.

`instructions` multiplies the same two matrices by tiles of other sizes and numbers of warps, which select other
instructions of the tensor cores, with K in one order. `operations` computes each operation of a layer for one row
beside random rows. `passes` computes the logits of one position in every way in which the service may compute it.

`products`, if asked for, compares the products of one order with the library's, in bits and in time. `sums`, if asked
for, sums the parts of so many ranks, which have a process and a GPU each, of one row beside random rows.

A cell is `=` if all bits are those of the first column, which has the row alone, otherwise the number of results that
differ. `-`: not applicable. The last line is JSON. Without a GPU torch computes, or with `--kernels` the kernels in
Triton's interpreter, which needs TRITON_INTERPRET=1. It multiplies bfloat16 as if its bits were integers, except after
`import tests.interpreter`, as in `tests/executor/test_invariant.py`."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from services.link.store import LOOPBACK, StoreServer, connect_store
from services.workers.tensor_parallel import TensorParallel
from smc.api.limits import DTYPE_NAMES
from smc.executor.messages import PromptBatch
from smc.executor.ops import RoundOps
from smc.executor.worker import ModelWorker
from smc.local_engine import ops_for
from smc.memory.pages import DUMMY_PAGE
from smc.model.config import ModelConfig
from smc.model.decoder import Addend, Decoder, LayerOps, TorchLayerOps
from smc.model.linear import DTYPES, QuantisedRows
from smc.model.loader import load_model, random_model
from smc.model.presets import NoText, preset
from smc.round.plan import Contexts
from smc.round.tensors import RowGroups, Rows, RowSpans, RowTables
from smc.stops import TokenBytes
from smc.types import ModelRole, Numerics

SMALL = replace(
    preset("qwen3-0.6b/2"),
    vocab_size=512,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
)
ROWS = (1, 2, 5, 8, 16, 17, 32, 33, 40, 64, 65, 128, 200, 256, 320, 512)
"""Numbers of rows of an operation."""
PROMPTS = (1, 16, 64, 65, 256, 512, 2048)
"""Numbers of tokens of an operation on prompts."""
SEQUENCES, TREES, CHUNKS = (1, 2, 8, 32, 200), ((1, 5), (8, 5), (64, 5)), (64, 256, 2048)
"""Numbers of sequences of a plain pass, rows and tokens of a row of trees, tokens of chunks of a prompt."""
TILES = (
    (64, 16, 4), (64, 32, 4), (64, 64, 4), (64, 128, 4), (64, 256, 4), (128, 16, 4), (128, 64, 4), (128, 128, 8),
    (128, 256, 8), (256, 128, 8), (16, 16, 4), (16, 64, 4), (32, 64, 4), (64, 16, 2), (64, 64, 2), (128, 64, 2),
)  # fmt: skip
"""Rows of the first and of the second operand of a product, and warps. Hopper's instructions for a group of four warps
take 64 rows of the first operand; smaller tiles and fewer warps use those of single warps."""
LIBRARY = (80, 128, 160, 256, 320, 512, 1024, 2048)
"""Numbers of tokens for which products are compared with the library's."""
SOME_TILES = ((64, 16, 4), (64, 64, 4), (128, 128, 8), (16, 16, 4), (64, 64, 2))
INNER = 4096
"""K of these products."""
SUM_FEATURES = (2048, 4096)
"""Features of a row that ranks sum."""
SECRET, TIMEOUT = "invariance", 120.0
"""Of the ranks' store; seconds that a rank waits for another one."""


class Finding(NamedTuple):
    """Number of results that differ from those of the row alone; None: not applicable."""

    name: str
    column: str
    differ: int | None


@dataclass(frozen=True)
class Subject:
    """A model and the operations that run it."""

    worker: ModelWorker
    ops: RoundOps
    context: int

    @property
    def config(self) -> ModelConfig:
        return self.worker.model.config

    @property
    def device(self) -> torch.device:
        return self.worker.device

    @staticmethod
    def load(given: argparse.Namespace, model: Decoder | None = None) -> Subject:
        dtype, device = DTYPES[given.dtype], torch.device(given.device)
        if model is not None:
            model = model.to(device=device, dtype=dtype)
        elif Path(given.model).is_dir():
            model = load_model(given.model, dtype=dtype, device=device)
        else:
            config = SMALL if given.model == "small" else preset(given.model)
            config = config if given.layers is None else replace(config, num_layers=given.layers)
            model = random_model(config, dtype=dtype, device=device)
        vocab, width = model.config.vocab_size, given.context + 16
        # Room for the most sequences with a few positions each, and for several copies of the sequence.
        pages = 8 * width + max(given.sequences) * (OWN + 8) + max(rows * queries for rows, queries in given.trees)
        worker = ModelWorker(
            ModelRole.TARGET, model, width=width, pages=pages, vocab_size=vocab,
            token_bytes=TokenBytes.of(NoText(vocab)), numerics=Numerics(given.numerics),
        )  # fmt: skip
        for store in (worker.pool.keys, worker.pool.values):
            store.normal_()
            store[:, DUMMY_PAGE] = 0.0
        if given.kernels and device.type == "cpu":
            from smc.executor.triton_ops import TritonOps

            ops: RoundOps = TritonOps()
        else:
            ops = ops_for(device)
        worker.ops = ops
        return Subject(worker, ops, given.context)


OWN = 24
"""Positions of each other sequence."""


def main(argv: Sequence[str] | None = None, model: Decoder | None = None) -> list[Finding]:
    """`model`: takes the place of MODEL."""
    given = _parser().parse_args(argv)
    torch.manual_seed(0)
    found: list[Finding] = []
    with torch.inference_mode():
        if "instructions" in given.parts and (given.device != "cpu" or given.kernels):
            found += _printed("Products of tiles (first x second operand, warps)", _instructions(given))
        if "sums" in given.parts:
            found += _printed(f"Sums over {given.ranks} ranks (type, features)", _sums(given))
        if {"operations", "passes", "products"} & set(given.parts):
            subject = Subject.load(given, model)
            if "products" in given.parts:
                found += _printed("Products of the library [its us, its us in parts, ours]", _products(subject))
            if "operations" in given.parts:
                found += _printed("Operations", _operations(subject, given.rows, given.prompts))
            if "passes" in given.parts:
                found += _printed("Logits of one position", _passes(subject, given.sequences, given.trees))
    table: dict[str, dict[str, int | None]] = {}
    for name, column, differ in found:
        table.setdefault(name, {})[column] = differ
    print(json.dumps(table))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = torch.cuda.is_available()

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(",")))

    def pairs(text: str) -> list[tuple[int, int]]:
        return [(int(rows), int(tokens)) for rows, tokens in (one.split("x") for one in text.split(","))]

    parser.add_argument("model", nargs="?", default="qwen3-8b/4" if gpu else "small")
    parser.add_argument("--layers", type=int, help="layers of a shape; default: all")
    parser.add_argument("--dtype", choices=DTYPE_NAMES, default="bfloat16" if gpu else "float32")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--context", type=int, default=2304 if gpu else 48, help="positions; default: %(default)s")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["instructions", "operations", "passes"])
    parser.add_argument("--rows", type=numbers, default=ROWS, help="numbers of rows of operations")
    parser.add_argument("--prompts", type=numbers, default=PROMPTS, help="numbers of tokens of prompts in operations")
    parser.add_argument("--sequences", type=numbers, default=SEQUENCES, help="numbers of sequences of plain passes")
    parser.add_argument("--trees", type=pairs, default=TREES, metavar="RxT,...", help="rows of trees x tokens of a row")
    parser.add_argument("--numerics", choices=tuple(Numerics), default=Numerics.INVARIANT)
    parser.add_argument("--ranks", type=int, default=2, help="ranks of sums; default: %(default)s")
    parser.add_argument("--kernels", action="store_true", help="on a CPU: run the kernels, in Triton's interpreter")
    return parser


def _printed(title: str, findings: Iterator[Finding]) -> list[Finding]:
    """Print findings, one line for each name, as they are made."""
    found: list[Finding] = []
    print(f"\n{title}")
    for finding in findings:
        if not found or found[-1].name != finding.name:
            print(f"\n{finding.name:34s}", end="")
        mark = "-" if finding.differ is None else finding.differ or "="
        print(f" {finding.column}:{mark}", end="", flush=True)
        found.append(finding)
    print()
    return found


def _differ(one: Tensor, other: Tensor) -> int:
    """Return the number of elements whose bits differ."""
    one, other = (x.contiguous().view(torch.uint8).view(*x.shape, x.element_size()) for x in (one, other))
    return int((one != other).any(-1).sum())


def _instructions(given: argparse.Namespace) -> Iterator[Finding]:
    from benchmarks.tiles import multiply

    on_gpu = given.device != "cpu"
    inner = INNER if on_gpu else 128
    for kind in ("bfloat16", "float16", "fp8") if on_gpu else ("float32",):
        first, second = (torch.randn(256, inner, device=given.device).to(DTYPES[kind]) for _ in range(2))
        alone = multiply(first, second, *TILES[0], block_k=64)
        for name, tiles, options in (
            ("", TILES if kind == "bfloat16" else SOME_TILES, (64, False)),
            (", operands swapped", SOME_TILES, (64, False)),
            (", half the steps", SOME_TILES, (128, False)),
            (", first from registers", SOME_TILES, (64, True)),
        ):
            if on_gpu and ((kind == "float16" and name) or (kind == "fp8" and options[1])):
                continue
            swapped = "swapped" in name
            for tile in tiles:
                column, operands = "x".join(map(str, tile)), (second, first) if swapped else (first, second)
                try:
                    made = multiply(*operands, *tile, *options)
                except Exception as error:  # The compiler may refuse a tile in any way.
                    print(f" [{type(error).__name__}]", end="")
                    yield Finding(f"{kind}{name}", column, None)
                    continue
                made = made.t() if swapped else made
                common = slice(min(len(made), len(alone))), slice(min(made.shape[1], alone.shape[1]))
                yield Finding(f"{kind}{name}", column, _differ(made[common], alone[common]))


def _products(subject: Subject) -> Iterator[Finding]:
    """Compare the products of one order with the library's: where a product has several parts, with one call of the
    library for each part, which adds its sums to those before in float32. Prints microseconds."""
    from smc.kernels.fixed_order import linear_fixed, splits_of
    from smc.kernels.linear import reduce

    layer = subject.worker.model.layers[0]
    for name, matrix in (("q k v", layer.qkv), ("o", layer.o), ("gate, up", layer.gate_up), ("down", layer.down)):
        weight, inputs = matrix.weight, matrix.in_features
        splits = splits_of(len(weight), inputs)
        for count in LIBRARY:
            x = torch.randn(count, inputs, device=subject.device).to(weight.dtype)
            one = linear_fixed(x, weight, 1)
            yield Finding(f"{name}, library, 1 part", str(count), _differ(one, x @ weight.t()))
            parted = partial(library_in_parts, x, weight, splits)
            ours = partial(linear_fixed, x, weight, splits)
            own = ours()
            own = reduce(own.view(-1, *own.shape[-2:]), torch.empty_like(one))
            yield Finding(f"{name}, library, {splits} parts", str(count), _differ(own, parted()))
            if subject.device.type == "cuda":
                times = [call_microseconds(call) for call in (partial(F.linear, x, weight), parted, ours)]
                print("[{:.0f} {:.0f} {:.0f} us]".format(*times), end="")


def library_in_parts(x: Tensor, weight: Tensor, splits: int) -> Tensor:
    if splits == 1:
        return F.linear(x, weight)
    total: Tensor | None = None
    for part_x, part_w in zip(x.chunk(splits, 1), weight.chunk(splits, 1)):
        if total is None:
            total = torch.mm(part_x, part_w.t(), out_dtype=torch.float32)
        else:
            total = torch.addmm(total, part_x, part_w.t(), out_dtype=torch.float32)
    assert total is not None
    return total.to(x.dtype)


def call_microseconds(call: Callable[[], Tensor], repeats: int = 20) -> float:
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / repeats


def _sums(given: argparse.Namespace) -> Iterator[Finding]:
    context = multiprocessing.get_context("spawn")
    store, findings = StoreServer(LOOPBACK, SECRET, TIMEOUT), context.Queue()
    ranks = [
        context.Process(target=_sum_of_ranks, args=(rank, given, store.port, findings), daemon=True)
        for rank in range(given.ranks)
    ]
    for rank in ranks:
        rank.start()
    try:
        while (finding := findings.get(timeout=TIMEOUT)) is not None:
            yield finding
        for rank in ranks:
            rank.join(TIMEOUT)
    finally:
        for rank in ranks:
            rank.kill()
        store.close()


def _sum_of_ranks(rank: int, given: argparse.Namespace, port: int, findings: multiprocessing.Queue) -> None:
    """Take part in all sums as one rank. The first one reports, and says None at the end."""
    if given.device == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank] if visible else str(rank)
    device, generator = torch.device(given.device), torch.Generator(given.device).manual_seed(rank)
    is_invariant = given.numerics == Numerics.INVARIANT
    store = connect_store(LOOPBACK, port, SECRET, TIMEOUT)
    add = TensorParallel(store, "sums", rank, given.ranks, device, TIMEOUT, in_order=is_invariant)
    for dtype, features in product((torch.bfloat16, torch.float32), SUM_FEATURES):
        own_E, alone = torch.randn(features, generator=generator, device=device).to(dtype), None
        for count in sorted({*given.rows, *given.prompts}):
            company_TE = torch.randn(count, features, generator=generator, device=device).to(dtype)
            company_TE[count // 2] = own_E
            made_E = add(add.room(count, features, dtype).copy_(company_TE))[count // 2].clone()
            alone = made_E if alone is None else alone
            if rank == 0:
                name = f"{str(dtype).removeprefix('torch.')}, {features}"
                findings.put(Finding(name, str(count), _differ(made_E, alone)))
    if rank == 0:
        findings.put(None)


Operation = Callable[[LayerOps, Tensor], Tensor]


def _operations(subject: Subject, rows: Sequence[int], prompts: Sequence[int]) -> Iterator[Finding]:
    forward = subject.ops.forward(subject.worker)
    of_rows = forward if isinstance(forward, LayerOps) else TorchLayerOps()
    of_prompts = _prompt_ops(subject, of_rows)
    most = max(*rows, *prompts)
    for name, width, operation in _layer_operations(subject):
        company_TI = torch.randn(most, width, device=subject.device).to(subject.worker.model.embed.weight.dtype)
        own_I = company_TI[0].clone()
        alone: Tensor | None = None
        for ops, label, counts in ((of_rows, "", rows), (of_prompts, "p", prompts)):
            for count in counts:
                x_TI, at = company_TI[:count].clone(), count // 2
                x_TI[at] = own_I
                made = operation(ops, x_TI)[at]
                alone = made if alone is None else alone
                yield Finding(name, f"{label}{count}", _differ(made, alone))


def _prompt_ops(subject: Subject, of_rows: LayerOps) -> LayerOps:
    if isinstance(of_rows, TorchLayerOps):
        return of_rows
    from smc.executor.invariant_forward import InvariantForward
    from smc.executor.triton_forward import PromptOps

    return of_rows if isinstance(of_rows, InvariantForward) else PromptOps(subject.config)


def _layer_operations(subject: Subject) -> Iterator[tuple[str, int, Operation]]:
    """Yield the name of each operation of a layer, the width of its input, and the operation on a batch."""
    model, config = subject.worker.model, subject.config
    layer, hidden = model.layers[0], config.hidden_size
    heads = config.num_heads * config.head_dim
    like = torch.randn(1, hidden, device=subject.device).to(model.embed.weight.dtype)

    def added(ops: LayerOps, values: Tensor) -> Tensor:
        x_TE = like.expand(values.shape[-2], hidden).clone()
        x_TE, normed = ops.normed(x_TE, Addend(values, layer.attn_out_norm, layer), layer.mlp_norm, None)
        return torch.cat((_whole(normed), x_TE), -1)

    def normed(ops: LayerOps, x_TE: Tensor) -> Tensor:
        return _whole(ops.normed(x_TE.clone(), None, layer.attn_norm, layer.qkv)[1])

    def qkv(ops: LayerOps, x_TE: Tensor) -> Tensor:
        return _whole(ops.product(ops.normed(x_TE.clone(), None, layer.attn_norm, layer.qkv)[1], layer.qkv), like.dtype)

    yield "norm", hidden, normed
    yield "q k v", hidden, qkv
    yield "o", heads, lambda ops, x: _whole(ops.summed(layer, x, layer.o), like.dtype)
    yield "o, residual, norm", heads, lambda ops, x: added(ops, ops.summed(layer, x, layer.o))
    if layer.experts is None:
        inner = layer.down.in_features

        def gated(ops: LayerOps, x_TE: Tensor) -> Tensor:
            return ops.gated(layer, ops.normed(x_TE.clone(), None, layer.mlp_norm, layer.gate_up)[1])

        yield "gate, up, activation", hidden, gated
        yield "down", inner, lambda ops, x: _whole(ops.summed(layer, x, layer.down), like.dtype)
        yield "down, residual, norm", inner, lambda ops, x: added(ops, ops.summed(layer, x, layer.down))
    else:
        experts = layer.experts
        yield "experts", hidden, lambda ops, x: _whole(ops.experts(layer, experts, x), like.dtype)
        yield "experts, residual, norm", hidden, lambda ops, x: added(ops, ops.experts(layer, experts, x))
    forward = subject.ops.forward(subject.worker)
    yield "head", hidden, lambda ops, x: forward.logits(x)


def _whole(values: Tensor | QuantisedRows, dtype: torch.dtype | None = None) -> Tensor:
    """Return a result as one tensor [T, ..]: FP8 numbers times their scales, or partial sums added in their order, in
    `dtype`."""
    if isinstance(values, QuantisedRows):
        return values.value_TI.float() * values.scale_T1
    if values.dim() == 2:
        return values if dtype is None else values.to(dtype)
    total_TO = values[0].float()
    for part_TO in values[1:]:
        total_TO = total_TO + part_TO.float()
    return total_TO if dtype is None else total_TO.to(dtype)


@dataclass
class Placed:
    """One sequence on pages of a subject's pool, and the other pages."""

    subject: Subject

    def __post_init__(self) -> None:
        worker, length = self.subject.worker, self.subject.context
        order = torch.randperm(worker.pages, generator=torch.Generator().manual_seed(1)).numpy() + 1
        self.own, self.others = order[:length].astype(np.int32), order[length:].astype(np.int32)
        self.tokens = torch.randint(0, worker.vocab_size, (length,), generator=torch.Generator().manual_seed(2)).numpy()

    def stored(self, pages: np.ndarray) -> Tensor:
        """Return keys and values of all positions but the last."""
        pool, index = self.subject.worker.pool, torch.from_numpy(pages[:-1]).long().to(self.subject.device)
        return torch.stack([store[:, index] for store in (pool.keys, pool.values)])

    def store(self, pages: np.ndarray, held: Tensor) -> None:
        pool, index = self.subject.worker.pool, torch.from_numpy(pages[:-1]).long().to(self.subject.device)
        for store, values in zip((pool.keys, pool.values), held):
            store[:, index] = values

    def fill(self, pages: np.ndarray, chunks: Sequence[int]) -> Tensor:
        """Run the sequence in chunks of these sizes, the last one repeated. Returns the logits after its last token."""
        worker, begin, turn = self.subject.worker, 0, 0
        hidden_TE = None
        while begin < len(self.tokens):
            count = min(chunks[min(turn, len(chunks) - 1)], len(self.tokens) - begin)
            batch = PromptBatch(
                pages[: begin + count], np.array([begin], np.int32), np.array([count], np.int32),
                self.tokens[begin : begin + count],
            )  # fmt: skip
            hidden_TE = worker._forward(batch, np.array([count - 1]))
            begin, turn = begin + count, turn + 1
        assert hidden_TE is not None
        return worker.ops.prompt_logits(worker, hidden_TE)[0]

    def rows(self, count: int, queries: int, *, grouped: bool, contexts: Contexts | None = None) -> tuple[Tensor, Rows]:
        """Return tokens and rows: the sequence's last `queries` tokens in the middle of `count` rows. The others are
        further rows of its group with pages of their own, or sequences of a few positions."""
        length, device = len(self.tokens), self.subject.device
        at, width = count // 2, self.subject.worker.width
        table_SL = np.zeros((count, width), np.int32)
        start_R = np.full(count, length - queries, np.int32)
        tokens_RQ = np.random.default_rng(count).integers(0, self.subject.worker.vocab_size, (count, queries))
        tokens_RQ[at] = self.tokens[length - queries :]
        tail_RB = self.others[: count * queries].reshape(count, queries).copy()
        tail_RB[at] = self.own[length - queries :]
        if grouped:
            table_SL[:, : length - queries] = self.own[: length - queries]
        else:
            held = self.others[count * queries : count * (queries + OWN)].reshape(count, OWN)
            table_SL[:, :OWN], start_R[:] = held, OWN
            table_SL[at], start_R[at] = 0, length - queries
            table_SL[at, : length - queries] = self.own[: length - queries]
        groups, size = (1, count) if grouped else (count, 1)
        contexts = Contexts.of(length, count, groups) if contexts is None else contexts

        def there(values: np.ndarray) -> Tensor:
            return torch.as_tensor(values, dtype=torch.int32, device=device)

        first_G, size_G, shared_G = (np.zeros(count, np.int32) for _ in range(3))
        first_G[:groups], size_G[:groups] = np.arange(groups) * size, size
        shared_G[:groups] = length - queries if grouped else start_R
        rows = Rows(
            RowTables(there(table_SL), there(np.arange(count)), there(tail_RB), there(start_R)),
            RowSpans(there(start_R), there(np.full(count, queries))),
            RowGroups(there(np.arange(count) // size), there(first_G), there(size_G), there(shared_G)),
            queries,
            contexts,
        )
        return torch.from_numpy(tokens_RQ.flatten()).to(device), rows

    def logits_of(self, count: int, queries: int, *, grouped: bool, contexts: Contexts | None = None) -> Tensor:
        """Return the logits after the sequence's last token, computed among `count` rows."""
        forward = self.subject.ops.forward(self.subject.worker)
        tokens_T, rows = self.rows(count, queries, grouped=grouped, contexts=contexts)
        at = (count // 2 + 1) * queries - 1
        return forward.logits(forward(tokens_T, rows))[at].float()


def _passes(subject: Subject, sequences: Sequence[int], trees: Sequence[tuple[int, int]]) -> Iterator[Finding]:
    one, length = Placed(subject), subject.context
    one.fill(one.own, [length])
    held = one.stored(one.own)

    def differ(made: Tensor) -> int:
        """Compare logits, and put the keys and values back that the pass has stored."""
        one.store(one.own, held)
        return _differ(made, alone)

    alone = one.logits_of(1, 1, grouped=False)
    for count in sequences:
        yield Finding("plain, sequences", str(count), differ(one.logits_of(count, 1, grouped=False)))
    for contexts in Contexts:
        made = one.logits_of(1, 1, grouped=False, contexts=contexts)
        yield Finding("plain, contexts", contexts.name.lower(), differ(made))
    for count in (2, 8, 64):
        yield Finding("plain, one prefix, rows", str(count), differ(one.logits_of(count, 1, grouped=True)))
    for contexts in Contexts:
        for count, queries in trees:
            made = one.logits_of(count, queries, grouped=True, contexts=contexts)
            yield Finding(f"tree, {contexts.name.lower()}, rows", f"{count}x{queries}", differ(made))
    elsewhere = one.others[-length:]
    for chunk in (length, *(chunk for chunk in CHUNKS if chunk < length)):
        made = one.fill(elsewhere, [chunk])
        yield Finding(f"prompt, chunk {chunk}", "logits", differ(made))
        yield Finding(f"prompt, chunk {chunk}", "cache", _differ(one.stored(elsewhere), held))
    one.fill(elsewhere, [length // 2 + 3, length])
    yield Finding("prompt, cached prefix", "cache", _differ(one.stored(elsewhere), held))
    one.store(elsewhere, held)
    moved = Placed(subject)
    moved.own, moved.others = elsewhere, one.others
    yield Finding("plain, other pages", "1", differ(moved.logits_of(1, 1, grouped=False)))
    if subject.device.type == "cuda":
        for count, queries in ((1, 1), (8, 1), (8, 5), (64, 5)):
            yield Finding("captured, rows", f"{count}x{queries}", differ(_captured(one, count, queries)))


def _captured(one: Placed, count: int, queries: int) -> Tensor:
    forward = one.subject.ops.forward(one.subject.worker)
    tokens_T, rows = one.rows(count, queries, grouped=queries > 1)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        forward.logits(forward(tokens_T, rows))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = forward.logits(forward(tokens_T, rows))
    graph.replay()
    torch.cuda.synchronize()
    return made[(count // 2 + 1) * queries - 1].float()


if __name__ == "__main__":
    main()
