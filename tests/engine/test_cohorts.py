"""Cohorts: rounds of several sets of requests in flight at once change nothing but the order of work."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from smc.engine.config import EngineConfig
from smc.engine.local import local_engine
from smc.engine.request import FinishReason
from tests.engine.harness import FORMS, answers, assert_empty, config_id, request, running, step_through
from tests.engine.pairs import tiny_pair
from tests.engine.test_kv_follows import mixed_requests


@pytest.mark.parametrize("config", FORMS, ids=config_id)
def test_answers_do_not_depend_on_cohorts(config):
    requests = mixed_requests(40, random.Random(3))
    together, apart, more = (answers(local_engine(tiny_pair(), replace(config, cohorts=n)), requests) for n in (1, 2, 3))
    for request_id, one in together.items():
        assert one.tokens == apart[request_id].tokens == more[request_id].tokens
        assert one.statistics.log_z == pytest.approx(apart[request_id].statistics.log_z, abs=1e-4)


@pytest.mark.parametrize("config", FORMS, ids=config_id)
def test_rounds_of_two_cohorts_are_in_flight_together(config):
    """And one that is alone is run to its end, so that nothing waits for a step that brings nothing."""
    engine = local_engine(tiny_pair(), replace(config, cohorts=2))
    for i in range(2):
        engine.submit(request(request_id=str(i), particles=2, seed=i, max_tokens=30, ignore_eos=True))
    engine.step()
    assert [group.in_flight for group in running(engine)] == [True, True]
    assert engine.abort("0")
    step_through(engine, lambda _: None)
    engine.submit(request(request_id="alone", particles=2, seed=0, max_tokens=30, ignore_eos=True))
    engine.step()
    assert [group.in_flight for group in running(engine)] == [False]


@pytest.mark.parametrize("config", FORMS, ids=config_id)
@pytest.mark.parametrize("steps", range(1, 7))
def test_cancel_in_flight(config, steps):
    """The slots of a request that is cancelled in the middle of a round come free when the round ends; the other one never notices."""
    engine = local_engine(tiny_pair(), replace(config, cohorts=2))
    stays = request(request_id="stays", particles=3, seed=2, max_tokens=20, ignore_eos=True)
    expected = answers(local_engine(tiny_pair(), config), [stays])["stays"].tokens
    engine.submit(request([0, 1] * 4, "gone", particles=4, seed=1, max_tokens=40, ignore_eos=True))
    engine.submit(stays)
    outputs = [o for _ in range(steps) for o in engine.step()]
    assert engine.abort("gone") and not engine.abort("gone")
    for _ in range(3):
        outputs += engine.step()
    assert all(group.id != "gone" for group in running(engine)), "three steps end any round"
    outputs += step_through(engine, lambda _: None)
    final = {o.request_id: o.answer for o in outputs if o.answer}
    assert final["gone"].finish_reason is FinishReason.CANCELLED
    assert final["stays"].tokens == expected
    assert_empty(engine)


def test_time_budget_in_flight():
    clock = iter(range(1000))
    engine = local_engine(tiny_pair(), EngineConfig(block=3, cohorts=2), clock=lambda: float(next(clock)))
    engine.submit(request(request_id="slow", particles=4, seed=1, max_tokens=40, ignore_eos=True, time_budget=6.0))
    engine.submit(request(request_id="free", particles=4, seed=2, max_tokens=40, ignore_eos=True))
    final = {o.request_id: o.answer for o in step_through(engine, lambda _: None) if o.answer}
    assert final["slow"].finish_reason is FinishReason.TIME_BUDGET and 0 < len(final["slow"].tokens) < 40
    assert final["free"].finish_reason is FinishReason.LENGTH
    assert_empty(engine)
