"""Answers of the tiny pair that several statistical tests share: drawn once per process for each setting.

Tests that share them belong to one xdist group, so that they run in one process. An answer costs the same with one
particle as with sixteen, and the weights of its particles tell more about the distribution than the answer alone."""

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
"""Number of answers, each with four particles, for each shared setting. At the standard error that this leaves, a test
of the evidence has power."""
together = pytest.mark.xdist_group("bank")


def population(
    config: EngineConfig,
    count: int,
    pair: ModelPair | None = None,
    potentials: Mapping[str, Potential] = NO_POTENTIALS,
    prompt: tuple[int, ...] = PROMPT,
    **params: object,
) -> list[Answer]:
    """Answers, with all their particles, of `count` SMC requests that differ only in their seeds."""
    engine = local_engine(pair or tiny_pair(), config, potentials=potentials)
    law = {"method": "smc", "max_tokens": LENGTH, "return_particles": True} | params
    requests = (Request(str(seed), prompt, SamplingParams(seed=seed, **law)) for seed in range(count))
    found = [output.answer for output in engine.run(requests) if output.answer]
    assert_empty(engine)
    return found


def standing(config: EngineConfig, **params: object) -> tuple[Answer, ...]:
    """`COUNT` answers with four particles each, drawn once per process."""
    return _drawn(config, tuple(params.items()))


@cache
def _drawn(config: EngineConfig, params: tuple[tuple[str, object], ...]) -> tuple[Answer, ...]:
    return tuple(population(config, COUNT, particles=4, **dict(params)))


def evidence(found: Sequence[Answer]) -> list[float]:
    """Z-hat of each answer."""
    return [math.exp(answer.statistics.log_z) for answer in found]


def votes(found: Answer) -> Counter:
    """Total weight of each distinct answer among the particles."""
    weights: Counter = Counter()
    for particle in found.particles:
        weights[particle.tokens] += particle.weight
    return weights


def distance(found: Sequence[Answer], law: dict) -> float:
    """Total variation between `law` and the distribution of the answers, estimated from the weights of their particles:
    as precise as several times as many answers without weights."""
    mass: Counter = Counter()
    for answer in found:
        mass.update(votes(answer))
    return total_variation(law, mass, len(found))


def equal_models() -> ModelPair:
    return replace(tiny_pair(), draft=tiny_pair().target)
