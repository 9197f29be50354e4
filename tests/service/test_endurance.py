"""Hundreds of requests in a row leave nothing behind; a signal under load loses nothing that was let in."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from services.client import Client, Message, ServiceError
from smc.api.engine_config import EngineConfig
from tests.service.running import open_files, resident_bytes

pytestmark = pytest.mark.xdist_group("ray")

QUESTION = [Message("user", "Mia has 12 apples. She buys 30 more. How many now?")]
WARM_UP, REQUESTS = 120, 200
SMALL = {"particles": 2, "max_tokens": 4}
MEBIBYTE = 1 << 20


@pytest.mark.slow
def test_hundreds_of_requests_in_a_row(start):
    """Memory may still settle by a few MiB a process: a leak of 30 KB a request would be seen. Longer: `loadtest
    --profile soak`. Pools are so small that the warm-up has used all of them."""
    service = start(engine=EngineConfig(block=5, branches=2, max_slots=16, pages=1024))
    with service as running, running.client() as client, ThreadPoolExecutor(4) as pool:

        def ask(count: int) -> None:
            def one(i: int) -> None:
                params = SMALL if i % 10 else {"method": "target", "max_tokens": 4}
                client.generate(QUESTION, seed=i, timeout=30, **params)

            list(pool.map(one, range(count)))

        def books() -> dict[str, tuple[int, int]]:
            pids = running.pids() | {"gateway": os.getpid()}
            return {name: (open_files(pid), resident_bytes(pid)) for name, pid in pids.items()}

        ask(WARM_UP)
        processes, before = running.pids(), books()
        children = {child.pid for child in psutil.Process().children(recursive=True)}
        ask(REQUESTS)
        running.until_empty()
        after = books()
        assert running.pids() == processes
        assert {child.pid for child in psutil.Process().children(recursive=True)} <= children
        for name, (files, memory) in after.items():
            assert files <= before[name][0], f"{name} has {files - before[name][0]} more open files"
            grown = (memory - before[name][1]) / MEBIBYTE
            assert grown < 6, f"{name} has grown by {grown:.1f} MiB in {REQUESTS} requests"


@pytest.mark.slow
def test_sigterm_under_load(tmp_path):
    """The command itself, by a signal to its process group, as of `timeout` or a terminal: calls in flight finish, later
    ones get UNAVAILABLE, exit code 0, no process stays."""
    log = tmp_path / "log"
    command = [
        sys.executable,
        "-c",
        "from services.cli.main import main; main()",
        "serve",
        "--port",
        "0",
        "--no-http",
        "--block",
        "5",
    ]
    with log.open("w") as out:
        served = subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | {"COLUMNS": "400"}, start_new_session=True
        )
    try:
        port = _port(served, log)
        family = psutil.Process(served.pid).children(recursive=True)
        with Client(f"127.0.0.1:{port}") as client, ThreadPoolExecutor(4) as pool:
            params = {"particles": 4, "max_tokens": 200, "ignore_eos": True}
            calls = [pool.submit(client.generate, QUESTION, seed=i, timeout=60, **params) for i in range(4)]
            _wait(lambda: client.server_info().running == 4, 10)
            os.killpg(served.pid, signal.SIGTERM)
            _wait(lambda: _refuses(client), 5)
            assert [len(call.result(60).tokens) for call in calls] == [200] * 4
        assert served.wait(30) == 0, log.read_text()
        _wait(
            lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family), 10
        )
    finally:
        served.kill()


def _refuses(client: Client) -> bool:
    """Connections are told to go elsewhere, and new ones are not taken."""
    try:
        client.generate(QUESTION, seed=0, max_tokens=1)
    except ServiceError as error:
        return error.code.name == "UNAVAILABLE"
    return False


def _port(served: subprocess.Popen, log: Path) -> int:
    def found() -> re.Match | None:
        assert served.poll() is None, log.read_text()
        return re.search(r"serving on 127\.0\.0\.1:(\d+)", log.read_text())

    _wait(found, 90)
    return int(found().group(1))


def _wait(condition, timeout: float) -> None:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < timeout, "it did not happen in time"
        time.sleep(0.05)
