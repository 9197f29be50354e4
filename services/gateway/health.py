"""`grpc.health.v1`: whether the service and each group can be used. Knows nothing about why not.

The servicer of grpcio-health-checking holds a lock while it writes to a watcher, and setting a status needs that lock:
one watcher that does not read would keep the service from ever saying NOT_SERVING. This one writes without holding
anything."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

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
        """All at once; who watches sees the latest, not every one between."""
        self._statuses |= {name: SERVING if serving else NOT_SERVING for name, serving in statuses.items()}
        for delivered in self._delivered.values():
            delivered.clear()
        self._changed.set()
        self._changed = asyncio.Event()

    async def delivered(self, timeout: float) -> None:
        """Wait until all who watch have been sent what was set last, as far as they read it: at most `timeout`
        seconds."""
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
