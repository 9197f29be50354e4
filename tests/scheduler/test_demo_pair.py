"""The shipped pair at a temperature close to 0."""

from __future__ import annotations

import pytest

from smc import demo
from smc.api.engine_config import EngineConfig
from smc.api.request import FinishReason, Request
from smc.api.sampling_params import SamplingParams
from smc.demo.problems import generate
from smc.local_engine import ModelPair, local_engine
from tests.scheduler.harness import answers


@pytest.mark.slow
@pytest.mark.parametrize("config", [EngineConfig(form="lockstep", block=8)], ids=lambda c: c.form)
def test_nearly_greedy(config):
    """At temperature 0.05 no answer ends with an error."""
    pair = ModelPair.load(demo.TARGET, demo.DRAFT)
    asked = [
        Request(
            str(i),
            tuple(pair.tokenizer.encode(problem.question)),
            SamplingParams(method="smc", particles=8, temperature=0.05, seed=i, max_tokens=20),
        )
        for i, problem in enumerate(generate(31, 4, "test"))
    ]
    for answer in answers(local_engine(pair, config), asked).values():
        assert answer.error is None
        assert answer.finish_reason is FinishReason.EOS or len(answer.tokens) == 20
