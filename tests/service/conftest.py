from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import ray

from services.gateway.config import GatewayConfig
from services.launch import cluster
from services.launch.config import WorkerGroupConfig
from smc import demo
from smc.api.engine_config import EngineConfig
from smc.local_engine import ModelPair
from tests.service.asked import LOOKAHEAD
from tests.service.running import Running

HEARTBEAT = 0.3
POTENTIALS = {"indifferent": "tests.service.potentials:indifferent"}


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local cluster for all tests of this process."""
    cluster.connect(None)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def demo_pair() -> ModelPair:
    return ModelPair.load(demo.TARGET, demo.DRAFT)


@pytest.fixture(scope="session")
def group(start) -> Iterator[Running]:
    """A service that tests of several files share, because its actors take ten seconds of both cores to start. The
    target has two ranks, so that one of them talks only to its leader. Time limits other than those of `start` are the
    defaults."""
    gateway = GatewayConfig(port=0, http_port=0, metrics_port=0)
    with start(gateway, engine=EngineConfig(**LOOKAHEAD, potentials=POTENTIALS), target_tp=2) as running:
        yield running


@pytest.fixture(scope="session")
def start(ray_cluster) -> Callable:
    """Returns a context manager: `with start(link="grpc", ..) as running` starts a service and always stops it at the
    end."""

    @contextmanager
    def make(gateway: GatewayConfig | None = None, **group) -> Iterator[Running]:
        running = Running(WorkerGroupConfig(**{"heartbeat": HEARTBEAT, "start_timeout": 90.0, **group}), gateway)
        try:
            yield running
        finally:
            running.stop()

    return make
