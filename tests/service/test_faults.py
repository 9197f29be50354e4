"""Processes that die, clients that leave: a clear code, no hang, no leak, nobody else harmed, and the service comes
back by itself."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import grpc
import pytest
import ray

from services.client import Message, ServiceError
from services.launch.cluster import WorkerGroupError
from services.launch.worker_group import ASK_SECONDS, PROBE_SECONDS, WorkerGroup
from tests.service.running import Running, ranks

pytestmark = pytest.mark.xdist_group("ray")

QUESTION = [Message("user", "Mia has 12 apples. She buys 30 more. How many now?")]
SURVIVES = {"seed": 3, "max_tokens": 40, "ignore_eos": True}
SHORT = SURVIVES | {"max_tokens": 20}
LONG = {"particles": 4, "max_tokens": 400, "ignore_eos": True}
NEEDS_DRAFT = [
    {"seed": 5, **LONG, "population": "independent"},
    {"seed": 5, **LONG, "population": "distinct"},
    {"seed": 5, "method": "draft", "max_tokens": 400, "ignore_eos": True},
]


@pytest.fixture(scope="module")
def alone(group) -> list[int]:
    """Tokens of the target's own answer."""
    with group.client() as client:
        return client.generate(QUESTION, method="target", **SURVIVES).tokens


@pytest.fixture(scope="module")
def lives() -> list[Held]:
    """What this process, where gateway and supervisor are, holds after every restart."""
    return []


class Held(NamedTuple):
    """Of a process, by kind and by name."""

    files: Counter[str]
    threads: Counter[str]


def note(lives: list[Held], group: Running) -> None:
    """After a restart."""
    with group.client() as client:
        client.generate(QUESTION, particles=2, max_tokens=4, timeout=60)
    group.until_empty()
    group.until(lambda: ranks() == set(group.pids().values()), 20, "processes of an earlier life stay")
    lives.append(held())


def end_a_life(group: Running) -> None:
    """By the coordinator's death."""
    group.until(lambda: group.supervisor.serving, 60, "the service did not come up")
    incarnation = group.supervisor.incarnation
    group.kill("coordinator", signal.SIGKILL)
    group.until(
        lambda: group.supervisor.incarnation > incarnation and group.supervisor.serving,
        60,
        "the service did not come back",
    )


