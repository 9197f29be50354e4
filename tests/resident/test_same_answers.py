"""Resident rounds and rounds on the host give the same answers for the same seeds: they are two ways to run one algorithm."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from smc.engine.config import EngineConfig
from smc.engine.local import local_engine
from smc.resident.sides import Parts
from smc.resident.stages import Stages
from tests.engine.harness import FORMS, answer, answers, config_id, request
from tests.engine.pairs import tiny_pair

CONFIGS = [
    *FORMS,
    EngineConfig(form="lockstep", block=1),
    EngineConfig(form="lookahead", block=1, branches=3),
    EngineConfig(block=5, branches=2),
]


def resident(config, requests, pair=None):
    return answers(local_engine(pair or tiny_pair(), config, resident=True), requests)


def assert_same(one, other):
    assert one.tokens == other.tokens
    assert one.finish_reason is other.finish_reason
    assert one.statistics.log_z == pytest.approx(other.statistics.log_z, abs=1e-4)
    assert one.statistics.resamples == other.statistics.resamples
    if one.logprobs:
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def mixed(count, rng):
    for i in range(count):
        params = {
            "particles": rng.choice([1, 2, 3, 4, 8]),
            "seed": rng.randrange(1000),
            "max_tokens": rng.randrange(1, 25),
            "ess_threshold": rng.choice([0.0, 0.5, 1.0]),
            "temperature": rng.choice([0.7, 1.0, 1.5]),
            "resampling": rng.choice(["systematic", "stratified", "residual", "multinomial", "ssp"]),
            "logprobs": rng.random() < 0.3,
            "ignore_eos": rng.random() < 0.3,
            **({"top_k": 3} if rng.random() < 0.2 else {}),
            **({"alpha": 1.5} if rng.random() < 0.2 else {}),
        }
        yield request(prompt=[rng.randrange(4) for _ in range(rng.randrange(1, 9))], request_id=str(i), **params)


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_one_request(config):
    for seed in range(10):
        asked = request(seed=seed, particles=4, max_tokens=20)
        assert_same(answer(tiny_pair(), config, seed=seed, particles=4, max_tokens=20), resident(config, [asked])["r"])


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
@pytest.mark.parametrize("cohorts", [1, 2])
def test_many_requests_at_once(config, cohorts):
    config = replace(config, cohorts=cohorts)
    asked = list(mixed(40, random.Random(5)))
    expected, found = answers(local_engine(tiny_pair(), config), asked), resident(config, asked)
    for request_id, one in expected.items():
        assert_same(one, found[request_id])


class Padding(Stages):
    """As on a GPU, where rounds are padded to few shapes, but run as they are."""

    records = True


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_padding_changes_nothing(config, monkeypatch):
    asked = list(mixed(25, random.Random(6)))
    expected = resident(config, asked)
    monkeypatch.setattr("smc.engine.local.parts_for", lambda _device: Parts(stages=Padding))
    found = resident(config, asked)
    for request_id, one in expected.items():
        assert_same(one, found[request_id])


@pytest.mark.parametrize("method", ["target", "draft"])
def test_plain_decoding(method):
    config = EngineConfig(block=4)
    for seed in range(10):
        params = {"seed": seed, "method": method, "max_tokens": 1 + 3 * seed, "logprobs": method == "target"}
        assert_same(answer(tiny_pair(), config, **params), resident(config, [request(**params)])["r"])
