"""What OpenAI's API costs beside gRPC: `python -m benchmarks.gateway`. The gateway runs in a process of its own.

One request: time to the first token, and between tokens; of the demo pair, and of a backend that is always ready, so
that nothing but the gateway is measured. Then 64 streams of that backend: tokens a second, and the gateway's CPU time
for each."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import contextmanager
from itertools import pairwise

import aiohttp
import grpc
import psutil

from services.openai.requests import CHAT
from services.pb import generation_pb2 as pb
from services.pb import generation_pb2_grpc
from smc import demo
from smc.api.outputs import Answer, FinishReason, Output, Statistics
from smc.local_engine import ModelPair
from tests.gateway.harness import serving
from tests.openai.asking import QUESTIONS, user

STREAMS = 64
Ask = Callable[[str, dict], AsyncIterator[None]]


class Ready:
    """A backend whose every answer is `max_tokens` tokens, each as soon as somebody takes it."""

    def __init__(self, backend) -> None:
        pass

    async def generate(self, request):
        for number in range(request.params.max_tokens):
            await asyncio.sleep(0)
            answer = None
            if number == request.params.max_tokens - 1:
                said = {"matched": None, "seed": 1, "prompt_tokens": 1, "statistics": Statistics(1), "seconds": 0.1}
                answer = Answer(
                    request.request_id, (5,) * (number + 1), " word" * (number + 1), FinishReason.LENGTH, **said
                )
            yield Output(request.request_id, (5,), " word", answer)


def serve(ready: bool) -> None:
    with serving(ModelPair.load(demo.TARGET, demo.DRAFT), http_port=0, **({"wrap": Ready} if ready else {})) as service:
        print(service.gateway.port, service.gateway.http_port, flush=True)
        sys.stdin.read()


@contextmanager
def process(ready: bool):
    command = [sys.executable, "-m", "benchmarks.gateway", "--serve", "ready" if ready else "engine"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        ports = child.stdout.readline().split()
        yield psutil.Process(child.pid), *map(int, ports)
        child.stdin.close()


def by_grpc(channel: grpc.aio.Channel) -> Ask:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)

    async def ask(text: str, settings: dict):
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=text)])
        method = {"method": pb.METHOD_TARGET}
        async for _ in stub.Generate(pb.GenerateRequest(chat=chat, sampling=pb.SamplingParams(**settings, **method))):
            yield

    return ask


def by_http(session: aiohttp.ClientSession, port: int) -> Ask:
    async def ask(text: str, settings: dict):
        body = {"messages": user(text), "stream": True, "method": "target", **settings}
        async with session.post(f"http://127.0.0.1:{port}{CHAT}", json=body) as response:
            assert response.status == 200
            # As it comes: what took apart lines would be measured, not the gateway.
            async for _ in response.content.iter_any():
                yield

    return ask


async def times(ask: Ask, text: str, seed: int) -> tuple[float, list[float]]:
    """Seconds to the first news, and between news."""
    moments = [time.perf_counter()]
    async for _ in ask(text, {"seed": seed, "max_tokens": 40}):
        moments.append(time.perf_counter())
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    return gaps[0], gaps[1:]


async def rate(ask: Ask, tokens: int, server: psutil.Process) -> tuple[float, float]:
    """Tokens a second of all streams, and microseconds of the gateway's CPU for each."""

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
    found = {name: ([], []) for name in asks}
    for number in range(requests + 4):
        for name, ask in asks.items():
            first, gaps = await times(ask, QUESTIONS[number % len(QUESTIONS)], number)
            if number >= 4:
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
    found = {name: [] for name in asks}
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
        serve(given.serve == "ready")
        return
    with process(ready=False) as (_, *ports):
        asyncio.run(with_both(ports, lambda asks: latency(asks, "engine", given.requests)))
    with process(ready=True) as (server, *ports):
        asyncio.run(with_both(ports, lambda asks: latency(asks, "ready", given.requests)))
        asyncio.run(with_both(ports, lambda asks: throughput(asks, given.tokens, server)))


if __name__ == "__main__":
    main()
