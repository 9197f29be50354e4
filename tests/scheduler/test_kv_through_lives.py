"""KV is what the particles' own tokens would give, whatever a request has been through."""

from __future__ import annotations

import random

import pytest

from smc.api.engine_config import EngineConfig
from smc.types import ModelRole
from tests.scheduler.harness import TokenLedger, assert_empty, check_kv, config_id
from tests.scheduler.lives import live, random_requests, small_engine

SMALL = {"max_slots": 60, "pages": 440, "prefill_chunk": 24}
LOCKSTEP = EngineConfig(form="lockstep", block=3, **SMALL)
EVENTS = ("cached", "preempted", "made smaller", "grown", "cancelled")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "ahead"),
    [(LOCKSTEP, True)],
    ids=lambda value: config_id(value) if isinstance(value, EngineConfig) else str(value),
)
def test_slots_hold_the_tokens_of_their_particles(config, ahead, monkeypatch):
    """After every step: cache hits, starting over, shrinking, growing and cancelled neighbours, both methods of plain
    decoding too. tests/scheduler/test_guidance.py looks at the same of guided requests in `make test`."""
    rng = random.Random(3)
    engine = small_engine(config, monkeypatch, ahead=ahead)
    written, seen = {side: TokenLedger(engine, side) for side in ModelRole}, []
    lives = live(
        engine,
        random_requests(28, rng),
        rng,
        submit=0.9,
        cancel=0.04,
        resize=0.7,
        after_step=lambda engine: seen.append(check_kv(engine, written)),
    )
    assert_empty(engine)
    assert sum(seen) > 450
    assert not [event for event in EVENTS if not lives.events[event]], lives.events
    assert bool(lives.events["pipelined"]) == ahead
