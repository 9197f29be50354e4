"""Settings: everything that the service needs to know about a field of sampling parameters or of a configuration,
declared with the field.

A field is made by `setting`. Its check, its option of commands, its key of configuration files, its name in JSON bodies
and its place in messages follow from it. The fields are in `smc.api.sampling_params.SamplingParams` and in the
configuration classes; this file knows nothing about them, nor about commands, files, bodies or messages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from smc.types import Decoding

MODELS, ENGINE, CLUSTER, BATCH = "Models", "Engine", "Cluster", "Batch"
LISTEN, SECURITY = "Network and APIs", "Security and limits"
"""Panels: headings under which `--help` and configuration files list options."""
Check = Callable[[str, Any], Any]
"""Maps a field's name and value to the value that is stored. Raises ValueError naming the field, the value and what is
allowed."""


ALL = frozenset(Decoding)
"""All ways of decoding."""


@dataclass(frozen=True)
class Setting:
    """A field's properties besides its name, type and default."""

    check: Check | None
    """None: the class checks the field together with other fields."""
    help: str = ""
    """What the field's option does, on the command line and in configuration files; empty: there is no such option. The
    default is added, unless the text names it (`Default: ..`) or there is none to name. An option for a field whose
    default is True has the field's name after `no-`, and the opposite value."""
    metavar: str = ""
    names: tuple[str, ...] = ()
    """Names of the option; default: the field's name."""
    panel: str = ""
    """Heading under which `--help` and configuration files list the option; empty: the `PANEL` of the class, if it has
    one."""
    has_flag: bool = True
    """Whether the option is a flag of commands, not only a key of configuration files."""
    decodings: frozenset[Decoding] = ALL
    """Ways of decoding that the setting applies to; requests that are decoded otherwise may not set it."""
    needs: str = ""
    """Another setting without which this one has no effect; empty: there is none."""
    fill: Callable[[Any], Any] | None = None
    """Computes the value of a field that is not set, from the other fields, for requests that the field applies to."""
    report: bool = False
    """The field selects what is reported: in the API's messages it stands beside the sampling settings."""
    optional: bool = False
    """The value None means that the field is not set."""

    def help_with(self, default: Any) -> str:
        """Return the help with the field's default."""
        if "Default: " in self.help or default in (None, ()) or isinstance(default, bool):
            return self.help
        return f"{self.help} Default: {f'{default:g}' if isinstance(default, float) else default}."


def setting(default: Any, check: Check | None, help: str = "", metavar: str = "", **properties: Any) -> Any:
    """Declare a field of a dataclass with a `Setting`. `properties`: further fields of that, all but `optional`."""
    known = Setting(check, help, metavar, **properties, optional=default is None)
    return field(default=default, metadata={"setting": known})


def settings_of(kind: type) -> Mapping[str, Setting]:
    """Return the settings of a dataclass by name, in the order of its fields. Fields that are no settings are left
    out."""
    return MappingProxyType({one.name: one.metadata["setting"] for one in fields(kind) if "setting" in one.metadata})


def check_settings(config: Any) -> None:
    """Check the fields of a configuration, each by itself, and replace them by what their checks return. Raises
    ValueError naming the field, the value and what is allowed."""
    for name, known in settings_of(type(config)).items():
        value = getattr(config, name)
        if known.check is not None and not (known.optional and value is None):
            object.__setattr__(config, name, known.check(name, value))


def require(name: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name}={value!r}; allowed: {allowed}")


@dataclass(frozen=True)
class Holds:
    """A check that accepts a value for which `holds` is true."""

    holds: Callable[[Any], bool]
    allowed: str
    is_kind: Callable[[Any], bool] = lambda _: True
    """Whether the value has the right type."""
    kind: str = ""
    """Name of that type, for the error."""

    def __call__(self, name: str, value: Any) -> Any:
        said = self.allowed if self.kind.split()[-1:] == self.allowed.split()[-1:] else f"{self.kind}, {self.allowed}"
        require(name, value, self.is_kind(value), said)
        require(name, value, self.holds(value), self.allowed)
        return value


class HoldsNumber(Holds):
    """A check of a number. An integer beyond 64 bits, which messages cannot hold, is stored as a float."""

    def __call__(self, name: str, value: Any) -> Any:
        found = super().__call__(name, value)
        return found if abs(found) < 2**63 else float(found)


def number(holds: Callable[[Any], bool], allowed: str) -> Check:
    """Make a check that accepts a finite number for which `holds` is true."""
    return HoldsNumber(
        lambda value: is_number(value) and holds(value),
        allowed,
        lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
        "a number",
    )


def integer(holds: Callable[[Any], bool], allowed: str) -> Check:
    """Make a check that accepts an integer for which `holds` is true."""
    return Holds(holds, allowed, is_integer, "an integer")


def within(low: int, high: int) -> Check:
    """Make a check that accepts whole numbers from `low` to `high`."""
    return integer(lambda value: low <= value <= high, f"{low}..{high}")


def at_least(low: int) -> Check:
    return integer(lambda value: value >= low, f">= {low}")


def seconds(least: float) -> Check:
    """Make a check that accepts a finite number of seconds, at least `least`."""
    return number(lambda value: value >= least, f"at least {least:g} seconds")


def above_zero(most: float) -> Check:
    return number(lambda value: 0 < value <= most, f"above 0, at most {most:.10g}")


def flag() -> Check:
    return Holds(lambda value: isinstance(value, bool), "true, false")


@dataclass(frozen=True)
class CountOr:
    """A check that accepts a whole number of at least 1, also as text, or a word."""

    word: str

    def __call__(self, name: str, value: Any) -> Any:
        found = int(value) if isinstance(value, str) and value.isdecimal() else value
        require(name, found, found == self.word or (is_integer(found) and found >= 1), f">= 1, or {self.word}")
        return found


@dataclass(frozen=True)
class OneOf:
    """A check that accepts one of these names. Where messages have an enum, its values have the same names."""

    names: tuple[str, ...]

    def __call__(self, name: str, value: Any) -> Any:
        require(name, value, value in self.names, ", ".join(self.names))
        return value


@dataclass(frozen=True)
class Items:
    """A check that accepts a list of at most `most` items of one kind, and stores it as a tuple."""

    holds: Callable[[Any], bool]
    allowed: str
    most: int = sys.maxsize
    unit: str = "items"

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
    """A check that accepts numbers by token id: a mapping, whose keys may be strings as in JSON, or pairs. They are
    stored as pairs in ascending order, without zeros."""

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
                raise ValueError(f"{name} contains token {token!r}; allowed: token ids >= 0, < 2**31, each once")
            if not is_number(bias) or abs(bias) > self.largest:
                raise ValueError(
                    f"{name} contains {bias!r} for token {token}; allowed: -{self.largest:g} to {self.largest:g}"
                )
            found[token] = float(bias)
        return tuple((token, bias) for token, bias in sorted(found.items()) if bias)


def is_number(value: object) -> bool:
    """Whether the value is a finite number that fits into a float; an integer from JSON may be too large."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_integer(value: object) -> bool:
    """Whether the value is an integer, and not true or false."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_token(value: object) -> bool:
    """Whether the value may be a token id of some vocabulary."""
    return isinstance(value, int) and is_integer(value) and 0 <= value < 2**31
