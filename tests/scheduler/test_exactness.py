"""The engine against exact enumeration: right on average for any N, and nearer to the target's law as N grows."""

from __future__ import annotations

import collections
import math
from dataclasses import replace

import pytest

from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.local_engine import ModelPair, local_engine
from tests.scheduler.harness import assert_empty, config_id
from tests.scheduler.pairs import exact_law, next_log_probs, tiny_pair, total_variation

PROMPT = (0, 1, 2)
LENGTH = 5
EOS = 3
CONFIGS = [
    EngineConfig(form="lockstep", block=2, max_slots=2048, pages=40_000),
    *(EngineConfig(form="lookahead", block=2, branches=f, max_slots=2048, pages=40_000) for f in (1, 2, 4)),
]


def equal_models() -> ModelPair:
    return replace(tiny_pair(), draft=tiny_pair().target)


def population(config: EngineConfig, count: int, pair: ModelPair | None = None, **params):
    """Answers of `count` requests that differ in their seed only."""
    engine = local_engine(pair or tiny_pair(), config)
    requests = (
        Request(str(seed), PROMPT, SamplingParams(max_tokens=LENGTH, seed=seed, **params)) for seed in range(count)
    )
    found = [output.answer for output in engine.run(requests) if output.answer]
    assert_empty(engine)
    return found


def distance(found, law) -> float:
    return total_variation(law, collections.Counter(a.tokens for a in found), len(found))


DISTINCT = {"population": "distinct"}
INDEPENDENT = {"population": "independent"}
NEVER, ALWAYS = {"ess_threshold": 0.0}, {"ess_threshold": 1.0}
SLOW = [(CONFIGS[0], NEVER), (CONFIGS[1], ALWAYS), (CONFIGS[1], DISTINCT), (CONFIGS[2], NEVER)]


