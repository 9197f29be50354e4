"""Runs the whole service in one call: the worker groups with their balancer, and the gateway. Stops them on a
signal."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from services import vllm
from services.coordinator.messages import EngineStep
from services.gateway import generation
from services.gateway.config import GatewayConfig
from services.gateway.server import Gateway
from services.gateway.status import ServiceStatus, WorkerGroupStatus
from services.launch import cluster
from services.launch.balancer import Balancer
from services.launch.config import WorkerGroupConfig, count_worker_groups
from services.metrics import Metrics
from services.openai import server as openai_server

logger = logging.getLogger(__name__)

FRONT_ENDS = (generation.add_to, vllm.add_to, openai_server.add_to)
"""Functions that add each served API to the gateway."""


class Service:
    """Gateway, worker groups and metrics, wired together. Needs Ray to be connected; lives in one asyncio loop."""

    def __init__(self, group: WorkerGroupConfig, gateway: GatewayConfig) -> None:
        """Raises ValueError if the models cannot be served with this configuration."""
        pair, count = group.serving_pair(), count_worker_groups(group)
        self.metrics = Metrics(count)
        self._ready = [(False, False)] * count
        """Whether each worker group has a draft, and whether it has a target."""
        self.balancer = Balancer(
            group,
            pair,
            count,
            on_health=self._health,
            on_step=self._step,
            on_start=lambda progress: self.gateway.set_progress(progress),
        )
        self.gateway = Gateway(gateway, pair, self.balancer, self.metrics, self._status, FRONT_ENDS)

    async def start(self) -> None:
        """Listen at once, with health status NOT_SERVING; return when each worker group has warmed up or failed to.
        Raises OSError if a port cannot be used, WorkerGroupError if no worker group starts."""
        await self.gateway.start()
        await self.balancer.start()

    async def stop(self, drain: bool) -> None:
        """If `drain`, let calls in flight finish within the gateway's time limit. Then end every process."""
        if drain:
            await self.gateway.drain()
        else:
            await self.gateway.stop()
        await self.balancer.stop()

    def _health(self, number: int, draft: bool, target: bool) -> None:
        metrics, incarnation = self.metrics.groups[number], self.balancer.groups[number].incarnation
        metrics.set_incarnation(incarnation)
        had_draft, had_target = self._ready[number]
        if incarnation > 1:
            if target and not had_target:
                metrics.workers_restarted()
            elif draft and not had_draft:
                metrics.draft_restarted()
        self._ready[number] = (draft, target)
        self.gateway.set_health(draft, target, number)

    def _step(self, number: int, step: EngineStep) -> None:
        metrics = self.metrics.groups[number]
        metrics.observe_step(step.stats)
        if step.times is not None:
            metrics.observe_round(step.times)

    def _status(self) -> ServiceStatus:
        groups = self.balancer.groups
        return ServiceStatus(
            tuple(
                WorkerGroupStatus(one.incarnation, one.stats, one.serving, one.has_draft, one.draft_degree)
                for one in groups
            )
        )


async def serve(group: WorkerGroupConfig, gateway: GatewayConfig, announce: Callable[[Gateway], None]) -> None:
    """Run until SIGTERM, SIGINT or SIGHUP, on the cluster that Ray is connected to; leave it at the end. `announce` is
    called when the service accepts requests. A second signal ends calls still in flight at once."""
    stopping = _signals()  # Ray has installed handlers of its own
    try:
        service = Service(group, gateway)
        starting = asyncio.create_task(service.start())
        interrupted = asyncio.create_task(stopping.wait())
        await asyncio.wait((starting, interrupted), return_when=asyncio.FIRST_COMPLETED)
        started = False
        try:
            if starting.done():
                starting.result()
                announce(service.gateway)
                started = True
                failed = asyncio.create_task(service.balancer.wait_failed())
                await asyncio.wait((interrupted, failed), return_when=asyncio.FIRST_COMPLETED)
                if failed.done():
                    failed.result()
                failed.cancel()
                logger.info("draining: calls in flight may continue for %g s", gateway.drain_timeout)
        finally:  # also after a start that failed: gRPC crashes in a process that ends with a server open
            starting.cancel()  # first, or it could start again what `stop` has ended
            # While one worker group starts, another one may serve.
            await service.stop(drain=started or service.balancer.serving)
    finally:
        await asyncio.to_thread(cluster.disconnect)


def _signals() -> asyncio.Event:
    """Return an event that the first SIGTERM, SIGINT or SIGHUP sets; the second signal has its usual effect."""
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # which `nohup` sets
        numbers.append(signal.SIGHUP)

    def stop(number: signal.Signals) -> None:
        as_after = "" if number is signal.SIGTERM else ", as after SIGTERM"
        logger.info(
            "%s: draining%s; nothing is reloaded, changed tokens and certificates apply at once", number.name, as_after
        )
        stopping.set()
        for one in numbers:
            loop.remove_signal_handler(one)

    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    return stopping
