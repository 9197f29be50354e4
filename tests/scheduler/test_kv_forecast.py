"""The forecast of the pages that requests will hold: learnt from what running requests hold, with accounts that
balance."""

from __future__ import annotations

import random

import pytest

from smc.api.engine_config import EngineConfig
from smc.local_engine import local_engine
from smc.scheduler.capacity import COUNT_EVERY, OWN_TOKENS
from smc.scheduler.engine import Engine
from tests.scheduler.harness import assert_empty, request, running
from tests.scheduler.pairs import tiny_pair
from tests.scheduler.random_histories import (
    answers_with_plenty_of_memory,
    assert_same,
    live,
    pair,
    random_requests,
    small_engine,
)

PROMPT, PARTICLES, ANSWER, COUNT = (0, 1, 2, 1) * 5, 6, 160, 16
WHOLE = len(PROMPT) + PARTICLES * ANSWER
"""Pages of a complete answer whose particles share nothing."""
FORMS = [EngineConfig(form="lockstep", block=4), EngineConfig(block=4, branches=2)]
LONG = [FORMS[0], pytest.param(FORMS[1], marks=pytest.mark.slow)]


def engine_for(config: EngineConfig, pages: int) -> Engine:
    small = EngineConfig(**{**vars(config), "max_slots": COUNT * PARTICLES, "pages": pages, "prefill_chunk": 100})
    return local_engine(tiny_pair(max_context=len(PROMPT) + ANSWER), small)


def asked(ess_threshold: float) -> list:
    law = {"particles": PARTICLES, "max_tokens": ANSWER, "ignore_eos": True, "ess_threshold": ess_threshold}
    return [request(PROMPT, str(i), seed=i, **law) for i in range(COUNT)]


@pytest.mark.parametrize("config", LONG, ids=lambda c: c.form)
def test_particles_that_share_nothing(config):
    """Each queued request will hold a fifth of the pool. Too many start at first; once the forecast has learnt this,
    only as many run as have room until their ends, and preemptions stop."""
    engine, preempted, at_once = engine_for(config, round(5.4 * WHOLE)), [], []
    for one in asked(ess_threshold=0.0)[:12]:
        engine.submit(one)
    while not engine.idle:
        engine.step()
        preempted.append(engine.take_stats().preemptions)
        at_once.append(len(running(engine)))
    assert_empty(engine)
    assert engine.forecast.own_share > 0.95
    half = len(at_once) // 2
    assert max(at_once[:half]) * WHOLE > engine.memory.capacity["draft"] >= max(at_once[half:]) * WHOLE
    assert max(at_once[half:]) >= 4, "room is left unused"
    assert sum(preempted[half:]) <= 1 <= sum(preempted), (sum(preempted[:half]), sum(preempted[half:]))


@pytest.mark.slow
def test_particles_that_share_nearly_all():
    """The forecast learns nothing that would delay requests: as many run at once as before, without preemptions."""
    engine, preempted, at_once = engine_for(FORMS[0], round(5.4 * WHOLE)), 0, []
    for one in asked(ess_threshold=1.0):
        engine.submit(one)
    while not engine.idle:
        engine.step()
        preempted += engine.take_stats().preemptions
        at_once.append(len(running(engine)))
    assert_empty(engine)
    assert engine.forecast.own_share < 0.1 and preempted == 0
    assert max(at_once[len(at_once) // 2 :]) >= 8


@pytest.mark.slow
def test_grown_pages_are_those_of_running_particles(monkeypatch):
    """The running sum of grown pages equals a count over all particles, whatever has happened to requests; the accounts
    are zero at the end."""
    small = EngineConfig(**{**vars(FORMS[1]), "max_slots": 60, "pages": 440, "prefill_chunk": 24})
    engine, seen = small_engine(small, monkeypatch, ahead=True, follows=True), []

    def count(engine: Engine) -> None:
        for side, allocator in engine.memory.allocators.items():
            pages = set()
            for group in running(engine):
                for slot in group.slots[: group.count] if side in group.rules.roles else ():
                    held = int(engine.slots.held_S[side][slot])
                    pages.update(
                        allocator.path(int(engine.slots.head_S[side][slot]), held)[group.prompt_size :].tolist()
                    )
            assert allocator.num_grown == len(pages)
            seen.append(len(pages))
        assert bool(engine.registry.admitted) == any(engine.memory.expected.values())

    requests = random_requests(24, random.Random(3), longest=30)
    lives = live(
        engine, requests, random.Random(4), submit=0.9, cancel=0.04, resize=0.3, interrupt=0.05, after_step=count
    )
    assert (
        max(seen) > 100 and lives.resized and all(lives.events[event] for event in ("preempted", "cached", "cancelled"))
    )
    assert_empty(engine)
    assert not any(engine.memory.next_round.values()) and not any(
        allocator.num_grown for allocator in engine.memory.allocators.values()
    )


def test_what_is_expected_follows_what_is_held():
    """A request is first expected to share all but its last tokens. As it runs without sharing, its own forecast is
    corrected; its end releases it."""
    engine = engine_for(FORMS[0], 4 * WHOLE)
    engine.submit(asked(ess_threshold=0.0)[0])
    before = engine.memory.expected["draft"]
    assert len(PROMPT) + ANSWER + (PARTICLES - 1) * OWN_TOKENS <= before < WHOLE
    for _ in range(2 * COUNT_EVERY):
        engine.step()
    # A request never holds more than a whole answer and two rounds.
    assert before < WHOLE <= engine.memory.expected["draft"]
    engine.abort("0")
    engine.step()
    assert_empty(engine)


@pytest.mark.slow
def test_an_answer_does_not_depend_on_what_has_been_learnt():
    """The same requests as the first and the last ones of an engine."""
    config = EngineConfig(form="lockstep", block=4, max_slots=60, pages=900)
    engine = local_engine(pair(), config)
    law = {"particles": 4, "max_tokens": 100, "ignore_eos": True, "ess_threshold": 0.0}
    requests = [request((0, 1, 2), str(i), seed=i % 2, **law) for i in range(4)]
    found = {output.request_id: output.answer for output in engine.run(requests) if output.answer}
    assert engine.forecast.own_share > 0.9
    expected = answers_with_plenty_of_memory(config, requests[:2])
    for name, answer in found.items():
        assert_same(answer, expected[str(int(name) % 2)])
