"""The life of the coordinator's process: meet the workers, warm up, run the engine, serve the gateway, until told to stop."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from services.coordinator.loop import EngineLoop, Step
from services.coordinator.service import CoordinatorServer
from services.coordinator.timeline import Timeline
from services.link.base import LinkError
from services.link.connect import Meeting, coordinator_end
from services.link.remote import RemotePair, RemoteWorker
from smc.engine.config import EngineConfig
from smc.engine.engine import Engine
from smc.engine.kvrows import SIDES
from smc.engine.request import Request, SamplingParams
from smc.models.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CoordinatorSpec:
    """Everything the coordinator is told when it starts."""

    meeting: Meeting
    tokenizer: Path
    engine: EngineConfig
    context: int
    timeout: float
    """Seconds that any answer of a worker may take."""
    heartbeat: float
    """Seconds between two signs of life while nothing runs; workers give up a silent coordinator after `timeout`."""
    resident: bool
    """State of rounds stays with the workers (smc/resident)."""
    records: bool
    """Workers record rounds and replay them: few shapes are worth more than few rows."""
    trace: Path | None
    """Where to write a Chrome trace of all rounds when it stops."""


class Coordinator:
    """The one brain of the service. Nothing it does in a round involves Ray."""

    def __init__(self, spec: CoordinatorSpec, host: str) -> None:
        """Returns when every rank has run a warm-up round. Raises LinkError, ValueError or what a worker reports."""
        torch.set_num_threads(1)
        self._spec = spec
        self._timeline = Timeline(trace=spec.trace is not None)
        store = spec.meeting.store()
        self._ends = {side: coordinator_end(spec.meeting, store, side) for side in SIDES}
        self._workers = {
            side: RemoteWorker(side, end, spec.meeting.epoch, spec.meeting.start_timeout, self._timeline)
            for side, end in self._ends.items()
        }
        pages = dict.fromkeys(SIDES, spec.engine.pool_pages(spec.context))
        pair = RemotePair(self._workers, records=spec.records) if spec.resident else None
        self._engine = Engine(spec.engine, self._workers, Tokenizer.load(spec.tokenizer), pages=pages, context=spec.context, pair=pair)
        self._leaked: dict[str, int] = {}
        self._warm_up()
        self._server = CoordinatorServer(host, spec.meeting.secret)
        self._loop = EngineLoop(
            self._engine,
            self._deliver,
            timeline=self._timeline,
            when_idle=self._sign_of_life,
            idle_period=spec.heartbeat,
        )
        self._server.attach_to(self._loop)
        self._loop.start()
        self.address = self._server.address

    def wait(self) -> None:
        """Until the engine has stopped. Raises what stopped it, if it was not `stop`."""
        self._loop.ended.wait()
        self._server.close()
        if self._loop.failure is not None:
            raise self._loop.failure

    def stop(self) -> None:
        """End the loop and tell the workers to end. What still runs is dropped."""
        self._loop.stop()
        for worker in self._workers.values():
            worker.stop()
        if self._spec.trace is not None:
            self._timeline.write(self._spec.trace)

    def _deliver(self, step: Step) -> None:
        self._server.deliver(replace(step, stats=replace(step.stats, pages_leaked=self._leaked)))
        for worker in self._workers.values():  # load on one model alone must not starve the other of signs of life
            worker.keep_alive(self._spec.heartbeat)
        self._timeline.forget()  # waits between two steps

    def _sign_of_life(self) -> None:
        """Nothing runs: every page must be free, and both workers must answer."""
        for side, worker in self._workers.items():
            status = worker.status()
            self._leaked[side] = status.pages_total - status.pages_free
            if self._leaked[side]:
                logger.error("%d KV pages of the %s model are held although nothing runs", self._leaked[side], side)

    def _warm_up(self) -> None:
        """One short request through both models: every rank has then run everything once, and clocks are compared."""
        block, vocab = self._spec.engine.block, self._engine.tokenizer.size
        prompt = tuple(i % vocab for i in range(4))
        tokens = min(2 * block + 2, self._spec.context - len(prompt))
        params = SamplingParams(particles=min(2, self._spec.engine.max_slots), max_tokens=tokens, seed=0, ignore_eos=True)
        answer = None
        for output in self._engine.run([Request("warm-up", prompt, params)]):
            answer = output.answer or answer
        if answer.error:
            raise LinkError(f"the warm-up round failed: {answer.error}")
        self._engine.check_books()
        self._engine.take_stats()
        for worker in self._workers.values():
            worker.set_clock()
            worker.timeout = self._spec.timeout
        self._sign_of_life()
        self._timeline.forget()
