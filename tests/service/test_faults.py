"""Processes that die and clients that leave: calls end with a clear code, nothing hangs or leaks, other calls are
unharmed, and the service recovers by itself."""

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
from services.launch.config import WorkerGroupError
from services.launch.supervisor import MAX_THREADS
from services.launch.worker_group import ASK_SECONDS, PROBE_SECONDS, WorkerGroup
from tests.service.running import Running, ranks

pytestmark = pytest.mark.xdist_group("ray")

QUESTION = [Message("user", "Mia has 12 apples. She buys 30 more. How many now?")]
SURVIVES = {"seed": 3, "max_tokens": 40, "ignore_eos": True}
SHORT = SURVIVES | {"max_tokens": 20}
LONG = {"method": "smc", "particles": 4, "max_tokens": 400, "ignore_eos": True}
NEEDS_DRAFT = [
    {"seed": 5, **LONG, "population": "independent"},
    {"seed": 5, **LONG, "population": "distinct"},
    {"seed": 5, "method": "draft", "max_tokens": 400, "ignore_eos": True},
]


@pytest.fixture(scope="module")
def alone(group) -> list[int]:
    """The tokens of the target's own answer to `SURVIVES`."""
    with group.client() as client:
        return client.generate(QUESTION, method="target", **SURVIVES).tokens


@pytest.fixture(scope="module")
def lives() -> list[Held]:
    """The resources that this process, which runs gateway and supervisor, holds after each restart."""
    return []


class Held(NamedTuple):
    """Open files and threads of a process, counted by name."""

    files: Counter[str]
    threads: Counter[str]


def note(lives: list[Held], group: Running) -> None:
    """Record what this process holds after a restart, once the service has answered and only ranks of the present
    worker group are left."""
    with group.client() as client:
        client.generate(QUESTION, particles=2, max_tokens=4, timeout=60)
    group.until_empty()
    group.until(lambda: ranks() == set(group.pids().values()), 20, "processes of an earlier life stay")
    lives.append(held())


def end_a_life(group: Running) -> None:
    """Kill the coordinator and wait until the worker group has restarted."""
    group.until(lambda: group.supervisor.serving, 60, "the service did not come up")
    incarnation = group.supervisor.incarnation
    group.kill("coordinator", signal.SIGKILL)
    group.until(
        lambda: group.supervisor.incarnation > incarnation and group.supervisor.serving,
        60,
        "the service did not come back",
    )


