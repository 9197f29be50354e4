"""K of requests whose answers depend on it (`smc_block`): they are those of an engine with that K, alone and beside
requests that draft longer blocks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from smc.api.engine_config import EngineConfig
from smc.api.request import Answer, Request
from smc.local_engine import local_engine
from tests.pairwise import few, few_of_pairs
from tests.scheduler.harness import PaddingOps, answers, assert_empty, assert_pages_follow, config_id, request
from tests.scheduler.pairs import tiny_pair

FORMS = [
    EngineConfig(form="lockstep", block=8, max_slots=64, max_chains=16),
    EngineConfig(form="lookahead", block=8, branches=3, max_slots=64, max_chains=16),
]
WAYS = {
    "independent": {"method": "smc", "population": "independent"},
    "distinct": {"method": "smc", "population": "distinct"},
    "rejection": {"method": "exact", "verification": "rejection"},
}


def pair():
    return tiny_pair(8, scale=1.0, draft_seed=5, max_context=160)


def asked(way: str, count: int = 4, max_tokens: int = 30) -> list[Request]:
    given = {"max_tokens": max_tokens, "ignore_eos": True, "logprobs": True, **WAYS[way]}
    return [request([2, 1, i], f"{way} {i}", particles=3 + i % 2, seed=i, **given) for i in range(count)]


def walks(count: int = 3, max_tokens: int = 24) -> list[Request]:
    given = {"method": "exact", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.4}
    return [request([1, i], f"walk {i}", particles=4, seed=i, **given) for i in range(count)]


def assert_same(found: Answer, expected: Answer) -> None:
    assert found.tokens == expected.tokens
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    if expected.statistics.log_z is not None:
        assert found.statistics.log_z == pytest.approx(expected.statistics.log_z, abs=1e-4)
    assert found.statistics.rounds == expected.statistics.rounds


@pytest.mark.parametrize(("config", "way", "padded"), few(product(FORMS, WAYS, (False, True))))
def test_answers_are_those_of_an_engine_with_that_k(config, way, padded, monkeypatch):
    if padded:
        monkeypatch.setattr("smc.local_engine.ops_for", lambda device: PaddingOps())
    for block in (5, 3):
        expected = answers(local_engine(pair(), replace(config, block=block)), asked(way))
        given = config if block == 5 else replace(config, smc_block=block)
        found = answers(local_engine(pair(), given), asked(way))
        for name, one in found.items():
            assert_same(one, expected[name])


@pytest.mark.parametrize(("config", "drafting"), few_of_pairs(product(FORMS, ("adaptive", "always"))))
def test_company_with_longer_blocks_changes_nothing(config, drafting):
    """Walks begin alone, with blocks of 8 tokens in flight; the others join them."""
    config = replace(config, drafting=drafting)
    of_ways, first = [asked(way, 2, 20) for way in WAYS], walks(max_tokens=16)
    ways = [one for of_way in of_ways for one in of_way]
    # Walks give the target's own answers.
    plain = [
        replace(one, params=replace(one.params, method="target", particles=None, verification=None)) for one in first
    ]
    alone = {
        name: one for some in (*of_ways, plain) for name, one in answers(local_engine(pair(), config), some).items()
    }
    engine, found = local_engine(pair(), config), {}
    for one in (*first, None, None, *ways):
        if one is not None:
            engine.submit(one)
        outputs = engine.step()
        found |= {output.answer.request_id: output.answer for output in outputs if output.answer}
    for output in engine.run([]):
        if output.answer:
            found[output.answer.request_id] = output.answer
    assert_empty(engine)
    assert found.keys() == alone.keys()
    for name, one in found.items():
        assert one.tokens == alone[name].tokens
        if not name.startswith("walk"):
            assert_same(one, alone[name])


@pytest.mark.parametrize("config", FORMS, ids=config_id)
def test_pages_hold_the_tokens_of_their_particles(config):
    assert_pages_follow(local_engine(pair(), config), [*walks(), *(one for way in WAYS for one in asked(way, 2))])


def test_it_is_at_most_a_block():
    assert EngineConfig(block=4).fixed_block == 4
    assert EngineConfig(block=8).fixed_block == 5
    with pytest.raises(ValueError, match=r"smc_block=6; allowed: 1..4 \(block\)"):
        EngineConfig(block=4, smc_block=6)
