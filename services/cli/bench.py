"""`smcserve bench`: how fast a pair decodes on GPUs; on a CPU, where the time of a round goes; on either, how soon answers begin."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.box import SIMPLE_HEAD
from rich.table import Table

from services.cli import gang, options, ttft
from services.cli.speed import APART, MODES, Machines, SpeedPlan, count_gpus, speed_table
from services.cli.speed import LEGEND as SPEED_LEGEND
from services.cli.speed import measure as measure_speed
from services.cli.terminal import out, progress_bar

if TYPE_CHECKING:
    from services.launch.config import GangConfig
    from services.launch.measure import GangRound
    from smc.evaluation.round_time import RoundTime
    from smc.evaluation.speed import Machine
    from smc.evaluation.ttft import PairMachine, PromptMachine
    from smc.runtime.config import EngineConfig

LOCAL_LEGEND = (
    "N={particles}, medians of {rounds} rounds, milliseconds, both models in one process. tokens: by which an answer grew in a round; "
    "draft, target: forward passes, laws and draws; host: all that is neither, which on an accelerator is done while the models run."
)
GANG_LEGEND = (
    "N={particles}, medians, milliseconds, each model in its own process. draft, target: at work; link: nobody at work, messages on "
    "their way; coordinator: planning and bookkeeping; stalls: a group without work."
)


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
        options.option(options.MEASURE, "Prompt tokens; may be repeated (cuda, or with --prompts). Default: 256.", metavar="TOKENS"),
    ] = None,
    prompts: Annotated[
        bool,
        options.option(
            options.MEASURE,
            "Time to the first token, alone and beside --concurrency requests, new and cached. Default of --context: 256, 4k, 16k, 64k.",
            "--prompts",
        ),
    ] = False,
    method: Annotated[str, options.option(options.SAMPLING, "Of all modes but plain decoding.", metavar="smc|exact")] = "smc",
    population: options.Population = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    particles: Annotated[list[int], options.option(options.PARTICLES, "N; may be repeated on cuda.", "--particles", "-n", metavar="N")] = (
        8,
    ),
    block: options.BlockList = (8, 5),
    branches: options.BranchesList = (4,),
    concurrency: Annotated[
        list[int] | None,
        options.option(
            options.MEASURE,
            "Requests side by side; may be repeated. Default: 1 and 16, with --prompts 8.",
            "--concurrency",
            "-c",
            metavar="COUNT",
        ),
    ] = None,
    rounds: Annotated[int, options.option(options.MEASURE, "Rounds timed for each line of the table.", metavar="COUNT")] = 30,
    link: Annotated[
        list[str] | None,
        options.option(gang.CLUSTER, "Each model in its own process, over this link; may be repeated.", metavar="nccl|grpc"),
    ] = None,
    draft_tp: gang.DraftTp = None,
    target_tp: gang.TargetTp = None,
    no_prefix_cache: options.NoPrefixCache = False,
    threads: options.Threads = None,
    json: Annotated[Path | None, options.option(options.OUTPUT, "Write the numbers here.", metavar="FILE")] = None,
    trace: Annotated[
        Path | None, options.option(options.OUTPUT, "Write a Chrome trace of all timed rounds here (cuda only).", metavar="FILE")
    ] = None,
) -> None:
    """Measure speed: on GPUs answer tokens a second of every mode, on a CPU where the time of a round goes."""
    concurrency = concurrency or (ttft.BESIDE if prompts else (1, 16))
    decoding = _decoding(method, population)
    law = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    on_gpu = {"load": load, "mode": mode, "context": context, "trace": trace, **law}
    own = {"target_dtype": target_dtype, "draft_dtype": draft_dtype, "draft_vocab": draft_vocab, "draft_vocab_text": draft_vocab_text}
    gang_only = {"draft_tp": draft_tp, "target_tp": target_tp, "threads": threads}
    if device == "cuda":
        _check(concurrency, rounds, json, {} if link else gang_only, trace)
        degrees = (draft_tp or 1, target_tp or 1)
        law = {name: value for name, value in law.items() if value is not None}
        modes = mode or (APART if link else MODES)
        if prompts:
            _refuse_idle({"trace": trace}, "with --prompts")
        elif load == "grown":
            _refuse_idle({"context": context}, "with --load grown, whose prompts are problems")
        contexts = context or ttft.CONTEXTS if prompts else () if load == "grown" else context or (256,)
        plan = SpeedPlan(degrees, modes, particles, block, branches, contexts, concurrency, rounds, law, not no_prefix_cache, decoding)
        given = {"load": load, "target": target, "draft": draft, "device": device, "threads": threads, **own}
        with _machine(plan, gang.gang_config(given), link) as (machine, gpus):
            _measure_prompts(plan, machine, gpus, json) if prompts else _measure_speed(plan, machine, gpus, json, trace)
        return
    if prompts:
        _refuse_idle({**on_gpu, "context": None, "link": link and link[0]} | gang_only | {"threads": None}, "with --prompts on a CPU")
        _check(concurrency, rounds, json, {})
        places, contexts = (target, draft), context or ttft.SHORT_CONTEXTS
        plan = SpeedPlan((1, 1), ("plain", "lookahead"), particles, block, branches, contexts, concurrency, rounds, {}, True, decoding)
        _measure_prompts(plan, _cpu_machine(places, threads, own), 2, json)
        return
    _refuse_idle(on_gpu, "without --device cuda")
    if len(particles) > 1:
        raise ValueError(f"--particles {' '.join(map(str, particles))}; allowed without --device cuda: one value")
    sampling = {"particles": particles[0], **decoding}
    _check(concurrency, rounds, json, {"draft_tp": draft_tp, "target_tp": target_tp} if not link else {})
    configs = [replace(config, prefix_cache=not no_prefix_cache) for config in _configs(block, branches)]
    if link:
        given = {"target": target, "draft": draft, "draft_tp": draft_tp, "target_tp": target_tp, "threads": threads, **own}
        rows = _measure_gangs([replace(gang.gang_config(given), link=name) for name in link], configs, concurrency, sampling, rounds)
        out.print(gang_table(rows), GANG_LEGEND.format(particles=particles[0]), sep="\n")
    else:
        rows = _measure_local((target, draft), configs, concurrency, sampling, rounds, threads, own)
        out.print(round_table(rows), LOCAL_LEGEND.format(particles=particles[0], rounds=rounds), sep="\n")
    _write(json, rows)


def _decoding(method: str, population: str | None) -> dict[str, str]:
    from smc.engine.request import SamplingParams

    if method not in ("smc", "exact"):
        raise ValueError(f"--method {method}; allowed: smc, exact (plain decoding is a mode of its own)")
    given = {"method": method} | ({} if population is None else {"population": population})
    SamplingParams(**given)
    return given


def _write(json: Path | None, rows: Sequence[object]) -> None:
    if json is not None:
        json.write_text(json_module.dumps([asdict(row) for row in rows], indent=1) + "\n")


def round_table(times: Sequence[RoundTime]) -> Table:
    table = _table("decoding", "form", "K", "F", "requests", "tokens", "round ms", "draft", "target", "host")
    for time in times:
        shape = (str(value) for value in (time.block, time.branches, time.requests))
        parts = (time.draft, time.target, time.host)
        table.add_row(time.decoding, time.form, *shape, f"{time.tokens:.1f}", *(f"{part:.2f}" for part in (sum(parts), *parts)))
    return table


def gang_table(rows: Sequence[GangRound]) -> Table:
    columns = ("round ms", "draft", "target", "link", "coordinator", "draft stall", "target stall")
    table = _table("link", "decoding", "form", "K", "F", "requests", *columns)
    for row in rows:
        shape = (str(value) for value in (row.block, row.branches, row.requests))
        parts = (row.whole, row.draft, row.target, row.link_time, row.coordinator, row.draft_stall, row.target_stall)
        table.add_row(row.link, row.decoding, row.form, *shape, *(f"{part:.2f}" for part in parts))
    return table


def _table(*headers: str) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=0)
    for header in headers:
        words = header in ("decoding", "form", "link")
        table.add_column(header.replace(" ", "\n", 1), justify="left" if words else "right", no_wrap=True)
    return table


def _check(concurrency: Sequence[int], rounds: int, json: Path | None, idle: dict[str, int | None], trace: Path | None = None) -> None:
    for name, values in (("concurrency", concurrency), ("rounds", [rounds])):
        if min(values) < 1:
            raise ValueError(f"--{name} {min(values)}; allowed: >= 1")
    for path in filter(None, (json, trace)):
        if not path.absolute().parent.is_dir():
            raise ValueError(f"cannot write {path}: its directory does not exist")
    _refuse_idle(idle, "without --link")


def _refuse_idle(given: dict[str, object], where: str) -> None:
    """Settings that would have no effect."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"--{name.replace('_', '-')} {value} has no effect {where}; leave it out")


