"""A service on one machine listens on the loopback interface only, apart from the addresses that its user configures:
neither Ray nor torch.distributed opens a port to the network."""

from __future__ import annotations

import ipaddress
import os
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


@pytest.mark.parametrize("link", ["nccl", pytest.param("grpc", marks=pytest.mark.slow)])
def test_only_configured_addresses_are_open(tmp_path, link):
    """`--host` opens the ports of callers, and nothing else. The target has two ranks, so that it has a group, too."""
    ports = free_ports(3)
    names = ("--port", "--http-port", "--metrics-port")
    given = [part for pair in zip(names, ports) for part in pair]
    arguments = ("--host", "0.0.0.0", *given, "--target-tp", 2, "--link", link, "--max-slots", 16)
    with command(*arguments, log=tmp_path / "log") as process:
        processes = {one.name() for one in process.children(recursive=True)}
        assert {"gcs_server", "raylet"} <= processes and len(processes) > 5
        found = open_to_others(process)
    configured = {one for one in found if int(one.rpartition(":")[2]) in ports}
    assert len(configured) == 3, "the configured ports are not open: this test would see nothing"
    assert not set(found) - configured
