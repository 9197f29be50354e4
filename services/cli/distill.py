"""`smcserve distill`: trains a draft for any target on conversations that the target writes itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from services.cli import options
from smc.terminal import err, finite, out

if TYPE_CHECKING:
    from smc.distill.measure import Measurement
    from smc.model.tokenizer import Tokenizer

DRAFT, DATA, TRAINING = "Draft", "Conversations", "Training"
DEMO_PROMPTS = 2000


@dataclass(frozen=True)
class RunSize:
    """Sizes of a run that depend on the device; see the fields of `DistillConfig`."""

    batch: int
    slots: int
    held_out: int
    contexts: int


SIZES = {
    "cpu": RunSize(batch=8, slots=64, held_out=16, contexts=48),
    "cuda": RunSize(batch=128, slots=512, held_out=96, contexts=400),
}
"""Default sizes by device."""


@dataclass(frozen=True, kw_only=True)
class DistillOptions:
    """Options of `smcserve distill`."""

    out_directory: Annotated[
        Path,
        options.option(
            options.OUTPUT, "Directory that the draft is written to.", "--out", metavar="DIR", show_default=False
        ),
    ]
    target: Annotated[
        Path | None,
        options.option(
            options.MODELS,
            "Target model: a directory, or ORG/NAME or ORG/NAME@REVISION on the Hugging Face hub. "
            "Default: the demo target.",
            metavar="MODEL",
        ),
    ] = None
    minutes: Annotated[
        float | None,
        options.option(
            TRAINING, "Wall time of the whole run. Default: 5, if --tokens is not given.", metavar="MINUTES"
        ),
    ] = None
    tokens: Annotated[
        int | None,
        options.option(TRAINING, "Number of answer tokens to train on, instead of --minutes.", metavar="TOKENS"),
    ] = None
    layers: Annotated[
        int | None,
        options.option(
            DRAFT,
            "Number of layers of the draft, which are cut from the target. Default: one of seven, at least two.",
            metavar="L",
        ),
    ] = None
    shape: Annotated[
        str | None,
        options.option(
            DRAFT, "Train a new model of this width and number of layers, such as 256x6.", metavar="WIDTHxLAYERS"
        ),
    ] = None
    draft: Annotated[
        Path | None,
        options.option(DRAFT, "Start from the weights of this draft, given like --target.", metavar="MODEL"),
    ] = None
    own_embedding: Annotated[
        bool,
        options.flag(
            DRAFT,
            "Train the embedding and the head, too. Default: they stay those of the target, or of --draft.",
            "--own-embedding",
        ),
    ] = False
    prompts: Annotated[
        Path | None,
        options.option(
            DATA,
            "File of prompts with which half of the conversations begin. Each line is text, or JSON with "
            '"prompt" or "messages".',
            metavar="FILE",
        ),
    ] = None
    from_log: Annotated[
        Path | None,
        options.option(
            DATA,
            "Log of a service with log-texts: true in its configuration; its prompts are used like those of --prompts.",
            metavar="FILE",
        ),
    ] = None
    temperature: Annotated[
        list[float] | None,
        options.option(
            DATA,
            "Temperature of later requests, for which the draft is trained; may be repeated. Default: 1 "
            "and 0.7, and 0 for one answer of five.",
            metavar="T",
        ),
    ] = None
    turns: Annotated[int, options.option(DATA, "Maximum number of user turns of a conversation.", metavar="COUNT")] = 2
    width: Annotated[int, options.option(DATA, "Maximum number of tokens of a conversation.", metavar="TOKENS")] = 512
    seed: Annotated[int, options.option(DATA, "Seed of the conversations and of their order.", metavar="SEED")] = 0
    loss: Annotated[
        str,
        options.option(
            TRAINING,
            "Loss. tv (total variation): for exact decoding; chi2 (chi-square): for SMC; kl "
            "(Kullback-Leibler): for neither in particular.",
            metavar="tv|chi2|kl",
        ),
    ] = "tv"
    rate: Annotated[float, options.option(TRAINING, "Peak learning rate.", metavar="RATE")] = 1e-3
    batch: Annotated[
        int | None,
        options.option(
            TRAINING,
            f"Number of conversations in a training step. Default: {SIZES['cpu'].batch} on a CPU, "
            f"{SIZES['cuda'].batch} on a GPU.",
            metavar="COUNT",
        ),
    ] = None
    rounds: Annotated[
        int,
        options.option(TRAINING, "Number of rounds; each writes conversations, trains and measures.", metavar="COUNT"),
    ] = 8
    resume: Annotated[bool, options.flag(TRAINING, "Continue an interrupted run in --out.", "--resume")] = False
    device: Annotated[
        str, options.option(options.MODELS, "Device that runs the target and the training.", metavar="cpu|cuda")
    ] = "cpu"
    processes: Annotated[
        int,
        options.option(
            options.MODELS, "Number of processes that train together, each on a GPU of its own.", metavar="COUNT"
        ),
    ] = 1
    slots: Annotated[
        int | None,
        options.option(
            options.ENGINE,
            "Number of conversations that a process writes at the same time. Default: "
            f"{SIZES['cpu'].slots} on a CPU, {SIZES['cuda'].slots} on a GPU.",
            metavar="COUNT",
        ),
    ] = None
    threads: options.Threads = None
    no_speed: Annotated[
        bool, options.flag(options.MEASURE, "Do not time the models, and print no expected speeds.", "--no-speed")
    ] = False
    as_json: options.JsonFlag = False


@options.with_options(DistillOptions)
def distill(given: DistillOptions) -> int:
    """Train a draft for a target on text that the target itself writes, and measure what the draft gains."""
    from smc import demo
    from smc.distill.conversations import TEMPERATURES, TalkSettings
    from smc.distill.run import DistillConfig, distill
    from smc.distill.student import StudentSpec
    from smc.distill.trainer import OPTIMIZER, TrainingSettings
    from smc.loading import DEMO, DEVICES, use_threads
    from smc.model.source import find_model

    if given.device not in DEVICES:
        raise ValueError(f"--device {given.device}; allowed: {', '.join(DEVICES)}")
    _check_device(given.device, given.processes)
    directory, size = find_model(given.target) if given.target else demo.TARGET, SIZES[given.device]
    draft = find_model(given.draft) if given.draft else None
    texts = fitting(_texts(directory, given.prompts, given.from_log, is_demo=directory == demo.TARGET), given.width)
    served = tuple(given.temperature or ())
    config = DistillConfig(
        target=directory,
        out=given.out_directory,
        minutes=5.0 if given.minutes is None and given.tokens is None else given.minutes,
        tokens=given.tokens,
        student=StudentSpec(given.layers, given.shape, draft, given.own_embedding),
        talk=TalkSettings(served or TEMPERATURES, width=given.width, turns=given.turns, seed=given.seed),
        training=TrainingSettings(
            loss=given.loss,
            batch=given.batch or size.batch,
            optimizer=replace(OPTIMIZER, peak_rate=given.rate),
        ),
        temperatures=tuple(sorted({each for each in served if each > 0} or {1.0, 0.7}, reverse=True)),
        prompts=texts,
        mixed=not (directory == demo.TARGET and given.prompts is None and given.from_log is None),
        rounds=given.rounds,
        device=given.device,
        processes=given.processes,
        slots=given.slots or size.slots,
        held_out=size.held_out,
        contexts=size.contexts,
        times_models=not given.no_speed,
        resume=given.resume,
    )
    use_threads(given.threads, DEMO if directory == demo.TARGET else (directory, directory))
    with err.status("") as status:

        def report(line: str) -> None:
            if line.startswith("\r"):  # replaces the status line
                status.update(line[1:])
            else:
                err.print(line, soft_wrap=True, markup=False)

        found = distill(config, report)
    if given.as_json:
        print(json.dumps(finite({"out": str(given.out_directory), **asdict(found)})))
    else:
        _print(found, given.out_directory)
    return 0


def _check_device(device: str, processes: int) -> None:
    if device == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no CUDA device, or this torch was built without CUDA")
    if processes > torch.cuda.device_count():
        raise ValueError(f"--processes {processes}; this machine has {torch.cuda.device_count()} GPUs")


def _texts(directory: Path, file: Path | None, log: Path | None, is_demo: bool) -> tuple[tuple[int, ...], ...]:
    """Return token ids of the given prompts; without any, those of demo problems for the demo target, which has learnt
    only to answer them, and none for other targets."""
    from smc.model.tokenizer import Tokenizer

    if file is None and log is None and not is_demo:
        return ()
    tokenizer = Tokenizer.load(directory)
    logged = logged_prompts(tokenizer, log) if log else ()
    if file is None and logged:
        return logged
    if file is None:
        return demo_prompts(tokenizer)
    found = tuple(_prompts_of(tokenizer, file))
    if not found:
        raise ValueError(f"{file} holds no prompts; give one prompt a line")
    return (*found, *logged)


def demo_prompts(tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return token ids of problems for the demo target."""
    from smc.demo.problems import generate

    problems = generate(0, DEMO_PROMPTS, "train")
    return tuple(tuple(tokenizer.chat([{"role": "user", "content": each.question}])) for each in problems)


