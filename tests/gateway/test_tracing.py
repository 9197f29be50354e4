"""Trace spans as a collector receives them, with a collector's real gRPC service that stores them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from services.gateway.tracing import Tracing
from services.pb import generation_pb2 as pb
from tests.gateway.harness import serving
from tests.openai.asking import chat, post

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans, self.services = [], set()

    def Export(self, request, context):
        for each in request.resource_spans:
            self.services |= {a.value.string_value for a in each.resource.attributes if a.key == "service.name"}
            self.spans += [span for scope in each.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collector() -> Iterator[tuple[Collector, str]]:
    server = grpc.server(ThreadPoolExecutor(2))
    kept = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(kept, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield kept, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def test_a_call_continues_its_callers_trace(pair, monkeypatch):
    with collector() as (kept, endpoint):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        with serving(pair) as service, service.stub() as stub:
            request = pb.GenerateRequest(
                request_id="r", text="x", sampling=pb.SamplingParams(method=pb.METHOD_TARGET, max_tokens=3)
            )
            list(stub.Generate(request, metadata=(("traceparent", f"00-{TRACE}-{SPAN}-01"),)))
            request.sampling.max_tokens = -1
            with pytest.raises(grpc.RpcError):
                list(stub.Generate(request))
    whole, refused = (span for span in kept.spans if span.name == "smc.v1.GenerationService/Generate")
    parts = {span.name: span for span in kept.spans if span.parent_span_id == whole.span_id}
    attributes = {a.key: a.value.string_value or a.value.int_value for a in whole.attributes}
    assert kept.services == {"smcserve"} and len(kept.spans) == 5
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, SPAN)
    assert list(parts) == ["queue", "prefill", "decode"]
    assert (
        whole.start_time_unix_nano
        == parts["queue"].start_time_unix_nano
        < parts["decode"].end_time_unix_nano
        <= whole.end_time_unix_nano
    )
    assert (attributes["smc.request_id"], attributes["smc.method"], attributes["gen_ai.usage.output_tokens"]) == (
        "r",
        "target",
        3,
    )
    assert (whole.status.code, refused.status.code) == (0, 2) and refused.trace_id.hex() != TRACE


def test_spans_of_calls_over_http(pair, monkeypatch):
    with collector() as (kept, endpoint):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        with serving(pair, http_port=0, served_model_names=("demo",)) as service:
            assert post(service, chat(max_tokens=3, method="target")).status == 200
            assert post(service, chat(max_tokens=-1)).status == 400
            assert post(service, chat(model="other")).status == 404
    spans = [span for span in kept.spans if span.name == "POST /v1/chat/completions"]
    attributes = [{a.key: a.value.string_value or a.value.int_value for a in span.attributes} for span in spans]
    assert [each["http.response.status_code"] for each in attributes] == [200, 400, 404]
    for each in attributes:
        assert (each["http.request.method"], each["url.path"]) == ("POST", "/v1/chat/completions")
        assert each["gen_ai.response.model"] == "demo"
    (prefill,) = [span for span in kept.spans if span.name == "prefill"]
    (first,) = spans[0].events
    assert first.name == "first token"
    assert prefill.start_time_unix_nano < first.time_unix_nano <= spans[0].end_time_unix_nano


def test_tracing_off_without_collector(monkeypatch):
    """Tracing is off unless the environment names a collector and does not disable the SDK."""
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert Tracing.from_environment() is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert Tracing.from_environment() is None
