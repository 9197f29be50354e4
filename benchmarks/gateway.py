"""Compares the costs of OpenAI's API and of gRPC: `python -m benchmarks.gateway`. The gateway runs in its own process.

With one request at a time, measures the time to the first token and between tokens, with the demo pair and with a
backend that is always ready, so that only the gateway is measured. Then, with 64 streams of that backend, measures
tokens a second and the gateway's CPU time for each token. Every line is JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import aiohttp
import grpc
import psutil

from services.backend import Model, ServingPair
from services.coordinator.client import Dispatcher
from services.coordinator.messages import EngineStep
from services.coordinator.service import EngineLoop
from services.gateway.config import GatewayConfig
from services.gateway.server import Gateway
from services.gateway.status import ServiceStatus, WorkerGroupStatus
from services.launch.service import FRONT_ENDS
from services.metrics import Metrics
from services.openai.bodies import CHAT
from services.pb import generation_pb2 as pb
from services.pb import generation_pb2_grpc
from smc import demo
from smc.api.engine_config import EngineConfig
from smc.api.request import Answer, FinishReason, Output, Request, Statistics
from smc.demo.problems import generate
from smc.local_engine import ModelPair, local_engine

STREAMS = 64
WARM_UP = 4
QUESTIONS = [problem.question for problem in generate(1, 16, "test")]
ENGINE = EngineConfig(block=4, branches=2, max_slots=64, pages=12_288)
Ask = Callable[[str, dict], AsyncIterator[None]]


class ReadyBackend:
    """A backend without models: every answer has `max_tokens` tokens, each available as soon as it is awaited."""

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        count = request.params.max_tokens or 1
        for number in range(count):
            await asyncio.sleep(0)
            answer = None
            if number == count - 1:
                answer = Answer(
                    request.request_id,
                    (5,) * count,
                    " word" * count,
                    FinishReason.LENGTH,
                    matched=None,
                    seed=1,
                    prompt_tokens=1,
                    statistics=Statistics(1),
                    seconds=0.1,
                )
            yield Output(request.request_id, (5,), " word", answer)


class EngineBackend:
    """A backend with an engine in a thread of this process; its outputs are delivered in this asyncio loop."""

    def __init__(self, engine: Any) -> None:
        self._asyncio = asyncio.get_running_loop()
        self._loop = EngineLoop(engine, self._hand_over)
        self._dispatcher = Dispatcher(self._loop)
        self._loop.start()

    def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        return self._dispatcher.generate(request)

    def _hand_over(self, step: EngineStep) -> None:
        self._asyncio.call_soon_threadsafe(self._dispatcher.deliver, step)


async def serve(ready: bool) -> None:
    """Print both ports, then serve until standard input ends."""
    pair = ModelPair.load(demo.TARGET, demo.DRAFT)

    def model(name: str) -> Model:
        decoder = getattr(pair, name)
        return Model(f"demo-{name}", decoder.config, sum(p.numel() for p in decoder.parameters()), 1, f"{name}-weights")

    serving = ServingPair(
        model("target"), model("draft"), pair.tokenizer, pair.max_context, ENGINE, "local", demo.TARGET
    )
    backend: Any = ReadyBackend() if ready else EngineBackend(local_engine(pair, ENGINE))
    config = GatewayConfig(port=0, http_port=0)
    status = ServiceStatus((WorkerGroupStatus(1),))
    gateway = Gateway(config, serving, backend, Metrics(), lambda: status, FRONT_ENDS)
    await gateway.start()
    gateway.set_health(True, True)
    print(gateway.port, gateway.http_port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await gateway.stop()


@contextmanager
def process(ready: bool) -> Iterator[tuple[psutil.Process, tuple[int, int]]]:
    """Start a process that serves; yields it with its ports for gRPC and HTTP."""
    command = [sys.executable, "-m", "benchmarks.gateway", "--serve", "ready" if ready else "engine"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        grpc_port, http_port = map(int, child.stdout.readline().split())
        yield psutil.Process(child.pid), (grpc_port, http_port)
        child.stdin.close()


def by_grpc(channel: grpc.aio.Channel) -> Ask:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)

    async def ask(text: str, settings: dict):
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=text)])
        sampling = pb.SamplingParams(method=pb.METHOD_TARGET, **settings)
        async for _ in stub.Generate(pb.GenerateRequest(chat=chat, sampling=sampling)):
            yield

    return ask


def by_http(session: aiohttp.ClientSession, port: int) -> Ask:
    async def ask(text: str, settings: dict):
        body = {"messages": [{"role": "user", "content": text}], "stream": True, "method": "target", **settings}
        async with session.post(f"http://127.0.0.1:{port}{CHAT}", json=body) as response:
            assert response.status == 200
            # Chunks are taken as they arrive: the time to parse lines would be measured, too.
            async for _ in response.content.iter_any():
                yield

    return ask


async def times(ask: Ask, text: str, seed: int) -> tuple[float, list[float]]:
    """Return the seconds to the first message, and those between messages."""
    moments = [time.perf_counter()]
    async for _ in ask(text, {"seed": seed, "max_tokens": 40}):
        moments.append(time.perf_counter())
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    return gaps[0], gaps[1:]


async def rate(ask: Ask, tokens: int, server: psutil.Process) -> tuple[float, float]:
    """Return the tokens a second of all streams, and the gateway's CPU time for each token in microseconds."""

    async def one(number: int) -> None:
        async for _ in ask("x", {"max_tokens": tokens, "seed": number}):
            pass

    busy, begin = sum(server.cpu_times()[:2]), time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(STREAMS)))
    seconds, busy = time.perf_counter() - begin, sum(server.cpu_times()[:2]) - busy
    return STREAMS * tokens / seconds, 1e6 * busy / (STREAMS * tokens)


