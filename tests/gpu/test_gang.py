"""Ranks in processes of their own, each with its GPU: NCCL between the leaders and within a model, at any degrees."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from services.launch.config import GangConfig
from services.launch.processes import Processes
from smc import demo
from smc.demo.problems import generate
from smc.engine.config import EngineConfig
from smc.engine.local import ModelPair, local_engine
from smc.engine.request import Answer, Method, Request, SamplingParams
from tests.engine.harness import answers

FORMS = {"look-ahead": EngineConfig(block=5, branches=4), "lockstep": EngineConfig(form="lockstep", block=8, cohorts=2)}
GANGS = [("nccl", 1, 1), ("grpc", 1, 1), ("nccl", 1, 2), ("nccl", 1, 3), ("nccl", 2, 2), ("grpc", 2, 2)]


@pytest.fixture(scope="module")
def on_cpu() -> ModelPair:
    return ModelPair.load(demo.TARGET, demo.DRAFT)


@pytest.fixture(scope="module", params=GANGS, ids=lambda gang: "-".join(map(str, gang)))
def gang(request) -> Iterator[Processes]:
    """Models stay loaded for all tests of the same link and degrees."""
    link, draft, target = request.param
    if torch.cuda.device_count() < draft + target:
        pytest.skip(f"needs {draft + target} GPUs")
    config = GangConfig(device="cuda", dtype="float32", link=link, draft_tp=draft, target_tp=target)
    with Processes(config, {"draft": list(range(draft)), "target": list(range(draft, draft + target))}) as processes:
        yield processes


def requests(pair: ModelPair, **params) -> list[Request]:
    prompts = [pair.tokenizer.chat([{"role": "user", "content": p.question}]) for p in generate(7, 16, "test")]
    return [Request(str(i), tuple(prompt), SamplingParams(seed=i, max_tokens=150, **params)) for i, prompt in enumerate(prompts)]


def ask(gang: Processes, engine: EngineConfig, asked: list[Request]) -> dict[str, Answer]:
    with gang.engine(engine) as remote:
        return {output.request_id: output.answer for output in remote.engine.run(asked) if output.answer}


@pytest.mark.parametrize("form", FORMS)
def test_float32_answers_are_the_cpu_s(on_cpu, gang, form):
    """Sums over ranks round otherwise than sums within one, so a near-tie may fall the other way."""
    asked = requests(on_cpu, particles=8)
    expected, found = answers(local_engine(on_cpu, FORMS[form]), asked), ask(gang, FORMS[form], asked)
    same = sum(found[i].tokens == one.tokens for i, one in expected.items())
    print(f"{same} of {len(asked)} answers equal")
    assert same >= 14


def test_stop_strings_and_plain_decoding(on_cpu, gang):
    engine = FORMS["look-ahead"]
    asked = [*requests(on_cpu, particles=4, stop=("####",))[:8], *requests(on_cpu, method=Method.TARGET, stop=("=",))[8:]]
    expected, found = answers(local_engine(on_cpu, engine), asked), ask(gang, engine, asked)
    assert sum(found[i].tokens == one.tokens and found[i].matched == one.matched for i, one in expected.items()) >= 14
