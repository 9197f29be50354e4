"""Random histories of many requests in pools too small for all: no request is lost, no page leaks, and no answer
changes."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from smc.api.engine_config import EngineConfig
from tests.scheduler.harness import assert_empty
from tests.scheduler.random_histories import (
    answers_with_plenty_of_memory,
    assert_same,
    live,
    random_requests,
    small_engine,
)

CONFIGS = [
    EngineConfig(form="lockstep", block=2, micro_batches=2, max_slots=60, pages=440, prefill_chunk=24, max_queue=6),
    EngineConfig(
        form="lookahead", block=3, branches=3, micro_batches=2, max_slots=60, pages=440, prefill_chunk=24, max_queue=6
    ),
]
EVENTS = (
    *("queue full", "cached", "preempted", "taken up again", "shrunk", "made smaller", "grown"),
    *("cancelled", "time_budget", "queue_time", "eos", "length", "stop_string"),
)


@pytest.mark.parametrize(
    ("config", "ahead", "seed", "count"),
    [
        pytest.param(CONFIGS[0], True, 1, 50, marks=pytest.mark.slow),
        pytest.param(CONFIGS[1], True, 1, 50, marks=pytest.mark.slow),
    ],
)
def test_random_lives(config, ahead, seed, count, monkeypatch):
    """Every kind of event happens at least once; undisturbed requests answer as with plenty of memory. Which events a
    seed brings depends on the rounding of the processor, so further seeds follow until all have occurred."""
    seen, missing = Counter(), list(EVENTS)
    for turn in range(5):
        compared, events = check_lives(config, ahead, seed + 100 * turn, count, monkeypatch)
        assert compared > 0.35 * count
        seen += events
        missing = [event for event in EVENTS if not seen[event]]
        if not missing:
            break
    assert not missing, f"never happened: {missing}, of {seen}"


def check_lives(
    config: EngineConfig, ahead: bool, seed: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, Counter]:
    """Returns the number of answers compared, and the events that happened."""
    rng, clock = random.Random(seed), iter(range(1 << 30))
    requests = random_requests(count, rng, budgets=15 / count, stretch=6)
    engine = small_engine(config, monkeypatch, ahead=ahead, clock=lambda: float(next(clock)))
    lives = live(
        engine, requests, rng, submit=0.9, cancel=0.04, resize=0.5, after_step=lambda engine: engine.memory.check()
    )
    assert_empty(engine)
    assert not any(engine.memory.leaked().values()) and not engine.prefill.stops.used
    untouched = [request for request in requests if lives.untouched(request.request_id)]
    expected = answers_with_plenty_of_memory(config, untouched)
    for request in untouched:
        assert_same(lives.final[request.request_id], expected[request.request_id])
    return len(untouched), lives.events
