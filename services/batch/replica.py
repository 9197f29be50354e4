"""One worker group and the lines that it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from services.backend import ServingPair
from services.batch.lines import Kept, Line, RequestReader
from services.batch.runner import BatchRunner, Limit, RetryingDecoder, ServiceState
from services.launch.config import WorkerGroupConfig


@dataclass(frozen=True)
class ReplicaSpec:
    """What every worker group of a run is made of. Picklable."""

    group: WorkerGroupConfig
    seed: int
    """See `BatchConfig`."""
    concurrency: int | None
    """The same."""

    @property
    def limit(self) -> Limit:
        if self.concurrency is not None:
            return Limit(requests=self.concurrency)
        # Twice what can run, so that slots that a round frees are filled at once.
        return Limit(rows=2 * self.group.engine.max_slots)


class Replica:
    """Needs Ray to be connected. Use it in one asyncio loop."""

    def __init__(self, spec: ReplicaSpec, pair: ServingPair) -> None:
        from services.launch.supervisor import Supervisor  # imports torch

        serving = ServiceState(spec.group.start_timeout)
        self._supervisor = Supervisor(spec.group, pair, on_health=serving.set_health)
        decode = RetryingDecoder(self._supervisor, serving).decode
        requests = RequestReader(pair, spec.seed)
        self._runner = BatchRunner(pair, requests, decode, pair.fingerprint(), spec.limit)

    async def start(self) -> None:
        """Returns when it is warm. Raises WorkerGroupError."""
        await self._supervisor.start()

    async def answer(self, lines: Iterable[Line | Kept], write: Callable[[dict[str, Any], bool], None]) -> None:
        """See `BatchRunner.run`. May be called again while it runs."""
        await self._runner.run(lines, write)

    async def stop(self) -> None:
        """End every process."""
        await self._supervisor.stop()
