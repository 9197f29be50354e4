"""One run from its settings to its end: what is left to do, the gang that does it, and how it ends, whatever ends
it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from services.batch.config import BatchConfig
from services.batch.decoder import Decoder, Serving
from services.batch.output import OutputFile
from services.batch.progress import Display, Tally
from services.batch.requests import Requests
from services.batch.results import fingerprint
from services.batch.resume import rest, survey
from services.batch.runner import Limit, Runner
from services.launch.config import GangConfig
from smc.model.source import name_dtypes

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):
    """A signal has ended the run."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; the same command goes on from here")
        self.number = number


class Batch:
    """One run."""

    def __init__(self, config: BatchConfig, gang: GangConfig, ray_address: str | None, display: Display) -> None:
        """Raises ValueError for models that cannot be served this way."""
        self._config, self._gang, self._ray_address, self._display = config, gang, ray_address, display
        self._pair = gang.serving_pair()
        self._fingerprint = fingerprint(self._pair, name_dtypes(gang.dtypes))
        self._requests = Requests(self._pair, config.seed)

    def run(self) -> Tally:
        """Answer what has no answer yet. However this ends, no process is left, and the output is a beginning of the
        answers.

        Raises ValueError for what the user got wrong; ConnectionError, GangError or ServiceLost for what the cluster
        did; Stopped on a signal."""
        with OutputFile(self._config.output, self._config.overwrite) as output:
            tally = Tally(survey(self._config.input, output, self._requests, self._fingerprint))
            if tally.done < tally.before.total:
                asyncio.run(self._answer_rest(output, tally))
        return tally

    async def _answer_rest(self, output: OutputFile, tally: Tally) -> None:
        def write(record: dict[str, Any]) -> None:
            output.append(record)
            tally.count(record)
            self._display.update(tally)

        self._display.say(
            f"{tally.before.total - tally.done:,} of {tally.before.total:,} lines to do; starting the models"
        )
        async with _connected(self._ray_address):
            from services.launch.supervisor import Supervisor

            serving = Serving(self._gang.start_timeout)
            supervisor = Supervisor(self._gang, self._pair, on_health=serving.set_health)
            decode = Decoder(supervisor, serving).decode
            runner = Runner(self._pair, self._requests, decode, write, self._fingerprint, self._limit())
            try:
                with _ended_by_signals():
                    await supervisor.start()
                    tally.start()
                    with self._display.showing(tally):
                        await runner.run(rest(self._config.input, tally.before.done))
            finally:
                await supervisor.stop()

    def _limit(self) -> Limit:
        if self._config.concurrency is not None:
            return Limit(requests=self._config.concurrency)
        # Twice what can run: whatever ends in a round, the next is there already.
        return Limit(rows=2 * self._gang.engine.max_slots)


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
    """Turn the first signal into Stopped, wherever the task of the caller stands. A second one has its usual effect.

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
