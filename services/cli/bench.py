"""`smcserve bench`: how fast a pair decodes on GPUs; on a CPU, where the time of a round goes; on either, how soon answers begin."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from services.cli import gang, options
from smc.evaluation.reports import advise as advising
from smc.evaluation.reports import ttft
from smc.evaluation.reports.costs import CURVES_LEGEND, curve_tables, seen_of_rounds, seen_of_speeds
from smc.evaluation.reports.rounds import GANG_LEGEND, LOCAL_LEGEND, gang_table, measure_rounds, round_table
from smc.evaluation.reports.speed import APART, MODES, Machines, SpeedPlan, count_gpus, speed_table
from smc.evaluation.reports.speed import LEGEND as SPEED_LEGEND
from smc.evaluation.reports.speed import measure as measure_speed
from smc.terminal import out, progress_bar

if TYPE_CHECKING:
    from services.launch.config import GangConfig
    from smc.engine.local import ModelPair
    from smc.evaluation.round_time import GangRound
    from smc.evaluation.speed import Machine
    from smc.evaluation.ttft import PairMachine, PromptMachine
    from smc.runtime.config import EngineConfig

ROUNDS = 30


def bench(
    target: options.Target = None,
    draft: options.Draft = None,
    device: options.Device = "cpu",
    target_dtype: options.TargetDtype = None,
    draft_dtype: options.DraftDtype = None,
    draft_vocab: options.DraftVocab = None,
    draft_vocab_text: options.DraftVocabText = None,
    load: Annotated[
        str | None,
        options.option(
            options.MODELS,
            "random: shapes named by --target, --draft; grown: the demo pair inside such shapes, with problems as prompts (cuda only).",
            metavar="files|random|grown",
        ),
    ] = None,
    mode: Annotated[
        list[str] | None, options.option(options.MEASURE, f"Of {', '.join(MODES)}; may be repeated (cuda only).", "--mode", metavar="MODE")
    ] = None,
    context: Annotated[
        list[int] | None,
        options.option(
            options.MEASURE, "Prompt tokens; may be repeated (cuda, --prompts). Of --advise: of contexts. Default: 256.", metavar="TOKENS"
        ),
    ] = None,
    prompts: Annotated[
        bool,
        options.option(
            options.MEASURE,
            "Time to the first token, alone and beside --concurrency requests, new and cached. Default of --context: 256, 4k, 16k, 64k.",
            "--prompts",
        ),
    ] = False,
    advise: options.Advise = False,
    gpus: options.Gpus = None,
    acceptance: options.AcceptanceOfOne = None,
    method: Annotated[
        str | None, options.option(options.SAMPLING, "Of all modes but plain decoding. Default: smc.", metavar="smc|exact")
    ] = None,
    population: Annotated[str | None, options.sampling_option("population")] = None,
    verification: Annotated[str | None, options.sampling_option("verification")] = None,
    guidance_scale: Annotated[float | None, options.sampling_option("guidance_scale")] = None,
    temperature: Annotated[float | None, options.sampling_option("temperature")] = None,
    top_k: Annotated[int | None, options.sampling_option("top_k")] = None,
    top_p: Annotated[float | None, options.sampling_option("top_p")] = None,
    min_p: Annotated[float | None, options.sampling_option("min_p")] = None,
    particles: options.ParticlesList = None,
    block: options.BlockList = None,
    branches: options.BranchesList = None,
    concurrency: Annotated[
        list[int] | None,
        options.option(
            options.MEASURE,
            "Requests side by side; may be repeated. Default: 1 and 16, with --prompts 8, with --advise 1, 8 and 64.",
            "--concurrency",
            "-c",
            metavar="COUNT",
        ),
    ] = None,
    rounds: Annotated[
        int | None, options.option(options.MEASURE, f"Rounds timed for each line of the table. Default: {ROUNDS}.", metavar="COUNT")
    ] = None,
    link: Annotated[
        list[str] | None,
        options.option(gang.CLUSTER, "Each model in its own process, over this link; may be repeated.", metavar="nccl|grpc"),
    ] = None,
    draft_tp: gang.DraftTp = None,
    target_tp: gang.TargetTp = None,
    drafting: Annotated[
        str | None,
        options.option(
            options.ENGINE,
            "For exact decoding: as much as its cost, timed first, pays for, or always all of the tree (cuda only). Default: always.",
            "--drafting",
            metavar="costs|always",
        ),
    ] = None,
    no_prefix_cache: options.NoPrefixCache = False,
    threads: options.Threads = None,
    json: Annotated[Path | None, options.option(options.OUTPUT, "Write the numbers here.", metavar="FILE")] = None,
    trace: Annotated[
        Path | None, options.option(options.OUTPUT, "Write a Chrome trace of all timed rounds here (cuda only).", metavar="FILE")
    ] = None,
    picture: Annotated[Path | None, options.option(options.OUTPUT, "Draw what --advise foretells (png).", metavar="FILE")] = None,
) -> None:
    """Measure speed: on GPUs answer tokens a second of every mode, on a CPU where the time of a round goes."""
    law = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "guidance_scale": guidance_scale}
    on_gpu = {"load": load, "mode": mode, "context": context, "trace": trace, "drafting": drafting, **law}
    own = {"target_dtype": target_dtype, "draft_dtype": draft_dtype, "draft_vocab": draft_vocab, "draft_vocab_text": draft_vocab_text}
    gang_only = {"draft_tp": draft_tp, "target_tp": target_tp, "threads": threads}
    if advise:
        how = {"method": method, "population": population, "verification": verification, "guidance_scale": guidance_scale}
        idle = {"mode": mode, "prompts": prompts or None, "rounds": rounds, "draft_tp": draft_tp, "trace": trace}
        _refuse_idle(idle | how | {"drafting": drafting}, "with --advise")
        if context and len(context) > 1:
            raise ValueError(f"--context {' '.join(map(str, context))}; allowed with --advise: one")
        wanted = {"loads": concurrency, "particles": particles, "branches": branches, "blocks": block, "acceptance": acceptance}
        wanted |= {"context": context[0] if context else 256}
        law = {name: value for name, value in law.items() if value is not None}
        given = {"load": load, "target": target, "draft": draft, "device": device, "threads": threads, **own}
        _check(concurrency or (1,), 1, json, {} if link else {"target_tp": target_tp}, picture)
        _advise({**wanted, "law": law, "json": json, "picture": picture}, given, gpus, target_tp, link)
        return
    _refuse_idle({"gpus": gpus, "acceptance": acceptance, "picture": picture}, "without --advise")
    if load == "grown" and guidance_scale not in (None, 1):
        raise ValueError(
            f"--guidance-scale {guidance_scale:g} has laws that are not the small pair's with --load grown, whose further tokens come to "
            "be drawn; allowed: --load random, or files"
        )
    particles, block, branches = particles or [8], block or [8, 5], branches or [4]
    rounds = ROUNDS if rounds is None else rounds
    concurrency = concurrency or list(ttft.BESIDE if prompts else (1, 16))
    decoding = _decoding(method or "smc", population, verification)
    if method != "exact" or verification == "rejection":
        _refuse_idle({"drafting": drafting}, "without --method exact" if method != "exact" else "with --verification rejection")
    if device == "cuda":
        _check(concurrency, rounds, json, {} if link else gang_only, trace)
        degrees = (draft_tp or 1, target_tp or 1)
        law = {name: value for name, value in law.items() if value is not None}
        modes = mode or (APART if link else MODES)
        if prompts:
            _refuse_idle({"trace": trace, "drafting": drafting}, "with --prompts")
        elif load == "grown":
            _refuse_idle({"context": context}, "with --load grown, whose prompts are problems")
        contexts = context or ttft.CONTEXTS if prompts else () if load == "grown" else context or (256,)
        plan = SpeedPlan(
            degrees,
            modes,
            particles,
            block,
            branches,
            contexts,
            concurrency,
            rounds,
            law,
            not no_prefix_cache,
            decoding,
            drafting or "always",
        )
        given = {"load": load, "target": target, "draft": draft, "device": device, "threads": threads, **own}
        with _machine(degrees, gang.gang_config(given), link) as (machine, count):
            assert count is not None
            _measure_prompts(plan, machine, count, json) if prompts else _measure_speed(plan, machine, count, json, trace)
        return
    if prompts:
        _refuse_idle({**on_gpu, "context": None, "link": link and link[0]} | gang_only | {"threads": None}, "with --prompts on a CPU")
        _check(concurrency, rounds, json, {})
        places = (target, draft)
        short = context or ttft.SHORT_CONTEXTS
        plan = SpeedPlan((1, 1), ("plain", "lookahead"), particles, block, branches, short, concurrency, rounds, {}, decoding=decoding)
        _measure_prompts(plan, _cpu_machine(places, threads, own), 2, json)
        return
    _refuse_idle(on_gpu, "without --device cuda")
    if len(particles) > 1:
        raise ValueError(f"--particles {' '.join(map(str, particles))}; allowed without --device cuda: one value")
    sampling = {"particles": particles[0], **decoding}
    _check(concurrency, rounds, json, {"draft_tp": draft_tp, "target_tp": target_tp} if not link else {})
    configs = [replace(config, prefix_cache=not no_prefix_cache) for config in _configs(block, branches)]
    rows: list[Any]
    if link:
        given = {"target": target, "draft": draft, "draft_tp": draft_tp, "target_tp": target_tp, "threads": threads, **own}
        rows = _measure_gangs([replace(gang.gang_config(given), link=name) for name in link], configs, concurrency, sampling, rounds)
        out.print(gang_table(rows), GANG_LEGEND.format(particles=particles[0]), sep="\n")
    else:
        rows = measure_rounds(_cpu_pair((target, draft), threads, own), configs, concurrency, sampling, rounds)
        out.print(round_table(rows), LOCAL_LEGEND.format(particles=particles[0], rounds=rounds), sep="\n")
    out.print(*curve_tables(seen_of_rounds(rows)), CURVES_LEGEND, sep="\n")
    _write(json, rows)


def _decoding(method: str, population: str | None, verification: str | None) -> dict[str, str]:
    from smc.engine.request import SamplingParams

    if method not in ("smc", "exact"):
        raise ValueError(f"--method {method}; allowed: smc, exact (plain decoding is a mode of its own)")
    own = {"population": population, "verification": verification}
    given: dict[str, Any] = {"method": method} | {name: value for name, value in own.items() if value is not None}
    SamplingParams(**given)
    return given


def _write(json: Path | None, rows: Sequence[Any]) -> None:
    if json is not None:
        json.write_text(json_module.dumps([asdict(row) for row in rows], indent=1) + "\n")


def _check(concurrency: Sequence[int], rounds: int, json: Path | None, idle: dict[str, Any], trace: Path | None = None) -> None:
    for name, values in (("concurrency", concurrency), ("rounds", [rounds])):
        if min(values) < 1:
            raise ValueError(f"--{name} {min(values)}; allowed: >= 1")
    for path in filter(None, (json, trace)):
        if not path.absolute().parent.is_dir():
            raise ValueError(f"cannot write {path}: its directory does not exist")
    _refuse_idle(idle, "without --link")


def _refuse_idle(given: dict[str, Any], where: str) -> None:
    """Settings that would have no effect."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"--{name.replace('_', '-')} {value} has no effect {where}; leave it out")


