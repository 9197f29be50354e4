"""The options that commands share, each defined once, and the configuration file: YAML whose keys are the names of a
command's options. Knows nothing about the meaning of options: their configuration classes check the values. Imports
nothing heavy, so that `--help` is immediate."""

from __future__ import annotations

import difflib
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import yaml
from typer.models import ArgumentInfo

from smc.api.constraint import Constraint
from smc.api.sampling_params import SETTINGS, SamplingParams
from smc.api.settings import Scope
from smc.terminal import flag, option, with_mappings, with_parameters

Record = TypeVar("Record")
MODELS, SAMPLING, PARTICLES, ENGINE, MEASURE, OUTPUT = (
    "Models",
    "Sampling",
    "Particles",
    "Engine",
    "Measurement",
    "Output",
)

SHOWN = 88
"""Maximum number of columns of a comment in a printed configuration file, and of a value in an error."""


def sampling_option(name: str) -> Any:
    """Return the option for a field of `SamplingParams`."""
    known = SETTINGS[name]
    assert known.option is not None, "only for settings that are options"
    panel = SAMPLING if known.scope is Scope.ALL else PARTICLES
    names = known.option.names or (f"--{name.replace('_', '-')}",)
    return option(
        panel, known.option.help, *names, metavar=known.option.metavar, show_default=bool(known.option.metavar)
    )


def _sampling_options() -> dict[str, Any]:
    """Return the annotated types of the options for fields of `SamplingParams`, by name. All may be None."""
    kinds, options = get_type_hints(SamplingParams), {}
    for name in (name for name, known in SETTINGS.items() if known.option is not None):
        kind = kinds[name]
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            kind = str  # the library checks the value
        if get_origin(kind) is tuple:
            kind = list.__class_getitem__(get_args(kind)[0])
        options[name] = Annotated[kind | None, sampling_option(name)]
    return options


CONSTRAINTS: dict[str, Any] = {
    "json_schema": Annotated[
        Path | None, option(SAMPLING, "File with a JSON schema, which the answer matches.", metavar="FILE")
    ],
    "json_object": Annotated[bool | None, flag(SAMPLING, "The answer is a JSON object.", "--json-object")],
    "regex": Annotated[str | None, option(SAMPLING, "The answer matches this regular expression.", metavar="REGEX")],
    "grammar": Annotated[
        Path | None,
        option(SAMPLING, "File with a grammar in Lark's syntax or GBNF, which the answer matches.", metavar="FILE"),
    ],
    "choice": Annotated[
        list[str] | None,
        option(SAMPLING, "The answer is this text. If repeated, the answer is one of the texts.", metavar="TEXT"),
    ],
}
"""Options that constrain the answer. At most one may be given."""


def _with_constraint(sampling: dict[str, Any]) -> dict[str, Any]:
    """Replace the given options of `CONSTRAINTS` with a setting. Raises ValueError if there are several, OSError if
    a file cannot be read."""
    found = {name: sampling.pop(name) for name in CONSTRAINTS if name in sampling}
    if not found:
        return sampling
    if len(found) > 1:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in found)
        raise ValueError(f"{names} are given; allowed: one of them")
    ((name, value),) = found.items()
    value = value.read_text(encoding="utf-8") if isinstance(value, Path) else value
    return sampling | {"constraint": Constraint.of({name: value}, f"--{name.replace('_', '-')}")}


def with_settings(command: Callable[..., int]) -> Callable[..., int]:
    """Replace the parameter `sampling` of a command with the options of sampling and of constraints, and its parameter
    `engine`, if it has one, with options of the engine. The command gets the given ones by name."""
    engine = {"form": Form, "block": Block, "branches": Branches, "max_context": MaxContext}
    options = {"sampling": _sampling_options() | CONSTRAINTS, "engine": engine}

    @wraps(command)
    def call(*, sampling: dict[str, Any], **arguments: Any) -> int:
        return command(sampling=_with_constraint(sampling), **arguments)

    there = inspect.signature(command).parameters
    return with_mappings(call, **{name: made for name, made in options.items() if name in there})


def load_own(paths: Iterable[tuple[str, str]]) -> Mapping[str, Any]:
    """Load potentials from modules on Python's path or in the current directory. `paths`: pairs of a name and
    `module:function`. Returns them by name. Raises ValueError if one cannot be loaded."""
    from smc.potentials import load_potentials

    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return load_potentials(paths)


FILE_ONLY = object()
"""Marks a field of a record that is a key of the configuration file but not a flag of the command."""


@dataclass(frozen=True)
class Key:
    """An option as a key of the configuration file."""

    name: str
    """Name of the option, without its leading dashes."""
    kind: Any
    """Type of the value, or its union with None."""
    help: str
    panel: str


