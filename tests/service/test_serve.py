"""`smcserve serve` as a process of its own: the ports that it opens, its log, and the signals that end it.

A start costs as much as hundreds of other tests, so each one of the two services here shows several laws."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.deploy.machines import end_family
from tests.ports import free_ports

pytestmark = pytest.mark.xdist_group("ray")
PROGRAM = "import sys; from services.cli.main import main; sys.argv[0] = 'smcserve'; main()"


@contextmanager
def command(*arguments: object, log: Path) -> Iterator[psutil.Process]:
    """Run `smcserve serve` in a process of its own until it serves; at the end, end it with all its children."""
    ours = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with log.open("wb") as out:
        process = psutil.Popen(
            [sys.executable, "-c", PROGRAM, "serve", *map(str, arguments)], env=ours, stdout=out, stderr=out
        )
    try:
        wait_until_serving(process, log)
        yield process
    finally:
        if process.poll() is None:
            end_family(process)


def wait_until_serving(process: psutil.Popen, log: Path) -> None:
    deadline = time.monotonic() + 240
    while "serving on" not in (text := log.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, f"the service did not start: {text}"
        time.sleep(0.1)


@pytest.mark.slow
def test_open_ports_json_log_and_sighup(tmp_path):
    """Every line of the log is JSON, also of what Ray forwards from other processes, from the start to the end by
    SIGHUP, which drains."""
    log = tmp_path / "log"
    # The target has two ranks, so that it has a group, too.
    more = ("--target-tp", 2, "--log-format", "json")
    with hangups(signal.SIG_DFL), opened_to_the_network("nccl", *more, log=log) as process:
        process.send_signal(signal.SIGHUP)
        assert process.wait(120) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert all({"time", "level", "logger"} <= set(line) for line in lines)
    said = [(line.get("process", ""), line["message"]) for line in lines]
    assert any(
        process.startswith("smcserve: coordinator pid=") and "timed the models" in text for process, text in said
    )
    assert any("SIGHUP: draining, as after SIGTERM" in text for _, text in said)


@pytest.mark.slow
def test_open_ports_over_grpc_and_nohup(tmp_path):
    """Who starts a service by nohup wants it to survive the end of the terminal."""
    (config := tmp_path / "config.yaml").write_text("drafting: always\n")  # does not time the models
    with (
        hangups(signal.SIG_IGN),
        opened_to_the_network("grpc", "--config", config, log=tmp_path / "log") as process,
    ):
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    text = (tmp_path / "log").read_text()
    assert "SIGTERM: draining" in text and "SIGHUP" not in text


@contextmanager
def hangups(handler: signal.Handlers) -> Iterator[None]:
    """Let processes that are started in this context treat SIGHUP so, however the tests were started."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@contextmanager
def opened_to_the_network(link: str, *more: object, log: Path) -> Iterator[psutil.Process]:
    """Run a service with `--host 0.0.0.0`, and check that this opens the ports of callers and nothing else: neither Ray
    nor torch.distributed opens a port to the network."""
    ports = free_ports(3)
    given = [part for pair in zip(("--port", "--http-port", "--metrics-port"), ports) for part in pair]
    arguments = ("--host", "0.0.0.0", *given, "--link", link, "--max-slots", 16, *more)
    with command(*arguments, log=log) as process:
        processes = {one.name() for one in process.children(recursive=True)}
        assert {"gcs_server", "raylet"} <= processes and len(processes) > 5
        found = open_to_others(process)
        configured = {one for one in found if int(one.rpartition(":")[2]) in ports}
        assert len(configured) == 3, "the configured ports are not open: this test would see nothing"
        assert not set(found) - configured
        yield process


def open_to_others(process: psutil.Process) -> list[str]:
    """Return the sockets of a process and its descendants on which hosts of the network can reach them."""
    found = []
    for one in (process, *process.children(recursive=True)):
        for connection in one.net_connections("inet"):
            waits = connection.status == psutil.CONN_LISTEN or (connection.type == socket.SOCK_DGRAM)
            if waits and connection.laddr and not _is_loopback(connection.laddr.ip):
                found.append(f"{one.name()} on {connection.laddr.ip}:{connection.laddr.port}")
    return found


def _is_loopback(ip: str) -> bool:
    address = ipaddress.ip_address(ip)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
