"""The highest rate that meets the objective: doubling until it does not, then halving the gap. Knows nothing about how a rate is tried."""

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


@dataclass(frozen=True)
class Capacity:
    low: float | None
    """The highest rate that was seen to meet the objective; None: not one did."""
    high: float | None
    """The lowest rate above that which was seen to miss it; None: not one did."""
    probes: tuple[Probe, ...]
    """In the order in which they were made."""

    @property
    def best(self) -> Probe | None:
        return next((probe for probe in self.probes if probe.met and probe.rate == self.low), None)


async def search(probe: Callable[[float], Awaitable[Probe]], start: float, precision: float) -> Capacity:
    """Try rates from `start` until the lowest that misses is at most `1 + precision` times the highest that meets."""
    made: list[Probe] = []

    async def meets(rate: float) -> bool:
        made.append(await probe(rate))
        return made[-1].met

    low = high = None
    rate = start
    for _ in range(MAX_DOUBLINGS):
        if await meets(rate):
            low, rate = rate, 2 * rate
        else:
            high, rate = rate, rate / 2
        if low is not None and high is not None:
            break
    while low is not None and high is not None and high > low * (1 + precision):
        middle = math.sqrt(low * high)
        if await meets(middle):
            low = middle
        else:
            high = middle
    return Capacity(low, high, tuple(made))
