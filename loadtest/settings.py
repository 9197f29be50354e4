"""The settings of a run, checked as a whole before anything is sent; and profiles, which are named sets of settings.
Knows nothing about where the service is."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from loadtest.arrivals import KINDS
from loadtest.distributions import LengthDistribution, Mixture
from loadtest.slo import LatencyObjective
from smc.api.sampling_params import Method

WITH_PARTICLES = {"smc", "exact"}
"""Methods that have a number of particles."""
CANCEL_BY = ("leave", "abort")
"""leave: the client closes its stream; abort: it calls Abort with the request's id."""
DEPENDENT_OPTIONS = {
    "arrivals": ("burstiness", "rate_end", "trace"),
    "prompts": ("prompt_length",),
    "prompt_length": ("prompts",),
    "cancel_share": ("cancel_after", "cancel_after_tokens", "cancel_by"),
    "cancel_after": ("cancel_after_tokens",),
    "cancel_after_tokens": ("cancel_after",),
    "slow_share": ("slow_pause",),
}
"""Given option -> options of a profile that are dropped with it."""
SHIPPED = Path(__file__).with_name("profiles.toml")


@dataclass(frozen=True)
class LoadSettings:
    """Settings of a run. Times are in seconds, rates in requests a second. Raises ValueError naming the option, what
    was given and what is allowed."""

    arrivals: str = "poisson"
    """One of KINDS."""
    rate: float | None = None
    rate_end: float | None = None
    """The rate at the end of a ramp."""
    burstiness: float | None = None
    """Shape of gamma arrivals."""
    trace: Path | None = None
    """File with the arrival time and the content of each request."""
    duration: float | None = None
    """Time in which requests are sent, after the warm-up."""
    requests: int | None = None
    """Maximum number of requests after the warm-up."""
    warm_up: float = 0.0
    """Time at the start in which requests are sent but not counted."""
    prompts: Path | None = None
    """File of prompts; default: the problems of the demo pair."""
    prompt_length: LengthDistribution | None = None
    """Length of prompts of random token ids, which replace the other prompts."""
    output_length: LengthDistribution = field(default_factory=lambda: LengthDistribution("fixed", 128))
    """`max_tokens` of each request."""
    ignore_eos: bool = False
    method: Mixture = field(default_factory=lambda: Mixture((("smc", 1.0),)))
    particles: Mixture | None = None
    """Numbers of particles; default: the server's."""
    seed: int = 0
    """Seed of the run, from which everything random is drawn."""
    cancel_share: float = 0.0
    cancel_after: float | None = None
    cancel_after_tokens: int | None = None
    cancel_by: Mixture | None = None
    """Ways of cancelling, from CANCEL_BY; default: `leave`."""
    slow_share: float = 0.0
    slow_pause: float | None = None
    deadline: float = 60.0
    """Deadline of every request."""
    connections: int = 1
    goodput: LatencyObjective | None = None
    attainment: float = 0.95
    """Share of requests that must meet the objective."""
    overload: float | None = None
    """Rate as a multiple of `capacity`."""
    capacity: float | None = None
    """Highest rate that meets the objective, from an earlier search. If it is given, behaviour under overload is
    checked."""
    flat: bool = False
    """Whether to check that memory, threads and open files of every process do not grow."""
    interval: float = 1.0
    """Time between two samples of the server."""
    settle: float = 5.0
    """Time to leave the service alone after the last request, before it is checked for leftovers."""

    @classmethod
    def of(cls, profile: dict[str, Any], given: dict[str, Any]) -> Self:
        """Combine the settings of a profile with the given ones, which take precedence. All values are words and
        numbers."""
        dropped = {other for name in given for other in DEPENDENT_OPTIONS.get(name, ())}
        if {"rate", "capacity"} <= given.keys():
            dropped.add("overload")
        values = {name: value for name, value in profile.items() if name not in dropped} | given
        return cls(**{name: _read(name, value) for name, value in values.items()})

    def __post_init__(self) -> None:
        self._check_ranges()
        self._settle_rate()
        self._check_dependent_options()
        if self.arrivals not in KINDS:
            raise ValueError(f"--arrivals {self.arrivals!r}; allowed: {', '.join(KINDS)}")
        self._check_mixes()
        if self.arrivals != "trace":
            if self.rate is None:
                raise ValueError("no rate is given; give --rate, or --capacity with --overload")
            if self.duration is None and self.requests is None:
                raise ValueError("the run would never end; give --duration, --requests or both")
        if self.arrivals == "ramp" and self.duration is None:
            raise ValueError("--arrivals ramp needs --duration: the time in which the rate moves to --rate-end")

    def at_rate(self, rate: float, seed: int) -> Self:
        return replace(self, rate=rate, seed=seed, capacity=None, overload=None)

    def words(self) -> dict[str, Any]:
        """Return the settings in types that JSON has."""
        plain = (int, float, str, bool, type(None))
        return {each.name: v if isinstance(v := getattr(self, each.name), plain) else str(v) for each in fields(self)}

    def _settle_rate(self) -> None:
        """Compute the third of rate, capacity and overload from the other two."""
        rate, capacity, overload = self.rate, self.capacity, self.overload
        if overload is None:
            return
        if rate is not None and capacity is not None and not math.isclose(rate, overload * capacity):
            raise ValueError(
                f"--rate {rate:g} is not --overload {overload:g} times --capacity {capacity:g}; leave one of them out"
            )
        if capacity is not None:
            object.__setattr__(self, "rate", overload * capacity)
        elif rate is not None:
            object.__setattr__(self, "capacity", rate / overload)

    def _check_ranges(self) -> None:
        for name, low, high in (
            ("rate", 1e-6, 1e6),
            ("rate_end", 1e-6, 1e6),
            ("capacity", 1e-6, 1e6),
            ("overload", 1e-6, 1e6),
            ("burstiness", 1e-3, 1e6),
            ("duration", 0.001, 1e7),
            ("requests", 1, 10**9),
            ("warm_up", 0.0, 1e6),
            ("cancel_share", 0.0, 1.0),
            ("cancel_after", 0.0, 1e6),
            ("cancel_after_tokens", 1, 10**9),
            ("slow_share", 0.0, 1.0),
            ("slow_pause", 0.001, 1e6),
            ("deadline", 0.001, 1e6),
            ("connections", 1, 1000),
            ("attainment", 0.0, 1.0),
            ("interval", 0.05, 1e6),
            ("settle", 0.0, 1e6),
            ("seed", 0, 2**63 - 1),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, (int, float)) or not low <= value <= high):
                raise ValueError(f"{option_of(name)} {value}; allowed: {low:g} to {high:g}")

    def _check_mixes(self) -> None:
        for option, mix, allowed in (
            ("--method", self.method, tuple(Method)),
            ("--cancel-by", self.cancel_by, CANCEL_BY),
        ):
            unknown = [name for name in (mix.names if mix else ()) if name not in allowed]
            if unknown:
                raise ValueError(f"{option} {unknown[0]!r}; allowed: {', '.join(allowed)}")
        wrong = [
            name
            for name in (self.particles.names if self.particles else ())
            if not name.isdecimal() or not 1 <= int(name) <= 64
        ]
        if wrong:
            raise ValueError(f"--particles {wrong[0]!r}; allowed: 1..64")

    def _check_dependent_options(self) -> None:
        needs = {
            "rate_end": ("--arrivals ramp", self.arrivals == "ramp"),
            "burstiness": ("--arrivals gamma", self.arrivals == "gamma"),
            "trace": ("--arrivals trace", self.arrivals == "trace"),
            "cancel_after": ("--cancel-share", self.cancel_share > 0),
            "cancel_after_tokens": ("--cancel-share", self.cancel_share > 0),
            "cancel_by": ("--cancel-share", self.cancel_share > 0),
            "slow_pause": ("--slow-share", self.slow_share > 0),
            "particles": ("method smc or exact", bool(WITH_PARTICLES & set(self.method.names))),
            "capacity": ("--goodput", self.goodput is not None),
        }
        for name, (need, there) in needs.items():
            if getattr(self, name) is not None and not there:
                raise ValueError(f"{option_of(name)} has no effect without {need}; leave it out, or give both")
        for name, (need, _) in needs.items():
            if need == f"--arrivals {self.arrivals}" and getattr(self, name) is None:
                raise ValueError(f"{need} needs {option_of(name)}")
        if self.arrivals == "trace" and self.rate is not None:
            raise ValueError(
                "--rate has no effect with --arrivals trace, whose file has the arrival times; leave it out"
            )
        if self.prompts is not None and self.prompt_length is not None:
            raise ValueError("--prompts and --prompt-length exclude each other; leave one of them out")
        if self.cancel_share and (self.cancel_after is None) == (self.cancel_after_tokens is None):
            raise ValueError(
                f"--cancel-share {self.cancel_share:g} needs one of --cancel-after and --cancel-after-tokens"
            )
        if self.slow_share and self.slow_pause is None:
            raise ValueError(f"--slow-share {self.slow_share:g} needs --slow-pause")
        if self.cancel_share + self.slow_share > 1:
            raise ValueError(
                f"--cancel-share and --slow-share are {self.cancel_share + self.slow_share:g} together; "
                "allowed: at most 1"
            )


