"""Worker groups over every link and at several tensor-parallel degrees, with each rank in a thread, give the answers of
an engine in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from services.coordinator.client import CoordinatorClient
from smc import demo
from smc.api.engine_config import EngineConfig
from smc.api.request import Answer, Request
from smc.api.sampling_params import SamplingParams
from smc.demo.problems import generate
from smc.local_engine import ModelPair, local_engine
from tests.coordinator.harness import coordinator
from tests.recorded_answers import expect_short_answers

KINDS = [
    {"method": "smc", "particles": 6, "max_tokens": 9},
    {"method": "exact", "particles": 4, "max_tokens": 9, "guidance_scale": 1.6},
    {"method": "exact", "particles": 3, "max_tokens": 9, "constraint": {"regex": "[0-9 +=]{3,}"}},
    {
        "method": "smc",
        "particles": 3,
        "max_tokens": 9,
        "constraint": {"choice": ["yes", "no"]},
        "constraint_scope": "answer",
    },
    {"method": "smc", "particles": 4, "max_tokens": 9, "ess_threshold": 1.0, "resampling": "residual"},
    {"method": "exact", "verification": "rejection", "particles": 3, "max_tokens": 9, "temperature": 1.5},
    {"method": "target", "max_tokens": 9, "logprobs": True, "top_logprobs": 3},
    {"method": "draft", "max_tokens": 9},
    {"method": "smc", "particles": 3, "max_tokens": 11, "alpha": 1.2, "top_p": 0.9},
]
ASKED = [Request(str(i), tuple(range(5, 12 + i)), SamplingParams(seed=i, **params)) for i, params in enumerate(KINDS)]
FORMS = {"lookahead": {"block": 4, "branches": 2, "micro_batches": 2}, "lockstep": {"form": "lockstep", "block": 4}}
REDRAFTING = EngineConfig(block=4, branches=2, drafting="always", redrafting="always")


@pytest.mark.parametrize(
    ("link", "draft_tp", "target_tp", "form", "placement"),
    [
        pytest.param("grpc", 2, 3, "lookahead", "apart", marks=pytest.mark.slow),
        pytest.param("nccl", 1, 4, "lockstep", "apart", marks=pytest.mark.slow),
        ("nccl", 1, 1, "lockstep", "shared"),
        ("grpc", 1, 1, "lockstep", "shared"),
        ("nccl", 2, 2, "lockstep", "shared"),
        pytest.param("grpc", 1, 2, "lockstep", "shared", marks=pytest.mark.slow),
    ],
)
def test_over_every_link_at_every_degree(link, draft_tp, target_tp, form, placement):
    """Answers equal those of the in-process engine. Three ranks of a target with 4 query heads and 2 key/value heads
    hold 2, 1 and 1 query heads; four ranks hold one each. Key/value heads are then repeated."""
    expected = answers_here(form)
    degrees = {"draft_tp": draft_tp, "target_tp": target_tp}
    with coordinator(_config(form), link=link, placement=placement, **degrees) as (made, spec):
        found = asyncio.run(answers_of(made.address, spec.rendezvous.secret))
    for one in found:
        same = expected[one.request_id]
        assert (one.tokens, one.text, one.finish_reason) == (same.tokens, same.text, same.finish_reason)
        assert one.statistics.rounds == same.statistics.rounds
        assert one.statistics.log_z == pytest.approx(same.statistics.log_z, abs=1e-3)


@pytest.mark.parametrize(
    ("link", "draft_tp", "target_tp"),
    [("nccl", 1, 1), *(pytest.param(*one, marks=pytest.mark.slow) for one in (("grpc", 1, 2), ("nccl", 2, 3)))],
)
def test_over_every_link_after_misses(link, draft_tp, target_tp):
    """Where the draft drafts again after a miss, exact answers are those of the target, in the rounds of an engine in
    this process."""
    exact, here, expected = answers_after_misses()
    with coordinator(REDRAFTING, link=link, draft_tp=draft_tp, target_tp=target_tp) as (made, spec):
        found = asyncio.run(answers_of(made.address, spec.rendezvous.secret, exact))
    for one in found:
        assert one.tokens == expected[one.request_id.replace("exact", "target")].tokens
        assert one.statistics.rounds == here[one.request_id].statistics.rounds
    assert any(one.statistics.misses for one in found)


@pytest.mark.parametrize(("placement", "form"), [("apart", "lookahead"), ("shared", "lockstep")])
def test_exact_answers_in_bfloat16(placement, form):
    """Of the demo pair, for problems, whose near ties are rare: those of the target alone in one process. Half of them
    go on after the tokens that another worker group has delivered."""
    pair = ModelPair.load(demo.TARGET, demo.DRAFT, dtype=torch.bfloat16)
    questions = [problem.question for problem in generate(11, 4, "test")]

    def asked(number: int, **params: Any) -> Request:
        law = SamplingParams(seed=number, max_tokens=16, temperature=number % 2 * 0.7, **params)
        prompt = pair.tokenizer.chat([{"role": "user", "content": questions[number]}])
        return Request(str(number), tuple(prompt), law)

    plain = [asked(number, method="target") for number in range(4)]
    engine = local_engine(pair, _config(form))
    expected = {output.request_id: output.answer.tokens for output in engine.run(plain) if output.answer}
    exact = [asked(number, method="exact", particles=1 + number) for number in range(4)]
    exact[1:3] = [replace(one, confirmed=expected[one.request_id][:5]) for one in exact[1:3]]
    with coordinator(_config(form), placement=placement, dtype="bfloat16") as (made, spec):
        found = asyncio.run(answers_of(made.address, spec.rendezvous.secret, exact))
    assert {one.request_id: one.tokens for one in found} == expected
    assert {one.statistics.numerics for one in found} == {"fastest"}


def test_one_process_with_little_memory():
    """Requests that are preempted have the answers that they have with ample memory."""
    smc = {"method": "smc", "population": "independent", "ess_threshold": 0.0}
    law = {"particles": 4, "max_tokens": 20, "ignore_eos": True}
    asked = [
        Request(str(i), tuple(range(5 + i, 25 + i)), SamplingParams(seed=i, **law, **one))
        for i, one in enumerate((smc, smc, smc, smc, {"method": "exact"}))
    ]
    ample = EngineConfig(form="lockstep", block=4, drafting="always", max_context=128)
    engine = local_engine(ModelPair.load(demo.TARGET, demo.DRAFT), ample)
    expected = {output.request_id: output.answer.tokens for output in engine.run(asked) if output.answer}
    with coordinator(replace(ample, pages=150), placement="shared") as (made, spec):
        expect_short_answers(made._remote.engine)
        found = asyncio.run(answers_of(made.address, spec.rendezvous.secret, asked))
    assert {one.request_id: one.tokens for one in found} == expected
    assert sum(one.statistics.preemptions for one in found) > 0


def _config(form: str) -> EngineConfig:
    return EngineConfig(**FORMS[form], drafting="always")


@cache
def answers_here(form: str) -> dict[str, Answer]:
    engine = local_engine(ModelPair.load(demo.TARGET, demo.DRAFT), _config(form))
    return {output.request_id: output.answer for output in engine.run(ASKED) if output.answer}


@cache
def answers_after_misses() -> tuple[list[Request], dict[str, Answer], dict[str, Answer]]:
    """Return requests of exact decoding, their answers of an engine in this process, and those of the target."""
    law = {"max_tokens": 15, "ignore_eos": True, "temperature": 1.2}
    exact, plain = (
        [
            Request(f"{method} {i}", tuple(range(5, 9 + i)), SamplingParams(method=method, seed=i, **law, **rows))
            for i in range(4)
        ]
        for method, rows in (("exact", {"particles": 4}), ("target", {}))
    )
    engines = [
        local_engine(ModelPair.load(demo.TARGET, demo.DRAFT), one) for one in (REDRAFTING, EngineConfig(block=4))
    ]
    here, expected = (
        {output.request_id: output.answer for output in engine.run(asked) if output.answer}
        for engine, asked in zip(engines, (exact, plain))
    )
    return exact, here, expected


async def answers_of(address: str, secret: str, asked: Sequence[Request] = ASKED) -> list[Answer]:
    """Send all requests at once and return their answers."""
    client = CoordinatorClient(address, secret, lambda step: None, lambda: None)

    async def ask(request: Request) -> Answer:
        return [output async for output in client.generate(request)][-1].answer

    try:
        return await asyncio.gather(*map(ask, asked))
    finally:
        await client.close()
