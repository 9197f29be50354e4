"""The highest rate that meets the objective: doubling until it does not, then halving the gap. Knows nothing about how
a rate is tried."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

MAX_DOUBLINGS = 20
"""Either way. Rates a million times apart mean that it is not the rate that decides."""


@dataclass(frozen=True)
class Probe:
    """One rate, tried."""

    rate: float
    met: bool
    attainment: float
    """Share of the requests that met the objective."""
    goodput: float
    p99_ttft_ms: float
    p99_e2el_ms: float
    sent: int
    codes: dict[str, int] = field(default_factory=dict)
    late: bool = False
    """The generator did not keep to its plan, so the rate was not quite tried."""


class Unhealthy(RuntimeError):
    """The service failed in a way that no rate excuses; there is nothing more to be found."""


@dataclass(frozen=True)
class Capacity:
    low: float | None
    """The highest rate that was seen to meet the objective; None: not one did."""
    high: float | None
    """The lowest rate above that which was seen to miss it; None: not one did."""
    probes: tuple[Probe, ...]
    """In the order in which they were made."""
    failure: str = ""
    """What ended the search early."""

    @property
    def best(self) -> Probe | None:
        return next((probe for probe in reversed(self.probes) if probe.rate == self.low), None)

    @property
    def good(self) -> bool:
        return self.best is not None and not self.failure

    @property
    def late(self) -> list[float]:
        """Rates at which the generator was late whenever they were tried."""
        last = {probe.rate: probe.late for probe in self.probes}
        return [rate for rate, late in last.items() if late]


async def search(probe: Callable[[float], Awaitable[Probe]], start: float, precision: float) -> Capacity:
    """Try rates from `start` until the lowest that misses is at most `1 + precision` times the highest that meets. A
    probe that was late is made once more, and the second decides. A probe that raises Unhealthy ends the search."""
    made: list[Probe] = []
    failure = ""
    try:
        await _narrow(probe, start, precision, made)
    except Unhealthy as error:
        failure = str(error)
    return Capacity(*_bracket(made), tuple(made), failure)


async def _narrow(
    probe: Callable[[float], Awaitable[Probe]], start: float, precision: float, made: list[Probe]
) -> None:
    """Appends to `made`."""

    async def bracket_with(rate: float) -> tuple[float | None, float | None]:
        made.append(await probe(rate))
        if made[-1].late:
            made.append(await probe(rate))
        return _bracket(made)

    rate = start
    for _ in range(MAX_DOUBLINGS):
        low, high = await bracket_with(rate)
        if low is not None and high is not None:
            break
        rate = high / 2 if high is not None else 2 * rate
    while low is not None and high is not None and high > low * (1 + precision):
        low, high = await bracket_with(math.sqrt(low * high))


def _bracket(made: list[Probe]) -> tuple[float | None, float | None]:
    """The highest rate that met the objective and the lowest that missed it, each by its last probe."""
    met = {probe.rate: probe.met for probe in made}
    return max((rate for rate in met if met[rate]), default=None), min(
        (rate for rate in met if not met[rate]), default=None
    )
