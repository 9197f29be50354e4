"""The whole service on one GPU: one process holds both models."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray

from services.launch import cluster
from services.launch.config import WorkerGroupConfig
from smc import demo
from smc.api.engine_config import EngineConfig
from smc.local_engine import ModelPair, local_engine
from tests.gpu.test_service import assert_same
from tests.scheduler.harness import answers
from tests.service.asked import ASKED, engine_request
from tests.service.running import Running
from tests.service.test_faults import QUESTION, SURVIVES

pytestmark = pytest.mark.timeout(900)
ENGINE = EngineConfig(form="lockstep", block=5)
START = 540.0
"""Seconds of a start: one process compiles the kernels of both models."""


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    cluster.connect(None)
    config = WorkerGroupConfig(device="cuda", dtype="float32", placement="shared", engine=ENGINE, start_timeout=START)
    made = Running(config, start_seconds=START)
    try:
        yield made
    finally:
        made.stop()
        ray.shutdown()


def test_answers_are_those_of_a_cpu(running):
    """Both pools are equally large, and the answers are those of the engine on a CPU, but for a near-tie."""
    pair = ModelPair.load(demo.TARGET, demo.DRAFT)
    asked = [engine_request(pair, i, question, dict(params)) for i, (question, params) in enumerate(ASKED)]
    found = answers(local_engine(pair, ENGINE), asked)
    assert_same(running, [found[str(i)].text for i in range(len(ASKED))])
    with running.client() as client:
        info = client.server_info()
    assert info.placement == "shared" and info.draft_pages == info.target_pages > 0
    running.until_empty()


def test_exact_answers_go_on_after_a_kill(running):
    with running.client() as client, ThreadPoolExecutor(2) as pool:
        long = {"method": "exact", "max_tokens": 400, "ignore_eos": True}
        plain = client.generate(QUESTION, method="target", **SURVIVES).tokens
        calls = [pool.submit(client.generate, QUESTION, timeout=300, seed=seed, **long) for seed in (1, 2)]
        running.until(lambda: running.supervisor.stats.running == 2, 20, "the load did not arrive")
        running.kill("shared0", signal.SIGKILL)
        assert all(call.result(300).tokens for call in calls)
        assert client.generate(QUESTION, method="target", **SURVIVES).tokens == plain
