"""A service with two worker groups behind one address: requests are spread over both and answered as by one, a prompt
goes where its beginning is cached, and the loss of one worker group touches no request of the other."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from loadtest.monitor import parse
from services.client import Client
from services.gateway.config import GatewayConfig
from smc.api.engine_config import EngineConfig
from tests.service.asked import LOCKSTEP, all_are_the_engines_own, engines_own
from tests.service.running import Running, ranks
from tests.service.test_faults import LONG, QUESTION, outcome

pytestmark = pytest.mark.xdist_group("ray")
STREAM = {"max_tokens": 150, "ignore_eos": True}
"""Settings of streams that take seconds, so that a process can be killed in their middle."""


@pytest.fixture(scope="module")
def two(start) -> Iterator[Running]:
    """At the end the service stops, and every process that it has started must be gone."""
    before = ranks()
    with start(
        GatewayConfig(port=0, http_port=0, metrics_port=0),
        engine=EngineConfig(**LOCKSTEP | {"micro_batches": 1}),
        placement="shared",
        worker_groups=2,
    ) as running:
        yield running
    running.until(lambda: ranks() <= before, 20, "a process of the service stays")


def running_at(two: Running) -> list[int]:
    """Return the number of requests that hold slots, by worker group."""
    return [group.stats.running for group in two.service.balancer.groups]


def test_answers_are_the_engines_own(two, demo_pair):
    """Requests of every kind that arrive together are spread over both worker groups, and each gets the answer that one
    engine gives for its seed."""
    before = max(two.service.balancer.last_sent)
    with two.client() as client:
        all_are_the_engines_own(client, two.service.gateway.http_port, engines_own(demo_pair, LOCKSTEP))
    assert min(two.service.balancer.last_sent) > before + 8, "the last ones went to one worker group alone"
    two.until(lambda: running_at(two) == [0, 0], 20, "the engines did not become empty")


def test_each_worker_group_is_named(two):
    """In GetServerInfo, in the metrics, in health checks, over HTTP, and by the names of the processes."""
    for number in (0, 1):
        (line,) = psutil.Process(two.pids(number)["shared0"]).cmdline()[:1]
        assert f"ray::smcserve: worker group {number}, shared rank 0" in line
    with two.client() as client:
        info = client.server_info()
        assert {"smc.worker_group.0", "smc.worker_group.1", "smc.target"} < client.states().keys()
        assert [client.health(f"smc.worker_group.{number}") for number in (0, 1)] == ["SERVING"] * 2
    states = [(group.serving, group.has_draft, group.incarnation) for group in info.worker_groups]
    assert states == [(True, True, 1)] * 2 and info.incarnation == 2 and info.draft_pages > 0
    idle = {"serving": True, "has_draft": True, "running": 0, "waiting": 0}
    url = f"http://127.0.0.1:{two.service.gateway.http_port}"
    for path in ("/load", "/page/settings"):
        with urllib.request.urlopen(url + path, timeout=20) as response:
            assert json.load(response)["worker_groups"] == [idle] * 2
    page = scraped(two)
    for number in (0, 1):
        assert f'smc_group_healthy{{group="target",model_name="target",worker_group="{number}"}} 1.0' in page
    assert page.count("# TYPE smc_slots_free gauge") == 1
    assert parse(page)["smc_slots_capacity"] == 2 * two.supervisor.pair.engine.max_slots


def test_a_prompt_goes_where_its_beginning_is_cached(two):
    """Long prompts that arrive one after another while no request runs: the next turn of a chat follows the first one,
    and a new chat goes to the worker group that was idle longest. The engines report as many cached tokens."""
    texts = [f"{name} has {i} apples. " * 12 for i, name in enumerate(("Mia", "Tom", "Ann", "Leo"))]
    with two.client() as client:
        first = [sent_to(two, client, text) for text in texts]
        assert {number for number, _ in first} == {0, 1} and [cached for _, cached in first] == [0] * 4
        for text, (number, _) in zip(texts, first):
            again, cached = sent_to(two, client, text + "How many now?")
            assert again == number and cached > 0


def sent_to(two: Running, client: Client, text: str) -> tuple[int, int]:
    """Send a prompt. Return the number of the worker group that got it, and the prompt's cached tokens."""
    before = max(two.service.balancer.last_sent)
    usage = client.generate(text, method="target", max_tokens=4, seed=1).usage
    (number,) = (number for number in (0, 1) if two.service.balancer.last_sent[number] > before)
    return number, usage.cached_tokens


