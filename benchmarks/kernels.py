"""Check every kernel of `smc.kernels` against torch on a GPU at real sizes, and time it against the physical limit.

    python -m benchmarks.kernels [PART ...]
    python -m benchmarks.kernels products [--models 1b,8b] [--rows 8,32,64,160,512] [--only "8b down"]

Times are microseconds a call inside CUDA graphs of many calls, over copies of the data that together exceed the L2
cache. The last line is JSON: {name: {"us", "floor_us", ...}}.

`products` times the products of a decoder's matrices in bf16 and in FP8, by our kernels and by the library's, and
compares them with the time that reading the weights takes. Every tiling is checked against float32. It prints a line
for each product and number of rows, in microseconds, then the sum over a whole model, in milliseconds. Below each line
are the fastest FP8 tilings as n/k/splits/warps/stages, with a star at the choice of `choose`; bf16 has one tiling,
found by an earlier search. Our FP8 products get rounded activations, as from a norm; "library fp8" includes the
rounding, "its product" does not. It takes about four minutes a model, mostly for compiling.

Local axes: P splits of the inputs, Y more tokens of a row that are scored."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from smc import distributions
from smc.algorithm.coupling import Coupling
from smc.algorithm.expansion import SourceRows
from smc.algorithm.expansion import expand as torch_expand
from smc.algorithm.resampling import Bounds, Spans
from smc.algorithm.selection import select as torch_select
from smc.distributions import DistributionSpec
from smc.executor import masks
from smc.executor.draft import observe_draws as torch_observe
from smc.kernels.candidate_tokens import propose_candidates
from smc.kernels.draft import observe_draws
from smc.kernels.expansion import expand
from smc.kernels.linear import ProductTiling, choose, gate_up_silu, linear, reduce, token_block_of
from smc.kernels.norm import add_norm, round_rows, silu_mul
from smc.kernels.sampling import draw, score
from smc.kernels.select import select
from smc.kernels.truncation import Cut, apply_mask, truncate
from smc.model.linear import FP8, QuantisedRows, quantise
from smc.philox import DrawKeys, Purpose, RoundKeys, exponentials
from smc.round.tensors import RoundSelection
from smc.types import Decoding

BANDWIDTH = 4.26e12
"""Bytes a second that a large copy reads and writes on an H200."""
BEYOND_L2 = 200 * 1024**2
CALLS = 24

PRODUCTS = {
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
"""Model -> product -> (inputs, outputs, number of such products in a pass)."""
PRODUCT_ROWS = (8, 32, 64, 160, 512)
MOST_OWN = 256
"""Maximum number of rows of our kernel in bf16; the sums of more rows do not fit a program's registers."""
BLOCKS = ((64, 128, 4), (64, 256, 4), (128, 128, 4), (128, 128, 8), (128, 256, 4), (256, 128, 4), (256, 128, 8))
"""(block_n, block_k, warps)"""
SHARED_BYTES = 227 * 1024
PRODUCT_COLUMNS = (
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

report: dict[str, dict] = {}


@dataclass(frozen=True)
class Truncation:
    """Truncation settings of all rows; the defaults switch everything off."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    alpha: float | None = None

    def spec(self, rows: int) -> DistributionSpec:
        return DistributionSpec.of_settings([self] * rows, [1.0] * rows)


def kept(logits_RV: Tensor, cut: Cut) -> Tensor:
    """Return bool [R, V]: the entries of bfloat16 logits that a cut keeps."""
    bits_RV = (logits_RV.float() + 0.0).view(torch.int32)
    key_RV = (bits_RV ^ ((bits_RV >> 31) & 0x7FFFFFFF)) >> 16
    key_R1, column_V = cut.key_R[:, None], torch.arange(logits_RV.shape[1], device=logits_RV.device)
    return (key_RV > key_R1) | ((key_RV == key_R1) & (column_V <= cut.last_R[:, None]))


TRUNCATIONS = (
    Truncation(top_k=40),
    Truncation(top_p=0.95),
    Truncation(min_p=0.02),
    Truncation(top_k=40, top_p=0.95, min_p=0.02),
)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda", dtype=torch.float32 if dtype != torch.float64 else dtype) * scale).to(
        dtype
    )


def copies(tensor: Tensor) -> list[Tensor]:
    return [tensor] + [
        tensor.clone() for _ in range(min(CALLS, BEYOND_L2 // (tensor.numel() * tensor.element_size()) + 1) - 1)
    ]


def microseconds(call: Callable[[Tensor], object], data: list[Tensor]) -> float:
    """Return the microseconds of a call: the median over replays of a graph of `CALLS` calls, each on the next copy."""
    call(data[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(data[i % len(data)])
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS)
    return statistics.median(times[1:])


def note(name: str, us: float, traffic: float, **more: object) -> None:
    floor = traffic / BANDWIDTH * 1e6
    report[name] = {"us": round(us, 2), "floor_us": round(floor, 2), **more}
    print(
        f"{name:34s} {us:8.2f} us   floor {floor:7.2f}   {floor / us:5.0%}   "
        + " ".join(f"{key}={value}" for key, value in more.items()),
        flush=True,
    )


def same(actual: Tensor, expected: Tensor, tolerance: float = 6e-3) -> None:
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error < tolerance, f"relative error {error:.2e}"


def bench_draw(rows: int, draws: int, vocab: int = 128256) -> None:
    logits = copies(random(rows, vocab, scale=3.0))
    key = torch.randint(0, 2**31, (3, rows, draws), device="cuda")
    stream_RF, (seed_R, round_R, position_R) = key[1], key[:, :, 0].contiguous()
    seed_R = seed_R * 2**31 + 7
    ones_R = torch.ones(rows, device="cuda")
    keys = DrawKeys(seed_R, round_R, stream_RF, position_R, Purpose.PROPOSAL)
    token_RF, logq_RF, _ = draw(logits[0], vocab, ones_R, keys)
    w0, w1, _, _ = (torch.from_numpy(word).cuda() for word in keys.words())
    expected_RV = logits[0].float().log_softmax(-1)
    expected_RF = distributions.draw(expected_RV, exponentials(w0, w1, vocab))
    assert (token_RF != expected_RF).sum() <= 1, f"{(token_RF != expected_RF).sum()} tokens differ"
    assert (logq_RF - expected_RV.gather(1, token_RF.long())).abs().max() < 2e-5
    for block, warps in ((2048, 4), (4096, 4), (4096, 8), (8192, 8)):
        us = microseconds(
            lambda x, b=block, w=warps: draw(x, vocab, ones_R, keys, block=b, warps=w),
            logits,
        )
        note(f"draw {rows}x{draws} block {block} warps {warps}", us, rows * vocab * 2)


def bench_score(rows: int, extra: int, vocab: int = 128256) -> None:
    logits, ones_T = copies(random(rows, vocab, scale=3.0)), torch.ones(rows, device="cuda")
    label_T = torch.randint(0, vocab, (rows,), device="cuda", dtype=torch.int32)
    extra_TY = torch.randint(0, vocab, (rows, extra), device="cuda", dtype=torch.int32)
    logp_T, extra_logp_TY = score(logits[0], vocab, ones_T, label_T, extra_TY)
    expected_TV = logits[0].float().log_softmax(-1)
    assert (logp_T - expected_TV.gather(1, label_T.long()[:, None])[:, 0]).abs().max() < 2e-5
    assert (extra_logp_TY - expected_TV.gather(1, extra_TY.long())).abs().max() < 2e-5
    for block, warps in ((4096, 4), (8192, 8)):
        us = microseconds(
            lambda x, b=block, w=warps: score(x, vocab, ones_T, label_T, extra_TY, block=b, warps=w), logits
        )
        note(f"score {rows} block {block} warps {warps}", us, rows * vocab * 2)


def bench_mask(rows: int, vocab: int = 128256) -> None:
    logits = copies(random(rows, vocab, scale=3.0))
    mask_RW = torch.randint(-(2**31), 2**31, (rows, vocab // 32 + 1), device="cuda").int()
    mask_RW[:: max(rows // 2, 1)] = 0
    torch.testing.assert_close(
        apply_mask(logits[0], mask_RW, vocab),
        masks.apply_mask(logits[0], mask_RW, vocab),
        rtol=0,
        atol=0,
        equal_nan=True,
    )
    traffic = rows * vocab * (2 + 4 + 1 / 8)
    note(f"mask {rows} torch", microseconds(lambda x: masks.apply_mask(x, mask_RW, vocab), logits), traffic)
    for block, warps in ((2048, 4), (4096, 4), (8192, 8)):
        us = microseconds(lambda x, b=block, w=warps: apply_mask(x, mask_RW, vocab, block=b, warps=w), logits)
        note(f"mask {rows} block {block} warps {warps}", us, traffic)


def bench_truncate(rows: int, truncation: Truncation, vocab: int = 128256) -> None:
    logits, every = copies(random(rows, vocab, scale=3.0)), truncation.spec(rows)
    name, on_device = "+".join(sorted(str(one.name).lower() for one in every.active)), every.to(logits[0].device)
    torch_distributions = distributions.Distributions(every, logits[0].device)
    expected_RV = torch_distributions.target(logits[0].float()) > -torch.inf
    differ = (kept(logits[0], truncate(logits[0], vocab, on_device)) != expected_RV).sum().item()
    count_R = expected_RV.sum(-1)
    print(f"{name} {rows}: keeps {count_R.min().item()} to {count_R.max().item()}; {differ} entries otherwise")
    # Sums in another order may move the end of top-p by a few entries.
    assert differ <= (4 * rows if truncation.top_p < 1 else 0)
    sorting = microseconds(lambda x: torch_distributions.target(x.float()), logits[:2])
    for block, warps in ((2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16)):
        us = microseconds(lambda x, b=block, w=warps: truncate(x, vocab, on_device, block=b, warps=w), logits)
        note(f"truncate {name} {rows} block {block} warps {warps}", us, rows * vocab * 2, sorting=round(sorting, 1))


def bench_norm(features: int, rows: int) -> None:
    x_TE, weight_E = random(rows, features), random(features)
    for splits in (None, 0, 4):
        parts = (
            None
            if splits is None
            else random(rows, features)
            if splits == 0
            else random(4, rows, features, dtype=torch.float32)
        )
        sum_TE = x_TE if parts is None else (x_TE.float() + (parts.sum(0) if splits else parts.float())).bfloat16()
        same(
            add_norm(x_TE.clone(), parts, weight_E, 1e-5),
            F.rms_norm(sum_TE.float(), (features,), weight_E.float(), 1e-5),
        )
        traffic = x_TE.numel() * (4 if parts is None else 6) + (
            0 if parts is None else parts.numel() * parts.element_size()
        )
        us = microseconds(lambda x, p=parts: add_norm(x, p, weight_E, 1e-5), [x_TE.clone()])
        note(f"add_norm {rows}x{features} parts {splits}", us, traffic)
    gate_up = random(rows, 8 * features)
    gate, up = gate_up.float().chunk(2, -1)
    same(silu_mul(gate_up), F.silu(gate) * up)
    note(f"silu_mul {rows}x{4 * features}", microseconds(silu_mul, [gate_up]), gate_up.numel() * 3)
    parts_PTO = random(4, rows, features * 3 // 2, dtype=torch.float32)
    out_TO = torch.empty_like(parts_PTO[0], dtype=torch.bfloat16)
    same(reduce(parts_PTO, out_TO), parts_PTO.sum(0))
    us = microseconds(lambda parts: reduce(parts, out_TO), [parts_PTO])
    note(f"reduce 4x{rows}x{features * 3 // 2}", us, parts_PTO.numel() * 4.5)


def bench_selection(groups: int, n: int, branches: int) -> None:
    rows, full = groups * n, torch.full((groups,), n, dtype=torch.int32, device="cuda")
    candidates = torch.randn(rows, branches, dtype=torch.float64, device="cuda") * 3
    bounds = Bounds(Spans(torch.arange(groups, dtype=torch.int32, device="cuda") * n, full), full, full)
    seed_G = torch.arange(groups, device="cuda")
    rest = (
        torch.ones(rows, dtype=torch.bool, device="cuda"),
        bounds,
        torch.full((groups,), 0.5, dtype=torch.float64, device="cuda"),
    )
    rest = (*rest, torch.zeros(groups, dtype=torch.int32, device="cuda"), seed_G, torch.ones_like(seed_G))
    made, expected = select(candidates, *rest), torch_select(candidates, *rest)
    assert torch.equal(made.particles.row_A, expected.particles.row_A)
    for w in (4, 8):
        us = microseconds(lambda c, w=w: select(c, *rest, warps=w), [candidates])
        note(f"select {groups}x{n}x{branches} warps {w}", us, candidates.numel() * 8)


def bench_expansion(groups: int, rows: int, kind: Decoding, vocab: int = 128256) -> None:
    """Time the candidates of rows, then the choice of the next step's rows: `rows` rows of every group from as many."""
    total, device = groups * rows, torch.device("cuda")
    logits, ones_R = copies(random(total, vocab, scale=3.0)), torch.ones(total, device=device)
    seed_R, round_R, stream_R, position_R = torch.randint(0, 2**31, (4, total), device=device)
    keys = DrawKeys(seed_R, round_R, stream_R[:, None], position_R, Purpose.PROPOSAL)
    candidates = propose_candidates(logits[0], vocab, ones_R, keys)
    likeliest = logits[0].float().log_softmax(-1).topk(32)
    assert (candidates.logq_RC[:, :32] - likeliest.values).abs().max() < 2e-5
    tie_free = likeliest.values.diff(dim=1).ne(0).all(1)
    assert (candidates.token_RC[:, :32] == likeliest.indices).all(1)[tie_free].all()
    floor = total * vocab * 2
    for block, warps in ((2048, 4), (4096, 4), (4096, 8), (8192, 8)):
        us = microseconds(
            lambda x, b=block, w=warps: propose_candidates(x, vocab, ones_R, keys, block=b, warps=w), logits
        )
        note(f"candidates {groups}x{rows} block {block} warps {warps}", us, floor)
    group_A, none_A = torch.arange(total, device=device) // rows, torch.zeros(total, device=device)
    coupling = Coupling(none_A + 1.25, none_A + 0.7, group_A + 7)
    for block, warps in ((2048, 4), (2048, 8), (4096, 4), (4096, 8), (4096, 16)):
        us = microseconds(
            lambda x, b=block, w=warps: propose_candidates(
                x, vocab, ones_R, keys, has_rest=False, coupling=coupling, block=b, warps=w
            ),
            logits,
        )
        note(f"coupled {groups}x{rows} block {block} warps {warps}", us, floor)
    first_G, size_G = torch.arange(groups, device=device) * rows, torch.full((groups,), rows, device=device)
    decoding_G, seed_G = torch.full_like(size_G, int(kind)), torch.arange(groups, device=device)
    mass_R, there_R = torch.randn(total, device=device, dtype=torch.float64), ones_R > 0
    spans = Spans(first_G, size_G)
    source, keys_G = SourceRows(candidates, mass_R, there_R, spans), RoundKeys(seed_G, seed_G)
    rest = (spans, size_G, decoding_G, keys_G, 1, total)
    made, expected = expand(source, *rest), torch_expand(source, *rest)
    assert torch.equal(made.parent_X, expected.parent_X) and torch.equal(made.candidate_X, expected.candidate_X)
    for chunk, w in ((256, 4), (512, 4), (1024, 4), (1024, 8), (2048, 8), (2048, 16), (4096, 16)):
        us = microseconds(lambda _, c=chunk, w=w: expand(source, *rest, chunk=c, warps=w), [mass_R])
        note(f"expand {kind.name} {groups}x{rows} chunk {chunk} warps {w}", us, candidates.share_RC.numel() * 4)


class DrawnSlots(NamedTuple):
    """What `observe_draws` reads of slots."""

    end_S: Tensor
    ended_S: Tensor

    @property
    def device(self) -> torch.device:
        return self.end_S.device


class DrawnArrays(NamedTuple):
    """What `observe_draws` reads of a plan's arrays."""

    slot_A: Tensor
    exponent_A: Tensor


def bench_observation(rows: int, has_head: bool, vocab: int = 151936) -> None:
    """Time the statistics of the target's draws after so many roots, of which each is seen."""
    device = torch.device("cuda")
    index_A, ones_A = torch.arange(rows, device=device), torch.ones(rows, device=device)
    ids_M = torch.arange(0, vocab, 2, device=device) if has_head else None
    kept = copies(random(rows, vocab if ids_M is None else len(ids_M), dtype=torch.float32, scale=3.0).log_softmax(-1))
    arrays = DrawnArrays(index_A, ones_A * 1.25)
    plan: Any = SimpleNamespace(arrays=arrays, kind=SimpleNamespace(batch_size=rows))
    state: Any = DrawnSlots(index_A + 100, index_A < 0)
    tree: Any = SimpleNamespace(tokens_XK=torch.randint(0, vocab, (rows, 5), device=device))
    selection = RoundSelection.memory(rows).allocate(device).fields
    particles = selection.particles._replace(ancestor_A=index_A, row_A=index_A, alive_A=index_A >= 0)
    zero_A = index_A * 0
    selection = selection._replace(particles=particles, taken_A=zero_A + 1, cut_A=zero_A, bonus_A=zero_A - 1)
    given = (state, plan, tree, selection)
    coupling = Coupling(arrays.exponent_A, ones_A * 0.7, index_A * 0 + 7, ids_M)
    made, expected = observe_draws(*given, kept[0], coupling), torch_observe(*given, kept[0], coupling)
    for ours, theirs in zip(made[:2], expected[:2]):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4, equal_nan=True)
    # Logarithms that differ in their last bit may change the order of two scores.
    assert (made.rank_A.isnan() == expected.rank_A.isnan()).all()
    assert ((made.rank_A - expected.rank_A).nan_to_num(0.0).abs() <= 2).all()
    for block, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (4096, 16), (8192, 8), (8192, 16)):
        us = microseconds(lambda x, b=block, w=warps: observe_draws(*given, x, coupling, block=b, warps=w), kept)
        note(f"observe {rows}{' head' * has_head} block {block} warps {warps}", us, kept[0].numel() * 4)


