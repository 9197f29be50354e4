"""Measures the engine under changing loads: lengths of rounds, padding of rows, memory, the prefix cache, and the
number of requests that run at once.

`python -m benchmarks.engine mixed|prefix|capacity|profile [--target SHAPE] [--draft SHAPE] [--rounds N]`, on one
GPU or two, with random weights. Every part prints readable lines, and a JSON line at the end."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

import numpy as np
import torch

from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.calibration.warm_up import rare_requests, warm_up, warm_up_plans, warm_up_prompts
from smc.executor.round_executor import LocalRoundExecutor, RequestedRound
from smc.executor.triton_ops import TritonOps
from smc.executor.worker import ModelWorker
from smc.memory.kv_cache import KVPool, pages_that_fit
from smc.model.loader import random_model
from smc.model.presets import NoText, preset
from smc.round.plan import RoundPlan
from smc.scheduler.engine import Engine
from smc.scheduler.planner import bucket
from smc.stops import TokenBytes
from smc.types import BOTH_MODELS, Decoding, ModelRole

DTYPE = torch.bfloat16
SIZES = (1, 1, 1, 2, 2, 4, 4, 8, 8, 16, 32)


def make_engine(args: argparse.Namespace, config: EngineConfig, *, warm: bool = True) -> Engine:
    devices = {"draft": "cuda:0", "target": f"cuda:{torch.cuda.device_count() - 1}"}
    models = {side: random_model(preset(getattr(args, side)), dtype=DTYPE, device=devices[side]) for side in ModelRole}
    vocab = models["target"].config.vocab_size
    context = config.max_context
    sizes = {"width": config.width(context), "vocab_size": vocab, "token_bytes": TokenBytes.of(NoText(vocab))}
    pages = config.pool_pages(context, config.pages)
    workers = {side: ModelWorker(side, model, pages=pages, **sizes) for side, model in models.items()}
    pair = LocalRoundExecutor(config, workers, TritonOps())
    engine = Engine(
        config, workers, NoText(vocab), executor=pair, pages=dict.fromkeys(ModelRole, pages), context=context
    )
    begin = time.monotonic()
    if warm:
        warm_up_prompts(engine)
        warm_up(engine, warm_up_plans(config, context), rare_requests(config, context, vocab))
    print(f"warm in {time.monotonic() - begin:.1f} s; {recorded(engine)}", flush=True)
    return engine


def recorded(engine: Engine) -> dict[str, str]:
    stages = engine.executor.stages
    return {
        side: f"{s.recorded_keys} kinds, {s.recorded_bytes / 2**30:.2f} GiB, {s.evicted} evicted"
        for side, s in stages.items()
    }


def allocated() -> list[float]:
    return [round(torch.cuda.memory_allocated(i) / 2**30, 3) for i in range(torch.cuda.device_count())]


def mixed(args: argparse.Namespace) -> dict:
    """Run a fixed number of requests at once, with 1 to 32 particles and varied sampling settings and lengths. A new
    request replaces each answered one."""
    config = EngineConfig(
        block=args.block, smc_block=args.block, branches=2, max_slots=512, max_context=1024, pages=200_000
    )
    engine, rng = make_engine(args, config), random.Random(1)
    vocab, submitted = engine.tokenizer.size, 0
    plans, ask = [], engine.executor.round

    def told(plan: RoundPlan) -> RequestedRound:
        plans.append((plan.kind.roles, len(plan.arrays.slot_A), int((plan.arrays.slot_A < config.max_slots).sum())))
        return ask(plan)

    engine.executor.round = told

    def one() -> Request:
        distribution = rng.choice([{}, {}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.95}])
        smc = rng.random() < 0.9
        method = {
            "method": "smc",
            "particles": rng.choice(SIZES),
            "resampling": rng.choice(["systematic", "systematic", "ssp", "residual"]),
        }
        params = SamplingParams(
            seed=submitted, max_tokens=rng.randint(20, 400), **distribution, **(method if smc else {"method": "target"})
        )
        prompt = tuple(rng.randrange(vocab) for _ in range(rng.choice([20, 100, 250, 500])))
        return Request(str(submitted), prompt, params)

    lengths, memory, work, source = [], [], [], engine.rounds_of(Decoding.INDEPENDENT)
    while len(lengths) < args.rounds:
        while len(engine.registry.groups) < args.requests:
            engine.submit(one())
            submitted += 1
        begin, source.queued = time.monotonic(), 0.0
        engine.step()
        if source.last is not None:
            spans = {name: 1e-6 * (end - begun) for name, (begun, end) in source.last.spans().items()}
            work.append({**spans, "planned and queued": 1e3 * source.queued})
        lengths.append(1e3 * (time.monotonic() - begin))
        if len(lengths) % 200 == 0:
            memory.append(
                (
                    sum(allocated()),
                    round(sum(stage.recorded_bytes for stage in engine.executor.stages.values()) / 2**30, 3),
                )
            )
            held, recordings = memory[-1]
            print(
                f"{len(lengths)} rounds: {held:.3f} GiB, {recordings} of it recordings; "
                f"{statistics.median(lengths[-200:]):.1f} ms",
                flush=True,
            )
    pair_rounds = [(rows, used) for roles, rows, used in plans if roles == BOTH_MODELS]
    after = np.array(lengths[len(lengths) // 10 :])
    found = {
        "rounds": len(lengths),
        "answered": submitted - args.requests,
        "particles": float(np.mean([used for _, used in pair_rounds])),
        "rows_a_particle_at_most": max(rows / used for rows, used in pair_rounds),
        "median_ms": float(np.median(after)),
        "p99_ms": float(np.percentile(after, 99)),
        "p999_ms": float(np.percentile(after, 99.9)),
        "longest_ms": float(after.max()),
        "longer_than_3_medians": int((after > 3 * np.median(after)).sum()),
        "parts_ms": {name: statistics.median(w[name] for w in work) for name in work[-1]},
        "memory_and_recordings_GiB": memory,
        "recorded": recorded(engine),
    }
    assert all(bucket(used) == rows for rows, used in pair_rounds)
    return found


def prefix(args: argparse.Namespace) -> dict:
    """Measure the time to the first token of a prompt of 4,096 tokens, new and cached."""
    config = EngineConfig(
        block=args.block, smc_block=args.block, branches=4, max_slots=16, max_context=8192, pages=60_000
    )
    engine, found = make_engine(args, config), {"cold_ms": [], "cached_ms": [], "cached_tokens": []}
    generator = torch.Generator().manual_seed(0)
    for number in range(4):
        prompt = tuple(torch.randint(10, 1000, (4096,), generator=generator).tolist())
        for name in ("cold_ms", "cached_ms"):
            torch.cuda.synchronize()
            begin = time.monotonic()
            outputs = list(
                engine.run([Request(f"{number}{name}", prompt, SamplingParams(method="target", max_tokens=1, seed=1))])
            )
            found[name].append(1e3 * (time.monotonic() - begin))
        found["cached_tokens"].append(outputs[-1].answer.cached_tokens)
    found["share"] = statistics.median(found["cached_ms"][1:]) / statistics.median(found["cold_ms"][1:])
    return found


def capacity(args: argparse.Namespace) -> dict:
    """Count the requests of N = 32 and `--tokens` tokens that run at once, with as many pages as the 8B shape has on
    80 GiB."""
    size, shape = KVPool.page_bytes(preset("llama-8b"), DTYPE), 15.0e9 + 1.05e9
    pages = int((79.1 * 2**30 - shape - (6 << 30)) // size)
    n, tokens, prompt, f, k = 32, args.tokens, 256, 2, 5
    before = pages // (prompt + n * (tokens + f * k))
    config = EngineConfig(block=k, smc_block=k, branches=f, max_slots=2048, max_context=prompt + tokens, pages=pages)
    engine, most, steps = make_engine(args, config, warm=False), 0, 0
    params = SamplingParams(method="smc", particles=n, max_tokens=tokens, ignore_eos=True, seed=1)
    for number in range(64):
        engine.submit(Request(str(number), tuple(range(number, number + prompt)), params))
    used, answered, preempted, begin = 0, 0, 0, time.monotonic()
    while not engine.idle and time.monotonic() - begin < args.seconds:
        answers = [output.answer for output in engine.step() if output.answer]
        answered += len(answers)
        preempted += sum(answer.statistics.preemptions for answer in answers)
        used, most, steps = max(used, engine.memory.held("draft")), max(most, engine.num_running), steps + 1
        if steps % 100 == 0:
            print(
                steps,
                "steps",
                engine.num_running,
                "running",
                engine.memory.held("draft"),
                "of",
                pages,
                "pages",
                flush=True,
            )
    return {
        "pages": pages,
        "free_pages_now": pages_that_fit(size, torch.device("cuda:0")),
        "before": before,
        "running_at_most": most,
        "pages_used_at_most": used,
        "answered": answered,
        "preemptions": preempted,
        "steps": steps,
        "seconds": time.monotonic() - begin,
    }


def profile(args: argparse.Namespace) -> dict:
    """Print the longest kernels of a round of one request, with their times and numbers of launches, by GPU."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    config = EngineConfig(
        form=args.form, block=args.block, smc_block=args.block, max_slots=8, max_context=1024, pages=20_000
    )
    engine = make_engine(args, config, warm=False)
    own = {} if args.method == "target" else {"particles": 8}
    own |= {"population": args.population} if args.method == "smc" else {}
    params = SamplingParams(method=args.method, max_tokens=700, ignore_eos=True, seed=1, **own)
    engine.submit(Request("0", tuple(range(100, 356)), params))
    for _ in range(12):
        engine.step()
    rounds = 6
    with profiler(activities=[ProfilerActivity.CUDA]) as run:
        for _ in range(rounds):
            engine.step()
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
    times: dict[tuple[int, str], list[float]] = {}
    for event in run.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times.setdefault((event.device_index, event.name), []).append(event.time_range.elapsed_us())
    for (device, name), spans in sorted(times.items(), key=lambda item: (item[0][0], -sum(item[1]))):
        if sum(spans) / rounds > args.least:
            print(
                f"gpu {device} {sum(spans) / rounds:9.1f} us a round {len(spans) / rounds:7.1f} launches {name[:110]}"
            )
    totals = {}
    for device in range(torch.cuda.device_count()):
        of_device = [span for (where, _), spans in times.items() if where == device for span in spans]
        totals[f"gpu {device}"] = {"us a round": round(sum(of_device) / rounds, 1), "launches": len(of_device) / rounds}
    return totals


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("mixed", "prefix", "capacity", "profile"))
    parser.add_argument("--target", default="llama-8b")
    parser.add_argument("--draft", default="llama-1b")
    parser.add_argument("--block", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--method", default="exact")
    parser.add_argument("--population", default="distinct")
    parser.add_argument("--form", default="lookahead")
    parser.add_argument(
        "--least",
        type=float,
        default=4.0,
        help="for profile: show kernels that take at least this many microseconds a round; default: %(default)s",
    )
    args = parser.parse_args()
    found = {"mixed": mixed, "prefix": prefix, "capacity": capacity, "profile": profile}[args.part](args)
    for name, value in found.items():
        print(f"{name:>24}  {value}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
