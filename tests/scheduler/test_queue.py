"""The bounded queue: a refused request changes nothing, and a request that can start at once does not count as
waiting."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from smc.api.engine_config import EngineConfig
from smc.local_engine import local_engine
from smc.scheduler.admission import DuplicateRequest, QueueFull
from smc.scheduler.detokenizer import StopRules
from smc.scheduler.methods import rules_of
from smc.scheduler.queue import RequestQueue
from smc.scheduler.sequence_group import SequenceGroup
from smc.scheduler.slots import Checkpoint
from tests.scheduler.harness import answers, assert_empty, request, step_through
from tests.scheduler.pairs import tiny_pair


def four(name: str):
    return request(request_id=name, particles=4, seed=1, max_tokens=5)


def test_requests():
    engine = local_engine(tiny_pair(), EngineConfig(block=2, max_slots=4, max_queue=2))
    for name in "abc":  # one starts, two wait
        engine.submit(four(name))
    before = (engine.num_queued, engine.slots.num_free, dict(engine.memory.expected))
    with pytest.raises(QueueFull, match="2 requests are waiting; allowed: 2"):
        engine.submit(four("d"))
    assert before == (engine.num_queued, engine.slots.num_free, engine.memory.expected) and before[:2] == (2, 0)
    assert engine.abort("b")
    engine.submit(four("d"))
    done = [o.answer.request_id for o in step_through(engine, lambda _: None) if o.answer and o.answer.tokens]
    assert done == ["a", "c", "d"]
    assert_empty(engine)


def test_pages():
    """A request larger than the limit may wait if no other request waits: otherwise it could never be served."""
    config = EngineConfig(block=2, max_slots=4)
    asked = four("a")
    need = sum(
        rules_of(asked.params).expected_pages(config, asked.params, len(asked.prompt), rows=4, answer=5, own=5).values()
    )
    engine = local_engine(tiny_pair(), EngineConfig(block=2, max_slots=4, max_queue_pages=2 * need - 1))
    engine.submit(four("a"))
    engine.submit(four("b"))
    with pytest.raises(QueueFull, match=f"waiting requests would need {2 * need} KV pages; allowed: {2 * need - 1}"):
        engine.submit(four("c"))
    assert len([o for o in step_through(engine, lambda _: None) if o.answer]) == 2
    assert set(
        answers(local_engine(tiny_pair(), EngineConfig(block=2, max_slots=4, max_queue_pages=1)), map(four, "ab"))
    ) == {"a", "b"}


def test_an_id_in_use():
    engine = local_engine(tiny_pair(), EngineConfig(block=2))
    engine.submit(four("a"))
    with pytest.raises(DuplicateRequest, match="'a' is already in use"):
        engine.submit(four("a"))


@pytest.mark.parametrize("field", ["max_queue", "max_queue_pages", "micro_batches"])
def test_limits_are_checked(field):
    with pytest.raises(ValueError, match=f"{field}=0; allowed"):
        EngineConfig(**{field: 0})


def test_step_time_does_not_depend_on_queue_length():
    """Apart from its rounds, a step with 10,000 waiting requests takes as long as one with none. Visiting each request
    once would take 400 microseconds; a busy machine adds tens."""
    engine = local_engine(tiny_pair(), EngineConfig(block=2, max_slots=4))
    engine.submit(request(request_id="runs", particles=4, seed=1, max_tokens=60, ignore_eos=True))
    engine.step()
    for rounds in engine.registry.rounds.values():
        rounds.launch = lambda provide: []

    def fastest() -> float:
        times = []
        for _ in range(50):
            begin = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - begin)
        return min(times)

    alone = fastest()
    waits = request(particles=4, seed=1, max_tokens=5, time_budget=1e6)
    for number in range(10_000):
        engine.submit(replace(waits, request_id=str(number)))
    assert fastest() - alone < 200e-6
    assert engine.num_queued == 10_000 and engine.num_running == 1


def test_queue_order():
    """Preempted requests first, the others in order of submission. Removing a request keeps the order of the rest."""
    queue = RequestQueue()
    rules = StopRules(four("x").params, tiny_pair().tokenizer)
    groups = [
        SequenceGroup(four(str(n)), seed=1, stop_rules=rules, submitted=0.0, number=n, expected={"draft": n})
        for n in range(6)
    ]
    for n in (3, 0, 5, 1, 4, 2):
        groups[n].checkpoint = Checkpoint({}) if n in (2, 4) else None
        queue.push(groups[n])
    assert len(queue) == 6 and queue.pages == 15
    queue.remove(groups[1])
    turns = []
    while queue.first is not None:
        turns.append(queue.first.number)
        queue.remove(queue.first)
    assert turns == [2, 4, 0, 3, 5] and queue.pages == 0 == len(queue)


def test_lower_priorities_are_admitted_first():
    """Requests of one priority in order of submission; preempted requests before all others."""
    engine = local_engine(tiny_pair(), EngineConfig(block=2, max_slots=4))
    running = request(request_id="first", particles=4, seed=1, max_tokens=6, ignore_eos=True)
    engine.submit(running)
    engine.step()
    for name, priority in {"a": 0, "b": 5, "c": -3, "d": 0, "e": -3, "f": 5}.items():
        engine.submit(replace(running, request_id=name, priority=priority))
    ended = [output.answer.request_id for _ in range(200) for output in engine.step() if output.answer]
    assert ended == ["first", "c", "e", "a", "d", "b", "f"]
    assert_empty(engine)
    queue, rules = RequestQueue(), StopRules(running.params, tiny_pair().tokenizer)
    groups = [
        SequenceGroup(replace(running, priority=p), seed=1, stop_rules=rules, submitted=0.0, number=n, expected={})
        for n, p in enumerate((7, -1, 3))
    ]
    groups[0].checkpoint = Checkpoint({})
    for group in groups:
        queue.push(group)
    assert [group.number for group in queue.groups] == [0, 1, 2]
    queue.remove(groups[1])
    assert queue.first is groups[0]


def test_deadlines_are_those_of_budgets():
    """Each request ends when its own time budget is used up; one that has ended before is ignored."""
    now = [0.0]
    engine = local_engine(tiny_pair(), EngineConfig(block=2, max_slots=4), clock=lambda: now[0])
    budgets = {"a": None, "b": 9.0, "c": 4.0, "d": 4.0, "e": None, "f": 2.0}
    for name, budget in budgets.items():
        engine.submit(request(request_id=name, particles=4, seed=1, max_tokens=60, ignore_eos=True, time_budget=budget))
    assert engine.abort("f")
    ended = {}
    for now[0] in (1.0, 3.9, 4.0, 8.0, 9.0):
        answers = [output.answer for output in engine.step() if output.answer]
        ended[now[0]] = [(answer.request_id, answer.finish_reason.value) for answer in answers]
    assert ended == {
        1.0: [("f", "cancelled")],
        3.9: [],
        4.0: [("c", "queue_time"), ("d", "queue_time")],
        8.0: [],
        9.0: [("b", "queue_time")],
    }
    for name in "ae":
        engine.abort(name)
    engine.step()
    assert_empty(engine)