def _configs(blocks: Sequence[int], branches: Sequence[int]) -> list[EngineConfig]:
    from smc.runtime.config import EngineConfig

    lockstep = [EngineConfig(form="lockstep", block=block) for block in blocks]
    return lockstep + [EngineConfig(block=block, branches=count) for block in blocks for count in branches]


def _measure_local(
    places: tuple[Path | None, Path | None],
    configs: Sequence[EngineConfig],
    concurrency: Sequence[int],
    sampling: dict[str, object],
    rounds: int,
    threads: int | None,
    own: dict[str, object],
) -> list[RoundTime]:
    from services.cli.pair import load_pair, pair_places, use_threads
    from smc.evaluation.round_time import measure

    found = pair_places(*places)
    use_threads(threads, found)
    pair = load_pair(found, "cpu", None, **own)
    rows = []
    with progress_bar() as progress:
        task = progress.add_task("rounds", total=len(configs) * len(concurrency))
        for config in configs:
            for requests in concurrency:
                rows.append(measure(pair, config, requests, sampling, rounds))
                progress.advance(task)
    return rows


def _measure_gangs(
    gangs: Sequence[GangConfig], configs: Sequence[EngineConfig], concurrency: Sequence[int], sampling: dict[str, object], rounds: int
) -> list[GangRound]:
    from services.launch.measure import measure

    rows = []
    with progress_bar() as progress:
        task = progress.add_task("rounds", total=len(gangs) * len(configs) * len(concurrency))
        for config in gangs:
            rows += measure(config, list(configs), list(concurrency), sampling, rounds, lambda: progress.advance(task))
    return rows


