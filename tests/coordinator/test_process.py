"""A coordinator with its two workers over a longer time: idle, under load on one model only, under bursts, and with
failures."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace

import pytest

from services.backend import RequestFailed
from services.coordinator.client import CoordinatorClient
from services.coordinator.messages import EngineStep
from services.coordinator.process import EngineStuck
from smc.api.engine_config import EngineConfig
from smc.api.request import FinishReason, Request
from smc.api.sampling_params import SamplingParams
from smc.scheduler.detokenizer import StopRules, TextStream
from tests.coordinator.harness import coordinator
from tests.pairwise import one_of

ENGINE = EngineConfig(block=4, branches=2, max_slots=200, micro_batches=2, drafting="always")
"""With `drafting="always"` no rounds are timed, so the coordinator starts at once."""


def attached(made, spec, work: Callable[[CoordinatorClient, list[EngineStep]], Coroutine]) -> None:
    """Run `work` with a client of this coordinator and the list of steps that the client receives."""

    async def run() -> None:
        steps: list[EngineStep] = []
        client = CoordinatorClient(made.address, spec.rendezvous.secret, steps.append, lambda: None)
        try:
            await work(client, steps)
        finally:
            await client.close()

    asyncio.run(run())


async def ask(client: CoordinatorClient, name: str, **params) -> FinishReason:
    outputs = [
        output
        async for output in client.generate(
            Request(name, (1, 2, 3, 4), SamplingParams(**{"method": "smc", "seed": 1, **params}))
        )
    ]
    return outputs[-1].answer.finish_reason


def test_idle_time_is_no_part_of_the_next_round():
    """The times of a round do not include the idle time before it."""

    async def work(client: CoordinatorClient, steps: list[EngineStep]) -> None:
        await asyncio.sleep(1.0)
        await ask(client, "first", particles=2, max_tokens=10)
        times = [step.times for step in steps if step.times]
        # The result of a prefill chunk that draws no token is never read, so it must not be kept.
        assert not any(worker._arrived for worker in made._remote.workers.values())
        assert times and all(t.coordinator >= 0 and t.coordinator + t.link <= t.whole + 1e-6 for t in times), times[0]
        assert times[0].whole < 1.0, times[0]

    with coordinator(ENGINE, heartbeat=0.02) as (made, spec):
        attached(made, spec, work)


def test_latency_model_before_first_request(caplog):
    """With `drafting="adaptive"` the coordinator has its latency model and is idle before it serves a request."""
    caplog.set_level("INFO", logger="services.coordinator.process")
    with coordinator(replace(ENGINE, drafting="adaptive")) as (made, _):
        engine = made._remote.engine
        (line,) = [
            record.getMessage() for record in caplog.records if record.getMessage().startswith("timed the models in ")
        ]
        # Its overhead counts as 0 until rounds have shown it.
        times, overhead = str(engine.latency).rsplit("; ", 1)
        assert f": {times}; " in line and overhead.startswith("0.00 ms") and engine.idle
        assert [part.curve.points[0][0] for part in engine.latency.parts.values()] == [1, ENGINE.target_tokens, 1]


def test_load_on_one_model_does_not_starve_the_other():
    """A worker that hears nothing for too long takes its coordinator for dead. Here the draft has no work and the
    engine is never idle, so only heartbeats reach the draft."""

    async def work(client: CoordinatorClient, steps: list[EngineStep]) -> None:
        heard, send = [], made._remote.workers["draft"].send
        made._remote.workers["draft"].send = lambda command: (heard.append(time.monotonic()), send(command))[1]
        end = time.monotonic() + 1.0

        async def load(name: str) -> None:
            while time.monotonic() < end:
                await ask(client, name, method="target", max_tokens=50, ignore_eos=True)

        await asyncio.gather(load("a"), load("b"), load("c"))
        assert len(heard) >= 5, "the draft heard nothing for a second"

    with coordinator(ENGINE, heartbeat=0.1) as (made, spec):
        attached(made, spec, work)


@pytest.mark.slow
def test_followers_outwait_start_timeout():
    """Ranks wait as long as their leader does, even longer than `start_timeout`, because only the coordinator knows
    when its next command comes."""

    async def work(client: CoordinatorClient, steps: list[EngineStep]) -> None:
        await asyncio.sleep(8.0)
        assert await ask(client, "later", particles=2, max_tokens=10, ignore_eos=True) is FinishReason.LENGTH

    with coordinator(ENGINE, target_tp=2, start_timeout=6.0, link_timeout=30.0, heartbeat=25.0) as (made, spec):
        attached(made, spec, work)


@pytest.mark.parametrize("link", one_of("grpc", "nccl"))
def test_all_callers_cancel(link):
    """After all 40 callers cancel at once, the next request is answered within seconds."""

    async def work(client: CoordinatorClient, steps: list[EngineStep]) -> None:
        engine = made._remote.engine
        # All begin together: if each began when it arrives, the first ones would be decoded for twenty rounds.
        engine.step = lambda submit: submit() or time.sleep(0.01) or []
        calls = [
            asyncio.create_task(ask(client, str(i), particles=1, max_tokens=400, ignore_eos=True)) for i in range(40)
        ]
        while len(engine.registry.groups) < 40:
            await asyncio.sleep(0.01)
        del engine.step
        while not steps or steps[-1].stats.running < 40:
            await asyncio.sleep(0.01)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        async with asyncio.timeout(15):
            assert await ask(client, "later", particles=2, max_tokens=10, ignore_eos=True) is FinishReason.LENGTH

    with coordinator(ENGINE, link=link) as (made, spec):
        attached(made, spec, work)


def test_a_step_that_does_not_end_is_noticed():
    """`wait` raises EngineStuck if a step takes too long. The engine's own thread, being stuck, cannot report it."""
    go_on = threading.Event()

    async def work(client: CoordinatorClient, steps: list[EngineStep]) -> None:
        made._remote.engine.step = lambda submit: submit() or (go_on.wait(30) and [])
        asking = asyncio.create_task(ask(client, "x", particles=1, max_tokens=5))
        waiting = asyncio.create_task(asyncio.to_thread(made.wait))
        async with asyncio.timeout(20):
            with pytest.raises(EngineStuck, match=r"at one step for more than 2\.2 s"):
                await waiting
        del made._remote.engine.step
        go_on.set()
        await asking

    with coordinator(ENGINE, link_timeout=1.0, heartbeat=0.2, watched=False) as (made, spec):
        attached(made, spec, work)


