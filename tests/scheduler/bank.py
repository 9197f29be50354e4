"""Answers of the tiny pair that several laws are read off: drawn once for each setting in a process.

Tests that share them are of one xdist group, so that one process has them all. An answer costs the same with one
particle and with sixteen, and its particles' weights say more about the law that it was drawn from than the answer does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import pytest

from smc.api.engine_config import EngineConfig
from smc.api.request import Answer, Request
from smc.api.sampling_params import SamplingParams
from smc.local_engine import ModelPair, local_engine
from smc.potentials import Potential
from smc.scheduler.engine import NO_POTENTIALS
from tests.scheduler.harness import assert_empty
from tests.scheduler.pairs import tiny_pair, total_variation

PROMPT, LENGTH, EOS = (0, 1, 2), 5, 3
CONFIGS = [
    EngineConfig(form="lockstep", block=2, max_slots=2048, pages=40_000),
    *(EngineConfig(form="lookahead", block=2, branches=f, max_slots=2048, pages=40_000) for f in (1, 2, 4)),
]
DISTINCT, INDEPENDENT = {"population": "distinct"}, {"population": "independent"}
NEVER, ALWAYS = {"ess_threshold": 0.0}, {"ess_threshold": 1.0}
COUNT = 200
"""Answers with four particles each of the standing settings: at the error that this leaves, a test of evidence has
power."""
together = pytest.mark.xdist_group("bank")


def population(
    config: EngineConfig,
    count: int,
    pair: ModelPair | None = None,
    potentials: Mapping[str, Potential] = NO_POTENTIALS,
    **params: object,
) -> list[Answer]:
    """Answers of `count` requests that differ in their seed only, with all their particles."""
    engine = local_engine(pair or tiny_pair(), config, potentials=potentials)
    law = {"max_tokens": LENGTH, "return_particles": True} | params
    requests = (Request(str(seed), PROMPT, SamplingParams(seed=seed, **law)) for seed in range(count))
    found = [output.answer for output in engine.run(requests) if output.answer]
    assert_empty(engine)
    return found


def standing(config: EngineConfig, **params: object) -> tuple[Answer, ...]:
    """`COUNT` answers with four particles each, drawn once."""
    return _drawn(config, tuple(params.items()))


@cache
def _drawn(config: EngineConfig, params: tuple[tuple[str, object], ...]) -> tuple[Answer, ...]:
    return tuple(population(config, COUNT, particles=4, **dict(params)))


def evidence(found: Sequence[Answer]) -> list[float]:
    """Z-hat of every answer."""
    return [math.exp(answer.statistics.log_z) for answer in found]


def votes(found: Answer) -> Counter:
    """Weight of every different answer among the particles."""
    weights: Counter = Counter()
    for particle in found.particles:
        weights[particle.tokens] += particle.weight
    return weights


def distance(found: Sequence[Answer], law: dict) -> float:
    """Of the law that the answers are drawn from, by the weights of their particles: as much as a multiple of the
    answers would say."""
    mass: Counter = Counter()
    for answer in found:
        mass.update(votes(answer))
    return total_variation(law, mass, len(found))


def equal_models() -> ModelPair:
    return replace(tiny_pair(), draft=tiny_pair().target)
