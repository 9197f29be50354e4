"""How requests are divided among worker groups, and what happens to them when some are lost, full or do not start. The
supervisors are real; their worker groups and clients are stand-ins that fail when they are told to."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import ClassVar

import pytest

from services.backend import DraftUnavailable, RequestFailed, StartProgress, Unavailable
from services.coordinator.messages import EngineStep
from services.launch import supervisor as module
from services.launch.balancer import PREFIX_TOKENS, Balancer, Candidate, ranked
from services.launch.config import WorkerGroupConfig, WorkerGroupError
from services.launch.prefix_index import MAX_TOKENS, PrefixIndex, index_keys
from smc.api.engine_config import EngineConfig
from smc.api.request import Answer, FinishReason, Output, Request, Statistics
from smc.api.sampling_params import Method, SamplingParams
from smc.memory.prefix_keys import BLOCK
from smc.scheduler.admission import QueueFull, check_waiting
from smc.scheduler.stats import EngineStats
from tests.launch.test_supervisor import FakeWorkerGroup, until

CONFIG = WorkerGroupConfig(max_failed_starts=2, engine=EngineConfig(max_slots=8, max_queue=5))
PAIR = CONFIG.serving_pair()
PROMPT = tuple(range(8 * BLOCK))
LOADING = StartProgress("load")
STATS = EngineStats(pages_total={"draft": 4096, "target": 4096})


def asked(prompt: tuple[int, ...] = (1, 2, 3), name: str = "r", **params) -> Request:
    return Request(name, prompt, SamplingParams(**{"method": "exact", "particles": 4, "seed": 1, **params}))


class Client:
    """Gives each request ten tokens, one at a time. Requests beyond the slots wait, and beyond the queue are
    refused."""

    all: ClassVar[list[Client]] = []

    def __init__(self, address, secret, on_step, on_lost) -> None:
        self._on_lost, self._on_step = on_lost, on_step
        self.lost: Unavailable | None = None
        self.requests: list[Request] = []
        self.interrupted: list[Request] = []
        self.config = None
        self.held = asyncio.Event()
        """Not set: running requests make no progress."""
        self.held.set()
        self.has_draft, self.full = True, False
        Client.all.append(self)

    async def attached(self, timeout: float) -> None:
        self._on_step(EngineStep(stats=STATS))

    async def generate(self, request: Request):
        waiting = max(0, len(self.requests) - PAIR.engine.max_slots // request.params.rows)
        full = len(self.requests) >= PAIR.engine.max_slots // request.params.rows
        if self.full:
            raise QueueFull("the queue is full")
        if full:
            check_waiting(self.config, waiting)
        if not self.has_draft and request.params.method is Method.SMC:
            raise DraftUnavailable("method='smc' needs the draft")
        self.requests.append(request)
        try:
            for token in range(10):
                yield Output(request.request_id, (token,), f"{token} ")
                while not self.held.is_set() and self.lost is None:
                    await asyncio.sleep(0.005)
                await asyncio.sleep(0)
                if self.lost is not None:
                    raise self.lost
            text = "".join(f"{token} " for token in range(10))
            statistics = Statistics(1)
            answer = Answer("r", tuple(range(10)), text, FinishReason.LENGTH, None, 1, 3, statistics, 0.1)
            yield Output(request.request_id, (), "", answer)
        finally:
            self.requests.remove(request)

    def fail(self, why: str) -> None:
        if self.lost is None:
            self.lost, self.interrupted = Unavailable(why), list(self.requests)
            self._on_lost()

    async def close(self) -> None:
        self.fail("closed")


class Group(FakeWorkerGroup):
    """Knows to which worker group it belongs: `deaths` and `stillborn` hold pairs of a name and an incarnation."""

    def __init__(self, config, pair, incarnation: int, name: str) -> None:
        super().__init__(config, pair, incarnation, name)
        self.incarnation, self.pair = (name, incarnation), pair

    def progress(self) -> StartProgress:
        return LOADING


@pytest.fixture
def fakes(monkeypatch):
    monkeypatch.setattr(module, "WorkerGroup", Group)
    monkeypatch.setattr(module, "CoordinatorClient", Client)
    monkeypatch.setattr(FakeWorkerGroup, "deaths", {})
    monkeypatch.setattr(FakeWorkerGroup, "stillborn", ())
    monkeypatch.setattr(Client, "all", [])
    monkeypatch.setattr(module, "BACKOFF_SECONDS", (0.0, 0.02))


def serving(work, count: int = 2, **options):
    """Run `work(balancer)` with `count` worker groups."""

    async def whole():
        balancer = Balancer(CONFIG, PAIR, count, **options)
        await balancer.start()
        for group in balancer.groups:
            if group.serving:
                group._client.config = group.group.pair.engine
        try:
            return await asyncio.wait_for(work(balancer), 20)
        finally:
            await balancer.stop()

    return asyncio.run(whole())


async def answer_of(balancer: Balancer, request: Request) -> Answer:
    tokens: tuple[int, ...] = ()
    async for output in balancer.generate(request):
        tokens += output.tokens
        if output.answer is not None:
            assert tokens == output.answer.tokens == tuple(range(10))
            return output.answer
    raise AssertionError("no answer")


GROUP = Candidate(has_draft=True, load=0, last_sent=0, held=0)


@pytest.mark.parametrize(
    ("candidates", "request_", "first"),
    [
        # Load decides, then whose last request was longest ago.
        ([replace(GROUP, load=4), GROUP], asked(), 1),
        ([replace(GROUP, last_sent=3), replace(GROUP, last_sent=2)], asked(), 1),
        # The longest cached beginning, if it is long enough and its worker group not much busier.
        ([GROUP, replace(GROUP, held=96, load=2)], asked(PROMPT), 1),
        ([replace(GROUP, held=80), replace(GROUP, held=96, load=2)], asked(PROMPT), 1),
        ([GROUP, replace(GROUP, held=96, load=3)], asked(PROMPT), 0),
        ([GROUP, replace(GROUP, held=PREFIX_TOKENS - BLOCK, load=2)], asked(PROMPT), 0),
        ([GROUP, replace(GROUP, held=96, load=2)], asked(3 * PROMPT), 0),
        ([GROUP, replace(GROUP, held=MAX_TOKENS, last_sent=9)], asked(tuple(range(20 * MAX_TOKENS))), 1),
        # Free slots come before a cached beginning.
        ([replace(GROUP, load=15), replace(GROUP, load=16, held=128)], asked(PROMPT), 0),
        # A request that cannot do without a draft goes where there is one; an exact request if that has room.
        ([replace(GROUP, has_draft=False), replace(GROUP, load=16)], asked(method="smc"), 1),
        ([replace(GROUP, has_draft=False), replace(GROUP, load=15)], asked(), 1),
        ([replace(GROUP, has_draft=False), replace(GROUP, load=16)], asked(), 0),
        # Four particles need four slots, an exact request one.
        ([replace(GROUP, load=13, held=128), replace(GROUP, load=12)], asked(PROMPT, method="smc"), 1),
        ([replace(GROUP, load=13, held=128), replace(GROUP, load=12)], asked(PROMPT), 0),
        ([replace(GROUP, has_draft=False), replace(GROUP, load=4)], asked(method="target", particles=None), 0),
    ],
)
def test_the_best_worker_group(candidates, request_, first):
    """With 16 slots in each worker group."""
    found = ranked(dict(enumerate(candidates)), request_, 16)
    assert found == [first, 1 - first]


def test_an_index_forgets_what_was_sent_longest_ago():
    """It holds as many blocks as the pool; of an old text it forgets the end before the beginning."""
    index, pages = PrefixIndex(), 8 * BLOCK
    one, two = (index_keys(tuple(range(start, start + 5 * BLOCK)), "") for start in (0, 1000))
    index.add(one, pages)
    assert index.leading(one) == 5 and index.leading(two) == 0 == index.leading(index_keys(range(5 * BLOCK), "salt"))
    index.add(two, pages)
    assert len(index) == 8 and index.leading(two) == 5 and index.leading(one) == 3
    index.add(one[:2], pages)
    index.add(index_keys(range(2000, 2000 + 4 * BLOCK), ""), pages)
    assert index.leading(one) == 2 == index.leading(two)
    index.add(one, 0)
    assert len(index) == 0


def test_the_limit_of_the_queue_holds_over_all_worker_groups(fakes):
    """Two worker groups with 2 running requests each and 5 waiting ones together take 9 requests; one more is refused.
    A request whose worker group is full waits at the other one."""

    async def work(balancer: Balancer) -> list:
        assert [group.group.pair.engine.max_queue for group in balancer.groups] == [3, 2]
        for client in Client.all:
            client.held.clear()
        same = [asyncio.create_task(answer_of(balancer, asked(PROMPT, name=str(i)))) for i in range(9)]
        await until(lambda: sum(len(client.requests) for client in Client.all) == 9)
        full = r"^the queues of all worker groups that serve \(2 of 2\) are full, of one of them: . requests are "
        with pytest.raises(QueueFull, match=full):
            await answer_of(balancer, asked(PROMPT))
        sizes = [len(client.requests) for client in Client.all]
        for client in Client.all:
            client.held.set()
        await asyncio.gather(*same)
        return sizes

    assert serving(work) == [5, 4]


def test_a_prompt_that_was_refused_is_not_held(fakes):
    """A worker group that refuses a request holds no more of its prompt than before."""

    async def work(balancer: Balancer) -> list[int]:
        for prompt in (PROMPT[: 2 * BLOCK], (1, 2, 3)):
            await answer_of(balancer, asked(prompt))
        Client.all[0].full = True
        await answer_of(balancer, asked(PROMPT))
        return [index.leading(index_keys(PROMPT, "")) for index in balancer._indexes]

    assert serving(work) == [2, 8]


def test_exact_requests_of_a_lost_worker_group_go_on_at_another_one(fakes):
    """At once, although the lost one does not come back yet; SMC requests end with Unavailable. Requests of the other
    worker group are not submitted again."""
    FakeWorkerGroup.stillborn = tuple(("worker group 1", incarnation) for incarnation in range(2, 50))

    async def work(balancer: Balancer) -> None:
        for client in Client.all:
            client.held.clear()
        exact = [asyncio.create_task(answer_of(balancer, asked(name=str(i)))) for i in range(2)]
        await until(lambda: [len(client.requests) for client in Client.all] == [1, 1])
        smc = [asyncio.create_task(answer_of(balancer, asked(name=f"smc {i}", method="smc"))) for i in range(2)]
        await until(lambda: [len(client.requests) for client in Client.all] == [2, 2])
        latest = max(balancer.last_sent)
        FakeWorkerGroup.deaths[("worker group 1", 1)] = WorkerGroupError("target0 died")
        await until(lambda: len(Client.all[0].requests) == 3)
        assert not balancer.groups[1].serving and balancer.last_sent[0] == latest + 1
        Client.all[0].held.set()
        assert [answer.text for answer in await asyncio.gather(*exact)] == ["0 1 2 3 4 5 6 7 8 9 "] * 2
        ends = await asyncio.gather(*smc, return_exceptions=True)
        assert [type(end) for end in ends] == [Answer, Unavailable]

    serving(work)


def test_requests_of_a_lost_worker_group_wait_for_a_full_queue(fakes):
    """Nine requests fill the slots and queues of both worker groups. One is lost and does not come back: its requests
    were accepted, so they wait until the other one has room."""
    FakeWorkerGroup.stillborn = tuple(("worker group 1", incarnation) for incarnation in range(2, 999))

    async def work(balancer: Balancer) -> None:
        for client in Client.all:
            client.held.clear()
        calls = [asyncio.create_task(answer_of(balancer, asked(name=str(i)))) for i in range(9)]
        await until(lambda: sum(len(client.requests) for client in Client.all) == 9)
        FakeWorkerGroup.deaths[("worker group 1", 1)] = WorkerGroupError("target0 died")
        await until(lambda: not balancer.groups[1].serving)
        await asyncio.sleep(0.1)
        Client.all[0].held.set()
        assert len(await asyncio.gather(*calls)) == 9

    serving(work)


def test_a_request_that_needs_a_draft_goes_on_to_the_next_worker_group(fakes):
    """Where the engine has lost its draft and the supervisor does not know it yet. If no worker group has one, the
    request ends with Unavailable; if one that may have one is full, with QueueFull."""

    async def work(balancer: Balancer) -> None:
        one, other = Client.all
        one.has_draft = False
        for _ in range(4):
            await answer_of(balancer, asked(method="smc"))
        await until(lambda: not other.requests)
        other.held.clear()
        calls = [asyncio.create_task(answer_of(balancer, asked(method="smc", name=str(i)))) for i in range(4)]
        await until(lambda: len(other.requests) == 4)
        with pytest.raises(QueueFull):
            await answer_of(balancer, asked(method="smc"))
        other.held.set()
        await asyncio.gather(*calls)
        await until(lambda: not other.requests)
        other.has_draft = False
        with pytest.raises(DraftUnavailable, match="needs the draft"):
            await answer_of(balancer, asked(method="smc"))

    serving(work)


def test_a_fatal_request_ends_one_worker_group_only(fakes):
    """A request that was alone when a worker group failed with an error of its own is not decoded again at another
    one."""

    async def work(balancer: Balancer) -> None:
        for client in Client.all:
            client.held.clear()
        fatal = asyncio.create_task(answer_of(balancer, asked()))
        await until(lambda: bool(Client.all[0].requests))
        # The gateway notices the loss before it is known why.
        Client.all[0].fail("the stream broke")
        FakeWorkerGroup.deaths[("worker group 0", 1)] = WorkerGroupError("target0 failed: ValueError", fault=True)
        with pytest.raises(RequestFailed, match="refuses it for now"):
            await fatal
        assert balancer.last_sent[1] == 0 and balancer.groups[1].incarnation == 1

    serving(work)


def test_the_service_lives_as_long_as_one_worker_group_can(fakes):
    """A worker group that fails to start again and again is tried further while another one serves. When none serves
    and each has failed too often, the service ends, and requests that waited end with Unavailable."""
    FakeWorkerGroup.stillborn = tuple(
        (f"worker group {number}", incarnation) for number in (0, 1) for incarnation in range(2, 999)
    )

    async def work(balancer: Balancer) -> None:
        failed = asyncio.create_task(balancer.wait_failed())
        FakeWorkerGroup.deaths[("worker group 1", 1)] = WorkerGroupError("target0 died")
        await until(lambda: balancer.groups[1].incarnation > 2 + CONFIG.max_failed_starts)
        assert balancer.groups[0].serving and not failed.done()
        await answer_of(balancer, asked())
        Client.all[0].held.clear()
        waits = asyncio.create_task(answer_of(balancer, asked()))
        await until(lambda: bool(Client.all[0].requests))
        FakeWorkerGroup.deaths[("worker group 0", 1)] = WorkerGroupError("target0 died")
        with pytest.raises(Unavailable, match="the service has stopped"):
            await waits
        with pytest.raises(WorkerGroupError, match="starts in a row have failed, the last one because: no GPU"):
            await failed

    serving(work)


def test_the_start_fails_if_every_first_start_fails(fakes):
    FakeWorkerGroup.stillborn = (("worker group 0", 1), ("worker group 1", 1))
    with pytest.raises(WorkerGroupError, match=r"^worker group [01]: no GPU$"):
        serving(None)
    FakeWorkerGroup.stillborn = (("", 1),)
    with pytest.raises(WorkerGroupError, match=r"^no GPU$"):
        serving(None, count=1)


@pytest.mark.parametrize("late", ["worker group 0", "worker group 1"])
def test_a_failed_first_start_is_tried_again_while_another_worker_group_serves(fakes, monkeypatch, late):
    """Whichever of the two ends its first start later."""
    FakeWorkerGroup.stillborn = tuple(("worker group 1", incarnation) for incarnation in (1, 2, 3, 4))
    begin = Group.start

    def start(self) -> None:
        time.sleep(0.3 if self.incarnation == (late, 1) else 0)
        begin(self)

    monkeypatch.setattr(Group, "start", start)

    async def work(balancer: Balancer) -> None:
        failed = asyncio.create_task(balancer.wait_failed())
        assert balancer.groups[0].serving and balancer.groups[0].incarnation == 1
        await answer_of(balancer, asked())
        await until(lambda: balancer.groups[1].serving)
        assert balancer.groups[1].incarnation == 5 and not failed.done()

    serving(work)


def test_starts_and_checks_leave_the_loops_threads_to_others(fakes, monkeypatch):
    """While one worker group starts and another is watched, other work in threads of the loop goes on. At the end the
    threads of the worker groups end."""
    go_on, begin, before = threading.Event(), Group.start, threading.enumerate()
    """Services of other tests may run in this process, too."""

    def start(self) -> None:
        if self.incarnation[0] == "worker group 1":
            go_on.wait(10)
        begin(self)

    def threads() -> list[str]:
        new = [one for one in threading.enumerate() if one not in before]
        return [one.name for one in new if one.name.startswith("supervisor")]

    monkeypatch.setattr(Group, "start", start)

    async def work() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        balancer = Balancer(CONFIG, PAIR, 2)
        starting = asyncio.create_task(balancer.start())
        try:
            await until(lambda: balancer.groups[0].serving)
            await asyncio.wait_for(asyncio.to_thread(time.monotonic), 5)
            assert threads() and not starting.done()
        finally:
            go_on.set()
        await starting
        await balancer.stop()
        await until(lambda: not threads())

    asyncio.run(work())


def test_a_full_queue_says_how_many_worker_groups_serve(fakes):
    FakeWorkerGroup.stillborn = tuple(("worker group 1", incarnation) for incarnation in range(1, 999))

    async def work(balancer: Balancer) -> None:
        (client,) = Client.all
        client.held.clear()
        calls = [asyncio.create_task(answer_of(balancer, asked(name=str(i)))) for i in range(5)]
        await until(lambda: len(client.requests) == 5)
        with pytest.raises(QueueFull, match=r"^the queues of all worker groups that serve \(1 of 2\) are full, of one"):
            await answer_of(balancer, asked(PROMPT))
        client.held.set()
        await asyncio.gather(*calls)

    serving(work)


def test_progress_is_told_until_one_worker_group_serves(fakes, monkeypatch):
    """While the second worker group still starts, the service takes requests and reports no progress."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    told: list = []

    def start(self) -> None:
        time.sleep(1.5 if self.incarnation[0] == "worker group 1" else 0.1)

    monkeypatch.setattr(Group, "start", start)

    async def work() -> None:
        balancer = Balancer(CONFIG, PAIR, 2, on_start=told.append, on_health=lambda *states: told.append(states))
        starting = asyncio.create_task(balancer.start())
        await until(lambda: (0, True, True) in told)
        Client.all[0].config = CONFIG.engine
        await answer_of(balancer, asked())
        assert not starting.done()
        await starting
        await balancer.stop()

    asyncio.run(work())
    before, after = told[: told.index((0, True, True))], told[told.index((0, True, True)) :]
    assert before and all(one == LOADING for one in before) and LOADING not in after and (1, True, True) in after


def test_no_progress_of_a_failed_start_is_told(fakes, monkeypatch):
    """While no worker group serves, the progress is that of one that is starting."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    told: list = []
    balancer = Balancer(CONFIG, PAIR, 2, on_start=told.append)
    far = StartProgress("prepare")
    balancer._starting(0, far)
    balancer._starting(1, LOADING)
    assert told == [far, far]
    balancer._starting(0, None)
    assert told[2:] == [LOADING]
    monkeypatch.setattr(FakeWorkerGroup, "stillborn", (("worker group 0", 1), ("worker group 1", 1)))
    monkeypatch.setattr(Group, "progress", lambda self: time.sleep(0.02) or far)

    async def work() -> None:
        with pytest.raises(WorkerGroupError):
            await balancer.start()
        await balancer.stop()

    asyncio.run(work())
    assert not balancer._progress
