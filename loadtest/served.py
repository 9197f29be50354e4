"""`smcserve serve` as a child process on free ports, for as long as a run takes. Nothing of it stays."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtest.endpoint import Unreachable

START_TIMEOUT, STOP_TIMEOUT = 600.0, 60.0
WORDS = 2000
"""Characters of its log that are shown if it does not start."""
COMMAND = (
    sys.executable,
    "-c",
    "from services.cli.main import main; main()",
    "serve",
    "--port",
    "0",
    "--metrics-port",
    "0",
)
READY = re.compile(r"serving on \S+:(\d+), metrics on http://\S+:(\d+)/metrics")


@dataclass(frozen=True)
class Served:
    address: str
    metrics: str
    pid: int


@contextmanager
def serve(arguments: Sequence[str]) -> Iterator[Served]:
    """`arguments`: further ones of the command. Raises Unreachable with its own words if it does not start."""
    with tempfile.TemporaryDirectory(prefix="loadtest-") as folder:
        log = Path(folder, "log")
        with log.open("w") as out:
            # In a session of its own: Ctrl-C is for us, and we tell it.
            child = subprocess.Popen([*COMMAND, *arguments], stdout=out, stderr=out, start_new_session=True)
        try:
            yield _ready(child, log)
        finally:
            _stop(child)


def _ready(child: subprocess.Popen, log: Path) -> Served:
    begin = time.monotonic()
    while True:
        ready = READY.search(log.read_text(errors="replace").replace("\n", " "))
        if ready:
            port, metrics_port = ready.groups()
            return Served(f"127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port}/metrics", child.pid)
        if child.poll() is not None:
            raise Unreachable(f"smcserve serve ended with exit code {child.returncode}: {_log_tail(log)}")
        if time.monotonic() - begin > START_TIMEOUT:
            raise Unreachable(f"smcserve serve was not ready within {START_TIMEOUT:g} s: {_log_tail(log)}")
        time.sleep(0.1)


def _stop(child: subprocess.Popen) -> None:
    """As a user would, so that it drains; what is left of it after that is killed."""
    try:
        family = psutil.Process(child.pid).children(recursive=True) if child.poll() is None else []
    except psutil.NoSuchProcess:
        family = []
    child.terminate()
    try:
        child.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=10)


def _log_tail(log: Path) -> str:
    """What it said from its error on, or else at the end."""
    text = log.read_text(errors="replace").strip()
    begin = f"\n{text}".rfind("\nerror: ")
    return (text[begin:][:WORDS] if begin >= 0 else text[-WORDS:]).removeprefix("error: ") or "it said nothing"