def option_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _read(name: str, value: Any) -> Any:
    """Parse the value of a setting."""
    if name in ("prompt_length", "output_length"):
        return LengthDistribution.read(value, option_of(name))
    if name in ("method", "particles", "cancel_by"):
        return Mixture.read(value, option_of(name))
    if name == "goodput":
        return LatencyObjective.read(value)
    return Path(value) if name in ("trace", "prompts") else value


def shipped_profiles() -> dict[str, dict[str, Any]]:
    return tomllib.loads(SHIPPED.read_text())


def load_profile(name: str) -> dict[str, Any]:
    """Read the settings of the profile `name`, or of the TOML file of that name. Raises ValueError if there is no such
    profile, and for a key that is not a setting."""
    profiles = shipped_profiles()
    if name in profiles:
        profile = profiles[name]
    elif name.endswith(".toml"):
        try:
            profile = tomllib.loads(Path(name).read_text())
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"--profile {name!r}: {error}; give a TOML file of settings") from error
    else:
        raise ValueError(f"--profile {name!r}; allowed: {', '.join(profiles)}, or a file whose name ends in .toml")
    settings = {key: value for key, value in profile.items() if key != "about"}
    known = {field.name for field in fields(LoadSettings)}
    if unknown := settings.keys() - known:
        raise ValueError(f"--profile {name!r} sets {min(unknown)}; allowed: about, {', '.join(sorted(known))}")
    return settings
