"""A signal to this process's group, as sent by `timeout` or a terminal, reaches none of Ray's processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from services.client import Client

pytestmark = pytest.mark.xdist_group("ray")


def is_ray(command: list[str]) -> bool:
    """Whether this is the command of a Ray worker or of a Ray program, not of a process that merely has Ray on its
    module path."""
    return any(part.startswith("ray::") or (part.startswith("/") and "/ray/" in part) for part in command)


def test_processes_of_ray_are_in_other_sessions(group):
    with Client(group.address) as client:
        assert client.generate("1 + 1 =", seed=1, max_tokens=2).tokens
    ours = os.getsid(0), os.getpgid(0)
    children = psutil.Process().children(recursive=True)
    names = {child.pid: child.name() for child in children if child.status() != psutil.STATUS_ZOMBIE}
    assert {"gcs_server", "raylet"} <= set(names.values()) and set(group.pids().values()) <= set(names)
    # Leaves out helper processes of other tests in this process.
    of_ray = {child.pid for child in children if child.pid in names and is_ray(child.cmdline())}
    assert set(group.pids().values()) <= of_ray
    assert not [names[pid] for pid in of_ray if os.getsid(pid) == ours[0] or os.getpgid(pid) == ours[1]]


@pytest.mark.slow
def test_sigterm_while_ray_starts():
    """SIGTERM while Ray starts ends the command with the exit code of a terminated process, and no process of Ray is
    left."""
    program = "import sys; from services.cli.main import main; sys.argv[0] = 'smcserve'; main()"
    command = [sys.executable, "-c", program, "serve", "--port", "0", "--http-port", "0"]
    process = psutil.Popen(command, stderr=subprocess.DEVNULL)
    children: list[psutil.Process] = []
    deadline = time.monotonic() + 120
    while not any(child.name() == "raylet" for child in children):
        assert time.monotonic() < deadline and process.poll() is None, "Ray was not started"
        time.sleep(0.02)
        with contextlib.suppress(psutil.NoSuchProcess):
            children = process.children(recursive=True)
    process.terminate()
    # 0: Ray had already started.
    assert process.wait(60) in (128 + signal.SIGTERM, -signal.SIGTERM, 0)
    _, left = psutil.wait_procs(children, timeout=30)
    assert not left, "processes of Ray stay"
