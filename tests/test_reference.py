"""`smc.reference` against the engine, which must answer the same after the same rounds, and against enumeration."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from smc.algorithm import coupling
from smc.algorithm.expansion import CANDIDATES_PER_ROW
from smc.api.engine_config import EngineConfig
from smc.distributions import Distributions, DistributionSpec
from smc.local_engine import ModelPair, local_engine
from smc.reference import ExactRejection, ExactWalk, Model, Reference, SmcDistinct, SmcIndependent, Task, Tokens
from tests.scheduler.harness import answers, config_id, request, wide
from tests.scheduler.pairs import character_pair, far_from, law_of, logits_after, mean_and_error, tiny_pair

PROMPT = (0, 1, 2)


def slow(*cases) -> list:
    """Cases of the whole run only."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


METHODS: dict[type[Reference], dict[str, str]] = {
    ExactWalk: {"method": "exact", "verification": "walk"},
    ExactRejection: {"method": "exact", "verification": "rejection"},
    SmcIndependent: {"method": "smc", "population": "independent"},
    SmcDistinct: {"method": "smc", "population": "distinct"},
}
LOCKSTEP, *LOOKAHEAD = [
    EngineConfig(form="lockstep", block=3, drafting="always"),
    *(EngineConfig(block=k, branches=f, drafting="always") for k, f in ((3, 2), (4, 4), (1, 2), (3, 1))),
]
each_form = pytest.mark.parametrize("config", [LOCKSTEP, LOOKAHEAD[0]], ids=config_id)
each_population = pytest.mark.parametrize("decoding", [SmcIndependent, SmcDistinct])
SHARE = EngineConfig.defensive_share


def models(pair: ModelPair, top_k: int = 0) -> tuple[Model, Model]:
    """The target's distribution and the proposal of SMC, or of exact decoding where `top_k` is 0."""
    law = Distributions(DistributionSpec.of(top_k_R=[top_k]))

    @cache
    def target(tokens: Tokens) -> torch.Tensor:
        return law.target(logits_after(pair.target, tokens)[None].float())[0]

    @cache
    def draft(tokens: Tokens) -> torch.Tensor:
        return law.proposal(logits_after(pair.draft, tokens)[None].float(), SHARE)[0]

    return target, draft


def assert_same_rounds(
    decoding: type[Reference],
    config: EngineConfig,
    pair: ModelPair,
    seeds: range,
    *,
    top_k: int = 0,
    max_tokens: int = 12,
    **settings,
) -> int:
    """Compare the engine's answers, rounds and populations with those of the reference. Returns the number of collapsed
    populations."""
    is_smc = issubclass(decoding, SmcIndependent)
    law = METHODS[decoding] | settings | {"max_tokens": max_tokens, "top_k": top_k, "return_particles": is_smc}
    sizes = (1, 2, 4)
    asked = [request(PROMPT, f"{n} {seed}", particles=n, seed=seed, **law) for n in sizes for seed in seeds]
    found, collapses = answers(local_engine(pair, wide(config)), asked), 0
    target, draft = models(pair, top_k)
    end, branches = next(iter(pair.tokenizer.eos_ids)), config.branches if config.lookahead else None
    for n, seed in itertools.product(sizes, seeds):
        shape = (PROMPT, end, max_tokens, seed, n, config.block, branches, coupling.FIRST_EXPONENT)
        again = {"redrafted": config.redrafted}
        made, answer = decoding(Task(target, draft, *shape, **again, **settings)), found[f"{n} {seed}"]
        name = f"N = {n}, seed {seed}"
        assert answer.tokens == made.run(), name
        assert answer.statistics.rounds == made.rounds, name
        if isinstance(made, SmcIndependent):
            assert answer.statistics.log_z == pytest.approx(made.log_z, abs=2e-4), name
            texts = [row.tokens[len(PROMPT) :] for row in made.particles if row.mass > -math.inf]
            assert sorted(particle.tokens for particle in answer.particles if particle.weight) == sorted(texts), name
            collapses += answer.statistics.collapses > 0
        elif isinstance(made, ExactWalk):
            assert answer.statistics.misses == made.misses, name
    return collapses


