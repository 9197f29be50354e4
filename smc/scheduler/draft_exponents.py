"""Exponents of coupled drafting (`smc.algorithm.coupling`): one for each temperature, fitted to all requests, and one for
each request, which begins with the former. Knows nothing about rows or costs."""

from __future__ import annotations

import math
from dataclasses import replace

from smc.algorithm.coupling import FIRST_EXPONENT, FIRST_GREEDY_EXPONENT, DrawObservation, ExponentFit

SHARED_MEMORY, REQUEST_MEMORY = 0.999, 0.99
"""Weight that earlier draws keep after each draw."""
INHERITED = 16.0
"""Information that a request takes over from the requests before it, at most: about as many draws."""


class DraftExponents:
    """Of one engine."""

    def __init__(self) -> None:
        self._by_temperature: dict[float, ExponentFit] = {}

    def begin(self, temperature: float) -> ExponentFit:
        """The fit that a request of this temperature begins with."""
        shared = self._shared(temperature)
        return replace(shared, memory=REQUEST_MEMORY, information=min(shared.information, INHERITED))

    def observe(self, temperature: float, own: ExponentFit, draw: DrawObservation) -> None:
        """Follow a draw of a request whose own fit is `own`."""
        own.observe(draw)
        self._shared(temperature).observe(draw)

    def forget(self) -> None:
        """Forget what requests so far have shown."""
        self._by_temperature.clear()

    def _shared(self, temperature: float) -> ExponentFit:
        first = FIRST_EXPONENT if temperature else FIRST_GREEDY_EXPONENT
        return self._by_temperature.setdefault(round(temperature, 1), ExponentFit(SHARED_MEMORY, math.log(first)))