def keys_of(record: type) -> dict[str, Key]:
    """Return the keys by field of a record, with the keys of one panel side by side. Arguments, and the options that
    name or print the file itself, are not keys."""
    keys, kinds = {}, get_type_hints(record, include_extras=True)
    for field in inspect.signature(record).parameters:
        kind, *extras = get_args(kinds[field])
        made = next(one for one in extras if hasattr(one, "param_decls"))
        if field in ("config", "print_config") or isinstance(made, ArgumentInfo):
            continue
        names = [one[2:] for one in (made.default, *(made.param_decls or ())) if str(one).startswith("--")]
        keys[field] = Key(names[0] if names else field.replace("_", "-"), kind, made.help, made.rich_help_panel)
    panels = list(dict.fromkeys(key.panel for key in keys.values()))
    return dict(sorted(keys.items(), key=lambda item: panels.index(item[1].panel)))


def with_options(record: type[Record]) -> Callable[[Callable[[Record], int | None]], Callable[..., int | None]]:
    """Decorate a command that takes an instance of the dataclass `record`: its fields become the options, except those
    with FILE_ONLY."""
    kinds = get_type_hints(record, include_extras=True)
    parameters = [
        one.replace(annotation=kinds[one.name])
        for one in inspect.signature(record).parameters.values()
        if FILE_ONLY not in get_args(kinds[one.name])
    ]

    def of(command: Callable[[Record], int | None]) -> Callable[..., int | None]:
        @wraps(command)
        def call(**arguments: Any) -> int | None:
            return command(record(**arguments))

        return with_parameters(call, parameters)

    return of


def given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were given, without those left to their defaults."""
    return {
        name: value for name, value in arguments.items() if value is not None and value is not False and value != []
    }


def values_of(arguments: Any) -> dict[str, Any]:
    """Return the values of a command's options by field: those in the file of --config, and those given as flags, which
    take precedence. `arguments`: the command's record of options. Raises ValueError as `read_config_file` does."""
    values = {} if arguments.config is None else read_config_file(arguments.config, type(arguments))
    return values | given(asdict(arguments))


Target = Annotated[
    Path | None,
    option(
        MODELS,
        "Target model: a directory, or ORG/NAME or ORG/NAME@REVISION on the Hugging Face hub; needs "
        "--draft. Default: the demo pair.",
        metavar="MODEL",
    ),
]
Draft = Annotated[
    Path | None,
    option(
        MODELS,
        "Draft model: a directory or a name, like --target; needs --target. Default: the demo pair.",
        metavar="MODEL",
    ),
]
Device = Annotated[str, option(MODELS, "Device that runs both models.", metavar="cpu|cuda")]
Dtype = Annotated[
    str | None,
    option(
        MODELS,
        "Data type of both models: float32, bfloat16, float16, fp8 or int4. Default: float32 on a "
        "CPU, bfloat16 (int4 if stored so) on a GPU.",
        metavar="TYPE",
    ),
]
TargetDtype = Annotated[
    str | None,
    option(
        MODELS,
        "Data type of the target. fp8: its matrices are FP8, with a scale for each output; int4: the "
        "matrices of its layers are int4, as stored or in groups of 128. All other weights are "
        "bfloat16. Default: as --dtype.",
        metavar="TYPE",
    ),
]
DraftDtype = Annotated[
    str | None,
    option(
        MODELS,
        "Data type of the draft. auto: its stored type, fp8 or int4, chosen by the time of a step on "
        "the GPU. Default: as --dtype.",
        metavar="TYPE",
    ),
]
GenerationConfig = Annotated[
    str | None,
    option(
        MODELS,
        "Source of sampling settings that a request leaves out. auto: the target's "
        "generation_config.json; ignore: the library's defaults. Default: auto.",
        metavar="auto|ignore",
    ),
]
DraftVocab = Annotated[
    int | None,
    option(
        MODELS,
        "Draft only the N tokens that are most frequent in --draft-vocab-text, or in the text that "
        "`distill` trained the draft on. Default: all tokens.",
        metavar="N",
    ),
]
DraftVocabText = Annotated[
    Path | None,
    option(
        MODELS,
        "UTF-8 text, similar to the expected answers, in which tokens are counted for --draft-vocab.",
        metavar="FILE",
    ),
]

NegativePrompt = Annotated[
    str | None,
    option(
        SAMPLING,
        "Prompt that --guidance-scale leads answers away from. Default: the token that begins texts.",
        metavar="TEXT",
    ),
]
Raw = Annotated[bool, flag(SAMPLING, "Pass the prompt as plain text, without the chat template.", "--raw")]

