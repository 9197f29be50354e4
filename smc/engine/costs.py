"""What a draft step and a target pass cost, as curves through measured points. Knows nothing about how they were measured, nor of torch."""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Point = tuple[int, float]
"""Size and seconds."""


@dataclass(frozen=True)
class Curve:
    """Seconds by size: never falling, linear between points. Raises ValueError for points that are no such thing."""

    points: tuple[Point, ...]
    """By size, at least one."""

    def __post_init__(self) -> None:
        sizes, seconds = [size for size, _ in self.points], [each for _, each in self.points]
        if not self.points or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError(f"sizes={sizes}; allowed: at least one, each larger than the one before, from 1 on")
        if seconds != sorted(seconds) or seconds[0] <= 0 or not math.isfinite(seconds[-1]):
            raise ValueError(f"seconds={seconds}; allowed: finite, above 0, and never less for a larger size")

    @staticmethod
    def through(samples: Iterable[Point]) -> Curve:
        """Near samples in any order, several of a size: their medians, and where a larger size took less time, the mean of both, since more
        work is not done sooner."""
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
        return Curve(tuple((size, seconds) for seconds, sizes in levels for size in sizes))

    def at(self, size: float) -> float:
        """Seconds. Below the first point those of it: reading weights takes what it takes. Beyond the last, as steep as the last piece and
        at least in proportion, so that nobody is drawn to sizes that were never seen."""
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
class Costs:
    """Of one pair on its devices. Seconds."""

    draft: Curve
    """One step, by rows."""
    target: Curve
    """A pass, by positions."""
    round_overhead: float
    """Of a round, what is neither the draft's steps nor the target's pass: the choice, messages, and what the host does not hide."""

    def __post_init__(self) -> None:
        if not 0 <= self.round_overhead < math.inf:
            raise ValueError(f"round_overhead={self.round_overhead!r}; allowed: finite, >= 0")

    def draft_step(self, rows: int) -> float:
        """Of the draft: every one of `rows` sequences gets a token."""
        return self.draft.at(rows)

    def target_pass(self, positions: int) -> float:
        """Of the target over so many tokens, laws and draws included."""
        return self.target.at(positions)

    def to_json(self) -> str:
        return json.dumps({"draft": self.draft.points, "target": self.target.points, "round_overhead": self.round_overhead})

    @staticmethod
    def from_json(text: str) -> Costs:
        """Raises ValueError for anything but what `to_json` writes."""
        try:
            found = json.loads(text)
            curves = {name: Curve(tuple((int(size), float(seconds)) for size, seconds in found[name])) for name in ("draft", "target")}
            return Costs(**curves, round_overhead=float(found["round_overhead"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"no costs: {text[:80]!r}; allowed: an object of draft, target and round_overhead") from error

    def __str__(self) -> str:
        return (
            f"a draft step {_line(self.draft.points)} ms of rows, a target pass {_line(self.target.points)} ms of positions, "
            f"{1e3 * self.round_overhead:.2f} ms a round besides"
        )


def _line(points: Sequence[Point]) -> str:
    return ", ".join(f"{size}: {1e3 * seconds:.2f}" for size, seconds in points)
