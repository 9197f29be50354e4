"""Forecasts how many tokens a round of exact decoding brings and how long it takes, from a latency model and from how
often the draft is right. Knows nothing about GPUs, processes or how either was measured.

N: rows of a tree; K: tokens of a block; F: rows ahead for each of the N rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from smc.scheduler.speculation import WIDTH_GAIN, LatencyModel, MissRates, tokens_a_round

PARTICLES = (1, 2, 4, 8, 16, 32)
BRANCHES = (1, 2, 4, 8)
BLOCKS = tuple(range(1, 17))
PLAIN, LOCKSTEP, LOOKAHEAD = "plain", "lockstep", "look-ahead"
PLAIN_BLOCK = 16
"""Tokens that plain decoding queues at a time."""


@dataclass(frozen=True)
class AcceptanceCurve:
    """Probability that the target draws a drafted token, by the number of rows. Raises ValueError naming the field, the
    value and what is allowed."""

    one: float
    """Probability that a single drafted row has the target's next token."""
    gain: float = WIDTH_GAIN
    """Exponent: in lockstep, N rows miss the token N^gain times less often."""

    def __post_init__(self) -> None:
        if not 0 < self.one < 1:
            raise ValueError(f"acceptance={self.one!r}; allowed: between 0 and 1, both excluded")
        if not 0 <= self.gain < math.inf:
            raise ValueError(f"gain={self.gain!r}; allowed: finite, >= 0")

    @property
    def rates(self) -> MissRates:
        """The miss rates of `smc.scheduler.speculation`. Of outcomes nothing was measured: on a published pair, what
        follows a whole block is missed half as often as a token, and what follows a part of one always."""
        missed = 1 - self.one
        return MissRates((missed,), restart=missed, whole=missed / 2, part=1.0, gain=self.gain)

    def tokens(self, setting: TreeShape, *, lookahead: bool) -> float:
        """Return the expected tokens of a round in the long run."""
        return _tokens(self, setting, lookahead)


@dataclass(frozen=True)
class TreeShape:
    """N, F and K of exact decoding."""

    particles: int
    branches: int
    block: int


@lru_cache(maxsize=4096)
def _tokens(acceptance: AcceptanceCurve, setting: TreeShape, lookahead: bool) -> float:
    """`AcceptanceCurve.tokens`. Kept, since every division of the GPUs tries the same settings."""
    rows_11 = np.array([[setting.particles]])
    found = tokens_a_round([acceptance.rates], rows_11, setting.branches, setting.block, lookahead)
    return float(found.tokens[0, 0, -1, 0])


@dataclass(frozen=True)
class TreeShapes:
    """The values of N, F and K that are tried."""

    particles: Sequence[int] = PARTICLES
    branches: Sequence[int] = BRANCHES
    blocks: Sequence[int] = BLOCKS

    def of(self, form: str) -> Iterator[TreeShape | None]:
        """Yield the settings of a form; None for plain decoding."""
        if form == PLAIN:
            yield None
        else:
            branches = (1,) if form == LOCKSTEP else self.branches
            yield from (TreeShape(*each) for each in product(self.particles, branches, self.blocks))


@dataclass(frozen=True)
class RoundForecast:
    """A round, or in plain decoding a pass."""

    tokens: float
    """Tokens that it adds to an answer."""
    seconds: float


def forecast_round(
    latency: LatencyModel,
    form: str,
    setting: TreeShape | None,
    requests: int,
    context: int,
    acceptance: AcceptanceCurve,
    *,
    micro_batches: int = 1,
) -> RoundForecast:
    """Forecast a round of `requests` requests with `context` tokens each. `setting`: None for plain decoding.
    `micro_batches`: in lockstep, 2 if each model has its own devices: it then works on one half of several requests
    while the other model works on the other half."""
    read = requests * context
    if setting is None:
        return RoundForecast(1.0, latency.alone.at(requests, read) + latency.round_overhead / PLAIN_BLOCK)
    n, f, k = setting.particles, setting.branches, setting.block
    if form == LOOKAHEAD:
        drafting = k * latency.draft.at(requests * n * f, read)
        seconds = max(drafting, latency.target.at(requests * n * k, read)) + latency.round_overhead
        return RoundForecast(acceptance.tokens(setting, lookahead=True), seconds)
    batches = min(micro_batches, requests)
    here = math.ceil(requests / batches)
    drafting = k * latency.draft.at(here * n, here * context)
    scoring = latency.target.at(here * n * (k + 1), here * context)
    seconds = max(drafting + scoring, batches * max(drafting, scoring)) + latency.round_overhead
    return RoundForecast(acceptance.tokens(setting, lookahead=False), seconds)
