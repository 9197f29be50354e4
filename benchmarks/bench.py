"""`smcserve bench`: measures the decoding speed of a pair on GPUs, the parts of a round's time on a CPU, and on either
the time to the first token."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from benchmarks.reports.advise import LOADS as ADVISE_LOADS
from benchmarks.reports.advise import AdvisePlan
from benchmarks.reports.advise import run as run_advice
from benchmarks.reports.speed import (
    APART,
    CURVES_LEGEND,
    KERNELS,
    LOCAL_LEGEND,
    MODES,
    NUMERICS_LEGEND,
    PROCESS_LEGEND,
    PROMPT_CONTEXTS,
    PROMPT_LEGEND,
    PROMPTS_BESIDE,
    SHORT_PROMPT_CONTEXTS,
    SPEED_LEGEND,
    WIDE,
    SpeedPlan,
    count_gpus,
    curve_tables,
    first_token_table,
    latency_of_rounds,
    latency_of_speeds,
    measure_prompts,
    measure_speed,
    process_round_table,
    round_table,
    speed_table,
    time_rounds,
)
from services.cli import options, service_options
from services.cli.options import with_options
from smc.api.engine_config import EngineConfig
from smc.api.sampling_params import SamplingParams
from smc.api.settings import CLUSTER
from smc.terminal import out, progress_bar
from smc.types import Numerics

if TYPE_CHECKING:
    from benchmarks.backends import BenchBackend, CpuBackend, PromptBackend
    from benchmarks.problem_file import FileProblem
    from benchmarks.process_rounds import ProcessRoundTime
    from benchmarks.processes import ProcessBackend
    from services.launch.config import WorkerGroupConfig
    from smc.local_engine import ModelPair

ROUNDS = 30
DISTRIBUTION = ("temperature", "top_k", "top_p", "min_p", "guidance_scale")
"""Options of the distribution that tokens are drawn from."""
OF_METHOD = {"smc": "population", "exact": "verification"}
"""Method -> the option that only this method has."""
OWN = ("target_dtype", "draft_dtype", "draft_vocab", "draft_vocab_text")
"""Options for data types of the models and for the draft vocabulary."""
MODELS = ("target", "draft")

ParticlesList = Annotated[
    list[int] | None,
    options.option(
        options.PARTICLES,
        "Value of N; may be repeated on cuda, and with --advise. Default: 8, with --advise 1 to 32.",
        "--particles",
        "-n",
        metavar="N",
    ),
]
BlockList = Annotated[
    list[int] | None,
    options.option(
        options.ENGINE,
        "Value of K; may be repeated. Default: 8 and 5, with --advise 1 to 16.",
        "--block",
        "-k",
        metavar="K",
    ),
]
BranchesList = Annotated[
    list[int] | None,
    options.option(
        options.ENGINE,
        "Value of F in look-ahead; may be repeated. Default: 4, with --advise 1 to 8.",
        "--branches",
        "-f",
        metavar="F",
    ),
]
NumericsList = Annotated[
    list[str] | None,
    options.option(
        options.ENGINE,
        "Order of sums on GPUs; may be repeated on cuda. The table and the JSON file name the one that ran. "
        f"Default: {EngineConfig().numerics}.",
        metavar="|".join(Numerics),
    ),
]
Advise = Annotated[
    bool,
    options.flag(
        options.MEASURE,
        "Time both models at every number of GPUs, run the best divisions of --gpus, and print and store which one, "
        "with which N, F and K, decodes --concurrency requests fastest (exact decoding).",
        "--advise",
    ),
]
Gpus = Annotated[
    int | None,
    options.option(
        options.MEASURE,
        "Number of GPUs to divide between the models, with --advise. Default: all of this machine; 2 on a CPU.",
        metavar="COUNT",
    ),
]
AcceptanceOfOne = Annotated[
    float | None,
    options.option(
        options.MEASURE,
        "Probability that a single drafted row contains the target's next token, with --advise. "
        "Default: measured on problems.",
        "--acceptance",
        metavar="P",
    ),
]


@dataclass(frozen=True)
class BenchOptions:
    """Options of `smcserve bench`. Options that were not given are None, or False."""

    target: options.Target = None
    draft: options.Draft = None
    device: options.Device = "cpu"
    target_dtype: options.TargetDtype = None
    draft_dtype: options.DraftDtype = None
    draft_vocab: options.DraftVocab = None
    draft_vocab_text: options.DraftVocabText = None
    load: Annotated[
        str | None,
        options.option(
            options.MODELS,
            "Models to load, cuda only. files: --target and --draft; random: random weights in the "
            "shapes named by --target and --draft; grown: the demo pair inside such shapes, with "
            "problems as prompts. Default: files.",
            metavar="files|random|grown",
        ),
    ] = None
    mode: Annotated[
        list[str] | None,
        options.option(
            options.MEASURE,
            f"Mode to measure: {', '.join(MODES)}, and with --link {WIDE} (plain on all GPUs of both models); may be "
            f"repeated, cuda only. Default: {', '.join(MODES)}; with --link {', '.join(APART)}.",
            metavar="MODE",
        ),
    ] = None
    context: Annotated[
        list[int] | None,
        options.option(
            options.MEASURE,
            "Number of prompt tokens, on cuda or with --prompts; may be repeated. With --advise, number "
            "of tokens of each context. Default: 256.",
            metavar="TOKENS",
        ),
    ] = None
    prompts: Annotated[
        bool,
        options.option(
            options.MEASURE,
            "Measure the time to the first token of new and cached prompts, alone and beside "
            "--concurrency requests. --context is then by default 256, 4k, 16k and 64k; on a CPU 64 and "
            "256.",
            "--prompts",
        ),
    ] = False
    prompts_file: Annotated[
        list[Path] | None,
        options.option(
            options.MEASURE,
            "File of prompts, JSON lines as for `smcserve eval --problems`; may be repeated on cuda. Default: problems "
            "of the demo pair, or random tokens.",
            metavar="FILE",
        ),
    ] = None
    advise: Advise = False
    gpus: Gpus = None
    acceptance: AcceptanceOfOne = None
    method: Annotated[
        list[str] | None,
        options.option(
            options.SAMPLING,
            "Method of modes that use both models; may be repeated on cuda. Default: smc.",
            metavar="smc|exact",
        ),
    ] = None
    population: Annotated[str | None, options.option_of(SamplingParams, "population")] = None
    verification: Annotated[str | None, options.option_of(SamplingParams, "verification")] = None
    guidance_scale: Annotated[float | None, options.option_of(SamplingParams, "guidance_scale")] = None
    temperature: Annotated[
        list[float] | None,
        options.option(
            options.SAMPLING,
            "Temperature of the target distribution; 0 = greedy; may be repeated on cuda. Default: 1.",
            metavar="T",
        ),
    ] = None
    top_k: Annotated[int | None, options.option_of(SamplingParams, "top_k")] = None
    top_p: Annotated[float | None, options.option_of(SamplingParams, "top_p")] = None
    min_p: Annotated[float | None, options.option_of(SamplingParams, "min_p")] = None
    particles: ParticlesList = None
    block: BlockList = None
    branches: BranchesList = None
    concurrency: Annotated[
        list[int] | None,
        options.option(
            options.MEASURE,
            "Number of concurrent requests; may be repeated. Default: 1 and 16, with --prompts 8, with "
            "--advise 1, 8 and 64.",
            "--concurrency",
            "-c",
            metavar="COUNT",
        ),
    ] = None
    rounds: Annotated[
        int | None,
        options.option(
            options.MEASURE, f"Number of rounds timed for each line of the table. Default: {ROUNDS}.", metavar="COUNT"
        ),
    ] = None
    link: Annotated[
        list[str] | None,
        options.option(
            CLUSTER,
            "Link between the models, each of which then runs in its own process; may be repeated on a CPU.",
            metavar="nccl|grpc",
        ),
    ] = None
    draft_tp: options.DraftTp = None
    target_tp: options.TargetTp = None
    drafting: Annotated[
        str | None,
        options.option(
            options.ENGINE,
            "Tree size in exact decoding, cuda only. adaptive: the size that pays by the latency model; "
            "always: the whole tree of N rows. Default: always.",
            metavar="adaptive|always",
        ),
    ] = None
    verified: Annotated[str | None, options.option_of(EngineConfig, "verified")] = None
    redrafting: Annotated[str | None, options.option_of(EngineConfig, "redrafting")] = None
    numerics: NumericsList = None
    kernels: Annotated[
        list[str] | None,
        options.option(
            options.MEASURE,
            "Kernels of rounds; may be repeated, cuda without --link only. own: ours; library: matrix products of the "
            "GPU library, each kernel after the one before has ended, to show what ours bring. Default: own.",
            metavar="|".join(KERNELS),
        ),
    ] = None
    no_prefix_cache: options.NoPrefixCache = False
    threads: options.Threads = None
    json: Annotated[
        Path | None, options.option(options.OUTPUT, "Write the numbers to this file as JSON.", metavar="FILE")
    ] = None
    trace: Annotated[
        Path | None,
        options.option(
            options.OUTPUT, "Write a Chrome trace of all timed rounds to this file; cuda only.", metavar="FILE"
        ),
    ] = None
    picture: Annotated[
        Path | None, options.option(options.OUTPUT, "Draw the forecast of --advise to this PNG file.", metavar="FILE")
    ] = None

    def named(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    @property
    def distribution(self) -> dict[str, Any]:
        """The given settings of the target's distribution but the temperature, by their names in `SamplingParams`."""
        given = self.named(*DISTRIBUTION)
        return {name: value for name, value in given.items() if value is not None and name != "temperature"}

    @property
    def distribution_of_one(self) -> dict[str, Any]:
        """The given settings of the target's distribution. Raises ValueError for several temperatures."""
        if len(self.temperature or ()) > 1:
            temperatures = " ".join(f"{each:g}" for each in self.temperature or ())
            raise ValueError(f"--temperature {temperatures}; allowed here: one")
        return self.distribution | ({"temperature": self.temperature[0]} if self.temperature else {})

    @property
    def modes(self) -> Sequence[str]:
        """Modes on GPUs, each once, in the order given."""
        return tuple(dict.fromkeys(self.mode or (APART if self.link else MODES)))

    @property
    def all_numerics(self) -> Sequence[str]:
        """Orders of sums, each once, in the order given."""
        return tuple(dict.fromkeys(self.numerics or [EngineConfig().numerics]))

    @property
    def decodings(self) -> list[dict[str, Any]]:
        """The given settings of modes that use both models: a mapping by name in `SamplingParams` for each method. If
        there are several methods, each gets only the option that it has itself."""
        methods = list(dict.fromkeys(self.method or ["smc"]))
        given = {name: value for name, value in self.named(*OF_METHOD.values()).items() if value is not None}
        own = {
            method: given if len(methods) == 1 else {n: given[n] for n in given if n == OF_METHOD.get(method)}
            for method in methods
        }
        return [{"method": method, **own[method]} for method in methods]

    @property
    def decoding(self) -> dict[str, Any]:
        """The only one of `decodings`. Raises ValueError if there are more."""
        if len(self.decodings) > 1:
            raise ValueError(f"--method {' '.join(each['method'] for each in self.decodings)}; allowed here: one")
        return self.decodings[0]

    @property
    def sizes(self) -> tuple[list[int], list[int], list[int]]:
        """Particles, blocks and branches."""
        return self.particles or [8], self.block or [8, 5], self.branches or [4]

    @property
    def loads(self) -> list[int]:
        """Numbers of concurrent requests."""
        return self.concurrency or list(PROMPTS_BESIDE if self.prompts else (1, 16))

    @property
    def timed_rounds(self) -> int:
        return ROUNDS if self.rounds is None else self.rounds

    def check(self, idle: Mapping[str, Any], *paths: Path | None) -> None:
        """Check counts, orders of sums, and the files to be written. `idle`: settings that have no effect without
        --link. Raises ValueError."""
        for name, values in (("concurrency", self.loads), ("rounds", [self.timed_rounds])):
            if min(values) < 1:
                raise ValueError(f"--{name} {min(values)}; allowed: >= 1")
        for numerics in self.all_numerics:
            EngineConfig(numerics=numerics).check_numerics(self.device, self.target_dtype)
        for path in filter(None, paths):
            if not path.absolute().parent.is_dir():
                raise ValueError(f"cannot write {path}: its directory does not exist")
        if not self.link:
            refuse_idle(idle, "without --link")

    def check_decoding(self) -> None:
        """Raise ValueError for options that contradict the method or have no effect with it."""

        if self.load == "grown" and self.guidance_scale not in (None, 1):
            raise ValueError(
                f"--guidance-scale {self.guidance_scale:g} draws tokens that the small pair does not have with --load "
                "grown; allowed: --load random, or files"
            )
        for decoding in self.decodings:
            if decoding["method"] not in OF_METHOD:
                raise ValueError(
                    f"--method {decoding['method']}; allowed: {', '.join(OF_METHOD)} (plain decoding is a mode)"
                )
            SamplingParams(**decoding)
        if "exact" not in (self.method or ()):
            refuse_idle(self.named("drafting", "redrafting"), "without --method exact")
        elif self.verification == "rejection":
            refuse_idle(self.named("drafting", "redrafting"), "with --verification rejection")
        if self.drafting != "adaptive":
            refuse_idle(self.named("verified"), "without --drafting adaptive")


