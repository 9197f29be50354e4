"""The gateway: the gRPC server with health (`grpc.health.v1`) and reflection, and the front ends that are added to it,
from start to drain. A watchdog reports pauses of the asyncio loop. Knows neither the APIs nor the workers.

The health servicer of grpcio-health-checking holds a lock while it writes to a watcher, and setting a status needs that
lock: one watcher that does not read would keep the service from ever reporting NOT_SERVING. `Health` holds no lock
while it writes."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc as pb_grpc
from grpc_reflection.v1alpha import reflection

from services.backend import Backend, ServingPair, StartProgress
from services.errors import shortened
from services.gateway.calls import Calls
from services.gateway.config import GatewayConfig
from services.gateway.interceptors import ReceivingInterceptor, TokenInterceptor
from services.gateway.limits import CallLimit, ReceiveLimit
from services.gateway.request_handler import FrontEnd, HttpServer, RequestHandler
from services.gateway.status import ServiceStatus
from services.gateway.tracing import Tracing
from services.metrics import Metrics
from services.security import server_credentials

SERVING, NOT_SERVING = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING
BEAT_SECONDS = 0.1
PAUSE_SECONDS = 0.25
"""Pauses of more than this many seconds are reported: callers notice them."""
LOG_SECONDS = 1.0
"""Seconds of a pause after which the loop's stack is logged."""
logger = logging.getLogger(__name__)
HEALTH = pb.DESCRIPTOR.services_by_name["Health"].full_name
DRAFT, TARGET = "smc.draft", "smc.target"
"""Names of the draft's and the target's workers in health checks: SERVING if any worker group has them."""
WORKER_GROUP = "smc.worker_group."
"""Beginning of the names of worker groups in health checks, if there are several; its number follows."""
GATEWAY = "smc.gateway"
"""Name of the gateway in health checks: SERVING for as long as the gateway is alive, whatever the state of the
workers."""
LEAVE_SECONDS = 10.0
"""Seconds that gRPC waits for calls beyond the time of a drain; by then `stop` has ended every call."""
DELIVERY_SECONDS = 1.0
"""Seconds that callers have to read why their calls were ended."""
TRACES_SECONDS = 3.0
"""Seconds that a collector has to take the last spans."""


class Health(pb_grpc.HealthServicer):
    """The health service: a status for each name, NOT_SERVING until set. Use it in one asyncio loop."""

    def __init__(self, names: Sequence[str]) -> None:
        self._statuses = dict.fromkeys(names, NOT_SERVING)
        self._changed = asyncio.Event()
        self._delivered: dict[object, asyncio.Event] = {}

    def set(self, statuses: dict[str, bool]) -> None:
        """Set the statuses of these names at once. Watchers are sent the latest status, not every one in between."""
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


class Watchdog:
    """Reports pauses of an asyncio loop, and logs the loop's stack during long ones from a thread. Create it in the
    loop that it watches."""

    def __init__(self, on_pause: Callable[[float], None]) -> None:
        """`on_pause`: called after each pause with its length in seconds."""
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


