"""What is freed while CUDA graphs are recorded: those of a discarded engine, and pinned memory in another thread."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from smc import demo
from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.demo.problems import generate
from smc.executor.graph_runner import AsyncResult, GraphRunner
from smc.local_engine import ModelPair, local_engine
from tests.scheduler.harness import answers


@pytest.fixture
def eager_collector():
    before = gc.get_threshold()
    gc.set_threshold(50, 1, 1)
    yield
    gc.set_threshold(*before)


def test_garbage_of_another_engine_ends_no_recording(eager_collector):
    """The discarded engine's graphs are in reference cycles, so the garbage collector frees them. It must not do so
    during a capture."""
    pair = ModelPair.load(demo.TARGET, demo.DRAFT, dtype=torch.float32, device="cuda")
    prompts = [pair.tokenizer.chat([{"role": "user", "content": p.question}]) for p in generate(7, 4, "test")]
    asked = [
        Request(str(i), tuple(prompt), SamplingParams(method="smc", seed=i, particles=4, max_tokens=60))
        for i, prompt in enumerate(prompts)
    ]
    found = []
    for _ in range(4):
        engine = local_engine(pair, EngineConfig(block=5, branches=2))
        found.append({name: answer.tokens for name, answer in answers(engine, asked).items()})
        engine.itself = engine
    assert gc.isenabled() and all(one == found[0] for one in found)


def test_a_thread_that_reads_a_result_does_not_spoil_a_recording():
    """Ranks read the results of prompts in a thread. If it frees their pinned memory while a round is recorded, torch
    fails when it next looks for free pinned memory."""
    runner = GraphRunner(torch.device("cuda:0"))
    there = torch.arange(1000, device="cuda:0")
    with runner.working():
        results = [AsyncResult((there.to("cpu", non_blocking=True),), runner.event(), {}) for _ in range(4)]

    def stage() -> tuple[torch.Tensor]:
        if torch.cuda.is_current_stream_capturing():
            reader.start()
            reader.join(0.5)
        return (there + 1,)

    reader = threading.Thread(target=lambda: [results.pop().result() for _ in range(4)])
    with runner.working():
        for _ in range(3):
            runner.run("key", "stage", stage)
    reader.join(20)
    assert not results
    torch.cuda.synchronize()
    torch._C._host_emptyCache()
    torch.empty(1000, pin_memory=True)
