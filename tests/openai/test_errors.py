"""The column of HTTP in docs/errors.md, row by row: status, hint, OpenAI's shape. After the first byte an event says it."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path

import pytest

from services.backend import RequestFailed, Unavailable
from services.openai.errors import HTTP
from services.openai.requests import CHAT, COMPLETIONS
from services.pb import generation_pb2 as pb
from smc.runtime.config import EngineConfig
from tests.gateway.harness import serving, until
from tests.openai.asking import LONG, Said, ask, chat, connect, events, post, user

ROOT = Path(__file__).parents[2]
ROWS = {
    "the request cannot be read": "test_what_is_no_json",
    "a field is wrong": "test_a_field_that_is_wrong",
    "`request_id` belongs": "test_an_id_in_use",
    "the service asks for bearer tokens": "test_tokens",
    "the queue is full": "test_a_full_queue",
    "the request is larger": "test_a_body_too_large",
    "the caller did not read": "test_a_caller_that_does_not_read",
    "the request did not arrive": "test_a_body_that_does_not_arrive",
    "the service is starting": "test_before_the_workers_are_ready",
    "the service is shutting down": "test_draining",
    "the service shut down before": "test_draining_ends_what_takes_too_long",
    "a worker was lost": "test_a_worker_that_is_lost",
    "nobody listens": "test_nobody_listens",
    "the call's own deadline": "test_a_deadline",
    "the caller cancelled": "test_a_closed_connection_frees_its_slots",
    "`Abort` named": "test_abort",
    "the service failed over this very": "test_a_request_that_fails",
    "decoding this request failed": "test_a_request_that_fails",
    "an error in the service itself": "test_an_error_of_our_own",
    "there is no such method": "test_no_such_path",
    "a name that is not served": "test_a_model_that_is_not_served",
}
ONLY_GRPC = ("a health check names",)


def test_every_row_of_the_table_has_a_test():
    rows = re.findall(r"^\| `[A-Z_]+` \| ([^|]*) \| (.*?) \|", (ROOT / "docs" / "errors.md").read_text(), flags=re.MULTILINE)
    assert len(rows) == len(ROWS) + len(ONLY_GRPC)
    for status, row in rows:
        (known,) = [beginning for beginning in (*ROWS, *ONLY_GRPC) if row.startswith(beginning)]
        assert (not re.search(r"\d{3}|reset|refused", status)) == (known in ONLY_GRPC), row
    assert set(ROWS.values()) <= set(globals())
    said = {int(code) for status, _ in rows for code in re.findall(r"\d{3}", status)}
    assert {status for status, _ in HTTP.values()} | {404, 405, 413, 415} == said


def is_error(said: Said, status: int, code: str, message: str, hint: bool = False, param: str | None = None) -> None:
    assert said.status == status, said.data
    error = said.error
    assert (error["code"], error["param"]) == (code, param) and re.search(message, error["message"]), error
    assert said.headers["x-should-retry"] == ("true" if hint else "false")
    assert said.headers.get("retry-after") == ("1" if hint else None)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "this is not JSON"),
        (b"{", "this is not JSON: .* at character 2"),
        (b"\xff{}", "cannot be read as JSON"),
        (b'{"a": 1, "a": 2}', "'a' is given twice"),
        (b'{"temperature": NaN}', "NaN is no number"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "cannot be read as JSON"),
        (b"[" * 60_000, "nested too deeply"),
        (b"[]", "no JSON object"),
    ],
)
def test_what_is_no_json(service, body, message):
    is_error(post(service, body), 400, "invalid", message)


def nested(depth: int) -> bytes:
    return b'{"messages": [], "tools": ' + b"[" * depth + b"]" * depth + b"}"


WRONG = [
    (chat(temperature=-1), "temperature", "temperature=-1; allowed"),
    (chat(temperature=10**400), "temperature", "temperature=1000.*; allowed"),
    (chat(temperature="hot"), "temperature", "temperature='hot'"),
    (b'{"messages": [{"role": "user", "content": "x"}], "top_p": 1e999}', "top_p", "top_p=inf; allowed"),
    (chat(max_tokens=10**400), "max_tokens", "max_tokens=1000"),
    (chat(max_tokens=0), "max_tokens", "max_tokens=0; allowed: >= 1"),
    (chat(max_tokens=512), "max_tokens", "exceeds the context of 512"),
    (chat(max_tokens=5, max_completion_tokens=5), "max_tokens", "both given"),
    (chat(n=0), "n", "n=0; allowed"),
    (chat(n=10**400), "n", "n=1000"),
    (chat(n=129), "n", "at most 128 answers"),
    (chat(n="2"), "n", "n='2'; allowed: an integer"),
    (chat(stream=1), "stream", "stream=1; allowed: true, false"),
    (chat(stream_options={"include_usage": True}), "stream_options", "no effect without stream"),
    (chat(stop=[5]), "stop", "stop contains 5"),
    (chat(stop=["a" * 1001]), "stop", "1001 bytes"),
    (chat(seed=1.5), "seed", "seed=1.5"),
    (chat(method="beam"), "method", "method='beam'; allowed: smc, exact, target, draft"),
    (chat(method="smc", temperature=0), "temperature", "for greedy decoding, method='exact'"),
    (chat(method="target", particles=4), "particles", "no effect with method='target'"),
    (chat(particles=65), "particles", "allowed: 1..64"),
    (chat(frequency_penalty=0.5), "frequency_penalty", "allowed: 0"),
    (chat(logit_bias={"5": 1}), "logit_bias", "allowed: {}"),
    (chat(min_tokens=3), "min_tokens", "allowed: 0"),
    (chat(logprobs=True, top_logprobs=2), "top_logprobs", "top_logprobs=2; allowed: 0, as only the answer's own tokens"),
    (chat(response_format={"type": "json_object"}), "response_format", "allowed: {'type': 'text'}|allowed: {\"type\": \"text\"}"),
    (chat(timeout=0), "timeout", "timeout=0"),
    (chat(request_id="x" * 257), "request_id", "at most 256"),
    (chat(request_id="a\r\nset-cookie: b"), "request_id", "should match pattern"),
    (chat(cache_salt="x" * 257), "cache_salt", "at most 256"),
    (chat(user=5), "user", "user=5; allowed: a string"),
    (chat(temprature=1), "temprature", "temprature is not a field of /v1/chat/completions here; allowed: .*temperature"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages", "half of a surrogate"),
    (b'{"messages": [{"role": "user", "content": "x"}], "stop": "\\udfff"}', "stop", "half of a surrogate"),
    (b"{}", "messages", "messages is missing"),
    (json.dumps({"messages": []}).encode(), "messages", "at least 1"),
    (json.dumps({"messages": [{"role": "robot", "content": "x"}]}).encode(), "messages[0].role", "role='robot'"),
    (json.dumps({"messages": [{"role": "user", "content": 5}]}).encode(), "messages[0].content", "a string, or a list of parts"),
    (json.dumps({"messages": [{"role": "system", "content": "Be brief."}]}).encode(), "messages", "the chat template cannot render"),
    (chat("apples and pears " * 400), "messages", "tokens; allowed: at most 511"),
    (
        json.dumps({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}).encode(),
        "messages[0].content[0].type",
        "allowed: 'text'",
    ),
    (nested(500), "messages", "at least 1"),
    (chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {"a": [[[]]]}}}], tool_choice="required"), "tool_choice", ""),
    (chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs", "holds messages"),
]


@pytest.mark.parametrize(("body", "param", "message"), WRONG, ids=[f"{index} {param}" for index, (_, param, _) in enumerate(WRONG)])
def test_a_field_that_is_wrong(service, body, param, message):
    is_error(post(service, body), 400, "invalid", message, param=param)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ({"a": 1}, "prompt holds other things"),
        ([1, "a"], "prompt holds other things"),
        ([[1], "a", [True]], "prompt holds other things"),
        ([512], "prompt contains token id 512; allowed: 0..511"),
        ([10**400], "prompt contains token id 1000"),
        ([5] * 600, "has 600 tokens; allowed: at most 511"),
        (["a"] * 129, "at most 128 answers"),
    ],
)
def test_a_prompt_that_is_wrong(service, prompt, message):
    said = post(service, json.dumps({"prompt": prompt}).encode(), COMPLETIONS)
    is_error(said, 400, "invalid", message, param="n" if "answers" in message else "prompt")


def test_what_is_neutral_is_accepted(service):
    fields = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "min_tokens": 0,
        "user": "me",
        "store": False,
        "response_format": {"type": "text"},
        "service_tier": "auto",
        "metadata": {"a": "b"},
        "tool_choice": "none",
        "tools": [],
        "parallel_tool_calls": True,
        "best_of": 1,
        "top_k": -1,
        "stop": None,
        "seed": None,
        "top_logprobs": 0,
        "n": 1,
    }
    assert post(service, chat(**fields, max_tokens=2, method="draft")).status == 200


def test_an_id_in_use(service):
    with service.client() as client, client.stream("x", request_id="mine", **LONG) as stream:
        next(stream)
        is_error(post(service, chat(request_id="mine", max_tokens=2)), 409, "duplicate", "already in use")


def test_tokens(pair, tmp_path):
    path = tmp_path / "tokens"
    path.write_text("sesame\n")
    with serving(pair, http_port=0, auth_token_file=path) as service:
        for authorization in ({}, {"authorization": "Bearer open"}, {"authorization": "sesame"}, {"authorization": "Bearer caf\xe9"}):
            is_error(post(service, chat(), **authorization), 401, "unauthenticated", "a valid token is needed")
        is_error(ask(service, "GET", "/metrics"), 401, "unauthenticated", "a valid token")
        assert ask(service, "GET", "/health").status == 200
        known = {"authorization": "Bearer sesame"}
        assert post(service, chat(max_tokens=2), **known).status == ask(service, "GET", "/metrics", **known).status == 200
        assert service.metric("smc_requests_rejected_total", code="UNAUTHENTICATED", cause="unauthenticated") == 5


def test_a_full_queue(pair):
    with serving(pair, EngineConfig(block=4, branches=2, max_slots=16, max_queue=1), http_port=0) as service, service.stub() as stub:
        calls = [stub.Generate(pb.GenerateRequest(text="x", sampling=pb.SamplingParams(**LONG))) for _ in range(2)]
        until(lambda: service.backend.stats.queued == 1)
        is_error(post(service, chat(max_tokens=2)), 429, "queue_full", "requests are waiting; allowed: 1", hint=True)
        for call in calls:
            call.cancel()


def test_a_body_too_large(service):
    """Said before it is read, or when it has become too much; either way nothing of it is parsed."""
    is_error(post(service, chat("x" * 100_000)), 413, "invalid", "more than 73728 bytes")
    connection = connect(service)
    chunks = (b"x" * 8192 for _ in range(20))
    connection.request("POST", CHAT, chunks, {"content-type": "application/json"}, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_a_body_that_breaks_off(service):
    """In chunks that are none."""
    with socket.create_connection(("127.0.0.1", service.gateway.http_port)) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        connection.sendall(head.encode() + b'5\r\n{"mes\r\nnone\r\n')
        connection.settimeout(5.0)
        assert b" 400 " in connection.recv(1000)


def test_other_kinds_of_bodies(service):
    is_error(post(service, chat(), **{"content-type": "text/plain"}), 415, "invalid", "allowed: application/json")
    is_error(post(service, chat(), **{"content-encoding": "gzip"}), 415, "invalid", "content-encoding='gzip'")


def test_a_body_that_does_not_arrive(pair):
    with serving(pair, http_port=0, write_timeout=0.3) as service:
        connection = connect(service)
        connection.putrequest("POST", CHAT)
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", "100")
        connection.endheaders(b"{")
        response = connection.getresponse()
        said = Said(response.status, dict(response.getheaders()), response.read())
        is_error(
            Said(said.status, {k.lower(): v for k, v in said.headers.items()}, said.data), 408, "slow_sender", "did not arrive within 0.3 s"
        )


def test_a_caller_that_does_not_read(pair):
    """Its answer is many times what buffers hold."""

    class Chatty:
        def __init__(self, backend) -> None:
            self._backend = backend

        async def generate(self, request):
            from dataclasses import replace

            async with aclosing(self._backend.generate(request)) as news:
                async for output in news:
                    yield replace(output, text="x" * (8 << 20)) if output.answer is None else output

    with serving(pair, http_port=0, write_timeout=0.5, wrap=Chatty) as service, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", service.gateway.http_port))
        body = chat(stream=True, **LONG)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        until(lambda: service.metric("smc_requests_cancelled_total", by="slow_reader") == 1, 20.0)
        service.wait_until_free(2.0)


def test_before_the_workers_are_ready(pair):
    with serving(pair, http_port=0, ready=False) as service:
        for said in (post(service, chat()), ask(service, "GET", "/health")):
            is_error(said, 503, "unavailable", "the service is (starting|not ready)", hint=True)
        service.set_health(draft=True, target=True)
        assert ask(service, "GET", "/health").status == post(service, chat(max_tokens=2)).status == 200


def begin(service, **fields) -> tuple:
    """A stream whose first events have come."""
    connection = connect(service)
    connection.request("POST", CHAT, chat(stream=True, **{**LONG, **fields}), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200 and response.headers["content-type"].startswith("text/event-stream")
    return connection, response, response.read1()


def test_draining(pair):
    """Calls in flight go on; connections are not taken any more, and those that are open are told to go elsewhere."""
    with serving(pair, http_port=0) as service:
        idle = connect(service)
        idle.request("GET", "/health")
        assert idle.getresponse().read() and not idle.sock._closed
        _, response, first = begin(service, particles=8, max_tokens=120)
        draining = service.begin(service.gateway.drain(20.0))
        until(lambda: service.gateway._calls.closed is not None)
        idle.request("POST", CHAT, chat(), {"content-type": "application/json"})
        refused = idle.getresponse()
        assert refused.status == 503 and refused.headers["connection"] == "close" and refused.headers["retry-after"] == "1"
        with pytest.raises(ConnectionRefusedError):
            post(service, chat())
        found = events(first + response.read())
        assert found[-1] == "[DONE]" and found[-2]["choices"][0]["finish_reason"] == "length"
        draining.result(10.0)


def test_draining_ends_what_takes_too_long(pair):
    with serving(pair, http_port=0) as service:
        _, response, first = begin(service)
        with ThreadPoolExecutor(1) as pool:
            whole = pool.submit(post, service, chat(**LONG))
            until(lambda: service.backend.dispatcher.num_calls == 2)
            service.begin(service.gateway.drain(0.3)).result(10.0)
            is_error(whole.result(5), 503, "unavailable", "stopped before the answer was complete", hint=True)
        last = events(first + response.read())[-1]
        assert last["error"]["code"] == "unavailable" and "stopped before the answer was complete" in last["error"]["message"]


class Failing:
    """A backend that fails over what it is asked, after its first news if it is to."""

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
    """A service whose backend fails as a test wants."""
    backend = Failing(lambda: RequestFailed("the target returned NaN"))
    with serving(pair, http_port=0, wrap=backend) as service:
        yield service, backend


def both_ways(failing, error: Callable[[], Exception]) -> tuple[Said, dict]:
    """How the error is said before the first byte, and the last event after it."""
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


def test_nobody_listens(unused_port):
    with socket.socket() as connection, pytest.raises(ConnectionRefusedError):
        connection.connect(("127.0.0.1", unused_port))


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def test_a_deadline(service):
    before = service.metric("smc_requests_cancelled_total", by="deadline")
    is_error(post(service, chat(timeout=0.3, **LONG)), 504, "deadline", "timeout=0.3 s is over")
    last = events(post(service, chat(timeout=1.5, stream=True, **LONG)).data)[-1]
    assert last["error"]["code"] == "deadline"
    assert service.metric("smc_requests_cancelled_total", by="deadline") == before + 2
    service.wait_until_free(1.0)


def test_abort(service):
    """By gRPC, of a request over HTTP."""
    with ThreadPoolExecutor(1) as pool, service.client() as client:
        call = pool.submit(post, service, chat(request_id="abort-me", **LONG))
        until(lambda: client.abort("abort-me"))
        is_error(call.result(5), 499, "abort", "the request was aborted")


def test_a_closed_connection_frees_its_slots(service):
    """A whole answer, a stream, and three answers at once; gone within a round."""
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
    def call(delay: float) -> None:
        connection = connect(service)
        connection.request("POST", CHAT, chat(stream=delay > 0.2, particles=4, max_tokens=60), {"content-type": "application/json"})
        time.sleep(delay)
        connection.close()

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(call, [0.03 * number for number in range(12)]))
    service.wait_until_free()


def test_connections_that_ask_for_nothing_are_closed(pair):
    """Or not for something whole; and old ones are told to come anew."""
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


def test_no_such_path(service):
    is_error(ask(service, "GET", "/v1/nothing"), 404, "not_found", "GET /v1/nothing: not found")
    said = ask(service, "GET", CHAT)
    is_error(said, 405, "not_found", "method not allowed")
    assert said.headers["allow"] == "POST"


def test_a_model_that_is_not_served(service):
    is_error(post(service, chat(model="gpt-9")), 404, "model_not_found", "model='gpt-9'; allowed: 'demo', 'gpt-4o'", param="model")


def test_a_port_that_is_taken(pair, service):
    with pytest.raises(OSError, match="give another http_port"), serving(pair, http_port=service.gateway.http_port):
        pass


def test_metrics_and_the_log_know_of_it(service, caplog):
    """As they know of gRPC's calls."""
    with caplog.at_level("INFO", "smcserve.requests"):
        answered = service.metric("smc_requests_total", status="OK", finish_reason="length")
        post(service, json.dumps({"messages": user("a secret"), "max_tokens": 3, "n": 2, "ignore_eos": True}).encode())
        assert service.metric("smc_requests_total", status="OK", finish_reason="length") == answered + 2
    lines = [json.loads(record.message) for record in caplog.records if record.name == "smcserve.requests"]
    assert len(lines) == 2 and {line["tokens"] for line in lines} == {3} and "secret" not in caplog.text
    assert ask(service, "GET", "/metrics").data.count(b"\nsmc_") > 100


def test_threads_are_not_left_behind(pair):
    before = threading.active_count()
    with serving(pair, http_port=0) as service:
        assert post(service, chat(max_tokens=2)).status == 200
    until(lambda: threading.active_count() <= before)
