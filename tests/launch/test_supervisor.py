"""How the supervisor reacts to failures, with a fake worker group that reports them."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from typing import ClassVar

import pytest

from services.backend import RequestFailed, StartProgress
from services.coordinator.messages import EngineStep
from services.launch import supervisor as module
from services.launch.config import WorkerGroupConfig, WorkerGroupError
from services.launch.supervisor import Supervisor
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.scheduler.stats import EngineStats

CONFIG = WorkerGroupConfig(max_failed_starts=3)
PAIR = CONFIG.serving_pair()


class FakeWorkerGroup:
    """A worker group that lives until a check raises the error that `deaths` holds for its incarnation."""

    deaths: ClassVar[dict[int, Exception]] = {}
    stillborn: ClassVar[tuple[int, ...]] = ()
    silent: ClassVar[tuple[int, ...]] = ()
    drafts: ClassVar[list[int]] = []
    """Incarnations of drafts that were started beside a running target."""
    secret, draft_degree = "", 1

    def __init__(self, config, pair, incarnation: int, name: str) -> None:
        self.incarnation = self.address = incarnation

    def start(self) -> None:
        if self.incarnation in self.stillborn:
            raise WorkerGroupError("no GPU")

    def check(self, timeout: float) -> None:
        time.sleep(0.03)
        if self.incarnation in self.deaths:
            raise self.deaths[self.incarnation]

    def probe(self) -> None:
        if self.incarnation in self.silent:
            raise WorkerGroupError("target0 does not answer")

    def start_draft(self, incarnation: int) -> None:
        if incarnation in self.stillborn:
            raise WorkerGroupError("no GPU")
        self.drafts.append(incarnation)

    def end_draft(self) -> None:
        self.deaths.pop(self.incarnation, None)

    def kill(self) -> None:
        pass

    detach_draft = kill

    stop = kill


class FakeClient:
    lost = False
    in_flight: ClassVar[dict[int, list[Request]]] = {}

    def __init__(self, address, secret, on_step, on_lost) -> None:
        self._on_lost = on_lost
        self.requests = self.interrupted = self.in_flight.get(address, ())

    def fail(self, why: str) -> None:
        if not self.lost:
            self.lost = True
            self._on_lost()

    async def attached(self, timeout: float) -> None:
        pass

    async def close(self) -> None:
        self.fail("closed")


@pytest.fixture
def fakes(monkeypatch):
    monkeypatch.setattr(module, "WorkerGroup", FakeWorkerGroup)
    monkeypatch.setattr(module, "CoordinatorClient", FakeClient)
    monkeypatch.setattr(FakeWorkerGroup, "deaths", {})
    monkeypatch.setattr(FakeWorkerGroup, "stillborn", ())
    monkeypatch.setattr(FakeWorkerGroup, "silent", ())
    monkeypatch.setattr(FakeWorkerGroup, "drafts", [])
    monkeypatch.setattr(module, "BACKOFF_SECONDS", (0.0,))


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("error", [WorkerGroupError("draft0 died"), RuntimeError("Ray does not answer")])
def test_whatever_a_check_raises_the_worker_group_starts_again(fakes, error):
    """Any error of a check restarts the worker group."""
    FakeWorkerGroup.deaths = {1: error}

    async def work() -> None:
        supervisor = Supervisor(CONFIG, PAIR)
        await supervisor.start()
        await until(lambda: supervisor.incarnation == 2 and supervisor.serving)
        await supervisor.stop()

    asyncio.run(work())


def test_a_start_says_how_far_it_is(fakes, monkeypatch):
    """Each change of progress is reported once, and none after the start has ended."""
    steps = [StartProgress("reserve"), *[StartProgress("load", {"target": percent}) for percent in (0, 0, 50)]]
    left, told = iter(steps), []
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(FakeWorkerGroup, "progress", lambda self: next(left, steps[-1]), raising=False)

    def start(self) -> None:
        while len(told) < 3:
            time.sleep(0.01)

    monkeypatch.setattr(FakeWorkerGroup, "start", start)

    async def work() -> None:
        supervisor = Supervisor(CONFIG, PAIR, on_start=told.append, on_health=lambda *there: told.append(there))
        await supervisor.start()
        await asyncio.sleep(0.05)
        await supervisor.stop()

    asyncio.run(work())
    assert told[:4] == [steps[0], steps[1], steps[3], (True, True)] and StartProgress not in map(type, told[4:])


def test_a_lost_connection_to_a_coordinator_that_lives(fakes):
    """No process has died, so only the gateway notices. The worker group must restart, as otherwise requests would be
    refused for ever."""
    told = []

    async def work() -> None:
        supervisor = Supervisor(CONFIG, PAIR, on_health=lambda *there: told.append(there))
        await supervisor.start()
        supervisor._client.fail("silent for too long")
        assert not supervisor.serving
        await until(lambda: supervisor.incarnation == 2 and supervisor.serving)
        await supervisor.stop()

    asyncio.run(work())
    assert told[:3] == [(True, True), (False, False), (True, True)]


def test_a_draft_that_dies_comes_back_beside_the_target(fakes):
    """The draft is started again until it succeeds, while the target keeps serving. Two failed starts are fewer than
    `max_failed_starts`."""
    told = []
    FakeWorkerGroup.deaths, FakeWorkerGroup.stillborn = {1: WorkerGroupError("draft0 died", draft=True)}, (2, 3)

    async def work() -> None:
        supervisor = Supervisor(CONFIG, PAIR, on_health=lambda *there: told.append(there))
        await supervisor.start()
        group = supervisor.group
        await until(lambda: FakeWorkerGroup.drafts == [4] and supervisor.has_draft)
        assert supervisor.serving and supervisor.group is group and supervisor.incarnation == 4
        await supervisor.stop()

    asyncio.run(work())
    assert told == [(True, True), (False, True), (True, True), (False, False)]


def test_a_draft_that_cannot_be_started_stays_away(fakes):
    """After `max_failed_starts` failed starts of a draft, the target keeps serving without one."""
    FakeWorkerGroup.deaths, FakeWorkerGroup.stillborn = (
        {1: WorkerGroupError("draft0 died", draft=True)},
        tuple(range(2, 100)),
    )

    async def work() -> None:
        supervisor = Supervisor(CONFIG, PAIR)
        await supervisor.start()
        await until(lambda: supervisor.incarnation == 1 + CONFIG.max_failed_starts)
        await asyncio.sleep(0.1)
        assert supervisor.serving and not supervisor.has_draft and supervisor.incarnation == 4
        await supervisor.stop()

    asyncio.run(work())


@pytest.mark.parametrize("target_answers", [True, False])
def test_the_coordinator_says_that_the_draft_is_lost(fakes, target_answers):
    """The coordinator reports a lost draft although no process has died. When draft and target wait for each other, the
    stopped one may be the target; then the whole worker group restarts."""
    FakeWorkerGroup.silent = () if target_answers else (1,)

    async def work() -> None:
        supervisor = Supervisor(CONFIG, PAIR)
        await supervisor.start()
        supervisor._step(EngineStep(stats=EngineStats(), lost_draft=1))
        await until(lambda: supervisor.incarnation == 2 and supervisor.has_draft)
        supervisor._step(EngineStep(stats=EngineStats(), lost_draft=1))
        await asyncio.sleep(0.1)
        assert supervisor.incarnation == 2, "what has been told before says nothing of another draft"
        await supervisor.stop()

    asyncio.run(work())
    assert FakeWorkerGroup.drafts == ([2] if target_answers else [])


@pytest.mark.parametrize("told", [True, False])
def test_a_lost_draft_is_not_offered_while_the_target_is_probed(fakes, monkeypatch, told):
    """Whether the coordinator reports the loss or a check does. Health changes once."""
    probed, states = threading.Event(), []
    monkeypatch.setattr(FakeWorkerGroup, "probe", lambda self: probed.wait(5))

    async def work() -> None:
        supervisor = Supervisor(CONFIG, PAIR, on_health=lambda *there: states.append(there))
        await supervisor.start()
        assert supervisor.has_draft
        if told:
            supervisor._step(EngineStep(stats=EngineStats(), lost_draft=1))
            assert not supervisor.has_draft
        else:
            FakeWorkerGroup.deaths = {1: WorkerGroupError("draft0 died", draft=True)}
        try:
            await until(lambda: not supervisor.has_draft)
            assert supervisor.serving and states == [(True, True), (False, True)]
        finally:
            probed.set()
        await until(lambda: supervisor.has_draft)
        await supervisor.stop()

    asyncio.run(work())
    assert states == [(True, True), (False, True), (True, True), (False, False)]


def test_repeated_failed_starts_end_service(fakes):
    """After `max_failed_starts` failed starts in a row the supervisor fails, so that the process ends and its operator
    learns that the machine may be broken."""
    FakeWorkerGroup.deaths, FakeWorkerGroup.stillborn = {1: WorkerGroupError("draft0 died")}, tuple(range(2, 100))

    async def work() -> None:
        supervisor = Supervisor(CONFIG, PAIR)
        await supervisor.start()
        async with asyncio.timeout(5):
            with pytest.raises(WorkerGroupError, match="3 starts in a row have failed, the last one because: no GPU"):
                await supervisor.wait_failed()
        assert supervisor.incarnation == 4
        await supervisor.stop()

    asyncio.run(work())


def test_starts_that_fail_now_and_then_are_no_reason_to_give_up(fakes):
    """Only failed starts in a row count towards `max_failed_starts`."""
    FakeWorkerGroup.deaths = {incarnation: WorkerGroupError("draft0 died") for incarnation in (1, 4, 7)}
    FakeWorkerGroup.stillborn = (2, 3, 5, 6, 8, 9)

    async def work() -> None:
        supervisor = Supervisor(CONFIG, PAIR)
        await supervisor.start()
        await until(lambda: supervisor.incarnation == 10 and supervisor.serving)
        await supervisor.stop()

    asyncio.run(work())


def test_a_coordinator_that_says_nothing(fakes, monkeypatch):
    """A coordinator that sends nothing is replaced, although its connection may be intact: its process may be stopped,
    or its engine stuck in a step."""
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.1)

    async def work() -> None:
        supervisor = Supervisor(WorkerGroupConfig(link_timeout=0.2, heartbeat=0.1), PAIR)
        await supervisor.start()
        await until(lambda: supervisor.incarnation >= 2 and supervisor.serving)
        await supervisor.stop()

    asyncio.run(work())


ALONE, FIRST, SECOND = (Request("any id", (1, 2, n), SamplingParams(method="smc", seed=n)) for n in range(3))


def test_fatal_request_is_quarantined(fakes, monkeypatch):
    """Only a request that was in flight alone when a process failed with an error of its own is refused afterwards.
    Requests that ran together are not, nor is one during which a process was killed."""
    FakeWorkerGroup.deaths = {
        1: WorkerGroupError("coordinator failed: KeyError", fault=True),
        2: WorkerGroupError("draft0 died"),
        3: WorkerGroupError("draft0 died"),
        4: WorkerGroupError("target0 failed: ValueError", fault=True),
        5: WorkerGroupError("target0 failed: ValueError", fault=True),
    }
    in_flight = {1: [ALONE], 2: [FIRST], 3: [FIRST], 4: [FIRST, SECOND], 5: [SECOND, FIRST]}
    monkeypatch.setattr(FakeClient, "in_flight", in_flight)

    async def work() -> list[Request]:
        supervisor = Supervisor(CONFIG, PAIR)
        await supervisor.start()
        await until(lambda: supervisor.incarnation == 6 and supervisor.serving)
        await supervisor.stop()
        return [request for request in (ALONE, FIRST, SECOND) if is_refused(supervisor, request)]

    assert asyncio.run(work()) == [ALONE]


def test_request_fatal_to_draft_is_quarantined(fakes):
    """The request that was in flight alone when the coordinator lost the draft is refused afterwards; requests that
    arrived later are not."""
    FakeWorkerGroup.deaths = {1: WorkerGroupError("draft0 failed: ValueError", fault=True, draft=True)}

    async def work() -> list[Request]:
        supervisor = Supervisor(CONFIG, PAIR)
        await supervisor.start()
        supervisor._client.requests = [ALONE]
        supervisor._step(EngineStep(stats=EngineStats(), lost_draft=1))
        supervisor._client.requests = [FIRST]
        await until(lambda: supervisor.incarnation == 2 and supervisor.has_draft)
        await supervisor.stop()
        return [request for request in (ALONE, FIRST) if is_refused(supervisor, request)]

    assert asyncio.run(work()) == [ALONE]


def is_refused(supervisor: Supervisor, request: Request) -> bool:
    try:
        supervisor._quarantine.check(replace(request, request_id="another", params=replace(request.params, seed=77)))
    except RequestFailed:
        return True
    return False
