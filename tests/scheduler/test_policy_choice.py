"""The policy's forecast against rounds of the demo pair, and its choice against fixed sizes, in replays under a virtual
clock. Replays of the same answers are deterministic."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from benchmarks.policy import TreeSize, compare, config_of, fixed_tokens
from benchmarks.traces import replay_engine, replayed_request
from smc.scheduler.speculation import MissRates, tokens_a_round
from smc.types import Decoding
from tests.benchmarks.test_policy import ANSWERS, LATENCY, library
from tests.pairwise import one_of

pytestmark = pytest.mark.xdist_group("policy")
"""Its tests share the replays of one process."""
SIZES = {
    "lookahead": [TreeSize(n, k, f) for n, k, f in ((1, 4, 4), (1, 6, 1), (1, 6, 4), (4, 4, 4), (4, 6, 1), (4, 6, 4))],
    "lockstep": [TreeSize(n, k, 1) for n, k in ((1, 2), (1, 4), (4, 2), (4, 4), (4, 6))],
}


@cache
def tokens(form: str) -> dict[TreeSize, float]:
    return fixed_tokens(library(), form, SIZES[form])


def learnt(form: str, size: TreeSize) -> MissRates:
    """Replay all answers with one size; return what the engine has learnt."""
    config = config_of(form, size, "always")
    engine = replay_engine(library(), replace(config, max_slots=ANSWERS * size.particles))
    for _ in engine.run([replayed_request(library(), n, size.particles) for n in range(ANSWERS)]):
        pass
    return engine.rounds_of(Decoding.WALK).acceptance.rates(config.lookahead)


@pytest.mark.parametrize("form", one_of("lockstep", "lookahead"))
def test_tokens_of_other_sizes_are_forecast(form):
    """From the rounds of one size, the engine forecasts the tokens a round of the others. Short answers confirm fewer
    than long ones: each begins with a round of one token."""
    rates = learnt(form, TreeSize(4, 5, 4 if form == "lookahead" else 1))
    error = {}
    for (n, k, f), found in tokens(form).items():
        forecast = tokens_a_round([rates], np.array([[n]]), f, k, form == "lookahead")
        error[n, k, f] = forecast.tokens[0, 0, -1, 0] / found - 1
    assert max(map(abs, error.values())) < 0.15, error
    assert np.std(list(error.values())) < 0.07


@pytest.mark.parametrize(
    ("form", "requests"), one_of(("lookahead", 1), ("lockstep", 1), ("lookahead", 4), ("lockstep", 4))
)
def test_the_choice_is_nearly_as_fast_as_the_best_fixed_size(form, requests):
    found = compare(library(), LATENCY, form, tokens(form), requests, turns=1)
    assert found.ratio > 0.95, str(found)
