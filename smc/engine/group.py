"""One request inside the engine: its particles' slots, how far it has come, and what has been streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from smc.engine.cohorts import Cohorts
from smc.engine.request import Request, Statistics
from smc.engine.text import StopRules, TextStream
from smc.laws import LawSpec


class Phase(Enum):
    QUEUED = "queued"
    PREFILL = "prefill"
    RUNNING = "running"


@dataclass(eq=False)
class Group:
    """Mutable state of one request. Particles are in `Slots`; this holds what they have in common."""

    request: Request
    seed: int
    rules: StopRules
    submitted: float
    """Engine clock at submission, seconds."""
    pages: dict[str, int]
    """KV pages reserved in each worker's pool, the most the group can ever hold there."""
    phase: Phase = Phase.QUEUED
    slots: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    prefilled: dict[str, int] = field(default_factory=dict)
    """Prompt tokens run so far, for each worker the method uses."""
    first_tokens: np.ndarray | None = None
    """[N] drawn by the end of the prefill."""
    first_logp: np.ndarray | None = None
    """[N] their log-probabilities."""
    rounds: int = 0
    """That have been read."""
    launched: int = 0
    """Rounds that have been asked for."""
    cohorts: Cohorts | None = None
    """Those that it takes part in."""
    gone: bool = False
    """Ended; its slots are somebody else's."""
    committed: int = 0
    """Answer tokens on which all particles agree."""
    streamed: int = 0
    """Answer tokens that have been reported to the caller."""
    lag: int = 0
    """Tokens between the committed prefix and the longest particle."""
    log_z: float = 0.0
    error: str | None = None
    stream: TextStream = field(init=False)
    tally: Tally = field(init=False)

    def __post_init__(self) -> None:
        self.stream = TextStream(self.rules)
        self.tally = Tally(self.request.params.rows)

    def fail(self, side: str) -> None:
        """Its request ends with an error that names the model."""
        self.error = self.error or f"the {side} model returned NaN logits: its weights or its numeric type are at fault"

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def params(self):
        return self.request.params

    @property
    def prompt_size(self) -> int:
        return len(self.request.prompt)


@dataclass
class Tally:
    """Running sums behind Statistics."""

    particles: int
    rounds: int = 0
    resamples: int = 0
    collapses: int = 0
    ess_sum: float = 0.0
    ess_min: float = float("inf")
    draft_tokens: int = 0
    target_tokens: int = 0
    lag_sum: int = 0

    def count_tokens(self, side: str, tokens: int) -> None:
        if side == "draft":
            self.draft_tokens += tokens
        else:
            self.target_tokens += tokens

    def statistics(self, log_z: float) -> Statistics:
        rounds = max(self.rounds, 1)
        return Statistics(
            particles=self.particles,
            rounds=self.rounds,
            resamples=self.resamples,
            collapses=self.collapses,
            mean_ess=self.ess_sum / rounds,
            min_ess=self.ess_min if self.ess_sum else 0.0,
            log_z=log_z,
            draft_tokens=self.draft_tokens,
            target_tokens=self.target_tokens,
            committed_lag=self.lag_sum / rounds,
        )


class Population:
    """The slots of several groups, side by side: A slots in all, group after group, and their view as [G, N] with padding."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = list(groups)
        self.sizes_G = np.array([len(g.slots) for g in self.groups], dtype=np.int64)
        self.slots_A = np.concatenate([g.slots for g in self.groups])
        self.group_A = np.repeat(np.arange(len(self.groups)), self.sizes_G)
        self.starts_G = np.cumsum(self.sizes_G) - self.sizes_G
        """Index of each group's first slot."""
        self.first_A = np.repeat(self.starts_G, self.sizes_G)
        """The same, per slot."""
        self.particle_A = np.arange(len(self.slots_A)) - self.first_A
        self.seed_G = np.array([g.seed for g in self.groups], dtype=np.int64)
        params = [g.params for g in self.groups]
        self.alpha_A = self.per_slot([p.alpha or 1.0 for p in params], np.float64)
        self.threshold_G = np.array([p.ess_threshold or 0.0 for p in params])
        self.schemes = [p.resampling for p in params]
        self.wants_logp = any(p.logprobs for p in params)
        self.target_law = self._law([p.temperature for p in params])
        self.draft_law = self._law([p.temperature if p.draft_temperature is None else p.draft_temperature for p in params])
        """Of the proposal; of a plainly decoding draft, its own."""

    def _law(self, temperature_G: list[float]) -> LawSpec:
        params = [g.params for g in self.groups]
        return LawSpec.of(
            temperature_R=self.per_slot(temperature_G, np.float32),
            top_k_R=self.per_slot([p.top_k for p in params], np.int64),
            top_p_R=self.per_slot([p.top_p for p in params], np.float32),
            min_p_R=self.per_slot([p.min_p for p in params], np.float32),
            alpha_R=self.alpha_A.astype(np.float32),
        )

    def per_slot(self, values: Sequence[float] | Sequence[int], dtype: type) -> np.ndarray:
        """One value per group -> one per slot."""
        return np.asarray(values, dtype=dtype)[self.group_A]

    def grid(self, values_A: np.ndarray, fill: float) -> np.ndarray:
        """[A, ...] -> [G, N, ...] with `fill` where a group has fewer than N particles."""
        shape = (len(self.groups), int(self.sizes_G.max()), *values_A.shape[1:])
        if len(self.slots_A) == shape[0] * shape[1]:
            return values_A.reshape(shape)
        grid = np.full(shape, fill, dtype=values_A.dtype)
        grid[self.group_A, self.particle_A] = values_A
        return grid
