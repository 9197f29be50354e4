"""Micro-batches: rounds of several sets of requests in flight at once change only the order of work."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from smc.api.engine_config import EngineConfig
from smc.api.request import FinishReason
from smc.local_engine import local_engine
from tests.scheduler.harness import (
    CASES,
    LOCKSTEP_FIRST,
    LOOKAHEAD_FIRST,
    PaddingOps,
    answers,
    assert_empty,
    config_id,
    request,
    running,
    step_through,
)
from tests.scheduler.pairs import tiny_pair
from tests.scheduler.test_kv_follows import mixed_requests


@pytest.mark.parametrize("config", LOCKSTEP_FIRST, ids=config_id)
def test_answers_do_not_depend_on_micro_batches(config):
    requests = mixed_requests(9, random.Random(3))
    together, apart = (answers(local_engine(tiny_pair(), replace(config, micro_batches=n)), requests) for n in (1, 3))
    for request_id, one in together.items():
        assert one.tokens == apart[request_id].tokens
        assert one.statistics.log_z == pytest.approx(apart[request_id].statistics.log_z, abs=1e-4)


@pytest.fixture
def ahead(monkeypatch) -> None:
    """Rounds are requested before the last one is read, as where workers run beside the scheduler."""
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: PaddingOps())


@pytest.mark.parametrize("config", LOOKAHEAD_FIRST, ids=config_id)
def test_answers_do_not_depend_on_what_is_asked_for_ahead(config, monkeypatch):
    requests = mixed_requests(6, random.Random(4))
    expected = answers(local_engine(tiny_pair(), config), requests)
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: PaddingOps())
    for micro_batches in (1, 2):
        found = answers(local_engine(tiny_pair(), replace(config, micro_batches=micro_batches)), requests)
        for request_id, one in expected.items():
            assert one.tokens == found[request_id].tokens
            assert one.statistics.rounds == found[request_id].statistics.rounds


@pytest.mark.parametrize("config", CASES, ids=config_id)
def test_two_micro_batches_are_in_flight_together(config, ahead):
    """The next rounds of both micro-batches are requested before either's last round is read."""
    engine = local_engine(tiny_pair(), replace(config, micro_batches=2))
    for i in range(2):
        engine.submit(request(request_id=str(i), particles=2, seed=i, max_tokens=30, ignore_eos=True))
    for _ in range(2):  # the prompts, and a round
        engine.step()
    assert [(group.launched, group.rounds) for group in running(engine)] == [(1, 0), (1, 0)]
    engine.step()
    assert [(group.launched, group.rounds) for group in running(engine)] == [(2, 1), (2, 1)]


@pytest.mark.parametrize("config", LOCKSTEP_FIRST, ids=config_id)
def test_cancel_in_flight(config, ahead):
    """A request that is cancelled while one of its rounds is in flight releases its slots to another request at once;
    neither affects a third request."""
    gone = request([0, 1] * 4, "gone", particles=4, seed=1, max_tokens=40, ignore_eos=True)
    stays = request(request_id="stays", particles=3, seed=2, max_tokens=20, ignore_eos=True)
    comes = request([2, 1], request_id="comes", particles=4, seed=3, max_tokens=20, ignore_eos=True)
    expected = {
        r.request_id: answers(local_engine(tiny_pair(), config), [r])[r.request_id].tokens for r in (stays, comes)
    }
    for steps in (1, 3):
        engine = local_engine(tiny_pair(), replace(config, micro_batches=2, max_slots=7))
        for one in (gone, stays, comes):
            engine.submit(one)
        outputs = [o for _ in range(steps) for o in engine.step()]
        assert engine.abort("gone") and not engine.abort("gone")
        outputs += step_through(engine, lambda _: None)
        final = {o.request_id: o.answer for o in outputs if o.answer}
        assert final["gone"].finish_reason is FinishReason.CANCELLED
        assert {name: final[name].tokens for name in expected} == expected
        assert_empty(engine)


def test_time_budget_in_flight(ahead):
    """The answer holds what three rounds have given, without the fourth, which is in flight."""
    now = [0.0]
    engine = local_engine(tiny_pair(), EngineConfig(block=3, micro_batches=2), clock=lambda: now[0])
    engine.submit(request(request_id="slow", particles=4, seed=1, max_tokens=40, ignore_eos=True, time_budget=1.0))
    engine.submit(request(request_id="free", particles=4, seed=2, max_tokens=40, ignore_eos=True))
    while not running(engine) or running(engine)[0].rounds < 3:
        engine.step()
    assert [(group.launched, group.rounds) for group in running(engine)] == [(4, 3), (4, 3)]
    now[0] = 1.0
    final = {o.request_id: o.answer for o in engine.step() if o.answer}
    assert final.keys() == {"slow"} and final["slow"].finish_reason is FinishReason.TIME_BUDGET
    assert (len(final["slow"].tokens), final["slow"].statistics.rounds) == (8, 3)
    final |= {o.request_id: o.answer for o in step_through(engine, lambda _: None) if o.answer}
    assert final["free"].finish_reason is FinishReason.LENGTH
    assert_empty(engine)
