"""What the supervisor does when something goes wrong, with a gang that only says so."""

from __future__ import annotations

import asyncio
import time
from typing import ClassVar

import pytest

from services.launch import supervisor as module
from services.launch.errors import GangError
from services.launch.supervisor import Supervisor


class FakeGang:
    """Lives until its epoch's entry in `deaths` is raised by a check."""

    deaths: ClassVar[dict[int, Exception]] = {}
    address = secret = ""

    def __init__(self, config, pair, epoch: int) -> None:
        self.epoch = epoch

    def start(self) -> None:
        pass

    def check(self, timeout: float) -> None:
        time.sleep(0.01)
        if self.epoch in self.deaths:
            raise self.deaths[self.epoch]

    def kill(self) -> None:
        pass

    stop = kill


class FakeClient:
    lost = False

    def __init__(self, address, secret, on_step, on_lost) -> None:
        self._on_lost = on_lost

    def lose(self, why: str) -> None:
        if not self.lost:
            self.lost = True
            self._on_lost()

    async def close(self) -> None:
        pass


@pytest.fixture
def fakes(monkeypatch):
    monkeypatch.setattr(module, "Gang", FakeGang)
    monkeypatch.setattr(module, "CoordinatorClient", FakeClient)
    monkeypatch.setattr(FakeGang, "deaths", {})


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("error", [GangError("draft0 died"), RuntimeError("Ray does not answer")])
def test_whatever_a_check_raises_the_gang_starts_again(fakes, error):
    FakeGang.deaths = {1: error}

    async def work() -> None:
        supervisor = Supervisor(None, None)
        await supervisor.start()
        await until(lambda: supervisor.epoch == 2 and supervisor.serving)
        await supervisor.stop()

    asyncio.run(work())


def test_a_lost_connection_to_a_coordinator_that_lives(fakes):
    """Nobody has died, so nobody but the gateway knows; requests must not be refused for ever."""
    told = []

    async def work() -> None:
        supervisor = Supervisor(None, None, on_serving=told.append)
        await supervisor.start()
        supervisor._client.lose("silent for too long")
        assert not supervisor.serving
        await until(lambda: supervisor.epoch == 2 and supervisor.serving)
        await supervisor.stop()

    asyncio.run(work())
    assert told[:3] == [True, False, True]
