"""The commands `smcserve eval`, `bench`, `timeline` and `grow`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.bench import OWN, bench
from services.cli import options
from services.cli.options import with_options
from smc.api.sampling_params import SamplingParams
from smc.terminal import check_drawing, err, out, progress_bar

if TYPE_CHECKING:
    from benchmarks.own_problems import OwnPlan
    from benchmarks.problem_file import FileProblem
    from benchmarks.quality import DecodingSetting
    from benchmarks.reports.quality import QualityPlan

GridParticles = Annotated[
    list[int] | None,
    options.option(
        options.PARTICLES,
        "Value of N; may be repeated. Default: 1, 4, 8 and 16 for exact decoding, 4, 8, 16 and 32 for SMC.",
        "--particles",
        "-n",
        metavar="N",
    ),
]
GridBlocks = Annotated[
    list[int] | None,
    options.option(
        options.ENGINE,
        "Value of K; may be repeated. Default: 4, 5 and 8 for exact decoding; 5 for SMC, and in lockstep also 8.",
        "--block",
        "-k",
        metavar="K",
    ),
]
GridBranches = Annotated[
    list[int] | None,
    options.option(
        options.ENGINE,
        "Value of F in look-ahead; may be repeated. Default: 4 for exact decoding, from N=16 on 2; 1, 2 and 4 for SMC.",
        "--branches",
        "-f",
        metavar="F",
    ),
]


@dataclass(frozen=True)
class EvalOptions:
    """Options of `smcserve eval`. Options that were not given are None, or False."""

    load: Annotated[
        str,
        options.option(
            options.MODELS,
            "Models to load. files: the demo pair; grown: the demo pair inside larger shapes.",
            metavar="files|grown",
        ),
    ] = "files"
    target: Annotated[
        str | None,
        options.option(
            options.MODELS,
            "With --load grown, the shape of the target, such as llama-8b; otherwise the target: a directory, or "
            "ORG/NAME or ORG/NAME@REVISION on the Hugging Face hub.",
            metavar="SHAPE|MODEL",
        ),
    ] = None
    draft: Annotated[
        str | None,
        options.option(options.MODELS, "Shape of the draft, or the draft, as for --target.", metavar="SHAPE|MODEL"),
    ] = None
    device: options.Device = "cpu"
    dtype: options.Dtype = None
    target_dtype: options.TargetDtype = None
    draft_dtype: options.DraftDtype = None
    draft_vocab: options.DraftVocab = None
    draft_vocab_text: options.DraftVocabText = None
    problems: Annotated[
        list[str] | None,
        options.option(
            options.MEASURE,
            "Number of held-out problems that each setting answers; or a file of JSON lines with other "
            "problems (docs/quality.md; samples are in benchmarks/: chat_prompts, code_prompts, code_tasks and "
            "number_questions.jsonl). With files, and with a pair of one's own, it may be repeated. Default: 1000.",
            metavar="COUNT|FILE",
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        options.option(
            options.SAMPLING,
            "Maximum number of tokens of an answer; only with a file of problems. Default: 256.",
            metavar="TOKENS",
        ),
    ] = None
    seed: Annotated[
        int, options.option(options.MEASURE, "Seed of the problems and of the answers.", metavar="SEED")
    ] = 0
    speed_problems: Annotated[
        int,
        options.option(
            options.MEASURE, "Number of problems that are timed one request at a time; 0 = none.", metavar="COUNT"
        ),
    ] = 20
    only: Annotated[
        list[str] | None,
        options.option(
            options.MEASURE,
            "Measure only settings whose name has all of these words, such as 'exact N=8'; may be repeated. They are "
            "measured in this order.",
            metavar="TEXT",
        ),
    ] = None
    particles: GridParticles = None
    block: GridBlocks = None
    branches: GridBranches = None
    temperature: Annotated[
        list[float] | None,
        options.option(
            options.SAMPLING,
            "Temperature of the target distribution; 0 = greedy, without SMC. With files it may be repeated. "
            "Default: 1.",
            metavar="T",
        ),
    ] = None
    ess_threshold: Annotated[float | None, options.option_of(SamplingParams, "ess_threshold")] = None
    alpha: Annotated[float | None, options.option_of(SamplingParams, "alpha")] = None
    regex: options.Regex = None
    constraint_scope: Annotated[str | None, options.option_of(SamplingParams, "constraint_scope")] = None
    concurrency: Annotated[int, options.option(options.ENGINE, "Number of requests in flight.", metavar="COUNT")] = 8
    numerics: options.NumericsOrder = None
    max_rows: Annotated[
        int | None,
        options.option(
            options.ENGINE,
            "Maximum number of rows of all requests in flight, so that settings with N rows have at most COUNT / N "
            "requests; only with files. Default: no limit.",
            metavar="COUNT",
        ),
    ] = None
    time_limit: Annotated[
        float | None,
        options.option(
            options.MEASURE,
            "Stop after so many seconds, and report what has been measured; only with files.",
            metavar="SECONDS",
        ),
    ] = None
    threads: Annotated[int, options.option(options.ENGINE, "Number of CPU threads of torch.", metavar="COUNT")] = 1
    json: Annotated[
        Path | None, options.option(options.OUTPUT, "Write results to this file after every setting.", metavar="FILE")
    ] = None
    accuracy_from: Annotated[
        list[Path] | None,
        options.option(
            options.OUTPUT,
            "File of an earlier --json, whose settings are timed but not answered again; may be repeated.",
            metavar="FILE",
        ),
    ] = None
    resume: Annotated[
        bool,
        options.flag(options.OUTPUT, "Continue the measurement that is recorded in the file of --json.", "--resume"),
    ] = False
    markdown: Annotated[
        Path | None, options.option(options.OUTPUT, "Write the table to this file as Markdown.", metavar="FILE")
    ] = None
    picture: Annotated[
        Path | None, options.option(options.OUTPUT, "Draw quality against speed to this PNG file.", metavar="FILE")
    ] = None


@with_options(EvalOptions)
def evaluate(arguments: EvalOptions) -> int:
    """Measure quality and speed of every way of decoding, on generated problems or on those of a file."""
    from benchmarks.reports.quality import DemoPairs, QualityPlan, measure_all, prepare, report

    if _is_own(arguments):
        return _evaluate_own(arguments)
    for name in OF_OWN_PROBLEMS:
        if (value := getattr(arguments, name)) is not None:
            raise ValueError(f"--{name.replace('_', '-')} {value} has no effect without --problems FILE; leave it out")
    (count,), (temperature,) = arguments.problems or ["1000"], _one_temperature(arguments.temperature)
    given = {name: getattr(arguments, name) for name in QualityPlan.__dataclass_fields__}
    plan = QualityPlan(**given | {"problems": int(count), "temperature": temperature})
    _check_outputs(plan, arguments.json, arguments.markdown, arguments.picture)
    settings = settings_of(arguments)
    if arguments.accuracy_from and not arguments.speed_problems:
        raise ValueError("--accuracy-from leaves nothing to be measured with --speed-problems 0; leave one of them out")
    pairs = DemoPairs.of(
        arguments.load, arguments.target, arguments.draft, arguments.device, arguments.dtype, own_options(arguments)
    )
    record, known = prepare(plan, settings, pairs, arguments.json, arguments.resume, arguments.accuracy_from or ())
    measure_all(pairs, plan, settings, record, known)
    report(plan, settings, record, arguments.markdown, arguments.picture)
    return 0


def _is_count(problems: str) -> bool:
    return problems.removeprefix("-").isdigit()


def _is_own(arguments: EvalOptions) -> bool:
    """Return whether problems or pair are the user's own."""
    problems = arguments.problems or ["1000"]
    has_pair = arguments.load == "files" and (arguments.target is not None or arguments.draft is not None)
    return has_pair or len(problems) > 1 or not _is_count(problems[0])