class Gateway:
    """The gateway. Use it in one asyncio loop: `start`, then `set_health` whenever it changes, at the end `drain` or
    `stop`."""

    def __init__(
        self,
        config: GatewayConfig,
        pair: ServingPair,
        backend: Backend,
        metrics: Metrics,
        status: Callable[[], ServiceStatus],
        front_ends: Sequence[FrontEnd],
    ) -> None:
        self._config, self._pair, self.metrics = config, pair, metrics
        self._tracing = Tracing.from_environment()
        self._calls = Calls(metrics, config.name_of(pair.target.name), self._tracing)
        self.handler = RequestHandler(pair, backend, self._calls, status, config)
        self.token_file = config.token_file()
        self.call_limit = CallLimit(config.max_calls)
        self.receive_limit = ReceiveLimit(config.message_bytes(pair.context), config.write_timeout)
        self._services: dict[str, Callable[[grpc.aio.Server], None]] = {}
        """Functions that add a gRPC service to a server, by the service's full name."""
        self._http: HttpServer | None = None
        for add_to in front_ends:
            add_to(self)
        groups = [f"{WORKER_GROUP}{number}" for number in range(len(metrics.groups))]
        self._groups = groups if len(groups) > 1 else []
        """Names of the worker groups in health checks."""
        self._health = Health(("", *self._services, DRAFT, TARGET, GATEWAY, *self._groups))
        self._health.set({GATEWAY: True})
        self._server: grpc.aio.Server | None = None
        self._watchdog: Watchdog | None = None
        self._stop_metrics: Callable[[], None] | None = None
        self._ready = [(False, False)] * len(metrics.groups)
        """Whether each worker group has a draft, and a target."""
        self._ending = False
        self.port: int | None = None
        """Bound port; known once started, as the next two. None: not served."""
        self.http_port: int | None = None
        self.metrics_port: int | None = None
        engine = pair.engine
        version = importlib.metadata.version("smcserve")
        weights = {"draft": pair.draft.weights, "target": pair.target.weights}
        metrics.set_build_info(
            version,
            config.name_of(pair.target.name),
            engine.form,
            pair.link,
            engine.max_slots,
            engine.block,
            weights,
            pair.placement,
        )

    async def start(self) -> None:
        """Listen. Generate is refused until `set_health` reports a target; all other methods work at once.

        Raises OSError if a port is not free.
        """
        config, token_file = self._config, self.token_file
        limited = {f"/{name}/Generate" for name in self._services}
        receiving = ReceivingInterceptor(limited, self.call_limit, self.receive_limit, self.metrics)
        interceptors = [*([TokenInterceptor(token_file, self.metrics)] if token_file else []), receiving]
        self._server = grpc.aio.server(interceptors=interceptors, options=_options(config, self._pair.context))
        for register in self._services.values():
            register(self._server)
        pb_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((*self._services, HEALTH, reflection.SERVICE_NAME), self._server)
        if config.metrics_port is not None:
            self.metrics_port, self._stop_metrics = self.metrics.serve(
                config.metrics_port, config.host, config.hosts().refusal
            )
        try:
            self.port = self._bind(self._server)
            if self._http is not None:
                self.http_port = await self._http.start()
        except OSError:
            self._close_metrics()
            raise
        await self._server.start()
        self._watchdog = Watchdog(self.metrics.gateway_paused)
        logger.info("listening on %s:%d%s", config.host, self.port, " with TLS" if config.tls else "")

    def add_grpc_service(self, name: str, register: Callable[[grpc.aio.Server], None]) -> None:
        self._services[name] = register

    def add_http_server(self, server: HttpServer) -> None:
        self._http = server

    def set_health(self, draft: bool, target: bool, worker_group: int = 0) -> None:
        """Set which models of a worker group are ready. Generate is served while any target is: without a draft, the
        target alone decodes the requests that allow it. During a drain this has no effect: nothing is ready any
        more."""
        if self._ending:
            return
        self._ready[worker_group] = (draft, target)
        self._calls.starting = None
        serves = any(target for _, target in self._ready)
        self._calls.closed = None if serves else "the service is not ready: its workers are starting; try again later"
        self._report_health()

    def set_progress(self, progress: StartProgress) -> None:
        """Set the progress of the workers' start. Until they have started, calls are refused with it."""
        if not self._ending:
            self._calls.starting = progress
            self._calls.closed = f"the service is starting: {progress}; try again later"

    async def drain(self) -> None:
        """Refuse new calls, let calls in flight finish for `drain_timeout` seconds, end the rest, stop.

        Every client is told to send its next call elsewhere (GOAWAY), and no connection is accepted any more.
        """
        self._close()
        timeout = self._config.drain_timeout
        leaving = None
        if self._server is not None:
            leaving = asyncio.create_task(self._server.stop(grace=timeout + LEAVE_SECONDS))
        if self._http is not None:
            await self._http.close()
        if not await self._calls.ended(timeout):
            logger.warning("calls still in flight after %g s of draining are ended", timeout)
        await self.stop()
        if leaving is not None:
            await leaving

    async def stop(self) -> None:
        """End calls in flight with UNAVAILABLE and stop. It may be called repeatedly, and during a drain."""
        self._close()
        self._calls.interrupt()
        await self._calls.ended(DELIVERY_SECONDS)
        await self._calls.delivered(DELIVERY_SECONDS)
        await self._health.delivered(DELIVERY_SECONDS)
        if self._server is not None:
            await self._server.stop(grace=None)
        if self._http is not None:
            await self._http.stop()
        self.handler.close()
        for part in (self.receive_limit, self._watchdog):
            if part is not None:
                part.close()
        self._close_metrics()
        if self._tracing is not None:
            tracing, self._tracing = self._tracing, None
            # Not in a thread of the loop's executor, which is joined at exit however long a collector takes.
            closing = threading.Thread(target=tracing.close, daemon=True)
            closing.start()
            await asyncio.to_thread(closing.join, TRACES_SECONDS)

    def _close(self) -> None:
        self._ending, self._calls.closed = True, "the service is shutting down; try again later, or elsewhere"
        self._ready = [(False, False)] * len(self._ready)
        self._report_health()

    def _report_health(self) -> None:
        draft, target = (any(ready) for ready in zip(*self._ready))
        apis = dict.fromkeys(("", *self._services), target)
        groups = dict(zip(self._groups, (target for _, target in self._ready)))
        self._health.set({**apis, DRAFT: draft, TARGET: target, **groups})
        self.metrics.set_serving(target)
        for metrics, ready in zip(self.metrics.groups, self._ready, strict=True):
            metrics.set_health(*ready)

    def _bind(self, server: grpc.aio.Server) -> int:
        config = self._config
        host = f"[{config.host}]" if ":" in config.host and not config.host.startswith("[") else config.host
        address = f"{host}:{config.port}"
        try:
            if config.tls:
                return server.add_secure_port(address, server_credentials(*config.tls))
            return server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(
                f"cannot listen on {address}: it is in use, or no address of this machine; give another host or port"
            ) from error

    def _close_metrics(self) -> None:
        if self._stop_metrics is not None:
            self._stop_metrics()
            self._stop_metrics = None


