"""`grpc.health.v1`: Check, List and Watch follow the state that is set, whichever client watches and however slowly it
reads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

from services.vllm import VLLM
from tests.gateway.harness import serving

SERVING, NOT_SERVING, UNKNOWN = (
    pb.HealthCheckResponse.SERVING,
    pb.HealthCheckResponse.NOT_SERVING,
    pb.HealthCheckResponse.SERVICE_UNKNOWN,
)
NAMES = ("", "smc.v1.GenerationService", VLLM, "smc.draft", "smc.target")


@pytest.fixture
def starting(pair):
    with serving(pair, ready=False, drain_timeout=1.0) as service:
        yield service


@pytest.fixture
def health(starting):
    with grpc.insecure_channel(starting.address) as channel:
        yield health_pb2_grpc.HealthStub(channel)


def states(health) -> list[int]:
    return [health.Check(pb.HealthCheckRequest(service=name)).status for name in NAMES]


def test_the_gateway_is_alive_whatever_its_workers_are(starting, health):
    """The health name for liveness probes always reports SERVING: restarting this process would not help workers that
    are starting again."""
    alive = pb.HealthCheckRequest(service="smc.gateway")
    for ready in (False, True, False):
        starting.set_health(draft=ready, target=ready)
        assert health.Check(alive).status == SERVING


def test_check_follows_the_groups(starting, health):
    """The service is ready when the target is; without a draft it decodes with the target alone."""
    assert states(health) == [NOT_SERVING] * 5
    starting.set_health(draft=True, target=False)
    assert states(health) == [NOT_SERVING, NOT_SERVING, NOT_SERVING, SERVING, NOT_SERVING]
    starting.set_health(draft=True, target=True)
    assert states(health) == [SERVING] * 5
    starting.set_health(draft=False, target=True)
    assert states(health) == [SERVING, SERVING, SERVING, NOT_SERVING, SERVING]
    assert (
        starting.metric("smc_group_healthy", group="target") == 1
        and starting.metric("smc_group_healthy", group="draft") == 0
    )
    listed = {name: answer.status for name, answer in health.List(pb.HealthListRequest()).statuses.items()}
    assert listed == dict(zip(NAMES, states(health))) | {"smc.gateway": SERVING}


def test_watch_says_every_change(starting, health):
    """A watcher of a name receives each change of its state once; setting the same state again sends nothing."""
    watches = {name: health.Watch(pb.HealthCheckRequest(service=name)) for name in (*NAMES, "nothing")}
    assert [next(watch).status for watch in watches.values()] == [NOT_SERVING] * 5 + [UNKNOWN]
    for _ in range(3):
        starting.set_health(draft=True, target=True)
        assert [next(watches[name]).status for name in NAMES] == [SERVING] * 5
        starting.set_health(draft=True, target=True)
        starting.set_health(draft=False, target=True)
        assert next(watches["smc.draft"]).status == NOT_SERVING
        starting.set_health(draft=False, target=False)
        assert [next(watches[name]).status for name in NAMES if name != "smc.draft"] == [NOT_SERVING] * 4


def test_a_watcher_that_does_not_read_holds_up_nobody(starting, health):
    """A watcher that does not read, whose window fifty changes overflow, does not delay others: they see the latest
    state at once."""
    window = [("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0)]
    with grpc.insecure_channel(starting.address, window) as channel:
        slow = health_pb2_grpc.HealthStub(channel).Watch(pb.HealthCheckRequest())
        assert next(slow).status == NOT_SERVING
        for i in range(51):
            starting.set_health(draft=i % 2 == 0, target=i % 2 == 0)
        assert states(health) == [SERVING] * 5
        assert next(health.Watch(pb.HealthCheckRequest())).status == SERVING


def test_drain_reports_not_serving(starting, health):
    """A drain reports NOT_SERVING to every watcher and then ends its stream."""
    starting.set_health(draft=True, target=True)
    watch = health.Watch(pb.HealthCheckRequest())
    assert next(watch).status == SERVING
    with ThreadPoolExecutor(1) as thread:
        # Read before the end: when a connection breaks, gRPC discards messages that no one has requested.
        told = thread.submit(next, watch)
        starting.do(starting.gateway.drain())
        assert told.result().status == NOT_SERVING
    with pytest.raises(grpc.RpcError):
        next(watch)
