"""The thread that runs an engine: what it takes in before each step, and what it delivers."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from services.coordinator import service
from services.coordinator.messages import EngineStep, RefusalKind
from services.coordinator.service import EngineLoop
from smc.api.engine_config import EngineConfig
from smc.api.request import FinishReason
from smc.local_engine import local_engine
from smc.scheduler.engine import Engine
from tests.scheduler.harness import assert_empty, request
from tests.scheduler.pairs import tiny_pair

SECONDS = 60.0


def tiny_engine() -> Engine:
    return local_engine(tiny_pair(max_context=64), EngineConfig(form="lockstep", block=2, max_slots=8))


@contextmanager
def loop_of(engine: Engine, idle_period: float = 0.05) -> Iterator[tuple[EngineLoop, queue.SimpleQueue[EngineStep]]]:
    """A loop that has not started yet, and the steps that it delivers."""
    steps: queue.SimpleQueue[EngineStep] = queue.SimpleQueue()
    loop = EngineLoop(engine, steps.put, idle_period=idle_period)
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


def test_a_burst_of_submissions_lets_steps_pass(monkeypatch):
    """A turn submits for a limited time, but at least one. Meanwhile requests that run advance; aborts, of requests
    that wait, too, and other work get through. Each request has one end."""
    monkeypatch.setattr(service, "SUBMIT_SECONDS", 0.0)
    engine, events = tiny_engine(), []
    submit, step = engine.submit, engine.step

    def noted_submit(given) -> None:
        events.append(given.request_id)
        submit(given)

    def noted_step(submit) -> list:
        found = step(submit)
        events.append("step")
        return found

    monkeypatch.setattr(engine, "submit", noted_submit)
    monkeypatch.setattr(engine, "step", noted_step)
    names = [str(i) for i in range(20)]
    with loop_of(engine) as (loop, steps):
        for name in names:
            loop.submit(request(request_id=name, method="target", seed=1, max_tokens=3, ignore_eos=True))
        loop.abort("17")
        done = loop.do(lambda: len(events))
        loop.start()
        ended = {}
        while len(ended) < len(names):
            for output in steps.get(timeout=SECONDS).outputs:
                if output.answer:
                    assert output.request_id not in ended
                    ended[output.request_id] = output.answer
    assert done.result() == 0
    assert [event for event in events if event != "step"] == [name for name in names if name != "17"]
    assert events[:10] == [event for name in names[:5] for event in (name, "step")]
    assert ended["17"].finish_reason is FinishReason.CANCELLED
    assert all(len(answer.tokens) == 3 for name, answer in ended.items() if name != "17")
    assert_empty(engine)


def test_requests_that_wait_for_their_submission_are_queued(monkeypatch):
    """They count as such, and their turn is that of the queue: by priority, then as they came; those whose time has
    passed end at once."""
    monkeypatch.setattr(service, "SUBMIT_SECONDS", 0.0)
    engine, order = tiny_engine(), []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda given: order.append(given.request_id) or submit(given))
    with loop_of(engine) as (loop, steps):
        for number, (priority, budget) in enumerate([(0, None), (5, None), (0, None), (-5, None), (5, 0.01)]):
            own = {"time_budget": budget, "max_tokens": 40, "ignore_eos": True}
            one = request(request_id=str(number), method="target", seed=1, **own)
            loop.submit(replace(one, priority=priority, waited=1.0))
        loop.start()
        found, ended = [], []
        while len(ended) < 5:
            step = steps.get(timeout=SECONDS)
            found.append(step.stats.queued + step.stats.running)
            ended += [output.answer for output in step.outputs if output.answer]
    assert order == ["4", "3", "0", "2", "1"]
    assert found[0] == 4, "one has ended, and four run or wait"
    assert {answer.request_id: answer.finish_reason for answer in ended}["4"] is FinishReason.TIME_BUDGET
    assert_empty(engine)


def test_the_time_for_which_a_submission_waits_is_queue_time(monkeypatch):
    """Two steps of at least 20 ms pass before the third is submitted."""
    monkeypatch.setattr(service, "SUBMIT_SECONDS", 0.0)
    engine, waited = tiny_engine(), []
    submit, step = engine.submit, engine.step
    monkeypatch.setattr(engine, "submit", lambda given: waited.append(given.waited) or submit(given))
    monkeypatch.setattr(engine, "step", lambda submit: step(submit) + (time.sleep(0.02) or []))
    with loop_of(engine) as (loop, steps):
        for i in range(3):
            loop.submit(request(request_id=str(i), method="target", seed=1, max_tokens=1, ignore_eos=True))
        loop.start()
        answers = 0
        while answers < 3:
            answers += sum(output.answer is not None for output in steps.get(timeout=SECONDS).outputs)
    assert waited[0] >= 0 and waited[2] >= 0.04


def test_the_time_for_which_the_loop_has_waited_is_none_of_a_request(monkeypatch):
    engine, waited = tiny_engine(), []
    submit = engine.submit
    monkeypatch.setattr(
        engine, "submit", lambda given: waited.append((given.waited, time.monotonic())) or submit(given)
    )
    with loop_of(engine, idle_period=SECONDS) as (loop, steps):
        loop.start()
        time.sleep(0.2)
        begin = time.monotonic()
        loop.submit(request(method="target", seed=1, max_tokens=1, ignore_eos=True))
        while not any(output.answer for output in steps.get(timeout=SECONDS).outputs):
            pass
    ((seconds, until),) = waited
    assert seconds <= until - begin
