"""After fan-out, resampling and remapping of block tables, the KV cache is what the particles' own tokens would give;
page accounts always balance."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.local_engine import local_engine
from smc.types import ModelRole
from tests.scheduler import pairs
from tests.scheduler.harness import (
    FORMS,
    assert_pages_follow,
    config_id,
    next_log_probs,
    open_particles,
    running,
    step_through,
)

CASES = [FORMS[0], pytest.param(FORMS[1], marks=pytest.mark.slow), FORMS[2]]
"""With one branch there is nothing to choose before block tables are remapped: that case is slow-only."""
MIXED = [
    {"method": "smc", "particles": 6, "ess_threshold": 1.0},
    {"method": "smc", "particles": 3, "ess_threshold": 0.5, "resampling": "multinomial"},
    {"method": "smc", "particles": 8, "ess_threshold": 1.0, "resampling": "residual", "alpha": 1.3},
    {"method": "smc", "particles": 1},
    {"method": "target"},
    {"method": "draft", "temperature": 0.0},
    {"method": "smc", "particles": 5, "ess_threshold": 0.9, "resampling": "ssp", "top_p": 0.95},
    {"method": "smc", "particles": 6},
    {"method": "exact", "particles": 5},
    {"method": "exact", "particles": 3, "temperature": 0.0, "logprobs": True},
    {"method": "smc", "particles": 4, "top_k": 3, "alpha": 1.2},
]


def mixed_requests(count: int, rng: random.Random, vocab: int = 4) -> list[Request]:
    return [
        Request(
            str(i),
            tuple(rng.randrange(vocab - 1) for _ in range(rng.randint(1, 9))),
            SamplingParams(seed=i, max_tokens=rng.randint(1, 16), ignore_eos=i % 3 == 0, **MIXED[i % len(MIXED)]),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("config", CASES, ids=config_id)
def test_slots_hold_the_tokens_of_their_particles(config):
    """After every step, the pages of each particle were written for exactly its tokens, prompt included."""
    assert_pages_follow(local_engine(pairs.tiny_pair(), config), mixed_requests(14, random.Random(0)))


@pytest.mark.parametrize("config", CASES, ids=config_id)
def test_next_token_law_equals_recomputation(config):
    """After each round, running a next token on a particle's KV gives the same distribution as a fresh run over all its
    tokens."""
    pair = pairs.tiny_pair()
    engine = local_engine(pair, config)
    engine.submit(
        Request(
            "r",
            (0, 1, 2),
            SamplingParams(method="smc", particles=6, ess_threshold=1.0, seed=5, max_tokens=14, ignore_eos=True),
        )
    )
    compared = 0

    def check(engine) -> None:
        nonlocal compared
        for group in running(engine):
            for side in ModelRole:
                for slot, tokens in open_particles(engine, group, side)[::3]:
                    for token in (0, 2):
                        ours = next_log_probs(engine.executor.runners[side], slot, len(tokens), token)
                        fresh = pairs.next_log_probs(getattr(pair, side), [*tokens, token])
                        assert (ours - fresh).abs().max() < 1e-4
                        compared += 1

    outputs = step_through(engine, check)
    assert outputs[-1].answer.statistics.resamples > 0
    assert compared > 20


def test_what_all_particles_agree_on_is_read_once():
    """A draft equal to the target, nearly greedy: particles agree, and each round's plan tells attention the length of
    their common prefix."""
    equal = replace(pairs.tiny_pair(), draft=pairs.tiny_pair().target)
    engine = local_engine(equal, EngineConfig(form="lookahead", block=2, branches=2))
    engine.submit(
        Request(
            "r",
            (0, 1, 2),
            SamplingParams(method="smc", particles=8, temperature=0.01, seed=0, max_tokens=30, ignore_eos=True),
        )
    )
    shared, run = [], engine.executor.round
    engine.executor.round = lambda plan: (shared.append(int(plan.arrays.shared_G[0])), run(plan))[1]
    step_through(engine, lambda _: None)
    assert shared == sorted(shared) and shared[0] == 3 and shared[-1] > 3 + 30 - 3 * 2