@pytest.mark.slow
def test_one_worker_group_is_lost_under_load(two):
    """Eight exact streams, four at each worker group, and an SMC call at each. One worker group's rank is killed. Its
    exact streams go on at the other worker group at once; all answers are those of an undisturbed service. Its SMC
    call ends with UNAVAILABLE, the other one ends well. Meanwhile the service is ready and takes new requests; in the
    end the lost worker group takes requests again."""
    groups = two.service.balancer.groups
    with two.client() as client, ThreadPoolExecutor(16) as pool:
        plain = [pool.submit(client.generate, QUESTION, method="target", seed=seed, **STREAM) for seed in range(8)]
        alone = [call.result(60).tokens for call in plain]
        populations = [pool.submit(outcome, client, seed=seed, **LONG) for seed in range(2)]
        two.until(lambda: running_at(two) == [1, 1], 20, "the SMC calls were not spread")
        streams = [pool.submit(streamed, client, seed) for seed in range(8)]
        two.until(lambda: running_at(two) == [5, 5], 20, "the streams were not spread")
        incarnations = [group.incarnation for group in groups]
        two.kill("shared0", worker_group=1)
        two.until(lambda: not groups[1].serving, 15, "the loss was not noticed")
        assert client.health() == client.health("smc.draft") == "SERVING"
        assert [client.health(f"smc.worker_group.{number}") for number in (0, 1)] == ["SERVING", "NOT_SERVING"]
        assert [group.serving for group in client.server_info().worker_groups] == [True, False]
        assert client.generate(QUESTION, seed=3, particles=2, max_tokens=4).tokens
        two.until(lambda: running_at(two)[0] >= 9, 15, "the streams did not go on at once")
        assert [call.result(120) for call in streams] == alone
        assert sorted(call.result(120) for call in populations) == ["UNAVAILABLE", "length"]
        two.until(lambda: groups[1].serving, 90, "the worker group did not come back")
        assert [group.incarnation for group in groups] == [incarnations[0], incarnations[1] + 1]
        latest = max(two.service.balancer.last_sent)
        calls = [
            pool.submit(client.generate, QUESTION, seed=seed, method="smc", particles=4, max_tokens=40)
            for seed in range(4)
        ]
        assert all(call.result(60).tokens for call in calls) and two.service.balancer.last_sent[1] > latest
    page = scraped(two)
    for number in (0, 1):
        assert f'smc_worker_restarts_total{{model_name="target",worker_group="{number}"}} {number}.0' in page


def streamed(client: Client, seed: int) -> tuple[int, ...]:
    """Return the tokens of a stream, as they came."""
    return tuple(
        token
        for chunk in client.stream(QUESTION, method="exact", particles=4, seed=seed, **STREAM)
        for token in chunk.tokens
    )


def scraped(two: Running) -> str:
    page = f"http://127.0.0.1:{two.service.gateway.metrics_port}/metrics"
    with urllib.request.urlopen(page, timeout=20) as response:
        return response.read().decode()


def test_a_drain_waits_for_both_worker_groups(two):
    """A drain lets calls at both worker groups finish, and refuses new ones. The last test: it ends the service."""
    with two.client() as client, ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(client.generate, QUESTION, seed=seed, method="smc", particles=4, **STREAM) for seed in range(2)
        ]
        two.until(lambda: running_at(two) == [1, 1], 20, "the calls were not spread")
        draining = two.begin(two.service.stop(drain=True))
        two.until(lambda: outcome(client, seed=1, max_tokens=4) == "UNAVAILABLE", 15, "a draining service takes calls")
        assert [len(call.result(120).tokens) for call in calls] == [STREAM["max_tokens"]] * 2
    draining.result(60)