def _one_temperature(temperatures: list[float] | None) -> list[float]:
    if temperatures and len(temperatures) > 1:
        raise ValueError(
            f"--temperature {' --temperature '.join(f'{each:g}' for each in temperatures)}; allowed: once, unless "
            "problems or pair are your own"
        )
    return temperatures or [1.0]


OF_OWN_PROBLEMS = ("max_tokens", "alpha", "regex", "constraint_scope", "max_rows", "time_limit", "numerics")
"""Options that have no effect without problems or a pair of one's own."""
OF_THE_DEMO_PAIR = ("load", "speed_problems", "accuracy_from")
"""Options that have an effect only without them."""


def _evaluate_own(arguments: EvalOptions) -> int:
    """Run `smcserve eval` with problems or a pair of the user's own. Return the exit code: 1 if something could not be
    measured."""
    began = time.monotonic()
    from benchmarks.own_problems import evaluate_own
    from benchmarks.own_record import OwnRecord
    from benchmarks.quality import machine
    from benchmarks.reports import own
    from smc.loading import load_pair, pair_directories, require_directories, use_threads
    from smc.model.files import fingerprint

    for name in OF_THE_DEMO_PAIR:
        if (value := getattr(arguments, name)) != EvalOptions.__dataclass_fields__[name].default:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} {value} has no effect with problems or a pair of your own; leave it out")
    plan = _own_plan(arguments, began)
    _check_writable(arguments.json, arguments.markdown, arguments.picture)
    if arguments.picture is not None:
        check_drawing()
    directories = pair_directories(
        *(None if each is None else Path(each) for each in (arguments.target, arguments.draft))
    )
    require_directories(directories)
    use_threads(arguments.threads, directories)
    target, draft = directories
    models = {"target": target.name, "draft": draft.name}
    models |= {"target_weights": fingerprint(target), "draft_weights": fingerprint(draft)}
    conditions = plan.conditions() | models | {"dtype": arguments.dtype, **own_options(arguments)}
    record = OwnRecord.open(arguments.json, conditions | machine(arguments.device), arguments.resume)
    pair = load_pair(directories, arguments.device, arguments.dtype, **own_options(arguments))
    complete = evaluate_own(pair, plan, record)
    if arguments.markdown is not None:
        arguments.markdown.write_text(own.markdown(record), encoding="utf-8")
    if arguments.picture is not None:
        own.draw(record, arguments.picture)
    return 0 if complete else 1


