"""`smcserve bench`: how fast a pair decodes on GPUs; on a CPU, where the time of a round goes; on either, how soon
answers begin."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.cli import gang
from services.cli.bench_options import LAW, OWN, BenchOptions, refuse_idle
from services.cli.options import with_options
from smc.evaluation.reports import advise as advising
from smc.evaluation.reports import ttft
from smc.evaluation.reports.costs import CURVES_LEGEND, curve_tables, seen_of_rounds, seen_of_speeds
from smc.evaluation.reports.rounds import GANG_LEGEND, LOCAL_LEGEND, gang_table, measure_rounds, round_table
from smc.evaluation.reports.speed import LEGEND as SPEED_LEGEND
from smc.evaluation.reports.speed import WIDE, Machines, SpeedPlan, count_gpus, speed_table
from smc.evaluation.reports.speed import measure as measure_speed
from smc.terminal import out, progress_bar

if TYPE_CHECKING:
    from services.launch.config import GangConfig
    from smc.api.engine_config import EngineConfig
    from smc.evaluation.machine import Machine
    from smc.evaluation.round_time import GangRound
    from smc.evaluation.ttft import PairMachine, PromptMachine
    from smc.local_engine import ModelPair

PLACES = ("target", "draft")


@with_options(BenchOptions)
def bench(asked: BenchOptions) -> None:
    """Measure speed: on GPUs answer tokens a second of every mode, on a CPU where the time of a round goes."""
    if asked.advise:
        _advise(asked)
        return
    refuse_idle(asked.named("gpus", "acceptance", "picture"), "without --advise")
    asked.check_decoding()
    if asked.device == "cuda":
        _bench_gpus(asked)
    elif asked.prompts:
        _bench_prompts(asked)
    else:
        _bench_rounds(asked)


def _advise(asked: BenchOptions) -> None:
    """Costs, and what they say of how to split GPUs."""
    idle = asked.named("mode") | {"prompts": asked.prompts or None}
    idle |= asked.named(
        "rounds", "draft_tp", "trace", "method", "population", "verification", "guidance_scale", "drafting"
    )
    refuse_idle(idle, "with --advise")
    if asked.context and len(asked.context) > 1:
        raise ValueError(f"--context {' '.join(map(str, asked.context))}; allowed with --advise: one")
    asked.check(asked.named("target_tp"), asked.json, asked.picture)
    on_gpu = asked.device == "cuda"
    plan = _advise_plan(asked, count_gpus() if on_gpu else None)
    if asked.load == "random" and plan.acceptance is None:
        raise ValueError("--load random says nothing of what is accepted; give --acceptance")
    if not on_gpu:
        refuse_idle(asked.named("load"), "without --device cuda")
    if not on_gpu and not asked.link:
        advising.run(plan, _cpu_machine(asked), compiles=False)
        return
    apart = (1, max((degree for degree in plan.degrees if degree < plan.gpus), default=1))
    with _machine(asked.link, _gang_config(asked), apart) as (machine, _):
        advising.run(plan, machine, compiles=on_gpu)


def _advise_plan(asked: BenchOptions, there: int | None) -> advising.AdvisePlan:
    """`there`: GPUs; None: the models are on a CPU."""
    gpus = (there or 2) if asked.gpus is None else asked.gpus
    most = 1 if not asked.link else gpus if there is None else min(gpus, there)
    return advising.AdvisePlan(
        gpus=gpus,
        degrees=[asked.target_tp]
        if asked.target_tp
        else [1 << power for power in range(most.bit_length()) if 1 << power <= most],
        loads=asked.concurrency or advising.LOADS,
        context=asked.context[0] if asked.context else 256,
        particles=asked.particles,
        branches=asked.branches,
        blocks=asked.block,
        acceptance=asked.acceptance,
        law=asked.law,
        json=asked.json,
        picture=asked.picture,
    )


def _bench_gpus(asked: BenchOptions) -> None:
    """Tokens a second, or how soon answers begin."""
    asked.check(asked.named("draft_tp", "target_tp", "threads"), asked.json, asked.trace)
    contexts: Sequence[int] = asked.context or (ttft.CONTEXTS if asked.prompts else (256,))
    if asked.prompts:
        refuse_idle(asked.named("trace", "drafting"), "with --prompts")
    elif asked.load == "grown":
        refuse_idle(asked.named("context"), "with --load grown, whose prompts are problems")
        contexts = ()
    if WIDE in (asked.mode or ()) and not asked.link:
        raise ValueError(f"--mode {WIDE} shares the target among processes; give --link")
    degrees = (asked.draft_tp or 1, asked.target_tp or 1)
    plan = SpeedPlan(
        degrees,
        asked.modes,
        *asked.sizes,
        contexts,
        asked.loads,
        asked.timed_rounds,
        asked.law,
        not asked.no_prefix_cache,
        asked.decodings,
        asked.drafting or "always",
    )
    with _machine(asked.link, _gang_config(asked), degrees) as (machine, gpus):
        assert gpus is not None
        _measure_prompts(plan, machine, gpus, asked.json) if asked.prompts else _measure_speed(
            plan, machine, gpus, asked
        )


def _bench_prompts(asked: BenchOptions) -> None:
    """How soon answers begin, on a CPU."""
    idle = asked.named("load", "mode", "trace", "drafting", *LAW) | {"link": asked.link and asked.link[0]}
    refuse_idle(idle | asked.named("draft_tp", "target_tp"), "with --prompts on a CPU")
    asked.check({}, asked.json)
    contexts = asked.context or ttft.SHORT_CONTEXTS
    modes = ("plain", "lookahead")
    plan = SpeedPlan(
        (1, 1), modes, *asked.sizes, contexts, asked.loads, asked.timed_rounds, {}, decodings=[asked.decoding]
    )
    _measure_prompts(plan, _cpu_machine(asked), 2, asked.json)


def _bench_rounds(asked: BenchOptions) -> None:
    """Where the time of a round goes, on a CPU."""
    refuse_idle(asked.named("load", "mode", "context", "trace", "drafting", *LAW), "without --device cuda")
    (particles, *more), blocks, branches = asked.sizes
    if more:
        raise ValueError(
            f"--particles {' '.join(map(str, (particles, *more)))}; allowed without --device cuda: one value"
        )
    asked.check(asked.named("draft_tp", "target_tp"), asked.json)
    configs = [replace(config, prefix_cache=not asked.no_prefix_cache) for config in _configs(blocks, branches)]
    sampling, rounds = {"particles": particles, **asked.decoding}, asked.timed_rounds
    rows: list[Any]
    if asked.link:
        config = gang.gang_config(asked.named(*PLACES, "draft_tp", "target_tp", "threads", *OWN))
        rows = _measure_gangs(
            [replace(config, link=name) for name in asked.link], configs, asked.loads, sampling, rounds
        )
        out.print(gang_table(rows), GANG_LEGEND.format(particles=particles), sep="\n")
    else:
        rows = measure_rounds(_cpu_pair(asked), configs, asked.loads, sampling, rounds)
        out.print(round_table(rows), LOCAL_LEGEND.format(particles=particles, rounds=rounds), sep="\n")
    out.print(*curve_tables(seen_of_rounds(rows)), CURVES_LEGEND, sep="\n")
    _write(asked.json, rows)


def _write(json: Path | None, rows: Sequence[Any]) -> None:
    if json is not None:
        json.write_text(json_module.dumps([asdict(row) for row in rows], indent=1) + "\n")


def _configs(blocks: Sequence[int], branches: Sequence[int]) -> list[EngineConfig]:
    from smc.api.engine_config import EngineConfig

    lockstep = [EngineConfig(form="lockstep", block=block) for block in blocks]
    return lockstep + [EngineConfig(block=block, branches=count) for block in blocks for count in branches]


def _measure_gangs(
    gangs: Sequence[GangConfig],
    configs: Sequence[EngineConfig],
    concurrency: Sequence[int],
    sampling: dict[str, Any],
    rounds: int,
) -> list[GangRound]:
    from services.launch.measure import measure

    rows = []
    with progress_bar() as progress:
        task = progress.add_task("rounds", total=len(gangs) * len(configs) * len(concurrency))
        for config in gangs:
            rows += measure(config, list(configs), list(concurrency), sampling, rounds, lambda: progress.advance(task))
    return rows


def _gang_config(asked: BenchOptions) -> GangConfig:
    """What is wrong with it is told before torch is imported."""
    return gang.gang_config(asked.named("load", *PLACES, "device", "threads", *OWN))


@contextmanager
def _machine(
    link: Sequence[str] | None, config: GangConfig, degrees: tuple[int, int]
) -> Iterator[tuple[Machine, int | None]]:
    """With how many GPUs there are (None on a CPU): in this process, or with `link` each rank in one of its own.
    `degrees`: of draft and target, where each has its own."""
    from services.launch.measure import GangMachine
    from smc.evaluation.machine import LocalMachine
    from smc.loading import LoadedModels

    gpus = count_gpus() if config.device == "cuda" else None
    models = LoadedModels(config.sources, config.dtypes)
    here = LocalMachine(models.model, models.tokenizer, models.draft_head)
    if not link:
        yield here, gpus
        return
    if len(link) > 1:
        raise ValueError(f"--link {' '.join(link)}; allowed here: one")
    draft, target = degrees
    with closing(GangMachine(replace(config, link=link[0], draft_tp=draft, target_tp=target), gpus)) as apart:
        yield (Machines(here, apart) if gpus else apart), gpus


def _cpu_pair(asked: BenchOptions) -> ModelPair:
    from smc.loading import load_pair, pair_places, use_threads

    found = pair_places(asked.target, asked.draft)
    use_threads(asked.threads, found)
    return load_pair(found, "cpu", None, **asked.named(*OWN))


def _cpu_machine(asked: BenchOptions) -> PairMachine:
    from smc.evaluation.ttft import PairMachine

    return PairMachine(_cpu_pair(asked))


def _measure_speed(plan: SpeedPlan, machine: Machine, gpus: int, asked: BenchOptions) -> None:
    # After every line, rather than after an hour.
    rows = measure_speed(plan, machine, gpus, asked.trace, lambda found: _write(asked.json, found))
    out.print(speed_table(rows), SPEED_LEGEND.format(rounds=plan.rounds), sep="\n")
    if tables := curve_tables(seen_of_speeds(rows, plan.drafting)):
        out.print(*tables, CURVES_LEGEND, sep="\n")


def _measure_prompts(plan: SpeedPlan, machine: PromptMachine, gpus: int, json: Path | None) -> None:
    from smc.evaluation.ttft import REPEATS

    rows = ttft.measure(replace(plan, concurrency=(0, *plan.concurrency)), machine, gpus)
    out.print(ttft.first_token_table(rows), ttft.LEGEND.format(repeats=REPEATS, rounds=plan.rounds), sep="\n")
    _write(json, rows)
