"""A Prometheus that watches a service with the configuration of deploy/prometheus."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

import yaml

from tests.deploy.binaries import binary
from tests.deploy.sources import PROMETHEUS


class Program:
    """A process in a session of its own, with its output in a file."""

    def __init__(self, name: str, folder: Path, command: list[object], env: dict[str, str] | None = None) -> None:
        self._name, self._log = name, folder / f"{name}.log"
        with self._log.open("wb") as log:
            options = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
            self._process = subprocess.Popen([str(word) for word in command], cwd=folder, env=env, **options)

    @property
    def said(self) -> str:
        return self._log.read_text()

    def until(self, condition: Callable[[], object], timeout: float, what: str) -> None:
        """Wait for a condition. Fails the test after `timeout` seconds, or if the process has ended."""
        end = time.monotonic() + timeout
        while not condition():
            assert self._process.poll() is None, f"{self._name} has ended:\n{self.said}"
            assert time.monotonic() < end, f"{what}: not within {timeout:g} s\n{self.said[-4000:]}"
            time.sleep(0.1)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Prometheus(Program):
    """Prometheus with the shipped configuration, except for the service's address and one scrape per second."""

    def __init__(self, folder: Path, target: str) -> None:
        config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(PROMETHEUS / file) for file in config["rule_files"]]
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self._url = f"http://{address}"
        options = ("--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={address}")
        super().__init__("prometheus", folder, [binary("prometheus"), *options])
        try:
            self.until(self._ready, 60, "Prometheus did not start")
        except BaseException:
            self.stop()
            raise

    def ask(self, path: str, **question: object) -> dict:
        """Query the HTTP API and return the `data` of the response."""
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(question)}") as reply:
            return json.load(reply)["data"]

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready"):
                return True
        except urllib.error.URLError:  # the server does not listen yet, or is not ready
            return False