def fitting(prompts: tuple[tuple[int, ...], ...], width: int) -> tuple[tuple[int, ...], ...]:
    """Return the prompts that leave room for an answer in conversations of `width` tokens. Raises ValueError if there
    are prompts but none fits."""
    from smc.distill.conversations import LEAST_ANSWER

    most = width - LEAST_ANSWER
    found = tuple(each for each in prompts if len(each) <= most)
    if prompts and not found:
        raise ValueError(f"all {len(prompts)} prompts have more than {most} tokens; give a --width above {width}")
    if left := len(prompts) - len(found):
        err.print(f"{left} of {len(prompts)} prompts are left out: they have more than {most} tokens (--width {width})")
    return found


def _prompts_of(tokenizer: Tokenizer, file: Path) -> Iterator[tuple[int, ...]]:
    try:
        # Not `splitlines`: texts in JSON may contain other line separators.
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _encoded(tokenizer, line.rstrip("\n"), f"{file}:{number}")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}") from error


def logged_prompts(tokenizer: Tokenizer, log: Path) -> tuple[tuple[int, ...], ...]:
    """Return token ids of the prompts in a service's log, each once. A line of the log may have a time and other text
    before its JSON, or be wrapped as the `log` of another object. Lines without a prompt are left out. Raises
    ValueError if there are no prompts, or if they have token ids that the target lacks."""
    found: dict[tuple[int, ...], None] = {}
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            ids = _object_of(line).get("prompt_ids")
            if isinstance(ids, list) and ids and all(isinstance(each, int) and each >= 0 for each in ids):
                found[tuple(ids)] = None
    if not found:
        raise ValueError(
            f"{log} holds no request with its prompt; allowed: the log of a service with log-texts: true in its "
            "configuration file"
        )
    if (most := max(map(max, found))) >= tokenizer.size:
        raise ValueError(
            f"{log} holds token {most}, but the target has {tokenizer.size} tokens; give the log of a service "
            "of this target"
        )
    return tuple(found)


