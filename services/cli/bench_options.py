"""What `smcserve bench` is asked for: its options, and which of them say nothing together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from services.cli import gang, options
from smc.evaluation.reports import ttft
from smc.evaluation.reports.speed import APART, MODES, WIDE

ROUNDS = 30
LAW = ("temperature", "top_k", "top_p", "min_p", "guidance_scale")
"""Options that say what law tokens are drawn from."""
OF_METHOD = {"smc": "population", "exact": "verification"}
"""What each method, and no other, has to be told."""
OWN = ("target_dtype", "draft_dtype", "draft_vocab", "draft_vocab_text")
"""Options that say how the models are held."""


@dataclass(frozen=True)
class BenchOptions:
    """The command's options. What was not given is None, or False."""

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
            "random: shapes named by --target, --draft; grown: the demo pair inside such shapes, with problems as prompts (cuda only).",
            metavar="files|random|grown",
        ),
    ] = None
    mode: Annotated[
        list[str] | None,
        options.option(
            options.MEASURE,
            f"Of {', '.join(MODES)} and, with --link, {WIDE} (plain on all GPUs of both models); may be repeated (cuda only).",
            "--mode",
            metavar="MODE",
        ),
    ] = None
    context: Annotated[
        list[int] | None,
        options.option(
            options.MEASURE,
            "Prompt tokens; may be repeated (cuda, --prompts). Of --advise: of contexts. Default: 256.",
            metavar="TOKENS",
        ),
    ] = None
    prompts: Annotated[
        bool,
        options.option(
            options.MEASURE,
            "Time to the first token, alone and beside --concurrency requests, new and cached. Default of --context: 256, 4k, 16k, 64k.",
            "--prompts",
        ),
    ] = False
    advise: options.Advise = False
    gpus: options.Gpus = None
    acceptance: options.AcceptanceOfOne = None
    method: Annotated[
        list[str] | None,
        options.option(
            options.SAMPLING, "Of modes of both models; may be repeated (cuda only). Default: smc.", metavar="smc|exact"
        ),
    ] = None
    population: Annotated[str | None, options.sampling_option("population")] = None
    verification: Annotated[str | None, options.sampling_option("verification")] = None
    guidance_scale: Annotated[float | None, options.sampling_option("guidance_scale")] = None
    temperature: Annotated[float | None, options.sampling_option("temperature")] = None
    top_k: Annotated[int | None, options.sampling_option("top_k")] = None
    top_p: Annotated[float | None, options.sampling_option("top_p")] = None
    min_p: Annotated[float | None, options.sampling_option("min_p")] = None
    particles: options.ParticlesList = None
    block: options.BlockList = None
    branches: options.BranchesList = None
    concurrency: Annotated[
        list[int] | None,
        options.option(
            options.MEASURE,
            "Requests side by side; may be repeated. Default: 1 and 16, with --prompts 8, with --advise 1, 8 and 64.",
            "--concurrency",
            "-c",
            metavar="COUNT",
        ),
    ] = None
    rounds: Annotated[
        int | None,
        options.option(
            options.MEASURE, f"Rounds timed for each line of the table. Default: {ROUNDS}.", metavar="COUNT"
        ),
    ] = None
    link: Annotated[
        list[str] | None,
        options.option(
            gang.CLUSTER, "Each model in its own process, over this link; may be repeated.", metavar="nccl|grpc"
        ),
    ] = None
    draft_tp: gang.DraftTp = None
    target_tp: gang.TargetTp = None
    drafting: Annotated[
        str | None,
        options.option(
            options.ENGINE,
            "For exact decoding: as much as its cost, timed first, pays for, or always all of the tree (cuda only). Default: always.",
            "--drafting",
            metavar="costs|always",
        ),
    ] = None
    no_prefix_cache: options.NoPrefixCache = False
    threads: options.Threads = None
    json: Annotated[Path | None, options.option(options.OUTPUT, "Write the numbers here.", metavar="FILE")] = None
    trace: Annotated[
        Path | None,
        options.option(options.OUTPUT, "Write a Chrome trace of all timed rounds here (cuda only).", metavar="FILE"),
    ] = None
    picture: Annotated[
        Path | None, options.option(options.OUTPUT, "Draw what --advise foretells (png).", metavar="FILE")
    ] = None

    def named(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    @property
    def law(self) -> dict[str, Any]:
        """Of the target's, what was given; of `SamplingParams`, by name."""
        return {name: value for name, value in self.named(*LAW).items() if value is not None}

    @property
    def modes(self) -> Sequence[str]:
        """Of GPUs, each once, in the order given."""
        return tuple(dict.fromkeys(self.mode or (APART if self.link else MODES)))

    @property
    def decodings(self) -> list[dict[str, Any]]:
        """Of the modes of both models, what was given, once for each method; of `SamplingParams`, by name. Where there
        are several methods, each is told what is its own."""
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
        """Requests side by side."""
        return self.concurrency or list(ttft.BESIDE if self.prompts else (1, 16))

    @property
    def timed_rounds(self) -> int:
        return ROUNDS if self.rounds is None else self.rounds

    def check(self, idle: Mapping[str, Any], *paths: Path | None) -> None:
        """Counts, and files that are to be written. `idle`: settings that would have no effect without --link. Raises
        ValueError."""
        for name, values in (("concurrency", self.loads), ("rounds", [self.timed_rounds])):
            if min(values) < 1:
                raise ValueError(f"--{name} {min(values)}; allowed: >= 1")
        for path in filter(None, paths):
            if not path.absolute().parent.is_dir():
                raise ValueError(f"cannot write {path}: its directory does not exist")
        if not self.link:
            refuse_idle(idle, "without --link")

    def check_decoding(self) -> None:
        """Raises ValueError for what cannot be decoded so, or has no effect with it."""
        from smc.api.sampling_params import SamplingParams

        if self.load == "grown" and self.guidance_scale not in (None, 1):
            raise ValueError(
                f"--guidance-scale {self.guidance_scale:g} has laws that are not the small pair's with --load grown, whose further tokens "
                "come to be drawn; allowed: --load random, or files"
            )
        for decoding in self.decodings:
            if decoding["method"] not in OF_METHOD:
                raise ValueError(
                    f"--method {decoding['method']}; allowed: {', '.join(OF_METHOD)} (plain decoding is a mode of its own)"
                )
            SamplingParams(**decoding)
        if "exact" not in (self.method or ()):
            refuse_idle(self.named("drafting"), "without --method exact")
        elif self.verification == "rejection":
            refuse_idle(self.named("drafting"), "with --verification rejection")


def refuse_idle(given: Mapping[str, Any], where: str) -> None:
    """Settings that would have no effect. Raises ValueError."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"--{name.replace('_', '-')} {value} has no effect {where}; leave it out")
