"""The particles of several groups side by side, and what each group asks of its laws, as arrays.

Axes: A slots of all groups, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from smc.api.limits import SCHEME_NAMES
from smc.api.sampling_params import Method, SamplingParams
from smc.laws import LawSpec
from smc.scheduler.sequence_group import Group


class Population:
    """The slots of several groups, one group after another: A slots in all."""

    def __init__(self, groups: Sequence[Group], members: Sequence[tuple[np.ndarray, np.ndarray]] | None = None) -> None:
        """`members`: slots and particles of every group, where they are not what the groups have now."""
        self.groups = list(groups)
        self._members = members or [(g.slots, g.particles) for g in self.groups]
        slots, particles = zip(*self._members)
        self.size_G = np.array([len(slots_N) for slots_N in slots], dtype=np.int64)
        self.slot_A = np.concatenate(slots).astype(np.int64)
        self.particle_A = np.concatenate(particles)
        self.group_A = np.repeat(np.arange(len(self.groups)), self.size_G)
        self.first_G = np.cumsum(self.size_G) - self.size_G
        """Index of each group's first slot."""
        self.seed_G = np.array([g.seed for g in self.groups], dtype=np.int64)

    def take(self, index_G: np.ndarray) -> Population:
        """Some of the groups, with the slots that they have here."""
        return Population([self.groups[g] for g in index_G], [self._members[g] for g in index_G])

    @property
    def params(self) -> list[SamplingParams]:
        return [g.params for g in self.groups]

    @property
    def target_law(self) -> LawSpec[np.ndarray]:
        """Per group."""
        return self._law([p.temperature for p in self.params])

    @property
    def draft_law(self) -> LawSpec[np.ndarray]:
        """Per group: of the proposal; of a plainly decoding draft, its own."""
        return self._law([_draft_temperature(p) for p in self.params])

    @property
    def scheme_G(self) -> np.ndarray:
        return np.array([SCHEME_NAMES.index(p.resampling) if p.resampling else 0 for p in self.params], dtype=np.int32)

    def per_group(self, values: Sequence[float | int | None], dtype: type, default: float = 0.0) -> np.ndarray:
        return np.array([default if value is None else value for value in values], dtype=dtype)

    def least(self, values_A: np.ndarray) -> np.ndarray:
        """The smallest value of every group."""
        return np.minimum.reduceat(values_A, self.first_G)

    def largest(self, values_A: np.ndarray) -> np.ndarray:
        return np.maximum.reduceat(values_A, self.first_G)

    def sums(self, values_A: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values_A, self.first_G)

    def _law(self, temperature_G: list[float]) -> LawSpec[np.ndarray]:
        params = self.params
        law = LawSpec.of(
            temperature_R=np.array(temperature_G, dtype=np.float32),
            top_k_R=np.array([p.top_k for p in params], dtype=np.int64),
            top_p_R=np.array([p.top_p for p in params], dtype=np.float32),
            min_p_R=np.array([p.min_p for p in params], dtype=np.float32),
            alpha_R=self.per_group([p.alpha for p in params], np.float32, 1.0),
        )
        return law.canonical()


def _draft_temperature(params: SamplingParams) -> float:
    if params.draft_temperature is not None:
        return params.draft_temperature
    # Greedy exact decoding drafts at 1: of a law with all mass on one token there would be no second row.
    return 1.0 if params.method is Method.EXACT and params.temperature == 0 else params.temperature
