"""200 random JSON schemas on a GPU with the shipped pair: completed answers are valid, and exact answers equal the
target's."""

from __future__ import annotations

import pytest

from smc import demo
from smc.api.engine_config import EngineConfig
from smc.api.request import FinishReason
from smc.local_engine import ModelPair
from tests.scheduler.test_schemas import METHODS, check

FORMS = [EngineConfig(form="lockstep", block=5), EngineConfig(block=5, branches=4)]
SCHEMAS = 100
"""Number of schemas for each form."""
NEAR_TIES = 2
"""Number of answers that may differ, because a near-tie falls the other way in a pass over more positions."""


@pytest.mark.parametrize("config", FORMS, ids=["lockstep", "look-ahead"])
def test_finished_answers_are_valid(config: EngineConfig):
    pair = ModelPair.load(demo.TARGET, demo.DRAFT, device="cuda")
    prompt = tuple(pair.tokenizer.chat([{"role": "user", "content": "Mia has 12 apples."}]))
    first = SCHEMAS * FORMS.index(config)
    counts = check(config, range(first, first + SCHEMAS), pair, prompt)
    print({f"{key[0]} {key[1]}" if isinstance(key, tuple) else key: count for key, count in counts.items()})
    assert counts["differs"] <= NEAR_TIES
    for name in METHODS:
        assert counts[name, FinishReason.EOS] > SCHEMAS / 2
        assert counts[name, FinishReason.EOS] + counts[name, FinishReason.LENGTH] == SCHEMAS
