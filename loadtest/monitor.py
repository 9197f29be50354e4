"""Samples the service under load at equal intervals: its own report, its metrics, and the resources of its processes.
Also runs `smcserve serve` as a child process for the duration of a run.

Knows nothing about requests. A sample that fails is kept with its reason."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
from prometheus_client.parser import text_string_to_metric_families

from loadtest.client import ClientConnections, ServiceUnreachable

REFRESH = 10.0
"""Seconds between two searches for new processes; a search reads the whole process table."""
TITLE = "ray::smcserve: "
"""Prefix of the titles of the service's processes."""
RAY = "ray"
"""Name of all processes of Ray itself together."""
TIMEOUT = 5.0
PREFIXES = ("smc_", "process_")
LEFT_OUT = ("model_name", "pair", "worker_group")
"""Labels of series that say which models are served, and by which worker group."""
WORDS = 2000
"""Maximum number of characters of the child's log in the error message if it does not start."""
COMMAND = (
    sys.executable,
    "-c",
    "from services.cli.main import main; main()",
    "serve",
    "--port",
    "0",
    "--http-port",
    "0",
    "--metrics-port",
    "0",
)
READY = re.compile(r"serving on \S+:(\d+), metrics on http://\S+:(\d+)/metrics")


@dataclass(frozen=True)
class ProcessUsage:
    """Resources of one process, or of several together."""

    resident: int = 0
    """Resident memory in bytes."""
    threads: int = 0
    files: int = 0
    """Number of open files, connections included."""

    def __add__(self, other: ProcessUsage) -> ProcessUsage:
        return ProcessUsage(self.resident + other.resident, self.threads + other.threads, self.files + other.files)


class ProcessTree:
    """A process and its descendants. Raises ValueError if there is no such process."""

    def __init__(self, pid: int) -> None:
        try:
            self._root = psutil.Process(pid)
        except psutil.NoSuchProcess as error:
            raise ValueError(f"--watch-pid {pid}: there is no such process; give the id of `smcserve serve`") from error
        self._names: dict[psutil.Process, str] = {}
        self._searched = float("-inf")

    def held(self) -> dict[str, ProcessUsage]:
        """Return the resources by process name: `gateway`, `coordinator`, `draft rank 0`, `target rank 0`, .., and
        `ray` for all others together."""
        if time.monotonic() - self._searched > REFRESH:
            self._search()
        held: dict[str, ProcessUsage] = {}
        for process, name in self._names.items():
            try:
                seen = ProcessUsage(process.memory_info().rss, process.num_threads(), process.num_fds())
            except psutil.NoSuchProcess:
                self._searched = float("-inf")
                continue
            held[name] = held.get(name, ProcessUsage()) + seen
        return held

    def pids(self) -> dict[str, set[int]]:
        """Return the process ids by the same names, without those of Ray."""
        self._search()
        return {
            name: {p.pid for p, other in self._names.items() if other == name}
            for name in set(self._names.values()) - {RAY}
        }

    def _search(self) -> None:
        self._searched = time.monotonic()
        try:
            family = self._root.children(recursive=True)
        except psutil.NoSuchProcess:
            return  # the root has ended: nothing is left to be measured
        self._names = {self._root: "gateway"}
        for process in family:
            with suppress(psutil.NoSuchProcess):  # processes of Ray come and go
                title = " ".join(process.cmdline()[:1])
                self._names[process] = title.removeprefix(TITLE).partition(".")[0] if title.startswith(TITLE) else RAY


@dataclass(frozen=True)
class ServerSample:
    at: float
    """Seconds since the start of the run."""
    running: int | None = None
    queued: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """Values by series, as `name{labels}`; without buckets."""
    held: dict[str, ProcessUsage] = field(default_factory=dict)
    """Resources of each process, by name."""
    error: str = ""
    incarnation: int | None = None
    """The incarnation of the workers; it grows when they are lost and started again."""

    def total(self, name: str) -> float | None:
        """Sum of a metric over all its labels; None if the metric is missing."""
        values = [value for series, value in self.metrics.items() if series.partition("{")[0] == name]
        return sum(values) if values else None


