"""A Ray cluster as a user starts one, commands that run on it, and checks of what they leave behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.deploy.machines import end_family
from tests.ports import free_ports

BIN = Path(sys.executable).parent
OF_RAY = {"JobSupervisor", "ActorLocationTracker", "_AutoscalingCoordinatorActor", "_StatsActor"}
"""Classes of actors that Ray and Ray Data keep for all jobs of a cluster."""
PORTS = ("port", "dashboard-port", "dashboard-agent-listen-port", "ray-client-server-port", "metrics-export-port")


class Cluster:
    """`ray start --head --block` with a dashboard, on its own ports and in its own directory."""

    def __init__(self, logs: Path, **settings: str) -> None:
        """`settings`: environment variables of all its processes."""
        self._log = logs / "ray.log"
        # A short path, because names of Unix sockets in it are limited to 107 characters.
        self._directory = tempfile.mkdtemp(prefix="sb", dir="/tmp")
        ports = free_ports(len(PORTS))
        self._ports = dict(zip(PORTS, ports))
        self.address, self.dashboard = f"127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTEST_"))}
        self.env = inherited | {
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            **{name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")},
            "RAY_USAGE_STATS_ENABLED": "0",
            "COLUMNS": "400",
            "OMP_NUM_THREADS": "1",
            **settings,
        }
        self._head: subprocess.Popen | None = None

    def start(self) -> None:
        settings = {
            "node-ip-address": "127.0.0.1",
            "temp-dir": self._directory,
            "num-cpus": 16,
            "object-store-memory": 100_000_000,
        }
        options = [f"--{name}={value}" for name, value in (settings | self._ports).items()]
        with self._log.open("wb") as log:
            command = [BIN / "ray", "start", "--head", "--block", "--include-dashboard=true", *options]
            self._head = subprocess.Popen(
                command, env=self.env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.until(lambda: "Ray runtime started" in self._log.read_text(), 60, "the cluster did not start")

    def stop(self) -> None:
        """Kill all processes of the cluster and remove its directory."""
        if self._head is not None:
            end_family(self._head)
        shutil.rmtree(self._directory, ignore_errors=True)

    def until(self, condition: Callable[[], object], timeout: float, what: str) -> None:
        """Wait until the condition holds. Fails the test after `timeout` seconds, or if the cluster has ended."""
        end = time.monotonic() + timeout
        while not condition():
            assert self._head.poll() is None, f"the cluster has ended: {self._log.read_text()}"
            assert time.monotonic() < end, f"{what}: not within {timeout} s"
            time.sleep(0.1)

    def start_batch(self, *arguments: object) -> subprocess.Popen:
        """Start `smcserve batch` on this cluster, as a process of this machine."""
        command = [BIN / "smcserve", "batch", *map(str, arguments), "--ray-address", self.address]
        return subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def ranks(self) -> dict[int, str]:
        """Return the process ids of the workers and coordinators, with their actor classes."""
        return self.actors("smcserve: ")

    def actors(self, name: str) -> dict[int, str]:
        """Return the process ids and classes of live actors whose class begins with `name`."""
        from ray.util.state import list_actors

        actors = list_actors(self.dashboard, filters=[("state", "=", "ALIVE")], detail=True)
        return {actor.pid: actor.class_name for actor in actors if actor.class_name.startswith(name)}

    def until_empty(self) -> None:
        """Wait until no actor is left, other than Ray's own, and every placement group is removed."""
        from ray.util.state import list_actors, list_placement_groups

        def left() -> list:
            actors = [
                actor
                for actor in list_actors(self.dashboard)
                if actor.state != "DEAD" and actor.class_name not in OF_RAY
            ]
            return actors + [group for group in list_placement_groups(self.dashboard) if group.state != "REMOVED"]

        self.until(lambda: not left(), 10, f"something is left: {left()}")
