"""Ranks in processes of their own, each with its GPU: NCCL between the leaders and within a model, at any degrees."""

from __future__ import annotations

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

ENGINE = EngineConfig(block=5, branches=4)


@pytest.fixture(scope="module")
def on_cpu() -> ModelPair:
    return ModelPair.load(demo.TARGET, demo.DRAFT)


def requests(pair: ModelPair, **params) -> list[Request]:
    prompts = [pair.tokenizer.chat([{"role": "user", "content": p.question}]) for p in generate(7, 16, "test")]
    return [Request(str(i), tuple(prompt), SamplingParams(seed=i, max_tokens=150, **params)) for i, prompt in enumerate(prompts)]


def ask(config: GangConfig, engine: EngineConfig, asked: list[Request]) -> dict[str, Answer]:
    draft, target = config.draft_tp, config.target_tp
    if torch.cuda.device_count() < draft + target:
        pytest.skip(f"needs {draft + target} GPUs")
    gpus = {"draft": list(range(draft)), "target": list(range(draft, draft + target))}
    with Processes(config, gpus) as processes, processes.engine(engine) as remote:
        return {output.request_id: output.answer for output in remote.engine.run(asked) if output.answer}


@pytest.mark.parametrize("link", ["nccl", "grpc"])
@pytest.mark.parametrize(("draft_tp", "target_tp"), [(1, 1), (1, 2), (1, 3), (2, 2)])
@pytest.mark.parametrize("engine", [ENGINE, EngineConfig(form="lockstep", block=8, cohorts=2)], ids=["look-ahead", "lockstep"])
def test_float32_answers_are_the_cpu_s(on_cpu, link, draft_tp, target_tp, engine):
    """Sums over ranks round otherwise than sums within one, so a near-tie may fall the other way."""
    asked = requests(on_cpu, particles=8)
    config = GangConfig(device="cuda", dtype="float32", link=link, draft_tp=draft_tp, target_tp=target_tp)
    expected, found = answers(local_engine(on_cpu, engine), asked), ask(config, engine, asked)
    same = sum(found[i].tokens == one.tokens for i, one in expected.items())
    print(f"{same} of {len(asked)} answers equal")
    assert same >= 14


def test_stop_strings_and_plain_decoding(on_cpu):
    asked = [*requests(on_cpu, particles=4, stop=("####",))[:8], *requests(on_cpu, method=Method.TARGET, stop=("=",))[8:]]
    config = GangConfig(device="cuda", dtype="float32")
    expected, found = answers(local_engine(on_cpu, ENGINE), asked), ask(config, ENGINE, asked)
    assert sum(found[i].tokens == one.tokens and found[i].matched == one.matched for i, one in expected.items()) >= 14
