"""The coordinator's process: it connects to the workers, runs the engine and serves the gateway until it is told to
stop."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import torch

from services.coordinator.remote_engine import CoordinatorSpec, RemoteEngine
from services.coordinator.service import CoordinatorServer, EngineLoop
from services.link.base import LinkError
from services.protobuf.coordinator import EngineStep

WATCH_SECONDS = 0.5
"""Between two looks at the engine's thread."""
MEET_SECONDS = 0.02
"""Between two questions whether draft and target have a link."""
SLACK_SECONDS = 1.0
"""Beyond a wait for a worker, which is bounded by itself."""

logger = logging.getLogger(__name__)


class EngineStuck(RuntimeError):
    """A step of the engine does not end."""


class Coordinator:
    """The one brain of the service. Nothing it does in a round involves Ray."""

    def __init__(self, spec: CoordinatorSpec, host: str) -> None:
        """Returns when the engine is warm. Raises LinkError, ValueError or what a worker reports."""
        torch.set_num_threads(1)
        self._spec = spec
        self._remote = RemoteEngine(spec)
        self._ping_workers()
        self._remote.timeline.forget()
        self._server = CoordinatorServer(host, spec.rendezvous.secret)
        self._loop = EngineLoop(
            self._remote.engine,
            self._deliver,
            timeline=self._remote.timeline,
            when_idle=self._ping_workers,
            idle_period=spec.heartbeat,
            on_draft_lost=self._remote.detach_draft,
        )
        self._server.attach_to(self._loop)
        self._loop.start()
        self.address = self._server.address

    def wait(self) -> None:
        """Until the engine has stopped. Raises what stopped it, if it was not `stop`; EngineStuck if it is at one step
        for too long."""
        limit = self._spec.timeout + self._spec.heartbeat + SLACK_SECONDS
        while not self._loop.ended.wait(WATCH_SECONDS):
            if self._loop.silence > limit:
                logger.error("the engine has been at one step for more than %g s:\n%s", limit, self._loop.stack())
                raise EngineStuck(f"the engine has been at one step for more than {limit:g} s")
        self._server.close()
        if self._loop.failure is not None:
            raise self._remote.cause(self._loop.failure)

    def stop(self) -> None:
        """End the loop and tell the workers to end. What still runs is dropped."""
        self._loop.stop()
        self._remote.stop()
        if self._spec.trace is not None:
            self._remote.timeline.write(self._spec.trace)

    def detach_draft(self) -> None:
        """The draft's processes have been stopped. Returns once no command to it is in flight."""
        self._loop.do(lambda: self._loop.detach_draft("its processes have ended")).result(2 * self._spec.timeout)

    def attach_draft(self, incarnation: int) -> None:
        """Returns when the draft of this incarnation takes part. Raises RuntimeError if it does not come."""
        remote, timeout = self._remote, self._spec.timeout
        draft = remote.connect_draft(incarnation)

        def have_met() -> bool:
            return self._loop.do(lambda: remote.target_meets(draft)).result(2 * timeout)

        try:
            deadline = time.monotonic() + timeout
            # Waits for the draft happen here, not in the engine's thread, so that the target goes on decoding.
            met = have_met()
            draft.set_clock()
            while not met:
                if time.monotonic() > deadline:
                    raise LinkError(f"draft and target have not met within {timeout:g} s")
                time.sleep(MEET_SECONDS)
                met = have_met()
            pages = remote.pages_of_draft()
            self._loop.do(lambda: remote.attach_draft(draft, pages)).result(2 * timeout)
        except Exception:
            draft.close()
            raise

    def _deliver(self, step: EngineStep) -> None:
        self._server.deliver(replace(step, lost_draft=self._remote.lost_draft))
        for side, leaked in step.stats.pages_leaked.items():
            if leaked:
                logger.error("%d references to KV pages of the %s model are held although nothing runs", leaked, side)
        for worker in self._remote.present:  # load on one model alone must not suppress the other's heartbeats
            worker.keep_alive(self._spec.heartbeat)
        self._remote.timeline.forget()  # waits between two steps

    def _ping_workers(self) -> None:
        """Nothing runs: the workers must answer."""
        for worker in self._remote.present:
            worker.ping()