def _object_of(line: str) -> dict[str, Any]:
    """Return the JSON object at the end of a line of a log; empty if there is none."""
    at = line.find("{")
    while at >= 0:
        try:
            found = json.loads(line[at:])
        except (ValueError, RecursionError):
            at = line.find("{", at + 1)
            continue
        wrapped = found.get("log")
        return _object_of(wrapped) if isinstance(wrapped, str) else found
    return {}


def _encoded(tokenizer: Tokenizer, line: str, where: str) -> tuple[int, ...]:
    content: Any = line
    if line.lstrip().startswith("{"):
        try:
            content = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where} is not valid JSON: {error}") from error
        content = content.get("messages", content.get("prompt"))
        if not isinstance(content, (str, list)):
            raise ValueError(f'{where} has neither a text "prompt" nor a list "messages"')
    if not content:
        raise ValueError(f"{where} has an empty prompt; leave it out")
    if not tokenizer.has_chat_template and not isinstance(content, str):
        raise ValueError(f"{where} has messages, but the target has no chat template; give texts")
    messages: Sequence[dict[str, Any]] = [{"role": "user", "content": content}] if isinstance(content, str) else content
    try:
        ids = tokenizer.chat(messages) if tokenizer.has_chat_template else tokenizer.encode(content)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return tuple(ids)


def _print(found: Measurement, directory: Path) -> None:
    from smc.distill.measure import BLOCK

    out.print(
        f"{directory}: overlap {found.overlap:.3f}, KL {found.kl:.3f} nats a token, same likeliest token "
        f"{found.same_likeliest:.0%}; {found.trained_tokens:,} answer tokens in {found.seconds:.0f} s",
        *(
            f"temperature {each.temperature:g}, {each.rows} row{'s' if each.rows > 1 else ''}: a tree contains "
            f"{each.held:.2f} of the next {BLOCK} "
            f"tokens{'' if each.speed is None else f', expected speed {each.speed:.2f}x'}"
            for each in found.trees
        ),
        sep="\n",
        markup=False,
        soft_wrap=True,
    )
