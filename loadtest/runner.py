"""Runs one load test against a service, from the first connection to the sample of what is left behind. It is an open
loop: every request is sent at its time, whether or not earlier ones have ended. Also searches for the capacity by a
series of runs."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from loadtest.checks import RunCheck, check_run, left_behind, overwhelmed
from loadtest.client import ClientConnections, PlannedRequest, RequestRecord, ServiceEndpoint, ServiceUnreachable
from loadtest.monitor import ProcessTree, ServerMonitor, ServerSample, scrape
from loadtest.settings import LoadSettings
from loadtest.summary import RunSummary, summarise
from loadtest.workload import Workload
from services.client import ModelInfo, ServerInfo

MAX_DOUBLINGS = 20
"""Maximum number of doublings or halvings of the rate. Beyond a factor of a million, the objective does not depend on
the rate."""
CONNECT_TIMEOUT = 30.0
QUIET_TIMEOUT = 60.0
"""Maximum seconds for the service to become idle after the last request."""
PROBE_SEED = 7919
"""Difference between the seeds of two probes, so that one unlucky sequence does not decide all of them."""


@dataclass(frozen=True)
class CapacityProbe:
    """Result of a run at one rate."""

    rate: float
    met: bool
    attainment: float
    """Share of the requests that met the objective."""
    goodput: float
    p99_ttft_ms: float
    p99_e2el_ms: float
    sent: int
    codes: dict[str, int] = field(default_factory=dict)
    late: bool = False
    """Whether the generator was late, so that the load was below this rate."""


class UnhealthyService(RuntimeError):
    """The service failed in a way that load does not explain; the search ends."""


@dataclass(frozen=True)
class CapacityFound:
    low: float | None
    """The highest rate that met the objective; None: no rate did."""
    high: float | None
    """The lowest rate that missed it; None: no rate did."""
    probes: tuple[CapacityProbe, ...]
    """Probes in the order in which they were made."""
    failure: str = ""
    """Why the search ended early; empty if it did not."""

    @property
    def best(self) -> CapacityProbe | None:
        return next((probe for probe in reversed(self.probes) if probe.rate == self.low), None)

    @property
    def good(self) -> bool:
        return self.best is not None and not self.failure

    @property
    def late(self) -> list[float]:
        """Rates at which the generator was late in the last probe."""
        last = {probe.rate: probe.late for probe in self.probes}
        return [rate for rate, late in last.items() if late]


async def search(probe: Callable[[float], Awaitable[CapacityProbe]], start: float, precision: float) -> CapacityFound:
    """Try rates from `start` on, until the lowest rate that misses is at most `1 + precision` times the highest that
    meets. A probe with a late generator is repeated once, and the second result decides. If a probe raises
    UnhealthyService, the search ends."""
    made: list[CapacityProbe] = []

    async def bracket_with(rate: float) -> tuple[float | None, float | None]:
        made.append(await probe(rate))
        if made[-1].late:
            made.append(await probe(rate))
        return _bracket(made)

    rate, failure = start, ""
    try:
        for _ in range(MAX_DOUBLINGS):
            low, high = await bracket_with(rate)
            if low is not None and high is not None:
                break
            rate = high / 2 if high is not None else 2 * rate
        while low is not None and high is not None and high > low * (1 + precision):
            low, high = await bracket_with(math.sqrt(low * high))
    except UnhealthyService as error:
        failure = str(error)
    return CapacityFound(*_bracket(made), tuple(made), failure)


def _bracket(made: list[CapacityProbe]) -> tuple[float | None, float | None]:
    """Return the highest rate that met the objective and the lowest that missed it, each by its last probe."""
    met = {probe.rate: probe.met for probe in made}
    return max((rate for rate in met if met[rate]), default=None), min(
        (rate for rate in met if not met[rate]), default=None
    )


@dataclass(frozen=True)
class RunResult:
    records: list[RequestRecord]
    """Records in the order in which the requests ended."""
    seconds: float
    """Seconds from the start to the end of the last request."""
    cpu_seconds: float
    """CPU time of this process: a generator that needs a whole core distorts what it measures."""


@dataclass
class RunProgress:
    """Counters of a run in progress."""

    sent: int = 0
    in_flight: int = 0
    answered: int = 0
    refused: int = 0
    """Requests refused or failed."""
    cancelled: int = 0


class LoadRunner:
    """Sends the requests of one run. `state` holds its progress."""

    def __init__(self, connections: ClientConnections, deadline: float) -> None:
        self._connections, self._deadline = connections, deadline
        self._begin = 0.0
        self.state = RunProgress()

    def clock(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begin

    def start(self) -> None:
        """Start the clock."""
        self._begin = time.monotonic()

    async def run(self, plan: Iterable[PlannedRequest]) -> RunResult:
        """Send all planned requests, and wait until the last one has ended. Call `start` first."""
        records: list[RequestRecord] = []
        cpu = time.process_time()
        async with asyncio.TaskGroup() as group:
            for planned in plan:
                # Yields even when the request is late, so that streams are read.
                await asyncio.sleep(max(0.0, planned.at - self.clock()))
                group.create_task(self._ask(planned, records))
        return RunResult(records, self.clock(), time.process_time() - cpu)

    async def _ask(self, planned: PlannedRequest, records: list[RequestRecord]) -> None:
        state = self.state
        state.sent += 1
        state.in_flight += 1
        record = await self._connections.ask(planned, self._deadline, self.clock)
        state.in_flight -= 1
        state.answered += record.answered
        state.cancelled += record.cancelled
        state.refused += record.failed
        records.append(record)


ShowProgress = Callable[[LoadRunner, float | None], AbstractContextManager[None]]
"""(runner, seconds) -> context in which the runner's progress is shown. Its requests are sent within these seconds."""


