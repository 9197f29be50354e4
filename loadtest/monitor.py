"""The server while it is under load: what it says of itself, its metrics, what its processes hold, at equal intervals.

Knows nothing about requests. A look that fails is kept with its reason: a gap is not a zero.
"""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
from prometheus_client.parser import text_string_to_metric_families

from loadtest.endpoint import Connections
from loadtest.processes import Held, ProcessTree

TIMEOUT = 5.0
PREFIXES = ("smc_", "process_")


@dataclass(frozen=True)
class Sample:
    at: float
    """Seconds since the start of the run."""
    running: int | None = None
    queued: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """By series, as `name{labels}`; without buckets."""
    held: dict[str, Held] = field(default_factory=dict)
    """By each process, by name."""
    error: str = ""
    epoch: int | None = None
    """Of the workers; grows when they were lost and started again."""

    def total(self, name: str) -> float | None:
        """Over all labels of a metric; None if it is not there."""
        values = [value for series, value in self.metrics.items() if series.partition("{")[0] == name]
        return sum(values) if values else None


class Monitor:
    """`url`: of the metrics page. `tree`: of the service's processes, where they are on this machine."""

    def __init__(self, connections: Connections, url: str | None, tree: ProcessTree | None) -> None:
        self._connections, self._url, self._tree = connections, url, tree
        self.samples: list[Sample] = []

    async def look(self, at: float) -> Sample:
        """One sample, now."""
        try:
            info = await self._connections.server_info(TIMEOUT)
            metrics = await asyncio.to_thread(scrape, self._url) if self._url else {}
            held = await asyncio.to_thread(self._tree.held) if self._tree else {}
        except grpc.RpcError as error:
            return Sample(at, error=f"{error.code().name}: {error.details()}")
        except (OSError, ValueError) as error:
            return Sample(at, error=str(error))
        return Sample(at, info.running, info.queued, metrics, held, epoch=info.epoch)

    async def watch(self, clock: Callable[[], float], interval: float) -> None:
        """Look until cancelled."""
        turn = 0
        while True:
            self.samples.append(await self.look(clock()))
            turn = max(turn + 1, int(clock() / interval))
            await asyncio.sleep(max(0.0, turn * interval - clock()))


def scrape(url: str) -> dict[str, float]:
    """Raises OSError if there is no answer, ValueError if it is none of ours."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=TIMEOUT) as response:
        metrics = parse(response.read().decode())
    if not metrics:
        raise ValueError(
            f"{url} has no metric that begins with {' or '.join(PREFIXES)}; give the service's own /metrics"
        )
    return metrics


def parse(text: str) -> dict[str, float]:
    """By series, of Prometheus' text format; which model they are of goes without saying."""
    metrics = {}
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            if name.startswith(PREFIXES) and not name.endswith("_bucket"):
                shown = ",".join(f'{key}="{word}"' for key, word in labels.items() if key != "model_name")
                metrics[f"{name}{{{shown}}}" if shown else name] = value
    return metrics