Threads = Annotated[
    int | None,
    option(
        ENGINE,
        "Number of CPU threads of torch. Default: 1 for the demo pair, otherwise torch's default.",
        metavar="COUNT",
    ),
]
Form = Annotated[
    str | None,
    option(
        ENGINE,
        "Form of a round. lockstep: the models work one after the other; lookahead: at the same time. Default: "
        "lookahead.",
        metavar="FORM",
    ),
]
Block = Annotated[
    int | None,
    option(ENGINE, "K, the number of tokens drafted in a round, 1..32. Default: 8.", "--block", "-k", metavar="K"),
]
Branches = Annotated[
    int | None,
    option(
        ENGINE,
        "F, the number of branches drafted for each particle, 1..32; lookahead only. Default: 4.",
        "--branches",
        "-f",
        metavar="F",
    ),
]
MaxContext = Annotated[
    int | None,
    option(
        ENGINE,
        "Maximum tokens of a prompt and its answer together. Default: the context that the models were made for.",
        metavar="TOKENS",
    ),
]
NoPrefixCache = Annotated[
    bool | None,
    flag(
        ENGINE,
        "Compute every prompt in full, even if an earlier prompt began with the same tokens.",
        "--no-prefix-cache",
    ),
]

JsonFlag = Annotated[bool, flag(OUTPUT, "Print one JSON object instead of text.", "--json")]


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, which YAML's own loader accepts."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    if twice := [key for index, key in enumerate(keys) if key in keys[:index]]:
        raise yaml.constructor.ConstructorError(None, None, f"{twice[0]!r} is given twice", node.start_mark)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_config_file(path: Path, record: type) -> dict[str, Any]:
    """Read a configuration file; return the values by field of `record`. A key with null counts as absent. Raises
    ValueError naming the file, the key, the value and what is allowed."""
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ValueError(f"--config {path}: {why}; give a YAML file of options") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {_shown(found)}; allowed: a mapping of options, such as `port: 50051`")
    keys = {key.name: (field, key) for field, key in keys_of(record).items()}
    given: dict[str, Any] = {}
    for written, value in found.items():
        name = str(written).replace("_", "-")
        if name not in keys:
            near = difflib.get_close_matches(name, keys, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ValueError(f"{path}: unknown key {written!r}.{hint} Allowed: {', '.join(sorted(keys))}")
        field, key = keys[name]
        if field in given:
            raise ValueError(f"{path}: {name} is given twice, with dashes and with underscores")
        if value is not None:
            given[field] = _converted(path, key, value)
    return given


def config_file_text(values: Mapping[str, Any], record: type) -> str:
    """Return the text of a configuration file with these values, by field. Each option follows a comment that describes
    it; None is written as null."""
    lines, panel = [], None
    for field, key in keys_of(record).items():
        if key.panel != panel:
            panel = key.panel
            lines += ["", f"# {panel}", ""]
        lines += _comment(key.help)
        value = values[field]
        if isinstance(value, tuple):
            value = list(value) or None
        elif isinstance(value, dict):
            value = value or None
        elif isinstance(value, Path):
            value = str(value)
        lines.append(
            yaml.safe_dump({key.name: value}, default_flow_style=False, width=1000, allow_unicode=True).strip()
        )
    return "\n".join(lines[1:]) + "\n"


def _comment(text: str) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= SHOWN:
            lines.append("")
        lines[-1] += f" {word}"
    return [f"#{line}" for line in lines]


def value_kind(key: Key) -> tuple[type, type | None]:
    """Return the type of a key's value, and the container that holds such values: `list`, `dict` or None."""
    kind = next(one for one in get_args(key.kind) if one is not types.NoneType) if get_args(key.kind) else key.kind
    container = get_origin(kind)
    return (kind, None) if container is None else (get_args(kind)[0], container)


def _converted(path: Path, key: Key, value: Any) -> Any:
    """Convert a value from the file as the command line would. Raises ValueError if it has the wrong type."""
    kind, container = value_kind(key)
    if container is dict:
        if not isinstance(value, dict) or not all(isinstance(text, str) for pair in value.items() for text in pair):
            raise ValueError(f"{path}: {key.name}={_shown(value)}; allowed: a mapping of text to text")
        return value
    items = container is list
    convert, allowed = _CONVERSIONS[kind]
    try:
        if items:
            return [convert(item) for item in (value if isinstance(value, list) else [value])]
        return convert(value)
    except ValueError as error:
        kinds = f"{allowed}, or a list of such" if items else allowed
        raise ValueError(f"{path}: {key.name}={_shown(value)}; allowed: {kinds}") from error


def _number(kind: type) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError
        return kind(str(value))  # through a string, so that int refuses 8.5

    return convert


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


_CONVERSIONS: Mapping[type, tuple[Callable[[Any], Any], str]] = types.MappingProxyType(
    {
        int: (_number(int), "a whole number"),
        float: (_number(float), "a number"),
        str: (_text, "text"),
        Path: (lambda value: Path(_text(value)), "a path"),
        bool: (_truth, "true, false"),
    }
)


def _shown(value: Any) -> str:
    """Return a value as text, shortened for an error."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}.."