def refuse_idle(given: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for the settings in `given` that are not None: they have no effect here. `where`: the condition,
    for the message."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"--{name.replace('_', '-')} {value} has no effect {where}; leave it out")


@with_options(BenchOptions)
def bench(arguments: BenchOptions) -> None:
    """Measure speed: on GPUs the answer tokens per second of every mode, on a CPU the parts of a round's time."""
    where = "with --prompts" if arguments.prompts else "with --link"
    if arguments.prompts or (arguments.link and arguments.device != "cuda" and not arguments.advise):
        refuse_idle(arguments.named("prompts_file"), where)
    if arguments.advise:
        _advise(arguments)
        return
    refuse_idle(arguments.named("gpus", "acceptance", "picture"), "without --advise")
    arguments.check_decoding()
    if arguments.device == "cuda":
        _bench_gpus(arguments)
    elif arguments.prompts:
        _bench_prompts(arguments)
    else:
        _bench_rounds(arguments)


def _advise(arguments: BenchOptions) -> None:
    """Find the best division of GPUs, and print and store it."""
    idle = arguments.named("mode") | {"prompts": arguments.prompts or None}
    idle |= arguments.named("rounds", "trace", "method", "population", "verification", "guidance_scale")
    refuse_idle(idle | arguments.named("drafting", "redrafting", "verified", "numerics", "kernels"), "with --advise")
    if arguments.no_prefix_cache:
        raise ValueError("--no-prefix-cache has no effect with --advise; leave it out")
    if arguments.context and len(arguments.context) > 1:
        raise ValueError(f"--context {' '.join(map(str, arguments.context))}; allowed with --advise: one")
    on_gpu = arguments.device == "cuda"
    there = count_gpus() if on_gpu else None
    gpus = (there or 2) if arguments.gpus is None else arguments.gpus
    if on_gpu and gpus > 1 and not arguments.link:
        arguments = replace(arguments, link=["nccl"])
    arguments.check(arguments.named("draft_tp", "target_tp"), arguments.json, arguments.picture)
    for name, degree in arguments.named("draft_tp", "target_tp").items():
        if degree is not None and not 1 <= degree <= gpus:
            raise ValueError(f"--{name.replace('_', '-')} {degree}; allowed with {gpus} GPUs: 1..{gpus}")
    if arguments.load == "random" and arguments.acceptance is None:
        raise ValueError("--load random does not show what is accepted; give --acceptance")
    if not on_gpu:
        refuse_idle(arguments.named("load"), "without --device cuda")
    prompts = _file_of_one(arguments)
    config = _worker_group_config(arguments)
    plan = _advise_plan(arguments, config, gpus, min(gpus, there) if there else gpus)

    def run(backend: PromptBackend) -> None:
        tokens = [each.tokens(backend.tokenizer, raw=False) for each in prompts]
        run_advice(replace(plan, prompts=tokens), backend, config, compiles=on_gpu)

    if not arguments.link and not on_gpu:
        run(_cpu_backend(arguments))
    elif not arguments.link:
        with _backend(None, config, (1, 1)) as (backend, _):
            run(backend)
    else:
        with _process_backend(arguments.link, config, (1, 1), there) as apart:
            run(apart)


def _advise_plan(arguments: BenchOptions, config: WorkerGroupConfig, gpus: int, most: int) -> AdvisePlan:
    """Return the plan for --advise, without its prompts. `most`: number of GPUs that there are."""
    from services.launch.division import Degrees

    allowed = Degrees.of(config, most if arguments.link else 1)
    given = arguments.named("draft_tp", "target_tp")
    draft, target = (
        degrees if given[name] is None else tuple(each for each in degrees if each == given[name])
        for name, degrees in (("draft_tp", allowed.draft), ("target_tp", allowed.target))
    )
    for name, degrees in (("draft_tp", draft), ("target_tp", target)):
        if not degrees:
            raise ValueError(f"--{name.replace('_', '-')} {given[name]}: the model cannot be divided so; leave it out")
    return AdvisePlan(
        gpus=gpus,
        degrees=Degrees(draft, target),
        runs=bool(arguments.link) or gpus == 1,
        loads=arguments.concurrency or ADVISE_LOADS,
        context=arguments.context[0] if arguments.context else 256,
        particles=arguments.particles,
        branches=arguments.branches,
        blocks=arguments.block,
        acceptance=arguments.acceptance,
        distribution=arguments.distribution_of_one,
        prompts=(),
        json=arguments.json,
        picture=arguments.picture,
    )


def _bench_gpus(arguments: BenchOptions) -> None:
    """Measure tokens a second, or with --prompts the time to the first token."""
    arguments.check(arguments.named("draft_tp", "target_tp", "threads"), arguments.json, arguments.trace)
    contexts: Sequence[int] = arguments.context or (PROMPT_CONTEXTS if arguments.prompts else (256,))
    if arguments.link:
        refuse_idle(arguments.named("kernels"), "with --link")
    if arguments.prompts:
        refuse_idle(arguments.named("trace", "drafting", "redrafting", "kernels"), "with --prompts")
    elif arguments.load == "grown":
        refuse_idle(arguments.named("context"), "with --load grown, whose prompts are problems")
        contexts = ()
    if WIDE in (arguments.mode or ()) and not arguments.link:
        raise ValueError(f"--mode {WIDE} shares the target among processes; give --link")
    degrees = (arguments.draft_tp or 1, arguments.target_tp or 1)
    if "lookahead" not in arguments.modes:
        refuse_idle(arguments.named("redrafting"), "without --mode lookahead")
    plan = SpeedPlan(
        degrees,
        arguments.modes,
        *arguments.sizes,
        contexts,
        arguments.loads,
        arguments.timed_rounds,
        arguments.distribution_of_one if arguments.prompts else arguments.distribution,
        not arguments.no_prefix_cache,
        arguments.decodings,
        arguments.drafting or "always",
        temperatures=(None,) if arguments.prompts else arguments.temperature or (None,),
        verified=arguments.verified,
        redrafting=arguments.redrafting or "adaptive",
        numerics=arguments.all_numerics,
        kernels=tuple(dict.fromkeys(arguments.kernels or KERNELS[:1])),
    )
    prompts = _file_prompts(arguments)
    if prompts:
        refuse_idle(arguments.named("context"), "with --prompts-file, whose prompts have lengths of their own")
        plan = replace(plan, contexts=())
    with _backend(arguments.link, _worker_group_config(arguments), degrees) as (backend, gpus):
        assert gpus is not None
        if prompts:
            tokens = {
                name: [each.tokens(backend.tokenizer, raw=False) for each in problems]
                for name, problems in prompts.items()
            }
            plan = replace(plan, prompts=tokens)
        _measure_prompts(plan, backend, gpus, arguments.json) if arguments.prompts else _measure_speed(
            plan, backend, gpus, arguments
        )


def _bench_prompts(arguments: BenchOptions) -> None:
    """Measure the time to the first token on a CPU."""
    idle = arguments.named("load", "mode", "trace", "drafting", "redrafting", "kernels", *DISTRIBUTION) | {
        "link": arguments.link and arguments.link[0]
    }
    refuse_idle(idle | arguments.named("draft_tp", "target_tp"), "with --prompts on a CPU")
    arguments.check({}, arguments.json)
    contexts = arguments.context or SHORT_PROMPT_CONTEXTS
    modes = ("plain", "lookahead")
    plan = SpeedPlan(
        (1, 1),
        modes,
        *arguments.sizes,
        contexts,
        arguments.loads,
        arguments.timed_rounds,
        {},
        not arguments.no_prefix_cache,
        decodings=[arguments.decoding],
    )
    _measure_prompts(plan, _cpu_backend(arguments), 2, arguments.json)


def _bench_rounds(arguments: BenchOptions) -> None:
    """Measure the parts of a round's time on a CPU."""
    idle = arguments.named("load", "mode", "context", "trace", "drafting", "redrafting", "kernels", *DISTRIBUTION)
    refuse_idle(idle, "without --device cuda")
    (particles, *more), blocks, branches = arguments.sizes
    if more:
        raise ValueError(
            f"--particles {' '.join(map(str, (particles, *more)))}; allowed without --device cuda: one value"
        )
    arguments.check(arguments.named("draft_tp", "target_tp"), arguments.json)
    configs = [replace(config, prefix_cache=not arguments.no_prefix_cache) for config in _configs(blocks, branches)]
    sampling, rounds = {"particles": particles, **arguments.decoding}, arguments.timed_rounds
    prompts = _file_of_one(arguments)
    rows: list[Any]
    if arguments.link:
        config = service_options.worker_group_config(arguments.named(*MODELS, "draft_tp", "target_tp", "threads", *OWN))
        rows = _measure_processes(
            [replace(config, link=name) for name in arguments.link], configs, arguments.loads, sampling, rounds
        )
        out.print(process_round_table(rows), PROCESS_LEGEND.format(particles=particles), sep="\n")
    else:
        pair = _cpu_pair(arguments)
        tokens = [each.tokens(pair.tokenizer, raw=False) for each in prompts]
        rows = time_rounds(pair, configs, arguments.loads, sampling, rounds, tokens)
        out.print(round_table(rows), LOCAL_LEGEND.format(particles=particles, rounds=rounds), sep="\n")
    out.print(*curve_tables(latency_of_rounds(rows)), CURVES_LEGEND, sep="\n")
    _write(arguments.json, rows)


def _file_prompts(arguments: BenchOptions) -> dict[str, list[FileProblem]]:
    """Return the problems of every --prompts-file, by the file's name without its suffix. Raises ValueError for an
    invalid file, and for two files of one name, before models are loaded."""
    from benchmarks.problem_file import read_problems

    files = arguments.prompts_file or []
    found = {path.stem: read_problems(path) for path in files}
    if len(found) < len(files):
        raise ValueError(f"--prompts-file {' '.join(map(str, files))}; allowed: files of different names")
    return found


def _file_of_one(arguments: BenchOptions) -> list[FileProblem]:
    """Return the problems of the only --prompts-file; none if it is not given. Raises ValueError for several files."""
    found = _file_prompts(arguments)
    if len(found) > 1:
        raise ValueError(f"--prompts-file {' '.join(map(str, arguments.prompts_file or ()))}; allowed here: one")
    return next(iter(found.values()), [])


def _write(json: Path | None, rows: Sequence[Any]) -> None:
    if json is not None:
        json.write_text(json_module.dumps([asdict(row) for row in rows], indent=1) + "\n")


def _configs(blocks: Sequence[int], branches: Sequence[int]) -> list[EngineConfig]:
    from smc.api.engine_config import EngineConfig

    lockstep = [EngineConfig(form="lockstep", block=k, smc_block=k) for k in blocks]
    return lockstep + [EngineConfig(block=k, smc_block=k, branches=count) for k in blocks for count in branches]


def _measure_processes(
    worker_groups: Sequence[WorkerGroupConfig],
    configs: Sequence[EngineConfig],
    concurrency: Sequence[int],
    sampling: dict[str, Any],
    rounds: int,
) -> list[ProcessRoundTime]:
    from benchmarks.process_rounds import measure_process_rounds

    rows = []
    with progress_bar() as progress:
        task = progress.add_task("rounds", total=len(worker_groups) * len(configs) * len(concurrency))
        for config in worker_groups:
            rows += measure_process_rounds(
                config, list(configs), list(concurrency), sampling, rounds, lambda: progress.advance(task)
            )
    return rows


def _worker_group_config(arguments: BenchOptions) -> WorkerGroupConfig:
    """Return the configuration of the models. Raises ValueError for invalid options, before torch is imported."""
    return service_options.worker_group_config(arguments.named("load", *MODELS, "device", "threads", *OWN))


@contextmanager
def _backend(
    link: Sequence[str] | None, config: WorkerGroupConfig, degrees: tuple[int, int]
) -> Iterator[tuple[BenchBackend, int | None]]:
    """Make a backend in this process, or with `link` one with each rank in its own process. Yields it with the number
    of GPUs, None on a CPU. `degrees`: GPUs of draft and target in modes where each model has its own."""
    from benchmarks.backends import GpuBackend, MixedBackend
    from smc.loading import LoadedModels

    gpus = count_gpus() if config.device == "cuda" else None
    models = LoadedModels(config.sources, config.dtypes)
    here = GpuBackend(models.model, models.tokenizer, models.draft_head)
    if not link:
        yield here, gpus
        return
    with _process_backend(link, config, degrees, gpus) as apart:
        yield (MixedBackend(here, apart) if gpus else apart), gpus


@contextmanager
def _process_backend(
    link: Sequence[str], config: WorkerGroupConfig, degrees: tuple[int, int], gpus: int | None
) -> Iterator[ProcessBackend]:
    """Make a backend with each rank in its own process. `gpus`: number of GPUs; None: the ranks run on a CPU."""
    if len(link) > 1:
        raise ValueError(f"--link {' '.join(link)}; allowed here: one")
    from benchmarks.processes import ProcessBackend

    draft, target = degrees
    with closing(ProcessBackend(replace(config, link=link[0], draft_tp=draft, target_tp=target), gpus)) as apart:
        yield apart


def _cpu_pair(arguments: BenchOptions) -> ModelPair:
    from smc.loading import load_pair, pair_directories, use_threads

    found = pair_directories(arguments.target, arguments.draft)
    use_threads(arguments.threads, found)
    return load_pair(found, "cpu", None, **arguments.named(*OWN))


def _cpu_backend(arguments: BenchOptions) -> CpuBackend:
    from benchmarks.backends import CpuBackend

    return CpuBackend(_cpu_pair(arguments))


def _measure_speed(plan: SpeedPlan, backend: BenchBackend, gpus: int, arguments: BenchOptions) -> None:
    # The file is written after every line, since a run can take an hour.
    rows = measure_speed(plan, backend, gpus, arguments.trace, lambda found: _write(arguments.json, found))
    legend = SPEED_LEGEND.format(rounds=plan.rounds, numerics=NUMERICS_LEGEND if plan.names_numerics else "")
    out.print(speed_table(rows, plan.names_numerics), legend, sep="\n")
    # Guided requests run more positions than the curves would say.
    is_guided = plan.distribution.get("guidance_scale", 1) != 1
    if not is_guided and (tables := curve_tables(latency_of_speeds(rows, plan.drafting))):
        out.print(*tables, CURVES_LEGEND, sep="\n")


def _measure_prompts(plan: SpeedPlan, backend: PromptBackend, gpus: int, json: Path | None) -> None:
    from benchmarks.prompts import REPEATS

    rows = measure_prompts(replace(plan, concurrency=(0, *plan.concurrency)), backend, gpus)
    numerics = NUMERICS_LEGEND if plan.names_numerics else ""
    legend = PROMPT_LEGEND.format(repeats=REPEATS, rounds=plan.rounds, numerics=numerics)
    out.print(first_token_table(rows, plan.names_numerics), legend, sep="\n")
    _write(json, rows)
