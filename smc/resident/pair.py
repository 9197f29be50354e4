"""A pair of models for rounds, as the scheduler sees it; and the pair whose sides are both in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from smc.engine.config import EngineConfig
from smc.engine.messages import Pending
from smc.engine.worker import ModelWorker
from smc.resident.channel import LocalChannel
from smc.resident.plan import RoundPlan, RoundResult, Start
from smc.resident.sides import DraftSide, Parts, PlainSide, TargetSide
from smc.resident.stages import Reading


class Runner(Protocol):
    """What carries out rounds. Everything is done in the order in which it is asked for."""

    records: bool
    """Rounds of few shapes are preferred."""
    waits: bool
    """A round goes on while its result is waited for, so that the next can be asked for."""
    alone: str | None
    """The side whose model decodes alone; None: both together."""

    def join(self, start: Start) -> None:
        """A group takes part from the next round on."""
        ...

    def leave(self, slots_N: np.ndarray) -> None:
        """The group in these slots gives back what it holds."""
        ...

    def round(self, plan: RoundPlan) -> Pending[RoundResult]:
        """Ask for a round."""
        ...


class Pair(Runner, Protocol):
    """Two models together, and each alone."""

    plain: dict[str, Runner]
    """By side."""


class LocalPair:
    """Both sides in this process: on one device, or on two."""

    alone = None

    def __init__(self, config: EngineConfig, workers: dict[str, ModelWorker], parts: Parts) -> None:
        stages = {side: parts.stages(worker.device) for side, worker in workers.items()}
        channels = LocalChannel.between(stages["draft"], stages["target"])
        self._draft = DraftSide(config, workers["draft"], parts, stages["draft"], channels[0])
        self._target = TargetSide(config, workers["target"], parts, stages["target"], channels[1])
        self.plain = {side: PlainSide(config, worker, parts, stages[side]) for side, worker in workers.items()}
        self.records = self.waits = stages["target"].records

    def join(self, start: Start) -> None:
        self._draft.join(start)
        self._target.join(start)

    def leave(self, slots_N: np.ndarray) -> None:
        self._draft.leave(slots_N)
        self._target.leave(slots_N)

    def round(self, plan: RoundPlan) -> LocalRound:
        draft, target = self._draft.draft(plan), self._target.round(plan)
        self._draft.follow()
        return LocalRound(draft, target)


@dataclass(frozen=True)
class LocalRound:
    """A round that both sides have been asked for."""

    draft: Reading
    target: Reading

    def result(self) -> RoundResult:
        """Waits for it."""
        self.draft.result()  # which is there first; each says when it came, by the clock of its own device
        return self.target.result()

    def spans(self) -> dict[str, tuple[int, int]]:
        """See `Reading.spans`."""
        return self.draft.spans() | self.target.spans()
