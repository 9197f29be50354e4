"""The load test with a service that it starts itself: a run passes all checks, hundreds of further requests leak
nothing, and a signal under load loses no accepted request."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest

from loadtest.monitor import TITLE, ServedChild, scrape, serve
from services.client import Client, Message, ServiceError
from tests.service.running import open_files, resident_bytes

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.slow]

SHORTER = {"duration": 2, "warm-up": 0.5, "settle": 2, "rate": 4, "deadline": 120, "goodput": "e2el:120000"}
SERVICE = ("--block", "5", "--branches", "2", "--max-slots", "32", "--pages", "1024")
"""Small pools, so that the load and a few more requests have used every slot and page."""
QUESTION = [Message("user", "Mia has 12 apples. She buys 30 more. How many now?")]
WARM_UP, REQUESTS, TOGETHER = 64, 128, 16
MEBIBYTE = 1 << 20


def test_service_under_load_then_sigterm(loadtest, tmp_path, monkeypatch):
    """Runs the profile `smoke` for a shorter time, with an objective that only a broken service misses."""
    family: list[psutil.Process] = []

    @contextmanager
    def served(arguments: Sequence[str]) -> Iterator[ServedChild]:
        with serve(arguments) as child:
            yield child
            family.extend(psutil.Process(child.pid).children(recursive=True))
            hundreds_of_requests_leave_nothing_behind(child)
            a_signal_under_load_loses_nothing(child)

    monkeypatch.setattr("loadtest.cli.serve_child", served)
    options = [part for name, value in SHORTER.items() for part in (f"--{name}", value)]
    files = ("--json", tmp_path / "run.json", "--picture", tmp_path / "run.png")
    ran = loadtest("--profile", "smoke", "--serve", *options, *files, "--", *SERVICE)
    assert ran.code == 0, ran.out + ran.err
    assert "The objective was met" in ran.out
    written = json.loads((tmp_path / "run.json").read_text())
    ours = written["smcserve"]
    assert written["num_prompts"] == written["completed"] + ours["cancelled"] > 0 == written["failed"]
    assert {check["name"]: check["passed"] for check in ours["checks"]} == {
        **dict.fromkeys(("errors", "no worker was lost", "objective", "after the run", "KV pages leaked"), True)
    }
    assert ours["after"]["metrics"]['smc_kv_pages_leaked{group="target"}'] == 0
    assert ours["after"]["metrics"]["smc_slots_free"] == 32
    assert {"gateway", "coordinator", "draft rank 0", "target rank 0", "ray"} == set(ours["after"]["held"])
    assert (tmp_path / "run.png").stat().st_size > 10_000
    assert len(family) >= 5  # three actors and Ray's own
    assert not [process for process in psutil.wait_procs(family, timeout=10)[1] if is_alive(process)]


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def hundreds_of_requests_leave_nothing_behind(served: ServedChild) -> None:
    """Send hundreds of requests, and check open files and memory. Memory may still grow by a few MiB per process, which
    is less than a leak of 32 KB per request. `loadtest --profile soak` runs longer."""
    with Client(served.address) as client, ThreadPoolExecutor(TOGETHER) as pool:

        def ask(count: int) -> None:
            def one(i: int) -> None:
                params = {"method": "smc", "particles": 2} if i % 10 else {"method": "target"}
                client.generate(QUESTION, seed=i, timeout=60, max_tokens=4, **params)

            list(pool.map(one, range(count)))

        def books() -> dict[int, tuple[str, int, int]]:
            """For the gateway and the processes of the worker group, by pid: name, open files, resident bytes."""
            gateway = psutil.Process(served.pid)
            titles = {child.pid: " ".join(child.cmdline()).strip() for child in gateway.children(recursive=True)}
            ours = {served.pid: "gateway"} | {pid: title for pid, title in titles.items() if title.startswith(TITLE)}
            assert len(ours) == 4, ours
            return {pid: (name, open_files(pid), resident_bytes(pid)) for pid, name in ours.items()}

        ask(WARM_UP)
        before = books()
        children = set(psutil.Process(served.pid).children(recursive=True))
        ask(REQUESTS)
        until(lambda: is_empty(client, served), 15, "the engine did not become empty")
        after = books()
        assert set(psutil.Process(served.pid).children(recursive=True)) <= children
        assert after.keys() == before.keys(), "a process has been started again"
        for pid, (name, files, memory) in after.items():
            assert files <= before[pid][1], f"{name} has {files - before[pid][1]} more open files"
            grown = (memory - before[pid][2]) / MEBIBYTE
            assert grown < 4, f"{name} has grown by {grown:.1f} MiB in {REQUESTS} requests"


def is_empty(client: Client, served: ServedChild) -> bool:
    info, metrics = client.server_info(), scrape(served.metrics)
    leaked = [value for name, value in metrics.items() if name.startswith("smc_kv_pages_leaked")]
    return not (info.running or info.queued) and leaked == [0, 0]


def a_signal_under_load_loses_nothing(served: ServedChild) -> None:
    """Send a signal to the process group, like `timeout` or a terminal. Calls in flight finish, later ones get
    UNAVAILABLE, and the command ends with exit code 0."""
    with Client(served.address) as client, ThreadPoolExecutor(4) as pool:
        params = {"method": "smc", "particles": 2, "max_tokens": 100, "ignore_eos": True}
        calls = [pool.submit(client.generate, QUESTION, seed=i, timeout=60, **params) for i in range(4)]
        until(lambda: client.server_info().running == 4, 10, "the load did not arrive")
        os.killpg(served.pid, signal.SIGTERM)
        until(lambda: refuses(client), 5, "it takes new calls")
        assert [len(call.result(60).tokens) for call in calls] == [100] * 4
    assert psutil.Process(served.pid).wait(30) == 0


def refuses(client: Client) -> bool:
    """Return whether the service refuses calls: it closes its connections and accepts no new ones."""
    try:
        client.generate(QUESTION, seed=0, max_tokens=1)
    except ServiceError as error:
        return error.code.name == "UNAVAILABLE"
    return False


def until(condition: Callable[[], bool], timeout: float, what: str) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)
