"""The whole service on two GPUs: Ray, one rank on each GPU, NCCL between them, and gRPC for clients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
import torch

from services.client import Client, Message
from services.launch import cluster
from services.launch.config import WorkerGroupConfig
from smc import demo
from smc.api.engine_config import EngineConfig
from smc.local_engine import ModelPair, local_engine
from tests.scheduler.harness import answers
from tests.service.asked import ASKED, engine_request, with_chats
from tests.service.running import Running

ENGINE = EngineConfig(block=5, branches=4)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    cluster.connect(None)
    made = Running(
        WorkerGroupConfig(device="cuda", dtype="float32", engine=ENGINE, start_timeout=300.0), start_seconds=300
    )
    try:
        yield made
    finally:
        made.stop()
        ray.shutdown()


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """The answers of the engine on a CPU."""
    pair = ModelPair.load(demo.TARGET, demo.DRAFT)
    asked = [engine_request(pair, i, question, dict(params)) for i, (question, params) in enumerate(ASKED)]
    found = answers(local_engine(pair, ENGINE), asked)
    return [found[str(i)].text for i in range(len(ASKED))]


def seconds(client: Client, law: dict) -> float:
    begin = time.monotonic()
    client.generate([Message("user", ASKED[0][0])], seed=1, max_tokens=100, ignore_eos=True, **law)
    return time.monotonic() - begin


NEAR_TIES = 1
"""Number of answers that may differ from the CPU's because a near-tie falls the other way."""


def assert_same(running: Running, expected: list[str]) -> None:
    """Compare answers to concurrent clients with those of the CPU. A few near-ties may differ; these are printed."""
    with running.client() as client, ThreadPoolExecutor(len(ASKED)) as pool:
        found = pool.map(
            lambda asked: client.generate([Message("user", asked[0])], timeout=100, **with_chats(asked[1])).text, ASKED
        )
        pairs = list(zip(ASKED, found, expected))
    different = [(params, text, one) for (_, params), text, one in pairs if text != one]
    for params, text, one in different:
        print(f"{params}: {text!r}, on the CPU {one!r}")
    assert len(different) <= NEAR_TIES


LAWS = [
    {},
    {"method": "smc"},
    {"method": "smc", "temperature": 0.7},
    {"method": "smc", "top_p": 0.9},
    {"method": "smc", "top_k": 30, "min_p": 0.02},
    {"method": "target", "top_p": 0.9},
    {"method": "smc", "population": "independent"},
    {"method": "exact", "verification": "rejection"},
    {"method": "smc", "alpha": 1.5},
    {"method": "smc", "logit_bias": {5: 1.0}},
]


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_no_request_compiles_a_kernel(running, law):
    with running.client() as client:
        first, second = seconds(client, law), seconds(client, law)
    print(f"first answer {first:.2f} s, second {second:.2f} s")
    assert first < second + 0.25


def test_clients_get_the_answers_of_the_cpu(running, expected):
    assert_same(running, expected)
    running.until_empty()


def test_a_dead_rank_is_replaced(running, expected):
    supervisor, incarnation, begin = running.supervisor, running.supervisor.incarnation, time.monotonic()
    running.kill("target0")
    running.until(
        lambda: supervisor.incarnation > incarnation and supervisor.serving, 200, "the service did not come back"
    )
    print(f"back after {time.monotonic() - begin:.1f} s")
    assert_same(running, expected)
    running.until_empty()
