"""Penalties: every method samples from the distribution of the formula, with the counts of each row's own tokens."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from smc.api.engine_config import EngineConfig
from smc.api.sampling_params import SamplingParams
from smc.local_engine import local_engine
from tests.scheduler.harness import FORMS, LOCKSTEP_FIRST, LOOKAHEAD_FIRST, answers, config_id, processed, request, wide
from tests.scheduler.pairs import mean_and_error, target_logits_after, tiny_pair
from tests.scheduler.random_histories import answers_with_plenty_of_memory, assert_same, live, small_engine

PROMPT = (0, 1, 1, 2)
EVERY = [
    {"method": "target"},
    {"method": "exact", "particles": 3},
    {"method": "exact", "particles": 2, "verification": "rejection"},
    {"method": "smc", "particles": 3, "population": "distinct"},
    {"method": "smc", "particles": 3, "population": "independent"},
]
LAWS = [
    {"presence_penalty": 1.3, "frequency_penalty": -0.4, "repetition_penalty": 1.5},
    {"frequency_penalty": 1.1},
    {"repetition_penalty": 0.6, "temperature": 0.7},
]
ENDS = [FORMS[0], FORMS[2]]


def law_of(answer: tuple[int, ...], law: dict[str, float], logits_V: torch.Tensor) -> torch.Tensor:
    """log p [V] after an answer, computed token by token."""
    logits_V = logits_V.clone()
    for token in range(len(logits_V)):
        if token in (*PROMPT, *answer):
            r = law.get("repetition_penalty", 1.0)
            logits_V[token] = logits_V[token] / r if logits_V[token] > 0 else logits_V[token] * r
        count = answer.count(token)
        logits_V[token] -= law.get("frequency_penalty", 0.0) * count + law.get("presence_penalty", 0.0) * (count > 0)
    return torch.log_softmax(logits_V / law.get("temperature", 1.0), -1)


@pytest.mark.parametrize("config", LOOKAHEAD_FIRST, ids=config_id)
def test_every_method_weighs_by_the_formula(config: EngineConfig):
    """Checked on the reported answer, whose particle was resampled or remapped in most rounds."""
    more = {"max_tokens": 14, "ignore_eos": True, "logprobs": True}
    requests = [
        request(PROMPT, f"{i} {j} {seed}", seed=seed, **more, **how, **law)
        for i, how in enumerate(EVERY)
        for j, law in enumerate(LAWS)
        for seed in range(2)
    ]
    found = answers(local_engine(tiny_pair(), processed(wide(config))), requests)
    for one in requests:
        answer = found[one.request_id]
        law = LAWS[int(one.request_id.split()[1])]
        expected = [
            law_of(answer.tokens[:t], law, target_logits_after((*PROMPT, *answer.tokens[:t])))[token].item()
            for t, token in enumerate(answer.tokens)
        ]
        assert answer.logprobs == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("config", LOCKSTEP_FIRST, ids=config_id)
def test_evidence_of_particles_has_mean_one(config: EngineConfig):
    """E[Z-hat] = 1 with both models penalised, at 4.5 standard deviations in four cases: one false alarm in 30,000
    choices of seeds. The test fails if the proposal differs from the reported log q."""
    law = {"max_tokens": 5, "ignore_eos": True, "particles": 6, "temperature": 2.0, **LAWS[0]}
    for population in ("distinct", "independent"):
        requests = [request(PROMPT, f"{seed}", seed=seed, population=population, **law) for seed in range(60)]
        found = answers(local_engine(tiny_pair(), wide(config)), requests)
        mean, error = mean_and_error([math.exp(answer.statistics.log_z) for answer in found.values()])
        assert abs(mean - 1) < 4.5 * error
        assert error < 0.1, "the test has no power"


@pytest.mark.slow
@pytest.mark.parametrize("config", LOOKAHEAD_FIRST, ids=config_id)
def test_penalties_survive_preemption(config: EngineConfig, monkeypatch):
    """Token counts of a row are restored when it resumes: preempted requests in little memory answer as with plenty of
    memory."""
    law = {"max_tokens": 18, "ignore_eos": True, "particles": 4, **LAWS[0]}
    requests = [
        request(PROMPT, f"{method} {seed}", seed=seed, method=method, **law)
        for method in ("exact", "smc")
        for seed in range(2)
    ]
    engine = small_engine(replace(config, pages=200, prefill_chunk=16), monkeypatch, ahead=True)
    lives = live(engine, requests, random.Random(0), submit=1.0, interrupt=0.3)
    assert lives.events["interrupted"] > 3
    expected = answers_with_plenty_of_memory(config, requests)
    for one in requests:
        assert_same(lives.final[one.request_id], expected[one.request_id])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty=2.1; allowed: -2..2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty=nan; allowed: -2..2"),
        ({"repetition_penalty": 0}, "repetition_penalty=0; allowed: 0.01..100"),
        ({"presence_penalty": 1, "logprobs": True, "top_logprobs": 2}, "top_logprobs=2 is not available with presence"),
    ],
)
def test_values_that_are_refused(given: dict, message: str):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**given)


@pytest.mark.parametrize("config", LOCKSTEP_FIRST, ids=config_id)
def test_exact_answers_are_those_of_the_target(config: EngineConfig):
    """Rounds are shared with requests without penalties; these answer as they do alone."""
    more = {"max_tokens": 14, "ignore_eos": True}
    how = {"target": {"method": "target"}, "exact": {"method": "exact", "particles": 3}}
    found = answers(
        local_engine(tiny_pair(), config),
        [
            request(PROMPT, f"{name} {i} {seed}", seed=seed, **more, **method, **law)
            for name, method in how.items()
            for i, law in enumerate([*LAWS, {}])
            for seed in range(3)
        ],
    )
    for i in range(len(LAWS) + 1):
        for seed in range(3):
            assert found[f"exact {i} {seed}"].tokens == found[f"target {i} {seed}"].tokens
    alone = answers(
        local_engine(tiny_pair(), config),
        [request(PROMPT, f"{seed}", seed=seed, **more, **how["exact"]) for seed in range(3)],
    )
    assert [alone[f"{s}"].tokens for s in range(3)] == [found[f"exact 3 {s}"].tokens for s in range(3)]
    assert any(found[f"exact 0 {s}"].tokens != found[f"exact 3 {s}"].tokens for s in range(3))