@contextmanager
def _machine(plan: SpeedPlan, config: GangConfig, link: list[str] | None) -> Iterator[tuple[Machine, int]]:
    """With how many GPUs there are: in this process, or with `link` each rank in one of its own."""
    from services.cli.pair import LoadedModels
    from services.launch.measure import GangMachine
    from smc.evaluation.speed import LocalMachine

    gpus = count_gpus()
    models = LoadedModels(config.sources, config.dtypes)
    here = LocalMachine(models.model, models.tokenizer, models.draft_head)
    if not link:
        yield here, gpus
        return
    if len(link) > 1:
        raise ValueError(f"--link {' '.join(link)}; allowed with --device cuda: one")
    draft, target = plan.degrees
    with closing(GangMachine(replace(config, link=link[0], draft_tp=draft, target_tp=target), gpus)) as apart:
        yield Machines(here, apart), gpus


def _cpu_machine(places: tuple[Path | None, Path | None], threads: int | None, own: dict[str, object]) -> PairMachine:
    from services.cli.pair import load_pair, pair_places, use_threads
    from smc.evaluation.ttft import PairMachine

    found = pair_places(*places)
    use_threads(threads, found)
    return PairMachine(load_pair(found, "cpu", None, **own))


def _measure_speed(plan: SpeedPlan, machine: Machine, gpus: int, json: Path | None, trace: Path | None) -> None:
    rows = measure_speed(plan, machine, gpus, trace)
    out.print(speed_table(rows), SPEED_LEGEND.format(rounds=plan.rounds), sep="\n")
    _write(json, rows)


def _measure_prompts(plan: SpeedPlan, machine: PromptMachine, gpus: int, json: Path | None) -> None:
    from smc.evaluation.ttft import REPEATS

    rows = ttft.measure(replace(plan, concurrency=(0, *plan.concurrency)), machine, gpus)
    out.print(ttft.first_token_table(rows), ttft.LEGEND.format(repeats=REPEATS, rounds=plan.rounds), sep="\n")
    _write(json, rows)
