"""The latency model: what a draft step and a target pass take, as curves through measured points, and what reading
contexts adds. Knows nothing about how they were measured. Imports no torch."""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

Point = tuple[int, float]
"""Size and seconds."""


@dataclass(frozen=True)
class LatencyCurve:
    """Seconds by size: never falling, linear between points. Raises ValueError for other points."""

    points: tuple[Point, ...]
    """By size, at least one."""

    def __post_init__(self) -> None:
        sizes, seconds = [size for size, _ in self.points], [each for _, each in self.points]
        if not self.points or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError(f"sizes={sizes}; allowed: at least one, each larger than the one before, from 1 on")
        if seconds != sorted(seconds) or seconds[0] <= 0 or not math.isfinite(seconds[-1]):
            raise ValueError(f"seconds={seconds}; allowed: finite, above 0, and never less for a larger size")

    @staticmethod
    def through(samples: Iterable[Point]) -> LatencyCurve:
        """A curve near samples in any order: the median of each size, and where a larger size took less time, the mean
        of both."""
        found: dict[int, list[float]] = {}
        for size, seconds in samples:
            found.setdefault(size, []).append(seconds)
        levels: list[tuple[float, list[int]]] = []
        for size in sorted(found):
            levels.append((statistics.median(found[size]), [size]))
            while len(levels) > 1 and levels[-2][0] > levels[-1][0]:
                (low, before), (high, after) = levels[-2:]
                mean = (low * len(before) + high * len(after)) / (len(before) + len(after))
                levels[-2:] = [(mean, before + after)]
        return LatencyCurve(tuple((size, seconds) for seconds, sizes in levels for size in sizes))

    def at(self, size: float) -> float:
        """Seconds. Below the first point its seconds, which reading the weights takes. Beyond the last, as steep as the
        last piece and at least in proportion, so that no policy prefers sizes that were never measured."""
        sizes = [each for each, _ in self.points]
        (first, least), (last, most) = self.points[0], self.points[-1]
        if size <= first:
            return least
        if size >= last:
            return most + (size - last) * max(self._last_slope(), most / last)
        right = bisect_right(sizes, size)
        (low, below), (high, above) = self.points[right - 1], self.points[right]
        return below + (above - below) * (size - low) / (high - low)

    def _last_slope(self) -> float:
        if len(self.points) < 2:
            return 0.0
        (low, below), (high, above) = self.points[-2:]
        return (above - below) / (high - low)


@dataclass(frozen=True)
class ModelLatency:
    """Seconds of one step or pass of a model. Raises ValueError for an impossible `read`."""

    curve: LatencyCurve
    """Seconds by size, of sequences without context."""
    read: float = 0.0
    """Seconds that every token of context adds. The context of a request counts once, however many rows it has."""

    def __post_init__(self) -> None:
        if not 0 <= self.read < math.inf:
            raise ValueError(f"read={self.read!r}; allowed: finite, >= 0")

    def at(self, size: int, context: float) -> float:
        """Seconds; `context`: tokens of all requests together."""
        return self.curve.at(size) + self.read * context


@dataclass(frozen=True)
class LatencyModel:
    """Latencies of one model pair on its devices."""

    draft: ModelLatency
    """A step of the draft, by rows."""
    target: ModelLatency
    """A pass of the target over what was drafted, by positions."""
    alone: ModelLatency
    """A pass of the target where it decodes alone, by sequences: as many contexts are read."""
    round_overhead: float
    """Seconds of a round besides the draft's steps and the target's pass: the selection, messages, and host work that is
    not hidden."""

    def __post_init__(self) -> None:
        if not 0 <= self.round_overhead < math.inf:
            raise ValueError(f"round_overhead={self.round_overhead!r}; allowed: finite, >= 0")

    @property
    def parts(self) -> dict[str, ModelLatency]:
        return {name: getattr(self, name) for name in PARTS}

    def to_json(self) -> str:
        parts = {name: {"points": part.curve.points, "read": part.read} for name, part in self.parts.items()}
        return json.dumps(parts | {"round_overhead": self.round_overhead})

    @staticmethod
    def from_json(text: str) -> LatencyModel:
        """What `to_json` has written. Raises ValueError, KeyError or TypeError for other text."""
        found = json.loads(text)
        parts = {
            name: ModelLatency(LatencyCurve(tuple(map(tuple, found[name]["points"]))), found[name]["read"])
            for name in PARTS
        }
        return LatencyModel(**parts, round_overhead=found["round_overhead"])

    def __str__(self) -> str:
        return f"ms of {'; '.join(map(self._describe, PARTS))}; {1e3 * self.round_overhead:.2f} ms a round besides"

    def _describe(self, name: str) -> str:
        part = self.parts[name]
        points = ", ".join(f"{size}: {1e3 * seconds:.2f}" for size, seconds in part.curve.points)
        return f"{NAMES[name]} {points}, and {1e9 * part.read:.0f} ns a token of context"


NAMES = {
    "draft": "a draft step by rows",
    "target": "a target pass by positions",
    "alone": "the target alone by sequences",
}
"""Description of each part, and the unit of its size."""
PARTS = tuple(NAMES)
