"""Before it serves, a gang whose workers record rounds runs every kind that requests of default settings ask for."""

from __future__ import annotations

import pytest

from services.coordinator.warm_up import TURNS, first_rounds, usual_rounds
from smc import demo
from smc.engine.config import EngineConfig
from smc.engine.engine import Engine
from smc.engine.local import ModelPair, local_engine
from smc.engine.request import Method, Request, SamplingParams


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return ModelPair.load(demo.TARGET, demo.DRAFT)


def recording(pair: ModelPair, config: EngineConfig) -> tuple[Engine, list[tuple]]:
    """An engine that pads rounds as it does for workers that record them, and the key of every round that it asks for."""
    engine, keys = local_engine(pair, config), []
    for method in (Method.SMC, Method.TARGET):
        runner = engine.rounds_of(method).runner
        runner.records, ask = True, runner.round

        def told(plan, ask=ask, method=method):
            keys.append((method, *plan.key))
            return ask(plan)

        runner.round = told
    return engine, keys


@pytest.mark.parametrize("form", [EngineConfig(block=5, max_slots=32), EngineConfig(form="lockstep", block=8, max_slots=16)])
def test_default_requests_meet_no_new_kind_of_round(pair, form):
    engine, keys = recording(pair, form)
    shape = (form, engine.context, engine.tokenizer.size)
    for asked in (first_rounds(*shape), *usual_rounds(*shape, engine.budget.capacity)):
        assert all(output.answer is None or output.answer.error is None for output in engine.run(asked))
    engine.check_books()
    rehearsed = set(keys)
    assert min(keys.count(key) for key in rehearsed if key[3] * key[4] > 2) >= TURNS - 1

    keys.clear()
    for count in (1, 2, 3, form.max_slots // 8):
        requests = [Request(str(i), tuple(range(20 + i)), SamplingParams(max_tokens=40 + 7 * i, seed=i)) for i in range(count)]
        requests += [Request("plain", (1, 2, 3), SamplingParams(method=Method.TARGET, max_tokens=30))] if count == 1 else []
        list(engine.run(requests))
    assert keys and set(keys) <= rehearsed


def test_what_does_not_fit_is_left_out(pair):
    config = EngineConfig(block=5, max_slots=2, pages=90)
    engine = local_engine(pair, config)
    sizes = [len(asked) for asked in usual_rounds(config, engine.context, engine.tokenizer.size, engine.budget.capacity)]
    assert sizes == [1, 1, 2]  # N = 2 once; the target alone once and twice; no context is long