def held() -> Held:
    """Count the open files and threads of this process, after a garbage collection: unreferenced objects, such as the
    channel of a failed call, may still hold some. Threads of asyncio's pool and of the supervisor's are not counted:
    both are bounded, and grow whenever their last thread is not quite idle. Threads of C++ libraries are not counted
    either: one that has called Python code once, for example to log, stays in Python's list after its end."""
    gc.collect()
    known = [thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)]
    files, threads = Counter[str](), Counter(thread.name for thread in known)
    for file in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            files[re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{file}"))] += 1
    pooled = ("asyncio_", "supervisor_")
    return Held(files, Counter({name: count for name, count in threads.items() if not name.startswith(pooled)}))


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
    """A killed process is noticed within 5 s. A stopped one, which looks like a very slow process, is noticed after
    five seconds of silence. Answers that the target draws itself continue after the restart and are unchanged."""
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
        # The draft may be the first to report that its target is gone.
        group.until(lambda: client.health() == "NOT_SERVING", 15, "the loss was not noticed")
        group.until(lambda: group.supervisor.serving, 60, "the service did not come back")
        assert group.supervisor.incarnation == incarnation + 1 == client.server_info().incarnation
        assert client.health() == client.health("smc.draft") == client.health("smc.target") == "SERVING"
        assert client.generate(QUESTION, seed=1, method="smc", particles=4, max_tokens=8).text
        assert [call.result(60).tokens for call in survivors] == [alone] * 2
    note(lives, group)


def test_the_draft_is_lost_under_load(group, alone):
    """The target goes on: answers that it draws itself are neither interrupted nor changed. Calls that need the draft
    end with UNAVAILABLE, as do new ones until another draft has started. No other process restarts."""
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
        assert group.supervisor.incarnation == incarnation + 1 == client.server_info().incarnation
        assert {name: pid for name, pid in group.pids().items() if before[name] == pid}.keys() == before.keys() - {
            "draft0"
        }
        assert client.health() == client.health("smc.draft") == client.health("smc.target") == "SERVING"
        assert client.generate(QUESTION, seed=1, method="smc", particles=4, max_tokens=8).text
        again = client.generate(QUESTION, method="exact", timeout=60, particles=4, **SHORT)
        assert again.tokens == alone[:20] and again.statistics.draft_tokens
    group.until_empty()


@pytest.mark.parametrize(("name", "is_draft"), [("coordinator", False), ("target1", False), ("draft0", True)])
def test_silent_process_is_reported(group, name, is_draft):
    """A second WorkerGroup object probes the processes of the running service, with waiting times that the test makes
    up. While one process is stopped, only that one is reported as silent, after `PROBE_SECONDS` of such time."""
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
        # After five seconds the service's own supervisor would report the process as dead.
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
def test_blocked_calls_are_not_silence(group, lives):
    """Calls to the coordinator that do not return, such as attaching a draft that dies meanwhile, do not count as
    silence: eight at a time do not end the worker group."""
    group.until(lambda: group.supervisor.serving, 60, "the service did not come up")
    incarnation, coordinator = group.supervisor.incarnation, group.supervisor.group.actors["coordinator"]
    waiting = [coordinator.wait.remote() for _ in range(8)]
    time.sleep(PROBE_SECONDS + 3)
    assert group.supervisor.serving and group.supervisor.incarnation == incarnation
    # The coordinator's threads are blocked for good, so restart the worker group.
    end_a_life(group)
    del waiting
    note(lives, group)


@pytest.mark.slow
def test_restarts_leak_nothing(group, lives):
    """Restarts leave no open files or threads behind. Counts the restarts of the tests above, or causes its own if
    those have not run. Thread pools fill up on first use, so the larger count of the first two runs is the limit; a
    leak in every run exceeds it by the third. No call of an earlier life holds a thread of the supervisor: the pool can
    run as many calls at once as it has threads, but for the check of the present life."""
    while len(lives) < 3:
        end_a_life(group)
        note(lives, group)
    together = threading.Barrier(MAX_THREADS)
    calls = [group.supervisor._threads.submit(together.wait, 20) for _ in range(MAX_THREADS - 1)]
    together.wait(20)
    assert len({call.result(20) for call in calls}) == MAX_THREADS - 1
    most = [max(counts.total() for counts in of_lives) for of_lives in zip(*lives[:2])]
    for _ in range(100):
        now = held()
        if all(counts.total() <= bound for counts, bound in zip(now, most)):
            return
        time.sleep(0.1)
    more = [dict(counts - first) for counts, first in zip(now, lives[1])]
    pytest.fail(f"{[[counts.total() for counts in each] for each in (*lives, now)]}, since the second life: {more}")


def test_clients_cancel_at_random_moments(group):
    """Clients that cancel before their first token or in the middle of an answer do not affect others: those that stay
    get the answers they would get alone."""
    rng = random.Random(0)
    with group.client() as client, ThreadPoolExecutor(12) as pool:
        alone = client.generate(QUESTION, seed=7, method="smc", particles=4, max_tokens=60).text

        def leave(i: int) -> None:
            stream = client.stream(QUESTION, seed=i, **LONG)
            time.sleep(rng.random() * 0.3)
            stream.cancel()

        stays = [
            pool.submit(client.generate, QUESTION, seed=7, method="smc", particles=4, max_tokens=60) for _ in range(4)
        ]
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
    """An abort ends a call with CANCELLED and releases its pages at both models."""
    with group.client() as client, ThreadPoolExecutor(1) as pool:
        call = pool.submit(outcome, client, seed=1, request_id="mine", **LONG)
        group.until(lambda: group.supervisor.stats.running == 1, 10, "the request did not start")
        assert client.abort("mine")
        assert call.result(10) == "CANCELLED"
        assert not client.abort("mine")
    group.until_empty()
