"""Drafting again after a miss (`smc.executor.redraft`): rounds confirm more tokens, answers and other requests of
the round stay the same, and pages hold what they should."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.local_engine import fitted_config, local_engine
from tests.pairwise import one_of
from tests.scheduler.harness import PaddingOps, answers, assert_pages_follow, request
from tests.scheduler.pairs import tiny_pair

NEVER = EngineConfig(block=4, branches=4, max_slots=80, drafting="always", redrafting="never")
ALWAYS = replace(NEVER, redrafting="always")
BESIDE = [
    {},
    {"population": "distinct"},
    {"method": "exact", "verification": "rejection"},
]


@pytest.fixture(params=[False, True], ids=["", "padded"])
def padded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether rounds are padded, and the next one is requested before the last one is read, as on a GPU."""
    if request.param:
        monkeypatch.setattr("smc.local_engine.ops_for", lambda device: PaddingOps())
    return request.param


def bad_draft(vocab: int = 8):
    """A pair whose draft knows nothing of its target, which is sure of itself."""
    return tiny_pair(vocab, scale=1.2, draft_seed=7, max_context=128)


def exact(count: int, **options) -> list[Request]:
    shape = {"method": "exact", "max_tokens": 40, "ignore_eos": True, **options}
    return [request([2, 1, 0], f"exact {i}", particles=(1, 4, 6)[i % 3], seed=i, **shape) for i in range(count)]


def plain_of(requests: list[Request]) -> list[Request]:
    params = [replace(one.params, method="target", particles=None, verification=None) for one in requests]
    return [replace(one, params=law) for one, law in zip(requests, params)]


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_rounds_confirm_more_tokens_and_answers_stay(temperature, padded):
    asked = exact(9, temperature=temperature, logprobs=True, max_tokens=24)
    plain = answers(local_engine(bad_draft(), NEVER), plain_of(asked))
    rounds = {}
    for config in (NEVER, ALWAYS):
        found = answers(local_engine(bad_draft(), config), asked)
        rounds[config.redrafting] = sum(one.statistics.rounds for one in found.values())
        for name, one in found.items():
            assert one.tokens == plain[name].tokens
            assert one.logprobs == pytest.approx(plain[name].logprobs, abs=1e-4)
    assert rounds["always"] < 0.95 * rounds["never"], rounds


def test_pages_hold_the_tokens_of_their_particles(padded):
    assert_pages_follow(local_engine(bad_draft(), ALWAYS), exact(7, stop=("ab", "cca")))


@pytest.mark.parametrize("guided", one_of(False, True))
def test_other_requests_of_the_round_answer_as_ever(guided):
    """SMC particles and chains keep their rows. A round with a guided request does not draft again."""
    pair, asked = bad_draft(), exact(6)
    for seed, (number, options) in itertools.product(range(2), enumerate(BESIDE)):
        given = {"particles": 3, "max_tokens": 30, "ignore_eos": True, "seed": seed} | options
        asked.append(request([1, 1], f"{number} {seed}", **given))
    if guided:
        one = request([1, 2], "guided", method="exact", guidance_scale=1.4, max_tokens=20, seed=1)
        asked.append(replace(one, negative_prompt=(1, 1)))
    never, always = (answers(local_engine(pair, replace(config, max_chains=8)), asked) for config in (NEVER, ALWAYS))
    for name, one in always.items():
        assert one.tokens == never[name].tokens
        assert one.statistics.log_z == pytest.approx(never[name].statistics.log_z, abs=1e-4)
    rounds = [sum(of[one.request_id].statistics.rounds for one in exact(6)) for of in (never, always)]
    assert rounds[1] < rounds[0]


@pytest.mark.parametrize("padded", [True], ids=["padded"], indirect=True)
@pytest.mark.parametrize("shape", one_of({}, {"block": 6, "branches": 2}))
def test_a_fitted_pool_has_pages_for_every_round(padded, shape):
    """Also when the prefix cache has filled it: pages are evicted for what is drafted again. With two rounds in flight,
    which need the most pages; fewer or shorter prompts do not fill the cache."""
    same = [j * j % 7 for j in range(40)]
    asked = [replace(one, prompt=(i % 7, i % 5, *same)) for i, one in enumerate(exact(12, max_tokens=20))]
    fitted = fitted_config(bad_draft(), replace(ALWAYS, **shape), asked, concurrency=2)
    found, ample = (
        answers(local_engine(bad_draft(), config), asked) for config in (fitted, replace(fitted, pages=9000))
    )
    rounds = {name: (one.statistics.rounds, ample[name].statistics.rounds) for name, one in found.items()}
    assert all(few == enough for few, enough in rounds.values()), rounds


@pytest.mark.parametrize(
    "padded", [pytest.param(False, marks=pytest.mark.slow, id=""), pytest.param(True, id="padded")], indirect=True
)
def test_a_small_pool_and_options_change_nothing(padded):
    rng = random.Random(1)
    options = [
        {"temperature": 0.7, "top_k": 4},
        {"presence_penalty": 0.7, "repetition_penalty": 1.2},
        {"min_tokens": 9, "ignore_eos": False, "logit_bias": {1: 0.7}},
        {"ignore_eos": False},
        {"bad_words": ("ab",)},
    ]
    asked = [
        replace(one, request_id=f"{number} {i}", prompt=tuple(rng.randrange(7) for _ in range(3 + i)))
        for number, given in enumerate(options)
        for i, one in enumerate(exact(3, max_tokens=16, **given))
    ]
    plain = answers(local_engine(bad_draft(), NEVER), plain_of(asked))
    engine = local_engine(bad_draft(), replace(ALWAYS, pages=300, max_slots=24, micro_batches=2))
    found = answers(engine, asked)
    assert {name: one.tokens for name, one in found.items()} == {name: one.tokens for name, one in plain.items()}
