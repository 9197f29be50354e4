"""A Ray cluster of several machines, emulated on one: a head and further nodes, each started by `ray start` on a
loopback address of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.ports import free_ports

BIN = Path(sys.executable).parent
HEAD_PORTS = ("port", "ray-client-server-port")
NODE_PORTS = ("dashboard-agent-listen-port", "metrics-export-port")
COUNTED = {"num-cpus": 4, "object-store-memory": 80_000_000, "include-log-monitor": "false"}


def end_family(process: subprocess.Popen) -> None:
    """Kill a process and all its descendants, because Ray takes twenty seconds to end by itself."""
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
    psutil.wait_procs(family, timeout=10)


class Machines:
    """Runs `ray start --block` for every machine, on free ports and in a directory of its own; `stop` removes
    everything."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        # The path is short, because the names of Unix sockets in it are limited to 107 characters.
        self._directory = tempfile.mkdtemp(prefix="sd", dir="/tmp")
        self._processes: list[subprocess.Popen] = []
        self.address = ""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTEST_"))}
        self.env = inherited | {
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            **{name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")},
            "RAY_USAGE_STATS_ENABLED": "0",
            "COLUMNS": "400",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, *resources: str) -> None:
        """Start one machine for each custom resource: the head, then one at 127.0.0.2, and so on."""
        ports = dict(zip(HEAD_PORTS, free_ports(len(HEAD_PORTS))))
        self.address = f"127.0.0.1:{ports['port']}"
        head = ports | {"temp-dir": self._directory, "include-dashboard": "false"}
        for number, resource in enumerate(resources, 1):
            role, settings = ("--head", head) if number == 1 else (f"--address={self.address}", {})
            self._start_node(resource, number, role, settings | {"resources": json.dumps({resource: 1})})

    def _start_node(self, name: str, number: int, role: str, settings: dict[str, object]) -> None:
        settings = (
            COUNTED
            | {"node-ip-address": f"127.0.0.{number}"}
            | dict(zip(NODE_PORTS, free_ports(len(NODE_PORTS))))
            | settings
        )
        command = [BIN / "ray", "start", "--block", role, *(f"--{key}={value}" for key, value in settings.items())]
        with self.log(name).open("wb") as out:
            self._processes.append(
                subprocess.Popen(command, env=self.env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
            )
        # One after another: they share a directory, and would choose the same sockets in it.
        self.until(lambda: "Ray runtime started" in self.log(name).read_text(), 120, f"{name} did not start")

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def stop(self) -> None:
        """Kill all machines at once; nothing of them is needed any more."""
        for process in reversed(self._processes):
            end_family(process)
        shutil.rmtree(self._directory, ignore_errors=True)

    def until(self, condition: Callable[[], object], timeout: float, what: str) -> None:
        """Wait for a condition. Fails the test after `timeout` seconds, or if a machine has died."""
        end = time.monotonic() + timeout
        while not condition():
            assert all(process.poll() is None for process in self._processes), [
                log.read_text()[-1000:] for log in self._logs.glob("*.log")
            ]
            assert time.monotonic() < end, f"{what}: not within {timeout} s"
            time.sleep(0.05)

    def run(self, name: str, *command: object) -> subprocess.Popen:
        """Start a command in the cluster's environment, with its output in the log of that name."""
        with self.log(name).open("wb") as out:
            return subprocess.Popen([str(each) for each in command], env=self.env, stdout=out, stderr=subprocess.STDOUT)

    def named(self, name: str) -> dict[int, str]:
        """Return the addresses of machines that run service processes with such a name, by pid."""
        nodes = {}
        for process in psutil.process_iter(["cmdline", "ppid"]):
            with contextlib.suppress(psutil.Error):
                if " ".join(process.info["cmdline"] or ()).startswith(f"ray::smcserve: {name}"):
                    raylet = " ".join(process.parent().cmdline())
                    if self._directory in raylet:
                        nodes[process.pid] = re.search(r"--node_ip_address=(\S+)", raylet)[1]
        return nodes
