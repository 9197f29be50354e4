"""`return_particles`: the particles that an answer was drawn from, with their weights, against exact enumeration."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from smc.api.engine_config import EngineConfig
from smc.api.request import FinishReason, Request
from smc.local_engine import local_engine
from smc.model.decoder import Decoder
from tests.scheduler.harness import CASES, FORMS, answer, answers, request
from tests.scheduler.pairs import exact_law, mean_and_error, next_log_probs, tiny_pair, total_variation
from tests.scheduler.shared_answers import (
    ALWAYS,
    CONFIGS,
    DISTINCT,
    EOS,
    LENGTH,
    PROMPT,
    distance,
    evidence,
    standing,
    together,
    votes,
)

LOCKSTEP = CONFIGS[0]


@pytest.mark.parametrize(("config", "population", "seed"), [(CASES[0], "distinct", 0), (CASES[1], "independent", 1)])
def test_the_answer_was_drawn_from_them(config, population, seed):
    """Weights sum to 1, each particle has its own finish reason, and answers are the same without
    `return_particles`."""
    settings = {
        "seed": seed,
        "particles": 6,
        "max_tokens": 12,
        "population": population,
        "stop": ("abc",),
        "temperature": 2.0,
    }
    found = answer(tiny_pair(), config, return_particles=True, **settings)
    assert sum(particle.weight for particle in found.particles) == pytest.approx(1)
    (drawn, *_) = (particle for particle in found.particles if particle.tokens == found.tokens)
    assert (drawn.text, drawn.finish_reason) == (found.text, found.finish_reason) and votes(found)[found.tokens] > 0
    for particle in found.particles:
        full = len(particle.tokens) == 12
        assert (particle.tokens[-1] == EOS, full) != (
            False,
            False,
        ) or particle.finish_reason is FinishReason.STOP_STRING
        assert (particle.finish_reason is FinishReason.EOS) == (particle.tokens[-1] == EOS)
    quiet = answer(tiny_pair(), config, **settings)
    assert quiet.particles is None and quiet.tokens == found.tokens
    if population == "independent":
        assert len(found.particles) == 6
    else:
        assert all(particle.weight > 0 for particle in found.particles) and len(votes(found)) == len(found.particles)


def test_weights_are_those_of_the_two_laws():
    """Recomputed without resampling: of five tokens the target draws the first and, after two of the draft's, the
    fourth."""
    pair = tiny_pair()

    def log_p(model: Decoder, tokens: tuple[int, ...], index: int) -> float:
        return next_log_probs(model, (*PROMPT, *tokens[:index]))[tokens[index]].item()

    def log_weight(tokens: tuple[int, ...]) -> float:
        drafted = [index for index in (1, 2, 4) if index < len(tokens)]
        return sum(log_p(pair.target, tokens, index) - log_p(pair.draft, tokens, index) for index in drafted)

    for seed in range(5):
        params = {"seed": seed, "particles": 6, "max_tokens": LENGTH, "ess_threshold": 0.0}
        found = answer(pair, LOCKSTEP, return_particles=True, **params)
        expected = [math.exp(log_weight(particle.tokens)) for particle in found.particles]
        assert [particle.weight for particle in found.particles] == pytest.approx(
            [weight / sum(expected) for weight in expected], abs=1e-4
        )
        assert found.statistics.log_z == pytest.approx(math.log(sum(expected) / 6), abs=1e-4)
        assert min(expected) < 0.8 * max(expected), "weights are all the same"


@together
@pytest.mark.parametrize("law", [DISTINCT, ALWAYS], ids=str)
def test_votes_are_properly_weighted(law):
    """E[Z-hat * vote] is the target's probability of each answer, for all that are probable enough to test. About 40
    comparisons at 5 standard errors in all: one false alarm in about 40,000 choices of seeds."""
    found = standing(LOCKSTEP, **law)
    exact = exact_law(tiny_pair().target, PROMPT, LENGTH, EOS)
    likely = {tokens: p for tokens, p in exact.items() if p > 0.015}
    assert len(likely) > 5
    cast = [(z, votes(a)) for z, a in zip(evidence(found), found)]
    for tokens, p in likely.items():
        mean, error = mean_and_error([z * weights[tokens] for z, weights in cast])
        assert abs(mean - p) < 5 * error, tokens
    # Weights carry more information than the drawn answers: their estimate of the distribution is closer.
    drawn = Counter(a.tokens for a in found)
    assert distance(found, exact) < total_variation(exact, drawn, len(found))


@pytest.mark.parametrize("method", ["exact", "target", "draft"])
def test_a_method_without_particles_has_its_answer(method):
    found = answer(tiny_pair(), FORMS[2], method=method, seed=1, max_tokens=9, return_particles=True)
    (only,) = found.particles
    assert (only.tokens, only.text, only.finish_reason, only.weight) == (
        found.tokens,
        found.text,
        found.finish_reason,
        1.0,
    )


@pytest.mark.parametrize(
    "settings", [{"population": "distinct"}, {"population": "independent"}, {"method": "exact"}], ids=str
)
def test_out_of_time(settings):
    """Particles are returned as far as they have been weighted; none if nothing was decoded."""
    now = [0.0]
    engine = local_engine(tiny_pair(), EngineConfig(block=8, branches=2), clock=lambda: now[0])
    asked = request(
        particles=4, seed=1, max_tokens=40, ignore_eos=True, return_particles=True, time_budget=1.0, **settings
    )
    engine.submit(asked)
    for _ in range(3):
        engine.step()
    now[0] = 2.0
    found = engine.step()[-1].answer
    assert found.finish_reason is FinishReason.TIME_BUDGET
    assert sum(particle.weight for particle in found.particles) == pytest.approx(1)
    assert found.tokens in votes(found) and {particle.finish_reason for particle in found.particles} == {
        FinishReason.TIME_BUDGET
    }
    late = answers(engine, [Request("late", PROMPT, asked.params, waited=3.0)])["late"]
    assert (late.tokens, late.particles) == ((), ())
