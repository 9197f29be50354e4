"""The engine over two links: the scheduler of the in-process engine, unchanged, with workers that are elsewhere."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from services.coordinator.timeline import Timeline
from services.coordinator.warm_up import first_rounds, usual_rounds
from services.link.base import LinkError
from services.link.connect import Meeting, coordinator_end
from services.link.remote import RemotePair, RemoteWorker
from smc.engine.config import EngineConfig
from smc.engine.engine import Engine
from smc.engine.messages import SIDES
from smc.engine.request import Request
from smc.models.source import Source

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CoordinatorSpec:
    """Everything the coordinator is told when it starts."""

    meeting: Meeting
    target: Source
    """Whose tokenizer is the pair's."""
    engine: EngineConfig
    context: int
    timeout: float
    """Seconds that any answer of a worker may take."""
    heartbeat: float
    """Seconds between two signs of life while nothing runs; workers that hear nothing for long give up."""
    records: bool
    """Workers record rounds and replay them: few shapes are worth more than few rows."""
    rehearse: bool
    """Run the usual kinds of rounds before serving, so that nobody waits for their kernels to be compiled."""
    trace: Path | None
    """Where to write a Chrome trace of all rounds when it stops."""


class RemoteEngine:
    """Has met both workers' leaders and seen a round of both models."""

    def __init__(self, spec: CoordinatorSpec) -> None:
        """Returns when every rank has run a round, on GPUs the usual kinds of rounds. Raises LinkError, ValueError or what a worker
        reports."""
        self._spec = spec
        self.timeline = Timeline(trace=spec.trace is not None)
        store = spec.meeting.store()
        ends = {side: coordinator_end(spec.meeting, store, side) for side in SIDES}
        self.workers = {
            side: RemoteWorker(side, end, spec.meeting.epoch, spec.meeting.start_timeout, self.timeline) for side, end in ends.items()
        }
        pages = dict.fromkeys(SIDES, spec.engine.pool_pages(spec.context))
        pair = RemotePair(self.workers, records=spec.records)
        self.engine = Engine(spec.engine, self.workers, spec.target.tokenizer(), pair=pair, pages=pages, context=spec.context)
        try:
            self._warm_up()
        except LinkError as error:
            raise self.cause(error) from error

    def stop(self) -> None:
        """Tell the workers to end."""
        for worker in self.workers.values():
            worker.stop()

    def cause(self, error: Exception) -> Exception:
        """What the engine stopped for. A worker that fails breaks its links and the other's, so the first error may be neither's own."""
        if isinstance(error, LinkError) and not error.began_here:
            return next(filter(None, (worker.last_words() for worker in self.workers.values())), error)
        return error

    def _warm_up(self) -> None:
        """Every rank runs a round of both models, then those of the usual kinds; clocks are compared."""
        spec = self._spec
        shape = (spec.engine, spec.context, self.engine.tokenizer.size)
        self._rehearse(first_rounds(*shape))
        begin, loads = time.monotonic(), list(usual_rounds(*shape, self.engine.budget.capacity)) if spec.rehearse else []
        for asked in loads:
            self._rehearse(asked)
        if loads:
            logger.info("ran %d usual loads in %.1f s", len(loads), time.monotonic() - begin)
        self.engine.check_books()
        self.engine.take_stats()
        for worker in self.workers.values():
            worker.set_clock()
            worker.timeout = self._spec.timeout
        self.timeline.forget()

    def _rehearse(self, asked: list[Request]) -> None:
        for output in self.engine.run(asked):
            if output.answer and output.answer.error:
                raise LinkError(f"the warm-up round failed: {output.answer.error}")