def _own_plan(arguments: EvalOptions, began: float) -> OwnPlan:
    """Return what is measured. `began`: time, by `time.monotonic`, from which --time-limit counts. Raises ValueError
    for invalid options and for those without effect."""
    from benchmarks.own_problems import MAX_TOKENS, USUAL, OwnPlan
    from smc.api.engine_config import EngineConfig
    from smc.api.sampling_params import Method

    plan = OwnPlan(
        problems=_own_problems(arguments),
        temperatures=list(dict.fromkeys(arguments.temperature or [1.0])),
        settings=list(dict.fromkeys((USUAL[0], *settings_of(arguments, USUAL)))),
        seed=arguments.seed,
        ess_threshold=arguments.ess_threshold,
        max_tokens=MAX_TOKENS if arguments.max_tokens is None else arguments.max_tokens,
        concurrency=arguments.concurrency,
        max_rows=arguments.max_rows,
        deadline=None if arguments.time_limit is None else began + arguments.time_limit,
        alpha=arguments.alpha,
        regex=arguments.regex,
        constraint_scope=arguments.constraint_scope,
        numerics=arguments.numerics or EngineConfig().numerics,
    )
    EngineConfig(numerics=plan.numerics).check_numerics(arguments.device, arguments.dtype)
    for name in ("alpha", "constraint_scope"):
        if (value := getattr(arguments, name)) is not None and not any(each.population for each in plan.settings):
            raise ValueError(f"--{name.replace('_', '-')} {value} has no effect without settings of SMC; leave it out")
    for temperature in plan.temperatures:
        SamplingParams(method=Method.TARGET, max_tokens=plan.max_tokens, temperature=temperature)
    for name in ("concurrency", "max_rows"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}; allowed: >= 1")
    if arguments.time_limit is not None and not arguments.time_limit > 0:
        raise ValueError(f"--time-limit {arguments.time_limit:g}; allowed: > 0")
    return plan


