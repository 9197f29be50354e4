"""Populations packed side by side, as `select` takes them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from smc.algorithm.resampling import Bounds, Spans
from smc.api.limits import SCHEME_NAMES


@dataclass(frozen=True)
class Population:
    """One group before selection."""

    candidates_NF: Tensor
    threshold: float = 1.0
    scheme: str = "systematic"
    seed: int = 0
    draws: int | None = None
    """Number of particles to draw. Default: as many as are alive."""
    dead: tuple[int, ...] = ()
    """Indices without a particle."""
    round: int = 1

    @property
    def size(self) -> int:
        return len(self.candidates_NF)

    @property
    def alive_N(self) -> Tensor:
        return torch.tensor([n not in self.dead for n in range(self.size)], dtype=torch.bool)

    @property
    def count(self) -> int:
        return self.size - len(self.dead)


def pack(
    populations: list[Population], padding: int = 0, padding_groups: int = 0, junk: float = math.nan
) -> dict[str, object]:
    """The arguments of `select`. `padding` indices and `padding_groups` groups come last; entries without a particle
    have the candidate weight `junk`."""
    branches = populations[0].candidates_NF.shape[1]
    sizes = [p.size for p in populations]
    candidates_AF = torch.cat(
        [*(p.candidates_NF for p in populations), torch.full((padding, branches), junk, dtype=torch.float64)]
    ).clone()
    alive_A = torch.cat([*(p.alive_N for p in populations), torch.zeros(padding, dtype=torch.bool)])
    firsts = list(itertools.accumulate(sizes[:-1], initial=0))
    candidates_AF[~alive_A] = junk
    draws = [p.count if p.draws is None else p.draws for p in populations]
    none = [0] * padding_groups

    def whole(values: list[int]) -> Tensor:
        return torch.tensor(values + none, dtype=torch.int32)

    return {
        "candidates_AF": candidates_AF,
        "alive_A": alive_A,
        "groups": Bounds(Spans(whole(firsts), whole(sizes)), whole([p.count for p in populations]), whole(draws)),
        "threshold_G": torch.tensor([p.threshold for p in populations] + none, dtype=torch.float64),
        "scheme_G": whole([SCHEME_NAMES.index(p.scheme) for p in populations]),
        "seed_G": torch.tensor([p.seed for p in populations] + none),
        "round_G": torch.tensor([p.round for p in populations] + none),
    }


def random_candidates(n: int, branches: int, seed: int, spread: float = 1.5) -> Tensor:
    """Random candidate log-weights [N, F]; some candidates have weight zero."""
    generator = torch.Generator().manual_seed(seed)
    logw_NF = torch.randn(n, branches, dtype=torch.float64, generator=generator) * spread
    dropped_NF = torch.rand(n, branches, generator=generator) < 0.2
    dropped_NF[0, 0] = False
    return torch.where(dropped_NF, -torch.inf, logw_NF)
