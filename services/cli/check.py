"""`smcserve check`: checks whether two model directories can serve as target and draft."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from rich.text import Text

from services.cli import options
from smc.api.sampling_params import Method, SamplingParams
from smc.model.check import DEGREES
from smc.terminal import err, finite, number, out

if TYPE_CHECKING:
    from smc.model.check import ModelReport, PairReport
    from smc.probe import Probe


LEAST_SECONDS = 10
"""Fewest seconds for a probe: the first figures need a few."""
MOST_NAMED = 16
"""Maximum number of foreign ids that are named; --json has all of them."""
Probed = Annotated[
    bool,
    options.flag(
        options.MEASURE,
        "Load both models and run a few prompts: acceptance by depth, KL divergence, expected speed, and which "
        "method to use.",
        "--probe",
    ),
]


def check(
    target: options.Target = None,
    draft: options.Draft = None,
    probed: Probed = False,
    particles: Annotated[
        int | None,
        options.option(
            options.PARTICLES,
            "N of --probe: the number of particles, or of rows of the tree. Default: 8.",
            "--particles",
            "-n",
            metavar="N",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        options.option(options.SAMPLING, "Temperature of --probe, above 0 and at most 2. Default: 1.", metavar="T"),
    ] = None,
    seconds: Annotated[
        float | None,
        options.option(
            options.MEASURE,
            "Seconds that --probe may take, from 10; what is not measured by then is left out. Default: no limit.",
            metavar="SECONDS",
        ),
    ] = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    as_json: options.JsonFlag = False,
) -> int:
    """Check whether two models can serve as target and draft. Without --probe, no weights are loaded."""
    from smc.loading import pair_directories
    from smc.model.check import check_pair

    own = (particles, temperature, seconds, threads)
    if not probed and not (own == (None,) * len(own) and device == "cpu"):
        raise ValueError("--particles, --temperature, --seconds, --device and --threads have no effect without --probe")
    if particles is not None:
        SamplingParams(method=Method.EXACT, particles=particles)
    if temperature is not None and not 0 < temperature <= 2:
        raise ValueError(f"--temperature {temperature:g}; allowed with --probe: above 0, at most 2")
    if seconds is not None and not LEAST_SECONDS <= seconds < math.inf:
        raise ValueError(f"--seconds {seconds:g}; allowed with --probe: at least {LEAST_SECONDS}")
    directories = pair_directories(target, draft)
    report = check_pair(*directories)
    found = None
    if probed and not report.problems:
        settings = (particles or 8, 1.0 if temperature is None else temperature)
        found = _probe(directories, device, threads, settings, seconds)
    if as_json:
        print(
            json.dumps({"ok": not report.problems, **asdict(report), **({"probe": _as_dict(found)} if found else {})})
        )
    else:
        _print(report, directories)
        if found is not None:
            _print_probe(found)
    return 1 if report.problems else 0


def _probe(
    directories: tuple[Path, Path],
    device: str,
    threads: int | None,
    settings: tuple[int, float],
    seconds: float | None,
) -> Probe:
    """`settings`: N and the temperature."""
    from smc.demo.problems import generate
    from smc.loading import DEMO, load_pair, use_threads
    from smc.local_engine import stored_latency
    from smc.probe import CONFIG, PROMPTS, ProbeClock, probe_pair

    clock = ProbeClock(seconds, lambda text: err.print(text, soft_wrap=True, markup=False))
    clock.say("loading both models")
    use_threads(threads, directories)
    pair = load_pair(directories, device, None)
    latency = partial(stored_latency, pair, directories, CONFIG)
    if device != "cpu":
        # Takes seconds, and must come before another engine takes memory.
        known = latency()
        latency = partial(lambda found: found, known)
    texts = [problem.question for problem in generate(0, len(PROMPTS), "test")] if directories == DEMO else PROMPTS
    chat = pair.tokenizer.has_chat_template
    prompts = [
        pair.tokenizer.chat([{"role": "user", "content": text}]) if chat else pair.tokenizer.encode(text)
        for text in texts
    ]
    return probe_pair(pair, prompts, latency, *settings, clock)


def _as_dict(found: Probe) -> object:
    return finite({**asdict(found), "recommendation": found.recommendation})


def _print_probe(found: Probe) -> None:
    depths = ", ".join(f"{share:.0%}" for share in found.accepted_by_depth)
    speeds = {"exact": found.exact_speed, "smc": found.smc_speed}
    late, rounds = "not measured, there was no time", found.tokens_a_round
    of_rounds = f"{depths or 'nothing'}; {rounds or 0.0:.2f} tokens a round"
    lines = [
        f"probe: {found.positions} answer tokens of the target at temperature {found.temperature:g}; "
        f"N={found.particles}, K={found.block}, lockstep",
        f"distributions: KL {found.kl:.2f} nats a token, overlap {found.overlap:.2f}, same likeliest token "
        f"{found.same_likeliest:.0%}",
        f"accepted by depth: {late if rounds is None else of_rounds}",
        "SMC: " + (late if found.log_evidence is None else f"log Z {number(found.log_evidence, '+.2f')} a token"),
        "expected speed, relative to the target alone: "
        + ", ".join(f"{name} {'unknown' if speed is None else f'{speed:.2f}x'}" for name, speed in speeds.items()),
        *found.recommendation,
    ]
    out.print("", *lines, sep="\n", markup=False, soft_wrap=True)


def _print(report: PairReport, directories: tuple[Path, Path]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(overflow="fold")
    for role in ("target", "draft"):
        table.add_column(role, justify="right", overflow="fold")
    columns = [{} if model is None else _column(model) for model in (report.target, report.draft)]
    for name in columns[0] or columns[1]:
        table.add_row(Text(name, style="dim"), *(column.get(name, "refused") for column in columns))
    for role, directory in zip(("target", "draft"), directories):
        out.print(Text.assemble((f"{role:7}", "dim"), str(directory)), soft_wrap=True)
    out.print()
    for problem in report.problems:
        out.print(Text.assemble(("problem: ", "bold red"), problem), soft_wrap=True)
    if report.target or report.draft:
        out.print(*([""] if report.problems else []), table, "", sep="\n")
    if not report.problems:
        what = f": {report.shared_ids:,} shared token ids, contexts up to {report.max_context:,} tokens"
        out.print(Text.assemble(("ok", "bold green"), what), soft_wrap=True)
        for note in report.notes(MOST_NAMED):
            out.print(Text.assemble(("note: ", "bold"), note), soft_wrap=True)
        if report.shared_bytes:
            out.print(
                f"shared: {_size(report.shared_bytes)} of the draft's embedding and head are the target's; a process "
                "with both models on one device holds them once",
                soft_wrap=True,
            )


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.2f} MiB"


def _rank(model: ModelReport, degree: int) -> str:
    """Return the size of a rank's weights and its numbers of query heads and key/value heads. If ranks hold different
    numbers of heads, shows the lowest and the highest."""
    if degree not in model.rank_bytes:
        return "none" if model.gpu_obstacle else "no split"
    if degree == 1:
        return _size(model.rank_bytes[degree])
    counts = [sorted({*held}) for held in zip(*model.rank_heads[degree])]
    heads = " / ".join(f"{held[0]}-{held[-1]}" if len(held) > 1 else str(held[0]) for held in counts)
    return f"{_size(model.rank_bytes[degree])}, heads {heads}"


def _column(model: ModelReport) -> dict[str, str]:
    config, size = model.config, model.parameters
    ranks = {f"a rank of {degree}" if degree > 1 else "one rank": _rank(model, degree) for degree in DEGREES}
    return {
        "architecture": config.family,
        "layers": str(config.num_layers),
        "hidden size": f"{config.hidden_size:,}",
        "query / KV heads": f"{config.num_heads} / {config.num_kv_heads}",
        "vocabulary": f"{config.vocab_size:,}",
        "context": f"{config.max_context:,}",
        "parameters": f"{size / 1e9:.2f} B" if size >= 1e8 else f"{size / 1e6:.2f} M",
        "weights": model.weights,
        "size": _size(model.bytes),
        "on a GPU": model.gpu_obstacle or model.gpu_dtype,
        **ranks,
        "ends at ids": ", ".join(map(str, model.eos_ids)) or "none",
        "sampling": ", ".join(f"{name} {value:g}" for name, value in model.sampling.items()) or "library's",
    }
