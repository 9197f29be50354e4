"""Arrival times of requests, as endless sequences of seconds since the start. Knows nothing about requests."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

KINDS = ("poisson", "gamma", "constant", "ramp", "trace")


def poisson(rate: float, rng: np.random.Generator) -> Iterator[float]:
    """Yield arrivals that are independent of each other, like those of many independent users."""
    return gamma(rate, 1.0, rng)


def gamma(rate: float, burstiness: float, rng: np.random.Generator) -> Iterator[float]:
    """Yield arrivals whose gaps follow a gamma distribution of shape `burstiness` and mean 1/rate. The coefficient of
    variation of the gaps is 1/sqrt(burstiness).

    `burstiness` has the meaning that it has in vLLM: 1 is Poisson, below 1 requests come in bursts, above 1 more
    evenly.
    """
    now = 0.0
    while True:
        now += rng.gamma(burstiness, 1 / (rate * burstiness))
        yield now


def constant(rate: float) -> Iterator[float]:
    index = 0
    while True:
        yield index / rate
        index += 1


def ramp(rate: float, rate_end: float, level: float, climb: float, rng: np.random.Generator) -> Iterator[float]:
    """Yield Poisson arrivals at `rate` for `level` seconds. The rate then moves linearly to `rate_end` within `climb`
    seconds, and stays there.

    By inversion: the expected number of arrivals until each one is a sum of unit exponentials.
    """
    slope = (rate_end - rate) / climb
    before, during = rate * level, (rate + rate_end) / 2 * climb
    expected = 0.0
    while True:
        expected += rng.exponential()
        if expected <= before:
            yield expected / rate
        elif expected <= before + during:
            # The root of slope / 2 * t^2 + rate * t = rest, in the form that holds for a slope of 0 as well.
            rest = expected - before
            yield level + 2 * rest / (rate + math.sqrt(rate * rate + 2 * slope * rest))
        else:
            yield level + climb + (expected - before - during) / rate_end
