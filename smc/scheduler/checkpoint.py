"""The checkpoint of a request's particles while they hold no slots: what a preempted request resumes from, and what a
request goes on from when it changes between the draft-target pair and the target alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from smc.algorithm.bounds import Bounds
from smc.algorithm.expansion import CandidateTokens, PopulationKind, expand
from smc.algorithm.selection import select
from smc.api.limits import SCHEME_NAMES
from smc.scheduler.slots import Slots

SAVED = ("tokens_SL", "logp_SL", "logq_SL", "length_S", "block_S", "logw_S", "logphi_S", "weighed_S", "ended_S")
"""Arrays of `Slots` that a checkpoint copies."""
SHRINK_ROUND = 1 << 30
"""Choices between rounds number their random numbers from here on, so that they use none of a round's."""


@dataclass(eq=False)
class Checkpoint:
    """Rows of particles, as arrays of `Slots` by name."""

    arrays: dict[str, np.ndarray]
    _pages: dict[object, int] = field(default_factory=dict)

    @staticmethod
    def of(slots: Slots, slots_N: np.ndarray) -> Checkpoint:
        width = int(slots.length_S[slots_N].max())
        arrays = {name: getattr(slots, name) for name in SAVED}
        return Checkpoint(
            {name: of_S[slots_N, :width] if of_S.ndim > 1 else of_S[slots_N] for name, of_S in arrays.items()}
        )

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def __len__(self) -> int:
        """Rows."""
        return len(self.arrays["length_S"])

    @property
    def longest(self) -> int:
        """Tokens of the longest particle."""
        return int(self.arrays["length_S"].max())

    def pages(self, key: object, count: Callable[[], int]) -> int:
        """Pages that are needed to resume, as far as `key` tells: counted once."""
        if key not in self._pages:
            self._pages[key] = count()
        return self._pages[key]

    def restore(self, slots: Slots, slots_N: np.ndarray) -> None:
        """Write the rows back. Slots beyond them repeat the first row and hold no particle."""
        row_N = row_of_batch(len(self), len(slots_N))
        for name, values in self.arrays.items():
            there = getattr(slots, name)
            if there.ndim > 1:
                there[slots_N, : values.shape[1]] = values[row_N]
            else:
                there[slots_N] = values[row_N]
        rest_X = slots_N[len(self) :]
        slots.ended_S[rest_X], slots.logw_S[rest_X] = True, -np.inf


def row_of_batch(rows: int, size: int) -> np.ndarray:
    """Row that each index of a batch takes: its own, or the first where there are too few."""
    index_N = np.arange(size)
    return np.where(index_N < rows, index_N, 0)


class RandomKeys(NamedTuple):
    """What the random numbers of a choice between rounds depend on."""

    seed: int
    choice: int
    """Number of the choice, of one request."""


class ShrunkCheckpoint(NamedTuple):
    checkpoint: Checkpoint
    kept_X: np.ndarray
    """Indices of the particles that stay."""
    log_z: float
    """Increment of the request's log Z."""


def expand_rows(checkpoint: Checkpoint, rows: int, kind: PopulationKind, keys: RandomKeys) -> ShrunkCheckpoint:
    """Keep `rows` of a population that is drawn without replacement: `smc.algorithm.expansion`."""
    logw_N = torch.from_numpy(checkpoint["logw_S"])
    n, one_G = len(logw_N), torch.ones(1, dtype=torch.int64)
    random = (torch.tensor([keys.seed]), one_G * (SHRINK_ROUND + keys.choice), 0)
    sources, kept = ((one_G * 0, one_G * size) for size in (n, rows))
    there_N = torch.ones(n, dtype=torch.bool)
    whole = CandidateTokens.whole(logw_N)
    chosen = expand(whole, logw_N, there_N, sources, kept, one_G * rows, one_G * int(kind), random, rows)
    parent_X = chosen.parent_X[chosen.alive_X].numpy()
    arrays = {name: values[parent_X] for name, values in checkpoint.arrays.items()}
    arrays["logw_S"] = chosen.mass_X[chosen.alive_X].numpy()
    return ShrunkCheckpoint(Checkpoint(arrays), np.arange(rows), 0.0)


def select_rows(checkpoint: Checkpoint, rows: int, scheme: str | None, keys: RandomKeys) -> ShrunkCheckpoint:
    """Keep `rows` of independent particles: `smc.algorithm.selection`."""
    assert scheme is not None, "the resampling scheme of independent particles is filled in"
    n = len(checkpoint)
    bounds = Bounds(*(torch.tensor([value], dtype=torch.int32) for value in (0, n, n, rows)))
    chosen = select(
        torch.from_numpy(checkpoint["logw_S"])[:, None],
        torch.ones(n, dtype=torch.bool),
        bounds,
        torch.zeros(1, dtype=torch.float64),
        torch.tensor([SCHEME_NAMES.index(scheme)], dtype=torch.int32),
        torch.tensor([keys.seed]),
        torch.tensor([SHRINK_ROUND + keys.choice]),
    )
    alive_N = chosen.alive_A.numpy()
    ancestor_X = chosen.ancestor_A.numpy()[alive_N]
    arrays = {name: values[ancestor_X] for name, values in checkpoint.arrays.items()}
    arrays["logw_S"] = chosen.logw_A.numpy()[alive_N]
    return ShrunkCheckpoint(Checkpoint(arrays), np.flatnonzero(alive_N), float(chosen.log_z_G[0]))
