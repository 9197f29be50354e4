"""Distributions as settings: of a length (`LengthDistribution`), and of values with shares (`Mixture`). Each is read
from one word."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

FORMS = "COUNT, uniform:LOW-HIGH, normal:MEAN,STD or lognormal:MEDIAN,SIGMA"


@dataclass(frozen=True)
class LengthDistribution:
    """A distribution of token counts. Every draw is rounded, and at least 1."""

    kind: str
    """`fixed`, `uniform`, `normal` or `lognormal`."""
    first: float
    """By kind: the count, the minimum, the mean, or the median."""
    second: float = 0.0
    """By kind: unused, the maximum, the standard deviation, or the standard deviation of the logarithm."""

    @classmethod
    def read(cls, word: str, option: str) -> Self:
        """Parse a word of one of the `FORMS`. Raises ValueError naming the option, the word and the forms that are
        allowed."""
        kind, colon, rest = str(word).partition(":")
        separator = "-" if kind == "uniform" else ","
        try:
            if not colon:
                lengths = cls("fixed", int(kind))
            else:
                lengths = cls(kind, *(float(part) for part in rest.split(separator)))
            ok = lengths.first >= 1 and (lengths.second >= lengths.first if kind == "uniform" else lengths.second >= 0)
            ok = ok and math.isfinite(lengths.first + lengths.second)
        except (ValueError, TypeError):
            ok = False
        if (
            not ok
            or lengths.kind not in ("fixed", "uniform", "normal", "lognormal")
            or (colon and separator not in rest)
        ):
            raise ValueError(f"{option} {word!r}; allowed: {FORMS}, of counts from 1")
        return lengths

    def __str__(self) -> str:
        if self.kind == "fixed":
            return f"{self.first:g}"
        return f"{self.kind}:{self.first:g}{'-' if self.kind == 'uniform' else ','}{self.second:g}"

    def draw(self, rng: np.random.Generator) -> int:
        if self.kind == "uniform":
            return int(rng.integers(round(self.first), round(self.second), endpoint=True))
        if self.kind == "normal":
            return max(1, round(rng.normal(self.first, self.second)))
        if self.kind == "lognormal":
            return max(1, round(self.first * math.exp(rng.normal(0.0, self.second))))
        return int(self.first)


@dataclass(frozen=True)
class Mixture:
    """Values with their shares, which add up to 1."""

    shares: tuple[tuple[str, float], ...]

    @classmethod
    def read(cls, word: str, option: str) -> Self:
        """Parse a word such as `4:0.5,8:0.5`; a weight that is left out is 1. Raises ValueError naming the option and
        what was given."""
        shares = []
        for part in str(word).split(","):
            name, colon, weight = part.strip().partition(":")
            try:
                value = float(weight) if colon else 1.0
            except ValueError:
                value = math.nan
            if not name or not (value > 0 and math.isfinite(value)):
                raise ValueError(
                    f"{option} {word!r}; allowed: VALUE or VALUE:WEIGHT,VALUE:WEIGHT,.. with weights above 0"
                )
            shares.append((name, value))
        total = sum(weight for _, weight in shares)
        return cls(tuple((name, weight / total) for name, weight in shares))

    def __str__(self) -> str:
        return ",".join(f"{name}:{share:g}" if len(self.shares) > 1 else name for name, share in self.shares)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.shares)

    def draw(self, rng: np.random.Generator) -> str:
        point = rng.random()
        for name, share in self.shares:
            point -= share
            if point < 0:
                return name
        return self.shares[-1][0]
