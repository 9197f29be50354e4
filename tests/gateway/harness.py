"""A gateway as its callers see it: a real server in a thread of its own, in front of a real engine of the demo pair."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from services import vllm
from services.backend import Model, ServingPair
from services.client import Client
from services.coordinator.client import Dispatcher
from services.coordinator.messages import EngineStep
from services.coordinator.service import EngineLoop
from services.gateway import generation
from services.gateway.config import GatewayConfig
from services.gateway.server import Gateway
from services.gateway.status import ServiceStatus, WorkerGroupStatus
from services.metrics import Metrics
from services.openai import server as openai_server
from services.pb import generation_pb2_grpc
from smc import demo
from smc.api.engine_config import EngineConfig
from smc.api.request import Answer, Output, Request
from smc.api.sampling_params import SamplingParams
from smc.local_engine import ModelPair, local_engine
from smc.scheduler.stats import EngineStats

PLAIN_CONFIG = EngineConfig(block=4, branches=2, max_slots=64, pages=12_288)
LONG = {"method": "smc", "particles": 16, "max_tokens": 440, "ignore_eos": True, "seed": 1}
"""Settings of an answer that takes seconds, long enough to be interrupted."""


class LocalBackend:
    """A `services.backend.Backend`: an engine in a thread that delivers its outputs to this asyncio loop."""

    def __init__(self, engine, metrics: Metrics) -> None:
        self.engine, self._metrics = engine, metrics
        self._asyncio = asyncio.get_running_loop()
        self._loop = EngineLoop(engine, lambda step: self._asyncio.call_soon_threadsafe(self._take, step))
        self.dispatcher = Dispatcher(self._loop)
        self.stats = EngineStats()
        self._loop.start()

    def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        return self.dispatcher.generate(request)

    def status(self) -> ServiceStatus:
        return ServiceStatus((WorkerGroupStatus(3, self.stats),))

    def stop(self) -> None:
        self._loop.stop()
        assert self._loop.failure is None, self._loop.failure

    def _take(self, step: EngineStep) -> None:
        self.stats = step.stats
        self._metrics.groups[0].observe_step(step.stats)
        self.dispatcher.deliver(step)


class Service:
    """A running gateway with its engine, for use from the test's thread."""

    def __init__(
        self, pair: ModelPair, config: GatewayConfig, engine_config: EngineConfig, wrap: Callable[[Any], Any]
    ) -> None:
        self.pair, self.config, self.engine_config = pair, config, engine_config
        self._wrap = wrap
        self.metrics = Metrics()
        self.asyncio = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.asyncio.run_forever, daemon=True)
        self._thread.start()
        self.do(self._start())

    async def _start(self) -> None:
        self.engine = local_engine(self.pair, self.engine_config)
        self.backend = LocalBackend(self.engine, self.metrics)
        self.gateway = Gateway(
            self.config,
            serving_pair(self.pair, self.engine_config),
            self._wrap(self.backend),
            self.metrics,
            self.backend.status,
            (generation.add_to, vllm.add_to, openai_server.add_to),
        )
        await self.gateway.start()

    @property
    def address(self) -> str:
        return f"localhost:{self.gateway.port}"

    @property
    def url(self) -> str:
        """Base URL of OpenAI's API."""
        return f"http://127.0.0.1:{self.gateway.http_port}/v1"

    def do(self, work: Coroutine[Any, Any, Any], timeout: float = 30.0) -> Any:
        """Run `work` in the gateway's asyncio loop and return its result."""
        return self.begin(work).result(timeout)

    def begin(self, work: Coroutine[Any, Any, Any]):
        return asyncio.run_coroutine_threadsafe(work, self.asyncio)

    def set_health(self, draft: bool, target: bool) -> None:
        async def work() -> None:
            self.gateway.set_health(draft, target)

        self.do(work())

    def client(self, **options: Any) -> Client:
        return Client(self.address, **options)

    @contextmanager
    def stub(self, *options: tuple[str, int]) -> Iterator[generation_pb2_grpc.GenerationServiceStub]:
        """A gRPC stub on a connection of its own."""
        with grpc.insecure_channel(self.address, [*options, ("grpc.use_local_subchannel_pool", 1)]) as channel:
            yield generation_pb2_grpc.GenerationServiceStub(channel)

    def metric(self, name: str, **labels: str) -> float:
        return value_of(self.metrics, name, labels) or 0.0

    def wait_until_free(self, timeout: float = 5.0) -> None:
        """Wait until the engine is idle and no call is left, then check its page accounting, which may be complete only
        after the last step has ended."""
        until(lambda: self.engine.idle and not self.backend.dispatcher.requests, timeout)
        deadline = time.monotonic() + 1.0
        while True:
            try:
                return self.engine.check_books()
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def close(self) -> None:
        self.do(self.gateway.stop())
        self.backend.stop()
        self.asyncio.call_soon_threadsafe(self.asyncio.stop)
        self._thread.join(5)
        self.asyncio.close()


def value_of(metrics: Metrics, name: str, labels: dict[str, str]) -> float | None:
    """Return the value of a series of the service or of its first worker group; None if there is none."""
    registries = (metrics.registry, metrics.groups[0].registry)
    return next((found for one in registries if (found := one.get_sample_value(name, labels)) is not None), None)


@contextmanager
def serving(
    pair: ModelPair,
    engine: EngineConfig = PLAIN_CONFIG,
    *,
    ready: bool = True,
    wrap: Callable[[Any], Any] = lambda backend: backend,
    **gateway: Any,
) -> Iterator[Service]:
    """Start a service on a free port and stop it at the end. `wrap` may put something between gateway and backend."""
    service = Service(pair, GatewayConfig(**{"port": 0, "write_timeout": 5.0, **gateway}), engine, wrap)
    try:
        if ready:
            service.set_health(draft=True, target=True)
        yield service
    finally:
        service.close()


def serving_pair(pair: ModelPair, engine: EngineConfig) -> ServingPair:
    def model(name: str) -> Model:
        decoder = getattr(pair, name)
        return Model(f"demo-{name}", decoder.config, sum(p.numel() for p in decoder.parameters()), 1, f"{name}-weights")

    return ServingPair(
        model("target"),
        model("draft"),
        pair.tokenizer,
        engine.max_context or pair.max_context,
        engine,
        "local",
        demo.TARGET,
    )


def local_answer(pair: ModelPair, prompt: list[int], engine: EngineConfig = PLAIN_CONFIG, **sampling: Any) -> Answer:
    """Return the answer of an engine in this process."""
    request = Request("local", tuple(prompt), SamplingParams(**sampling))
    return next(output.answer for output in local_engine(pair, engine).run([request]) if output.answer)


def until(condition: Callable[[], bool], timeout: float = 5.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
