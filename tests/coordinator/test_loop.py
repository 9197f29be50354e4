"""The thread that runs an engine: what it takes in before each step, and what it delivers."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager

from services.coordinator.messages import EngineStep, RefusalKind
from services.coordinator.service import EngineLoop
from smc.api.engine_config import EngineConfig
from smc.local_engine import local_engine
from smc.scheduler.engine import Engine
from tests.scheduler.harness import assert_empty, request
from tests.scheduler.pairs import tiny_pair

SECONDS = 60.0


def tiny_engine() -> Engine:
    return local_engine(tiny_pair(max_context=64), EngineConfig(form="lockstep", block=2, max_slots=8))


@contextmanager
def loop_of(engine: Engine) -> Iterator[tuple[EngineLoop, queue.SimpleQueue[EngineStep]]]:
    """A loop that has not started yet, and the steps that it delivers."""
    steps: queue.SimpleQueue[EngineStep] = queue.SimpleQueue()
    loop = EngineLoop(engine, steps.put, idle_period=0.05)
    try:
        yield loop, steps
    finally:
        loop.stop(SECONDS)
    assert loop.failure is None


def test_a_submission_that_fails_has_one_end(monkeypatch):
    """The refusal, which says why; no answer beside it. Others are not affected."""
    engine = tiny_engine()
    admit, failed = engine._admit, []

    def broken() -> None:
        if not failed:
            failed.append(True)
            raise KeyError("a fault while it is admitted")
        admit()

    monkeypatch.setattr(engine, "_admit", broken)
    with loop_of(engine) as (loop, steps):
        for name in ("fails", "works"):
            loop.submit(request(request_id=name, method="target", seed=1, max_tokens=3, ignore_eos=True))
        loop.start()
        ended, refused = [], []
        while not (ended and refused):
            step = steps.get(timeout=SECONDS)
            ended += [output.request_id for output in step.outputs if output.answer]
            refused += step.refusals
    assert ended == ["works"]
    assert [(refusal.request_id, refusal.kind) for refusal in refused] == [("fails", RefusalKind.FAILED)]
    assert "KeyError: 'a fault while it is admitted'" in refused[0].message
    assert_empty(engine)