@pytest.fixture(autouse=True)
def fixed_exponent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine fits the exponent of coupled drafting to the draws of all its requests."""
    monkeypatch.setattr(coupling, "LEAST_EXPONENT", coupling.FIRST_EXPONENT)
    monkeypatch.setattr(coupling, "MOST_EXPONENT", coupling.FIRST_EXPONENT)


@pytest.mark.parametrize("config", [LOCKSTEP, *LOOKAHEAD[:2], *slow(*LOOKAHEAD[2:])], ids=config_id)
@pytest.mark.parametrize("decoding", METHODS)
def test_the_engine_decodes_as_the_reference(decoding, config):
    assert_same_rounds(decoding, config, tiny_pair(), range(6))


@pytest.mark.parametrize("config", [LOOKAHEAD[0], *slow(*LOOKAHEAD[1:2], *LOOKAHEAD[3:])], ids=config_id)
def test_drafting_again_after_a_miss_is_that_of_the_reference(config):
    assert_same_rounds(ExactWalk, replace(config, redrafting="always"), tiny_pair(), range(6))


@each_population
@each_form
def test_populations_without_weight_go_on_as_in_the_reference(decoding, config):
    assert assert_same_rounds(decoding, config, tiny_pair(scale=1.5), range(8), top_k=2) > 2


@each_population
@each_form
def test_powers_weigh_as_in_the_reference(decoding, config):
    assert_same_rounds(decoding, config, tiny_pair(), range(6), alpha=1.7)


@pytest.mark.parametrize("decoding", METHODS)
def test_candidates_of_a_large_vocabulary_are_those_of_the_reference(decoding):
    """With more tokens than candidates, one candidate of a distinct row stands for the rest of them."""
    pair = character_pair((), 64)
    assert pair.tokenizer.size > CANDIDATES_PER_ROW
    for config in (LOCKSTEP, LOOKAHEAD[0]):
        assert_same_rounds(decoding, config, pair, range(3), max_tokens=9)


END, LENGTH = 3, 6


def chains(seed: int = 5) -> tuple[Model, Model]:
    """Random Markov chains over three letters and an end token: a target, and a flatter and perturbed draft."""
    generator = torch.Generator().manual_seed(seed)
    logits_VV, noise_VV = torch.randn(2, END + 1, END + 1, generator=generator)
    logits_VV[:, END] -= 0.7
    target_VV, draft_VV = logits_VV.log_softmax(-1), (0.7 * logits_VV + 0.6 * noise_VV).log_softmax(-1)
    return lambda tokens: target_VV[tokens[-1]], lambda tokens: draft_VV[tokens[-1]]


TARGET, DRAFT = chains()


def task(seed: int, **settings) -> Task:
    return Task(TARGET, DRAFT, (0,), END, LENGTH, seed, **{"block": 2} | settings)


def law(alpha: float = 1.0) -> dict[Tokens, float]:
    return law_of(lambda prefix: TARGET((0, *prefix)).tolist(), LENGTH, END, alpha=alpha)


@pytest.mark.parametrize(
    ("decoding", "branches", "alpha", "threshold"),
    [
        (SmcIndependent, 2, 0.7, 0.5),
        (SmcIndependent, None, 1.0, 1.0),
        (SmcDistinct, 2, 0.7, 0.5),
        (SmcDistinct, None, 1.0, 0.5),
        *slow((SmcIndependent, 1, 1.0, 0.5), (SmcIndependent, 4, 0.7, 0.0), (SmcIndependent, None, 0.7, 0.0)),
        *slow((SmcDistinct, 4, 1.0, 0.5), (SmcDistinct, 1, 0.7, 0.5)),
    ],
)
def test_the_mean_evidence_is_the_exact_mass(decoding, branches, alpha, threshold):
    """250 populations of 4, within 4.5 standard errors: false alarm 7e-6 a case, 7e-5 in all."""
    estimates = []
    for seed in range(250):
        made = decoding(task(seed, branches=branches, alpha=alpha, ess_threshold=threshold))
        made.run()
        estimates.append(math.exp(made.log_z))
    exact, (mean, error) = sum(law(alpha).values()), mean_and_error(estimates)
    assert exact == pytest.approx(1, abs=1e-5) if alpha == 1 else exact > 1.5
    assert error < 0.1 * exact, "sharp enough to see a wrong factor"
    assert abs(mean - exact) < 4.5 * error


@pytest.mark.parametrize(
    ("decoding", "particles", "branches"),
    [
        (ExactRejection, 3, None),
        (ExactRejection, 2, 2),
        *slow((ExactRejection, 1, None), (ExactWalk, 3, 2)),
    ],
)
def test_exact_answers_have_the_targets_law(decoding, particles, branches):
    """By chi-square at 4.5 standard deviations: one false alarm in 30,000 choices of seeds."""
    found = [decoding(task(seed, particles=particles, branches=branches)).run() for seed in range(600)]
    assert far_from(law(), found) < 4.5
