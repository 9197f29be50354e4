"""The bounded queue: a refusal takes nothing, and what can start at once does not count as waiting."""

from __future__ import annotations

import pytest

from smc.engine.admission import DuplicateRequest, QueueFull
from smc.engine.local import local_engine
from smc.engine.methods import METHODS
from smc.runtime.config import EngineConfig
from tests.engine.harness import answers, assert_empty, request, step_through
from tests.engine.pairs import tiny_pair


def four(name: str):
    return request(request_id=name, particles=4, seed=1, max_tokens=5)


def test_requests():
    engine = local_engine(tiny_pair(), EngineConfig(block=2, max_slots=4, max_queue=2))
    for name in "abc":  # one starts, two wait
        engine.submit(four(name))
    before = (engine.num_queued, engine.slots.num_free, dict(engine.memory.expected))
    with pytest.raises(QueueFull, match="2 requests are waiting; allowed: 2"):
        engine.submit(four("d"))
    assert before == (engine.num_queued, engine.slots.num_free, engine.memory.expected) == (2, 0, engine.memory.expected)
    assert engine.abort("b")
    engine.submit(four("d"))
    done = [o.answer.request_id for o in step_through(engine, lambda _: None) if o.answer and o.answer.tokens]
    assert done == ["a", "c", "d"]
    assert_empty(engine)


def test_pages():
    """A request larger than the limit may still wait, if it waits alone: otherwise it could never be served."""
    config = EngineConfig(block=2, max_slots=4)
    asked = four("a")
    need = sum(METHODS[asked.params.method].expected_pages(config, asked.params, len(asked.prompt), share=1.0).values())
    engine = local_engine(tiny_pair(), EngineConfig(block=2, max_slots=4, max_queue_pages=2 * need - 1))
    engine.submit(four("a"))
    engine.submit(four("b"))
    with pytest.raises(QueueFull, match=f"waiting requests would need {2 * need} KV pages; allowed: {2 * need - 1}"):
        engine.submit(four("c"))
    assert len([o for o in step_through(engine, lambda _: None) if o.answer]) == 2
    assert set(answers(local_engine(tiny_pair(), EngineConfig(block=2, max_slots=4, max_queue_pages=1)), map(four, "ab"))) == {"a", "b"}


def test_an_id_in_use():
    engine = local_engine(tiny_pair(), EngineConfig(block=2))
    engine.submit(four("a"))
    with pytest.raises(DuplicateRequest, match="'a' is already in use"):
        engine.submit(four("a"))


@pytest.mark.parametrize("field", ["max_queue", "max_queue_pages", "cohorts"])
def test_limits_are_checked(field):
    with pytest.raises(ValueError, match=f"{field}=0; allowed"):
        EngineConfig(**{field: 0})
