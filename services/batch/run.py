"""One run of `smcserve batch`: its settings, the worker group that it starts, its progress and its end."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from services.batch.lines import RequestReader
from services.batch.output_file import OutputFile, Survey, rest, survey
from services.batch.runner import BatchRunner, Limit, RetryingDecoder, ServiceState
from services.launch.config import WorkerGroupConfig
from services.launch.gpus import check_gpus


@dataclass(frozen=True)
class BatchConfig:
    """Raises ValueError naming the field, the value and what is allowed."""

    input: Path
    """Requests, one JSON object a line. Read twice: once to check it, once to send it."""
    output: Path
    """Answers, one JSON object a line, in the order of the input. An existing file is resumed."""
    overwrite: bool = False
    """Start from the beginning, whatever `output` holds."""
    seed: int = 0
    """A line without a seed of its own gets one made of this and its custom_id."""
    concurrency: int | None = None
    """Requests in flight; default: as many as keep every slot of the engine full."""

    def __post_init__(self) -> None:
        if not self.input.is_file():
            raise ValueError(f"{self.input} is not a file; give a file of requests, one JSON object a line")
        if not self.output.absolute().parent.is_dir():
            raise ValueError(f"cannot write {self.output}: its directory does not exist")
        if self.output.exists():
            if not self.output.is_file():
                raise ValueError(
                    f"cannot write {self.output}: it is not a regular file, so the run could not be resumed"
                )
            if self.output.samefile(self.input):
                raise ValueError(f"{self.output} is the input; give another output file")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"concurrency={self.concurrency}; allowed: >= 1")


LINE_SECONDS = 5.0


@dataclass
class BatchProgress:
    """Counts of a run as it goes."""

    before: Survey
    """What earlier runs had done."""
    written: int = 0
    failed: int = 0
    tokens: int = 0
    """Of this run's answers, like the two above."""
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    """From `start` to the last line."""

    def start(self) -> None:
        """Now, rather than when this was made: speed is that of decoding, not of starting."""
        self.began = time.monotonic()

    def count(self, record: dict[str, Any]) -> None:
        self.written += 1
        if record["error"] is not None:
            self.failed += 1
        else:
            self.tokens += record["response"]["body"]["usage"]["completion_tokens"]
        self.seconds = time.monotonic() - self.began

    @property
    def done(self) -> int:
        return self.before.done + self.written

    @property
    def all_failed(self) -> int:
        """Of this run and those before."""
        return self.before.failed + self.failed

    @property
    def speed(self) -> str:
        rate = self.tokens / self.seconds if self.seconds else 0.0
        return f"{self.tokens:,} tokens, {rate:,.0f} tok/s"

    def summary(self) -> str:
        parts = [f"{self.done:,} of {self.before.total:,} lines done"]
        if self.before.done:
            parts.append(f"{self.before.done:,} by earlier runs")
        parts.append(f"{self.all_failed:,} failed")
        if self.written:
            parts.append(f"{self.speed} in {self.seconds:.1f} s")
        return ", ".join(parts)


class Display:
    """Shows a progress on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: Any = None
        self._shown = time.monotonic()

    @contextmanager
    def showing(self, progress: BatchProgress) -> Iterator[None]:
        if not self._console.is_terminal:
            self._shown = time.monotonic()
            yield
            return
        columns = (
            TextColumn("lines"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console, transient=True) as self._bar:
            self._task = self._bar.add_task("", total=progress.before.total, completed=progress.done)
            yield

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def update(self, progress: BatchProgress) -> None:
        """A line has been written."""
        if self._bar is not None:
            self._bar.update(self._task, completed=progress.done, description=_words(progress))
        elif time.monotonic() - self._shown >= LINE_SECONDS:
            self._shown = time.monotonic()
            self.say(
                f"{progress.done:,} of {progress.before.total:,} lines, {_words(progress)}, "
                f"about {_left(progress)} left"
            )


def _words(progress: BatchProgress) -> str:
    return f"{progress.all_failed:,} failed, {progress.speed}"


def _left(progress: BatchProgress) -> str:
    minutes, seconds = divmod(round(progress.seconds / progress.written * (progress.before.total - progress.done)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):
    """A signal has ended the run."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; run the same command again to resume")
        self.number = number


class BatchRun:
    """One run."""

    def __init__(
        self, config: BatchConfig, group: WorkerGroupConfig, ray_address: str | None, display: Display
    ) -> None:
        """Raises ValueError for models that cannot be served this way."""
        self._config, self._group, self._ray_address, self._display = config, group, ray_address, display
        self._pair = group.serving_pair()
        self._fingerprint = self._pair.fingerprint()
        self._requests = RequestReader(self._pair, config.seed)

    def run(self) -> BatchProgress:
        """Answer the lines that have no answer yet. No process is left running at the end, and the output holds the
        first answers, complete.

        Raises ValueError for a mistake of the user; ConnectionError, WorkerGroupError or ServiceLost for a failure of
        the cluster; Stopped on a signal."""
        with OutputFile(self._config.output, self._config.overwrite) as output:
            progress = BatchProgress(survey(self._config.input, output, self._requests, self._fingerprint))
            if progress.done < progress.before.total:
                asyncio.run(self._answer_rest(output, progress))
        return progress

    async def _answer_rest(self, output: OutputFile, progress: BatchProgress) -> None:
        def write(record: dict[str, Any]) -> None:
            output.append(record)
            progress.count(record)
            self._display.update(progress)

        check_gpus(self._group, self._ray_address)
        self._display.say(
            f"{progress.before.total - progress.done:,} of {progress.before.total:,} lines to do; starting the models"
        )
        async with _connected(self._ray_address):
            from services.launch.supervisor import Supervisor

            serving = ServiceState(self._group.start_timeout)
            supervisor = Supervisor(self._group, self._pair, on_health=serving.set_health)
            decode = RetryingDecoder(supervisor, serving).decode
            runner = BatchRunner(self._pair, self._requests, decode, write, self._fingerprint, self._limit())
            try:
                with _ended_by_signals():
                    await supervisor.start()
                    progress.start()
                    with self._display.showing(progress):
                        await runner.run(rest(self._config.input, progress.before.done))
            finally:
                await supervisor.stop()

    def _limit(self) -> Limit:
        if self._config.concurrency is not None:
            return Limit(requests=self._config.concurrency)
        # Twice what can run, so that slots that a round frees are filled at once.
        return Limit(rows=2 * self._group.engine.max_slots)


@asynccontextmanager
async def _connected(ray_address: str | None) -> AsyncIterator[None]:
    from services.launch import cluster

    cluster.import_meanwhile("services.launch.supervisor")
    try:
        cluster.connect(ray_address)
        yield
    except SystemExit as error:  # how Ray answers a SIGTERM, until we do
        raise Stopped(signal.SIGTERM) from error
    finally:
        await asyncio.to_thread(cluster.disconnect)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Turn the first signal into Stopped in the caller's task. A second signal has its usual effect.

    Only for use after Ray has been connected: it installs handlers of its own.
    """
    task, loop, came = asyncio.current_task(), asyncio.get_running_loop(), []
    assert task is not None

    def restore() -> None:
        for number in SIGNALS:
            loop.remove_signal_handler(number)

    def end(number: int) -> None:
        came.append(number)
        restore()
        task.cancel()

    for number in SIGNALS:
        loop.add_signal_handler(number, end, number)
    try:
        yield
    except asyncio.CancelledError as error:
        if not came:
            raise
        task.uncancel()
        raise Stopped(came[0]) from error
    finally:
        restore()
