"""Requests that end early: everything is released, and no other request changes."""

from __future__ import annotations

import random

import pytest

from smc.api.request import FinishReason
from smc.local_engine import local_engine
from tests.executor.test_same_answers import assert_same, mixed
from tests.scheduler.harness import (
    LOOKAHEAD_FIRST,
    PaddingOps,
    answers,
    assert_empty,
    config_id,
)
from tests.scheduler.pairs import tiny_pair


@pytest.mark.parametrize("config", LOOKAHEAD_FIRST, ids=config_id)
def test_random_cancels_free_everything_and_disturb_nobody(config, monkeypatch):
    rng = random.Random(11)
    asked = list(mixed(26, random.Random(3)))
    expected = answers(local_engine(tiny_pair(), config), asked)
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: PaddingOps())
    engine, waiting, done = local_engine(tiny_pair(), config), list(asked), {}
    while waiting or not engine.idle:
        if waiting and rng.random() < 0.8:
            engine.submit(waiting.pop(0))
        if (
            active := [r.request_id for r in asked if r not in waiting and r.request_id not in done]
        ) and rng.random() < 0.4:
            engine.abort(rng.choice(active))
        done |= {output.answer.request_id: output.answer for output in engine.step() if output.answer}
    assert_empty(engine)
    reasons = [answer.finish_reason for answer in done.values()]
    assert len(done) == len(asked) and 3 < reasons.count(FinishReason.CANCELLED) < 23
    for request_id, answer in done.items():
        if answer.finish_reason is not FinishReason.CANCELLED:
            assert_same(answer, expected[request_id])
