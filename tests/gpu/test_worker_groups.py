"""Two worker groups, each with both models on a GPU of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
import torch

from services.launch import cluster
from services.launch.config import WorkerGroupConfig
from smc import demo
from smc.api.engine_config import EngineConfig
from smc.local_engine import ModelPair, local_engine
from tests.gpu.test_service import assert_same
from tests.gpu.test_shared import START
from tests.scheduler.harness import answers
from tests.service.asked import ASKED, engine_request
from tests.service.running import Running
from tests.service.test_faults import QUESTION

pytestmark = pytest.mark.timeout(900)
ENGINE = EngineConfig(form="lockstep", block=5)
STREAMS, TOKENS, NEAR_TIES = 16, 400, 2


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    cluster.connect(None)
    config = WorkerGroupConfig(
        device="cuda", dtype="float32", placement="shared", worker_groups="auto", engine=ENGINE, start_timeout=START
    )
    made = Running(config, start_seconds=START)
    try:
        yield made
    finally:
        made.stop()
        ray.shutdown()


def test_answers_are_those_of_a_cpu(running):
    pair = ModelPair.load(demo.TARGET, demo.DRAFT)
    asked = [engine_request(pair, i, question, dict(params)) for i, (question, params) in enumerate(ASKED)]
    found = answers(local_engine(pair, ENGINE), asked)
    assert len(running.service.balancer.groups) == torch.cuda.device_count()
    assert_same(running, [found[str(i)].text for i in range(len(ASKED))])


def test_streams_go_on_at_once_after_a_kill(running):
    """All streams finish, nearly all with the answers of an undisturbed service (float32 sums depend on company, so a
    near-tie may fall the other way), and no other worker group restarts."""
    groups = running.service.balancer.groups
    with running.client() as client, ThreadPoolExecutor(STREAMS) as pool:

        def streamed(seed: int) -> tuple[int, ...]:
            long = {"max_tokens": TOKENS, "ignore_eos": True, "particles": 4}
            tokens: list[int] = []
            for chunk in client.stream(QUESTION, method="exact", seed=seed, timeout=300, **long):
                tokens += chunk.tokens
                seen[seed] = len(tokens)
            return tuple(tokens)

        seen = [0] * STREAMS
        alone = list(pool.map(streamed, range(STREAMS)))
        rank = running.pids(1)["shared0"]  # found first: on a GPU streams end within a second
        seen[:] = [0] * STREAMS
        calls = [pool.submit(streamed, seed) for seed in range(STREAMS)]
        running.until(lambda: min(seen) >= TOKENS // 8, 20, "the load did not arrive")
        beside = [group.stats.running for group in groups[:2]]
        os.kill(rank, signal.SIGKILL)
        found = [call.result(300) for call in calls]
    assert min(beside) >= 4, "both worker groups had streams"
    assert {len(tokens) for tokens in found} == {TOKENS}
    assert sum(one != other for one, other in zip(found, alone)) <= NEAR_TIES
    assert groups[0].incarnation == 1
    running.until(lambda: groups[1].serving and groups[1].incarnation == 2, START, "the worker group did not come back")
