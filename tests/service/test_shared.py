"""A service with placement `shared`: one process holds both models. Its answers are those of the in-process engine, and
exact answers go on after that process was killed."""

from __future__ import annotations

import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from services.gateway.config import GatewayConfig
from smc.api.engine_config import EngineConfig
from tests.service.asked import LOCKSTEP, all_are_the_engines_own, engines_own
from tests.service.running import Running, ranks
from tests.service.test_faults import LONG, NEEDS_DRAFT, QUESTION, SURVIVES, outcome

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module")
def shared(start) -> Iterator[Running]:
    """At the end the service stops, and every process that it has started must be gone."""
    before = ranks()
    with start(
        GatewayConfig(port=0, http_port=0, metrics_port=0),
        engine=EngineConfig(**LOCKSTEP | {"micro_batches": 1}),
        placement="shared",
    ) as running:
        yield running
    running.until(lambda: ranks() <= before, 20, "a process of the service stays")


def test_answers_are_the_engines_own(shared, demo_pair):
    with shared.client() as client:
        all_are_the_engines_own(client, shared.service.gateway.http_port, engines_own(demo_pair, LOCKSTEP))
    shared.until_empty()


def test_the_placement_is_named(shared):
    """In GetServerInfo with the pages of both pools, in the metrics, and by the names of the processes."""
    assert shared.pids().keys() == {"shared0", "coordinator"}
    assert "ray::smcserve: shared rank 0" in psutil.Process(shared.pids()["shared0"]).cmdline()[0]
    shared.until(lambda: bool(shared.supervisor.stats.pages_total), 20, "no pages were reported")
    with shared.client() as client:
        info = client.server_info()
    assert (info.placement, info.form, info.numerics) == ("shared", "lockstep", "fastest")
    assert set(shared.supervisor.stats.numerics) == {"draft", "target"}
    assert info.draft_pages == info.target_pages > 0
    page = f"http://127.0.0.1:{shared.service.gateway.metrics_port}/metrics"
    with urllib.request.urlopen(page, timeout=20) as response:
        assert 'placement="shared"' in response.read().decode()


@pytest.mark.slow
def test_two_ranks_choose_how_the_draft_is_divided(start):
    """GetServerInfo and GetModelInfo name their choice."""
    with (
        start(engine=EngineConfig(**LOCKSTEP | {"micro_batches": 1}), placement="shared", target_tp=2) as running,
        running.client() as client,
    ):
        (group,) = client.server_info().worker_groups
        models = client.model_info()
        exact, alone = (client.generate(QUESTION, method=method, **SURVIVES).tokens for method in ("exact", "target"))
    assert group.draft_tensor_parallel in (1, 2) and exact == alone
    assert (models.draft.tensor_parallel, models.target.tensor_parallel) == (group.draft_tensor_parallel, 2)


def test_the_process_dies_under_load(shared):
    """Both models are lost with it. Answers that consist of the target's own draws continue after the restart and are
    unchanged; the others end with UNAVAILABLE."""
    incarnation = shared.supervisor.incarnation
    with shared.client() as client, ThreadPoolExecutor(8) as pool:
        plain = client.generate(QUESTION, method="target", **SURVIVES).tokens
        lost = [pool.submit(outcome, client, **params) for params in (*NEEDS_DRAFT, {"seed": 1, **LONG})]
        methods = ({"method": "exact", "particles": 4}, {"method": "exact", "logprobs": True}, {"method": "target"})
        survive = [pool.submit(client.generate, QUESTION, timeout=120, **one, **SURVIVES) for one in methods]
        shared.until(lambda: shared.supervisor.stats.running == 7, 20, "the load did not arrive")
        shared.kill("shared0", signal.SIGKILL)
        assert [call.result(60) for call in lost] == ["UNAVAILABLE"] * 4
        shared.until(lambda: client.health() == "NOT_SERVING", 15, "the loss was not noticed")
        assert client.health("smc.draft") == client.health("smc.target") == "NOT_SERVING"
        shared.until(lambda: shared.supervisor.serving, 60, "the service did not come back")
        assert [call.result(60).tokens for call in survive] == [plain] * 3
        assert client.health() == client.health("smc.draft") == client.health("smc.target") == "SERVING"
        assert shared.supervisor.incarnation == incarnation + 1 == client.server_info().incarnation
        assert client.generate(QUESTION, seed=1, method="smc", particles=4, max_tokens=8).text
    shared.until_empty()
