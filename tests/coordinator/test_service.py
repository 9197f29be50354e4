"""The stream of the gateway: what it leaves behind when it goes."""

from __future__ import annotations

import asyncio

from services.coordinator.client import CoordinatorClient
from services.coordinator.loop import Step
from services.coordinator.service import CoordinatorServer
from smc.engine.admission import QueueFull
from smc.engine.request import Answer, FinishReason, Output, Request, SamplingParams, Statistics
from smc.engine.stats import EngineStats

STATS = EngineStats(pages_used={"draft": 0, "target": 0}, pages_total={"draft": 1, "target": 1})


class FakeLoop:
    """Answers what is asked with even numbers, refuses multiples of three, and lets the others wait."""

    def __init__(self, server: CoordinatorServer) -> None:
        self._server, self.aborted, self.salts = server, set(), set()

    def submit(self, request: Request) -> None:
        self.salts.add(request.cache_salt)
        number = int(request.request_id)
        if number % 3 == 0:
            self._server.deliver(Step([], {request.request_id: QueueFull("later")}, STATS))
        elif number % 2 == 0:
            answer = Answer(request.request_id, (1,), "x", FinishReason.LENGTH, None, 1, 1, Statistics(1), 0.0)
            self._server.deliver(Step([Output(request.request_id, (1,), "x", answer)], {}, STATS))

    def abort(self, request_id: str) -> None:
        self.aborted.add(int(request_id))


def test_when_the_gateway_goes_only_what_still_runs_is_aborted():
    """What has ended is forgotten at once: a coordinator serves for months."""
    server = CoordinatorServer("127.0.0.1", "secret")
    loop = FakeLoop(server)
    server.attach_to(loop)

    async def work() -> None:
        client = CoordinatorClient(server.address, "secret", lambda step: None, lambda: None)

        async def ask(i: int) -> None:
            async for _ in client.generate(Request(f"r{i}", (1,), SamplingParams(), f"salt {i}")):
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

    asyncio.run(work())
    server.close()
