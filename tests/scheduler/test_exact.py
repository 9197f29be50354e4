"""Exact decoding gives the answers of plain decoding, whatever the draft proposes, whatever else is in the batch, and
whatever happens to the request."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch

from smc.algorithm.expansion import CandidateTokens, SourceRows, expand
from smc.algorithm.resampling import Spans
from smc.api.engine_config import EngineConfig
from smc.api.request import FinishReason
from smc.api.sampling_params import POPULATIONS, Method, SamplingParams
from smc.local_engine import local_engine
from smc.philox import RoundKeys
from smc.types import Decoding
from tests.model.tiny import in_fp8
from tests.pairwise import one_of
from tests.scheduler.harness import CASES, LOOKAHEAD_FIRST, answers, config_id, request
from tests.scheduler.pairs import tiny_pair

CONFIGS = [
    *CASES,
    *one_of(
        EngineConfig(form="lockstep", block=1),
        EngineConfig(block=1, branches=3),
        EngineConfig(block=5, branches=2),
    ),
]


def settings_of(rng: random.Random, longest: int = 18) -> dict:
    settings = {
        "seed": rng.randrange(10**6),
        "max_tokens": rng.randint(1, longest),
        "temperature": rng.choice([0.0, 0.7, 1.0, 1.5]),
        "logprobs": rng.random() < 0.4,
        "ignore_eos": rng.random() < 0.5,
        **({"top_k": 3} if rng.random() < 0.2 else {}),
        **({"top_p": 0.8} if rng.random() < 0.2 else {}),
        **({"stop": ("ab", "cca")} if rng.random() < 0.3 else {}),
    }
    if rng.random() < 0.4:
        settings["min_tokens"] = rng.randint(0, settings["max_tokens"])
    return settings | rng.choice([{}, {}, {"logit_bias": {0: -1.5, 3: 2}}, {"logit_bias": {2: -100}}])


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_answers_are_those_of_plain_decoding(config):
    """In rounds shared with SMC requests of both populations."""
    rng = random.Random(config.block)
    asked = [([rng.randrange(4) for _ in range(rng.randint(1, 8))], str(i), settings_of(rng)) for i in range(9)]
    plain = answers(local_engine(tiny_pair(), config), [request(p, i, method="target", **law) for p, i, law in asked])
    company = [
        request([1, 2], f"beside {i}", particles=3, population=POPULATIONS[i % 2], seed=i, max_tokens=12)
        for i in range(5)
    ]
    exact = [request(p, i, method="exact", particles=rng.choice([1, 2, 4, 8]), **law) for p, i, law in asked]
    mixed = [one for pair in zip(exact, company + [None] * len(exact)) for one in pair if one]
    found = answers(local_engine(tiny_pair(), config), mixed)
    for request_id, one in plain.items():
        other = found[request_id]
        assert (other.tokens, other.text, other.finish_reason, other.matched) == (
            one.tokens,
            one.text,
            one.finish_reason,
            one.matched,
        )
        assert other.logprobs == (one.logprobs and pytest.approx(one.logprobs, abs=1e-4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "both"),
    [(EngineConfig(block=4, branches=2), True)],
    ids=["lookahead-both"],
)
def test_answers_of_a_target_in_fp8_are_its_own(config, both):
    """They equal plain decoding with the FP8 target, and differ from answers of the target in float32."""
    rng, plain = random.Random(2), tiny_pair()
    draft = in_fp8(plain.draft, torch.float32) if both else plain.draft
    pair = replace(plain, target=in_fp8(plain.target, torch.float32), draft=draft)
    asked = [
        ([rng.randrange(4) for _ in range(rng.randint(1, 8))], str(i), settings_of(rng, 30) | {"logprobs": False})
        for i in range(12)
    ]
    alone = [request(p, i, method="target", **law) for p, i, law in asked]
    expected, of_float32 = (answers(local_engine(one, config), alone) for one in (pair, plain))
    beside = [request(p, i, method="exact", particles=rng.choice([1, 4, 8]), **law) for p, i, law in asked]
    found = answers(local_engine(pair, config), beside)
    for request_id, one in expected.items():
        assert (found[request_id].tokens, found[request_id].text) == (one.tokens, one.text)
    assert any(one.tokens != of_float32[request_id].tokens for request_id, one in expected.items())


def test_a_draft_equal_to_the_target_is_always_right():
    """At temperature 0 the target's next token is the draft's most probable one. Every round but the first and the last
    confirms a whole block."""
    equal = replace(tiny_pair(), draft=tiny_pair().target)
    law = {"method": "exact", "temperature": 0.0, "max_tokens": 41, "ignore_eos": True}
    for config, rounds in ((EngineConfig(form="lockstep", block=4), 8), (EngineConfig(block=4, branches=2), 11)):
        engine = local_engine(equal, config)
        answer = answers(engine, [request(particles=2, **law)])["r"]
        stats = engine.take_stats().exact["walk"]
        assert answer.statistics.rounds == rounds
        assert stats.misses == 0 and stats.hits == (11 if config.lookahead else 0)
        assert stats.accepted_by_position[0] == stats.rounds == rounds


def test_what_is_confirmed_is_streamed_at_once_and_never_taken_back():
    engine = local_engine(tiny_pair(), EngineConfig(block=4, branches=2))
    engine.submit(request(method="exact", particles=4, seed=3, max_tokens=40, ignore_eos=True))
    streamed, steps = [], []
    while not engine.idle:
        for output in engine.step():
            streamed += output.tokens
            steps.append(len(output.tokens))
    assert tuple(streamed) == output.answer.tokens and len(streamed) == 40
    assert max(steps[:-1]) <= 4 and len(steps) > 8


def test_time_that_runs_out_leaves_confirmed_tokens():
    now = [0.0]
    config = EngineConfig(block=4, branches=2)
    whole = answers(
        local_engine(tiny_pair(), config), [request(method="target", seed=5, max_tokens=50, ignore_eos=True)]
    )["r"]
    engine = local_engine(tiny_pair(), config, clock=lambda: now[0])
    engine.submit(request(method="exact", seed=5, max_tokens=50, ignore_eos=True, time_budget=6.0))
    while not engine.idle:
        now[0] += 1.0
        outputs = engine.step()
    answer = outputs[-1].answer
    assert answer.finish_reason is FinishReason.TIME_BUDGET and 0 < len(answer.tokens) < 50
    assert answer.tokens == whole.tokens[: len(answer.tokens)]


OF_SMC = {
    "population": "distinct",
    "min_particles": 2,
    "alpha": 2.0,
    "potential": "phi",
    "answer": "best",
    "constraint_scope": "answer",
}
"""Settings of SMC alone."""


def test_exact_is_the_default_and_the_way_to_be_greedy():
    for temperature in (0, 0.7, 1):
        assert SamplingParams(temperature=temperature).method is Method.EXACT
    with pytest.raises(ValueError, match="for greedy decoding, method='exact'"):
        SamplingParams(method="smc", temperature=0)


@pytest.mark.parametrize(
    ("law", "says"),
    [
        ({"method": "exact", "ess_threshold": 0.5}, "ess_threshold=0.5 has no effect with method='exact'"),
        ({"method": "exact", "min_particles": 2}, "min_particles=2 has no effect with method='exact'"),
        (
            {"method": "smc", "population": "distinct", "resampling": "ssp"},
            "resampling='ssp' has no effect with population='distinct'",
        ),
        ({"method": "smc", "population": "many"}, "population='many'; allowed: distinct, independent"),
        ({"method": "exact", "particles": 65}, "particles=65; allowed: 1..64"),
        *(
            ({name: value}, "has no effect with method='exact'; give method='smc', or leave it out$")
            for name, value in OF_SMC.items()
        ),
        ({"ess_threshold": 0.5}, "'exact'; give method='smc' and population='independent', or leave it out$"),
        ({"draft_temperature": 2.0}, "'walk'; give method='smc', or verification='rejection', or leave it out$"),
        ({"method": "target", "particles": 2}, "'target'; give method='smc', or method='exact', or leave it out$"),
        ({"method": "smc", "verification": "walk"}, "'smc'; give method='exact', or leave it out$"),
        ({"temperature": 0, "alpha": 2.0}, "alpha=2.0 has no effect with method='exact'; leave it out$"),
        ({"method": "smc", "constraint_scope": "answer"}, "has no effect with no constraint; leave it out$"),
    ],
)
def test_what_has_no_effect_is_refused(law, says):
    with pytest.raises(ValueError, match=says):
        SamplingParams(**law)


def test_schemes_and_thresholds_mean_independent_particles():
    for law, population in (
        ({"ess_threshold": 0.5}, "independent"),
        ({"resampling": "ssp"}, "independent"),
        ({}, "distinct"),
    ):
        assert SamplingParams(method="smc", **law).population == population


@pytest.mark.parametrize("config", LOOKAHEAD_FIRST, ids=config_id)
def test_a_draft_that_makes_nan_costs_only_speed(config):
    """The draft returns NaN after every token 2, for entire answers."""
    broken = copy.deepcopy(tiny_pair().draft)
    broken.embed.weight[2] = float("nan")
    asked = [
        request([2, i % 2, 1][i % 3 :], str(i), seed=i, max_tokens=12, ignore_eos=True, method="target")
        for i in range(12)
    ]
    plain = answers(local_engine(tiny_pair(), config), asked)
    law = {"method": "exact", "particles": 3, "max_tokens": 12, "ignore_eos": True}
    asked = [replace(one, params=SamplingParams(seed=i, **law)) for i, one in enumerate(asked)]
    found = answers(local_engine(replace(tiny_pair(), draft=broken), config), asked)
    assert {name: one.tokens for name, one in found.items()} == {name: one.tokens for name, one in plain.items()}
    assert sum(one.statistics.rounds for one in found.values()) > 12


def test_the_tree_is_of_tokens_that_are_likely_themselves():
    """The candidate that stands for all remaining tokens is ranked by its own low probability, not by the large mass of
    the rest."""
    share_RC = torch.tensor([[-4.0, -5.0, -0.1]])
    offers = CandidateTokens(torch.arange(3)[None], torch.tensor([[-4.0, -5.0, -9.0]]), share_RC)
    one_G, zero_G = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    source = SourceRows(offers, torch.zeros(1).double(), one_G > 0, Spans(zero_G, one_G))
    keys_G = RoundKeys(zero_G.long(), zero_G.long())
    given = (Spans(zero_G, one_G * 3), one_G * 3, one_G * int(Decoding.WALK), keys_G)
    chosen = expand(source, *given, step=0, total=3, has_rest=True)
    assert chosen.candidate_X.tolist() == [0, 1, 0] and chosen.alive_X.tolist() == [True, True, False]