def bench_observations() -> None:
    for rows in (1, 8, 40):
        bench_observation(rows, False)
    bench_observation(8, True)


def bench_sampling() -> None:
    for rows, draws in ((8, 4), (32, 1), (64, 1)):
        bench_draw(rows, draws)
    bench_score(72, 4)
    for rows in (8, 32, 64):
        for truncation in TRUNCATIONS:
            bench_truncate(rows, truncation)


def bench_masks() -> None:
    for rows in (1, 8, 40, 320):
        bench_mask(rows)


def bench_norms() -> None:
    for features, rows in ((2048, 8), (2048, 64), (4096, 64)):
        bench_norm(features, rows)


def bench_selections() -> None:
    for shape in ((1, 8, 4), (8, 8, 8), (8, 64, 4)):
        bench_selection(*shape)


def bench_expansions() -> None:
    for groups, rows in ((1, 32), (1, 8), (8, 32)):
        for kind in (Decoding.DISTINCT, Decoding.WALK):
            bench_expansion(groups, rows, kind)


def tilings(rows: int, outputs: int, inputs: int, gated: bool, fp8: bool) -> Iterator[ProductTiling]:
    """Yield the chosen tiling, and for FP8 others, with few splits but enough to fill the GPU. Two programs share a
    multiprocessor if they can."""
    seen = [choose(rows, outputs, inputs, gated, fp8)]
    yield seen[0]
    padded = token_block_of(rows, fp8)
    for block_n, block_k, warps in BLOCKS if fp8 else ():
        # Sums take at most 160 registers of a thread; with more there would be no room for anything else.
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


