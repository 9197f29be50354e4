"""`--draft-dtype auto`: chooses the type by the time of a step, which is measured once; on a CPU it is the type to
which a CPU converts all others."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
import torch

from services.coordinator.client import CoordinatorClient
from services.launch.config import WorkerGroupConfig
from smc import demo, draft_dtype, draft_step
from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.draft_dtype import LOSS, choose, step_seconds
from smc.loading import loaded_models
from smc.model.parallel import Shard
from smc.model.source import SourcePair
from smc.types import ModelRole
from tests.coordinator.harness import coordinator
from tests.model.tiny import tiny_config

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "smcserve" / "latency"


def test_a_narrower_type_must_gain_more_than_it_loses():
    own = "bfloat16"
    assert choose(own, {own: 1.0, "fp8": 0.94, "int4": 0.94}) == "fp8"
    assert choose(own, {own: 1.0, "fp8": 0.96, "int4": 0.86}) == own
    assert choose(own, {own: 1.0, "fp8": 0.7, "int4": 0.5}) == "int4"
    assert choose(own, {own: 1.0, "fp8": 0.7, "int4": 0.65}) == "fp8"
    assert choose(own, {own: 1.0, "int4": 0.77}) == own
    assert choose(own, {own: 1.0, "int4": 0.73}) == "int4"
    assert choose("int4", {"int4": 1.0, "fp8": 0.96}) == "int4", "what is stored so loses nothing"
    assert choose(own, {}) == own
    assert LOSS["int4"] > LOSS["fp8"] > 0


@pytest.fixture
def briefly(monkeypatch):
    """Measure steps as usual, but for a short time."""
    monkeypatch.setattr(
        draft_dtype, "EFFORT", replace(draft_dtype.EFFORT, seconds=0.02, repeats=1, untimed=0, crowd=1, context=32)
    )
    for module in (draft_dtype, draft_step):
        monkeypatch.setattr(module, "ROWS", 4)


def test_steps_are_measured_once_a_type(cache, briefly):
    config = tiny_config("llama", hidden_size=64, head_dim=16, intermediate_size=64, max_context=512)
    found = step_seconds(config, CPU, "float32")
    assert list(found) == ["float32", "fp8", "int4"] and all(0 < each < 10 for each in found.values())
    assert len(list(cache.glob("*.json"))) == 3
    assert step_seconds(config, CPU, "float32") == found
    assert len(list(cache.glob("*.json"))) == 3


def test_types_that_the_shape_does_not_have_are_left_out(briefly):
    """Ranks with 16 inputs have no int4 type, because an int4 group needs 32."""
    config = tiny_config("llama", hidden_size=64, head_dim=16, num_heads=2, intermediate_size=64, max_context=512)
    assert list(step_seconds(config, CPU, "float32", Shard(1, 2))) == ["float32", "fp8"]
    assert list(step_seconds(config, CPU, "float32", may_be_int4=False)) == ["float32", "fp8"]


def test_on_a_cpu(caplog):
    """Nothing is measured, and the models are loaded in the default type."""
    with caplog.at_level(logging.INFO, logger="smc.draft_dtype"):
        models = loaded_models("files", (demo.TARGET, demo.DRAFT), "cpu", None, draft_dtype="auto")
        pair = models.pair("cpu", "cpu")
    assert pair.draft.embed.weight.dtype == torch.float32 and models.dtypes[ModelRole.DRAFT] == "float32"
    assert [record.getMessage() for record in caplog.records] == [
        "draft-dtype auto: float32, because a CPU converts all types to it"
    ]
    sources = SourcePair.of("random", "llama-1b", "llama-1b")
    assert draft_dtype.draft_dtype(sources.draft, "cpu", "auto") == "float32"
    assert draft_dtype.draft_dtype(sources.draft, "cpu", "fp8") == "fp8"


def test_only_a_draft_s_type_is_chosen():
    for option, settings in (("dtype", {"dtype": "auto"}), ("target_dtype", {"target_dtype": "auto"})):
        with pytest.raises(ValueError, match=f"{option}='auto'; allowed: float32"):
            WorkerGroupConfig(**settings)
        with pytest.raises(ValueError, match=f"--{option.replace('_', '-')} auto; allowed: float32"):
            loaded_models("files", (demo.TARGET, demo.DRAFT), "cpu", **{"dtype": None, **settings})


def test_all_ranks_of_a_draft_have_the_same():
    async def ask(address: str, secret: str) -> int:
        client = CoordinatorClient(address, secret, lambda step: None, lambda: None)
        try:
            params = SamplingParams(method="exact", particles=2, max_tokens=8, seed=1, ignore_eos=True)
            outputs = [output async for output in client.generate(Request("a", (5, 6, 7), params))]
            return len(outputs[-1].answer.tokens)
        finally:
            await client.close()

    config = EngineConfig(form="lockstep", block=4, drafting="always")
    with coordinator(config, draft_tp=2, draft_dtype="auto") as (made, spec):
        assert asyncio.run(ask(made.address, spec.rendezvous.secret)) == 8
