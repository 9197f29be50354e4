"""Requests that are cheap to send but could be expensive to refuse: other callers must not notice them."""

from __future__ import annotations

import asyncio
import gc
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import psutil
import pytest

from services.gateway.limits import ARRIVING, LARGE, PATIENCE, _malloc_trim
from services.pb import generation_pb2 as pb
from services.prompts import WAITING, PromptEncoder
from services.protobuf.generation import sampling_message
from smc.api.engine_config import EngineConfig
from smc.scheduler.admission import QueueFull
from tests.gateway.harness import LONG, serving, until
from tests.gateway.pauses import LIMIT, Pauses, pauses_of

MIB = 1 << 20
ALMOST = 4 * MIB - 4096
"""Bytes that fit into the largest message, with room for its other fields."""
FLOODS: dict[str, Callable[[], pb.GenerateRequest]] = {
    "text": lambda: pb.GenerateRequest(text="The quick brown fox. " * (ALMOST // 21)),
    "spaces": lambda: pb.GenerateRequest(text=" " * ALMOST),
    "ids": lambda: pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * ALMOST)),
    "messages": lambda: pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user")] * (ALMOST // 8))),
    "content": lambda: pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="fox " * (ALMOST // 4))])
    ),
    "role": lambda: pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="x" * ALMOST)])),
    "stop": lambda: pb.GenerateRequest(text="x", sampling=pb.SamplingParams(stop=[""] * (ALMOST // 2))),
    "stop ids": lambda: pb.GenerateRequest(text="x", sampling=pb.SamplingParams(stop_token_ids=[1] * ALMOST)),
    "request id": lambda: pb.GenerateRequest(text="x", request_id="x" * ALMOST),
    "salt": lambda: pb.GenerateRequest(text="x", cache_salt="x" * ALMOST),
}


@pytest.fixture(scope="module")
def large(pair):
    """A service that accepts messages of 4 MiB, as it would for a long context."""
    with serving(pair, max_message_bytes=4 * MIB) as service:
        yield service


@pytest.mark.parametrize("flood", FLOODS)
def test_what_is_too_large_is_refused_before_it_costs_anything(large, flood):
    """Requests with one huge field are refused with INVALID_ARGUMENT and a short message, without blocking the
    gateway's loop."""
    data = FLOODS[flood]().SerializeToString()
    with grpc.insecure_channel(large.address) as channel:
        send = channel.unary_stream("/smc.v1.GenerationService/Generate")
        with pauses_of(large) as pauses:
            for _ in range(2):
                with pytest.raises(grpc.RpcError) as caught:
                    list(send(data, timeout=60))
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value.details()
                assert len(caught.value.details()) < 3000
    assert pauses.longest < LIMIT


@pytest.mark.slow
def test_a_long_text_that_is_let_in_is_encoded_beside_the_others(pair):
    """A long text that the context can hold is encoded in a thread without blocking the loop. (Plain `encode` of the
    tokenizers package holds the interpreter lock and blocked every thread for seconds.)"""
    pauses, flood = Pauses(), FLOODS["text"]()

    async def work() -> tuple[int, ...]:
        watching = asyncio.create_task(pauses.watch())
        prompts = PromptEncoder(pair.tokenizer, context=1 << 30)
        try:
            return await prompts.encode(flood)
        finally:
            watching.cancel()
            prompts.close()

    assert len(asyncio.run(work())) > MIB
    assert pauses.longest < LIMIT


@pytest.mark.slow
def test_texts_that_wait_for_the_encoder_are_bounded(pair, monkeypatch):
    """The total size of texts that wait for the encoder is bounded; calls beyond it fail with QueueFull. Texts and
    bound are a sixteenth of their usual size."""
    flood = pb.GenerateRequest(text=FLOODS["text"]().text[: ALMOST // 16])
    monkeypatch.setattr("services.prompts.WAITING", WAITING // 16)

    async def work() -> list[object]:
        prompts = PromptEncoder(pair.tokenizer, context=1 << 30)
        try:
            return await asyncio.gather(*(prompts.encode(flood) for _ in range(8)), return_exceptions=True)
        finally:
            prompts.close()

    ended = asyncio.run(work())
    assert sum(isinstance(end, QueueFull) for end in ended) == 4 and sum(isinstance(end, tuple) for end in ended) == 4


FLOOD = """
import sys
from concurrent.futures import ThreadPoolExecutor
import grpc
from services.pb import generation_pb2 as pb
data = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * int(sys.argv[2]))).SerializeToString()
count = int(sys.argv[3])
with grpc.insecure_channel(sys.argv[1]) as channel, ThreadPoolExecutor(count) as pool:
    send = channel.unary_stream("/smc.v1.GenerationService/Generate")
    print("ready", flush=True)
    input()
    calls = [send(data, timeout=60) for _ in range(count)]
    print(*{call.code().name for call in calls}, flush=True)
"""


COUNT = 100
UNREAD = COUNT * LARGE
"""Bytes that callers may have sent before their requests are admitted."""
SLACK = 128 * MIB
"""Bytes for allocator fragmentation and for other work of this process; up to 70 MiB were observed on a busy
machine."""


def held(process: psutil.Process) -> int:
    """Return the resident bytes of this process after a garbage collection. Automatic collections are rare here,
    because other tests have left many objects."""
    gc.collect()
    if trim := _malloc_trim():
        trim(0)
    return process.memory_info().rss


def flooded(service) -> tuple[set[str], int, float]:
    """Send a hundred prompts of 4 MiB at once from another process. Returns the status codes, the bytes by which the
    gateway grew, and the longest pause of its loop in seconds."""
    process, most = psutil.Process(), 0
    command = [sys.executable, "-c", FLOOD, service.address, str(ALMOST), str(COUNT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as flood:
        assert flood.stdout.readline() == "ready\n"
        before = held(process)
        with pauses_of(service) as pauses, service.client() as client, client.stream("x", **LONG) as stream:
            next(stream)
            flood.stdin.write("\n")
            flood.stdin.flush()
            while not select.select([flood.stdout], [], [], 0.02)[0]:
                most = max(most, process.memory_info().rss)
        codes = set(flood.stdout.readline().split())
    until(lambda: held(process) - before < SLACK, 10.0)
    return codes, most - before, pauses.longest


def bear(service, codes: set[str], most: int) -> None:
    """Check the growth in every flood, and the pause and the codes in the best of three: all processes share two cores,
    and a disturbance rarely hits every try. A prompt whose sender is delayed by others for longer than `PATIENCE` is
    refused."""
    seen = []
    for _ in range(3):
        ended, grown, pause = flooded(service)
        assert ended <= {*codes, "RESOURCE_EXHAUSTED"} and grown < most
        if ended == codes and pause < LIMIT:
            return
        seen.append((ended, pause))
    pytest.fail(f"how calls ended, and for how many seconds the gateway stood still: {seen}")


def test_a_hundred_long_prompts_at_once(service):
    """A message larger than any prompt of this context is not even received."""
    bear(service, {"RESOURCE_EXHAUSTED"}, UNREAD + SLACK)


@pytest.mark.slow
def test_a_hundred_long_prompts_where_prompts_may_be_long(large):
    """A few prompts are admitted at a time. Each needs memory for the pieces in which it arrived, two copies that gRPC
    makes of them, and its message."""
    bear(large, {"INVALID_ARGUMENT"}, UNREAD + 4 * ARRIVING + SLACK)


def test_callers_who_send_nothing_keep_nobody_waiting(pair):
    """Where one request is received at a time, calls that send nothing delay others by at most about twice
    `PATIENCE`."""
    with serving(pair, max_message_bytes=ARRIVING) as service, grpc.insecure_channel(service.address) as channel:
        silence = threading.Event()

        def nothing() -> Iterator[bytes]:
            silence.wait()
            yield from ()

        crowd = [channel.stream_stream("/smc.v1.GenerationService/Generate")(nothing()) for _ in range(20)]
        try:
            until(lambda: len(service.gateway.receive_limit._outside) == 19)
            began = time.monotonic()
            with service.stub() as stub:
                stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10)
                list(stub.Generate(pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=1)), timeout=10))
            assert time.monotonic() - began < 2 * PATIENCE + 2.0
            assert {call.code() for call in crowd if call.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert not all(call.done() for call in crowd)
        finally:
            silence.set()
        until(lambda: all(call.done() for call in crowd), 20.0)
        assert service.gateway.receive_limit._inside == 0


def test_calls_at_the_same_time_are_limited(pair):
    with serving(pair, max_calls=2) as service, service.stub() as stub:
        request = pb.GenerateRequest(text="x", sampling=sampling_message(LONG))
        calls = [stub.Generate(request) for _ in range(2)]
        for call in calls:
            next(call)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "2 calls" in caught.value.details()
        assert service.metric("smc_requests_rejected_total", code="RESOURCE_EXHAUSTED", cause="queue_full") == 1
        for call in calls:
            call.cancel()
        service.wait_until_free()


def test_a_full_queue_refuses_before_the_prompt_is_looked_at(pair):
    """With a full queue, a long prompt is refused as RESOURCE_EXHAUSTED, before it is encoded and found to be too
    long."""
    with serving(pair, EngineConfig(block=4, branches=2, max_slots=16, max_queue=1)) as service, service.stub() as stub:
        request = pb.GenerateRequest(text="x", sampling=sampling_message(LONG))
        calls = [stub.Generate(request) for _ in range(2)]
        until(lambda: service.backend.stats.queued == 1)
        began = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(pb.GenerateRequest(text="fox " * 10_000)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and time.monotonic() - began < 2
        for call in calls:
            call.cancel()
        service.wait_until_free()
