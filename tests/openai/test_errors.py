"""The HTTP column of docs/errors.md: every row has a test. Here are refusals; how calls end: test_endings.py."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from services.client import ServiceError
from services.openai.anthropic import MESSAGES
from services.openai.bodies import CHAT, HTTP, MAX_NESTING, TOO_DEEP, refusal
from services.openai.server import DIALECTS
from services.pb import generation_pb2 as pb
from services.protobuf.generation import sampling_message
from smc.api.engine_config import EngineConfig
from tests.gateway.harness import serving, until
from tests.openai import test_bodies, test_constraints, test_endings, test_hosts
from tests.openai.asking import LONG, Said, ask, chat, connect, is_error, post, user

ROOT = Path(__file__).parents[2]
ROWS = {
    "the header `Host`": "test_other_names_are_refused",
    "the request cannot be read": "test_what_is_no_json",
    "a field is wrong": "test_a_field_that_is_wrong",
    "the [constraint]": "test_a_constraint_that_becomes_slow_ends_its_call_and_no_other",
    "`request_id` belongs": "test_an_id_in_use",
    "the service asks for bearer tokens": "test_tokens",
    "the queue is full": "test_a_full_queue",
    "the request is larger": "test_a_body_too_large",
    "the caller did not read": "test_a_caller_that_does_not_read",
    "the request did not arrive": "test_a_body_that_does_not_arrive",
    "the service is starting": "test_before_the_workers_are_ready",
    "the service is shutting down": "test_draining",
    "the service shut down before": "test_draining_ends_what_takes_too_long",
    "a worker of the target was lost": "test_a_worker_that_is_lost",
    "the draft was lost": "test_a_worker_that_is_lost",
    "no server listens": "test_no_server_listens",
    "the call's own deadline": "test_a_deadline",
    "the caller cancelled": "test_a_closed_connection_frees_its_slots",
    "`Abort` named": "test_abort",
    "the service failed while it decoded": "test_a_request_that_fails",
    "decoding this request failed": "test_a_request_that_fails",
    "an error in the service itself": "test_an_error_of_our_own",
    "there is no such method": "test_no_such_path",
    "a name that is not served": "test_a_model_that_is_not_served",
}
ONLY_GRPC = ("a health check names", "a method of vLLM's engine protocol")


def test_every_row_of_the_table_has_a_test():
    rows = re.findall(
        r"^\| `[A-Z_]+` \| ([^|]*) \| (.*?) \|", (ROOT / "docs" / "errors.md").read_text(), flags=re.MULTILINE
    )
    assert len(rows) == len(ROWS) + len(ONLY_GRPC)
    for status, row in rows:
        (known,) = [beginning for beginning in (*ROWS, *ONLY_GRPC) if row.startswith(beginning)]
        assert (not re.search(r"\d{3}|reset|refused", status)) == (known in ONLY_GRPC), row
    elsewhere = (test_bodies, test_constraints, test_endings, test_hosts)
    assert set(ROWS.values()) <= globals().keys() | {name for module in elsewhere for name in vars(module)}
    said = {int(code) for status, _ in rows for code in re.findall(r"\d{3}", status)}
    assert {status for status, _ in HTTP.values()} | {404, 405, 415} == said


def test_an_id_in_use(service):
    with service.client() as client, client.stream("x", request_id="mine", **LONG) as stream:
        next(stream)
        is_error(post(service, chat(request_id="mine", max_tokens=2)), 409, "duplicate", "already in use")


def test_tokens(pair, tmp_path):
    path = tmp_path / "tokens"
    path.write_text("sesame\n")
    with serving(pair, http_port=0, auth_token_file=path) as service:
        for authorization in (
            {},
            {"authorization": "Bearer open"},
            {"authorization": "sesame"},
            {"authorization": "Bearer caf\xe9"},
        ):
            is_error(post(service, chat(), **authorization), 401, "unauthenticated", "a valid token is needed")
        is_error(ask(service, "GET", "/metrics"), 401, "unauthenticated", "a valid token")
        assert ask(service, "GET", "/health").status == 200
        known = {"authorization": "Bearer sesame"}
        assert (
            post(service, chat(max_tokens=2), **known).status == ask(service, "GET", "/metrics", **known).status == 200
        )
        assert service.metric("smc_requests_rejected_total", code="UNAUTHENTICATED", cause="unauthenticated") == 5


def test_a_full_queue(pair):
    with (
        serving(pair, EngineConfig(block=4, branches=2, max_slots=16, max_queue=1), http_port=0) as service,
        service.stub() as stub,
    ):
        calls = [stub.Generate(pb.GenerateRequest(text="x", sampling=sampling_message(LONG))) for _ in range(2)]
        until(lambda: service.backend.stats.queued == 1)
        is_error(post(service, chat(max_tokens=2)), 429, "queue_full", "requests are waiting; allowed: 1", hint=True)
        for call in calls:
            call.cancel()


def test_a_body_too_large(service):
    """A body that is too large is refused by its declared length before it is read, or while it is read; it is never
    parsed."""
    rejected = {"code": "RESOURCE_EXHAUSTED", "cause": "too_large"}
    before = service.metric("smc_requests_rejected_total", **rejected)
    is_error(
        post(service, chat("x" * 100_000)), 400, "context_length_exceeded", "more than 73728 bytes", param="messages"
    )
    assert service.metric("smc_requests_rejected_total", **rejected) == before + 1
    connection = connect(service)
    chunks = (b"x" * 8192 for _ in range(20))
    connection.request("POST", CHAT, chunks, {"content-type": "application/json"}, encode_chunked=True)
    assert connection.getresponse().status == 400
    connection.close()


@pytest.mark.parametrize("path", [CHAT, "/health", "/v1/none"])
def test_an_expectation_that_is_not_known(service, path):
    """It gets an error in JSON, and the connection takes further requests."""
    said = post(service, chat(max_tokens=1), path, expect="200-ok")
    is_error(said, 417, "invalid", f"POST {path}: expect='200-ok'; allowed: 100-continue", param=None)
    assert said.headers["content-type"].startswith("application/json") and said.headers["server"] == "smcserve"
    assert post(service, chat(max_tokens=1), expect="100-continue").status == 200


def test_a_body_that_breaks_off(service):
    """A body with malformed chunks gets status 400."""
    with socket.create_connection(("127.0.0.1", service.gateway.http_port)) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += "transfer-encoding: chunked\r\n\r\n"
        connection.sendall(head.encode() + b'5\r\n{"mes\r\nnone\r\n')
        connection.settimeout(5.0)
        assert b" 400 " in connection.recv(1000)


@pytest.mark.parametrize("levels", [MAX_NESTING, 300, 700, 990, 1500, 2500])
@pytest.mark.parametrize("field", ["input", "messages", "prompt", "metadata", "tools", "chat_template_kwargs"])
def test_nesting(service, caplog, levels, field):
    """Every API refuses bodies that are nested too deeply with status 400, and logs no error."""
    deep = "[" * levels + "]" * levels
    values = {
        "metadata": f'{{"a": {deep}}}',
        "chat_template_kwargs": f'{{"a": {deep}}}',
        "tools": f'[{{"type": "function", "name": "f", "input_schema": {{"a": {deep}}}, '
        f'"parameters": {{"a": {deep}}}}}]',
    }
    for path, body in (
        (CHAT, '"messages": [{"role": "user", "content": "x"}]'),
        (MESSAGES, '"messages": [{"role": "user", "content": "x"}]'),
        ("/v1/responses", '"input": "x"'),
        ("/v1/completions", '"prompt": "x"'),
        ("/tokenize", '"prompt": "x"'),
    ):
        fields = f'"{field}": {values.get(field, deep)}' + ("" if f'"{field}"' in body else f", {body}")
        said = post(service, f'{{"max_tokens": 1, {fields}}}'.encode(), path)
        assert said.status == 400, (path, said.data)
        assert said.json["error"]["message"] == TOO_DEEP
    assert "Traceback" not in caplog.text and not [one for one in caplog.records if one.levelname == "ERROR"]


@pytest.mark.parametrize(("path", "field"), [(CHAT, "metadata"), (MESSAGES, "chat_template_kwargs")])
def test_the_deepest_nesting_allowed(service, path, field):
    """A body of exactly `MAX_NESTING` levels is answered: the body's own, the field's, and those inside the field."""
    levels = MAX_NESTING - 2
    inside = "[" * levels + "]" * levels
    body = f'{{"max_tokens": 1, "messages": [{{"role": "user", "content": "x"}}], "{field}": {{"a": {inside}}}}}'
    assert post(service, body.encode(), path).status == 200


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
            Said(said.status, {k.lower(): v for k, v in said.headers.items()}, said.data),
            408,
            "slow_sender",
            "did not arrive within 0.3 s",
        )


@pytest.mark.parametrize("stream", [True, False])
def test_a_caller_that_does_not_read(pair, stream):
    """A caller that does not read its answer, which is many times larger than all buffers, is disconnected."""

    class Chatty:
        def __init__(self, backend) -> None:
            self._backend = backend

        async def generate(self, request):
            async with aclosing(self._backend.generate(request)) as news:
                async for output in news:
                    if output.answer is None:
                        yield replace(output, text="x" * (8 << 20))
                    else:
                        yield replace(output, answer=replace(output.answer, text="x" * (8 << 20)))

    with serving(pair, http_port=0, write_timeout=0.5, wrap=Chatty) as service, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", service.gateway.http_port))
        body = chat(stream=stream, **LONG | {"particles": 1, "max_tokens": 440 if stream else 30})
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        until(lambda: service.gateway._http._runner.server.connections)
        until(lambda: not service.gateway._http._runner.server.connections, 20.0)
        assert service.metric("smc_requests_cancelled_total", by="slow_reader") == stream
        service.wait_until_free(2.0)


def test_a_caller_that_reads_nothing_at_all(pair):
    """A caller that requests more than buffers hold and reads nothing is disconnected."""
    with serving(pair, http_port=0, write_timeout=0.5) as service, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", service.gateway.http_port))
        connection.settimeout(60.0)
        with pytest.raises(ConnectionError):
            while True:
                connection.sendall(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n" * 100)


def test_no_server_listens(pair):
    """A service that is stopped closes its port."""
    with serving(pair, http_port=0) as service:
        assert ask(service, "GET", "/health").status == 200
        service.do(service.gateway.stop())
        with pytest.raises(ConnectionRefusedError):
            ask(service, "GET", "/health")


def test_no_such_path(service):
    is_error(ask(service, "GET", "/v1/nothing"), 404, "not_found", "GET /v1/nothing: not found")
    said = ask(service, "GET", CHAT)
    is_error(said, 405, "method_not_allowed", "method not allowed")
    assert said.headers["allow"] == "POST"


def test_a_model_that_is_not_served(service):
    is_error(
        post(service, chat(model="gpt-9")),
        404,
        "model_not_found",
        "model='gpt-9'; allowed: 'demo', 'gpt-4o'",
        param="model",
    )


def test_the_log_of_a_refused_request_names_it(service, caplog):
    """By path, field and the id that the reply carries, too."""
    caplog.set_level("INFO", "smcserve.requests")
    cases = [
        (CHAT, chat(temperature=-1), "temperature"),
        (CHAT, chat(model="other"), "model"),
        ("/v1/completions", b'{"prompt": "x", "colour": 1}', "colour"),
        ("/v1/completions", b"{", None),
        (MESSAGES, chat(max_tokens=0), "max_tokens"),
        ("/v1/responses", json.dumps({"input": "x", "n" * 500: 1}).encode(), "n" * 64),
    ]
    for path, body, field in cases:
        caplog.clear()
        said = post(service, body, path)
        (line,) = [json.loads(one.getMessage()) for one in caplog.records if one.name == "smcserve.requests"]
        assert said.status >= 400 and (line["path"], line.get("field")) == (path, field)
        assert line["request_id"] == said.headers["x-request-id"] and line["cause"] == "invalid"
    caplog.clear()
    said = post(service, chat(temperature=-1, request_id="mine"))
    with service.client() as client, pytest.raises(ServiceError):
        client.generate("x", temperature=-1.0, request_id="theirs")
    lines = [json.loads(one.getMessage()) for one in caplog.records if one.name == "smcserve.requests"]
    assert [(line["path"], line["field"]) for line in lines] == [
        (CHAT, "temperature"),
        ("/smc.v1.GenerationService/Generate", "temperature"),
    ]
    assert lines[1]["request_id"] == "theirs" and said.headers["x-request-id"] == lines[0]["request_id"]


BROKEN = [
    b"\x16\x03\x01 what TLS sends to a plain port\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET /v1/models HTTP/9.9.9\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: a\r\nno colon\r\n\r\n",
    b"GET /" + b"x" * 60_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx-long: " + b"y" * 60_000 + b"\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n\r\n",
]


@pytest.mark.parametrize("data", BROKEN, ids=range(len(BROKEN)))
def test_what_is_no_http(service, data, caplog):
    """It is answered by an error in OpenAI's shape, like everything else, without what the caller sent at length."""
    with socket.create_connection(("127.0.0.1", service.gateway.http_port), timeout=60) as connection:
        connection.sendall(data)
        response = http.client.HTTPResponse(connection)
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        said = Said(response.status, headers, response.read())
    assert said.headers["content-type"].startswith("application/json") and said.headers["server"] == "smcserve"
    is_error(said, 400, "invalid", "the request cannot be read as HTTP: ")
    assert len(said.data) < 1000 and not any("Traceback" in record.getMessage() for record in caplog.records)


