"""Ports that are in use are reported in one line, before Ray or a model is started."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest

from tests.ports import free_ports

LONGEST_SECONDS = 2.5
"""CPU seconds of the process: 1.3 on a quiet machine, 3.6 if it imported torch."""


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def no_start(monkeypatch):
    """Fails the test if Ray is started."""

    def connect(address: str | None) -> None:
        raise AssertionError("Ray was started before the ports were bound")

    monkeypatch.setattr("services.launch.cluster.connect", connect)


@pytest.mark.parametrize("flag", ["--port", "--http-port", "--metrics-port"])
def test_a_port_that_is_taken_is_said_before_anything_starts(smcserve, no_start, taken, flag):
    ports = {"--port": 0, "--http-port": 0, "--metrics-port": 0} | {flag: taken}
    ran = smcserve("serve", *(word for pair in ports.items() for word in pair))
    assert (ran.code, ran.out) == (2, "")
    assert (
        ran.err.count("\n") == 1 and f"cannot listen on 127.0.0.1:{taken} ({flag}): Address already in use" in ran.err
    )
    assert f"give another {flag}" in ran.err


def test_a_host_that_is_not_of_this_machine(smcserve, no_start):
    ran = smcserve("serve", "--host", "192.0.2.1", "--port", 0)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1) and "cannot listen on 192.0.2.1:0 (--port)" in ran.err


def test_a_taken_port_costs_no_time(taken):
    """Measured in CPU time of the process, so that a busy machine does not count."""
    grpc_port, metrics_port = free_ports(2)
    script = "import sys; from services.cli.main import run; sys.exit(run(sys.argv[1:]))"
    ports = ["--port", str(grpc_port), "--http-port", str(taken), "--metrics-port", str(metrics_port)]
    before, begin = _child_seconds(), time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", script, "serve", *ports], capture_output=True, text=True, timeout=60, check=False
    )
    used = min(time.monotonic() - begin, _child_seconds() - before)
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1 and used < LONGEST_SECONDS


def _child_seconds() -> float:
    import resource

    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
