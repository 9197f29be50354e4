"""Calls over HTTP that end early: drained, failed, out of time, aborted or disconnected. After the first byte, an event
gives the reason."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path

import pytest

from services.backend import RequestFailed, StartProgress, Unavailable
from services.openai.bodies import CHAT
from tests.gateway.harness import serving, until
from tests.openai.asking import LONG, Said, ask, chat, connect, events, is_error, post

PROBE = Path(__file__).parents[2] / "deploy/helm/smcserve/files/scripts/startup_probe.py"


def test_before_the_workers_are_ready(pair):
    """Before the workers are ready, clients and the chart's startup probe receive the progress of the start."""
    with serving(pair, http_port=0, ready=False) as service:
        for said in (post(service, chat()), ask(service, "GET", "/health")):
            is_error(said, 503, "unavailable", "the service is (starting|not ready)", hint=True)
        service.gateway.set_progress(StartProgress("load", {"draft": 100, "target": 37}))
        for said in (post(service, chat()), ask(service, "GET", "/health")):
            is_error(said, 503, "unavailable", "starting: 100% of the draft, 37% of the target loaded; try", hint=True)
        state = ask(service, "GET", "/health").json
        assert (state["status"], state["step"], state["percent"]["target"]) == ("starting", "load", 37)
        probe = [sys.executable, PROBE, str(service.gateway.http_port)]
        said = subprocess.run(probe, capture_output=True, text=True)
        assert said.returncode == 1 and "37% of the target loaded" in said.stderr
        service.set_health(draft=True, target=True)
        assert ask(service, "GET", "/health").status == post(service, chat(max_tokens=2)).status == 200
        assert subprocess.run(probe, capture_output=True).returncode == 0


