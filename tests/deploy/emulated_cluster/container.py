"""A container as a local process: mounts and processes of its own, the pod's network, and the command of the manifest.

The image is this checkout in this Python environment, with the entry point and search path of its Dockerfile."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.deploy.chart import ROOT

INIT = Path(__file__).with_name("init.py")
OURS = (ROOT, Path(sys.prefix), Path(sys.base_prefix))
"""Folders of the image that remain visible if a volume is mounted over them."""


def entry_point(image: str) -> list[str]:
    """Return the entry point of an image of this repository, by its tag."""
    (said,) = re.findall(
        r"^ENTRYPOINT (.*)$", (ROOT / f"deploy/docker/Dockerfile.{image.rsplit('-', 1)[-1]}").read_text(), re.MULTILINE
    )
    return json.loads(said)


def environment(spec: dict, secrets: dict[str, dict[str, str]], added: dict[str, str]) -> dict[str, str]:
    found = {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    for each in spec.get("env", ()):
        if "valueFrom" in each:
            key = each["valueFrom"]["secretKeyRef"]
            found[each["name"]] = secrets[key["name"]][key["key"]]
        else:
            found[each["name"]] = each["value"]
    return found | added


class Container:
    """A container of a pod; it may be restarted."""

    def __init__(self, spec: dict, pause: int, log: Path, env: dict[str, str], volumes: dict[str, Path]) -> None:
        self.spec, self.name, self._pause, self._log, self.env = spec, spec["name"], pause, log, env
        self._mounts = [
            (volumes[each["name"]] / each.get("subPath", ""), each["mountPath"], each.get("readOnly", False))
            for each in spec.get("volumeMounts", ())
        ]
        self._process: subprocess.Popen | None = None
        self._inside = 0
        self.starts = 0

    def mount(self, source: Path, target: str) -> None:
        """Mount a file. To be called before the container starts."""
        self._mounts.append((source, target, False))

    def start(self) -> None:
        settings = {
            "mounts": self._places(),
            "readOnlyRoot": self.spec.get("securityContext", {}).get("readOnlyRootFilesystem", False),
        }
        command = [
            "nsenter",
            "-t",
            str(self._pause),
            "-n",
            "-i",
            "-u",
            "--",
            "unshare",
            "-m",
            "-p",
            "-f",
            "--kill-child",
            "--mount-proc",
        ]
        command += [sys.executable, "-S", str(INIT), json.dumps(settings), *self._command()]
        with self._log.open("a") as log:
            pipes = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log}
            self._process = subprocess.Popen(command, env=self.env, cwd="/", start_new_session=True, **pipes)
        self.starts += 1
        self._inside = 0

    def _command(self) -> list[str]:
        words = [*(self.spec.get("command") or entry_point(self.spec["image"])), *self.spec.get("args", ())]
        if words[:2] == ["tini", "--"]:  # `init.py` replaces it
            words = words[2:]
        return [re.sub(r"\$\((\w+)\)", lambda name: self.env.get(name[1], name[0]), word) for word in words]

    def _places(self) -> list[list[object]]:
        """Return the mounts, each followed by the folders of the image that it would hide."""
        found: list[list[object]] = []
        for source, target, read_only in self._mounts:
            found.append([str(source), target, read_only])
            for own in OURS:
                if source.is_dir() and own.is_relative_to(target):
                    (source / own.relative_to(target)).mkdir(parents=True, exist_ok=True)
                    found.append([str(own), str(own), False])
        return found

    @property
    def pid(self) -> int:
        """Pid of the container's first process, in this machine's pid namespace; 0 if there is none."""
        if not self._inside and self._process is not None:
            with suppress(psutil.NoSuchProcess):
                children = psutil.Process(self._process.pid).children()
                self._inside = children[0].pid if children else 0
        return self._inside

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while the container runs or if it has not been started."""
        return None if self._process is None else self._process.poll()

    def execute(self, command: list[str], timeout: float) -> int:
        """Run a command in the container and return its exit code; 124 if it exceeds `timeout`."""
        if not self.pid:
            return 125
        entered = ["nsenter", "-t", str(self.pid), "-m", "-p", "-n", "-i", "-u", "--", *command]
        with self._log.open("a") as log:
            running = subprocess.Popen(entered, env=self.env, cwd="/", stdout=log, stderr=log, start_new_session=True)
        try:
            return running.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            return 124

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self.pid and self.exit_code is None:
                os.kill(self.pid, number)

    def wait(self, timeout: float) -> bool:
        end = time.monotonic() + timeout
        while self.exit_code is None and time.monotonic() < end:
            time.sleep(0.05)
        return self.exit_code is not None
