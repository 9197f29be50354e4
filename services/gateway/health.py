"""Health of the gateway: `grpc.health.v1`, and a watchdog that reports what blocks the asyncio loop. Knows nothing
about why a worker is not ready.

The servicer of grpcio-health-checking holds a lock while it writes to a watcher, and setting a status needs that lock:
one watcher that does not read would keep the service from ever saying NOT_SERVING. This one writes without holding
anything."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc as pb_grpc

from services.errors import shortened

SERVING, NOT_SERVING = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING


class Health(pb_grpc.HealthServicer):
    """Statuses by name, NOT_SERVING until set. Use it in one asyncio loop."""

    def __init__(self, names: Sequence[str]) -> None:
        self._statuses = dict.fromkeys(names, NOT_SERVING)
        self._changed = asyncio.Event()
        self._delivered: dict[object, asyncio.Event] = {}

    def set(self, statuses: dict[str, bool]) -> None:
        """Sets all of them at once; watchers get the latest status, not every one between."""
        self._statuses |= {name: SERVING if serving else NOT_SERVING for name, serving in statuses.items()}
        for delivered in self._delivered.values():
            delivered.clear()
        self._changed.set()
        self._changed = asyncio.Event()

    async def delivered(self, timeout: float) -> None:
        """Wait until all watchers that read have been sent the latest status: at most `timeout` seconds."""
        waits = [asyncio.create_task(delivered.wait()) for delivered in self._delivered.values()]
        if waits:
            _, behind = await asyncio.wait(waits, timeout=timeout)
            for wait in behind:
                wait.cancel()

    async def Check(self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext) -> pb.HealthCheckResponse:
        if request.service not in self._statuses:
            allowed = ", ".join(map(repr, self._statuses))
            await context.abort(
                grpc.StatusCode.NOT_FOUND, shortened(f"service={request.service!r}; allowed: {allowed}")
            )
        return pb.HealthCheckResponse(status=self._statuses[request.service])

    async def List(self, request: pb.HealthListRequest, context: grpc.aio.ServicerContext) -> pb.HealthListResponse:
        return pb.HealthListResponse(statuses={n: pb.HealthCheckResponse(status=s) for n, s in self._statuses.items()})

    async def Watch(self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        delivered = self._delivered[context] = asyncio.Event()
        try:
            await self._follow(request.service, context, delivered)
        finally:
            delivered.set()
            del self._delivered[context]

    async def _follow(self, name: str, context: grpc.aio.ServicerContext, delivered: asyncio.Event) -> None:
        last = None
        while True:
            changed = self._changed  # taken before the status is read, so that no change after it goes unseen
            status = self._statuses.get(name, pb.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != last:
                await context.write(pb.HealthCheckResponse(status=status))
                last = status
            if changed is self._changed:
                delivered.set()
            await changed.wait()


BEAT_SECONDS = 0.1
PAUSE_SECONDS = 0.25
"""Seconds from which a pause counts: callers notice it."""
LOG_SECONDS = 1.0
"""Seconds after which the log shows the loop's stack."""

logger = logging.getLogger(__name__)


class Watchdog:
    """Made in the loop that it watches, by a thread beside it."""

    def __init__(self, on_pause: Callable[[float], None]) -> None:
        """`on_pause` is called after each pause with its seconds."""
        self._loop, self._on_pause = asyncio.get_running_loop(), on_pause
        self._thread_id = threading.get_ident()
        self._last = time.monotonic()
        self._ended = threading.Event()
        self._next = self._loop.call_soon(self._beat)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._next.cancel()
        self._ended.set()

    def _beat(self) -> None:
        now = time.monotonic()
        if (pause := now - self._last - BEAT_SECONDS) > PAUSE_SECONDS:
            self._on_pause(pause)
        self._last = now
        self._next = self._loop.call_later(BEAT_SECONDS, self._beat)

    def _watch(self) -> None:
        logged = 0.0
        while not self._ended.wait(BEAT_SECONDS):
            last = self._last
            if time.monotonic() - last > LOG_SECONDS and last != logged:
                logged = last
                stack = "".join(traceback.format_stack(sys._current_frames().get(self._thread_id)))
                logger.warning("the event loop has been blocked for more than %g s; it is at:\n%s", LOG_SECONDS, stack)
