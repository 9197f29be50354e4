"""Runs smg, a router, as a separate process in front of worker groups."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.ports import free_ports

QUICK = (
    *("--health-check-interval-secs", "2", "--health-failure-threshold", "2", "--health-success-threshold", "1"),
    *("--cb-failure-threshold", "3", "--cb-success-threshold", "1", "--cb-timeout-duration-secs", "5"),
)
"""Short intervals for health probes and circuit breakers, so that a test sees in seconds what takes minutes with the
defaults."""


@contextmanager
def routing(groups: Sequence[str], log: Path, policy: str = "cache_aware") -> Iterator[str]:
    """Run a router in front of these addresses and yield its URL once it serves a model."""
    port, metrics_port = free_ports(2)
    workers = [f"grpc://{group}" for group in groups]
    command = [
        sys.executable,
        "-m",
        "smg",
        "launch",
        "--host",
        "127.0.0.1",
        "--port",
        port,
        "--prometheus-port",
        metrics_port,
    ]
    command += ["--backend", "vllm", "--worker-urls", *workers, "--policy", policy, *QUICK]
    with log.open("w") as file, subprocess.Popen([str(part) for part in command], stdout=file, stderr=file) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for_models(url, process)
            yield url
        finally:
            process.kill()  # on SIGTERM it would wait for load balancers to notice


def wait_for_models(url: str, process: subprocess.Popen, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not models(url):
        assert process.poll() is None, "the router has ended; see its log"
        assert time.monotonic() < deadline, f"the router found no model within {timeout:g} s"
        time.sleep(0.1)


def models(url: str) -> list[str]:
    """Return the names of the models that the router serves; none while it does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as response:
            return [model["id"] for model in json.load(response)["data"]]
    except OSError:
        return []
