"""One run of `smcserve batch`: the worker groups that it starts, and its end.

The output, one file or a directory of parts, determines which lines are to be done. Lines of one file are answered by
worker groups with their balancer in this process, lines of a directory by a pool of actors, each with its own worker
group."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.batch.config import BatchConfig
from services.batch.lines import RequestReader
from services.batch.output_file import OutputFile, Survey, rest, survey
from services.batch.progress import BatchProgress, Counts, Display
from services.batch.runner import Replica, ReplicaSpec, ServiceLost
from services.launch.config import WorkerGroupConfig, WorkerGroupError, check_gpus, count_worker_groups, groups_that_fit

if TYPE_CHECKING:
    from services.batch.parts import DonePart, InputPart, PartsOutput
    from services.batch.pool import Pool
    from services.batch.progress import Snapshot

RETRIED = ".retry"
"""Suffix of a new output in which failed lines are decoded again. At the end it replaces the old output."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
LOOK_SECONDS = 1.0
"""Time between two requests for the progress of worker groups."""


class Stopped(Exception):
    """A signal has ended the run."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; run the same command again to resume")
        self.number = number


class BatchRun:
    """One run of a batch."""

    def __init__(
        self, config: BatchConfig, group: WorkerGroupConfig, ray_address: str | None, display: Display
    ) -> None:
        """Raises ValueError if the models cannot be served with this configuration."""
        self._config, self._group, self._ray_address, self._display = config, group, ray_address, display
        self._pair = group.serving_pair()
        self._fingerprint = self._pair.fingerprint()
        self._requests = RequestReader(self._pair, config.seed)
        self._spec = ReplicaSpec(group, config.seed, config.concurrency)
        if config.has_parts and group.trace is not None:
            raise ValueError("trace is available only with one worker group and one output file; leave it out")

    def run(self) -> BatchProgress:
        """Answer the lines that are not in the output yet. At the end no process is left running, and the output holds
        complete lines (the first ones of the input) or complete parts.

        Raises ValueError for a mistake of the user; ConnectionError, WorkerGroupError or ServiceLost for a failure of
        the cluster; Stopped on a signal."""
        with self._display.serving(self._config.metrics_port, self._config.host):
            return self._fill_directory() if self._config.has_parts else self._fill_file()

    def _fill_file(self) -> BatchProgress:
        path = Path(self._config.output)
        with OutputFile(path, self._config.overwrite) as output:
            found = self._survey(output)
            if not (self._config.retry_failed and found.failed):
                return self._append(output, found, None)
            with OutputFile(path.with_name(path.name + RETRIED), overwrite=False) as again:
                progress = self._append(again, self._survey(again), output)
                again.path.replace(path)
                return progress

    def _survey(self, output: OutputFile) -> Survey:
        return survey(Path(self._config.input), output, self._requests, self._fingerprint)

    def _append(self, output: OutputFile, before: Survey, earlier: OutputFile | None) -> BatchProgress:
        """Append the answers that the output lacks. `earlier`: another output of the same input, whose answers are
        copied."""
        progress = BatchProgress(before)
        if progress.done < progress.total:
            self._begin(progress)
            asyncio.run(self._answer_file(output, progress, earlier))
        return progress

    def _fill_directory(self) -> BatchProgress:
        try:
            from services.batch.parts import PartsOutput
            from services.batch.storage import Store
        except ImportError as error:
            raise ValueError(f"{error}; a directory of parts needs it: pip install 'smcserve[batch]'") from error
        config = self._config
        made_by = {"fingerprint": self._fingerprint, "seed": config.seed}
        source, sink = Store.of(config.input), Store.of(config.output)
        opened = PartsOutput(source, sink, config.output_format, made_by, config.overwrite, config.retry_failed)
        with contextlib.closing(opened) as output:
            progress = BatchProgress(output.survey, is_estimate=output.is_estimate)
            if output.parts(1, config.part_lines):
                self._begin(progress)
                asyncio.run(self._answer_parts(output, progress))
        return progress

    def _begin(self, progress: BatchProgress) -> None:
        check_gpus(self._group, self._ray_address)
        left = progress.total - progress.done
        self._display.step(f"{left:,} of {progress.goal} to do; connecting to Ray")

    def _count_groups(self, is_own_cluster: bool) -> int:
        """Return the number of worker groups. Without GPUs, `auto` is as many as fit."""
        group = self._group

        def on_cpus() -> int:
            # Our own cluster declares more CPUs than the machine has.
            return max(1, (os.cpu_count() or 1) // group.ranks) if is_own_cluster else groups_that_fit(group)

        return count_worker_groups(group, on_cpus)

    async def _answer_file(self, output: OutputFile, progress: BatchProgress, earlier: OutputFile | None) -> None:
        """Answer the lines with worker groups whose balancer and clients are in this process."""

        def write(record: dict[str, Any], is_new: bool) -> None:
            output.append(record)
            progress.add(Counts.of(record), is_new)
            self._display.update(progress)

        async with _connected(self._ray_address, "services.launch.balancer") as is_own:
            groups = self._count_groups(is_own)
            replica = Replica(self._spec, self._pair, groups)
            whose = "" if groups == 1 else f" of {groups} worker groups"
            self._display.step(f"starting the models{whose}")
            self._display.worker_groups(starting=groups, ready=0)
            try:
                with _ended_by_signals():
                    await replica.start()
                    self._display.step("the models are ready")
                    self._display.worker_groups(starting=0, ready=groups)
                    progress.start()
                    known = earlier.records() if earlier is not None else ()
                    with self._display.showing(progress):
                        await replica.answer(rest(Path(self._config.input), progress.before.done, known), write)
            finally:
                await replica.stop()

    async def _answer_parts(self, output: PartsOutput, progress: BatchProgress) -> None:
        """Answer the lines with worker groups that each belong to an actor. Makes passes over the remaining parts until
        none is left. A pass that completes no part raises an error."""
        async with _connected(self._ray_address, "services.batch.pool") as is_own:
            from services.batch.pool import Pool
            from services.batch.storage import Store

            groups = self._count_groups(is_own)
            with _ended_by_signals():
                while parts := output.parts(groups, self._config.part_lines):
                    source, count = Store.of(self._config.input), min(groups, len(parts))
                    spec = replace(self._spec, group=replace(self._group, near_target=True))
                    pool = Pool(spec, count, source, output.sink, output.form)
                    some = "1 worker group" if count == 1 else f"{count} worker groups"
                    self._display.step(f"starting the models of {some}, for {len(parts):,} parts of the input")
                    await _Pass(pool, parts, output, progress, self._display).run()


class _Pass:
    """One pass of a pool over parts."""

    def __init__(
        self,
        pool: Pool,
        parts: list[InputPart],
        output: PartsOutput,
        progress: BatchProgress,
        display: Display,
    ) -> None:
        self._pool, self._parts, self._output, self._progress = pool, parts, output, progress
        self._display = display
        self._num_started, self._num_done = 0, 0
        self._error = "every worker group was lost before it completed a part"
        self._written: list[InputPart] = []
        """Parts that were written since the last request to the monitor."""

    async def run(self) -> None:
        """Answer the parts. Raises WorkerGroupError if worker groups do not start, ServiceLost if no part was done."""
        import ray

        from services.batch.progress import start_monitor

        monitor = start_monitor()
        done: asyncio.Queue[DonePart | Exception | None] = asyncio.Queue(1)
        # Ray Data's iterator blocks its thread, also while nothing is ready.
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._feed, args=(monitor, done, loop), daemon=True).start()
        with self._display.showing(self._progress):
            coming = asyncio.create_task(done.get())
            looked = 0.0
            while not (coming.done() and coming.result() is None):
                if coming.done():
                    self._take(coming.result())
                    coming = asyncio.create_task(done.get())
                if time.monotonic() - looked >= LOOK_SECONDS:
                    look: ray.ObjectRef = monitor.snapshot.remote(self._written)
                    self._written = []
                    self._show(await asyncio.to_thread(ray.get, look))
                    looked = time.monotonic()
                await asyncio.wait({coming}, timeout=LOOK_SECONDS)
        self._progress.expect(Counts(), self._output.survey.total)
        self._progress.is_estimate = self._output.is_estimate
        if not self._num_done:
            raise ServiceLost(self._error)

    def _take(self, item: DonePart | Exception | None) -> None:
        if isinstance(item, Exception):
            raise ServiceLost(f"the parts cannot be read, decoded or written: {_first_line(item)}") from item
        assert item is not None
        self._written.append(item.part)
        if item.error is not None:
            self._error = item.error
            return
        self._output.take(item)
        self._num_done += 1
        self._progress.add(item.new)
        self._progress.add(item.kept, is_new=False)

    def _feed(self, monitor: Any, done: asyncio.Queue, loop: asyncio.AbstractEventLoop) -> None:
        """Put the parts that are done into the queue, then an error if there is one, then None. Runs in a thread."""

        def put(item: DonePart | Exception | None) -> None:
            with contextlib.suppress(RuntimeError):  # the run has ended
                asyncio.run_coroutine_threadsafe(done.put(item), loop).result()

        try:
            for part in self._pool.answer(self._parts, monitor):
                put(part)
        except Exception as error:
            put(error)
        put(None)

    def _show(self, now: Snapshot) -> None:
        for seconds in now.started[self._num_started :]:
            if not self._num_started:
                self._progress.start()
            self._num_started += 1
            ready = f"{now.ready} of {self._pool.groups}"
            self._display.step(f"a worker group is ready after {seconds:.0f} s ({ready} are)")
        group = self._pool.spec.group
        allowed = group.max_failed_starts if self._num_started else 1
        if not now.ready and len(now.failures) >= allowed * self._pool.groups:
            raise WorkerGroupError(now.failures[-1])
        self._display.worker_groups(starting=self._pool.groups - now.ready, ready=now.ready)
        self._progress.expect(now.coming, self._output.survey.total)
        self._progress.is_estimate = self._output.is_estimate
        self._display.update(self._progress, quiet=not self._num_started)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@asynccontextmanager
async def _connected(ray_address: str | None, wanted: str) -> AsyncIterator[bool]:
    """Connect to a cluster; yields whether it was started here. `wanted`: a module that the run needs next, imported
    meanwhile."""
    from services.launch import cluster

    cluster.import_meanwhile(wanted)
    try:
        yield cluster.connect(ray_address)
    except SystemExit as error:  # raised by Ray's handler of SIGTERM, until ours is installed
        raise Stopped(signal.SIGTERM) from error
    finally:
        await asyncio.to_thread(cluster.disconnect)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Turn the first signal into Stopped in the caller's task. A second signal has its usual effect.

    Use it only after Ray has been connected, since Ray installs handlers of its own.
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
