"""`smcserve eval`: the quality table of the demo pair on held-out problems, resumable after every setting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import options
from smc.terminal import check_drawing

if TYPE_CHECKING:
    from smc.evaluation.quality import Setting
    from smc.evaluation.reports.quality import Plan


def evaluate(
    ctx: typer.Context,
    load: Annotated[
        str,
        options.option(
            options.MODELS, "files: the demo pair; grown: the same inside larger shapes.", metavar="files|grown"
        ),
    ] = "files",
    target: Annotated[
        str | None, options.option(options.MODELS, "Shape of the grown target, such as llama-8b.", metavar="SHAPE")
    ] = None,
    draft: Annotated[
        str | None, options.option(options.MODELS, "Shape of the grown draft, such as llama-1b.", metavar="SHAPE")
    ] = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = None,
    target_dtype: options.TargetDtype = None,
    draft_dtype: options.DraftDtype = None,
    draft_vocab: options.DraftVocab = None,
    draft_vocab_text: options.DraftVocabText = None,
    problems: Annotated[
        int, options.option(options.MEASURE, "Held-out problems a setting answers.", metavar="COUNT")
    ] = 1000,
    seed: Annotated[int, options.option(options.MEASURE, "Of the problems and of the answers.", metavar="SEED")] = 0,
    speed_problems: Annotated[
        int, options.option(options.MEASURE, "Problems timed one request at a time; 0 = none.", metavar="COUNT")
    ] = 20,
    only: Annotated[
        list[str] | None,
        options.option(
            options.MEASURE, "Settings with all these words, such as 'exact N=8'; may be repeated.", metavar="TEXT"
        ),
    ] = None,
    particles: options.GridParticles = None,
    block: options.GridBlocks = None,
    branches: options.GridBranches = None,
    temperature: Annotated[
        float, options.option(options.SAMPLING, "Of the target law; 0 = greedy, without SMC.", metavar="T")
    ] = 1.0,
    ess_threshold: Annotated[float | None, options.sampling_option("ess_threshold")] = None,
    concurrency: Annotated[int, options.option(options.ENGINE, "Requests in flight.", metavar="COUNT")] = 8,
    threads: Annotated[int, options.option(options.ENGINE, "CPU threads of torch.", metavar="COUNT")] = 1,
    json: Annotated[
        Path | None, options.option(options.OUTPUT, "Write results here after every setting.", metavar="FILE")
    ] = None,
    accuracy_from: Annotated[
        list[Path] | None,
        options.option(
            options.OUTPUT, "Record whose settings are not answered again, only timed; may be repeated.", metavar="FILE"
        ),
    ] = None,
    resume: options.Resume = False,
    markdown: Annotated[
        Path | None, options.option(options.OUTPUT, "Write the table as markdown.", metavar="FILE")
    ] = None,
    picture: Annotated[
        Path | None, options.option(options.OUTPUT, "Draw quality against speed (png).", metavar="FILE")
    ] = None,
) -> None:
    """Measure quality and speed of every way of decoding, on problems made for it."""
    from smc.evaluation.reports.quality import Pairs, Plan, measure_all, prepare, report

    plan = Plan(**{name: ctx.params[name] for name in Plan.__dataclass_fields__})
    _check_outputs(plan, json, markdown, picture)
    settings = _settings(grid_of(particles, block, branches, temperature), only)
    if ess_threshold is not None and not any(setting.population == "independent" for setting in settings):
        raise ValueError(
            f"--ess-threshold {ess_threshold:g} has no effect without settings of independent particles; leave it out"
        )
    own = (dtype, target_dtype, draft_dtype, draft_vocab, draft_vocab_text)
    if accuracy_from and not speed_problems:
        raise ValueError("--accuracy-from leaves nothing to be measured with --speed-problems 0; leave one of them out")
    pairs = Pairs.of(load, target, draft, device, own)
    record, known = prepare(plan, settings, pairs, json, resume, accuracy_from or ())
    measure_all(pairs, plan, settings, record, known)
    report(plan, settings, record, markdown, picture)


def _check_outputs(plan: Plan, *paths: Path | None) -> None:
    """Now rather than after an hour."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ValueError(
                f"cannot write {path}: {'it is a directory' if path.is_dir() else 'its directory does not exist'}"
            )
    if paths[-1] is not None:
        check_drawing()
    if paths[-1] is not None and not plan.speed_problems:
        raise ValueError("--picture shows speed, which --speed-problems 0 does not measure; leave one of them out")


def grid_of(
    particles: Sequence[int] | None, blocks: Sequence[int] | None, branches: Sequence[int] | None, temperature: float
) -> list[Setting]:
    """SMC has no law at temperature 0."""
    from smc.evaluation.quality import grid

    return [setting for setting in grid(particles, blocks, branches) if setting.method != "smc" or temperature != 0]


def _settings(settings: list[Setting], only: Sequence[str] | None) -> list[Setting]:
    if not only:
        return settings
    wanted = [text.lower().replace("lookahead", "look-ahead").split() for text in only]
    chosen = [setting for setting in settings if any(_fits(setting.name, words) for words in wanted)]
    if not chosen:
        raise ValueError(
            f"--only {' --only '.join(map(repr, only))} leaves no setting; there are: {', '.join(s.name for s in settings)}"
        )
    return chosen


def _fits(name: str, words: Sequence[str]) -> bool:
    """Every word is in the name; N=1 is not in N=16."""
    name = name.lower()
    return all(word in (name.split() if "=" in word else name) for word in words)
