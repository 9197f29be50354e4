"""Progress of a run: its counts, the speed and remaining time that follow from them, their display on the console and
in Prometheus, and the actor to which worker groups report while they answer parts. Imports nothing heavy."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from services.batch.output_file import Survey

if TYPE_CHECKING:
    from services.metrics import BatchMetrics

LINE_SECONDS = 5.0
"""Time between two lines of progress if there is no terminal."""


@dataclass(frozen=True)
class Counts:
    """Numbers of lines and tokens."""

    written: int = 0
    """Lines that are done, with an answer or without."""
    failed: int = 0
    """Lines among `written` that have no answer."""
    tokens: int = 0
    """Tokens of the answers."""

    @staticmethod
    def of(record: dict[str, Any]) -> Counts:
        if record["error"] is not None:
            return Counts(1, 1)
        return Counts(1, 0, record["response"]["body"]["usage"]["completion_tokens"])

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.written + other.written, self.failed + other.failed, self.tokens + other.tokens)


@dataclass
class BatchProgress:
    """Counts of a running run."""

    before: Survey
    """The number of lines, and the lines that earlier runs had done."""
    here: Counts = field(default_factory=Counts)
    """Lines of this run that are in the output."""
    coming: Counts = field(default_factory=Counts)
    """Lines of this run that are decoded but not in the output yet."""
    kept: Counts = field(default_factory=Counts)
    """Answers of earlier runs that this run has copied."""
    total: int = field(init=False)
    is_estimate: bool = False
    """Whether `total` follows from the sizes of files whose lines are not counted yet."""
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    """From `start` to the last line."""

    def __post_init__(self) -> None:
        self.total = self.before.total

    def start(self) -> None:
        """Measure the speed from now on, so that it is the speed of decoding without the start."""
        self.began = time.monotonic()

    def add(self, more: Counts, is_new: bool = True) -> None:
        """Count lines that have been written. `is_new`: decoded by this run, not copied."""
        if is_new:
            self.here += more
        else:
            self.kept += more
        self.seconds = time.monotonic() - self.began

    def expect(self, coming: Counts, total: int | None = None) -> None:
        """Set the counts of lines that are decoded but not written, and the number of lines as far as it is known."""
        self.coming = coming
        self.total = self.total if total is None else total
        self.seconds = time.monotonic() - self.began

    @property
    def now(self) -> Counts:
        """Counts of the lines that this run has decoded."""
        return self.here + self.coming

    @property
    def done(self) -> int:
        return self.before.done + self.kept.written + self.now.written

    @property
    def all_failed(self) -> int:
        """Lines without an answer, in this run and earlier ones."""
        return self.before.failed + self.now.failed

    @property
    def lines_a_second(self) -> float:
        return self.now.written / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimated remaining time; None: the speed is not known yet."""
        return (self.total - self.done) / self.lines_a_second if self.lines_a_second else None

    @property
    def speed(self) -> str:
        rate = self.now.tokens / self.seconds if self.seconds else 0.0
        return f"{self.lines_a_second:,.1f} lines/s, {self.now.tokens:,} tokens, {rate:,.0f} tok/s"

    @property
    def goal(self) -> str:
        return f"{'about ' if self.is_estimate else ''}{max(self.total, self.done):,} lines"

    def summary(self) -> str:
        parts = [f"{self.done:,} of {self.goal} done"]
        if self.before.done:
            parts.append(f"{self.before.done:,} by earlier runs")
        parts.append(f"{self.all_failed:,} failed")
        if self.now.written:
            parts.append(f"{self.speed} in {self.seconds:.1f} s")
        return ", ".join(parts)


