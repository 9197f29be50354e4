"""A blocked event loop is detected: the log says what blocked it, and its pauses are measured."""

from __future__ import annotations

import asyncio
import logging
import time

from services.gateway.server import LOG_SECONDS, PAUSE_SECONDS, Watchdog


def hold(seconds: float) -> None:
    time.sleep(seconds)


def test_what_holds_the_loop_is_in_the_log(caplog):
    caplog.set_level(logging.WARNING)
    pauses = []

    async def work() -> None:
        watchdog = Watchdog(pauses.append)
        await asyncio.sleep(0.3)
        hold(LOG_SECONDS + 0.5)
        await asyncio.sleep(0.3)
        watchdog.close()

    asyncio.run(work())
    assert any(pause > LOG_SECONDS - PAUSE_SECONDS for pause in pauses)
    assert "the event loop has been blocked for more than 1 s" in caplog.text and "in hold" in caplog.text