def test_no_reply_names_the_server_s_version(service):
    for path in ("/health", "/v1/models", "/v1/nothing", "/", "/metrics"):
        assert ask(service, "GET", path).headers["server"] == "smcserve"
    for body in (chat(max_tokens=2), chat(max_tokens=2, stream=True), b"{"):
        assert post(service, body).headers["server"] == "smcserve"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", MESSAGES])
def test_long_names_are_not_echoed(service, path):
    name, part = "n" * 60_000, {"messages": user("x"), "input": "x", "prompt": "x", "max_tokens": 2}
    bodies = [
        json.dumps({name: 1}),
        json.dumps(part | {name: "\ud800"}),
        "{" + f'"{name}": 1, "{name}": 2' + "}",
        json.dumps({"messages": [{"role": "user", "content": "x", name: 1}], "input": "x", "prompt": "x"}),
        json.dumps(part | {"model": name}),
        json.dumps(part | {"tools": [{"type": name}]}),
        json.dumps(part | {"response_format": {"type": name}}),
    ]
    for body in bodies:
        said = post(service, body.encode(), path)
        assert 400 <= said.status < 500 and len(said.data) < 4000, (said.status, body[:40], len(said.data))
        assert name[:200] not in said.data.decode(), body[:40]


class Unwritable:
    """A dialect whose writer (see `AnswerWriter`) fails for every answer."""

    prompt, id_headers = "messages", ("x-request-id",)

    def read(self, document, served):
        return replace(DIALECTS[MESSAGES].read(document, served), make_writer=lambda *_: self)

    def refusal(self, error, request_id=None):
        return refusal(error)

    def update(self, *_):
        raise ValueError("temperature=3 is what it says")

    finish = whole = update

    def error(self, body):
        return json.dumps(body).encode()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_cannot_be_written_is_no_fault_of_the_caller(service, monkeypatch, stream):
    monkeypatch.setitem(DIALECTS, CHAT, Unwritable())
    said = post(service, chat(max_tokens=2, stream=stream))
    assert said.status == 500 and said.error["code"] == "internal" and "temperature" not in said.error["message"]


def test_a_port_that_is_taken(pair, service):
    with pytest.raises(OSError, match="give another http_port"), serving(pair, http_port=service.gateway.http_port):
        pass


def test_http_calls_in_metrics_and_log(service, caplog):
    """Metrics and log include calls over HTTP, as they do those over gRPC."""
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