@pytest.mark.parametrize(
    ("config", "law"),
    [
        *((config, law) for config in CONFIGS[::3] for law in (ALWAYS, DISTINCT)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
    ids=lambda value: config_id(value) if isinstance(value, EngineConfig) else str(value),
)
def test_evidence_is_unbiased(config, law):
    """E[Z-hat] = 1 at alpha = 1. Eight cases at 4.5 standard errors: one false alarm in about 18,000 choices of
    seeds."""
    z = [math.exp(a.statistics.log_z) for a in population(config, 400, particles=4, **law)]
    mean = sum(z) / len(z)
    error = (sum((x - mean) ** 2 for x in z) / len(z) ** 2) ** 0.5
    assert abs(mean - 1) < 4.5 * error
    assert error < 0.07, "the test has no power"


@pytest.mark.parametrize(
    ("config", "law"),
    [(CONFIGS[0], DISTINCT), pytest.param(CONFIGS[2], DISTINCT, marks=pytest.mark.slow), (CONFIGS[2], INDEPENDENT)],
)
def test_evidence_is_the_mass_of_the_powered_law(config, law):
    """At alpha != 1 Z-hat estimates sum over answers of prod p^alpha. Same false-alarm rate per case."""
    mass = sum(exact_law(tiny_pair().target, PROMPT, LENGTH, EOS, alpha=1.5).values())
    z = [math.exp(a.statistics.log_z) for a in population(config, 300, particles=4, alpha=1.5, **law)]
    mean = sum(z) / len(z)
    error = (sum((x - mean) ** 2 for x in z) / len(z) ** 2) ** 0.5
    assert abs(mean - mass) < 4.5 * error
    assert abs(mass - 1) > 20 * error, "the test cannot tell alpha from 1"


@pytest.mark.parametrize("config", [CONFIGS[0], pytest.param(CONFIGS[3], marks=pytest.mark.slow)], ids=config_id)
def test_answers_approach_the_exact_law_as_particles_are_added(config):
    """Both forms approach the same law. The draft alone is 0.45 away; sampling 600 answers leaves about 0.2."""
    law = exact_law(tiny_pair().target, PROMPT, LENGTH, EOS)
    far, near, nearest = (distance(population(config, 600, particles=n, ess_threshold=0.5), law) for n in (1, 4, 16))
    assert far - 0.05 > near > nearest + 0.01
    assert nearest < distance(population(config, 600, method="target"), law) + 0.06


@pytest.mark.parametrize(
    ("config", "temperature", "particles"),
    [pytest.param(CONFIGS[0], 0.7, 16, marks=pytest.mark.slow), (CONFIGS[3], 0.7, 4), (CONFIGS[0], 2.0, 8)],
    ids=["lockstep, narrow", "look-ahead, narrow", "lockstep, wide"],
)
def test_distinct_particles_are_nearer_than_independent_ones(config, temperature, particles):
    """Where laws are narrow, much nearer to the exact law; where they are wide, not farther."""
    law = exact_law(tiny_pair().target, PROMPT, LENGTH, EOS, temperature)
    params = {"particles": particles, "temperature": temperature}
    independent, distinct = (
        distance(population(config, 500, **params, **kind), law) for kind in (INDEPENDENT, DISTINCT)
    )
    assert distinct < independent + (0.03 if temperature > 1 else -0.03)


def test_more_branches_come_nearer():
    """The same block length, N = 4, always resampling: F = 1 shares what was drafted ahead, F = 4 does not."""
    law = exact_law(tiny_pair().target, PROMPT, LENGTH, EOS)
    lag, many = (distance(population(config, 500, particles=4, ess_threshold=1.0), law) for config in CONFIGS[1::2])
    assert lag > many + 0.04


@pytest.mark.parametrize("method,side", [("target", "target"), ("draft", "draft")])
def test_plain_decoding_samples_the_models_own_law(method, side):
    """800 answers: their distance to the law they were drawn from is sampling noise, about 0.18; to the other model's
    it is 0.57."""
    law = exact_law(getattr(tiny_pair(), side), PROMPT, LENGTH, EOS)
    assert distance(population(CONFIGS[1], 800, method=method), law) < 0.22


@pytest.mark.parametrize("config", [pytest.param(CONFIGS[0], marks=pytest.mark.slow), CONFIGS[3]], ids=config_id)
def test_temperature_and_truncation_belong_to_the_target_law(config):
    """Top-k 2 at temperature 0.7, drafted at 1.5 by the target itself: tokens outside the truncated law are drawn, and
    weeded out."""
    law = _truncated_law()
    params = {"particles": 16, "temperature": 0.7, "draft_temperature": 1.5, "top_k": 2, "ess_threshold": 0.75}
    found = population(config, 400, equal_models(), **params)
    assert not any(a.statistics.collapses for a in found)
    assert all(law.get(a.tokens, 0) > 0 for a in found)
    assert any(a.statistics.resamples for a in found)
    assert distance(found, law) < 0.13


def _truncated_law() -> dict:
    law = {}

    def visit(prefix, mass):
        if len(prefix) == LENGTH or (prefix and prefix[-1] == EOS):
            law[prefix] = mass
            return
        log_p = next_log_probs(tiny_pair().target, (*PROMPT, *prefix), 0.7)
        top = log_p.topk(2)
        for token, p in zip(top.indices.tolist(), top.values.softmax(-1).tolist()):
            visit((*prefix, token), mass * p)

    visit((), 1.0)
    return law


@pytest.mark.parametrize("config", [pytest.param(CONFIGS[0], marks=pytest.mark.slow), CONFIGS[3]], ids=config_id)
def test_a_draft_equal_to_the_target_never_resamples(config):
    found = population(config, 400, equal_models(), particles=4, **INDEPENDENT)
    assert all(a.statistics.resamples == 0 for a in found)
    assert all(abs(a.statistics.log_z) < 1e-4 for a in found)
    assert distance(found, exact_law(tiny_pair().target, PROMPT, LENGTH, EOS)) < 0.28
