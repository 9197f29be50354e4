"""The latency objective that a request must meet to count as good. Knows nothing about the share that must meet it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

MEASURES = {"ttft": "time to first token", "tpot": "time per output token", "e2el": "end-to-end latency"}
"""vLLM's names of latencies, and their meaning."""


@dataclass(frozen=True)
class LatencyObjective:
    limits: tuple[tuple[str, float], ...]
    """Pairs of a name in MEASURES and a limit in milliseconds."""

    @classmethod
    def read(cls, words: str) -> Self:
        """Parse words such as `ttft:500 tpot:50 e2el:5000`. Raises ValueError saying what was given and what is
        allowed."""
        limits: dict[str, float] = {}
        for word in str(words).replace(",", " ").split():
            name, _, value = word.partition(":")
            try:
                limit = float(value)
            except ValueError:
                limit = -1.0
            if name not in MEASURES or name in limits or not 0 < limit < float("inf"):
                raise ValueError(
                    f"--goodput {word!r}; allowed: NAME:MILLISECONDS, each of {', '.join(MEASURES)} at most once, "
                    "above 0"
                )
            limits[name] = limit
        if not limits:
            raise ValueError("--goodput is empty; allowed: NAME:MILLISECONDS, such as ttft:500 e2el:5000")
        return cls(tuple(limits.items()))

    def __str__(self) -> str:
        return " ".join(f"{name}:{limit:g}" for name, limit in self.limits)

    @property
    def sentence(self) -> str:
        return ", ".join(f"{MEASURES[name]} at most {limit:g} ms" for name, limit in self.limits)

    def met(self, seconds: Mapping[str, float]) -> bool:
        """Whether every limit is kept. `seconds`: measured latencies, by the names of MEASURES."""
        return all(1e3 * seconds[name] <= limit for name, limit in self.limits)