def begin(service, **fields) -> tuple:
    """Begin a streamed call and return its connection, its response and its first data."""
    connection = connect(service)
    connection.request("POST", CHAT, chat(stream=True, **{**LONG, **fields}), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200 and response.headers["content-type"].startswith("text/event-stream")
    return connection, response, response.read1()


@pytest.mark.slow
def test_draining(pair):
    """During a drain, calls in flight go on, new connections are refused, and open ones are told to close."""
    with serving(pair, http_port=0, drain_timeout=20.0) as service:
        idle = connect(service)
        idle.request("GET", "/health")
        assert idle.getresponse().read() and not idle.sock._closed
        _, response, first = begin(service, particles=8, max_tokens=120)
        draining = service.begin(service.gateway.drain())
        until(lambda: service.gateway._calls.closed is not None)
        idle.request("POST", CHAT, chat(), {"content-type": "application/json"})
        refused = idle.getresponse()
        assert (
            refused.status == 503 and refused.headers["connection"] == "close" and refused.headers["retry-after"] == "1"
        )
        with pytest.raises(ConnectionRefusedError):
            post(service, chat())
        found = events(first + response.read())
        assert found[-1] == "[DONE]" and found[-2]["choices"][0]["finish_reason"] == "length"
        draining.result(10.0)


def test_draining_ends_what_takes_too_long(pair):
    with serving(pair, http_port=0, drain_timeout=0.3) as service:
        _, response, first = begin(service)
        with ThreadPoolExecutor(1) as pool:
            whole = pool.submit(post, service, chat(**LONG))
            until(lambda: len(service.backend.dispatcher.requests) == 2)
            service.begin(service.gateway.drain()).result(10.0)
            is_error(whole.result(5), 503, "unavailable", "stopped before the answer was complete", hint=True)
        last = events(first + response.read())[-1]
        assert (
            last["error"]["code"] == "unavailable"
            and "stopped before the answer was complete" in last["error"]["message"]
        )


class Failing:
    """A backend that fails at every request: at once, or after its first output if `late`."""

    def __init__(self, error: Callable[[], Exception], late: bool = False) -> None:
        self.error, self.late = error, late

    def __call__(self, backend):
        self.backend = backend
        return self

    async def generate(self, request):
        if not self.late:
            raise self.error()
        async with aclosing(self.backend.generate(request)) as news:
            async for output in news:
                yield output
                raise self.error()


@pytest.fixture(scope="module")
def failing(pair):
    """A service with a backend whose error each test chooses, and that backend."""
    backend = Failing(lambda: RequestFailed("the target returned NaN"))
    with serving(pair, http_port=0, wrap=backend) as service:
        yield service, backend


def both_ways(failing, error: Callable[[], Exception]) -> tuple[Said, dict]:
    """Let the backend fail with this error. Returns the response if it fails before the first byte, and the error event
    if it fails later."""
    service, backend = failing
    backend.error, backend.late = error, False
    asked = {**LONG, "particles": 2}
    early = post(service, chat(**asked))
    assert post(service, chat(**asked, stream=True, n=2)).status == early.status
    backend.late = True
    late = post(service, chat(**asked, stream=True))
    assert late.status == 200
    found = events(late.data)
    assert found[0]["choices"][0]["delta"]["role"] == "assistant"
    service.wait_until_free()
    return early, found[-1]["error"]


def test_a_worker_that_is_lost(failing):
    early, late = both_ways(failing, lambda: Unavailable("a process of the service has ended"))
    is_error(early, 503, "unavailable", "a process of the service has ended", hint=True)
    assert late["code"] == "unavailable"


def test_a_request_that_fails(failing):
    early, late = both_ways(failing, lambda: RequestFailed("the target returned NaN"))
    is_error(early, 500, "failed", "the target returned NaN")
    assert late["message"] == "the target returned NaN"


def test_an_error_of_our_own(failing, caplog):
    early, late = both_ways(failing, lambda: KeyError("secret"))
    is_error(early, 500, "internal", r"internal error \(KeyError\); the server's log has the details")
    assert "secret" not in late["message"] and "secret" in caplog.text


def test_a_deadline(service):
    before = service.metric("smc_requests_cancelled_total", by="deadline")
    is_error(post(service, chat(timeout=0.3, **LONG)), 504, "deadline", "timeout=0.3 s is over")
    last = events(post(service, chat(timeout=0.8, stream=True, **LONG)).data)[-1]
    assert last["error"]["code"] == "deadline"
    assert service.metric("smc_requests_cancelled_total", by="deadline") == before + 2
    service.wait_until_free(1.0)


def test_abort(service):
    """`Abort` over gRPC ends a request over HTTP."""
    with ThreadPoolExecutor(1) as pool, service.client() as client:
        call = pool.submit(post, service, chat(request_id="abort-me", **LONG))
        until(lambda: client.abort("abort-me"))
        is_error(call.result(5), 499, "abort", "the request was aborted")


def test_a_closed_connection_frees_its_slots(service):
    """A closed connection releases its slots within a round: for a whole answer, a stream, and three answers at
    once."""
    before = service.metric("smc_requests_cancelled_total", by="client")
    for fields in ({}, {"stream": True}, {"n": 3}):
        connection = connect(service)
        connection.request("POST", CHAT, chat(**{**LONG, **fields}), {"content-type": "application/json"})
        until(lambda fields=fields: service.backend.stats.running == fields.get("n", 1))
        connection.close()
        began = time.monotonic()
        service.wait_until_free(2.0)
        assert time.monotonic() - began < 1.0
    until(lambda: service.metric("smc_requests_cancelled_total", by="client") == before + 5)


def test_connections_that_close_at_random_moments(service):
    """Whole answers and streams are cancelled when their connections close. Afterwards the engine holds nothing."""
    before = service.metric("smc_requests_cancelled_total", by="client")

    def call(delay: float) -> None:
        connection = connect(service)
        connection.request(
            "POST", CHAT, chat(stream=delay > 0.2, particles=4, max_tokens=60), {"content-type": "application/json"}
        )
        time.sleep(delay)
        connection.close()

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(call, [0.03 * number for number in range(12)]))
    service.wait_until_free()
    until(lambda: service.metric("smc_requests_cancelled_total", by="client") >= before + 3)


def test_connections_that_ask_for_nothing_are_closed(pair):
    """Connections that send nothing, or only part of a request, are closed. Connections older than `max_connection_age`
    are told to close."""
    with serving(pair, http_port=0, write_timeout=0.3, max_connection_age=1.0) as service:
        silent, slow = (socket.create_connection(("127.0.0.1", service.gateway.http_port)) for _ in range(2))
        slow.sendall(b"GET /health HTTP/1.1\r\nhost:")
        old = connect(service)
        for expected in (None, "close"):
            old.request("GET", "/health")
            response = old.getresponse()
            assert response.read() and response.headers["connection"] == expected
            time.sleep(1.1)
        for connection in (silent, slow):
            connection.settimeout(3.0)
            assert connection.recv(100) == b""
            connection.close()
