"""Whole requests that cross every size at which the engine changes its behaviour: ways to read the context, blocks,
padded batch sizes, reused pages."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.local_engine import local_engine
from smc.round.plan import SHORT, SHORT_SINGLE, Contexts
from tests.scheduler.harness import PaddingOps, answers
from tests.scheduler.pairs import tiny_pair
from tests.scheduler.random_histories import assert_same

CONTEXT = 700


def past_short() -> list[Request]:
    """Requests that begin on either side of the limit `SHORT`; some particles end long before others, or before the
    limit."""
    rng, asked = random.Random(1), []
    laws = [
        {"method": "smc", "particles": 5, "ess_threshold": 0.3, "stop": ("ababab", "cccc"), "logprobs": True},
        {"method": "smc", "particles": 3, "ess_threshold": 0.0, "stop_token_ids": (3,)},
        {"method": "target"},
        {"method": "smc", "particles": 9, "ess_threshold": 1.0, "alpha": 1.2},
    ]
    for i, size in enumerate((SHORT - 20, SHORT - 10, SHORT_SINGLE - 12, SHORT - 1, SHORT + 5, 40)):
        law = laws[i % len(laws)]
        prompt = tuple(rng.randrange(3) for _ in range(size))
        asked.append(
            Request(
                str(i), prompt, SamplingParams(seed=i, max_tokens=24, ignore_eos="stop_token_ids" not in law, **law)
            )
        )
    return asked


@pytest.mark.slow
def test_past_short_rows(monkeypatch):
    """In one batch, in chunks, with rounds requested ahead, in two micro-batches and on reused pages, each request
    answers as it does alone."""
    config, made, asked = EngineConfig(block=4, branches=3), tiny_pair(max_context=CONTEXT), past_short()
    expected = {one.request_id: answers(local_engine(made, config), [one])[one.request_id] for one in asked}
    lengths = {len(one.prompt) + len(expected[one.request_id].tokens) > SHORT for one in asked}
    assert lengths == {True, False}
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: PaddingOps())
    engine = local_engine(made, replace(config, micro_batches=2, prefill_chunk=100, pages=1900, max_slots=24))
    shapes, run = set(), engine.executor.round

    def shape_of(plan):
        return plan.kind.roles, plan.kind.contexts, plan.kind.batch_size

    engine.executor.round = lambda plan: (
        shapes.add(shape_of(plan)),
        run(plan),
    )[1]
    for again in range(2):
        found = answers(engine, [replace(one, request_id=f"{again}-{one.request_id}") for one in asked])
        for one in asked:
            assert_same(found[f"{again}-{one.request_id}"], expected[one.request_id])
    assert {contexts for _, contexts, _ in shapes} == set(Contexts)
    assert len({places for _, _, places in shapes}) > 3, "few sizes of batches were seen"
