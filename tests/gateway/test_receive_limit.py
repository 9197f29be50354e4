"""`ReceiveLimit` keeps count of admitted requests, whatever their callers do in one turn of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from services.errors import SlowSender
from services.gateway.limits import ARRIVING, ReceiveLimit
from smc.scheduler.admission import QueueFull

ROOM = 2


def limit_of(timeout: float) -> ReceiveLimit:
    return ReceiveLimit(ARRIVING // ROOM, timeout)


@pytest.mark.parametrize("is_left_first", [False, True])
def test_a_caller_leaves_as_a_place_becomes_free(is_left_first):
    """Afterwards there is room for as many requests as before, and no more."""

    async def hold(limit: ReceiveLimit, end: asyncio.Event, inside: list[int]) -> None:
        async with limit.let_in():
            inside.append(1)
            await end.wait()
            inside.pop()

    async def work() -> None:
        limit, inside = limit_of(60.0), []
        ends = [asyncio.Event() for _ in range(ROOM)]
        holders = [asyncio.create_task(hold(limit, end, inside)) for end in ends]
        await turns()
        waiter = asyncio.create_task(hold(limit, asyncio.Event(), inside))
        await turns()
        if is_left_first:
            waiter.cancel()
            ends[0].set()
        else:
            ends[0].set()
            waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        ends[1].set()
        await asyncio.gather(*holders)
        end = asyncio.Event()
        others = [asyncio.create_task(hold(limit, end, inside)) for _ in range(ROOM + 1)]
        await turns()
        assert len(inside) == ROOM
        end.set()
        await asyncio.gather(*others)
        limit.close()

    asyncio.run(work())


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(20))
def test_callers_that_leave_at_any_time(seed):
    """A hundred callers enter, send, leave and time out at random, many of them in one turn. No more than `ROOM` are
    ever inside, and at the end none is."""
    draw = random.Random(seed)

    async def work() -> None:
        limit = limit_of(draw.choice([0.0, 0.002, 60.0]))
        inside, most = 0, 0
        sent: list[asyncio.Future[bytes]] = []

        async def call() -> None:
            nonlocal inside, most
            with contextlib.suppress(QueueFull, SlowSender):
                async with limit.let_in():
                    inside += 1
                    most = max(most, inside)
                    try:
                        sent.append(asyncio.get_running_loop().create_future())
                        data = await limit.arrived(sent[-1])
                        await limit.read(data, len)
                    finally:
                        inside -= 1

        calls = []
        for _ in range(100):
            for _ in range(draw.randrange(4)):
                choice = draw.randrange(4)
                waiting = [one for one in sent if not one.done()]
                running = [one for one in calls if not one.done()]
                if choice < 2:
                    calls.append(asyncio.create_task(call()))
                elif choice == 2 and waiting:
                    draw.choice(waiting).set_result(bytes(draw.choice([1, 100_000])))
                elif running:
                    draw.choice(running).cancel()
            await turns(draw.randrange(3))
            assert 0 <= limit._inside <= ROOM
        for one in calls:
            one.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert (limit._inside, limit._outside, limit._arriving, inside) == (0, [], {}, 0) and most <= ROOM
        limit.close()

    asyncio.run(work())