def _own_product(
    x: Tensor | QuantisedRows, gated: bool, fields: dict[str, int], matrix: tuple[Tensor, Tensor | None]
) -> Tensor:
    weight, scale = matrix
    if gated:
        return gate_up_silu(
            x, weight, scale=scale, **{name: value for name, value in fields.items() if name != "splits"}
        )
    return linear(x, weight, scale_O=scale, **fields)


def _library_product(
    x_TI: Tensor, gated: bool, matrix: tuple[Tensor, Tensor | None], rounded: tuple | None = None, fast: bool = False
) -> Tensor:
    weight, scale = matrix
    if scale is None:
        out_TO = F.linear(x_TI, weight)
    else:
        x8_TI, scale_T1 = rounded or round_rows(x_TI)
        scales = {"scale_a": scale_T1, "scale_b": scale[None]}
        out_TO = torch._scaled_mm(x8_TI, weight.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return silu_mul(out_TO) if gated and rounded is None else out_TO


def own_products(
    x: Tensor | QuantisedRows, gated: bool, matrices: list, expected: Tensor
) -> tuple[dict[str, float], float]:
    """Return the microseconds of every tiling, the fastest first, and of the chosen one."""
    rows = len(x.value_TI if isinstance(x, QuantisedRows) else x)
    weight, scale = matrices[0]
    inputs, outputs = weight.shape[1], weight.shape[0]
    timed, default = {}, None
    for tiling in tilings(rows, outputs, inputs, gated, scale is not None):
        name = "/".join(map(str, vars(tiling).values())) + ("" if timed else "*")
        try:
            call = partial(_own_product, x, gated, vars(tiling))
            made = call(matrices[0])
            same(made.sum(0) if made.dim() == 3 else made, expected)
            timed[name] = microseconds(call, matrices)
        except Exception as failure:
            print(f"    {name} failed: {type(failure).__name__}: {str(failure)[:120]}", flush=True)
            timed[name] = float("inf")
        default = timed[name] if default is None else default
    return dict(sorted(timed.items(), key=lambda item: item[1])), default


def bench_product(
    inputs: int, outputs: int, rows: int, gated: bool
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return the columns of one product, and the times of all its tilings, by type."""
    weights, x_TI = copies(random(outputs, inputs, scale=inputs**-0.5)), random(rows, inputs)
    matrices = {"bf16": [(weight, None) for weight in weights]}
    weight8, scale = quantise(weights[0])
    matrices["fp8"] = [(weight.view(FP8), scale) for weight in copies(weight8.view(torch.uint8))]
    rounded = round_rows(x_TI)
    activations = {"bf16": x_TI, "fp8": rounded}
    found, sweeps = {}, {}
    for kind, bytes_each in (("fp8", 1), ("bf16", 2)):
        weight, scale_O = matrices[kind][0]
        exact_TI = x_TI.float() if scale_O is None else rounded.value_TI.float() * rounded.scale_T1
        expected = exact_TI @ (weight.float() * (1.0 if scale_O is None else scale_O[:, None])).T
        if gated:
            expected = F.silu(expected[:, : outputs // 2]) * expected[:, outputs // 2 :]
        found[f"floor {kind}"] = 1e6 * (bytes_each * inputs * outputs + 2 * rows * (inputs + outputs)) / BANDWIDTH
        if rows <= MOST_OWN or kind == "fp8":
            sweeps[kind], default = own_products(activations[kind], gated, matrices[kind], expected)
            found[f"own {kind}"] = next(iter(sweeps[kind].values()))
            if kind == "fp8":
                found["default"] = default
        same(_library_product(x_TI, gated, matrices[kind][0]), expected)
        found[f"library {kind}"] = microseconds(partial(_library_product, x_TI, gated), matrices[kind])
    for name, fast in (("its product", False), ("fast sums", True)):
        found[name] = microseconds(
            lambda matrix, fast=fast: _library_product(x_TI, gated, matrix, rounded, fast), matrices["fp8"]
        )
    return found, sweeps


def bench_products(given: argparse.Namespace) -> None:
    print(f"{'':22s}" + "".join(f"{column:>13s}" for column in PRODUCT_COLUMNS), flush=True)
    for model in given.models.split(","):
        for rows in map(int, given.rows.split(",")):
            sums: dict[str, float] = {}
            for product, (inputs, outputs, count) in PRODUCTS[model].items():
                if given.only not in ("", f"{model} {product}"):
                    continue
                found, sweeps = bench_product(inputs, outputs, rows, product == "gate_up")
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


def _cells(found: dict[str, float]) -> str:
    return "".join(f"{found[column]:13.2f}" if column in found else f"{'':13s}" for column in PRODUCT_COLUMNS)


PARTS = {
    "masks": bench_masks,
    "sampling": bench_sampling,
    "norms": bench_norms,
    "selections": bench_selections,
    "expansions": bench_expansions,
    "observations": bench_observations,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts",
        nargs="*",
        choices=[*PARTS, "products", []],
        metavar="PART",
        help=f"parts to time: {', '.join(PARTS)}, products; default: all but products",
    )
    parser.add_argument("--models", default="1b,8b", help="models whose products are timed; default: %(default)s")
    parser.add_argument(
        "--rows", default=",".join(map(str, PRODUCT_ROWS)), help="numbers of rows of products; default: %(default)s"
    )
    parser.add_argument("--only", default="", help="time only this model and product, such as '8b down'")
    given = parser.parse_args()
    torch.manual_seed(0)
    for part in given.parts or PARTS:
        bench_products(given) if part == "products" else PARTS[part]()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
