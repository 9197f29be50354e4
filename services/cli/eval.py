"""`smcserve eval`: the quality table of the demo pair on held-out problems, resumable after every setting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import options

if TYPE_CHECKING:
    from services.cli.eval_run import Plan
    from smc.evaluation.quality import Setting


def evaluate(
    ctx: typer.Context,
    device: options.Device = "cpu",
    dtype: options.Dtype = None,
    problems: Annotated[int, options.option(options.MEASURE, "Held-out problems a setting answers.", metavar="COUNT")] = 1000,
    seed: Annotated[int, options.option(options.MEASURE, "Of the problems and of the answers.", metavar="SEED")] = 0,
    speed_problems: Annotated[
        int, options.option(options.MEASURE, "Problems timed one request at a time; 0 = none.", metavar="COUNT")
    ] = 20,
    only: Annotated[
        list[str] | None,
        options.option(options.MEASURE, "Settings with all these words, such as 'lockstep N=8'; may be repeated.", metavar="TEXT"),
    ] = None,
    particles: options.ParticlesList = None,
    block: options.BlockList = (8, 5),
    branches: options.BranchesList = (1, 2, 4, 8),
    ess_threshold: options.EssThreshold = None,
    concurrency: Annotated[int, options.option(options.ENGINE, "Requests in flight.", metavar="COUNT")] = 8,
    threads: Annotated[int, options.option(options.ENGINE, "CPU threads of torch.", metavar="COUNT")] = 1,
    json: Annotated[Path | None, options.option(options.OUTPUT, "Write results here after every setting.", metavar="FILE")] = None,
    resume: Annotated[
        bool, options.option(options.OUTPUT, "Go on with the file of --json.", "--resume", show_default=False, metavar="")
    ] = False,
    markdown: Annotated[Path | None, options.option(options.OUTPUT, "Write the table as markdown.", metavar="FILE")] = None,
    picture: Annotated[Path | None, options.option(options.OUTPUT, "Draw quality against speed (png).", metavar="FILE")] = None,
) -> None:
    """Measure quality and speed of every way of decoding, on problems made for it."""
    from services.cli.eval_run import Plan, measure_all, prepare, report

    plan = Plan(**{name: ctx.params[name] for name in Plan.__dataclass_fields__})
    _check_outputs(plan, json, markdown, picture)
    settings = _settings(particles, block, branches, only)
    pair, record = prepare(plan, settings, device, dtype, json, resume)
    measure_all(pair, plan, settings, record)
    report(plan, settings, record, markdown, picture)


def _check_outputs(plan: Plan, *paths: Path | None) -> None:
    """Now rather than after an hour."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ValueError(f"cannot write {path}: {'it is a directory' if path.is_dir() else 'its directory does not exist'}")
    if paths[-1] is not None and not plan.speed_problems:
        raise ValueError("--picture shows speed, which --speed-problems 0 does not measure; leave one of them out")


def _settings(particles: Sequence[int] | None, blocks: Sequence[int], branches: Sequence[int], only: Sequence[str] | None) -> list[Setting]:
    from smc.evaluation.quality import grid

    settings = grid(particles or None, blocks, branches)
    if not only:
        return settings
    wanted = [text.lower().replace("lookahead", "look-ahead").split() for text in only]
    chosen = [setting for setting in settings if any(all(word in setting.name.lower() for word in words) for words in wanted)]
    if not chosen:
        raise ValueError(f"--only {' --only '.join(map(repr, only))} leaves no setting; there are: {', '.join(s.name for s in settings)}")
    return chosen