def test_request_error_is_isolated(monkeypatch):
    """An error while a request is accepted, or while its tokens are reported, fails that request only; the engine's
    page accounting stays correct."""

    async def work(client: CoordinatorClient, steps: list[EngineStep]) -> None:
        others = [
            asyncio.create_task(ask(client, str(i), particles=2, max_tokens=25, ignore_eos=True)) for i in range(3)
        ]
        whole = StopRules.__init__

        def broken(self: StopRules, params: SamplingParams, tokenizer: object) -> None:
            if params.stop == ("break it",):
                raise KeyError("out of luck")
            whole(self, params, tokenizer)

        monkeypatch.setattr(StopRules, "__init__", broken)
        with pytest.raises(RequestFailed, match=r"could not be submitted .*out of luck"):
            await ask(client, "bad", stop=("break it",))
        push = TextStream.push

        def unreadable(self: TextStream, tokens: tuple[int, ...]) -> str:
            if self._rules.strings:
                raise KeyError("out of luck")
            return push(self, tokens)

        monkeypatch.setattr(TextStream, "push", unreadable)
        with pytest.raises(RequestFailed, match="an error of the engine"):
            await ask(client, "worse", stop=("never",), particles=1, max_tokens=60, ignore_eos=True)
        assert [await other for other in others] == [FinishReason.LENGTH] * 3

    with coordinator(ENGINE) as (made, spec):
        attached(made, spec, work)
        until_idle = time.monotonic() + 10
        while not made._remote.engine.idle and time.monotonic() < until_idle:
            time.sleep(0.05)
        made._remote.engine.check_books()
