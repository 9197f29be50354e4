"""Check every kernel of `smc.kernels` against torch on a GPU at real sizes, and time it against the physical limit.

    python -m benchmarks.kernels [PART ...]

Products have a file of their own, `benchmarks.products`.

Times are microseconds a call inside CUDA graphs of many calls, over copies of the data that together exceed the L2
cache. The last line is JSON: {name: {"us", "floor_us", ...}}. Axes: see `smc.kernels`."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from smc import laws
from smc.algorithm.bounds import Bounds
from smc.algorithm.expansion import Kind
from smc.algorithm.expansion import expand as torch_expand
from smc.algorithm.selection import select as torch_select
from smc.kernels.candidate_tokens import offer
from smc.kernels.expansion import expand
from smc.kernels.linear import reduce
from smc.kernels.norm import add_norm, silu_mul
from smc.kernels.sampling import draw, score
from smc.kernels.select import select
from smc.kernels.truncation import truncate
from smc.philox import exponentials, words
from tests.kernels.cuts import arguments, kept
from tests.test_laws import Spec, law_spec

BANDWIDTH = 4.26e12
"""Bytes a second that a large copy reaches on an H200 (README of the measurements: reading plus writing)."""
BEYOND_L2 = 200 * 1024**2
CALLS = 24
report: dict[str, dict] = {}


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda", dtype=torch.float32 if dtype != torch.float64 else dtype) * scale).to(
        dtype
    )


def copies(tensor: Tensor) -> list[Tensor]:
    return [tensor] + [
        tensor.clone() for _ in range(min(CALLS, BEYOND_L2 // (tensor.numel() * tensor.element_size()) + 1) - 1)
    ]


def microseconds(call: Callable[[Tensor], object], data: list[Tensor]) -> float:
    """Median over replays of a graph of `CALLS` calls, each on the next copy."""
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
        f"{name:34s} {us:8.2f} us   floor {floor:7.2f}   {floor / us:5.0%}   {' '.join(f'{k}={v}' for k, v in more.items())}",
        flush=True,
    )


def same(actual: Tensor, expected: Tensor, tolerance: float = 6e-3) -> None:
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error < tolerance, f"relative error {error:.2e}"


def bench_draw(rows: int, draws: int, vocab: int = 128256) -> None:
    logits = copies(random(rows, vocab, scale=3.0))
    key = torch.randint(0, 2**31, (3, rows, draws), device="cuda")
    stream_RD, (seed_R, round_R, position_R) = key[1], key[:, :, 0].contiguous()
    seed_R = seed_R * 2**31 + 7
    ones_R = torch.ones(rows, device="cuda")
    token_RD, logq_RD, _ = draw(logits[0], vocab, ones_R, seed_R, round_R, stream_RD, position_R, 1)
    host = [x.cpu().numpy() for x in (seed_R[:, None], round_R[:, None], stream_RD, position_R[:, None])]
    w0, w1, _, _ = (torch.from_numpy(w).cuda() for w in words(*host, 1))
    expected_RV = logits[0].float().log_softmax(-1)
    expected_RD = laws.draw(expected_RV, exponentials(w0, w1, vocab))
    assert (token_RD != expected_RD).sum() <= 1, f"{(token_RD != expected_RD).sum()} tokens differ"
    assert (logq_RD - expected_RV.gather(1, token_RD.long())).abs().max() < 2e-5
    for block, warps in ((2048, 4), (4096, 4), (4096, 8), (8192, 8)):
        us = microseconds(
            lambda x, b=block, w=warps: draw(
                x, vocab, ones_R, seed_R, round_R, stream_RD, position_R, 1, block=b, warps=w
            ),
            logits,
        )
        note(f"draw {rows}x{draws} block {block} warps {warps}", us, rows * vocab * 2)


def bench_score(rows: int, extra: int, vocab: int = 128256) -> None:
    logits, ones_T = copies(random(rows, vocab, scale=3.0)), torch.ones(rows, device="cuda")
    label_T = torch.randint(0, vocab, (rows,), device="cuda", dtype=torch.int32)
    extra_TF = torch.randint(0, vocab, (rows, extra), device="cuda", dtype=torch.int32)
    logp_T, extra_logp_TF = score(logits[0], vocab, ones_T, label_T, extra_TF)
    expected_TV = logits[0].float().log_softmax(-1)
    assert (logp_T - expected_TV.gather(1, label_T.long()[:, None])[:, 0]).abs().max() < 2e-5
    assert (extra_logp_TF - expected_TV.gather(1, extra_TF.long())).abs().max() < 2e-5
    for block, warps in ((4096, 4), (8192, 8)):
        us = microseconds(
            lambda x, b=block, w=warps: score(x, vocab, ones_T, label_T, extra_TF, block=b, warps=w), logits
        )
        note(f"score {rows} block {block} warps {warps}", us, rows * vocab * 2)


def bench_truncate(rows: int, spec: Spec, vocab: int = 128256) -> None:
    logits, every = copies(random(rows, vocab, scale=3.0)), law_spec(*[spec] * rows)
    name, asked = "+".join(sorted(every.active)), arguments(every, logits[0].device)
    torch_law = laws.Laws(every, logits[0].device)
    expected_RV = torch_law.target(logits[0].float()) > -torch.inf
    differ = (kept(logits[0], truncate(logits[0], vocab, *asked)) != expected_RV).sum().item()
    count_R = expected_RV.sum(-1)
    print(f"{name} {rows}: keeps {count_R.min().item()} to {count_R.max().item()}; {differ} entries otherwise")
    # Sums in another order may end top-p a few entries earlier or later.
    assert differ <= (4 * rows if spec.top_p < 1 else 0)
    sorting = microseconds(lambda x: torch_law.target(x.float()), logits[:2])
    for block, warps in ((2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16)):
        us = microseconds(lambda x, b=block, w=warps: truncate(x, vocab, *asked, block=b, warps=w), logits)
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
    parts_STN = random(4, rows, features * 3 // 2, dtype=torch.float32)
    same(reduce(parts_STN), parts_STN.sum(0))
    note(f"reduce 4x{rows}x{features * 3 // 2}", microseconds(reduce, [parts_STN]), parts_STN.numel() * 4.5)


def bench_selection(groups: int, n: int, branches: int) -> None:
    places, full = groups * n, torch.full((groups,), n, dtype=torch.int32, device="cuda")
    candidates = torch.randn(places, branches, dtype=torch.float64, device="cuda") * 3
    bounds = Bounds(torch.arange(groups, dtype=torch.int32, device="cuda") * n, full, full, full)
    seed_G = torch.arange(groups, device="cuda")
    rest = (
        torch.ones(places, dtype=torch.bool, device="cuda"),
        bounds,
        torch.full((groups,), 0.5, dtype=torch.float64, device="cuda"),
    )
    rest = (*rest, torch.zeros(groups, dtype=torch.int32, device="cuda"), seed_G, torch.ones_like(seed_G))
    made, expected = select(candidates, *rest), torch_select(candidates, *rest)
    assert torch.equal(made.ancestor_A, expected.ancestor_A) and torch.equal(made.branch_A, expected.branch_A)
    for w in (4, 8):
        us = microseconds(lambda c, w=w: select(c, *rest, warps=w), [candidates])
        note(f"select {groups}x{n}x{branches} warps {w}", us, candidates.numel() * 8)


def bench_expansion(groups: int, rows: int, kind: Kind, vocab: int = 128256) -> None:
    """What rows offer, then which of it goes on: `rows` rows of every group from as many."""
    total, device = groups * rows, torch.device("cuda")
    logits, ones_R = copies(random(total, vocab, scale=3.0)), torch.ones(total, device=device)
    keys = torch.randint(0, 2**31, (4, total), device=device)
    offers = offer(logits[0], vocab, ones_R, *keys, 1)
    likeliest = logits[0].float().log_softmax(-1).topk(32)
    assert (offers.logq_RC[:, :32] - likeliest.values).abs().max() < 2e-5
    tie_free = likeliest.values.diff(dim=1).ne(0).all(1)
    assert (offers.token_RC[:, :32] == likeliest.indices).all(1)[tie_free].all()
    floor = total * vocab * 2
    for block, warps in ((2048, 4), (4096, 4), (4096, 8), (8192, 8)):
        us = microseconds(lambda x, b=block, w=warps: offer(x, vocab, ones_R, *keys, 1, block=b, warps=w), logits)
        note(f"offer {groups}x{rows} block {block} warps {warps}", us, floor)
    first_G, size_G = torch.arange(groups, device=device) * rows, torch.full((groups,), rows, device=device)
    kind_G, seed_G = torch.full_like(size_G, int(kind)), torch.arange(groups, device=device)
    mass_R, there_R = torch.randn(total, device=device, dtype=torch.float64), ones_R > 0
    rest = (mass_R, there_R, (first_G, size_G), (first_G, size_G), size_G, kind_G, (seed_G, seed_G, 1), total)
    made, expected = expand(offers, *rest), torch_expand(offers, *rest)
    assert torch.equal(made.parent_X, expected.parent_X) and torch.equal(made.offer_X, expected.offer_X)
    for chunk, w in ((256, 4), (512, 4), (1024, 4), (1024, 8), (2048, 8), (2048, 16), (4096, 16)):
        us = microseconds(lambda o, c=chunk, w=w: expand(o, *rest, chunk=c, warps=w), [offers])
        note(f"expand {kind.name} {groups}x{rows} chunk {chunk} warps {w}", us, offers.share_RC.numel() * 4)


def bench_laws() -> None:
    for rows, draws in ((8, 4), (32, 1), (64, 1)):
        bench_draw(rows, draws)
    bench_score(72, 4)
    for rows in (8, 32, 64):
        for spec in (Spec(top_k=40), Spec(top_p=0.95), Spec(min_p=0.02), Spec(top_k=40, top_p=0.95, min_p=0.02)):
            bench_truncate(rows, spec)


def bench_norms() -> None:
    for features, rows in ((2048, 8), (2048, 64), (4096, 64)):
        bench_norm(features, rows)


def bench_selections() -> None:
    for shape in ((1, 8, 4), (8, 8, 8), (8, 64, 4)):
        bench_selection(*shape)


def bench_expansions() -> None:
    for groups, rows in ((1, 32), (1, 8), (8, 32)):
        for kind in (Kind.DISTINCT, Kind.BEST):
            bench_expansion(groups, rows, kind)


PARTS = {
    "laws": bench_laws,
    "norms": bench_norms,
    "selections": bench_selections,
    "expansions": bench_expansions,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=f"of {', '.join(PARTS)}; default: all"
    )
    torch.manual_seed(0)
    for part in parser.parse_args().parts or PARTS:
        PARTS[part]()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
