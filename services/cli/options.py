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
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from enum import StrEnum
from functools import reduce, wraps
from operator import or_
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import yaml
from typer.models import ArgumentInfo

from services.launch.config import WorkerGroupConfig
from smc.api.constraint import Constraint
from smc.api.engine_config import EngineConfig
from smc.api.sampling_params import SamplingParams
from smc.api.settings import ALL, ENGINE, MODELS, settings_of
from smc.terminal import flag, option, with_mappings, with_parameters

Record = TypeVar("Record")
SAMPLING, PARTICLES, MEASURE, OUTPUT = "Sampling", "Particles", "Measurement", "Output"
"""Further panels of `--help`, besides those of `smc.api.settings`."""

FILE_ONLY = object()
"""Marks a field of a record that is a key of the configuration file but not a flag of the command."""
COUNT_OR_WORD = int | str
"""Type of an option that is a number or a word."""
SHOWN = 88
"""Maximum number of columns of a comment in a printed configuration file, and of a value in an error."""


def option_of(kind: type, name: str) -> Any:
    """Return the option for a field of a configuration class or of `SamplingParams`."""
    known, default = settings_of(kind)[name], _defaults(kind)[name]
    assert known.help, "only for settings that are options"
    names = known.names or (f"--{option_name(kind, name).replace('_', '-')}",)
    of_class = getattr(kind, "PANEL", SAMPLING if known.decodings == ALL else PARTICLES)
    text, where = known.help_with(default), known.panel or of_class
    if isinstance(default, bool):
        return flag(where, text, *names)
    return option(where, text, *names, metavar=known.metavar or None, show_default=False)


def option_name(kind: type, name: str) -> str:
    """Return the name of a field's option: after `no_` if the field's default is True."""
    return f"no_{name}" if _defaults(kind)[name] is True else name


def _defaults(kind: type) -> dict[str, Any]:
    return {one.name: one.default for one in fields(kind)}


def option_types(kind: type) -> dict[str, Any]:
    """Return the annotated types of the options for the fields of a class, by the option's name. All may be None."""
    kinds, made = get_type_hints(kind), {}
    for name, known in settings_of(kind).items():
        if not known.help:
            continue
        held = _given_kind(kinds[name])
        if get_origin(kinds[name]) is tuple:
            (item, *_) = get_args(kinds[name])
            held = dict[str, str] if get_origin(item) is tuple else list.__class_getitem__(item)
        if isinstance(held, type) and issubclass(held, StrEnum):
            held = str  # the library checks the value
        marks = () if known.has_flag else (FILE_ONLY,)
        made[option_name(kind, name)] = Annotated[(held | None, option_of(kind, name), *marks)]
    return made


def _given_kind(kind: Any) -> Any:
    """Return a type without None, if it is a union with None."""
    if get_origin(kind) not in (types.UnionType, Union):
        return kind
    return reduce(or_, (one for one in get_args(kind) if one is not types.NoneType))


def with_fields_of(*kinds: type) -> Callable[[type[Record]], type[Record]]:
    """Decorate a record of options: it also has an option for each field of these configuration classes that declares
    one."""

    def of(record: type[Record]) -> type[Record]:
        own = get_type_hints(record, include_extras=True)
        made = {name: kind for each in kinds for name, kind in option_types(each).items()}
        rows: list[Any] = [(name, kind, field(default=None)) for name, kind in made.items()]
        rows += [(one.name, own[one.name], field(default=one.default)) for one in fields(cast(Any, record))]
        namespace = {"__doc__": record.__doc__, "__module__": record.__module__}
        return make_dataclass(record.__name__, rows, namespace=namespace, frozen=True, kw_only=True)

    return of


