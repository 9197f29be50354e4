"""Two models that run rounds, as the scheduler sees them; and the pair whose sides are both in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from smc.api.engine_config import EngineConfig
from smc.executor.graph_runner import AsyncResult
from smc.executor.messages import Lineage, Pending, RoundResult
from smc.executor.model_runner import DraftRunner, LocalChannel, Parts, TargetRunner
from smc.executor.plan import Program, RoundPlan, SequenceHandoff
from smc.executor.worker import ModelWorker


@dataclass(frozen=True)
class RoundOutcome:
    """What came of a round."""

    result: RoundResult[np.ndarray]
    lineage: dict[str, Lineage[np.ndarray]]
    """By side."""


class RoundExecutor(Protocol):
    """What carries out rounds. Everything is done in the order in which it is asked for."""

    pipelined: bool
    """A round goes on while its result is waited for, so that the next can be asked for."""

    def join(self, side: str, group: SequenceHandoff) -> None:
        """Particles take part on this side from the next round on."""
        ...

    def round(self, plan: RoundPlan[np.ndarray]) -> Pending[RoundOutcome]:
        """Ask for a round."""
        ...


class LocalRoundExecutor:
    """Both sides in this process: on one device, or on two."""

    def __init__(self, config: EngineConfig, workers: dict[str, ModelWorker], parts: Parts) -> None:
        self.stages = {side: parts.stages(worker.device) for side, worker in workers.items()}
        channels = LocalChannel.between(self.stages["draft"], self.stages["target"])
        self._draft = DraftRunner(config, workers["draft"], parts, self.stages["draft"], channels[0])
        self._target = TargetRunner(config, workers["target"], parts, self.stages["target"], channels[1])
        self.sides: dict[str, DraftRunner | TargetRunner] = {"draft": self._draft, "target": self._target}
        self.pipelined = self.stages["target"].records

    def join(self, side: str, group: SequenceHandoff) -> None:
        self.sides[side].join(group)

    def round(self, plan: RoundPlan[np.ndarray]) -> LocalRound:
        if plan.program is not Program.PAIR:
            side = plan.program.value
            return LocalRound({side: self.sides[side].round(plan)})
        self._draft.draft(plan)
        target = self._target.round(plan)
        return LocalRound({"draft": self._draft.follow(), "target": target})


@dataclass(frozen=True)
class LocalRound:
    """A round that its sides have been asked for."""

    readings: dict[str, Pending | AsyncResult]

    def result(self) -> RoundOutcome:
        """Waits for it."""
        # In this order each says when it came, by the clock of its own device.
        values = {side: reading.result() for side, reading in self.readings.items()}
        result = next(value for value in values.values() if isinstance(value, RoundResult))
        lineage = {side: value.lineage if isinstance(value, RoundResult) else value for side, value in values.items()}
        return RoundOutcome(result, lineage)

    def spans(self) -> dict[str, tuple[int, int]]:
        """See `Reading.spans`."""
        return {name: span for reading in self.readings.values() for name, span in reading.spans().items()}
