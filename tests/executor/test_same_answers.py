"""Padding rounds to few shapes, requesting rounds ahead and batching with other requests do not change answers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from smc.api.engine_config import EngineConfig
from smc.local_engine import local_engine
from tests.pairwise import one_of
from tests.scheduler.harness import CASES, PaddingOps, answers, config_id, request
from tests.scheduler.pairs import tiny_pair

OTHERS = [EngineConfig(form="lockstep", block=1), EngineConfig(block=1, branches=3), EngineConfig(block=5, branches=1)]
CONFIGS = one_of((CASES[1], 2), (CASES[0], 2), *((config, 1) for config in OTHERS))


def assert_same(one, other):
    assert one.tokens == other.tokens
    assert one.finish_reason is other.finish_reason and one.matched == other.matched
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
            **({"stop": ("ab", "cca")} if rng.random() < 0.3 else {}),
        }
        yield request(prompt=[rng.randrange(4) for _ in range(rng.randrange(1, 9))], request_id=str(i), **params)


@pytest.mark.parametrize(
    ("config", "micro_batches"),
    CONFIGS,
    ids=lambda value: config_id(value) if isinstance(value, EngineConfig) else str(value),
)
def test_company_padding_and_asking_ahead(config, micro_batches, monkeypatch):
    """Each request alone, compared with all at once in padded rounds that are requested ahead."""
    asked = list(mixed(10, random.Random(5)))
    expected = [answers(local_engine(tiny_pair(), config), [one])[one.request_id] for one in asked]
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: PaddingOps())
    found = answers(local_engine(tiny_pair(), replace(config, micro_batches=micro_batches)), asked)
    for one in expected:
        assert_same(one, found[one.request_id])


@pytest.mark.parametrize("method", ["target", "draft"])
def test_greedy_decoding_in_blocks_of_any_size(method):
    settings = {"method": method, "temperature": 0.0, "ignore_eos": True}
    asked = [request([i % 3], str(i), max_tokens=1 + 3 * i, logprobs=method == "target", **settings) for i in range(10)]
    expected = answers(local_engine(tiny_pair(), EngineConfig(block=1)), asked)
    for block in (2, 4, 9):
        found = answers(local_engine(tiny_pair(), EngineConfig(block=block)), asked)
        for one in asked:
            assert_same(expected[one.request_id], found[one.request_id])
