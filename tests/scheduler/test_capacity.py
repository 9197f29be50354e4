"""Admission counts the memory that requests hold, not the most that they might need."""

from __future__ import annotations

import pytest

from smc.api.engine_config import EngineConfig
from smc.local_engine import local_engine
from tests.scheduler.harness import answers, assert_empty, request, running
from tests.scheduler.pairs import tiny_pair
from tests.scheduler.random_histories import assert_same

PROMPT, ANSWER = (0, 1, 2, 1) * 5, 192
ADMITTED_BEFORE = 1
"""Number of requests that would run at once if the most that a request can need were reserved for it."""


@pytest.mark.slow
def test_four_times_as_many_as_if_all_were_set_aside():
    """After some rounds particles descend from few ancestors, and their common past is held once. So four times as many
    requests fit as with reservation of the maximum, with the same answers and without preemption."""
    config, particles = EngineConfig(form="lockstep", block=8), 16
    most = len(PROMPT) + particles * (ANSWER + config.branches * config.block)
    made = tiny_pair(max_context=216)
    asked = [
        request(PROMPT, str(i), particles=particles, seed=i, max_tokens=ANSWER, ignore_eos=True, ess_threshold=0.9)
        for i in range(4 * ADMITTED_BEFORE)
    ]
    small = EngineConfig(
        **{**vars(config), "max_slots": 4 * ADMITTED_BEFORE * particles, "pages": ADMITTED_BEFORE * most + most - 1}
    )
    engine, at_once, found = local_engine(made, small), 0, {}
    for one in asked:
        engine.submit(one)
    while not engine.idle:
        found |= {output.request_id: output.answer for output in engine.step() if output.answer}
        at_once = max(at_once, len(running(engine)))
    assert_empty(engine)
    assert at_once >= 4 * ADMITTED_BEFORE
    expected = answers(
        local_engine(made, EngineConfig(**{**vars(config), "max_slots": 32, "prefix_cache": False})), asked[::4]
    )
    for name, answer in expected.items():
        assert_same(found[name], answer)
    assert sum(answer.statistics.preemptions for answer in found.values()) == 0