Regex = Annotated[str | None, option(SAMPLING, "The answer matches this regular expression.", metavar="REGEX")]
CONSTRAINTS: dict[str, Any] = {
    "json_schema": Annotated[
        Path | None, option(SAMPLING, "File with a JSON schema, which the answer matches.", metavar="FILE")
    ],
    "json_object": Annotated[bool | None, flag(SAMPLING, "The answer is a JSON object.", "--json-object")],
    "regex": Regex,
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
    of_trees = {"form": Form, "block": Block, "smc_block": SmcBlock, "branches": Branches}
    engine = {**of_trees, "max_context": MaxContext, "numerics": NumericsOrder}
    options = {"sampling": option_types(SamplingParams) | CONSTRAINTS, "engine": engine}

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
    for name in inspect.signature(record).parameters:
        kind, *extras = get_args(kinds[name])
        made = next(one for one in extras if hasattr(one, "param_decls"))
        if name in ("config", "print_config") or isinstance(made, ArgumentInfo):
            continue
        names = [one[2:] for one in (made.default, *(made.param_decls or ())) if str(one).startswith("--")]
        keys[name] = Key(names[0] if names else name.replace("_", "-"), kind, made.help, made.rich_help_panel)
    panels = list(dict.fromkeys(key.panel for key in keys.values()))
    return dict(sorted(keys.items(), key=lambda item: panels.index(item[1].panel)))


def with_options(record: type[Record]) -> Callable[[Callable[[Record], int | None]], Callable[..., int | None]]:
    """Decorate a command that takes an instance of the dataclass `record`: its fields become the options, except those
    with FILE_ONLY. Flags for numbers or words are text, which the library converts."""
    kinds = get_type_hints(record, include_extras=True)
    parameters = [
        one.replace(annotation=_flag_kind(kinds[one.name]))
        for one in inspect.signature(record).parameters.values()
        if FILE_ONLY not in get_args(kinds[one.name])
    ]

    def of(command: Callable[[Record], int | None]) -> Callable[..., int | None]:
        @wraps(command)
        def call(**arguments: Any) -> int | None:
            return command(record(**arguments))

        return with_parameters(call, parameters)

    return of


def _flag_kind(annotated: Any) -> Any:
    """Return the annotation of a flag, with text in place of `COUNT_OR_WORD`, for which the command line has no
    type."""
    kind, *marks = get_args(annotated)
    return Annotated[(str | None, *marks)] if _given_kind(kind) == COUNT_OR_WORD else annotated


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


Target = Annotated[Path | None, option_of(WorkerGroupConfig, "target")]
Draft = Annotated[Path | None, option_of(WorkerGroupConfig, "draft")]
TargetTp = Annotated[int | None, option_of(WorkerGroupConfig, "target_tp")]
DraftTp = Annotated[int | None, option_of(WorkerGroupConfig, "draft_tp")]
Device = Annotated[str, option(MODELS, "Device that runs both models.", metavar="cpu|cuda")]
Dtype = Annotated[str | None, option_of(WorkerGroupConfig, "dtype")]
TargetDtype = Annotated[str | None, option_of(WorkerGroupConfig, "target_dtype")]
DraftDtype = Annotated[str | None, option_of(WorkerGroupConfig, "draft_dtype")]
GenerationConfig = Annotated[str | None, option_of(WorkerGroupConfig, "generation_config")]
DraftVocab = Annotated[int | None, option_of(WorkerGroupConfig, "draft_vocab")]
DraftVocabText = Annotated[Path | None, option_of(WorkerGroupConfig, "draft_vocab_text")]

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
Form = Annotated[str | None, option_of(EngineConfig, "form")]
NumericsOrder = Annotated[str | None, option_of(EngineConfig, "numerics")]
Block = Annotated[int | None, option_of(EngineConfig, "block")]
SmcBlock = Annotated[int | None, option_of(EngineConfig, "smc_block")]
Branches = Annotated[int | None, option_of(EngineConfig, "branches")]
MaxContext = Annotated[int | None, option_of(EngineConfig, "max_context")]
NoPrefixCache = Annotated[bool | None, option_of(EngineConfig, "prefix_cache")]

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
    for name, key in keys_of(record).items():
        if key.panel != panel:
            panel = key.panel
            lines += ["", f"# {panel}", ""]
        lines += _comment(key.help)
        value = values[name]
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


def value_kind(key: Key) -> tuple[Any, type | None]:
    """Return the type of a key's value, and the container that holds such values: `list`, `dict` or None."""
    kind = _given_kind(key.kind)
    container = get_origin(kind)
    return (kind, None) if container in (None, types.UnionType, Union) else (get_args(kind)[0], container)


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


def _count_or_word(value: Any) -> Any:
    return value if isinstance(value, str) else _number(int)(value)


_CONVERSIONS: Mapping[Any, tuple[Callable[[Any], Any], str]] = types.MappingProxyType(
    {
        int: (_number(int), "a whole number"),
        float: (_number(float), "a number"),
        str: (_text, "text"),
        COUNT_OR_WORD: (_count_or_word, "a whole number, or a word"),
        Path: (lambda value: Path(_text(value)), "a path"),
        bool: (_truth, "true, false"),
    }
)


def _shown(value: Any) -> str:
    """Return a value as text, shortened for an error."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}.."
