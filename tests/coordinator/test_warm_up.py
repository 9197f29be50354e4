"""Before it serves, a gang whose workers record rounds runs every kind that requests of usual settings ask for."""

from __future__ import annotations

import pytest

from services.coordinator.warm_up import TURNS, first_rounds, usual_rounds
from services.link import codec
from smc import demo
from smc.engine.config import EngineConfig
from smc.engine.engine import Engine
from smc.engine.local import ModelPair, local_engine
from smc.engine.request import Method, Request, SamplingParams


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return ModelPair.load(demo.TARGET, demo.DRAFT)


def recording(pair: ModelPair, config: EngineConfig) -> tuple[Engine, list[tuple]]:
    """An engine that pads rounds as it does for workers that record them, and the key that every round it asks for has at a rank."""
    engine, keys = local_engine(pair, config), []
    for method in (Method.SMC, Method.TARGET):
        runner = engine.rounds_of(method).runner
        runner.records, ask = True, runner.round

        def told(plan, ask=ask, method=method):
            keys.append((method, *codec.to_plan(codec.round_command(plan, method is Method.TARGET)).key))
            return ask(plan)

        runner.round = told
    return engine, keys


FORMS = [EngineConfig(block=5, max_slots=32), EngineConfig(form="lockstep", block=8, max_slots=16), EngineConfig(block=5, max_slots=24)]


@pytest.mark.parametrize("form", FORMS, ids=["look-ahead", "lockstep", "not a power of two"])
def test_usual_requests_meet_no_new_kind_of_round(pair, form):
    engine, keys = recording(pair, form)
    shape = (form, engine.context, engine.tokenizer.size)
    for asked in (first_rounds(*shape), *usual_rounds(*shape, engine.budget.capacity)):
        assert all(output.answer is None or output.answer.error is None for output in engine.run(asked))
    engine.check_books()
    rehearsed = set(keys)
    assert min(keys.count(key) for key in rehearsed if key[3] * key[4] > 2) >= TURNS

    keys.clear()
    for count in (1, 2, 3, form.max_slots // 8):
        requests = [Request(str(i), tuple(range(20 + i)), SamplingParams(max_tokens=40 + 7 * i, seed=i)) for i in range(count)]
        plain = SamplingParams(method=Method.TARGET, temperature=0, max_tokens=30)
        requests += [Request("plain", (1, 2, 3), plain)] if count == 1 else []
        list(engine.run(requests))
    laws = [{"temperature": 0.7}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3}, {"top_p": 0.5, "min_p": 0.1}, {"top_k": 9, "top_p": 0.5}]
    for law in (*laws, {"top_k": 50, "min_p": 0.05, "draft_temperature": 1.2}):
        list(engine.run([Request("law", (4, 5, 6), SamplingParams(max_tokens=30, **law))]))
    assert keys and set(keys) <= rehearsed


def test_what_does_not_fit_is_left_out(pair):
    config = EngineConfig(block=5, max_slots=2, pages=90)
    engine = local_engine(pair, config)
    sizes = [len(asked) for asked in usual_rounds(config, engine.context, engine.tokenizer.size, engine.budget.capacity)]
    # N = 2 once; the target alone once and twice; no context is long; each kind of truncated law once, and once by the target alone.
    assert sizes == [1, 1, 2, *[1] * 8]


@pytest.mark.parametrize(("context", "longest"), [(512, 4), (645, 626), (2000, 640)])
def test_long_contexts_are_met_where_there_can_be_some(context, longest):
    config = EngineConfig(block=5, max_slots=8)
    asked = list(usual_rounds(config, context, 100, {"draft": 10_000, "target": 10_000}))
    assert max(len(request.prompt) for batch in asked for request in batch) == longest
    assert all(len(request.prompt) + request.params.max_tokens <= context for batch in asked for request in batch)


def test_as_many_as_pages_allow_are_met():
    """Sixty slots and pages for five long prompts: one, two, four, and five, which are padded to eight."""
    config = EngineConfig(block=5, max_slots=60)
    asked = usual_rounds(config, 2000, 100, {"draft": 10_000, "target": 5 * (640 + 19 + 5)})
    assert [len(batch) for batch in asked if len(batch[0].prompt) > 4 and batch[0].params.method is Method.TARGET] == [1, 2, 4, 5]
