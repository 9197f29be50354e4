"""Two models that run rounds, as the scheduler sees them; and the pair whose sides are both in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from smc.api.engine_config import EngineConfig
from smc.executor.graph_runner import AsyncResult
from smc.executor.messages import DraftReport, Lineage, Pending, RoundResult
from smc.executor.model_runner import DraftRunner, LocalChannel, TargetRunner
from smc.executor.ops import RoundOps
from smc.executor.plan import Program, RoundPlan, SequenceHandoff
from smc.executor.worker import ModelWorker
from smc.types import ModelRole


@dataclass(frozen=True)
class RoundOutcome:
    """What came of a round."""

    result: RoundResult[np.ndarray]
    lineage: dict[ModelRole, Lineage[np.ndarray]]
    """By side."""
    observed_3A: np.ndarray | None = None
    """Of `DraftReport`; None: the draft took no part."""


class RoundExecutor(Protocol):
    """What carries out rounds. Everything is done in the order in which it is asked for."""

    pipelined: bool
    """A round goes on while its result is waited for, so that the next can be asked for."""

    def join(self, role: ModelRole, group: SequenceHandoff) -> None:
        """Particles take part on this side from the next round on."""
        ...

    def round(self, plan: RoundPlan[np.ndarray]) -> Pending[RoundOutcome]:
        """Ask for a round."""
        ...


class LocalRoundExecutor:
    """Both sides in this process: on one device, or on two."""

    def __init__(self, config: EngineConfig, workers: dict[ModelRole, ModelWorker], ops: RoundOps) -> None:
        self.stages = {role: ops.stage_runner(worker.device) for role, worker in workers.items()}
        channels = LocalChannel.between(self.stages[ModelRole.DRAFT], self.stages[ModelRole.TARGET])
        self._draft = DraftRunner(config, workers[ModelRole.DRAFT], ops, self.stages[ModelRole.DRAFT], channels[0])
        self._target = TargetRunner(config, workers[ModelRole.TARGET], ops, self.stages[ModelRole.TARGET], channels[1])
        self.runners: dict[ModelRole, DraftRunner | TargetRunner] = {
            ModelRole.DRAFT: self._draft,
            ModelRole.TARGET: self._target,
        }
        self.pipelined = self.stages[ModelRole.TARGET].records

    def join(self, role: ModelRole, group: SequenceHandoff) -> None:
        self.runners[role].join(group)

    def round(self, plan: RoundPlan[np.ndarray]) -> LocalRound:
        if plan.program is not Program.PAIR:
            role = ModelRole(plan.program.value)
            return LocalRound({role: self.runners[role].round(plan)})
        self._target.begin(plan)
        self._draft.draft(plan)
        target = self._target.round(plan)
        return LocalRound({ModelRole.DRAFT: self._draft.follow(), ModelRole.TARGET: target})


@dataclass(frozen=True)
class LocalRound:
    """A round that its sides have been asked for."""

    readings: dict[ModelRole, Pending | AsyncResult]

    def result(self) -> RoundOutcome:
        """Waits for it."""
        # In this order each says when it came, by the clock of its own device.
        values = {role: reading.result() for role, reading in self.readings.items()}
        result = next(value for value in values.values() if isinstance(value, RoundResult))
        observed_3A = next((value.observed_3A for value in values.values() if isinstance(value, DraftReport)), None)
        return RoundOutcome(result, {role: value.lineage for role, value in values.items()}, observed_3A)

    def spans(self) -> dict[str, tuple[int, int]]:
        """See `Reading.spans`."""
        return {name: span for reading in self.readings.values() for name, span in reading.spans().items()}
