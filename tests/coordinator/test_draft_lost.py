"""A draft fails while requests run and another replaces it, without Ray: the target and the coordinator go on."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from dataclasses import replace

import pytest

from services.backend import DraftUnavailable, Unavailable
from services.coordinator.client import CoordinatorClient
from services.coordinator.messages import EngineStep
from services.launch.config import WorkerGroupConfig
from services.launch.worker_group import rank_spec
from services.link import connect
from services.workers import process
from services.workers.process import run_rank
from smc.api.engine_config import EngineConfig
from smc.api.request import Answer, Request
from smc.api.sampling_params import SamplingParams
from smc.executor.round_executor import DraftRunner
from smc.model.parallel import Shard
from tests.coordinator.harness import HOST, coordinator

LAW = {"seed": 5, "max_tokens": 20, "ignore_eos": True}
NEEDS_DRAFT = [
    {"method": "smc", "particles": 3},
    {"method": "smc", "particles": 4, "population": "independent"},
    {"method": "draft"},
]


async def ask(client: CoordinatorClient, **params) -> Answer:
    return [output async for output in client.generate(Request("r", (1, 2, 3, 4), SamplingParams(**LAW, **params)))][
        -1
    ].answer


async def outcome(client: CoordinatorClient, **params) -> str:
    try:
        await ask(client, **params)
    except Unavailable:
        return "unavailable"
    return "answered"


@pytest.mark.slow
def test_one_draft_after_the_other(monkeypatch):
    """Twice in a row a draft fails and another replaces it: answers of exact decoding and of the target are unchanged,
    and other methods are unavailable meanwhile. In lockstep: tests/scheduler/test_draft_lost.py."""
    engine = EngineConfig(block=4, drafting="always", branches=2)
    settings = {"link": "nccl", "engine": engine, "start_timeout": 30.0, "link_timeout": 20.0}
    broken, fails = DraftRunner.draft, threading.Event()

    def draft(side: DraftRunner, plan) -> None:
        if fails.is_set():
            raise ValueError("out of luck")
        broken(side, plan)

    monkeypatch.setattr(DraftRunner, "draft", draft)

    async def work(client: CoordinatorClient, steps: list[EngineStep]) -> None:
        plain = (await ask(client, method="target")).tokens
        for incarnation in (2, 3):
            calls = [asyncio.create_task(outcome(client, **params)) for params in NEEDS_DRAFT]
            survivors = [{"method": "exact", "particles": 4}, {"method": "exact", "particles": 1}, {"method": "target"}]
            survive = [asyncio.create_task(ask(client, **params)) for params in survivors]
            while steps[-1].stats.running < 6:
                await asyncio.sleep(0.01)
            fails.set()
            assert [await call for call in calls] == ["unavailable"] * 3
            assert [(await call).tokens for call in survive] == [plain] * 3
            assert (await ask(client, method="exact")).tokens == plain
            assert [await outcome(client, **params) for params in NEEDS_DRAFT] == ["unavailable"] * 3
            with pytest.raises(DraftUnavailable, match="method='smc' needs the draft"):
                await ask(client, method="smc")
            assert steps[-1].lost_draft == incarnation - 1
            fails.clear()
            start_draft(incarnation)
            await asyncio.to_thread(made.attach_draft, incarnation)
            again = await ask(client, method="exact", particles=4)
            assert again.tokens == plain and again.statistics.draft_tokens
            assert [await outcome(client, **params) for params in NEEDS_DRAFT] == ["answered"] * 3

    def start_draft(incarnation: int) -> None:
        config = WorkerGroupConfig(**settings)
        rank = rank_spec(
            config, config.serving_pair(), replace(spec.rendezvous, incarnation=incarnation), "draft", Shard()
        )
        drafts.append(threading.Thread(target=run, args=(rank,), daemon=True))
        drafts[-1].start()

    def run(rank) -> None:
        with suppress(ValueError):
            run_rank(rank, HOST)

    drafts: list[threading.Thread] = []
    with coordinator(**settings) as (made, spec):
        asyncio.run(_attached(made, spec, work))
    for thread in drafts:
        thread.join(10)
        assert not thread.is_alive(), "a draft has not heard that it is to stop"


@pytest.mark.slow
def test_answers_go_on_while_another_draft_is_slow(monkeypatch):
    """The new draft has connected but says nothing for a while; answers of the target do not wait for it."""
    settings = {
        "link": "grpc",
        "engine": EngineConfig(block=4, branches=2, drafting="always"),
        "start_timeout": 30.0,
        "link_timeout": 80.0,
    }
    fails, come, silence = threading.Event(), threading.Event(), threading.Event()
    broken, met = DraftRunner.draft, process.peer_end

    def draft(side: DraftRunner, plan) -> None:
        if fails.is_set():
            raise ValueError("out of luck")
        broken(side, plan)

    def peer_end(where, store, side, *rest):
        if side == "draft" and where.incarnation > 1:
            come.set()
            silence.wait()
        return met(where, store, side, *rest)

    monkeypatch.setattr(DraftRunner, "draft", draft)
    monkeypatch.setattr(connect, "peer_end", peer_end)

    async def work(client: CoordinatorClient, steps: list[EngineStep]) -> None:
        fails.set()
        plain = (await ask(client, method="exact", particles=4)).tokens
        fails.clear()
        threading.Thread(target=lambda: run_rank(rank, HOST), daemon=True).start()
        attaching = asyncio.create_task(asyncio.to_thread(made.attach_draft, 2))
        await asyncio.to_thread(come.wait, 60)
        await asyncio.sleep(1.0)  # so that the coordinator is waiting for the draft
        for _ in range(3):
            async with asyncio.timeout(20):  # a quarter of the draft's time limit
                assert (await ask(client, method="target")).tokens == plain
        assert not attaching.done()
        silence.set()
        await attaching
        again = await ask(client, method="exact", particles=4)
        assert again.tokens == plain and again.statistics.draft_tokens

    with coordinator(**settings) as (made, spec):
        config = WorkerGroupConfig(**settings)
        rank = rank_spec(config, config.serving_pair(), replace(spec.rendezvous, incarnation=2), "draft", Shard())
        try:
            asyncio.run(_attached(made, spec, work))
        finally:
            silence.set()


async def _attached(made, spec, work) -> None:
    steps: list[EngineStep] = []
    client = CoordinatorClient(made.address, spec.rendezvous.secret, steps.append, lambda: None)
    try:
        await work(client, steps)
    finally:
        await client.close()
