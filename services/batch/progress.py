"""How far a run is: its counts, what they say of its speed and its end, how people and Prometheus see them, and the actor
to which worker groups report while they answer parts of the input. Imports nothing heavy."""

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
"""Between two lines where there is no terminal."""


@dataclass(frozen=True)
class Counts:
    """Of some lines."""

    written: int = 0
    """Lines that are done, with an answer or without."""
    failed: int = 0
    """Those of them without an answer."""
    tokens: int = 0
    """Of their answers."""

    @staticmethod
    def of(record: dict[str, Any]) -> Counts:
        if record["error"] is not None:
            return Counts(1, 1)
        return Counts(1, 0, record["response"]["body"]["usage"]["completion_tokens"])

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.written + other.written, self.failed + other.failed, self.tokens + other.tokens)


@dataclass
class BatchProgress:
    """Counts of a run as it goes."""

    before: Survey
    """What earlier runs had done, and how many lines there are."""
    here: Counts = field(default_factory=Counts)
    """Of this run: what is in the output."""
    coming: Counts = field(default_factory=Counts)
    """Of this run: decoded, but not in the output yet."""
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
        """Now, rather than when this was made: speed is that of decoding, not of starting."""
        self.began = time.monotonic()

    def count(self, record: dict[str, Any], is_new: bool = True) -> None:
        self.add(Counts.of(record), is_new)

    def add(self, more: Counts, is_new: bool = True) -> None:
        """Lines have been written."""
        if is_new:
            self.here += more
        else:
            self.kept += more
        self.seconds = time.monotonic() - self.began

    def expect(self, coming: Counts, total: int | None = None) -> None:
        """What else is decoded, and how many lines there are, as far as is known now."""
        self.coming = coming
        self.total = self.total if total is None else total
        self.seconds = time.monotonic() - self.began

    @property
    def now(self) -> Counts:
        """Of this run."""
        return self.here + self.coming

    @property
    def done(self) -> int:
        return self.before.done + self.kept.written + self.now.written

    @property
    def all_failed(self) -> int:
        """Of this run and those before."""
        return self.before.failed + self.now.failed

    @property
    def lines_a_second(self) -> float:
        return self.now.written / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """None: nothing is known of the speed yet."""
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
        """Metrics on this port; None: no metrics; 0: any free one. Raises OSError if it is in use."""
        if port is None:
            yield
            return
        from services.metrics import BatchMetrics  # imports torch

        self._metrics = BatchMetrics()
        port, stop = self._metrics.serve(port, host)
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
        """Of the start: said with the seconds since the run began."""
        self._shown = time.monotonic()
        self.say(f"[{time.monotonic() - self._began:5.1f} s] {text}")

    def worker_groups(self, starting: int, ready: int) -> None:
        if self._metrics is not None:
            self._metrics.set_worker_groups(starting=starting, ready=ready)

    def update(self, progress: BatchProgress, quiet: bool = False) -> None:
        """It has changed. `quiet`: nothing is printed where there is no terminal."""
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
    """What worker groups have reported."""

    starting: int
    ready: int
    started: tuple[float, ...]
    """Seconds that starts took, in the order in which they ended."""
    failures: tuple[str, ...]
    """Starts that have failed since the last one that did not."""
    coming: Counts
    """Of parts that are not written yet."""


class Monitor:
    """What is known of worker groups, wherever they run, and of the parts that they answer. They report to it at any
    time."""

    def __init__(self) -> None:
        self._states: dict[str, bool] = {}
        """By worker group, whether it is ready; without those that failed."""
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
        """`written`: parts that count no longer."""
        self._written.update(written)
        for part in written:
            self._parts.pop(part, None)
        ready = sum(self._states.values())
        coming = sum(self._parts.values(), start=Counts())
        return Snapshot(len(self._states) - ready, ready, tuple(self._started), tuple(self._failures), coming)


def start_monitor() -> Any:
    """A handle of an actor, on this host. Needs Ray to be connected."""
    import ray

    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    return ray.remote(Monitor).options(num_cpus=0, label_selector=here).remote()
