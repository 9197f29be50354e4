"""How rounds are carried out. The scheduler requests them from a `RoundExecutor`, which has a runner for each model
(`smc.executor.model_runner`). Both may be in one process (`LocalRoundExecutor`) or in two (`OneModelExecutor` in
each)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from smc.api.engine_config import EngineConfig
from smc.executor.channel import LocalChannel, Share
from smc.executor.graph_runner import AsyncResult
from smc.executor.messages import Pending
from smc.executor.model_runner import DraftRunner, TargetRunner
from smc.executor.ops import RoundOps
from smc.executor.worker import ModelWorker
from smc.round.plan import RoundPlan
from smc.round.slot_state import SequenceHandoff
from smc.round.tensors import DraftReport, RoundResult
from smc.types import BOTH_MODELS, ModelRole


@dataclass(frozen=True)
class RoundReports:
    """What the host learns of a round from all models that took part."""

    by_model: dict[ModelRole, RoundResult[np.ndarray] | DraftReport[np.ndarray]]

    @property
    def result(self) -> RoundResult[np.ndarray]:
        """The report of the target, or of the model that decodes alone."""
        return next(report for report in self.by_model.values() if isinstance(report, RoundResult))

    @property
    def draft(self) -> DraftReport[np.ndarray] | None:
        """The draft's report about a round of both models; None: it was a round of one."""
        return next((report for report in self.by_model.values() if isinstance(report, DraftReport)), None)


class RoundExecutor(Protocol):
    """Carries out rounds, in the order in which they are requested."""

    pipelined: bool
    """A round runs without waiting for its result to be read, so that the next one can be requested meanwhile."""

    def join(self, role: ModelRole, group: SequenceHandoff) -> None:
        """Let particles take part at this model from the next round on."""
        ...

    def round(self, plan: RoundPlan[np.ndarray]) -> Pending[RoundReports]:
        """Request a round."""
        ...


class LocalRoundExecutor:
    """Both models in this process: on one device, or on two."""

    def __init__(
        self,
        config: EngineConfig,
        workers: Mapping[ModelRole, ModelWorker],
        ops: RoundOps,
        share: Share | None = None,
    ) -> None:
        """`share`: see `Channel.share`; None if this process holds the whole models."""
        draft, target = workers[ModelRole.DRAFT], workers[ModelRole.TARGET]
        stages = ops.stage_runner(target.device)
        # In lockstep the models of one device take turns, so they use one stream. In look-ahead they work at a time.
        takes_turns = draft.device == target.device and not config.lookahead
        of_draft = stages.beside() if takes_turns else ops.stage_runner(draft.device)
        self.stages = {ModelRole.DRAFT: of_draft, ModelRole.TARGET: stages}
        channels = LocalChannel.between(of_draft, stages, share)
        # What a runner allocates is filled in the order of its own work.
        with of_draft.working():
            self._draft = DraftRunner(config, draft, ops, of_draft, channels[0])
        with stages.working():
            self._target = TargetRunner(config, target, ops, stages, channels[1])
        self.runners: dict[ModelRole, DraftRunner | TargetRunner] = {
            ModelRole.DRAFT: self._draft,
            ModelRole.TARGET: self._target,
        }
        self.pipelined = self.stages[ModelRole.TARGET].records

    def join(self, role: ModelRole, group: SequenceHandoff) -> None:
        self.runners[role].join(group)

    def round(self, plan: RoundPlan[np.ndarray]) -> RequestedRound:
        if plan.kind.roles != BOTH_MODELS:
            (role,) = plan.kind.roles
            return RequestedRound({role: self.runners[role].round(plan)})
        self._target.begin(plan)
        self._draft.draft(plan)
        target = self._target.round(plan)
        return RequestedRound({ModelRole.DRAFT: self._draft.remap(), ModelRole.TARGET: target})


class OneModelExecutor:
    """One model in this process: its part in rounds. The other model, if a round has one, is in another process."""

    def __init__(self, runner: DraftRunner | TargetRunner) -> None:
        self._runner = runner

    def join(self, role: ModelRole, group: SequenceHandoff) -> None:
        self._runner.join(group)

    def round(self, plan: RoundPlan[np.ndarray]) -> RequestedRound:
        return RequestedRound({self._runner.worker.name: self._runner.round(plan)})


@dataclass(frozen=True)
class RequestedRound:
    """A round that has been requested from its models."""

    readings: dict[ModelRole, Pending | AsyncResult]

    def result(self) -> RoundReports:
        """Wait for the round and return its outcome."""
        # Each result takes the time at which its own wait ends, from which `spans` counts back.
        return RoundReports({role: reading.result() for role, reading in self.readings.items()})

    def failures(self) -> Mapping[int, str]:
        """See `Pending.failures`."""
        return {group: why for reading in self.readings.values() for group, why in reading.failures().items()}

    def spans(self) -> dict[str, tuple[int, int]]:
        """See `Pending.spans`."""
        return {name: span for reading in self.readings.values() for name, span in reading.spans().items()}