def _options(config: GatewayConfig, context: int) -> list[tuple[str, int]]:
    def milliseconds(seconds: float) -> int:
        return min(int(1e3 * seconds), 2**31 - 1)

    return [
        ("grpc.max_receive_message_length", config.message_bytes(context)),
        ("grpc.max_send_message_length", -1),
        # With the probe, a stream's window grows with the traffic of its connection, to megabytes: two hundred calls
        # that were not admitted yet held 250 MB. Without it the window is 64 KiB, and as large as a message while it is
        # read.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_concurrent_streams", config.max_concurrent_streams),
        ("grpc.keepalive_time_ms", milliseconds(config.keepalive_time)),
        ("grpc.keepalive_timeout_ms", milliseconds(config.keepalive_timeout)),
        # Without this, a ping may stay unanswered for a minute, whatever the timeout above (seen in grpcio 1.85).
        ("grpc.http2.ping_timeout_ms", milliseconds(config.keepalive_timeout)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.max_connection_age_ms", milliseconds(config.max_connection_age)),
        ("grpc.max_connection_age_grace_ms", milliseconds(config.max_connection_age_grace)),
        ("grpc.http2.min_ping_interval_without_data_ms", milliseconds(config.min_ping_interval)),
        # Two servers must not share a port by accident: each would get half of the calls.
        ("grpc.so_reuseport", 0),
    ]
