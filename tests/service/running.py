"""The whole service in this process's Ray cluster: real actors, real links, a real gRPC server."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import psutil
import ray

from services.client import Client
from services.gateway.config import GatewayConfig
from services.launch.config import WorkerGroupConfig
from services.launch.service import Service
from services.launch.supervisor import Supervisor


class Running:
    """A service in an asyncio loop of its own thread, so that tests can call it like any client."""

    def __init__(
        self, group: WorkerGroupConfig, gateway: GatewayConfig | None = None, start_seconds: float = 120
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.service = self.wait(self._make(group, gateway or GatewayConfig(port=0)))
        self.wait(self.service.start(), start_seconds)

    @property
    def supervisor(self) -> Supervisor:
        """The supervisor of the first worker group."""
        return self.service.balancer.groups[0]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.service.gateway.port}"

    def client(self) -> Client:
        return Client(self.address)

    def wait(self, coroutine, timeout: float = 120):
        return self.begin(coroutine).result(timeout)

    def begin(self, coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def pids(self, worker_group: int = 0) -> dict[str, int]:
        """Return the process id of every process of a worker group, by name."""
        group = self.service.balancer.groups[worker_group].group
        return {name: ray.get(actor.pid.remote()) for name, actor in group.actors.items()}

    def kill(self, name: str, how: int = signal.SIGKILL, worker_group: int = 0) -> None:
        os.kill(self.pids(worker_group)[name], how)

    def until(self, condition: Callable[[], bool], timeout: float, what: str) -> float:
        """Wait until the condition holds and return how many seconds that took. Fails the test after `timeout`
        seconds."""
        begin = time.monotonic()
        while not condition():
            assert time.monotonic() - begin < timeout, f"{what}: not within {timeout} s"
            time.sleep(0.02)
        return time.monotonic() - begin

    def until_empty(self, timeout: float = 15) -> None:
        """Wait until no request runs or waits and only the prefix cache holds pages of the two pools."""

        def empty() -> bool:
            stats = self.supervisor.stats
            return not (stats.running or stats.queued) and set(stats.pages_leaked.values()) == {0}

        self.until(empty, timeout, "the engine did not become empty")
        before, seen = self.supervisor.stats, 0
        while seen < 2:  # every heartbeat counts the pages
            self.until(
                lambda last=before: self.supervisor.stats is not last, timeout, "the coordinator gave no sign of life"
            )
            before, seen = self.supervisor.stats, seen + 1
            assert empty(), f"not empty after all: {before}"

    def stop(self) -> None:
        self.wait(self.service.stop(drain=False))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _make(self, group: WorkerGroupConfig, gateway: GatewayConfig) -> Service:
        return Service(group, gateway)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def ranks() -> set[int]:
    """Return the process ids of the ranks of all worker groups that this process has started."""
    return {p.pid for p in psutil.Process().children(recursive=True) if _is_rank(p)}


def _is_rank(process: psutil.Process) -> bool:
    try:
        return any(word.startswith("ray::smcserve: ") for word in process.cmdline())
    except psutil.Error:  # the process has just ended
        return False
