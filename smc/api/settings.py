"""Settings: everything that the service needs to know of a sampling field, declared beside the field.

A field is made by `setting`; from it follow its check, its option of commands, its name in JSON bodies and its place in
messages. The fields are in `smc.api.sampling_params.SamplingParams`; this file knows nothing about them, nor about
commands, bodies or messages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Any

Check = Callable[[str, Any], Any]
"""Maps a field's name and value to the value that is stored. Raises ValueError naming the field, the value and what is
allowed."""


class Scope(StrEnum):
    """Requests that a setting has an effect on; other requests that set it are rejected."""

    ALL = "all"
    BOTH = "both"
    """Methods of both models: SMC and exact decoding."""
    EXACT = "exact"
    SMC = "smc"
    PROPOSAL = "proposal"
    """Methods that draw from the draft's distribution: SMC, and exact decoding by rejection."""
    INDEPENDENT = "independent"
    """SMC with independent particles."""
    CONSTRAINED = "constrained"
    """SMC with a constraint."""


@dataclass(frozen=True)
class Option:
    """A field as an option of commands; its type is that of the field."""

    help: str
    metavar: str = ""
    names: tuple[str, ...] = ()
    """Default: the field's name."""


@dataclass(frozen=True)
class Setting:
    """A field's properties besides its name, type and default."""

    check: Check | None
    """None: the class checks the field together with others."""
    scope: Scope
    fill: Callable[[Any], Any] | None
    """Value of a field that is not set, for requests that it has an effect on: a function of the other fields."""
    option: Option | None
    """None: the field is no option of a command."""
    optional: bool
    """The value None means that the field is not set."""
    report: bool
    """The field says what is reported: in the API's messages it stands beside the sampling settings."""


def setting(
    default: Any,
    check: Check | None,
    *,
    scope: Scope = Scope.ALL,
    fill: Callable[[Any], Any] | None = None,
    option: Option | None = None,
    report: bool = False,
) -> Any:
    """A field of a dataclass. See `Setting`."""
    known = Setting(check, scope, fill, option, default is None, report)
    return field(default=default, metadata={"setting": known})


def settings_of(kind: type) -> Mapping[str, Setting]:
    """By name, in the order of the fields."""
    return MappingProxyType({one.name: one.metadata["setting"] for one in fields(kind)})


def require(name: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name}={value!r}; allowed: {allowed}")


@dataclass(frozen=True)
class Holds:
    """A check: a value for which `holds`."""

    holds: Callable[[Any], bool]
    allowed: str

    def __call__(self, name: str, value: Any) -> Any:
        require(name, value, self.holds(value), self.allowed)
        return value


def number(holds: Callable[[Any], bool], allowed: str) -> Check:
    """A finite number for which `holds`."""
    return Holds(lambda value: is_number(value) and holds(value), allowed)


def integer(holds: Callable[[Any], bool], allowed: str) -> Check:
    return Holds(lambda value: isinstance(value, int) and not isinstance(value, bool) and holds(value), allowed)


def flag() -> Check:
    return Holds(lambda value: isinstance(value, bool), "true, false")


@dataclass(frozen=True)
class OneOf:
    """A check: one of these names. Where messages have an enum, its values have the same names."""

    names: tuple[str, ...]

    def __call__(self, name: str, value: Any) -> Any:
        require(name, value, value in self.names, ", ".join(self.names))
        return value


@dataclass(frozen=True)
class Items:
    """A check: a list of at most so many items of one kind, stored as a tuple."""

    holds: Callable[[Any], bool]
    allowed: str
    most: int
    unit: str

    def check_count(self, name: str, count: int) -> None:
        """Check the number of items before they become a list: a message may hold millions."""
        if count > self.most:
            raise ValueError(f"{name} has {count} {self.unit}; allowed: at most {self.most}")

    def __call__(self, name: str, value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{name}={value!r}; allowed: a list of {self.allowed}")
        self.check_count(name, len(value))
        for item in value:
            if not self.holds(item):
                raise ValueError(f"{name} contains {item!r}; allowed: {self.allowed}")
        return tuple(value)


@dataclass(frozen=True)
class Biases:
    """A check: numbers by token id, as a mapping, whose keys may be JSON's strings, or as pairs. They are stored as
    pairs, ascending, without zeros."""

    most: int
    largest: float

    def check_count(self, name: str, count: int) -> None:
        if count > self.most:
            raise ValueError(f"{name} has {count} tokens; allowed: at most {self.most}")

    def __call__(self, name: str, value: Any) -> Any:
        if not isinstance(value, (Mapping, list, tuple)):
            raise ValueError(f"{name}={value!r}; allowed: an object of numbers by token id")
        self.check_count(name, len(value))
        found: dict[int, float] = {}
        for item in value.items() if isinstance(value, Mapping) else value:
            token: Any
            bias: Any
            token, bias = item if isinstance(item, (list, tuple)) and len(item) == 2 else (item, None)
            if isinstance(token, str) and token.isascii() and token.isdecimal() and len(token) <= 10:
                token = int(token)
            if not is_token(token) or token in found:
                raise ValueError(f"{name} contains token {token!r}; allowed: token ids >= 0, each once")
            if not is_number(bias) or abs(bias) > self.largest:
                raise ValueError(
                    f"{name} contains {bias!r} for token {token}; allowed: -{self.largest:g} to {self.largest:g}"
                )
            found[token] = float(bias)
        return tuple((token, bias) for token, bias in sorted(found.items()) if bias)


def is_number(value: object) -> bool:
    """Finite, and not larger than a float can be, as an integer from JSON may be."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
