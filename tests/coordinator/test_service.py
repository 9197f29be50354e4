"""The stream between gateway and coordinator: its start, its limits, and what happens to requests when the gateway
disconnects."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from queue import SimpleQueue
from socket import SHUT_RDWR, create_server

import pytest

from services.backend import Unavailable
from services.client import Client, ServiceError
from services.coordinator import client as client_module
from services.coordinator import service
from services.coordinator.client import CoordinatorClient
from services.coordinator.messages import STEPS, EngineStep, RefusedRequest
from services.coordinator.service import CoordinatorServer
from services.link.streams import StreamCaller, StreamServer
from smc.api.request import Answer, FinishReason, Output, PromptToken, Request, Statistics
from smc.api.sampling_params import SamplingParams
from smc.scheduler.admission import QueueFull
from smc.scheduler.stats import EngineStats

STATS = EngineStats(pages_used={"draft": 0, "target": 0}, pages_total={"draft": 1, "target": 1})


class FakeLoop:
    """Answers requests with even numbers, refuses multiples of three, and lets all others wait."""

    def __init__(self) -> None:
        self.server: CoordinatorServer | None = None
        self.aborted, self.salts, self.priorities = set(), set(), set()

    def submit(self, request: Request) -> None:
        self.salts.add(request.cache_salt)
        self.priorities.add(request.priority)
        number = int(request.request_id)
        if number % 3 == 0:
            self.server.deliver(EngineStep([], [RefusedRequest.of(request.request_id, QueueFull("later"))], STATS))
        elif number % 2 == 0:
            answer = Answer(request.request_id, (1,), "x", FinishReason.LENGTH, None, 1, 1, Statistics(1), 0.0)
            self.server.deliver(EngineStep([Output(request.request_id, (1,), "x", answer)], [], STATS))

    def abort(self, request_id: str) -> None:
        self.aborted.add(int(request_id))


@contextmanager
def proxy(monkeypatch) -> Iterator[list[bytes]]:
    """Set a proxy that never answers as the proxy of all connections. Yields the data that it receives."""
    heard: list[bytes] = []

    def listen() -> None:
        with suppress(OSError):
            while True:
                connection, _ = socket.accept()
                heard.append(connection.recv(1000))

    with create_server(("127.0.0.1", 0)) as socket:
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{socket.getsockname()[1]}")
        for name in ("no_proxy", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        threading.Thread(target=listen, daemon=True).start()
        yield heard
        socket.shutdown(SHUT_RDWR)


def test_local_connections_bypass_proxy(monkeypatch):
    """The gateway's stream, the link between processes and the client bypass the configured proxy, so that none of them
    sends it anything."""
    with proxy(monkeypatch) as heard:
        server = CoordinatorServer("127.0.0.1", "secret", FakeLoop())

        async def work() -> None:
            client = CoordinatorClient(server.address, "secret", lambda step: None, lambda: None)
            await client.attached(10)
            await client.close()

        asyncio.run(work())
        server.close()
        link = StreamServer("127.0.0.1", "secret")
        StreamCaller(link.address, "secret", "Work").close()
        link.close()
        with Client(link.address, token="in plain text") as client, pytest.raises(ServiceError):
            client.server_info()
        assert not heard


def test_attach_timeout():
    """`attached` fails if the coordinator does not answer in time; the service reports that it serves only after it
    succeeds."""

    async def work(address: str) -> None:
        client = CoordinatorClient(address, "secret", lambda step: None, lambda: None)
        with pytest.raises(Unavailable, match=r"did not answer within 0\.3 s"):
            await client.attached(0.3)
        await client.close()

    with create_server(("127.0.0.1", 0)) as silent:
        asyncio.run(work(f"127.0.0.1:{silent.getsockname()[1]}"))


def test_long_updates_are_read_beside_the_loop(monkeypatch):
    """An update with thousands of log-probabilities is decoded in a thread. The order of updates stays."""
    threads: dict[bool, set[threading.Thread]] = {False: set(), True: set()}

    class Noted:
        def decode(self, data: bytes) -> EngineStep:
            threads[len(data) > client_module.LARGE].add(threading.current_thread())
            return STEPS.decode(data)

    monkeypatch.setattr(client_module, "STEPS", Noted())
    server = CoordinatorServer("127.0.0.1", "secret", FakeLoop())
    scored = (PromptToken(-1.0, 1, tuple((token, -1.0) for token in range(20))),) * 1000
    short = Answer("1", (1,), "x", FinishReason.LENGTH, None, 1, 1, Statistics(1), 0.0)
    answers = [short, replace(short, prompt_logprobs=scored), short]
    received: list[int] = []

    async def work() -> None:
        all_came = asyncio.Event()

        def take(step: EngineStep) -> None:
            received.extend(len(output.answer.prompt_logprobs or ()) for output in step.outputs)
            if len(received) == len(answers):
                all_came.set()

        client = CoordinatorClient(server.address, "secret", take, lambda: None)
        await client.attached(10)
        for answer in answers:
            server.deliver(EngineStep([Output("1", (1,), "x", answer)], [], STATS))
        await asyncio.wait_for(all_came.wait(), 60)
        await client.close()

    asyncio.run(work())
    server.close()
    loop = threading.current_thread()
    assert received == [0, 1000, 0] and threads[False] == {loop} and threads[True] and loop not in threads[True]


def test_slow_gateway_is_disconnected(monkeypatch):
    """Steps that wait for a gateway that reads nothing are limited; beyond `MAX_BEHIND` its stream is closed."""
    monkeypatch.setattr(service, "MAX_BEHIND", 5)
    server = CoordinatorServer("127.0.0.1", "secret", FakeLoop())
    server._outbox = outbox = SimpleQueue()
    for _ in range(100):
        server.deliver(EngineStep(stats=STATS))
    assert outbox.qsize() == 7 and [outbox.get() for _ in range(7)][-1] is None
    server.close()


def test_when_the_gateway_goes_only_what_still_runs_is_aborted():
    """Only unfinished requests are aborted when the gateway disconnects. Finished ones are forgotten at once, because a
    coordinator serves for months."""
    loop = FakeLoop()
    loop.server = server = CoordinatorServer("127.0.0.1", "secret", loop)

    async def work() -> None:
        client = CoordinatorClient(server.address, "secret", lambda step: None, lambda: None)

        async def ask(i: int) -> None:
            async for _ in client.generate(Request(f"r{i}", (1,), SamplingParams(), f"salt {i}", priority=i - 15)):
                pass

        calls = [asyncio.create_task(ask(i)) for i in range(1, 31)]
        async with asyncio.timeout(10):
            while sum(call.done() for call in calls) < 20:
                await asyncio.sleep(0.01)
            await client.close()
            await asyncio.gather(*calls, return_exceptions=True)
            unfinished = {i for i in range(1, 31) if i % 3 and i % 2}
            while len(loop.aborted) < len(unfinished):
                await asyncio.sleep(0.01)
            assert loop.aborted == unfinished
            assert loop.salts == {f"salt {i}" for i in range(1, 31)}
            assert loop.priorities == set(range(-14, 16))

    asyncio.run(work())
    server.close()
