"""Warm-up requests of rare kinds cover every kind of round, and leave nothing behind in the engine."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from itertools import product

import pytest

from smc.api.engine_config import EngineConfig
from smc.calibration.warm_up import REPEATS, first_request, rare_requests, warm_up
from smc.distributions import Processors
from smc.local_engine import ModelPair, local_engine
from smc.model.presets import NoText
from smc.round.plan import RoundPlan
from smc.scheduler.decode import MEMORY
from smc.scheduler.engine import Engine
from smc.scheduler.methods import RULES_OF_ROUNDS
from smc.scheduler.planner import COMMON
from smc.scheduler.speculation import Acceptance
from smc.types import OF_BOTH_MODELS, Decoding
from tests.kernels.sizes import possible
from tests.model.tiny import random_decoder, tiny_config
from tests.scheduler.harness import answers, assert_empty, request
from tests.scheduler.pairs import tiny_pair

pytestmark = pytest.mark.xdist_group("warm-up")
CONFIG = EngineConfig(block=3, max_slots=16)


def traits(plan: RoundPlan) -> tuple:
    """The properties of a plan, apart from sizes, that decide which kernels run."""
    guided = plan.target_unconditional is not None
    return plan.kind.roles, tuple(sorted(plan.kind.decodings)), plan.kind.biased, guided


def rows_of(plan: RoundPlan) -> int:
    """Rows of the target's pass, padding included."""
    unconditional = plan.target_unconditional
    return len(plan.arrays.slot_A) + (0 if unconditional is None else len(unconditional.index_U))


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    shape = tiny_config(vocab_size=64, num_layers=1, max_context=128, tied_embeddings=False)
    target, draft = (random_decoder(shape, seed) for seed in (1, 2))
    return ModelPair(target, draft, NoText(64), shape.max_context)


@pytest.fixture(scope="module")
def warmed_up(pair) -> tuple[Engine, dict[str, list[RoundPlan]]]:
    """An engine after the warm-up requests of rare kinds, and the rounds of each list of them."""
    engine, asked, seen = local_engine(pair, CONFIG), [], {}
    run = engine.executor.round
    engine.executor.round = lambda plan: (asked.append(plan), run(plan))[1]
    for requests in rare_requests(CONFIG, engine.context, engine.tokenizer.size):
        before = len(asked)
        warm_up(engine, (), [requests])
        seen[requests[0].request_id] = asked[before:]
    engine.executor.round = run
    assert_empty(engine)
    return engine, seen


@pytest.mark.slow
def test_every_rarer_kind_has_its_rounds(warmed_up):
    _, seen = warmed_up
    for name, plans in seen.items():
        keys = [plan.kind for plan in plans]
        # The last round may stand alone, since the requests of a list end after different numbers of rounds.
        assert len(keys) > REPEATS and all(keys.count(key) >= REPEATS for key in keys[:-1]), name
    asked = [plan for plans in seen.values() for plan in plans]
    found = {traits(plan) for plan in asked}
    assert {roles for roles, *_ in found} == set(RULES_OF_ROUNDS)
    assert {kinds for _, kinds, *_ in found} >= {
        *((kind,) for kind in Decoding),
        tuple(sorted(COMMON)),
        tuple(sorted(OF_BOTH_MODELS)),
    }
    # Rounds that mix all kinds: with and without top-k and biases, for which the kernels over logits differ.
    every = [
        plan.kind
        for plan in asked
        if plan.kind.decodings == OF_BOTH_MODELS and plan.kind.target_processors & Processors.ALPHA
    ]
    assert {(bool(kind.target_processors & Processors.TOP_K), kind.biased > 0) for kind in every} == set(
        product((False, True), repeat=2)
    )
    guided = {kinds for _, kinds, _, is_guided in found if is_guided}
    assert guided >= {(decoding,) for decoding in Decoding if decoding is not Decoding.DRAFT}
    # Rounds of both models, and of the target alone, reach the maximum number of rows.
    rows = {
        decoding: max(rows_of(plan) for plan in asked if plan.kind.roles == decoding.roles)
        for decoding in (Decoding.WALK, Decoding.TARGET)
    }
    assert set(rows.values()) == {max(possible(CONFIG.max_slots))}


@pytest.mark.parametrize(
    "limits", [{"max_slots": 1, "max_chains": 0}, {"max_slots": 2, "max_queue": 1}], ids=["no chains", "short queue"]
)
def test_what_an_engine_refuses_is_left_out(limits, caplog):
    """A request that finds the queue full is not left out: it is submitted later."""
    config = EngineConfig(block=2, **limits)
    engine = local_engine(tiny_pair(), config)
    with caplog.at_level(logging.INFO):
        rare = list(rare_requests(config, engine.context, engine.tokenizer.size))
        shares: list[float] = []
        warm_up(engine, (), [requests for requests in rare if len(requests) > 1][:1] + rare[:2], shares.append)
    assert shares == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert ("left out of the warm-up" in caplog.text) == ("max_chains" in limits) and "are waiting" not in caplog.text
    assert_empty(engine)


@pytest.mark.slow
def test_answers_are_what_they_would_have_been(pair, warmed_up):
    engine, _ = warmed_up
    asked = [request([0, 1], str(i), particles=n, seed=i, max_tokens=12) for i, n in enumerate((3, 8))]
    expected = answers(local_engine(pair, CONFIG), asked)
    found = engine.rounds_of(Decoding.WALK).acceptance.rates(engine.config.lookahead)
    assert found == Acceptance(MEMORY).rates(engine.config.lookahead), "what nobody asked for decides about users"
    found = answers(engine, asked)
    assert {name: one.tokens for name, one in found.items()} == {name: one.tokens for name, one in expected.items()}


@pytest.mark.parametrize("context", [2, 3, 5])
@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(form="lockstep", block=1, max_slots=1),
        EngineConfig(form="lockstep", block=32, max_slots=8),
        EngineConfig(block=8, max_slots=64),
        EngineConfig(block=32, branches=32, max_slots=2),
    ],
    ids=lambda config: f"{config.form}-{config.block}-{config.branches}",
)
def test_whatever_context_and_pages_are_accepted_an_engine_can_begin(config, context):
    """With the default number of pages, and with the least."""
    config = replace(config, max_context=context)
    with pytest.raises(ValueError, match="pages=2; allowed: at least") as refused:
        replace(config, pages=2).check_pages(context)
    least = int(re.findall("at least ([0-9]+)", str(refused.value))[0])
    replace(config, pages=least).check_pages(context)
    for pages in (None, least):
        engine = local_engine(tiny_pair(max_context=64), replace(config, pages=pages))
        first = first_request(engine.config, engine.context, 3)
        (answer,) = answers(engine, [first]).values()
        assert not answer.error and len(answer.tokens) == first.params.max_tokens
        assert len(first.prompt) + len(answer.tokens) <= context
        assert_empty(engine)
