"""The coordinator between its two workers, over a long time: idle, under load of one model only, under bursts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine

import pytest

from services.coordinator.client import CoordinatorClient
from services.coordinator.loop import Step
from smc.engine.request import FinishReason, Request, SamplingParams
from smc.runtime.config import EngineConfig
from tests.coordinator.harness import coordinator

ENGINE = EngineConfig(block=4, branches=2, max_slots=200, cohorts=2)


def attached(made, spec, work: Callable[[CoordinatorClient, list[Step]], Coroutine]) -> None:
    """Run `work` with a client of this coordinator and the steps it hears of."""

    async def run() -> None:
        steps: list[Step] = []
        client = CoordinatorClient(made.address, spec.meeting.secret, steps.append, lambda: None)
        try:
            await work(client, steps)
        finally:
            await client.close()

    asyncio.run(run())


async def ask(client: CoordinatorClient, name: str, **params) -> FinishReason:
    outputs = [output async for output in client.generate(Request(name, (1, 2, 3, 4), SamplingParams(seed=1, **params)))]
    return outputs[-1].answer.finish_reason


def test_idle_time_is_no_part_of_the_next_round():
    async def work(client: CoordinatorClient, steps: list[Step]) -> None:
        await asyncio.sleep(1.0)
        await ask(client, "first", particles=2, max_tokens=10)
        times = [step.times for step in steps if step.times]
        # Nobody reads what comes of a chunk that draws nothing: it is not kept.
        assert not any(worker._arrived for worker in made._remote.workers.values())
        assert times and all(t.coordinator >= 0 and t.coordinator + t.link <= t.whole + 1e-6 for t in times), times[0]

    with coordinator(ENGINE, heartbeat=0.02) as (made, spec):
        attached(made, spec, work)


def test_load_on_one_model_does_not_starve_the_other():
    """A worker takes silence for death. Here the draft has nothing to do, and the engine is never idle."""

    async def work(client: CoordinatorClient, steps: list[Step]) -> None:
        heard, send = [], made._remote.workers["draft"]._send
        made._remote.workers["draft"]._send = lambda **command: (heard.append(time.monotonic()), send(**command))[1]
        end = time.monotonic() + 2.0

        async def load(name: str) -> None:
            while time.monotonic() < end:
                await ask(client, name, method="target", max_tokens=50, ignore_eos=True)

        await asyncio.gather(load("a"), load("b"), load("c"))
        assert len(heard) >= 5, "the draft heard nothing for two seconds"

    with coordinator(ENGINE, heartbeat=0.2) as (made, spec):
        attached(made, spec, work)


def test_ranks_without_a_leaders_word_for_longer_than_a_start_may_take():
    """They wait as long as their leader does: only the coordinator knows when it will speak again."""

    async def work(client: CoordinatorClient, steps: list[Step]) -> None:
        await asyncio.sleep(8.0)
        assert await ask(client, "later", particles=2, max_tokens=10, ignore_eos=True) is FinishReason.LENGTH

    with coordinator(ENGINE, target_tp=2, start_timeout=6.0, link_timeout=30.0, heartbeat=25.0) as (made, spec):
        attached(made, spec, work)


@pytest.mark.parametrize("link", ["nccl", "grpc"])
def test_everybody_leaves_at_once(link):
    async def work(client: CoordinatorClient, steps: list[Step]) -> None:
        calls = [asyncio.create_task(ask(client, str(i), particles=1, max_tokens=400, ignore_eos=True)) for i in range(200)]
        while not steps or steps[-1].stats.running < 200:
            await asyncio.sleep(0.01)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        async with asyncio.timeout(15):
            assert await ask(client, "later", particles=2, max_tokens=10, ignore_eos=True) is FinishReason.LENGTH

    with coordinator(ENGINE, link=link) as (made, spec):
        attached(made, spec, work)
