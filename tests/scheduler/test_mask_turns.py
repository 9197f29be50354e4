"""Requests whose masks take long take turns: at most one of them is in a round. Answers do not depend on that."""

from __future__ import annotations

import math

import numpy as np
import pytest

from smc import demo
from smc.api.constraint import Constraint
from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.local_engine import ModelPair, local_engine
from smc.scheduler import mask_turns
from tests.pairwise import one_of
from tests.scheduler.test_constraint_failures import FORMS, METHODS, run


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return ModelPair.load(demo.TARGET, demo.DRAFT)


def answers(pair: ModelPair, config: EngineConfig) -> tuple[dict[str, tuple[int, ...]], int]:
    """Return the tokens of constrained requests of every method, and the maximum number of constrained requests that a
    round has."""
    engine, most = local_engine(pair, config), 0
    launch = engine.executor.round

    def counted(plan):
        nonlocal most
        if plan.constraints is not None:
            most = max(most, len(np.unique(plan.arrays.group_A[np.flatnonzero(plan.constraints.entry_A)])))
        return launch(plan)

    for rounds in engine.registry.rounds.values():
        rounds.executor.round = counted
    prompt = tuple(pair.tokenizer.chat([{"role": "user", "content": "What is 9 + 30?"}]))
    requests = [
        Request(
            f"{name} {i}",
            prompt,
            SamplingParams(seed=i, max_tokens=9, constraint=Constraint.of({"regex": "[0-9 +=]{1,30}"}), **params),
        )
        for name, params in METHODS.items()
        for i in range(2)
    ]
    found = run(engine, requests)
    assert all(answer.error is None for of_one in found.values() for answer in of_one)
    return {name: answer.tokens for name, (answer,) in found.items()}, most


@pytest.mark.parametrize("config", one_of(*FORMS), ids=lambda config: config.form)
def test_slow_requests_take_turns_and_give_the_same_answers(pair: ModelPair, config: EngineConfig, monkeypatch):
    monkeypatch.setattr(mask_turns, "QUICK_SECONDS", math.inf)
    together, most = answers(pair, config)
    assert most > 2
    for name in ("QUICK_SECONDS", "QUICK_SECONDS_EACH"):
        monkeypatch.setattr(mask_turns, name, 0.0)
    monkeypatch.setattr(mask_turns, "SLOW_SECONDS", -1.0)
    in_turns, most = answers(pair, config)
    assert most == 1
    assert in_turns == together


class Asks:
    def __init__(self, text: str, number: int = 0) -> None:
        self.params, self.number = SamplingParams(constraint=Constraint.of({"regex": text})), number


def test_what_is_known_of_a_constraint():
    """Quick after one quick round, slow for several rounds after a slow one, and unchanged by the times between."""
    turns, one, other = mask_turns.MaskTurns(), Asks("a+"), Asks("b+")

    def allowed() -> list[Asks]:
        turns.begin_step([one, other])
        return [group for group in (one, other) if turns.allows(group)]

    assert allowed() == [one]
    assert allowed() == [other]
    turns.learn([one], 0.0)
    assert allowed() == [one, other]
    turns.learn([one, other], 1.0)  # the one that was not known to be quick is slow
    for _ in range(mask_turns.SLOW_ROUNDS):
        assert allowed() == [one, other]  # the quick one, and the only one whose turn it can be
        turns.learn([one, other], mask_turns.QUICK_SECONDS + 0.08)
        turns.learn([one, other], 0.0)
    turns.learn([one, other], 1.0)
    assert len(allowed()) == 1


def test_requests_with_one_constraint_become_more():
    """At most twice as many as were quick together. When they are slow, one at a time, and each has its turn."""
    turns, groups = mask_turns.MaskTurns(), [Asks("a+", number) for number in range(8)]

    def allowed() -> list[Asks]:
        turns.begin_step(groups)
        return [group for group in groups if turns.allows(group)]

    for count in (1, 2, 4, 8):
        found = allowed()
        assert len(found) == count
        turns.learn(found, 0.0)
    turns.learn(groups[:1], 0.0)
    assert len(allowed()) == 8
    turns.learn(groups, 1.0)
    seen = []
    for _ in groups:
        (one,) = allowed()
        seen.append(one.number)
    assert sorted(seen) == list(range(8))
