"""Over the other links and at the other degrees, with every rank in a thread: what an engine in this process
answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from services.coordinator.client import CoordinatorClient
from smc import demo
from smc.api.engine_config import EngineConfig
from smc.api.outputs import Answer
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.local_engine import ModelPair, local_engine
from tests.coordinator.harness import coordinator

KINDS = [
    {"particles": 6, "max_tokens": 18},
    {"method": "exact", "particles": 4, "max_tokens": 18, "guidance_scale": 1.6},
    {"method": "exact", "particles": 3, "max_tokens": 16, "constraint": {"regex": "[0-9 +=]{3,}"}},
    {"particles": 3, "max_tokens": 9, "constraint": {"choice": ["yes", "no"]}, "constraint_scope": "answer"},
    {"particles": 4, "max_tokens": 18, "ess_threshold": 1.0, "resampling": "residual"},
    {"method": "exact", "verification": "rejection", "particles": 3, "max_tokens": 18, "temperature": 1.5},
    {"method": "target", "max_tokens": 18, "logprobs": True, "top_logprobs": 3},
    {"method": "draft", "max_tokens": 18},
    {"particles": 3, "max_tokens": 24, "alpha": 1.2, "top_p": 0.9},
    {"method": "exact", "particles": 3, "max_tokens": 20, "constraint": {"regex": "[0-9 +=]{3,}"}},
    {"particles": 3, "max_tokens": 9, "constraint": {"choice": ["yes", "no"]}, "constraint_scope": "answer"},
]
ASKED = [Request(str(i), tuple(range(5, 12 + i)), SamplingParams(seed=i, **params)) for i, params in enumerate(KINDS)]
FORMS = {"lookahead": {"block": 4, "branches": 2, "cohorts": 2}, "lockstep": {"form": "lockstep", "block": 4}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("link", "draft_tp", "target_tp", "form"),
    [("grpc", 2, 1, "lookahead"), ("nccl", 2, 2, "lockstep"), ("grpc", 1, 4, "lockstep")],
)
def test_over_every_link_at_every_degree(link, draft_tp, target_tp, form):
    config = EngineConfig(**FORMS[form], drafting="always")
    engine = local_engine(ModelPair.load(demo.TARGET, demo.DRAFT), config)
    expected = {output.request_id: output.answer for output in engine.run(ASKED) if output.answer}
    with coordinator(config, link=link, draft_tp=draft_tp, target_tp=target_tp) as (made, spec):
        found = asyncio.run(_answers(made.address, spec.rendezvous.secret))
    for one in found:
        same = expected[one.request_id]
        assert (one.tokens, one.text, one.finish_reason) == (same.tokens, same.text, same.finish_reason)
        assert one.statistics.rounds == same.statistics.rounds
        assert one.statistics.log_z == pytest.approx(same.statistics.log_z, abs=1e-3)


@pytest.mark.slow
def test_exact_decoding_where_key_heads_are_repeated():
    """Three ranks of a target with 4 query heads and 2 key/value heads hold 2, 1 and 1 of each."""
    params = [{"method": "target"}, {"method": "exact", "particles": 4}]
    asked = [
        Request(f"{one['method']} {seed}", (5, 6, 7, 8), SamplingParams(seed=seed, max_tokens=24, **one))
        for seed in range(3)
        for one in params
    ]
    config = EngineConfig(**FORMS["lookahead"], drafting="always")
    alone = local_engine(ModelPair.load(demo.TARGET, demo.DRAFT), config)
    expected = {output.request_id: output.answer.tokens for output in alone.run(asked) if output.answer}
    with coordinator(config, link="grpc", target_tp=3) as (made, spec):
        found = asyncio.run(_answers(made.address, spec.rendezvous.secret, asked))
    assert {one.request_id: one.tokens for one in found} == expected
    tokens = {one.request_id: one.tokens for one in found}
    assert all(tokens[f"exact {seed}"] == tokens[f"target {seed}"] for seed in range(3))
    assert all(one.statistics.accepted_per_round > 1 for one in found if one.request_id.startswith("exact"))


async def _answers(address: str, secret: str, asked: Sequence[Request] = ASKED) -> list[Answer]:
    """To all at once."""
    client = CoordinatorClient(address, secret, lambda step: None, lambda: None)

    async def ask(request: Request) -> Answer:
        return [output async for output in client.generate(request)][-1].answer

    try:
        return await asyncio.gather(*map(ask, asked))
    finally:
        await client.close()
