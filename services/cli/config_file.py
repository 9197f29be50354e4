"""The configuration file: YAML whose keys are the options of a command by their names. Knows nothing about what the
options mean: their configuration classes check that."""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml

from services.cli.options import Key, keys_of

SHOWN = 88
"""Columns of a comment in a file that is printed."""


class _Loader(yaml.SafeLoader):
    """Refuses what YAML's own loader passes over: a key that is given twice."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    if twice := [key for index, key in enumerate(keys) if key in keys[:index]]:
        raise yaml.constructor.ConstructorError(None, None, f"{twice[0]!r} is given twice", node.start_mark)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read(path: Path, record: type) -> dict[str, Any]:
    """What a file gives of a record's options, by field; null is as good as absent. Raises ValueError naming the
    file, the key, the value and what is allowed."""
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


def text_of(values: Mapping[str, Any], record: type) -> str:
    """A file that gives these values, by field: every option below what it is for, options that are None as null."""
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


def _converted(path: Path, key: Key, value: Any) -> Any:
    """As the command line would take it. Raises ValueError."""
    kind = next(one for one in get_args(key.kind) if one is not types.NoneType) if get_args(key.kind) else key.kind
    if get_origin(kind) is dict:
        if not isinstance(value, dict) or not all(isinstance(text, str) for pair in value.items() for text in pair):
            raise ValueError(f"{path}: {key.name}={_shown(value)}; allowed: a mapping of text to text")
        return value
    items = get_origin(kind) is list
    convert, allowed = _CONVERSIONS[get_args(kind)[0] if items else kind]
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
        return kind(str(value))  # so that 8.5 is no whole number

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
    """Short enough for an error."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}.."