class Display:
    """Shows a progress on a console, and to Prometheus."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._metrics: BatchMetrics | None = None
        self._bar: Progress | None = None
        self._task: Any = None
        self._shown = self._began = time.monotonic()

    @contextmanager
    def serving(self, port: int | None, host: str) -> Iterator[None]:
        """Serve metrics on this port; None: serve no metrics; 0: use any free port. Raises OSError if the port is in
        use."""
        if port is None:
            yield
            return
        from services.metrics import BatchMetrics  # imports torch
        from services.security import AllowedHosts  # imports gRPC

        self._metrics = BatchMetrics()
        port, stop = self._metrics.serve(port, host, AllowedHosts(host).refusal)
        try:
            self.say(f"metrics on {host}:{port}")
            yield
        finally:
            stop()

    @contextmanager
    def showing(self, progress: BatchProgress) -> Iterator[None]:
        self.update(progress, quiet=True)
        if not self._console.is_terminal:
            self._shown = time.monotonic()
            yield
            return
        columns = (BarColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=self._console, transient=True) as self._bar:
            self._task = self._bar.add_task(_words(progress), total=max(progress.total, 1), completed=progress.done)
            yield

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def step(self, text: str) -> None:
        """Print a step of the start, with the seconds since the run began."""
        self._shown = time.monotonic()
        self.say(f"[{time.monotonic() - self._began:5.1f} s] {text}")

    def worker_groups(self, starting: int, ready: int) -> None:
        if self._metrics is not None:
            self._metrics.set_worker_groups(starting=starting, ready=ready)

    def update(self, progress: BatchProgress, quiet: bool = False) -> None:
        """Show the current progress. `quiet`: print nothing if there is no terminal."""
        if self._metrics is not None:
            self._metrics.set_progress(
                answered=progress.done - progress.all_failed,
                failed=progress.all_failed,
                left=max(progress.total - progress.done, 0),
                tokens=progress.now.tokens,
                seconds_left=progress.seconds_left,
            )
        if self._bar is not None:
            total = max(progress.total, progress.done, 1)
            self._bar.update(self._task, total=total, completed=progress.done, description=_words(progress))
        elif not quiet and time.monotonic() - self._shown >= LINE_SECONDS:
            self._shown = time.monotonic()
            self.say(_words(progress))


def _words(progress: BatchProgress) -> str:
    left = "" if progress.seconds_left is None else f", about {_duration(progress.seconds_left)} left"
    return f"{progress.done:,} of {progress.goal}, {progress.all_failed:,} failed, {progress.speed}{left}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


@dataclass(frozen=True)
class Snapshot:
    """The reports of all worker groups."""

    starting: int
    ready: int
    started: tuple[float, ...]
    """Seconds that starts took, in the order in which they ended."""
    failures: tuple[str, ...]
    """Errors of the starts that have failed since the last successful one."""
    coming: Counts
    """Counts of parts that are not written yet."""


class Monitor:
    """Collects the reports of worker groups, wherever they run: their states, and the counts of the parts that they
    answer."""

    def __init__(self) -> None:
        self._states: dict[str, bool] = {}
        """Worker group -> whether it is ready; without worker groups that failed."""
        self._started: list[float] = []
        self._failures: list[str] = []
        self._parts: dict[Hashable, Counts] = {}
        self._written: set[Hashable] = set()

    def start(self, name: str) -> None:
        self._states[name] = False

    def ready(self, name: str, seconds: float) -> None:
        self._states[name] = True
        self._started.append(seconds)
        self._failures.clear()

    def fail(self, name: str, why: str) -> None:
        self._states.pop(name, None)
        self._failures.append(why)

    def report(self, parts: dict[Hashable, Counts]) -> None:
        self._parts |= {part: counts for part, counts in parts.items() if part not in self._written}

    def snapshot(self, written: Sequence[Hashable]) -> Snapshot:
        """Return the current state. `written`: parts that are in the output now, and no longer counted here."""
        self._written.update(written)
        for part in written:
            self._parts.pop(part, None)
        ready = sum(self._states.values())
        coming = sum(self._parts.values(), start=Counts())
        return Snapshot(len(self._states) - ready, ready, tuple(self._started), tuple(self._failures), coming)


def start_monitor() -> Any:
    """Start a `Monitor` in an actor on this host, and return its handle. Needs Ray to be connected."""
    import ray

    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    return ray.remote(Monitor).options(num_cpus=0, label_selector=here).remote()
