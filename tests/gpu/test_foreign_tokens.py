"""A draft with foreign ids on a GPU: prompts have ids past its embedding, and answers are those of a CPU, up to
near-ties."""

from __future__ import annotations

import pytest
import torch

from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import Method, SamplingParams
from smc.demo.problems import generate
from smc.local_engine import ModelPair, local_engine
from tests.model.foreign import RELATIVES_VOCAB, USER, save_relatives
from tests.scheduler.harness import answers

FORMS = [EngineConfig(form="lockstep", block=5), EngineConfig(block=5, branches=4)]
METHODS = {
    Method.TARGET: {},
    Method.EXACT: {"particles": 4},
    Method.SMC: {"particles": 4, "ess_threshold": 0.0},
    Method.DRAFT: {},
}


@pytest.mark.parametrize("config", FORMS, ids=["lockstep", "look-ahead"])
def test_answers_are_the_cpu_s(tmp_path, config):
    """Of each method at least 7 of 8, and exact answers are the target's own."""
    places, think = save_relatives(tmp_path), RELATIVES_VOCAB - 1
    on_cpu, on_gpu = (ModelPair.load(*places, dtype=torch.float32, device=device) for device in ("cpu", "cuda:0"))
    chats = [on_cpu.tokenizer.chat([{"role": "user", "content": p.question}]) for p in generate(7, 8, "test")]
    asked = [
        Request(f"{method} {i}", (*chat, think), SamplingParams(method=method, seed=i, max_tokens=60, **more))
        for method, more in METHODS.items()
        for i, chat in enumerate(chats)
    ]
    assert all(USER in request.prompt for request in asked)
    expected, found = (answers(local_engine(pair, config), asked) for pair in (on_cpu, on_gpu))
    for method in METHODS:
        same = [found[f"{method} {i}"].tokens == expected[f"{method} {i}"].tokens for i in range(len(chats))]
        print(f"{method}: {sum(same)} of {len(same)} answers equal")
        assert sum(same) >= 7
    assert sum(found[f"exact {i}"].tokens == found[f"target {i}"].tokens for i in range(len(chats))) >= 7
    drafted = {token for i in range(len(chats)) for token in found[f"draft {i}"].tokens}
    assert not drafted & {USER, think}
