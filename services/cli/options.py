"""The options that commands share, each defined once. Imports nothing heavy: `--help` must come at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from smc.api.sampling_params import SETTINGS, SamplingParams
from smc.api.settings import Scope
from smc.terminal import option

Record = TypeVar("Record")
MODELS, SAMPLING, PARTICLES, ENGINE, MEASURE, OUTPUT = (
    "Models",
    "Sampling",
    "Particles",
    "Engine",
    "What is measured",
    "Output",
)


def sampling_option(name: str) -> Any:
    """Of a field of `SamplingParams`."""
    known = SETTINGS[name]
    assert known.option is not None, "only of SAMPLING_NAMES"
    panel = SAMPLING if known.scope is Scope.ALL else PARTICLES
    names = known.option.names or (f"--{name.replace('_', '-')}",)
    return option(
        panel, known.option.help, *names, metavar=known.option.metavar, show_default=bool(known.option.metavar)
    )


def _sampling_parameter(name: str, kind: Any) -> inspect.Parameter:
    """Of a command. What is not given is None, or False."""
    default = False if kind is bool else None
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        kind = str  # the library says what is allowed
    if get_origin(kind) is tuple:
        kind = list.__class_getitem__(get_args(kind)[0])
    kind = kind if kind is bool else kind | None
    annotation = Annotated[kind, sampling_option(name)]
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


SAMPLING_NAMES = tuple(name for name, known in SETTINGS.items() if known.option is not None)
"""Fields of `SamplingParams` that are options."""


NOTHING: Mapping[str, Any] = MappingProxyType({})
"""Given, where `sampling` stands for options."""


def with_sampling(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command whose parameter `sampling` stands for an option of every such field; it is called with those that are
    given, by name."""
    signature, kinds = inspect.signature(command, eval_str=True), get_type_hints(SamplingParams)
    parameters: list[inspect.Parameter] = []
    for one in signature.parameters.values():
        parameters += (
            [_sampling_parameter(name, kinds[name]) for name in SAMPLING_NAMES] if one.name == "sampling" else [one]
        )

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        asked = {name: kwargs.pop(name) for name in SAMPLING_NAMES}
        return command(*args, sampling=given(asked), **kwargs)

    call: Any = wrapped
    call.__signature__ = signature.replace(parameters=parameters)
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    return call


def with_options(record: type[Record]) -> Callable[[Callable[[Record], None]], Callable[..., None]]:
    """A command whose options are the fields of a dataclass; it is called with one."""
    kinds = get_type_hints(record, include_extras=True)
    parameters = [one.replace(annotation=kinds[one.name]) for one in inspect.signature(record).parameters.values()]

    def of(command: Callable[[Record], None]) -> Callable[..., None]:
        @wraps(command)
        def wrapped(**asked: Any) -> None:
            command(record(**asked))

        call: Any = wrapped
        call.__signature__ = inspect.Signature(parameters)
        call.__annotations__ = {one.name: one.annotation for one in parameters}
        return call

    return of


def given(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What the user said, without what was left to defaults."""
    return {name: value for name, value in asked.items() if value is not None and value is not False and value != []}


Target = Annotated[
    Path | None,
    option(MODELS, "Directory of the target model; with --draft. Default: the demo pair.", "--target", metavar="DIR"),
]
Draft = Annotated[Path | None, option(MODELS, "Directory of the draft model; with --target.", "--draft", metavar="DIR")]
Device = Annotated[str, option(MODELS, "Where both models run.", metavar="cpu|cuda")]
Dtype = Annotated[
    str | None,
    option(MODELS, "float32, bfloat16, float16 or fp8. Default: float32 on a CPU, bfloat16 on a GPU.", metavar="TYPE"),
]
TargetDtype = Annotated[
    str | None,
    option(
        MODELS,
        "Of the target alone. fp8: its matrices, with a scale for each output; all else is bfloat16.",
        metavar="TYPE",
    ),
]
DraftDtype = Annotated[str | None, option(MODELS, "Of the draft alone.", metavar="TYPE")]
DraftVocab = Annotated[
    int | None,
    option(
        MODELS,
        "Propose from the likeliest N tokens alone, by --draft-vocab-text. Default: all.",
        "--draft-vocab",
        metavar="N",
    ),
]
DraftVocabText = Annotated[
    Path | None,
    option(
        MODELS,
        "A text in UTF-8, like those to be written: its most frequent tokens are proposed.",
        "--draft-vocab-text",
        metavar="FILE",
    ),
]

NegativePrompt = Annotated[
    str | None,
    option(
        SAMPLING, "What to lead away from, with --guidance-scale. Default: the token that begins texts.", metavar="TEXT"
    ),
]
Raw = Annotated[
    bool,
    option(SAMPLING, "The prompt as plain text, without the chat template.", "--raw", show_default=False, metavar=""),
]

Threads = Annotated[
    int | None,
    option(
        ENGINE, "CPU threads of torch. Default: 1 for the demo pair, else torch's own.", "--threads", metavar="COUNT"
    ),
]
Form = Annotated[
    str | None,
    option(ENGINE, "lockstep: draft, then score; lookahead: at the same time. Default: lookahead.", metavar="FORM"),
]
Block = Annotated[int | None, option(ENGINE, "K, tokens drafted per round. Default: 8.", "--block", "-k", metavar="K")]
Branches = Annotated[
    int | None,
    option(ENGINE, "F, next blocks drafted per particle; lookahead only. Default: 4.", "--branches", "-f", metavar="F"),
]
MaxContext = Annotated[
    int | None,
    option(
        ENGINE, "Longest prompt plus answer. Default: what the models were made for.", "--max-context", metavar="TOKENS"
    ),
]
NoPrefixCache = Annotated[
    bool,
    option(
        ENGINE,
        "Compute every prompt anew, even where another began alike.",
        "--no-prefix-cache",
        show_default=False,
        metavar="",
    ),
]

JsonFlag = Annotated[bool, option(OUTPUT, "Print one JSON object instead.", "--json", show_default=False, metavar="")]

Resume = Annotated[bool, option(OUTPUT, "Go on with the file of --json.", "--resume", show_default=False, metavar="")]
