"""One run against a service, from the first connection to the look at what is left behind; and a series of them in
search of capacity."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from loadtest import capacity
from loadtest.capacity import Capacity, Probe, Unhealthy
from loadtest.endpoint import Connections, Endpoint, Unreachable
from loadtest.judge import Check, judge, left_behind, overwhelmed
from loadtest.measures import Summary, summarise
from loadtest.monitor import Monitor, Sample, scrape
from loadtest.processes import ProcessTree
from loadtest.runner import Outcome, Runner
from loadtest.settings import Settings
from loadtest.workload import Workload
from services.client import ModelInfo, ServerInfo

CONNECT_TIMEOUT = 30.0
QUIET_TIMEOUT = 60.0
"""Seconds for the service to come to rest, once nobody asks it for anything."""
PROBE_SEED = 7919
"""Probes ask different things at different times, or one unlucky sequence would decide them all."""

Watch = Callable[[Runner, float | None], AbstractContextManager[None]]
"""Shows the progress of a runner whose requests are sent within so many seconds."""


@dataclass(frozen=True)
class Site:
    """What is loaded, and how it is watched."""

    endpoint: Endpoint
    server: ServerInfo
    model: ModelInfo
    metrics: str | None = None
    pid: int | None = None

    @classmethod
    def find(cls, endpoint: Endpoint, metrics: str | None = None, pid: int | None = None) -> Site:
        """Raises Unreachable, and ValueError for what cannot be."""
        server, model = endpoint.describe()
        if metrics is not None:
            try:
                scrape(metrics)
            except OSError as error:
                raise Unreachable(f"no metrics at {metrics}: {error}") from error
        if pid is not None:
            ProcessTree(pid)
        return cls(endpoint, server, model, metrics, pid)


@dataclass(frozen=True)
class Run:
    """Everything that is known of one run."""

    site: Site
    settings: Settings
    started: float
    """Seconds since the epoch."""
    outcome: Outcome
    samples: list[Sample]
    after: Sample
    summary: Summary
    checks: list[Check]

    @property
    def good(self) -> bool:
        return not any(check.passed is False for check in self.checks)


async def run_once(site: Site, settings: Settings, watch: Watch) -> Run:
    """Raises ValueError for what the files of the settings hold, Unreachable."""
    workload = Workload(settings, site.model)
    async with Connections(site.endpoint, settings.connections) as connections:
        await connections.connect(CONNECT_TIMEOUT)
        monitor = Monitor(connections, site.metrics, ProcessTree(site.pid) if site.pid else None)
        runner = Runner(connections, settings.deadline)
        started = time.time()
        seconds = None if settings.duration is None else settings.warm_up + settings.duration
        runner.start()
        looking = asyncio.create_task(monitor.watch(runner.clock, settings.interval))
        try:
            with watch(runner, seconds):
                outcome = await runner.run(workload.plan())
        finally:
            looking.cancel()
        after = await rest(monitor, runner.clock, settings.settle)
    summary = summarise(outcome.records, settings.goodput)
    checks = judge(summary, settings, site.server.epoch, monitor.samples, after)
    return Run(site, settings, started, outcome, monitor.samples, after, summary, checks)


async def rest(monitor: Monitor, clock: Callable[[], float], settle: float) -> Sample:
    """Wait until the service is quiet, then leave it alone for `settle` seconds, so that it checks its own books; then
    look."""
    end = clock() + QUIET_TIMEOUT
    while True:
        sample = await monitor.look(clock())
        quiet = not sample.error and not any(check.passed is False for check in left_behind(sample))
        if quiet or clock() > end:
            break
        await asyncio.sleep(0.25)
    await asyncio.sleep(settle)
    return await monitor.look(clock())


async def find_capacity(
    site: Site, settings: Settings, precision: float, watch: Watch, tell: Callable[[Probe], None]
) -> tuple[Capacity, Run | None]:
    """Also the run at the rate that was found. Each probe starts from a service at rest; one that cannot come to rest
    ends the search."""
    runs: list[Run] = []

    async def probe(rate: float) -> Probe:
        seed = settings.seed + PROBE_SEED * len(runs)
        runs.append(run := await run_once(site, settings.at_rate(rate, seed), watch))
        excused = ("objective", "errors") if overwhelmed(run.summary) else ("objective",)
        if bad := [check for check in run.checks if check.passed is False and check.name not in excused]:
            raise Unhealthy(f"at {rate:g} requests/s: {bad[0].name}: {bad[0].text}")
        result = probe_of(run)
        tell(result)
        return result

    assert settings.rate is not None
    found = await capacity.search(probe, settings.rate, precision)
    return found, next((run for run in reversed(runs) if run.settings.rate == found.low), None)


def probe_of(run: Run) -> Probe:
    summary, rate = run.summary, run.settings.rate
    assert rate is not None and summary.goodput is not None
    return Probe(
        rate=rate,
        met=next(check.passed for check in run.checks if check.name == "objective") is True,
        attainment=summary.attainment or 0.0,
        goodput=summary.goodput,
        p99_ttft_ms=summary.ttft.percentiles[99],
        p99_e2el_ms=summary.e2el.percentiles[99],
        sent=summary.sent,
        codes=summary.codes,
        late=summary.late,
    )
