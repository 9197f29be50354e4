"""Rounds of a whole gang, timed by its coordinator: what working in separate processes costs."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from services.coordinator.loop import Step
from services.coordinator.timeline import RoundTimes
from services.launch.config import GangConfig
from services.launch.supervisor import Supervisor
from smc.engine.request import Request
from smc.evaluation.round_time import WARM_UP, steady_requests


@dataclass(frozen=True)
class GangRound:
    """Medians over rounds, in milliseconds; see `services.coordinator.timeline.RoundTimes` for the parts."""

    link: str
    form: str
    block: int
    branches: int
    draft_tp: int
    target_tp: int
    requests: int
    particles: int
    rounds: int
    whole: float
    draft: float
    target: float
    link_time: float
    coordinator: float
    draft_stall: float
    target_stall: float


async def measure(config: GangConfig, concurrency: list[int], particles: int, rounds: int, done: Callable[[], None]) -> list[GangRound]:
    """One gang, `concurrency` requests side by side in turn; `done` is called after each. Needs Ray to be connected."""
    pair = config.serving_pair()
    steps: list[Step] = []
    supervisor = Supervisor(config, pair, on_step=steps.append)
    await supervisor.start()
    found = []
    try:
        for count in concurrency:
            steps.clear()
            asked = steady_requests(pair.tokenizer, config.engine, count, particles, rounds)
            await asyncio.gather(*(_drain(supervisor, request) for request in asked))
            # Only rounds in which all requests take part, without the first few.
            full = [step.times for step in steps if step.times and step.stats.running == count][WARM_UP:]
            found.append(_row(config, count, particles, full))
            done()
    finally:
        await supervisor.stop()
    return found


async def _drain(supervisor: Supervisor, request: Request) -> None:
    async for _ in supervisor.generate(request):
        pass


def _row(config: GangConfig, requests: int, particles: int, times: list[RoundTimes]) -> GangRound:
    engine = config.engine
    medians = {name: 1e3 * statistics.median(getattr(t, name) for t in times) for name in RoundTimes.__dataclass_fields__}
    medians["link_time"] = medians.pop("link")
    return GangRound(
        link=config.link,
        form=engine.form,
        block=engine.block,
        branches=engine.branches,
        draft_tp=config.draft_tp,
        target_tp=config.target_tp,
        requests=requests,
        particles=particles,
        rounds=len(times),
        **medians,
    )