def _configs(blocks: Sequence[int], branches: Sequence[int]) -> list[EngineConfig]:
    from smc.runtime.config import EngineConfig

    lockstep = [EngineConfig(form="lockstep", block=block) for block in blocks]
    return lockstep + [EngineConfig(block=block, branches=count) for block in blocks for count in branches]


def _measure_gangs(
    gangs: Sequence[GangConfig], configs: Sequence[EngineConfig], concurrency: Sequence[int], sampling: dict[str, Any], rounds: int
) -> list[GangRound]:
    from services.launch.measure import measure

    rows = []
    with progress_bar() as progress:
        task = progress.add_task("rounds", total=len(gangs) * len(configs) * len(concurrency))
        for config in gangs:
            rows += measure(config, list(configs), list(concurrency), sampling, rounds, lambda: progress.advance(task))
    return rows


def _advise(wanted: dict[str, Any], given: dict[str, Any], gpus: int | None, target_tp: int | None, link: list[str] | None) -> None:
    """`wanted`: of `AdvisePlan`, by name; `given`: what the models are, and where."""
    on_gpu = given["device"] == "cuda"
    there = count_gpus() if on_gpu else None
    gpus = (there or 2) if gpus is None else gpus
    most = 1 if not link else gpus if there is None else min(gpus, there)
    degrees = [target_tp] if target_tp else [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    plan = advising.AdvisePlan(gpus=gpus, degrees=degrees, **{**wanted, "loads": wanted["loads"] or advising.LOADS})
    if given["load"] == "random" and plan.acceptance is None:
        raise ValueError("--load random says nothing of what is accepted; give --acceptance")
    if not on_gpu:
        _refuse_idle({"load": given["load"]}, "without --device cuda")
    if not on_gpu and not link:
        own = {name: given[name] for name in ("target_dtype", "draft_dtype", "draft_vocab", "draft_vocab_text")}
        advising.run(plan, _cpu_machine((given["target"], given["draft"]), given["threads"], own), compiles=False)
        return
    apart = (1, max((degree for degree in degrees if degree < gpus), default=1))
    with _machine(apart, gang.gang_config(given), link) as (machine, _):
        advising.run(plan, machine, compiles=on_gpu)


@contextmanager
def _machine(degrees: tuple[int, int], config: GangConfig, link: list[str] | None) -> Iterator[tuple[Machine, int | None]]:
    """With how many GPUs there are (None on a CPU): in this process, or with `link` each rank in one of its own. `degrees`: of draft and
    target, where each has its own."""
    from services.launch.measure import GangMachine
    from smc.evaluation.speed import LocalMachine
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


def _cpu_pair(places: tuple[Path | None, Path | None], threads: int | None, own: dict[str, Any]) -> ModelPair:
    from smc.loading import load_pair, pair_places, use_threads

    found = pair_places(*places)
    use_threads(threads, found)
    return load_pair(found, "cpu", None, **own)


def _cpu_machine(places: tuple[Path | None, Path | None], threads: int | None, own: dict[str, Any]) -> PairMachine:
    from smc.evaluation.ttft import PairMachine

    return PairMachine(_cpu_pair(places, threads, own))


def _measure_speed(plan: SpeedPlan, machine: Machine, gpus: int, json: Path | None, trace: Path | None) -> None:
    # After every line, rather than after an hour.
    rows = measure_speed(plan, machine, gpus, trace, lambda found: _write(json, found))
    out.print(speed_table(rows), SPEED_LEGEND.format(rounds=plan.rounds), sep="\n")
    out.print(*curve_tables(seen_of_speeds(rows)), CURVES_LEGEND, sep="\n")


def _measure_prompts(plan: SpeedPlan, machine: PromptMachine, gpus: int, json: Path | None) -> None:
    from smc.evaluation.ttft import REPEATS

    rows = ttft.measure(replace(plan, concurrency=(0, *plan.concurrency)), machine, gpus)
    out.print(ttft.first_token_table(rows), ttft.LEGEND.format(repeats=REPEATS, rounds=plan.rounds), sep="\n")
    _write(json, rows)
