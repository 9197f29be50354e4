"""The whole service on one GPU: one process holds both models."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

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
ENGINE = EngineConfig(form="lockstep", block=5, drafting="always")
SUMS = {
    "float32": {"dtype": "float32", "engine": ENGINE},
    "invariant": {"dtype": "bfloat16", "engine": replace(ENGINE, numerics="invariant")},
}
"""Orders of sums: the fastest ones in float32, and one order in bfloat16."""
NEAR_TIES = {"fastest": 2, "invariant": 0}
"""Number of answers that may differ from the target's alone, because sums that depend on company may decide a near tie
the other way."""
START = 540.0
"""Seconds of a start: one process compiles the kernels of both models."""
STREAMS, TOKENS = 16, 400


@contextmanager
def serving(sums: str, **changes: object) -> Iterator[Running]:
    """A service whose worker groups hold both models in one process. `sums`: one of `SUMS`."""
    cluster.connect(None)
    config = WorkerGroupConfig(device="cuda", placement="shared", start_timeout=START, **(SUMS[sums] | changes))
    made = Running(config, start_seconds=START)
    try:
        yield made
    finally:
        made.stop()
        ray.shutdown()


@pytest.fixture(scope="module", params=SUMS)
def running(request) -> Iterator[Running]:
    with serving(request.param) as made:
        yield made


in_float32 = pytest.mark.parametrize("running", ["float32"], indirect=True, scope="module")


def assert_streams_outlive(running: Running, rank: int) -> None:
    """Kill the process `rank` while every worker group streams exact answers. They must end with all tokens of the
    target's, but for near ties."""
    groups, seen = running.service.balancer.groups, [0] * STREAMS
    long = {"max_tokens": TOKENS, "ignore_eos": True, "timeout": 300}

    def streamed(seed: int) -> tuple[int, ...]:
        tokens: list[int] = []
        for chunk in client.stream(QUESTION, method="exact", seed=seed, particles=4, **long):
            tokens += chunk.tokens
            seen[seed] = len(tokens)
        return tuple(tokens)

    with running.client() as client, ThreadPoolExecutor(STREAMS) as pool:
        numerics = running.supervisor.pair.engine.numerics
        running.until(lambda: client.server_info().numerics == numerics, 20, "the ranks do not name this order of sums")
        seeds = range(STREAMS)
        plain = pool.map(lambda seed: client.generate(QUESTION, method="target", seed=seed, **long).tokens, seeds)
        plain = [tuple(tokens) for tokens in plain]
        calls = [pool.submit(streamed, seed) for seed in seeds]
        running.until(lambda: min(seen) >= TOKENS // 8, 60, "the load did not arrive")
        beside = [group.stats.running for group in groups[:2]]
        os.kill(rank, signal.SIGKILL)
        found = [call.result(300) for call in calls]
    assert min(beside) >= 4, "every worker group had streams"
    assert {len(tokens) for tokens in found} == {TOKENS}
    different = [seed for seed in seeds if found[seed] != plain[seed]]
    assert len(different) <= NEAR_TIES[numerics], different


@in_float32
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
    with running.client() as client:
        plain = client.generate(QUESTION, method="target", **SURVIVES).tokens
        # Found before the streams begin, which on a GPU end within a second.
        assert_streams_outlive(running, running.pids()["shared0"])
        assert client.generate(QUESTION, method="target", **SURVIVES).tokens == plain
    running.until_empty()
