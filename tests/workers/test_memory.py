"""A rank that has too little memory says what to lower, with numbers."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from services.coordinator.process import RemoteEngine
from services.launch.config import WorkerGroupConfig
from services.launch.worker_group import coordinator_spec, rank_spec
from services.link.connect import Rendezvous
from services.link.store import StoreServer
from services.workers import memory
from services.workers.process import load_rank, run_rank
from services.workers.spec import RankSpec
from smc.api.engine_config import MAX_PAGES, EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.executor.round_executor import DraftRunner
from smc.model.parallel import Shard
from smc.model.source import ModelSource
from tests.coordinator.harness import HOST, SECRET

LOCKSTEP = {"form": "lockstep", "block": 3, "drafting": "always"}


def no_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    store = StoreServer(HOST, SECRET, 30.0)
    yield Rendezvous(HOST, store.port, 1, SECRET, "nccl", 30.0)
    store.close()


def spec_of(rendezvous: Rendezvous, **engine) -> tuple[WorkerGroupConfig, RankSpec]:
    config = WorkerGroupConfig(placement="shared", engine=EngineConfig(**LOCKSTEP, **engine), start_timeout=30.0)
    return config, rank_spec(config, config.serving_pair(), rendezvous, "shared", Shard())


def test_pools_that_do_not_fit(rendezvous):
    """These would take terabytes, which the system refuses."""
    _, spec = spec_of(rendezvous, pages=MAX_PAGES)
    with pytest.raises(ValueError) as found:
        run_rank(spec, HOST)
    text = str(found.value)
    assert "the KV pools do not fit: pages=2000000000 take" in text and "GiB draft" in text and "GiB target" in text
    assert "lower pages, or max_context=512 and max_slots=64; of" in text


def test_weights_that_do_not_fit(rendezvous, monkeypatch):
    _, spec = spec_of(rendezvous)
    monkeypatch.setattr(ModelSource, "load", no_memory)
    with pytest.raises(ValueError) as found:
        load_rank(spec)
    text = str(found.value)
    assert "the weights do not fit: about" in text and "MiB draft" in text and "MiB target for each rank" in text
    assert "lower the types (draft_dtype=float32, target_dtype=float32; allowed: fp8, int4)" in text
    assert text.endswith("or raise draft_tp=1 and target_tp=1")


def test_rounds_that_do_not_fit(rendezvous, monkeypatch):
    """The coordinator's error has the advice, too: it is what the service logs and prints."""
    config, spec = spec_of(rendezvous)
    errors: list[Exception] = []

    def run() -> None:
        try:
            run_rank(spec, HOST)
        except Exception as error:
            errors.append(error)

    rank = threading.Thread(target=run, daemon=True)
    rank.start()
    remote = RemoteEngine(coordinator_spec(config, config.serving_pair(), rendezvous))
    monkeypatch.setattr(DraftRunner, "draft", no_memory)
    with pytest.raises(RuntimeError) as found:
        list(
            remote.engine.run(
                [Request("one", (1, 2, 3), SamplingParams(method="smc", particles=2, max_tokens=9, seed=1))]
            )
        )
    text = str(remote.cause(found.value))
    assert text.startswith("the worker of both models failed: ValueError: no memory is left for rounds and prompts (")
    assert f"lower pages={512 * 64}, max_slots=64, prefill_chunk=" in text
    rank.join(20)
    assert not rank.is_alive() and isinstance(errors[0], ValueError)


def test_a_pool_too_small_for_one_request(rendezvous, monkeypatch):
    """On a GPU with memory for so few pages."""
    _, spec = spec_of(rendezvous)
    monkeypatch.setattr(memory, "pages_with_room", lambda *_, **__: 100)
    with pytest.raises(ValueError, match=r"max_context=512 needs 522 KV pages, and there is memory for 100; .* a page"):
        run_rank(spec, HOST)
