"""Random JSON schemas: every answer that ends by itself is valid, by another library, and exact answers are those of
the target."""

from __future__ import annotations

import json
import random
from collections import Counter
from functools import cache

import jsonschema
import pytest

from smc.api.engine_config import EngineConfig
from smc.api.request import FinishReason
from smc.local_engine import ModelPair, local_engine
from tests.scheduler.harness import CASES, answers, config_id, request
from tests.scheduler.pairs import character_pair
from tests.scheduler.schemas import some_schema

PIECES = (
    '{"',
    '":',
    '","',
    '"},',
    "]}",
    '":[',
    "true",
    "alse",
    "null",
    "12",
    "-1",
    '"id',
    '"a"',
    "reen",
    "[1,",
    ': "',
    "ab",
)
LENGTH = 120
METHODS = {
    "target": {"method": "target"},
    "exact": {"method": "exact", "particles": 4},
    "distinct": {"particles": 3},
    "independent answer": {"particles": 3, "population": "independent", "constraint_scope": "answer"},
}


@cache
def pair() -> ModelPair:
    return character_pair(PIECES, LENGTH + 8)


def check(config: EngineConfig, numbers: range, of: ModelPair, prompt: tuple[int, ...] = (1, 2)) -> Counter:
    """Ask for answers to so many schemas by every method. Returns how many ended, and how, by method; and how many exact
    answers are not the target's."""
    schemas = {number: some_schema(random.Random(number)) for number in numbers}
    requests = [
        request(prompt, f"{name} {number}", seed=number, max_tokens=LENGTH, constraint={"json_schema": schema}, **how)
        for number, schema in schemas.items()
        for name, how in METHODS.items()
    ]
    found, counts = answers(local_engine(of, config), requests), Counter()
    for request_id, answer in found.items():
        name, _, number = request_id.rpartition(" ")
        counts[name, answer.finish_reason] += 1
        if answer.finish_reason is FinishReason.EOS:
            jsonschema.validate(json.loads(answer.text), schemas[int(number)])
        if name == "exact":
            counts["differs"] += answer.tokens != found[f"target {number}"].tokens
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("config", CASES[1:], ids=config_id)
def test_finished_answers_are_valid(config: EngineConfig):
    counts = check(config, range(7), pair())
    assert not counts.pop("differs")
    for name in METHODS:
        assert counts[name, FinishReason.EOS] > 4
    assert {reason for _, reason in counts} <= {FinishReason.EOS, FinishReason.LENGTH}


MORE = 14
"""Schemas of the slow test. 1,000, of both forms and every method, were all valid once: 8,000 answers."""


@pytest.mark.slow
@pytest.mark.parametrize("config", CASES[:1], ids=config_id)
def test_more_schemas(config: EngineConfig):
    counts = check(config, range(12, 12 + MORE), pair())
    assert not counts["differs"]
    for name in METHODS:
        assert counts[name, FinishReason.EOS] > 0.9 * MORE