class ServerMonitor:
    """Takes samples of the service. `url`: address of the metrics page. `tree`: the service's processes, if they run on
    this machine."""

    def __init__(self, connections: ClientConnections, url: str | None, tree: ProcessTree | None) -> None:
        self._connections, self._url, self._tree = connections, url, tree
        self.samples: list[ServerSample] = []

    async def look(self, at: float) -> ServerSample:
        """Take one sample. `at`: its time, in seconds since the start of the run."""
        try:
            info = await self._connections.server_info(TIMEOUT)
            metrics = await asyncio.to_thread(scrape, self._url) if self._url else {}
            held = await asyncio.to_thread(self._tree.held) if self._tree else {}
        except grpc.RpcError as error:
            return ServerSample(at, error=f"{error.code().name}: {error.details()}")
        except (OSError, ValueError) as error:
            return ServerSample(at, error=str(error))
        return ServerSample(at, info.running, info.queued, metrics, held, incarnation=info.incarnation)

    async def watch(self, clock: Callable[[], float], interval: float) -> None:
        """Take a sample every `interval` seconds, until cancelled."""
        turn = 0
        while True:
            self.samples.append(await self.look(clock()))
            turn = max(turn + 1, int(clock() / interval))
            await asyncio.sleep(max(0.0, turn * interval - clock()))


def scrape(url: str) -> dict[str, float]:
    """Read the metrics page. Raises OSError if there is no answer, and ValueError if the page has none of the service's
    metrics."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=TIMEOUT) as response:
        metrics = parse(response.read().decode())
    if not metrics:
        raise ValueError(
            f"{url} has no metric that begins with {' or '.join(PREFIXES)}; give the service's own /metrics"
        )
    return metrics


def parse(text: str) -> dict[str, float]:
    """Parse Prometheus' text format. Returns the service's values by series, without buckets and without the labels
    that name the models. Values of several worker groups are added up."""
    metrics: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            if name.startswith(PREFIXES) and not name.endswith("_bucket"):
                shown = ",".join(f'{key}="{word}"' for key, word in labels.items() if key not in LEFT_OUT)
                series = f"{name}{{{shown}}}" if shown else name
                metrics[series] = metrics.get(series, 0.0) + value
    return metrics


START_TIMEOUT, STOP_TIMEOUT = 600.0, 60.0


@dataclass(frozen=True)
class ServedChild:
    address: str
    metrics: str
    pid: int


@contextmanager
def serve(arguments: Sequence[str]) -> Iterator[ServedChild]:
    """Run `smcserve serve` on free ports as a child process. `arguments`: further arguments of the command. Raises
    ServiceUnreachable with the child's error message if it does not start."""
    with tempfile.TemporaryDirectory(prefix="loadtest-") as folder:
        log = Path(folder, "log")
        with log.open("w") as out:
            # In a session of its own: Ctrl-C then reaches only this process, which stops the child.
            child = subprocess.Popen([*COMMAND, *arguments], stdout=out, stderr=out, start_new_session=True)
        try:
            yield _ready(child, log)
        finally:
            _stop(child)


def _ready(child: subprocess.Popen, log: Path) -> ServedChild:
    begin = time.monotonic()
    while True:
        ready = READY.search(log.read_text(errors="replace").replace("\n", " "))
        if ready:
            port, metrics_port = ready.groups()
            return ServedChild(f"127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port}/metrics", child.pid)
        if child.poll() is not None:
            raise ServiceUnreachable(f"smcserve serve ended with exit code {child.returncode}: {_log_tail(log)}")
        if time.monotonic() - begin > START_TIMEOUT:
            raise ServiceUnreachable(f"smcserve serve was not ready within {START_TIMEOUT:g} s: {_log_tail(log)}")
        time.sleep(0.1)


def _stop(child: subprocess.Popen) -> None:
    """Terminate the child, so that it drains, and then kill the processes that are left."""
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
    """Return the child's log from its last error on, or otherwise the end of the log."""
    text = log.read_text(errors="replace").strip()
    begin = f"\n{text}".rfind("\nerror: ")
    return (text[begin:][:WORDS] if begin >= 0 else text[-WORDS:]).removeprefix("error: ") or "its log is empty"