def _own_problems(arguments: EvalOptions) -> dict[str, Sequence[FileProblem]]:
    """Return the problems of every --problems, by name. Raises ValueError for invalid ones."""
    from benchmarks.own_problems import WORD_PROBLEMS, word_problems
    from benchmarks.problem_file import read_problems

    found: dict[str, Sequence[FileProblem]] = {}
    for given in arguments.problems or ["1000"]:
        is_count = _is_count(given)
        if is_count and int(given) < 1:
            raise ValueError(f"--problems {given}; allowed: >= 1")
        name = WORD_PROBLEMS if is_count else Path(given).stem
        if name in found:
            raise ValueError(f"--problems {given}: there are two times problems of the name {name}; rename one")
        found[name] = (
            word_problems(arguments.seed, int(given), reasoning=arguments.target is not None)
            if is_count
            else read_problems(Path(given))
        )
    return found


def own_options(arguments: EvalOptions) -> dict[str, Any]:
    """Return the options that the two models have each for itself, by their names in `loaded_models`."""
    return {name: getattr(arguments, name) for name in OWN}


def _check_writable(*paths: Path | None) -> None:
    """Raise ValueError for files that cannot be written, before anything is measured."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ValueError(
                f"cannot write {path}: {'it is a directory' if path.is_dir() else 'its directory does not exist'}"
            )


def _check_outputs(plan: QualityPlan, *paths: Path | None) -> None:
    """Raise ValueError for files that cannot be written, before anything is measured. The last path is the picture."""
    _check_writable(*paths)
    if paths[-1] is not None:
        check_drawing()
    if paths[-1] is not None and not plan.speed_problems:
        raise ValueError("--picture shows speed, which --speed-problems 0 does not measure; leave one of them out")


def settings_of(arguments: EvalOptions, usual: Sequence[DecodingSetting] = ()) -> list[DecodingSetting]:
    """Return the settings to measure: those of the table that the options choose, in the order of --only, or `usual`,
    if there are some and no option chooses; without SMC if every temperature is 0, where it is not defined. Raises
    ValueError if no setting is left, and for a threshold without effect."""
    from benchmarks.quality import grid

    values, only = (arguments.particles, arguments.block, arguments.branches), arguments.only
    is_usual = bool(usual) and only is None and not any(values)
    has_smc = any(arguments.temperature or [1.0])
    settings = [setting for setting in (usual if is_usual else grid(*values)) if setting.method != "smc" or has_smc]
    if only:
        wanted = [text.lower().replace("lookahead", "look-ahead").split() for text in only]
        chosen = list(dict.fromkeys(each for words in wanted for each in settings if _fits(each.name, words)))
        if not chosen:
            raise ValueError(
                f"--only {' --only '.join(map(repr, only))} leaves no setting; "
                f"there are: {', '.join(setting.name for setting in settings)}"
            )
        settings = chosen
    threshold = arguments.ess_threshold
    if threshold is not None and not any(setting.population == "independent" for setting in settings):
        raise ValueError(
            f"--ess-threshold {threshold:g} has no effect without settings of independent particles; leave it out"
        )
    return settings


def _fits(name: str, words: Sequence[str]) -> bool:
    """Return whether the name contains every word. A word with = must be a whole word: N=1 does not match N=16."""
    name = name.lower()
    return all(word in (name.split() if "=" in word else name) for word in words)


def timeline(
    trace: Annotated[
        Path, typer.Argument(help="Trace file from `smcserve serve --trace` or `bench --trace`.", show_default=False)
    ],
    picture: Annotated[Path, typer.Argument(help="PNG file to write.", show_default=False)],
    begin: Annotated[
        float,
        options.option(
            options.OUTPUT, "Start of the picture, in milliseconds after the first round begins.", metavar="MS"
        ),
    ] = 0.0,
    length: Annotated[
        float, options.option(options.OUTPUT, "Length of the picture in milliseconds, above 0.", metavar="MS")
    ] = 150.0,
) -> None:
    """Draw the times at which draft, target and coordinator worked, on one time axis."""
    from benchmarks.reports.timeline import LANES, draw, read, within

    if length <= 0:
        raise ValueError(f"--length {length:g}; allowed: > 0")
    check_drawing()
    events = read(trace)
    start = min(event["ts"] for event in events) / 1e3 + begin
    shown = [
        event for event in events if start < (event["ts"] + event["dur"]) / 1e3 and event["ts"] / 1e3 < start + length
    ]
    if not shown:
        last = max(event["ts"] for event in events) / 1e3
        raise ValueError(
            f"--begin {begin:g}: nothing was recorded there; "
            f"the trace ends {last - start + begin:.0f} ms after its start"
        )
    draw(shown, start, length, picture)
    for lane in LANES:
        busy = sum(within(event, start, length) for event in shown if event["lane"] == lane)
        out.print(f"{lane:12} busy {busy / length:6.1%} of {length:g} ms")


def grow(
    model: Annotated[
        Path,
        typer.Argument(help="The small model: a directory, or its name on the Hugging Face hub.", metavar="MODEL"),
    ],
    directory: Annotated[Path, typer.Argument(help="New directory for the grown model.", metavar="OUT")],
    shape: Annotated[
        str,
        options.option(
            options.MODELS, "Shape of a published model, such as llama-8b; llama-8b/4 has 4 layers.", metavar="SHAPE"
        ),
    ],
    dtype: Annotated[
        str, options.option(options.MODELS, "Data type of the weights: float32, bfloat16 or float16.", metavar="TYPE")
    ] = "bfloat16",
) -> None:
    """Write a small model into a large shape, padded with zeros. It has the small model's answers and the large one's
    cost."""
    from benchmarks.grow import SAVED_DTYPES, save_padded_model
    from smc.model.linear import DTYPES
    from smc.model.presets import preset
    from smc.model.source import find_model
    from smc.model.weight_map import count_parameters

    large = preset(shape)
    allowed = {name: kind for name, kind in DTYPES.items() if kind in SAVED_DTYPES}
    if dtype not in allowed:
        raise ValueError(f"--dtype {dtype}; allowed: {', '.join(allowed)}")
    with progress_bar() as progress:
        task = progress.add_task(shape)
        config = save_padded_model(
            find_model(model),
            large,
            directory,
            dtype=allowed[dtype],
            on_bytes=lambda done, whole: progress.update(task, completed=done, total=whole),
        )
    weights = count_parameters(config)
    size = weights * allowed[dtype].itemsize / 2**30
    err.print(
        f"{directory}: {model} in the shape {shape}, {weights / 1e9:.2f} B weights, {size:.1f} GiB",
        soft_wrap=True,
        markup=False,
    )


app = typer.Typer(
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("eval")(evaluate)
app.command("bench")(bench)
app.command("timeline")(timeline)
app.command("grow")(grow)


def run(command: str, arguments: Sequence[str]) -> int:
    """Run `smcserve COMMAND ARGUMENTS` and return its exit code. Raises errors, as typer does without standalone
    mode."""
    return app([command, *arguments], prog_name="smcserve", standalone_mode=False) or 0
