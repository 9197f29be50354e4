"""A draft that proposes only some of the tokens: SMC stays unbiased over all answers of the target, and exact decoding
gives the target's own answers."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from smc.api.engine_config import EngineConfig
from smc.local_engine import ModelPair, local_engine
from smc.model.draft_vocab import DraftVocab
from tests.pairwise import one_of
from tests.scheduler.harness import LOOKAHEAD_FIRST, answers, config_id, request
from tests.scheduler.pairs import mean_and_error, tiny_pair
from tests.scheduler.shared_answers import CONFIGS, DISTINCT, EOS, INDEPENDENT, evidence, population
from tests.scheduler.test_exact import settings_of

RESAMPLED = {**INDEPENDENT, "ess_threshold": 0.5}


def restricted() -> ModelPair:
    """The tiny pair with a draft head that lacks token 1, which has about a quarter of the target's probability."""
    pair = tiny_pair()
    return replace(pair, draft_head=DraftVocab(np.array([0, 2, 3]), 4, 0.25).head(pair.draft))


@pytest.mark.parametrize(
    ("config", "law"),
    [
        (CONFIGS[0], DISTINCT),
        pytest.param(CONFIGS[2], RESAMPLED, marks=pytest.mark.slow),
    ],
    ids=["lockstep-distinct", "lookahead-independent"],
)
def test_evidence_is_unbiased(config, law):
    """E[Z-hat] = 1. Two cases at 4.5 standard errors: one false alarm in about 74,000 choices of seeds. Were the tokens
    outside the head never proposed, the mean would be 0.48, the target's probability of all other answers."""
    found = population(config, 150, restricted(), particles=8, **law)
    mean, error = mean_and_error(evidence(found))
    assert abs(mean - 1) < 4.5 * error
    assert error < 0.07, "the test has no power"
    drafted = {token for a in found for token in a.tokens[1:]}
    assert drafted == {0, 1, 2, EOS}


@pytest.mark.parametrize(
    "config", one_of(EngineConfig(block=3, branches=4), EngineConfig(form="lockstep", block=3)), ids=config_id
)
def test_exact_answers_are_those_of_plain_decoding(config):
    """Also in a batch with SMC, and where the target draws tokens that the draft never proposes. `method=draft` uses
    the draft's whole head."""
    rng = random.Random(7)
    asked = [([rng.randrange(4) for _ in range(rng.randint(1, 8))], str(i), settings_of(rng)) for i in range(9)]
    plain = answers(local_engine(tiny_pair(), config), [request(p, i, method="target", **law) for p, i, law in asked])
    beside = [
        request([1, 2], f"beside {i}", seed=i, max_tokens=20, method=method)
        for i, method in enumerate(("smc", "draft"))
    ]
    exact = [request(p, i, method="exact", particles=rng.choice([1, 2, 4, 8]), **law) for p, i, law in asked]
    found = answers(local_engine(restricted(), config), exact + beside)
    for request_id, one in plain.items():
        assert (found[request_id].tokens, found[request_id].finish_reason) == (one.tokens, one.finish_reason)
    assert any(1 in one.tokens for one in plain.values())
    assert found["beside 1"].tokens == answers(local_engine(tiny_pair(), config), beside[1:])["beside 1"].tokens


@pytest.mark.parametrize("config", LOOKAHEAD_FIRST, ids=config_id)
def test_constraints_that_leave_no_token_of_the_head(config):
    """Token b, which the head lacks, is often the only one allowed: exact answers are those of plain decoding, and the
    mean of Z-hat is 1."""
    more = {"constraint": {"regex": "b(a|b)c?b*"}, "max_tokens": 5}
    how = {"target": {"method": "target"}, "exact": {"method": "exact", "particles": 3}}
    requests = [request((0, 1, 2), f"{n} {s}", seed=s, **more, **how[n]) for n in how for s in range(6)]
    weighed = [
        request((0, 1, 2), f"{p} {s}", seed=s, particles=4, population=p, **more)
        for p in ("distinct", "independent")
        for s in range(40)
    ]
    found = answers(local_engine(restricted(), config), [*requests, *weighed])
    assert all(found[f"exact {s}"].tokens == found[f"target {s}"].tokens for s in range(6))
    for name in ("distinct", "independent"):
        z = [math.exp(found[f"{name} {s}"].statistics.log_z) for s in range(40)]
        mean, error = mean_and_error(z)
        assert abs(mean - 1) < 4.5 * error + 1e-4