def held() -> Held:
    """What nobody refers to any more, such as the channel of a failed call, may wait for the collector otherwise. Without
    asyncio's pool of threads: that takes another one whenever the last has not quite become idle. And without threads
    of libraries in C++: one that calls Python code once, to log something, stays in Python's list after its end."""
    gc.collect()
    known = [thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)]
    files, threads = Counter[str](), Counter(thread.name for thread in known)
    for file in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing
            files[re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{file}"))] += 1
    return Held(files, Counter({name: count for name, count in threads.items() if not name.startswith("asyncio_")}))


def outcome(client, **params) -> str:
    try:
        return client.generate(QUESTION, timeout=60, **params).finish_reason
    except ServiceError as error:
        return error.code.name


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("target0", signal.SIGKILL),
        pytest.param("target1", signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_process_dies_under_load(group, alone, lives, name, how):
    """Killed: noticed within 5 s. Stopped, which looks like a very slow process: after five seconds of silence. Answers
    that are the target's own draws go on where they were, and are those that they would have been."""
    group.until(lambda: group.supervisor.serving, 60, "the service did not come up")
    incarnation = group.supervisor.incarnation
    with group.client() as client, ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(outcome, client, seed=i, **LONG) for i in range(6)]
        methods = ({"method": "exact", "particles": 4}, {"method": "target"})
        survivors = [pool.submit(client.generate, QUESTION, timeout=120, **method, **SURVIVES) for method in methods]
        group.until(lambda: group.supervisor.stats.running == 8, 10, "the load did not arrive")
        begin = time.monotonic()
        group.kill(name, how)
        ended = [call.result(30) for call in calls]
        seconds = time.monotonic() - begin
        assert ended == ["UNAVAILABLE"] * 6
        assert seconds < (5 if how is signal.SIGKILL else 15)
        # A draft that has lost its target may be the first to say so.
        group.until(lambda: client.health() == "NOT_SERVING", 15, "the loss was not noticed")
        group.until(lambda: group.supervisor.serving, 60, "the service did not come back")
        assert group.supervisor.incarnation == incarnation + 1 == client.server_info().epoch
        assert client.health() == client.health("smc.draft") == client.health("smc.target") == "SERVING"
        assert client.generate(QUESTION, seed=1, particles=4, max_tokens=8).text
        assert [call.result(60).tokens for call in survivors] == [alone] * 2
    note(lives, group)


def test_the_draft_is_lost_under_load(group, alone):
    """The target goes on: answers of its own draws do not break off, and are those that they would have been; what
    needs the draft ends, is refused for a while, and is served again. No other process is started again."""
    group.until(lambda: group.supervisor.has_draft, 60, "the service did not come up")
    incarnation, before = group.supervisor.incarnation, group.pids()
    with group.client() as client, ThreadPoolExecutor(10) as pool:
        calls = [pool.submit(outcome, client, **params) for params in NEEDS_DRAFT]
        methods = (
            {"method": "exact", "particles": 4},
            {"method": "exact", "particles": 3, "logprobs": True},
            {"method": "target"},
        )
        survivors = [pool.submit(client.generate, QUESTION, timeout=120, **method, **SURVIVES) for method in methods]
        group.until(lambda: group.supervisor.stats.running == 6, 20, "the load did not arrive")
        begin = time.monotonic()
        group.kill("draft0", signal.SIGSTOP)
        assert [call.result(30) for call in calls] == ["UNAVAILABLE"] * 3
        assert time.monotonic() - begin < 14
        assert [client.health(name) for name in ("", "smc.draft", "smc.target")] == [
            "SERVING",
            "NOT_SERVING",
            "SERVING",
        ]
        for params in NEEDS_DRAFT:
            with pytest.raises(ServiceError) as caught:
                client.generate(QUESTION, timeout=30, **params)
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE and caught.value.retry_after
        assert client.generate(QUESTION, method="exact", timeout=60, particles=4, **SHORT).tokens == alone[:20]
        assert [call.result(60).tokens for call in survivors] == [alone] * 3
        group.until(lambda: group.supervisor.has_draft, 60, "the draft did not come back")
        assert group.supervisor.incarnation == incarnation + 1 == client.server_info().epoch
        assert {name: pid for name, pid in group.pids().items() if before[name] == pid}.keys() == before.keys() - {
            "draft0"
        }
        assert client.health() == client.health("smc.draft") == client.health("smc.target") == "SERVING"
        assert client.generate(QUESTION, seed=1, particles=4, max_tokens=8).text
        again = client.generate(QUESTION, method="exact", timeout=60, particles=4, **SHORT)
        assert again.tokens == alone[:20] and again.statistics.draft_tokens
    group.until_empty()


@pytest.mark.parametrize(("name", "is_draft"), [("coordinator", False), ("target1", False), ("draft0", True)])
def test_who_has_not_answered_for_five_seconds_of_waits_is_silent(group, name, is_draft):
    """Processes of the service are asked beside its own supervisor, by waits that nobody has waited; one is stopped for
    a moment."""
    group.until(lambda: group.supervisor.has_draft, 60, "the service did not come up")
    beside = WorkerGroup(group.supervisor._config, group.supervisor.pair, group.supervisor.incarnation)
    beside.actors = dict(group.supervisor.group.actors)
    names, pid = set(beside.actors), group.pids()[name]

    def wait_for_answers(of: set[str], seconds: float = 30) -> None:
        answered, _ = ray.wait([beside._probes[one] for one in of], num_returns=len(of), timeout=seconds)
        assert len(answered) == len(of)

    beside._look_for_silence(names, ASK_SECONDS / 2)
    assert not beside._probes
    beside._look_for_silence(names, ASK_SECONDS / 2)
    first = dict(beside._probes)
    assert first.keys() == names
    wait_for_answers(names)
    beside._look_for_silence(names, 2 * PROBE_SECONDS)
    assert not set(first.values()) & set(beside._probes.values())
    wait_for_answers(names)
    os.kill(pid, signal.SIGSTOP)
    try:
        beside._look_for_silence(names, ASK_SECONDS)
        # In five seconds the service's own supervisor would find it dead.
        wait_for_answers(names - {name}, 4)
        beside._look_for_silence(names, PROBE_SECONDS)
        with pytest.raises(WorkerGroupError, match=f"^{name} does not answer$") as caught:
            beside._look_for_silence(names, 0.1)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert caught.value.draft == is_draft
    wait_for_answers(names)
    beside._look_for_silence(names, PROBE_SECONDS)


@pytest.mark.slow
def test_calls_that_never_return_are_no_silence(group, lives):
    """Attaching a draft that dies meanwhile is one; several at a time are not the end of the worker group."""
    group.until(lambda: group.supervisor.serving, 60, "the service did not come up")
    incarnation, coordinator = group.supervisor.incarnation, group.supervisor.group.actors["coordinator"]
    waiting = [coordinator.wait.remote() for _ in range(8)]
    time.sleep(PROBE_SECONDS + 3)
    assert group.supervisor.serving and group.supervisor.incarnation == incarnation
    # Its threads are of no use to anybody now.
    end_a_life(group)
    del waiting
    note(lives, group)


@pytest.mark.slow
def test_no_life_leaves_anything_behind(group, lives):
    """After the restarts of the tests above, or others where those have not run. Pools of threads fill up as they are
    first used, so the first two lives say what is held; what every life leaves behind is then one more by the third."""
    while len(lives) < 3:
        end_a_life(group)
        note(lives, group)
    most = [max(counts.total() for counts in of_lives) for of_lives in zip(*lives[:2])]
    for _ in range(100):
        now = held()
        if all(counts.total() <= bound for counts, bound in zip(now, most)):
            return
        time.sleep(0.1)
    more = [dict(counts - first) for counts, first in zip(now, lives[1])]
    pytest.fail(f"{[[counts.total() for counts in each] for each in (*lives, now)]}, since the second life: {more}")


def test_clients_cancel_at_random_moments(group):
    """Some go before their first token, some in the middle; those who stay get the answers they would get alone."""
    rng = random.Random(0)
    with group.client() as client, ThreadPoolExecutor(12) as pool:
        alone = client.generate(QUESTION, seed=7, particles=4, max_tokens=60).text

        def leave(i: int) -> None:
            stream = client.stream(QUESTION, seed=i, **LONG)
            time.sleep(rng.random() * 0.3)
            stream.cancel()

        stays = [pool.submit(client.generate, QUESTION, seed=7, particles=4, max_tokens=60) for _ in range(4)]
        list(pool.map(leave, range(40)))
        assert [call.result(60).text for call in stays] == [alone] * 4
    group.until_empty()


def test_deadline_and_time_budget(group):
    with group.client() as client:
        begin = time.monotonic()
        with pytest.raises(ServiceError) as caught:
            client.generate(QUESTION, timeout=0.3, seed=1, **LONG)
        assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED and time.monotonic() - begin < 2
        group.until_empty()
        soft = client.generate(QUESTION, timeout=30, seed=1, time_budget=0.3, **LONG)
        assert soft.finish_reason == "time_budget" and 0 < len(soft.tokens) < 400
    group.until_empty()


def test_abort_frees_both_groups(group):
    with group.client() as client, ThreadPoolExecutor(1) as pool:
        call = pool.submit(outcome, client, seed=1, request_id="mine", **LONG)
        group.until(lambda: group.supervisor.stats.running == 1, 10, "the request did not start")
        assert client.abort("mine")
        assert call.result(10) == "CANCELLED"
        assert not client.abort("mine")
    group.until_empty()
