"""After the service's warm-up, no kind of request compiles a kernel, and no engine step takes seconds. The warm-up
takes no more memory than a service reserves."""

from __future__ import annotations

import random
import time

import pytest
import torch
from triton import knobs

from smc.api.engine_config import NODES, EngineConfig
from smc.calibration.warm_up import UsualSampling, rare_requests, warm_up, warm_up_plans, warm_up_prompts
from smc.local_engine import ModelPair, local_engine
from smc.memory.kv_cache import RESERVED_BYTES
from smc.model.loader import random_model
from smc.model.presets import NoText, preset
from tests.scheduler.random_requests import AnySize, some_request

pytestmark = pytest.mark.timeout(600)
CONTEXT = 1024
FORMS = {
    "look-ahead": EngineConfig(block=5, max_slots=16, max_context=CONTEXT),
    "lockstep": EngineConfig(form="lockstep", block=5, max_slots=16, max_context=CONTEXT),
    "look-ahead, nodes": EngineConfig(block=5, max_slots=16, max_context=CONTEXT, verified=NODES),
    "lockstep, nodes": EngineConfig(form="lockstep", block=5, max_slots=16, max_context=CONTEXT, verified=NODES),
}
TIMES = 16
"""Number of times that requests are sent for each bound on their number."""
ROUND = 1.0
"""Seconds that a step may take, including the capture of a round of a new size."""


@pytest.mark.parametrize("config", FORMS.values(), ids=FORMS)
def test_no_user_waits_for_a_compiler(config):
    usual = UsualSampling.of({"top_p": 0.8, "repetition_penalty": 1.1} if config.form == "lockstep" else {})
    shape, draw, compiled, asked = preset("llama-1b"), random.Random(5), [], []
    target, draft = (random_model(shape, dtype=torch.bfloat16, device="cuda", seed=seed) for seed in (1, 2))
    # Without a latency model all rounds have whole trees, and no nodes.
    trees = AnySize(config) if config.verified == NODES else None
    engine = local_engine(ModelPair(target, draft, NoText(shape.vocab_size), CONTEXT), config, trees=trees)
    begin, (free, _) = time.monotonic(), torch.cuda.mem_get_info()
    warm_up_prompts(engine)
    warm_up(engine, warm_up_plans(config, engine.context, usual=usual))
    took = time.monotonic() - begin
    warm_up(engine, (), rare_requests(config, engine.context, shape.vocab_size))
    print(f"{config.form}: usual kinds {took:.1f} s, rarer kinds {time.monotonic() - begin - took:.1f} s")
    assert free - torch.cuda.mem_get_info()[0] < RESERVED_BYTES
    before, knobs.runtime.jit_post_compile_hook = (
        knobs.runtime.jit_post_compile_hook,
        lambda *args, **named: compiled.append((named.get("repr") or args, [request.params for request in asked[-3:]])),
    )
    longest, number = (0.0, None), 0
    try:
        # One request at a time, then several together.
        for most in (1, 1, 1, 1, 4):
            for _ in range(TIMES):
                together = draw.randint(1, most)
                for _ in range(together):
                    # Requests submitted together run together: they fit even if each has as many unconditional rows as
                    # rows.
                    asked.append(some_request(draw, number, shape.vocab_size, config.max_slots // (2 * together)))
                    engine.submit(asked[-1])
                    number += 1
                while not engine.idle:
                    begin = time.monotonic()
                    outputs = engine.step()
                    longest = max(longest, (time.monotonic() - begin, asked[-1].params), key=lambda pair: pair[0])
                    assert not [output.answer.error for output in outputs if output.answer and output.answer.error]
    finally:
        knobs.runtime.jit_post_compile_hook = before
    print(f"{config.form}: {number} requests, longest step {longest[0]:.3f} s: {longest[1]}")
    for name, params in compiled:
        print("compiled", str(name), params)
    assert not compiled
    assert longest[0] < ROUND, longest