@dataclass(frozen=True)
class LoadedService:
    """The service under test, and how it is watched."""

    endpoint: ServiceEndpoint
    server: ServerInfo
    model: ModelInfo
    metrics: str | None = None
    pid: int | None = None

    @classmethod
    def find(cls, endpoint: ServiceEndpoint, metrics: str | None = None, pid: int | None = None) -> LoadedService:
        """Connect to the service. Raises ServiceUnreachable if the service or its metrics do not answer, and ValueError
        for refused credentials, a page without the service's metrics, or a process that does not exist."""
        server, model = endpoint.describe()
        if metrics is not None:
            try:
                scrape(metrics)
            except OSError as error:
                raise ServiceUnreachable(f"no metrics at {metrics}: {error}") from error
        if pid is not None:
            ProcessTree(pid)
        return cls(endpoint, server, model, metrics, pid)


@dataclass(frozen=True)
class LoadRun:
    """One run: settings, records, samples, summary and checks."""

    site: LoadedService
    settings: LoadSettings
    started: float
    """Seconds since the epoch."""
    outcome: RunResult
    samples: list[ServerSample]
    after: ServerSample
    summary: RunSummary
    checks: list[RunCheck]

    @property
    def good(self) -> bool:
        return not any(check.passed is False for check in self.checks)


async def run_once(site: LoadedService, settings: LoadSettings, watch: ShowProgress) -> LoadRun:
    """Run one load test. Raises ValueError for invalid files in the settings, and ServiceUnreachable."""
    workload = Workload(settings, site.model)
    async with ClientConnections(site.endpoint, settings.connections) as connections:
        await connections.connect(CONNECT_TIMEOUT)
        monitor = ServerMonitor(connections, site.metrics, ProcessTree(site.pid) if site.pid else None)
        runner = LoadRunner(connections, settings.deadline)
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
    checks = check_run(summary, settings, site.server.incarnation, monitor.samples, after)
    return LoadRun(site, settings, started, outcome, monitor.samples, after, summary, checks)


async def rest(monitor: ServerMonitor, clock: Callable[[], float], settle: float) -> ServerSample:
    """Wait until the service is idle, but at most `QUIET_TIMEOUT` seconds. Then wait `settle` seconds more, in which
    the service checks its own state, and return a sample."""
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
    site: LoadedService,
    settings: LoadSettings,
    precision: float,
    watch: ShowProgress,
    tell: Callable[[CapacityProbe], None],
) -> tuple[CapacityFound, LoadRun | None]:
    """Search for the capacity. Returns it with the run at that rate (None if no rate met the objective). Each probe
    starts from an idle service; a service that does not become idle ends the search."""
    runs: list[LoadRun] = []

    async def probe(rate: float) -> CapacityProbe:
        seed = settings.seed + PROBE_SEED * len(runs)
        runs.append(run := await run_once(site, settings.at_rate(rate, seed), watch))
        excused = ("objective", "errors") if overwhelmed(run.summary) else ("objective",)
        if bad := [check for check in run.checks if check.passed is False and check.name not in excused]:
            raise UnhealthyService(f"at {rate:g} requests/s: {bad[0].name}: {bad[0].text}")
        result = probe_of(run)
        tell(result)
        return result

    assert settings.rate is not None
    found = await search(probe, settings.rate, precision)
    return found, next((run for run in reversed(runs) if run.settings.rate == found.low), None)


def probe_of(run: LoadRun) -> CapacityProbe:
    summary, rate = run.summary, run.settings.rate
    assert rate is not None and summary.goodput is not None
    return CapacityProbe(
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