async def with_both(ports: tuple[int, int], work: Callable[[dict[str, Ask]], Awaitable[None]]) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{ports[0]}") as channel,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        await work({"gRPC": by_grpc(channel), "HTTP": by_http(session, ports[1])})


async def latency(asks: dict[str, Ask], backend: str, requests: int) -> None:
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in asks}
    for number in range(requests + WARM_UP):
        for name, ask in asks.items():
            first, gaps = await times(ask, QUESTIONS[number % len(QUESTIONS)], number)
            if number >= WARM_UP:
                found[name][0].append(first)
                found[name][1].extend(gaps)
    for name, (firsts, gaps) in found.items():
        row = {
            "api": name,
            "backend": backend,
            "first_token_ms": 1e3 * statistics.median(firsts),
            "between_ms": 1e3 * statistics.median(gaps),
        }
        print(
            json.dumps(
                row
                | {"first_token_mean_ms": 1e3 * statistics.mean(firsts), "between_mean_ms": 1e3 * statistics.mean(gaps)}
            )
        )


async def throughput(asks: dict[str, Ask], tokens: int, server: psutil.Process) -> None:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in asks}
    for _ in range(5):
        for name, ask in asks.items():
            found[name].append(await rate(ask, tokens, server))
    for name, rows in found.items():
        speeds, costs = zip(*rows)
        row = {
            "api": name,
            "streams": STREAMS,
            "tokens_per_second": statistics.median(speeds),
            "cpu_us_per_token": statistics.median(costs),
        }
        print(json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", choices=("engine", "ready"))
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=100)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve(given.serve == "ready"))
        return
    with process(ready=False) as (_, ports):
        asyncio.run(with_both(ports, lambda asks: latency(asks, "engine", given.requests)))
    with process(ready=True) as (server, ports):
        asyncio.run(with_both(ports, lambda asks: latency(asks, "ready", given.requests)))
        asyncio.run(with_both(ports, lambda asks: throughput(asks, given.tokens, server)))


if __name__ == "__main__":
    main()
