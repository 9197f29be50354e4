"""SMC against exact enumeration: unbiased for any N, and closer to the target's distribution as N grows."""

from __future__ import annotations

import pytest

from smc.api.engine_config import EngineConfig
from tests.pairwise import one_of
from tests.scheduler.harness import config_id
from tests.scheduler.pairs import exact_law, far_from, mean_and_error, tiny_pair, truncated_law
from tests.scheduler.shared_answers import (
    ALWAYS,
    CONFIGS,
    DISTINCT,
    EOS,
    INDEPENDENT,
    LENGTH,
    NEVER,
    PROMPT,
    distance,
    equal_models,
    evidence,
    population,
    standing,
    together,
)

pytestmark = together


@pytest.mark.parametrize(
    ("config", "law"),
    [
        *((config, ALWAYS) for config in CONFIGS[::3]),
        (CONFIGS[0], DISTINCT),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((CONFIGS[3], DISTINCT), (CONFIGS[2], NEVER))),
    ],
    ids=lambda value: config_id(value) if isinstance(value, EngineConfig) else str(value),
)
def test_evidence_is_unbiased(config, law):
    """E[Z-hat] = 1 at alpha = 1. Five cases at 4.5 standard errors: one false alarm in about 29,000 choices of
    seeds."""
    mean, error = mean_and_error(evidence(standing(config, **law)))
    assert abs(mean - 1) < 4.5 * error
    assert error < 0.1, "the test has no power"


@pytest.mark.parametrize(
    ("config", "law"),
    [
        (CONFIGS[0], DISTINCT),
        # Tests of potentials check such a distribution for look-ahead with independent particles as well.
        pytest.param(CONFIGS[2], INDEPENDENT, marks=pytest.mark.slow),
    ],
)
def test_evidence_is_the_mass_of_the_powered_law(config, law):
    """At alpha != 1 Z-hat estimates the sum over answers of prod p^alpha, with the same false-alarm rate per case.
    Answers follow this distribution as wholes; token-by-token powering would give a different one."""
    powered = exact_law(tiny_pair().target, PROMPT, LENGTH, EOS, alpha=1.5)
    mass = sum(powered.values())
    found = population(config, 110, particles=8, alpha=1.5, **law)
    mean, error = mean_and_error(evidence(found))
    assert abs(mean - mass) < 4.5 * error
    assert abs(mass - 1) > 20 * error, "the test cannot tell alpha from 1"
    assert distance(found, {tokens: of / mass for tokens, of in powered.items()}) < 0.2


@pytest.mark.parametrize("config", one_of(CONFIGS[0], CONFIGS[3]), ids=config_id)
def test_answers_approach_the_exact_law_as_particles_are_added(config):
    """Both forms approach the same distribution. The draft alone is at a distance of 0.45."""
    law = exact_law(tiny_pair().target, PROMPT, LENGTH, EOS)
    far = distance(population(config, 150, particles=1), law)
    near = distance(standing(config, **ALWAYS), law)
    nearest = distance(population(config, 90, particles=16, ess_threshold=0.5), law)
    assert far - 0.05 > near > nearest + 0.01
    assert nearest < 0.2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "temperature", "particles"),
    one_of((CONFIGS[3], 0.7, 4), (CONFIGS[0], 2.0, 8)),
    ids=["look-ahead, narrow", "lockstep, wide"],
)
def test_distinct_particles_are_nearer_than_independent_ones(config, temperature, particles):
    """Much closer to the exact distribution where it is narrow, and not farther where it is wide."""
    law = exact_law(tiny_pair().target, PROMPT, LENGTH, EOS, temperature)
    params = {"particles": particles, "temperature": temperature}
    independent, distinct = (
        distance(population(config, 140, **params, **kind), law) for kind in (INDEPENDENT, DISTINCT)
    )
    assert distinct < independent + (0.03 if temperature > 1 else -0.03)


@pytest.mark.slow
def test_more_branches_come_nearer():
    """The same block length, N = 4, always resampling: with F = 1 the copies of a particle share what was drafted
    ahead, with F = 4 they do not."""
    law = exact_law(tiny_pair().target, PROMPT, LENGTH, EOS)
    lag, many = (distance(standing(config, **ALWAYS), law) for config in CONFIGS[1::2])
    assert lag > many + 0.04


@pytest.mark.parametrize("side", ["target", "draft"])
def test_plain_decoding_samples_the_models_own_law(side):
    """By chi-square at 4.5 standard deviations: two cases, one false alarm in about 10,000 choices of seeds. The test
    rejects the other model's distribution."""
    own, other = (
        exact_law(getattr(tiny_pair(), name), PROMPT, LENGTH, EOS)
        for name in ("target", "draft")[:: 1 - 2 * (side == "draft")]
    )
    found = [answer.tokens for answer in population(CONFIGS[1], 100, method=side)]
    assert far_from(own, found) < 4.5 < 9 < far_from(other, found)


@pytest.mark.parametrize("config", one_of(CONFIGS[3], CONFIGS[0]), ids=config_id)
def test_temperature_and_truncation_belong_to_the_target_law(config):
    """Top-k 2 at temperature 0.7, drafted at 1.5 by the target itself: tokens outside the truncation are drafted, and
    weighting removes them."""
    law = truncated_law(tiny_pair().target, PROMPT, LENGTH, EOS, 0.7, 2)
    params = {"particles": 16, "temperature": 0.7, "draft_temperature": 1.5, "top_k": 2, "ess_threshold": 0.75}
    found = population(config, 100, equal_models(), **params)
    assert not any(a.statistics.collapses for a in found)
    assert all(law.get(a.tokens, 0) > 0 for a in found)
    assert any(a.statistics.resamples for a in found)
    assert distance(found, law) < 0.13


@pytest.mark.parametrize("config", one_of(CONFIGS[3], CONFIGS[0]), ids=config_id)
def test_a_draft_equal_to_the_target_never_resamples(config):
    found = population(config, 80, equal_models(), particles=4, **INDEPENDENT)
    assert all(a.statistics.resamples == 0 for a in found)
    assert all(abs(a.statistics.log_z) < 1e-4 for a in found)
    assert distance(found, exact_law(tiny_pair().target, PROMPT, LENGTH, EOS)) < 0.28
