"""Calls that end early, because they are cancelled, aborted, too late, unread or drained. In every case the engine is
free again at once."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.client import Message, ServiceError
from services.pb import generation_pb2 as pb
from services.pb import generation_pb2_grpc
from services.protobuf import RETRY_TRAILER
from services.protobuf.generation import sampling_message
from tests.gateway.harness import LONG, serving, until

SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 64), ("grpc.http2.bdp_probe", 0))
"""Channel options of a client that can hold almost no unread data."""


def long_request(**sampling) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="x", sampling=sampling_message({**LONG, **sampling}))


def test_a_client_that_cancels_frees_the_engine(service):
    before = service.metric("smc_requests_cancelled_total", by="client")
    with service.client() as client:
        with client.stream("x", **LONG) as stream:
            next(stream)
        service.wait_until_free(1.0)
        with pytest.raises(ServiceError, match="CANCELLED"):
            list(stream)
    assert service.metric("smc_requests_cancelled_total", by="client") == before + 1


def test_cancels_at_random_moments(service):
    """Twelve calls are cancelled at random times: before admission, in the prefill, between rounds or at the end.
    Afterwards the engine holds nothing."""
    before = service.metric("smc_requests_cancelled_total", by="client")
    rng = random.Random(7)
    delays = [rng.uniform(0, 0.4) for _ in range(12)]

    def call(delay: float) -> None:
        with service.stub() as stub:
            call = stub.Generate(long_request(particles=8, max_tokens=60))
            time.sleep(delay)
            call.cancel()

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(call, delays))
    service.wait_until_free()
    until(lambda: service.metric("smc_requests_cancelled_total", by="client") >= before + 3)


def test_a_connection_that_breaks_frees_the_engine(service):
    with service.stub() as stub:
        next(stub.Generate(long_request()))
    service.wait_until_free(1.0)


def test_a_deadline_leaves_nothing_behind(service):
    before = service.metric("smc_requests_cancelled_total", by="deadline")
    with service.client() as client, pytest.raises(ServiceError) as caught:
        client.generate("x", timeout=0.4, **LONG)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    service.wait_until_free(1.0)
    until(lambda: service.metric("smc_requests_cancelled_total", by="deadline") == before + 1)


def test_abort_ends_a_call_of_somebody_else(service):
    before = service.metric("smc_requests_cancelled_total", by="abort")
    with (
        service.client() as client,
        service.client() as other,
        client.stream("x", request_id="abort me", **LONG) as stream,
    ):
        next(stream)
        assert other.abort("abort me")
        with pytest.raises(ServiceError, match="CANCELLED: the request was aborted"):
            list(stream)
        assert not other.abort("abort me") and not other.abort("never heard of")
    service.wait_until_free(1.0)
    assert service.metric("smc_requests_cancelled_total", by="abort") == before + 1


def test_abort_finds_a_request_that_is_still_being_encoded(pair, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def slow(text: str, **_: object) -> list[int]:
        begun.set()
        go_on.wait(20)
        return [1]

    with serving(pair) as service, service.client() as client, service.client() as other, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(pair.tokenizer, "encode", slow)
        call = pool.submit(client.generate, "x" * 5000, request_id="long")
        assert begun.wait(10) and other.abort("long")
        with pytest.raises(ServiceError, match="CANCELLED: the request was aborted"):
            call.result(10)
        go_on.set()
        service.wait_until_free()


def test_a_time_budget_runs_from_arrival_and_may_end_in_the_queue(service):
    before = service.metric("smc_requests_total", status="OK", finish_reason="queue_time")
    with service.client() as client, client.stream("x", **{**LONG, "particles": 64, "max_tokens": 120}) as stream:
        next(stream)
        late = client.generate("x", method="smc", particles=8, max_tokens=20, time_budget=0.2)
        assert (late.finish_reason, late.text, late.tokens) == ("queue_time", "", ())
    service.wait_until_free()
    assert service.metric("smc_requests_total", status="OK", finish_reason="queue_time") == before + 1


def test_a_client_that_stops_reading_loses_its_call_only(pair):
    """A call whose client reads nothing for `write_timeout` ends with RESOURCE_EXHAUSTED, without a retry hint; other
    calls are unaffected."""
    with serving(pair, write_timeout=0.3) as service, service.stub(*SMALL_WINDOW) as stub, service.client() as other:
        call = stub.Generate(long_request())
        next(call)
        assert other.generate([Message("user", "How many?")], seed=1, max_tokens=20).tokens
        service.wait_until_free(1.2)  # the whole answer would have taken twice as long
        assert service.metric("smc_requests_cancelled_total", by="slow_reader") == 1
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "did not read for 0.3 s" in caught.value.details()
        assert RETRY_TRAILER not in dict(caught.value.trailing_metadata())


def test_stopping_does_not_wait_for_clients_that_do_not_read(pair):
    with serving(pair, write_timeout=0.2, drain_timeout=20.0) as service, service.stub(*SMALL_WINDOW) as stub:
        call = stub.Generate(long_request())
        next(call)
        service.wait_until_free(2.0)
        began = time.monotonic()
        service.do(service.gateway.drain())
        assert time.monotonic() - began < 3.0


def test_a_client_that_vanished_is_noticed(pair, tmp_path):
    """The keepalive detects a client process that is stopped while its connection stays open."""
    script = (
        "import sys; from services.client import Client\n"
        "stream = Client(sys.argv[1]).stream('x', particles=1, ignore_eos=True, max_tokens=500)\n"
        "next(stream); print('begun', flush=True); input()\n"
    )
    config = {"keepalive_time": 1.0, "keepalive_timeout": 1.0, "write_timeout": 60.0}
    with serving(pair, **config, wrap=Endless) as service:
        process = subprocess.Popen(
            [sys.executable, "-c", script, service.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert process.stdout.readline() == b"begun\n"
            process.send_signal(signal.SIGSTOP)
            until(lambda: not service.backend.dispatcher.requests, 8.0)
        finally:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(("interval", "others"), [(0.5, 3600.0), (3600.0, 60.0)])
def test_clients_that_ping_more_often_than_allowed_are_disconnected(pair, interval, others):
    """Clients that ping too often are disconnected at their third ping, and only those. How often the service itself
    pings makes no difference."""
    pinging = (("grpc.keepalive_time_ms", 1000), ("grpc.http2.max_pings_without_data", 0))
    config = {"min_ping_interval": interval, "keepalive_time": others, "write_timeout": 60.0}
    with serving(pair, **config, wrap=Endless) as service, service.stub(*pinging) as stub:
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(long_request(particles=1, max_tokens=20), timeout=4.5 if interval < 1 else 20.0))
        code = grpc.StatusCode.DEADLINE_EXCEEDED if interval < 1 else grpc.StatusCode.UNAVAILABLE
        assert caught.value.code() is code, caught.value.details()


class Unhurried:
    """A backend whose answers take seconds and use hardly any CPU time."""

    def __init__(self, backend) -> None:
        self._backend = backend

    async def generate(self, request):
        async with aclosing(self._backend.generate(request)) as news:
            async for output in news:
                await asyncio.sleep(0.1)
                yield output


class Endless:
    """A backend whose answers stop after their first output."""

    def __init__(self, backend) -> None:
        self._backend = backend

    async def generate(self, request):
        async with aclosing(self._backend.generate(request)) as news:
            async for output in news:
                yield output
                await asyncio.Event().wait()


def test_draining_lets_calls_finish_and_nobody_in(pair):
    with (
        serving(pair, wrap=Unhurried, drain_timeout=20.0) as service,
        service.client() as client,
        grpc.insecure_channel(service.address) as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == 1
        stream = client.stream("x", method="smc", particles=1, max_tokens=60, ignore_eos=True, seed=1)
        next(stream)
        states = []
        channel.subscribe(states.append)
        draining = service.begin(service.gateway.drain())
        assert next(watch).status == 2
        # Clients are told to use another connection: one with a call in flight keeps it but starts no other call on it.
        until(lambda: grpc.ChannelConnectivity.IDLE in states)
        for other in (client, service.client()):
            with pytest.raises(ServiceError) as caught:
                other.generate("x", timeout=5.0)
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        assert not draining.done()
        list(stream)
        assert stream.completion.usage.completion_tokens == 60
        draining.result(5.0)
        with pytest.raises(grpc.RpcError):
            next(watch)


@pytest.mark.slow
def test_clients_connect_anew_after_a_while_and_lose_no_call(pair):
    """Clients reconnect after `max_connection_age` without losing a call; otherwise they would never find a replica
    that started later."""
    with (
        serving(pair, max_connection_age=1.0, wrap=Unhurried) as service,
        grpc.insecure_channel(service.address) as channel,
    ):
        states, stub = [], generation_pb2_grpc.GenerationServiceStub(channel)
        channel.subscribe(states.append)
        call = stub.Generate(long_request(particles=1, max_tokens=120))
        next(call)
        until(lambda: grpc.ChannelConnectivity.IDLE in states, 10.0)
        assert list(call)[-1].finish.usage.completion_tokens == 120
        assert list(stub.Generate(long_request(max_tokens=4, particles=1)))


def test_draining_ends_what_takes_too_long(pair):
    with serving(pair, drain_timeout=0.3) as service, service.client() as client:
        stream = client.stream("x", **LONG)
        next(stream)
        began = time.monotonic()
        draining = service.begin(service.gateway.drain())
        with pytest.raises(ServiceError, match="stopped before the answer was complete") as caught:
            list(stream)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE and caught.value.retry_after == 1.0
        draining.result(5.0)
        assert time.monotonic() - began < 1.5
        service.wait_until_free(1.0)
        assert service.metric("smc_requests_cancelled_total", by="drain") == 1


def test_stop_in_the_middle_of_a_drain(pair):
    """A stop during a drain, as on a second signal, ends the calls in flight at once."""
    with serving(pair) as service, service.client() as client:
        stream = client.stream("x", **LONG)
        next(stream)
        draining = service.begin(service.gateway.drain())
        service.do(service.gateway.stop())
        draining.result(5.0)
        with pytest.raises(ServiceError, match="UNAVAILABLE"):
            list(stream)
        service.set_health(draft=True, target=True)
        assert service.metric("smc_serving") == 0
